"""The study's side of the fork server (see `fork_server`): trials that need not import anything."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.events import Exited
from carbonopt.engines.process.fork_server import MESSAGE_BYTES
from carbonopt.engines.process.processes import WorkProcesses, run_module, said_since

_PATIENCE_S = 10.0  # with a fork that doesn't say its number
_END_S = 2.0  # that a process takes to end, once its descriptors are closed


class CannotFork(CarbonoptError):
    """There is no fork server, or its forks can't train; the message says why."""


class ForkServer:
    """Starts the process, which imports `module` while the study goes on.

    Args:
        environment: of the fork server, and so of every rank that is forked from it.
        log: takes its output.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as output:
            self._log_begins = output.tell()
            self._process = subprocess.Popen(
                run_module("carbonopt.engines.process.fork_server", str(theirs.fileno()), module, str(log.parent)),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # as for the guards: a Ctrl-C is the study's
            )
        theirs.close()
        self._log = log
        self._answer: dict[str, Any] | None = None

    def ready(self, timeout_s: float) -> bool:
        """Whether it can fork now. Returns at once when it can, else after `timeout_s`.

        Raises:
            CannotFork: if it never will.
        """
        if self._answer is None:
            if not select.select([self._control], [], [], timeout_s)[0]:
                return False
            message = self._control.recv(MESSAGE_BYTES)
            if not message:
                raise CannotFork(self._how_it_ended())
            self._answer = json.loads(message)
        if self._answer["unfit"] is not None:
            raise CannotFork(self._answer["unfit"])
        return True

    def fork(self, job: dict[str, Any], *descriptors: int) -> "ForkedGuard":
        """A guard with forked ranks, whose environment is the fork server's.

        Args:
            descriptors: of its lifeline, its channel, its output, and its ranks' start barrier and specification.

        Raises:
            CannotFork: if the fork server has died, or doesn't answer.
        """
        lifeline, channel, log, start_barrier, spec = descriptors
        status, theirs = os.pipe()
        try:
            try:
                job_text = json.dumps(job).encode()
                socket.send_fds(self._control, [job_text], [lifeline, channel, theirs, log, start_barrier, spec])
            finally:
                os.close(theirs)  # before the answer is waited for: what dies with it in hand then ends the pipe
            return ForkedGuard(status)
        except BaseException as error:
            os.close(status)
            if isinstance(error, OSError):
                raise CannotFork(self._how_it_ended()) from error
            raise

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
            # Not asked to end: it may be in the middle of an import, and has nothing to lose.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class PrelaunchedTrial:
    """A trial's processes that wait to be told which trial they are; what any trial needs they do meanwhile.

    Args:
        ranks, environment: as `WorkProcesses` takes them.
        log: takes their output until they are told.

    Raises:
        CannotFork: if the fork server has died.
    """

    def __init__(
        self, fork_server: ForkServer, ranks: list[dict[str, str]], environment: Mapping[str, str], log: Path
    ) -> None:
        log.unlink(missing_ok=True)  # of a study that was killed
        self._spec = tempfile.TemporaryFile()  # noqa: SIM115, it lives until the trial is told
        start_barrier, self._start_barrier = os.pipe()

        def start(
            job: dict[str, Any], _: Mapping[str, str], lifeline: int, channel: int, output: IO[bytes]
        ) -> ForkedGuard:
            return fork_server.fork(job, lifeline, channel, output.fileno(), start_barrier, self._spec.fileno())

        try:
            self.work = WorkProcesses([], ranks, environment, log, start=start)
        except BaseException:
            self._lift_barrier()
            raise
        finally:
            os.close(start_barrier)

    @property
    def has_died(self) -> bool:
        """They can: the trial before may leave no memory for them, not even to begin with."""
        return isinstance(self.work.receive(0.0), Exited)

    def begin(self, spec: str, log: Path) -> WorkProcesses:
        """Tells them.

        Args:
            spec: the trial's specification, as JSON.
            log: the new name of what takes their output.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.work.log = self.work.log.rename(log)
        self._spec.write(spec.encode())
        self._spec.flush()
        self._lift_barrier()
        return self.work

    def end(self) -> None:
        """For those that nobody needs any more."""
        self.work.end()
        self._lift_barrier()
        self.work.log.unlink(missing_ok=True)

    def _lift_barrier(self) -> None:
        os.close(self._start_barrier)
        self._spec.close()


class ForkedGuard:
    """A guard that is a fork of the fork server's. Implements `processes.Guard`.

    Args:
        status: the descriptor that it speaks on; the caller's again if this raises.

    Raises:
        ConnectionError: if the fork does not say its number.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self._said = b""
        self._code: int | None = None
        deadline = time.monotonic() + _PATIENCE_S
        while b"\n" not in self._said:
            if not self._hear(deadline):
                raise ConnectionError("no number")
        number, _, self._said = self._said.partition(b"\n")
        self.pid = int(number)

    def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while self._code is None:
            if not select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            if not self._hear(deadline):  # it has ended, and has said how unless it was killed
                self._code = int(self._said) if self._said.endswith(b"\n") else -signal.SIGKILL
                os.close(self._status)
        return self._code

    def _hear(self, deadline: float) -> bool:
        """Whether it said something before the deadline and its end."""
        if not select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        data = os.read(self._status, 64)
        self._said += data
        return bool(data)
