"""A process that has imported what trials need, and forks itself for each of them.

    python -m carbonopt.engines.process.fork_server CONTROL_FD MODULE FOLDER

Started once by the study. It imports MODULE, answers {"unfit": MODULE.unfit()}, which is why forks of it can't train,
or null, and then, for each job that it is sent, forks the guard of a session (see `guard`), which forks the ranks; a
rank's exit code is what MODULE.run() returns. It never touches a GPU, so that every rank opens its own. It ends when
the study closes the control socket or dies; the guards see to their ranks. FOLDER, the study's, is for those who look
at the list of processes, where forks go by the names "guard" and "rank N".
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from types import ModuleType
from typing import Any

from carbonopt.core.events import CHANNEL_FD, GATE_FD, SPEC_FD
from carbonopt.engines.process import guard

MESSAGE_BYTES = 1 << 20
_PR_SET_NAME = 15
DESCRIPTORS = 6  # of a job: status, lifeline, channel, log, start barrier, specification


def main(control_fd: int, module_name: str) -> None:
    # With the study, also while it imports: that the socket is closed it hears only afterwards.
    ctypes.CDLL(None).prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=control_fd)
    gc.disable()  # nothing that is imported is garbage, and to look for some takes a tenth of the imports' time
    module = importlib.import_module(module_name)
    gc.enable()
    # Python warns of threads at each fork: they are OpenBLAS's and Arrow's, idle, and made to be forked with.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards: they say themselves how it went
    # What is here now is never garbage: no fork shall search it, and copy each page of it by that.
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"unfit": module.unfit()}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            guard.live(_lead, module, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _lead(module: ModuleType, job: dict[str, Any], descriptors: list[int]) -> int:
    """A guard's work. It says its number, which is the session's, and at its end its exit code."""
    status, lifeline, channel, log, start_barrier, spec = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _call_itself("guard")
    os.write(status, f"{os.getpid()}\n".encode())
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)

    def rank(environment: dict[str, str]) -> int:
        os.close(status)
        _call_itself(f"rank {environment.get('RANK', 0)}")
        here = {GATE_FD: str(start_barrier), SPEC_FD: str(spec)}  # by their numbers in this process
        os.environ.update(environment | here | ({CHANNEL_FD: str(channel)} if CHANNEL_FD in environment else {}))
        return int(module.run())

    code = guard.main(lifeline, channel, job, rank)
    os.write(status, f"{code}\n".encode())
    return code


def _call_itself(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
