"""The study's side of the fork server, whose trials need not import anything.

The other side is `fork_server`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.events import Exited
from carbonopt.energy.cpu_time import STUDY_PROCESSES
from carbonopt.engines.process import guard
from carbonopt.engines.process.fork_server import MESSAGE_BYTES
from carbonopt.engines.process.processes import (
    Listener,
    WorkProcesses,
    run_module,
    said_since,
    start_session,
)

_PATIENCE_S = 10.0  # time for a fork to report its process id
_END_S = 2.0  # time for a process to end, once its descriptors are closed


class CannotFork(CarbonoptError):
    """Error: there is no fork server, or its forks can't train; the message says why."""


# Starts the fork server with the user's Python in a way that a script can't notice: no flag and no
# entry of sys.path shows that another program was started.
_AS_SCRIPT = """\
import sys
if not sys.flags.safe_path:
    del sys.path[0]
from carbonopt.engines.process.fork_server import main
main(int(sys.argv[1]), sys.argv[2])
"""


class ForkServer:
    """A process that imports a module while the study goes on, and then forks trials from itself.

    Args:
        module: the module to import, such as `carbonopt.train.fork_template`.
        environment: the environment of the process and of every rank that is forked from it.
        log: the file that receives its output.
        python: the interpreter, as a script's command names it; None: this process's.
        folder: the working folder; None: this process's.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        log: Path,
        python: str | None = None,
        folder: str | None = None,
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as output:
            self._log_begins = output.tell()
            arguments = (str(theirs.fileno()), module, str(log.parent))
            program = run_module("carbonopt.engines.process.fork_server", *arguments)
            if python is not None:
                program = [python, "-c", _AS_SCRIPT, *arguments]
            self._process = start_session(
                program, environment, output.fileno(), theirs.fileno(), folder=folder
            )
        # Without descendants: its forks are added by themselves.
        self._cpu_time = STUDY_PROCESSES.add(self._process.pid, with_descendants=False)
        theirs.close()
        self._log, self.environment = log, environment
        self._answer: dict[str, Any] | None = None

    def ready(self, timeout_s: float) -> bool:
        """Return whether the process can fork now, after at most `timeout_s`.

        Raises CannotFork if it never will.
        """
        if self._answer is None:
            if not select.select([self._control], [], [], timeout_s)[0]:
                return False
            message = self._control.recv(MESSAGE_BYTES) or json.dumps(
                {"unfit": self._how_it_ended()}
            )
            self._answer = json.loads(message)
        if self._answer["unfit"] is not None:
            raise CannotFork(self._answer["unfit"])
        return True

    def fork(self, job: dict[str, Any], *descriptors: int) -> "ForkedGuard":
        """Fork a guard, which forks the ranks.

        `descriptors` are those that `fork_server.DESCRIPTORS` lists after the first. Raises
        CannotFork if the fork server has died, or doesn't answer.
        """
        status, theirs = socket.socketpair()
        try:
            # `theirs` is closed here before the answer is read: if its last holder dies, the
            # connection ends.
            with theirs:
                socket.send_fds(
                    self._control, [json.dumps(job).encode()], [theirs.fileno(), *descriptors]
                )
            return ForkedGuard(status)
        except OSError as error:
            status.close()
            raise CannotFork(self._how_it_ended()) from error

    def _how_it_ended(self) -> str:
        """Return why the process is silent: its exit code as in a shell, and its last output."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the process to fork from doesn't answer (log: {self._log})"
        said = said_since(self._log_begins, self._log).split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        return (
            f"the process to fork from ended with code {128 - code if code < 0 else code}: {last}"
            f" (log: {self._log})"
        )

    def close(self) -> None:
        """End the process; its forks go on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            # Killed, not asked to end: it may be in the middle of an import.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._cpu_time.end()
        self._process.wait()


class ForkedWork(WorkProcesses):
    """Forked processes that wait for the specification of their trial, or of the preparation.

    Meanwhile they do what any trial needs. `log` receives their output until `begin`. Raises
    CannotFork as the fork server does.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        ranks: list[dict[str, str]],
        log: Path,
        scratch: Sequence[str] = (),
        invites: bool = False,
        speaks: bool = True,
    ) -> None:
        log.unlink(missing_ok=True)  # left by a call that was killed
        # Until the trial is told.
        self._fork_server, self._spec = fork_server, tempfile.TemporaryFile()  # noqa: SIM115
        self._gate = os.pipe()
        try:
            super().__init__(
                [], ranks, fork_server.environment, log, scratch, invites=invites, speaks=speaks
            )
        except BaseException:
            self._lift_barrier()
            raise
        finally:
            os.close(self._gate[0])

    def _start_guard(
        self, job: dict[str, Any], _: Mapping[str, str], *descriptors: int
    ) -> "ForkedGuard":
        return self._fork_server.fork(job, *descriptors, self._gate[0], self._spec.fileno())

    @property
    def has_died(self) -> bool:
        """True if the processes have died while waiting.

        The trial before may leave too little memory for them, even to start.
        """
        return isinstance(self.receive(0.0), Exited)

    def begin(self, spec: str, log: Path) -> None:
        """Send the processes the specification of their work, as JSON.

        Their log is renamed to `log`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.log.rename(log)
        self._spec.write(spec.encode())
        self._spec.flush()
        self._lift_barrier()

    def end(self, patience_s: float = guard.PATIENCE_S) -> None:
        super().end(patience_s)
        if not self._spec.closed:  # they never began, and nobody needs them any more
            self._lift_barrier()
            self.log.unlink(missing_ok=True)

    def _lift_barrier(self) -> None:
        os.close(self._gate[1])
        self._spec.close()


class ForkedGuard:
    """A guard that was forked from the fork server, and reports on the connection `status`.

    Implements `processes.Guard`. Constructing it raises ConnectionError if the fork does not report
    its process id.
    """

    def __init__(self, status: socket.socket) -> None:
        self._status = Listener(status)
        if (number := self._status.read(_PATIENCE_S)) is None:
            raise ConnectionError("no number")
        self.pid = int(number)
        self._code: int | None = None

    def wait(self, timeout: float) -> int:
        if self._code is None:
            code = self._status.read(timeout)
            if code is None and not self._status.closed:
                raise subprocess.TimeoutExpired("guard", timeout)
            # A guard reports its exit code unless it was killed.
            self._code = -signal.SIGKILL if code is None else int(code)
            self._status.close()
        return self._code
