"""The workers of one command: where a launch has several slots, the command works in the first, and forks of it join
the study in the others.

They are forked before anything is opened or started, and wait: until the command has found that there is work for
them, and then, with their devices' meters running, until there is a study to join. They end with the command, however
that ends.
"""

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from carbonopt.core.errors import BEFORE_FIRST_TRIAL, StudyInterrupted
from carbonopt.engines.process.guard import PR_SET_PDEATHSIG

_BEGIN, _STUDY_BEGAN = b"b", b"s"  # what a command tells its forks
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class Member:
    """One of a crew, as it sees itself."""

    slot: int
    line: int  # a pipe from the command

    def await_study(self, interrupted: Callable[[], bool]) -> None:
        """Until the command has begun the study, or goes on with it. Raises StudyInterrupted soon after `interrupted`
        says so, or the command has ended."""
        while not select.select([self.line], [], [], _LOOK_AGAIN_S)[0]:
            if interrupted():
                raise StudyInterrupted(BEFORE_FIRST_TRIAL)
        if os.read(self.line, 1) != _STUDY_BEGAN:
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)


@dataclass(frozen=True)
class Ended:
    """A member that has."""

    slot: int
    code: int  # its exit code, negative for a signal


class Crew:
    """The forks of this process, as long as they work; none at first."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}  # by slot: the other ends
        self._pids: dict[int, int] = {}  # likewise: of those that have not ended

    def fork(self, slots: int, work: Callable[[Member], object]) -> None:
        """One for each slot from 1 on; `work` is what each does, and may end it by a SystemExit."""
        for slot in range(1, slots):
            line, self._lines[slot] = os.pipe()
            if (pid := os.fork()) == 0:
                for other in self._lines.values():
                    os.close(other)
                _work_and_end(Member(slot, line), work)
            os.close(line)
            self._pids[slot] = pid

    def begin(self) -> None:
        self._tell(_BEGIN)

    def study_began(self) -> None:
        self._tell(_STUDY_BEGAN)

    def _tell(self, what: bytes) -> None:
        for line in self._lines.values():
            with suppress(BrokenPipeError):  # its member has ended, which `ended` tells
                os.write(line, what)

    def ended(self) -> Iterator[Ended]:
        """The members that have since the last call."""
        for slot, pid in tuple(self._pids.items()):
            if (done := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                del self._pids[slot]
                yield Ended(slot, os.waitstatus_to_exitcode(done[1]))

    @property
    def is_working(self) -> bool:
        return bool(self._pids)

    def end(self) -> None:
        """Asks those that are left to end and waits until they have: trials that they run are put back."""
        for line in self._lines.values():
            os.close(line)
        self._lines = {}
        for pid in self._pids.values():
            os.kill(pid, signal.SIGTERM)
        while self._pids:
            time.sleep(_LOOK_AGAIN_S / 10)
            for _ in self.ended():
                pass


@contextmanager
def crew(slots: int, work: Callable[[Member], object]) -> Iterator[Crew]:
    """Whose members have ended when the block has."""
    members = Crew()
    try:
        members.fork(slots, work)
        yield members
    finally:
        members.end()


def _work_and_end(member: Member, work: Callable[[Member], object]) -> NoReturn:
    code: object = None  # as sys.exit has it
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.read(member.line, 1) == _BEGIN:
            work(member)
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001, a fork has nobody above it to whom it could be raised
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(
            code if isinstance(code, int) else int(code is not None)
        )  # what the command has opened is not the fork's to close


@contextmanager
def printed_to(log: Path) -> Iterator[None]:
    """What this process prints from here on goes to a file; it reads nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file, Path(os.devnull).open("rb") as nothing:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, target in enumerate((nothing, file, file)):
            os.dup2(target.fileno(), descriptor)
        yield
