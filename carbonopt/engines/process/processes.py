"""Processes that work for a study: started with a channel and a guard, watched, and ended without leftovers."""

import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any, Protocol

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.events import CHANNEL_FD, CHANNEL_PATH, SPOKEN, Event, Exited, Failed
from carbonopt.core.trial import StopReason
from carbonopt.engines.process import guard
from carbonopt.engines.process.extensions import extensions_folder

LOG_TAIL_LINES = 15
_MOST_LOG_BYTES = 2**18  # that are read of a log
_LONGEST_LINE = 2**24  # bytes; events have a few thousand


class Guard(Protocol):
    """The leader of the processes' session (see `carbonopt.engines.process.guard`), as subprocess.Popen has it."""

    pid: int

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal. Raises TimeoutExpired if it goes on for longer than these seconds."""


def start_session(program: list[str], environment: Mapping[str, str], log: int, *descriptors: int) -> Popen[bytes]:
    """A program in a session of its own: a Ctrl-C reaches the study alone, which then ends it itself."""
    return Popen(
        program, env=environment, stdin=DEVNULL, stdout=log, stderr=STDOUT, pass_fds=descriptors, start_new_session=True
    )


def run_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules. With -P, since Python would look for every module in the working folder
    first: a datasets.py among the user's own files would be imported for the library. As a flag and not as
    PYTHONSAFEPATH, which all that a trial starts would inherit. Without it where carbonopt itself is found in the
    working folder alone."""
    return [sys.executable, *(["-P"] if _is_found_elsewhere() else []), "-m", module, *arguments]


def _is_found_elsewhere() -> bool:
    """Whether carbonopt would be found if Python didn't look into the working folder."""
    others = [entry for entry in map(Path, sys.path) if not (entry.exists() and entry.samefile("."))]
    # Installed as editable it is found by a finder of its own, which takes no path.
    paths = ((finder, list(map(str, others)) if finder is PathFinder else None) for finder in sys.meta_path)
    return any(finder.find_spec("carbonopt", path) is not None for finder, path in paths)


class Listener:
    """The study's end of a channel (see `carbonopt.core.events`) or of a forked guard's connection. It never blocks for
    longer than it was told to. With `invites` nothing is said on the connection itself, whose end is the trial's, but
    on one that is made to the socket at `path`."""

    def __init__(self, connection: socket.socket, invites: bool = False) -> None:
        connection.setblocking(False)
        self._connection, self._buffer, self._ended = connection, b"", False
        self._inviting = contextlib.ExitStack()
        self._server: socket.socket | None = None
        self._speaker: socket.socket | None = None if invites else connection
        if invites:
            # A folder that only this user can enter; the study's own can have a path that is too long for a socket.
            folder = self._inviting.enter_context(tempfile.TemporaryDirectory(prefix="carbonopt-"))
            self.path = Path(folder) / "channel"
            self._server = self._inviting.enter_context(socket.socket(socket.AF_UNIX))
            self._server.bind(str(self.path))
            self._server.listen()

    def read(self, timeout_s: float) -> bytes | None:
        """The next line, or None: none came in time, or the other end is closed (see `closed`)."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._ended:
            sources = {source for source in (self._server, self._speaker, self._connection) if source is not None}
            ready = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            if self._server in ready and self._server is not None:
                self._hang_up()
                self._speaker = self._server.accept()[0]
            elif self._speaker in ready:
                self._hear()
            else:
                self._ended = True  # nothing is said on it: it is closed
        if self.closed:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _hear(self) -> None:
        assert self._speaker is not None
        try:
            data = self._speaker.recv(65536)
        except ConnectionError:
            data = b""
        self._buffer += data
        if len(self._buffer) > _LONGEST_LINE and b"\n" not in self._buffer:
            self._buffer += b"\n"  # is no event: `receive` says so
        if not data and self._speaker is self._connection:
            self._ended = True
        elif not data:
            self._hang_up()  # the program may go on, or another may speak for it

    def _hang_up(self) -> None:
        if self._speaker not in (None, self._connection):
            self._speaker.close()
            self._speaker = None

    @property
    def closed(self) -> bool:
        return self._ended and b"\n" not in self._buffer

    def receive(self, timeout_s: float) -> Event | None:
        """The next line of a channel; None as `read` has it. What is no event is the failure of who said it."""
        if (line := self.read(timeout_s)) is None:
            return None
        try:
            message = json.loads(line)
            return SPOKEN[message.pop("event")].model_validate(message)  # type: ignore[return-value]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return Failed(kind="crash", text=f"what came from it is no message: {line[:80]!r}")

    def answer(self, stop: StopReason | None = None) -> None:
        """Go on, or stop and why. A trial that died meanwhile can't hear it; its exit is the next event."""
        if self._speaker is None:
            return
        try:
            self._speaker.sendall(json.dumps({"stop": stop}).encode() + b"\n")
        except ConnectionError:
            self._ended |= self._speaker is self._connection
            self._hang_up()

    def close(self) -> None:
        self._hang_up()
        self._inviting.close()
        self._connection.close()


class WorkProcesses:
    """The processes of one trial (or of the preparation), as one thing: a channel, a log, an end.

    Args:
        argv: the command of every rank, whose output goes to `log`.
        ranks: what each has in its environment beside `environment`; the first one gets the channel.
        scratch: a folder and a pattern of what in it is removed when all have ended, however they did.
        folder: in which they run; None: in this process's.
        invites: the first rank's channel is a socket that whoever speaks for the trial connects to, since a program
            that starts the ranks passes no descriptors on.
        speaks: whether the trial's rank 0 is among them; of others nothing is heard but how they end.
    """

    def __init__(
        self,
        argv: list[str],
        ranks: list[dict[str, str]],
        environment: Mapping[str, str],
        log: Path,
        scratch: Sequence[str] = (),
        folder: str | None = None,
        invites: bool = False,
        speaks: bool = True,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._listener = Listener(ours, invites=invites and speaks)
        if invites and speaks:
            ranks = [{**rank, CHANNEL_PATH: str(self._listener.path)} for rank in ranks]
        elif speaks:
            ranks = [{**ranks[0], CHANNEL_FD: str(theirs.fileno())}, *ranks[1:]]
        self._extensions, self._scratch = str(extensions_folder(environment).resolve()), list(scratch)
        job = {"argv": argv, "ranks": ranks, "extensions": self._extensions, "scratch": self._scratch}
        job |= {"folder": folder, "keeps_channel": invites or not speaks}
        try:
            with log.open("ab") as output:
                self._log_begins = output.tell()
                self._guard = self._start_guard(job, environment, lifeline, theirs.fileno(), output.fileno())
        except BaseException:
            os.close(self._lifeline)
            self._listener.close()
            raise
        finally:
            os.close(lifeline)
            theirs.close()
        self._ended = False

    def _start_guard(
        self, job: dict[str, Any], environment: Mapping[str, str], lifeline: int, channel: int, log: int
    ) -> Guard:
        """A program of its own, and its ranks with it. The last three are descriptors."""
        program = [sys.executable, "-I", "-S", guard.__file__, str(lifeline), str(channel), json.dumps(job)]
        return start_session(program, environment, log, lifeline, channel)

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None after `timeout_s` without one. After `Exited` nothing comes."""
        deadline = time.monotonic() + timeout_s
        if (event := self._listener.receive(timeout_s)) is not None or not self._listener.closed:
            return event
        try:
            code = self._guard.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            return None  # rank 0 closed its channel and is still on its way out
        return Exited(code=128 - code if code < 0 else code)

    def answer(self, stop: StopReason | None = None) -> None:
        self._listener.answer(stop)

    def end(self, patience_s: float = guard.PATIENCE_S) -> None:
        """Kills whatever is left of them and waits until it is gone, so that the next trial finds free memory. Raises
        CarbonoptError if a process survives SIGKILL for `patience_s` (one stuck in the driver, usually)."""
        if self._ended:
            return
        self._ended = True
        # The guard does it, since it goes on when this process is killed meanwhile; after it, what it didn't live to.
        deadline = time.monotonic() + patience_s
        os.close(self._lifeline)
        with contextlib.suppress(TimeoutExpired):
            self._guard.wait(patience_s)
        session = self._guard.pid
        left = guard.end_session(session, self._extensions, self._scratch, max(1.0, deadline - time.monotonic()))
        self._listener.close()
        if left:
            raise CarbonoptError(f"processes {left} survive SIGKILL; see {self.log} and `ps -s {session}`.")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log, for the user to read beside the error."""
        return "\n".join(said_since(self._log_begins, self.log).splitlines()[-lines:])


def said_since(begins: int, log: Path) -> str:
    """What stands in a log from this byte on, as it is appended to and has earlier calls of the study before that; of
    much, the end. A script can have removed it."""
    try:
        with log.open("rb") as said:
            said.seek(max(begins, log.stat().st_size - _MOST_LOG_BYTES))
            return said.read().decode(errors="replace")
    except OSError as error:
        return f"({log} can't be read: {error.strerror})"
