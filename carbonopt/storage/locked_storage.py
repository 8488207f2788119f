"""Waiting for an SQLite file that another program holds.

A database viewer, a backup or a copy can lock a study's file for minutes. So that nothing measured
is lost, a statement that finds the file locked is tried again until it isn't. A warning says who
holds the file. `reconnecting_storage` waits by the same rule for a database that can't be reached.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from carbonopt.core.errors import CarbonoptError, StudyInterrupted
from carbonopt.core.units import human_duration

READER_S = 20.0  # longest wait of a command that only reads
STUDY_S = 15 * 60.0  # longest wait of a study, which has trials to lose
_SAY_AFTER_S = 5.0
# Longest wait of a study that is asked to end, to store its measurements.
INTERRUPTED_S = 10.0
_TRY_S = 0.1  # wait of SQLite itself, before `Patience.held` decides
_LOOK_AGAIN_S = 0.05

_waits: ContextVar[bool] = ContextVar("waits", default=True)
_Done = TypeVar("_Done")


class StorageUnavailable(CarbonoptError):
    """Error: the storage could not be used for too long, or the caller must not wait for it."""


class StorageHeld(StorageUnavailable):
    """Error: another program has held the storage for too long."""


class Patience:
    """The rule by which the statements of one storage wait while another program holds it.

    Args:
        limit_s: the longest wait of a statement.
        warn: receives one message each time that the storage is held for some seconds.
        interrupted: returns whether the command is asked to end.
        stalled: receives one message each time that a database can't be reached for a minute.
    """

    def __init__(
        self,
        limit_s: float = READER_S,
        warn: Callable[[str], None] = lambda text: None,
        interrupted: Callable[[], bool] = lambda: False,
        stalled: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.limit_s = limit_s
        self.warn = warn
        self.interrupted = interrupted
        self.stalled = stalled
        self._held_since_s: float | None = None
        self._said = False

    def free(self) -> None:
        """Note that a statement was executed."""
        self._held_since_s = None
        self._said = False

    def held(self, file: Path, began_s: float) -> None:
        """Pause before a statement is tried again, or raise why it isn't.

        Args:
            file: the storage's file.
            began_s: the time when the statement was first tried, by the monotonic clock.

        Raises:
            StorageHeld: if the statement has waited for too long, or must not wait (see
                `without_waiting`).
            StudyInterrupted: if it has waited for some seconds and the command is asked to end.
        """
        now_s = time.monotonic()
        if self._held_since_s is None:
            self._held_since_s = now_s
        if not self._said and now_s - self._held_since_s > _SAY_AFTER_S:
            self._said = True
            self.warn(
                f"the storage {file} is held by {_holders(file)}; waiting until it is free, nothing"
                " is lost."
            )
        if not may_wait():
            raise StorageHeld(f"the storage {file} is held by {_holders(file)}.")
        if now_s - began_s > INTERRUPTED_S and self.interrupted():
            what = f"interrupted while the storage {file} was held by {_holders(file)}"
            raise StudyInterrupted(
                f"{what}; what was stored before counts; run the same command again to resume."
            )
        if now_s - began_s > self.limit_s:
            held = (
                f"the storage {file} has been held for {human_duration(self.limit_s)} by"
                f" {_holders(file)}"
            )
            raise StorageHeld(f"{held}; close it there, then type the same command again.")
        time.sleep(_LOOK_AGAIN_S)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Let statements within the context fail silently where the storage can't be used now.

    This is for data that can be stored later as well.
    """
    token = _waits.set(False)
    try:
        with suppress(StorageUnavailable):
            yield
    finally:
        _waits.reset(token)


def may_wait() -> bool:
    """Return whether a statement may wait; False in `without_waiting`."""
    return _waits.get()


def sqlite_arguments(patience: Patience) -> dict[str, Any]:
    """Return the arguments of `sqlite3.connect` for a connection whose statements wait."""
    return {"timeout": _TRY_S, "factory": partial(_opened, patience)}


def _opened(patience: Patience, *arguments: Any, **options: Any) -> "_Connection":
    options.pop("factory", None)
    connection = _Connection(*arguments, **options)
    connection.patience = patience
    return connection


class _Connection(sqlite3.Connection):
    patience: Patience

    def cursor(self, *_: Any) -> "_Cursor":  # type: ignore[override]
        return super().cursor(_Cursor)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        return self.cursor().execute(*arguments)

    def commit(self) -> None:
        self.patiently(super().commit)

    def patiently(self, act: Callable[[], _Done]) -> _Done:
        """Call `act` again and again while the file is locked.

        SQLite keeps the transaction unchanged meanwhile.
        """
        began_s = time.monotonic()
        while True:
            try:
                done = act()
            except sqlite3.OperationalError as error:
                if not _is_locked(error):
                    raise
                self.patience.held(self._file(), began_s)
            except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
                raise sqlite3.DatabaseError("its schema is no text in UTF-8") from error
            else:
                self.patience.free()
                return done

    def _file(self) -> Path:
        (_, _, file), *_ = super().cursor().execute("PRAGMA database_list").fetchall()
        return Path(file)


class _Cursor(sqlite3.Cursor):
    connection: _Connection

    def execute(self, *arguments: Any) -> "_Cursor":
        execute = partial(super().execute, *arguments)
        return self.connection.patiently(execute)  # type: ignore[return-value]

    def executemany(self, *arguments: Any) -> "_Cursor":
        """Execute a statement for each row; the first row locks the file before any is written."""
        execute = partial(super().executemany, *arguments)
        return self.connection.patiently(execute)  # type: ignore[return-value]


def _is_locked(error: sqlite3.OperationalError) -> bool:
    code = error.sqlite_errorcode
    # Waiting doesn't help a snapshot that is out of date: its transaction must begin again.
    return code & 0xFF == sqlite3.SQLITE_BUSY and code != sqlite3.SQLITE_BUSY_SNAPSHOT


def _holders(file: Path) -> str:
    """Name the processes that hold a lock on a file, as far as this user may see them."""
    processes = []
    with suppress(OSError):
        status = file.stat()
        mark = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            # See proc(5): number, class, kind, access, process, file, range.
            fields = line.replace("-> ", "").split()
            pid = int(fields[4])
            if fields[5] == mark and pid not in (os.getpid(), -1):
                processes.append(f"process {pid} ({_command(pid)})")
    return " and ".join(dict.fromkeys(processes)) or "another program"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "another user's"
