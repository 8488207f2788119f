"""The study's side of the template process (see `template`): trials that need not import anything."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from carbonopt.errors import CarbonoptError
from carbonopt.launch.template import MESSAGE_BYTES

_PATIENCE_S = 10.0  # with a fork that doesn't say its number


class CannotFork(CarbonoptError):
    """There is no template process, or its forks can't train; the message says why."""


class Template:
    """Starts the process, which imports `module` while the study goes on.

    Args:
        environment: of the template, and so of every rank that is forked from it.
        log: takes its output.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "carbonopt.launch.template", str(theirs.fileno()), module, str(log.parent)],
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
                raise CannotFork(f"the process to fork from ended with code {self._process.wait()} (log: {self._log})")
            self._answer = json.loads(message)
        if self._answer["unfit"] is not None:
            raise CannotFork(self._answer["unfit"])
        return True

    def start(
        self, job: dict[str, Any], environment: Mapping[str, str], lifeline: int, channel: int, log: IO[bytes]
    ) -> "ForkedGuard":
        """A guard with forked ranks; a `StartGuard`. Their environment is the template's.

        Raises:
            CannotFork: if the template has died.
        """
        status, theirs = os.pipe()
        try:
            # Fork shares pages but not the open file's position: the log is opened to append.
            descriptors = [lifeline, channel, theirs, log.fileno()]
            socket.send_fds(self._control, [json.dumps(job).encode()], descriptors)
            return ForkedGuard(status)
        except OSError as error:
            raise CannotFork(f"the process to fork from is gone: {error.strerror}") from error
        finally:
            os.close(theirs)

    def close(self) -> None:
        """Ends the process; what was forked from it goes on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            # Not asked to end: it may be in the middle of an import, and has nothing to lose.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ForkedGuard:
    """A guard that is a fork of the template's. Implements `processes.Guard`.

    Raises:
        CannotFork: if the fork does not say its number.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self._said = b""
        self._code: int | None = None
        deadline = time.monotonic() + _PATIENCE_S
        while b"\n" not in self._said:
            if not self._hear(deadline):
                os.close(status)
                raise CannotFork("the process to fork from doesn't answer")
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
