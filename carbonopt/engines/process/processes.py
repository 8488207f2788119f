"""Processes that work for a study: started with a channel and a guard, and ended without leftovers.

`WorkProcesses` are the processes of one trial or of the preparation.
"""

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

from carbonopt.core.channel import CHANNEL_FD, CHANNEL_PATH
from carbonopt.core.errors import CarbonoptError
from carbonopt.core.events import SPOKEN, Event, Exited, Failed
from carbonopt.core.sockets import socket_address
from carbonopt.core.trial import StopReason
from carbonopt.energy.cpu_time import STUDY_PROCESSES
from carbonopt.engines.process import guard
from carbonopt.engines.process.extensions import extensions_folder

LOG_TAIL_LINES = 15
_MOST_LOG_BYTES = 2**18  # largest part that is read of a log
_LONGEST_LINE = 2**24  # bytes; events have a few thousand
_SECOND_TRAINING = Failed(
    kind="bad_input",
    text=(
        "a script must have one training, but another of its processes begins a second one; follow"
        " all of them, such as folds, by one carbonopt.script.run, or leave the lines out and give"
        " workload.quality_from."
    ),
)


class Guard(Protocol):
    """The leader of the processes' session, with the part of subprocess.Popen that is used here.

    See `carbonopt.engines.process.guard`.
    """

    pid: int

    def wait(self, timeout: float) -> int:
        """Wait for the guard and return its exit code, negative for a signal.

        Raises TimeoutExpired if it runs for longer than `timeout` seconds.
        """


def start_session(
    program: list[str],
    environment: Mapping[str, str],
    log: int,
    *descriptors: int,
    folder: str | None = None,
) -> Popen[bytes]:
    """Start a program in a session of its own.

    A Ctrl-C then reaches the study alone, which ends the program itself.

    Args:
        program: the command.
        environment: its environment.
        log: the descriptor that receives its output.
        descriptors: further descriptors that it inherits.
        folder: its working folder; None: this process's.
    """
    return Popen(
        program,
        env=environment,
        cwd=folder,
        stdin=DEVNULL,
        stdout=log,
        stderr=STDOUT,
        pass_fds=descriptors,
        start_new_session=True,
    )


def run_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules.

    It has Python's flag -P, since Python would look for every module in the working folder first: a
    datasets.py among the user's own files would be imported in place of the library. A flag is used
    because the variable PYTHONSAFEPATH would be inherited by all that a trial starts. The flag is
    left out where carbonopt itself is found in the working folder alone.
    """
    return [sys.executable, *(["-P"] if _is_found_elsewhere() else []), "-m", module, *arguments]


def _is_found_elsewhere() -> bool:
    """Return whether Python finds carbonopt outside the working folder."""
    others = [
        entry for entry in map(Path, sys.path) if not (entry.exists() and entry.samefile("."))
    ]
    # An editable install has a finder of its own, which takes no path.
    paths = (
        (finder, list(map(str, others)) if finder is PathFinder else None)
        for finder in sys.meta_path
    )
    return any(finder.find_spec("carbonopt", path) is not None for finder, path in paths)


class Listener:
    """The study's end of a channel or of a forked guard's connection.

    For channels see `carbonopt.core.events`. Reading never blocks for longer than the given time.
    With `invites`, messages come on a connection to the socket at `path`; the first connection
    carries none, and its end is the trial's end. Only one process may connect: the energy is that
    of all trainings of a trial, but the quality would be that of the last.
    """

    def __init__(self, connection: socket.socket, invites: bool = False) -> None:
        connection.setblocking(False)
        self._connection, self._buffer, self._ended = connection, b"", False
        self._inviting = contextlib.ExitStack()
        self._server: socket.socket | None = None
        self._speaker: socket.socket | None = None if invites else connection
        self._has_accepted = False
        if invites:
            # A folder that only this user can enter, and that is on this machine: the study's own
            # folder need not be.
            folder = self._inviting.enter_context(tempfile.TemporaryDirectory(prefix="carbonopt-"))
            self.path = Path(folder) / "channel"
            self._server = self._inviting.enter_context(socket.socket(socket.AF_UNIX))
            with socket_address(str(self.path)) as address:
                self._server.bind(address)
            self._server.listen()

    def read(self, timeout_s: float) -> bytes | None:
        """Return the next line; None if none came in time or the other end is `closed`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._ended:
            sources = {
                source
                for source in (self._server, self._speaker, self._connection)
                if source is not None
            }
            ready = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            if self._server in ready and self._server is not None:
                self._hang_up()
                self._speaker = self._server.accept()[0]
                if self._has_accepted:
                    second = {"event": "Failed", **_SECOND_TRAINING.model_dump()}
                    self._buffer = json.dumps(second).encode() + b"\n"
                self._has_accepted = True
            elif self._speaker in ready:
                self._hear()
            else:
                self._ended = True  # this connection carries no messages: it is closed
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
            self._buffer += b"\n"  # too long for an event: `receive` reports it as a failure
        if not data and self._speaker is self._connection:
            self._ended = True
        elif not data:
            self._hang_up()  # the program may go on

    def _hang_up(self) -> None:
        if self._speaker not in (None, self._connection):
            self._speaker.close()
            self._speaker = None

    @property
    def closed(self) -> bool:
        return self._ended and b"\n" not in self._buffer

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event of a channel; None where `read` returns None.

        A line that is no event is returned as the sender's failure.
        """
        if (line := self.read(timeout_s)) is None:
            return None
        try:
            message = json.loads(line)
            kind = SPOKEN[message.pop("event")]
            return kind.model_validate(message)  # type: ignore[return-value]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return Failed(kind="crash", text=f"what came from it is no message: {line[:80]!r}")

    def answer(self, stop: StopReason | None = None) -> None:
        """Tell the trial to go on, or to stop and why.

        If the trial has died meanwhile, nothing is raised; its exit is the next event.
        """
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
    """The processes of one trial, or of the preparation, with their channel and their log.

    Args:
        argv: the command of every rank.
        ranks: the environment variables that each rank has beside `environment`. Without `invites`,
            the first rank gets the channel's descriptor.
        environment: the environment that all ranks share.
        log: the file that receives their output.
        scratch: a folder and a pattern of names in it that are removed when all have ended, however
            they did.
        folder: their working folder; None: this process's.
        invites: whether the channel is a socket for rank 0 to connect to, whose path all of them
            get, since a program that starts the ranks passes no descriptors on.
        speaks: whether the trial's rank 0 is among them; other ranks report only how they end.
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
        self._cpu_report, cpu_report = os.pipe()
        self._listener = Listener(ours, invites=invites and speaks)
        if invites and speaks:
            ranks = [{**rank, CHANNEL_PATH: str(self._listener.path)} for rank in ranks]
        elif speaks:
            ranks = [{**ranks[0], CHANNEL_FD: str(theirs.fileno())}, *ranks[1:]]
        self._extensions, self._scratch = (
            str(extensions_folder(environment).resolve()),
            list(scratch),
        )
        job = {
            "argv": argv,
            "ranks": ranks,
            "extensions": self._extensions,
            "scratch": self._scratch,
        }
        job |= {"folder": folder, "keeps_channel": invites or not speaks}
        try:
            with log.open("ab") as output:
                self._log_begins = output.tell()
                descriptors = lifeline, theirs.fileno(), cpu_report, output.fileno()
                self._guard = self._start_guard(job, environment, *descriptors)
        except BaseException:
            os.close(self._lifeline)
            os.close(self._cpu_report)
            self._listener.close()
            raise
        finally:
            os.close(lifeline)
            os.close(cpu_report)
            theirs.close()
        self.cpu_time = STUDY_PROCESSES.add(self._guard.pid)
        self._runnable_while_stopped_s: float | None = None
        self._ended = False

    def _start_guard(
        self,
        job: dict[str, Any],
        environment: Mapping[str, str],
        lifeline: int,
        channel: int,
        cpu_report: int,
        log: int,
    ) -> Guard:
        """Start the guard as a program, which starts the ranks; the last four are descriptors."""
        to_guard = [str(lifeline), str(channel), str(cpu_report), json.dumps(job)]
        program = [sys.executable, "-I", "-S", guard.__file__, *to_guard]
        return start_session(program, environment, log, lifeline, channel, cpu_report)

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event; None if none comes in `timeout_s`. `Exited` is the last event."""
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

    def runnable_s(self) -> float:
        times = self.cpu_time.read()
        own_s = times.trials.ran_s + times.trials.waited_s
        self._runnable_while_stopped_s = own_s if self.cpu_time.is_stopped else None
        return own_s + times.study_s

    def runnable_while_stopped_s(self) -> float | None:
        return self._runnable_while_stopped_s

    def cpu_wait_fraction(self) -> float | None:
        return self.cpu_time.wait_fraction()

    def end(self, patience_s: float = guard.PATIENCE_S) -> None:
        """Kill all that is left of the processes and wait for it, so that their memory is free.

        Raises CarbonoptError if a process survives SIGKILL for `patience_s` (one stuck in the
        driver, usually).
        """
        if self._ended:
            return
        self._ended = True
        # The guard does it, since it goes on when this process is killed meanwhile. What the guard
        # left behind, if it was killed itself, is ended here.
        deadline = time.monotonic() + patience_s
        os.close(self._lifeline)
        with contextlib.suppress(TimeoutExpired):
            self._guard.wait(patience_s)
        session = self._guard.pid
        left = guard.end_session(
            session, self._extensions, self._scratch, max(1.0, deadline - time.monotonic())
        )
        self._listener.close()
        self.cpu_time.end(self._written_cpu_s())
        if left:
            raise CarbonoptError(
                f"processes {left} survive SIGKILL; see {self.log} and `ps -s {session}`."
            )

    def _written_cpu_s(self) -> float | None:
        """Return the CPU seconds that the guard has written; None if it was killed before."""
        with os.fdopen(self._cpu_report, "rb") as report:
            written = report.read() if select.select([report], [], [], 0.0)[0] else b""
        return float(written) if written else None

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log, for the user to read beside the error."""
        return "\n".join(said_since(self._log_begins, self.log).splitlines()[-lines:])


def said_since(begins: int, log: Path) -> str:
    """Return the text of a log from byte `begins` on; only the end of a long text.

    Before that byte is the output of earlier calls of the study. If the log can't be read, because
    a script has removed it, say, the text says so.
    """
    try:
        with log.open("rb") as said:
            said.seek(max(begins, log.stat().st_size - _MOST_LOG_BYTES))
            return said.read().decode(errors="replace")
    except OSError as error:
        return f"({log} can't be read: {error.strerror})"
