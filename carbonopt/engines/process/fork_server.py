"""A process that has imported what trials need, and forks itself for each of them.

    python -m carbonopt.engines.process.fork_server CONTROL_FD MODULE FOLDER

Started once by the study. It imports MODULE, answers {"unfit": why forks of it can't train, or null}, and then, for
each job that it is sent, forks the guard of a session (see `guard`), which forks the ranks. It never touches a GPU, so
that every rank opens its own. It ends when the study closes the control socket or dies; the guards see to their ranks.
FOLDER, the study's, is for those who look at the list of processes, where forks go by the names "guard" and "rank N".

MODULE has `unfit() -> str | None` and `run() -> int`, which is a rank's whole work and returns its exit code.
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
from collections.abc import Callable
from types import ModuleType
from typing import Any

from carbonopt.core.events import CHANNEL_FD, GATE_FD, SPEC_FD
from carbonopt.engines.process import guard

MESSAGE_BYTES = 1 << 20
_PR_SET_NAME = 15
DESCRIPTORS = 6  # of a job: lifeline, channel, status, log, start barrier, specification


class ForkedRank:
    """A rank: a fork of this process. Implements `guard.Rank`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)


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
            _lead(module, json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _lead(
    module: ModuleType,
    job: dict[str, Any],
    lifeline: int,
    channel: int,
    status: int,
    log: int,
    start_barrier: int,
    spec: int,
) -> None:
    """A guard's life. It says its number, which is the session's, and at its end its exit code."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _call_itself("guard")
        os.write(status, f"{os.getpid()}\n".encode())
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nowhere, 0), (log, 1), (log, 2)):
            os.dup2(source, target)

        def start(
            argv: list[str], environment: dict[str, str], its_channel: int | None, begin: Callable[[], None]
        ) -> guard.Rank:
            pid = os.fork()
            if pid == 0:
                begin()
                for mine in (lifeline, status, *((channel,) if its_channel is None else ())):
                    os.close(mine)
                # By their numbers in this process.
                environment = {**environment, GATE_FD: str(start_barrier), SPEC_FD: str(spec)}
                if its_channel is not None:
                    environment[CHANNEL_FD] = str(its_channel)
                _work(module, environment)
            return ForkedRank(pid)

        code = guard.main(lifeline, channel, job, start)
        os.write(status, f"{code}\n".encode())
    except BaseException as error:  # noqa: BLE001, nothing of this may reach the fork server's own loop
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _work(module: ModuleType, environment: dict[str, str]) -> None:
    """A rank's life."""
    code = 1
    try:
        _call_itself(f"rank {environment.get('RANK', 0)}")
        os.environ.update(environment)
        code = module.run()
    except BaseException as error:  # noqa: BLE001, as above
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call_itself(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
