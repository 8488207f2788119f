"""The study's side of the fork server (see `fork_server`): trials that need not import anything."""

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
from carbonopt.engines.process import guard
from carbonopt.engines.process.fork_server import MESSAGE_BYTES
from carbonopt.engines.process.processes import Listener, WorkProcesses, run_module, said_since, start_session

_PATIENCE_S = 10.0  # with a fork that doesn't say its number
_END_S = 2.0  # that a process takes to end, once its descriptors are closed


class CannotFork(CarbonoptError):
    """There is no fork server, or its forks can't train; the message says why."""


class ForkServer:
    """Starts the process, which imports `module` while the study goes on. `environment` is also that of every rank that
    is forked from it; `log` takes its output."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as output:
            self._log_begins = output.tell()
            program = run_module("carbonopt.engines.process.fork_server", str(theirs.fileno()), module, str(log.parent))
            self._process = start_session(program, environment, output.fileno(), theirs.fileno())
        theirs.close()
        self._log, self.environment = log, environment
        self._answer: dict[str, Any] | None = None

    def ready(self, timeout_s: float) -> bool:
        """Whether it can fork now. Returns at once when it can, else after `timeout_s`; raises CannotFork if it never
        will."""
        if self._answer is None:
            if not select.select([self._control], [], [], timeout_s)[0]:
                return False
            message = self._control.recv(MESSAGE_BYTES) or json.dumps({"unfit": self._how_it_ended()})
            self._answer = json.loads(message)
        if self._answer["unfit"] is not None:
            raise CannotFork(self._answer["unfit"])
        return True

    def fork(self, job: dict[str, Any], *descriptors: int) -> "ForkedGuard":
        """A guard with forked ranks; their descriptors are those of `fork_server.DESCRIPTORS` after the first. Raises
        CannotFork if the fork server has died, or doesn't answer."""
        status, theirs = socket.socketpair()
        try:
            with theirs:  # closed before the answer: what dies with it in hand then ends the connection
                socket.send_fds(self._control, [json.dumps(job).encode()], [theirs.fileno(), *descriptors])
            return ForkedGuard(status)
        except OSError as error:
            status.close()
            raise CannotFork(self._how_it_ended()) from error

    def _how_it_ended(self) -> str:
        """Why nothing comes from it any more: its exit code as the shell has it, and the last that it said."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the process to fork from doesn't answer (log: {self._log})"
        said = said_since(self._log_begins, self._log).split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        return f"the process to fork from ended with code {128 - code if code < 0 else code}: {last} (log: {self._log})"

    def close(self) -> None:
        """Ends the process; what was forked from it goes on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not asked to end: it may be in the middle of an import
        self._process.wait()


class ForkedWork(WorkProcesses):
    """Processes that wait to be told which trial they are, or what to prepare; what any trial needs they do meanwhile.
    `log` takes their output until then. Raises CannotFork as the fork server does."""

    def __init__(
        self,
        fork_server: ForkServer,
        ranks: list[dict[str, str]],
        log: Path,
        scratch: Sequence[str] = (),
        invites: bool = False,
        speaks: bool = True,
    ) -> None:
        log.unlink(missing_ok=True)  # of a study that was killed
        self._fork_server, self._spec = fork_server, tempfile.TemporaryFile()  # noqa: SIM115, until the trial is told
        self._start_barrier = os.pipe()
        try:
            super().__init__([], ranks, fork_server.environment, log, scratch, invites=invites, speaks=speaks)
        except BaseException:
            self._lift_barrier()
            raise
        finally:
            os.close(self._start_barrier[0])

    def _start_guard(self, job: dict[str, Any], _: Mapping[str, str], *descriptors: int) -> "ForkedGuard":
        return self._fork_server.fork(job, *descriptors, self._start_barrier[0], self._spec.fileno())

    @property
    def has_died(self) -> bool:
        """They can: the trial before may leave no memory for them, not even to begin with."""
        return isinstance(self.receive(0.0), Exited)

    def begin(self, spec: str, log: Path) -> None:
        """Tells them: the specification of their work, as JSON. `log` is the new name of what takes their output."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.log.rename(log)
        self._spec.write(spec.encode())
        self._spec.flush()
        self._lift_barrier()

    def end(self, patience_s: float = guard.PATIENCE_S) -> None:
        super().end(patience_s)
        if not self._spec.closed:  # they were never told: nobody needs them any more
            self._lift_barrier()
            self.log.unlink(missing_ok=True)

    def _lift_barrier(self) -> None:
        os.close(self._start_barrier[1])
        self._spec.close()


class ForkedGuard:
    """A guard that is a fork of the fork server's, which speaks on `status`. Implements `processes.Guard`. Raises
    ConnectionError if the fork does not say its number."""

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
            self._code = -signal.SIGKILL if code is None else int(code)  # it has said how it ended unless it was killed
            self._status.close()
        return self._code
