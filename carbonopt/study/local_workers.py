"""The local workers of one command, for a launch with several slots.

The command itself works in the first slot; its forks, the local workers, join the study in the
others. They are forked before anything is opened or started. They first wait until the command has
found that there is work for them, and then, with their devices' meters running, until there is a
study to join. They end with the command, however that ends.
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

from carbonopt.core.errors import (
    BEFORE_A_TRIAL,
    EXIT_INTERRUPTED,
    CarbonoptError,
    StudyInterrupted,
    printable,
)
from carbonopt.engines.process.guard import PR_SET_PDEATHSIG

_BEGIN, _STUDY_BEGAN = b"b", b"s"  # the messages of a command to its local workers
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class LocalWorker:
    """A local worker's own identity, in its own process."""

    slot: int
    line: int  # file descriptor of a pipe from the command

    def await_study(self, interrupted: Callable[[], bool]) -> None:
        """Wait until the command has begun or resumed the study.

        Raises:
            StudyInterrupted: Soon after `interrupted` returned True or the command has ended.
        """
        while not select.select([self.line], [], [], _LOOK_AGAIN_S)[0]:
            if interrupted():
                raise StudyInterrupted(BEFORE_A_TRIAL)
        if os.read(self.line, 1) != _STUDY_BEGAN:
            raise StudyInterrupted(BEFORE_A_TRIAL)


@dataclass(frozen=True)
class Ended:
    """A local worker that has ended."""

    slot: int
    code: int  # exit code, negative for a signal


class LocalWorkers:
    """The local workers that this process has forked; none at first."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}  # this process's ends of the pipes, by slot
        self._pids: dict[int, int] = {}  # process ids of workers that have not ended, by slot

    def fork(self, slots: int, work: Callable[[LocalWorker], object]) -> None:
        """Fork a worker for each slot from 1 on.

        Args:
            work: The function that each worker runs, and may end by SystemExit.
        """
        for slot in range(1, slots):
            line, self._lines[slot] = os.pipe()
            if (pid := os.fork()) == 0:
                for other in self._lines.values():
                    os.close(other)
                _work_and_end(LocalWorker(slot, line), work)
            os.close(line)
            self._pids[slot] = pid

    def begin(self) -> None:
        self._tell(_BEGIN)

    def study_began(self) -> None:
        self._tell(_STUDY_BEGAN)

    def _tell(self, what: bytes) -> None:
        for line in self._lines.values():
            with suppress(BrokenPipeError):  # the worker has ended, which `ended` reports
                os.write(line, what)

    def ended(self) -> Iterator[Ended]:
        """Yield the workers that have ended since the last call."""
        for slot, pid in tuple(self._pids.items()):
            if (done := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                del self._pids[slot]
                yield Ended(slot, os.waitstatus_to_exitcode(done[1]))

    @property
    def is_working(self) -> bool:
        return bool(self._pids)

    def end(self) -> None:
        """Ask the remaining workers to end, and wait until they have.

        The trials that they run are put back.
        """
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
def forked_workers(slots: int, work: Callable[[LocalWorker], object]) -> Iterator[LocalWorkers]:
    """Fork local workers, which have ended when the block is left."""
    workers = LocalWorkers()
    try:
        workers.fork(slots, work)
        yield workers
    finally:
        workers.end()


def _work_and_end(local_worker: LocalWorker, work: Callable[[LocalWorker], object]) -> NoReturn:
    code: object = None  # as sys.exit takes it
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.read(local_worker.line, 1) == _BEGIN:
            work(local_worker)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:  # before its own handler stands, the command's Ctrl-C ends it, too
        code = EXIT_INTERRUPTED
    except CarbonoptError as error:
        sys.stderr.write(f"carbonopt: {printable(str(error))}\n")
        code = error.exit_code
    except BaseException:  # noqa: BLE001 – a fork has nobody above it to whom it could be raised
        traceback.print_exc()
        code = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Not sys.exit, because a fork must not close what the command has opened.
            os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def printed_to(log: Path) -> Iterator[None]:
    """Redirect all output of this process to a file, and its standard input from /dev/null."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file, Path(os.devnull).open("rb") as nothing:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, target in enumerate((nothing, file, file)):
            os.dup2(target.fileno(), descriptor)
        # A notebook's streams write elsewhere than to these descriptors.
        sys.stdout, sys.stderr = (
            open(at, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
            for at in (1, 2)
        )
        yield
