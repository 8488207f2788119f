"""Who works on a study: each call of `carbonopt run` is a worker, with an identity and a heartbeat in the storage.

One live worker at a time leads a study; any number of others join it. A second one that would lead is refused, also one
that starts in the same instant; a dead one is replaced, and its trials are taken over. Dead is a worker of this machine
as soon as its process is gone (not while it is stopped, or too busy to be heard), and one elsewhere when it was last
heard more than DEAD_AFTER_S ago by the clock of the storage's database; if it lives, it finds out in the transaction of
the next thing that it stores, which then isn't stored, and ends its trial.
A worker is heard every HEARTBEAT_S, wherever it asks whether it was interrupted, and not by a thread of its own: what
hangs isn't heard either.

Workers take turns where one must not see another's half-done work: to see what has ended, to choose the next trial and
to begin it. Whose turn it is, a lock says that its process loses when it dies: of a file beside SQLite's, else of the
database's session.
"""

import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    event,
    literal_column,
    select,
    text,
)
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.units import human_duration
from carbonopt.core.values import Frozen
from carbonopt.storage.paths import turn_file
from carbonopt.storage.url import made_by_two

HEARTBEAT_S = 5.0
DEAD_AFTER_S = 60.0  # without a heartbeat; as long as a virtual machine may stand still while it is moved
_LOOK_AGAIN_S = 0.01  # whether another worker's turn is over, of a file's lock
_WAIT_S = 1  # at most so long for the lock of a database, before the caller looks whether it was interrupted
_TAKEN = "55P03"  # PostgreSQL's code for a lock that was not free in time

# A row for each worker. Only the database's clock is used, in seconds since 1970.
_WORKERS = Table(
    "carbonopt_study_workers",
    MetaData(),
    Column("study", String(300), primary_key=True),  # both within MySQL's limit for a key
    Column("worker", String(320), key="id", primary_key=True),
    Column("joins", Boolean, nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", String(255), nullable=False),
    Column("began_at_s", Double, nullable=False),
    Column("heard_at_s", Double, nullable=False),
    Column("heartbeats", Integer, nullable=False),
)
_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",  # 1970 as a Julian day
    "postgresql": "extract(epoch from clock_timestamp())",
    **dict.fromkeys(("mysql", "mariadb"), "unix_timestamp(now(6))"),
}


class Worker(Frozen):
    """One call of `carbonopt run`."""

    id: str  # names it in records and sessions
    host: str
    pid: int
    process: str  # which process of which system had that number, for those who can see it

    @classmethod
    def this(cls) -> "Worker":
        host, pid = socket.gethostname(), os.getpid()
        return cls(id=f"{host}-{pid}-{secrets.token_hex(4)}", host=host, pid=pid, process=_process(pid))

    @property
    def is_here(self) -> bool:
        """Whether its process can be seen from here: on this machine, since it was started, and in this container."""
        return self.process.rpartition(" ")[0] == _system()


class _Row(Worker):
    """A worker, as the storage knows it now."""

    joins: bool
    began_at_s: float
    silent_s: float
    heartbeats: int

    @property
    def is_dead(self) -> bool:
        if not self.is_here:
            return self.silent_s > DEAD_AFTER_S
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # another user's, whose /proc may be hidden
        return _process(self.pid) != self.process

    def refusal(self, study: str) -> str:
        since = datetime.fromtimestamp(self.began_at_s, UTC).isoformat(timespec="seconds")
        if not self.is_here:
            advice = f"end it there (if it is dead already, this command works {DEAD_AFTER_S:g} s after it was heard)"
        elif self.silent_s > DEAD_AFTER_S:
            advice = f"let it go on (kill -CONT {self.pid}) or end it (kill -KILL {self.pid})"
        else:
            advice = f"end it (kill {self.pid})"
        who = f"process {self.pid} on {self.host} works on the study {study!r} in this storage since {since}"
        heard = f"last heard {human_duration(self.silent_s)} ago"
        return f"{who}, {heard}; wait for it, {advice}, join it (--worker), or give the study another name."


class Lease:
    """A worker's right to work on a study. While it has it, nothing is stored through this storage without it.

    Args:
        joins: whether the worker helps another one instead of leading the study.
    """

    def __init__(self, storage: RDBStorage, study: str, *, joins: bool = False) -> None:
        self._engine, self._study, self.joins = storage.engine, study, joins
        self.worker = Worker.this()
        self._clock_s = _clock_s(self._engine)
        self._heard_at_s = 0.0
        self._mine = (_WORKERS.c.study == study) & (_WORKERS.c.id == self.worker.id)

    def take(self) -> None:
        """Raises BadInput if a live worker leads the study that this one would lead: who that is, since when, and what
        to do."""
        made_by_two(lambda: _WORKERS.create(self._engine, checkfirst=True))
        with self.turn(lambda: None):
            leading = next((row for row in self._others() if not row.joins), None)
            if leading is not None and not self.joins:
                raise BadInput(leading.refusal(self._study))
            self._heard_at_s = _uptime_s()
            me = {**self.worker.model_dump(), "joins": self.joins, "study": self._study, "heartbeats": 0}
            with self._engine.begin() as connection:
                connection.execute(_WORKERS.insert().values(began_at_s=self._clock_s, heard_at_s=self._clock_s, **me))
        event.listen(self._engine, "after_cursor_execute", self._check)

    def renew(self) -> None:
        """Is heard, if that is due. Raises CarbonoptError if another worker has taken this one, which it has not heard
        of for too long, for dead."""
        now_s = _uptime_s()
        if now_s - self._heard_at_s < HEARTBEAT_S:
            return
        beat = {"heard_at_s": self._clock_s, "heartbeats": _WORKERS.c.heartbeats + 1}
        with self._engine.begin() as connection:
            connection.execute(_WORKERS.update().where(self._mine).values(beat))
        self._heard_at_s = now_s

    def _check(self, connection: Connection, *executed: Any) -> None:
        """Raises CarbonoptError if this worker has lost the study, in the transaction that writes: nobody takes it over
        before that ends. Asked earlier, this process could be stopped between the answer and the writing."""
        *_, context, _ = executed
        if not (context.isinsert or context.isupdate or context.isdelete):
            return
        if connection.execute(select(_WORKERS.c.id).where(self._mine).with_for_update(read=True)).first() is None:
            taken = f"the study {self._study!r} was taken over by another worker"
            silent = f"because this one was not heard for {human_duration(_uptime_s() - self._heard_at_s)}"
            raise CarbonoptError(f"{taken}, {silent}; what it had stored by then counts.")

    def others(self) -> frozenset[str]:
        """The live workers beside this one, by their names; dead ones have lost the study. In this worker's turn."""
        return frozenset(row.id for row in self._others())

    @contextmanager
    def turn(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Until it ends, no other worker has its turn. `waiting` is called a few times a second before it begins, and
        may raise what ends the waiting."""
        dialect = self._engine.dialect.name
        turn = _TURNS.get(dialect, _turn_by_database)
        with turn(self._engine, self._study, waiting):
            yield

    def give_back(self) -> None:
        event.remove(self._engine, "after_cursor_execute", self._check)
        # Where that can't be stored, whoever comes next finds that this process is gone, or silent.
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            connection.execute(_WORKERS.delete().where(self._mine))

    def _others(self) -> list[_Row]:
        with self._engine.begin() as connection:
            rows = [row for row in _rows(connection, self._study, self._clock_s) if row.id != self.worker.id]
            for dead in (row for row in rows if row.is_dead):
                columns = _WORKERS.c  # one that was heard meanwhile lives
                unheard = (columns.id == dead.id) & (columns.heartbeats == dead.heartbeats)
                connection.execute(_WORKERS.delete().where(unheard & (columns.study == self._study)))
        return [row for row in rows if not row.is_dead]


def living(storage: RDBStorage, study: str) -> frozenset[str]:
    """The live workers of a study, by their names, for those who only look at it."""
    engine = storage.engine
    with engine.connect() as connection:
        if not engine.dialect.has_table(connection, _WORKERS.name):
            return frozenset()
        return frozenset(row.id for row in _rows(connection, study, _clock_s(engine)) if not row.is_dead)


def _rows(connection: Connection, study: str, clock_s: Any) -> list[_Row]:
    known = (column.label(column.key) for column in _WORKERS.c if column.key in _Row.model_fields)
    silent_s = (clock_s - _WORKERS.c.heard_at_s).label("silent_s")
    rows = connection.execute(select(*known, silent_s).where(_WORKERS.c.study == study)).mappings()
    return [_Row(**row) for row in rows]


def _clock_s(engine: Engine) -> Any:
    dialect = engine.dialect.name
    if dialect not in _CLOCKS:
        raise BadInput(f"--storage must be one of {', '.join(_CLOCKS)}, but is {dialect}.")
    return literal_column(_CLOCKS[dialect], Double)


@contextmanager
def _turn_by_file(engine: Engine, study: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Of all studies in an SQLite file: whoever writes to it has it for itself anyway."""
    with turn_file(Path(str(engine.url.database))).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_LOOK_AGAIN_S)
        yield


@contextmanager
def _turn_by_postgresql(engine: Engine, study: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Those who wait are served in their order. The lock is a transaction's: one of a session, granted in the instant
    in which the waiting for it ends, would be kept though nobody knows that it is there."""
    key = {"key": int.from_bytes(_digest(study)[:8], signed=True)}
    with engine.connect() as connection:
        while True:
            try:
                connection.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_S}s'"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), key)
                break
            except OperationalError as error:
                connection.rollback()
                if _TAKEN not in (getattr(error.orig, "sqlstate", None), getattr(error.orig, "pgcode", None)):
                    raise
                waiting()
        yield


@contextmanager
def _turn_by_database(engine: Engine, study: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Of MySQL and MariaDB."""
    name = {"name": f"carbonopt {_digest(study).hex()[:48]}"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while connection.execute(text(f"SELECT GET_LOCK(:name, {_WAIT_S})"), name).scalar() != 1:
            waiting()
        try:
            yield
        finally:
            connection.execute(text("SELECT RELEASE_LOCK(:name)"), name)


_TURNS = {"sqlite": _turn_by_file, "postgresql": _turn_by_postgresql}


def _digest(study: str) -> bytes:
    return hashlib.sha256(f"carbonopt {study}".encode()).digest()


@contextmanager
def leased(storage: RDBStorage, study: str, *, joins: bool = False) -> Iterator[Lease]:
    """The study, for a worker that leads it or joins it. Raises BadInput if a live worker leads what this one would."""
    lease = Lease(storage, study, joins=joins)
    lease.take()
    try:
        yield lease
    finally:
        lease.give_back()


@cache
def _system() -> str:
    """Names what a process number is unique in: the machine since it was started, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # a sandbox that doesn't tell: then no other process is known to be here
        return secrets.token_hex(8)


def _process(pid: int) -> str:
    """Names a process; another one, with the same number later, has another name. So has a zombie."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    return "ended" if state in "ZX" else f"{_system()} {others[18]}"  # proc(5): when it was started


def _uptime_s() -> float:
    """As a monotonic clock, but it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
