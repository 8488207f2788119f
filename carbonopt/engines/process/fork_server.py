"""A process that has imported what trials need, and forks itself for each of them.

    python -m carbonopt.engines.process.fork_server CONTROL_FD MODULE FOLDER

The study starts it once. It imports MODULE and answers {"unfit": MODULE.unfit()}: the reason why
its forks can't train, or null. Then, for each job that it receives, it forks the guard of a session
(see `guard`), which forks the ranks; a rank's exit code is what MODULE.run() returns. The process
never touches a GPU, so that every rank opens its own. It ends when the study closes the control
socket or dies; the guards end their ranks. FOLDER, the study's, is not used: it shows in the list
of processes, where forks have the names "guard" and "rank N".
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

from carbonopt.core.channel import CHANNEL_FD, GATE_FD, SPEC_FD
from carbonopt.engines.process import guard

MESSAGE_BYTES = 1 << 20
_PR_SET_NAME = 15
# A job's descriptors: status, lifeline, channel, CPU report, log, start barrier, specification.
DESCRIPTORS = 7


def main(control_fd: int, module_name: str) -> None:
    # The process dies with the study, also during the imports, when it doesn't notice that the
    # socket is closed.
    ctypes.CDLL(None).prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=control_fd)
    # Nothing that is imported is garbage, and looking for some takes a tenth of the imports' time.
    gc.disable()
    module = importlib.import_module(module_name)
    gc.enable()
    # Python warns of threads at each fork: they are OpenBLAS's and Arrow's, which are idle and made
    # for forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    # Nobody waits for the guards: they report their exit codes themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Objects that exist now are never garbage. A fork that searched them would copy their pages.
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
    """Work as a guard, and return its exit code.

    The guard reports its process id, which is also the session's, and at the end its exit code.
    """
    status, lifeline, channel, cpu_report, log, gate, spec = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _call_itself("guard")
    os.write(status, f"{os.getpid()}\n".encode())
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)

    def rank(environment: dict[str, str]) -> int:
        os.close(status)
        _call_itself(f"rank {environment.get('RANK', 0)}")
        # The descriptors have these numbers in this process.
        here = {GATE_FD: str(gate), SPEC_FD: str(spec)}
        os.environ.update(
            environment | here | ({CHANNEL_FD: str(channel)} if CHANNEL_FD in environment else {})
        )
        return int(module.run())

    code = guard.main(lifeline, channel, cpu_report, job, rank)
    os.write(status, f"{code}\n".encode())
    return code


def _call_itself(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
