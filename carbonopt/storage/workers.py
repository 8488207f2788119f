"""The workers of a study: the processes that run its trials, with identities and heartbeats.

One live worker at a time leads a study; any number of others join it. A second worker that would
lead is refused, even if it starts in the same instant; a dead one is replaced, and its trials are
taken over.

A worker on this machine is dead as soon as its process is gone, but not while it is stopped or too
busy for heartbeats. A worker elsewhere is dead when its last heartbeat is more than DEAD_AFTER_S
old by the clock of the storage's database. If it is alive after all, its next transaction that
stores something fails, and it ends its trial. Heartbeats come every HEARTBEAT_S from the places
where a worker checks whether it was interrupted, and not from a thread of its own: a worker that
hangs sends none.

If a database can't be reached, silence is no sign of death: it counts only from the time when the
server was started, and when this worker could reach it again.

A lock protects the steps in which a worker must not see another's half-done work: seeing which
trials have finished, choosing the next trial and beginning it. These steps are its turn. A process
loses the lock when it dies. With SQLite it is the lock of a file beside the database's. With
PostgreSQL it is a lock of the database, which a worker also loses with its connection: another
worker may then have its turn before the first one notices. So the database keeps the name of the
latest turn. A worker whose turn is no longer the latest can't store anything in it, and takes a new
turn.
"""

import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
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
    case,
    event,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import insert as insert_or_update
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import lock_file
from carbonopt.core.units import human_duration
from carbonopt.core.values import Frozen
from carbonopt.storage.locked_storage import without_waiting
from carbonopt.storage.paths import workers_lock_path
from carbonopt.storage.reconnecting_storage import ConnectionLost, ReconnectingStorage, sql_state
from carbonopt.storage.url import made_by_two

Done = TypeVar("Done")

HEARTBEAT_S = 5.0
# Longest time without a heartbeat: a virtual machine may stand still for so long while it is moved.
DEAD_AFTER_S = 60.0
_LOOK_AGAIN_S = 0.01  # interval between attempts to lock a file
# Longest wait for the lock of a database before the caller checks whether it was interrupted.
_WAIT_S = 1
_TAKEN = "55P03"  # PostgreSQL's code for a lock that was not free in time

# A row for each worker. Only the database's clock is used, in seconds since 1970.
_TABLES = MetaData()
_WORKERS = Table(
    "carbonopt_study_workers",
    _TABLES,
    Column("study", String(300), primary_key=True),
    Column("worker", String(320), key="id", primary_key=True),
    Column("joins", Boolean, nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process", String(255), nullable=False),
    Column("began_at_s", Double, nullable=False),
    Column("heard_at_s", Double, nullable=False),
    Column("heartbeats", Integer, nullable=False),
)
# A row for each study: the name of its latest turn.
_TURNS = Table(
    "carbonopt_study_turns",
    _TABLES,
    Column("study", String(300), primary_key=True),
    Column("turn", String(32), nullable=False),
)
_CLOCKS = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",  # 1970 as a Julian day
    "postgresql": "extract(epoch from clock_timestamp())",
}
# When the database's server was started, by its clock. SQLite has no server, so it counts as
# started long ago.
_SERVES_SINCE = {
    "sqlite": "0.0",
    "postgresql": "extract(epoch from pg_postmaster_start_time())",
}


class TurnLost(CarbonoptError):
    """Error: another worker has had its turn meanwhile, so this one has to take a new turn."""


class Worker(Frozen):
    """A worker: a process that runs a study's trials, one at a time.

    It is a call of `carbonopt run`, or one of the local workers that a call has forked.
    """

    id: str  # its name in records and sessions
    host: str
    pid: int
    process: str  # identifies the process and its system, since numbers are used again

    @classmethod
    def this(cls) -> "Worker":
        host, pid = socket.gethostname(), os.getpid()
        return cls(
            id=f"{host}-{pid}-{secrets.token_hex(4)}", host=host, pid=pid, process=_process(pid)
        )

    @property
    def is_here(self) -> bool:
        """True if its process can be seen from here.

        It must be on this machine since the machine's last start, and in this container.
        """
        return self.process.rpartition(" ")[0] == _system()


class KnownWorker(Worker):
    """A worker with its present state in the storage, whose clock all times are by."""

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
            advice = (
                f"end it there (if it is dead already, this command works {DEAD_AFTER_S:g} s after"
                " it was heard)"
            )
        elif self.silent_s > DEAD_AFTER_S:
            advice = f"let it go on (kill -CONT {self.pid}) or end it (kill -KILL {self.pid})"
        else:
            advice = f"end it (kill {self.pid})"
        who = (
            f"process {self.pid} on {self.host} works on the study {study!r} in this storage since"
            f" {since}"
        )
        heard = f"last heard {human_duration(self.silent_s)} ago"
        return (
            f"{who}, {heard}; wait for it, {advice}, join it (--worker), or give the study another"
            " name."
        )


class Lease:
    """A worker's right to work on a study.

    Between `take` and `give_back`, every write fails once another worker has taken the study over.

    Args:
        storage: the study's storage.
        study: the study's name.
        joins: whether the worker joins another one instead of leading the study.
    """

    def __init__(self, storage: ReconnectingStorage, study: str, *, joins: bool = False) -> None:
        self._storage, self._engine, self._study = storage, storage.engine, study
        self.joins = joins
        self.worker = Worker.this()
        self._clock_s = _clock_s(self._engine)
        self._heard_at_s = 0.0
        self._is_taken = False
        self._turn: str | None = None  # of the lock that is held, if it can be lost
        # live workers when `remove_dead` was last called
        self.living = frozenset({self.worker.id})
        self._mine = (_WORKERS.c.study == study) & (_WORKERS.c.id == self.worker.id)

    def take(self) -> None:
        """Take the right to work on the study.

        Raises BadInput if a live worker leads the study that this one would lead. The message says
        who that is, since when, and what to do.
        """
        make = partial(_TABLES.create_all, self._engine, checkfirst=True)
        self._storage.patiently(lambda: made_by_two(make))
        event.listen(self._engine, "after_cursor_execute", self._refuse_if_lost)
        try:
            self.in_turn(lambda: None, self._register)
        except BaseException:
            event.remove(self._engine, "after_cursor_execute", self._refuse_if_lost)
            raise
        self._is_taken = True

    def _register(self) -> None:
        leading = next((row for row in self._live_others() if not row.joins), None)
        if leading is not None and not self.joins:
            raise BadInput(leading.refusal(self._study))
        self._heard_at_s = _uptime_s()
        me = {**self.worker.model_dump(), "joins": self.joins, "study": self._study}
        clock = {"began_at_s": self._clock_s, "heard_at_s": self._clock_s, "heartbeats": 0}

        def insert() -> None:
            with self._engine.begin() as connection:
                # It may be there, if the connection was lost just after it was stored.
                connection.execute(_WORKERS.delete().where(self._mine))
                connection.execute(_WORKERS.insert().values(**me, **clock))

        self._storage.patiently(insert)

    def renew(self) -> None:
        """Store a heartbeat, if one is due.

        Raises CarbonoptError if another worker has taken the study over, because this worker's last
        heartbeat was too old.
        """
        now_s = _uptime_s()
        if now_s - self._heard_at_s < HEARTBEAT_S:
            return
        beat = {"heard_at_s": self._clock_s, "heartbeats": _WORKERS.c.heartbeats + 1}

        def store() -> None:
            with self._engine.begin() as connection:
                connection.execute(_WORKERS.update().where(self._mine).values(beat))

        # A heartbeat may be left out: workers of an SQLite file are all on this machine, where
        # others see that their process is alive. Who can't reach a database is not heard.
        with without_waiting():
            self._storage.patiently(store)
            self._heard_at_s = now_s

    def _refuse_if_lost(self, connection: Connection, *executed: Any) -> None:
        """Raise CarbonoptError if this worker has lost the study, and TurnLost for its turn.

        It is checked within the transaction that writes, before the end of which nobody can take
        the study over. If it were checked before, this process could be stopped between the check
        and the writing.
        """
        *_, context, _ = executed
        if not (context.isinsert or context.isupdate or context.isdelete):
            return
        latest = select(_TURNS.c.turn).where(_TURNS.c.study == self._study)
        mine = select(_WORKERS.c.id).where(self._mine)
        if (
            self._turn is not None
            and self._turn
            != connection.execute(latest.with_for_update(read=True)).scalar_one_or_none()
        ):
            raise TurnLost("another worker had its turn after the connection was lost.")
        if not self._is_taken:
            return
        if connection.execute(mine.with_for_update(read=True)).first() is None:
            taken = f"the study {self._study!r} was taken over by another worker"
            silent = (
                "because this one was not heard for"
                f" {human_duration(_uptime_s() - self._heard_at_s)}"
            )
            raise CarbonoptError(f"{taken}, {silent}; what it had stored by then counts.")

    def remove_dead(self) -> frozenset[str]:
        """Remove the study's dead workers; return the names of the live ones, this one's too.

        The caller holds the lock (see `lock`).
        """
        self.living = frozenset(row.id for row in self._live_others()) | {self.worker.id}
        return self.living

    def has_others(self) -> bool:
        """Return whether the study has other live workers; the storage is not changed."""
        return any(other.id != self.worker.id for other in living(self._storage, self._study))

    def in_turn(self, waiting: Callable[[], None], act: Callable[[], Done]) -> Done:
        """Do something while this worker has the lock that only one worker of the study can have.

        Args:
            waiting: called while waiting for the lock, up to 100 times a second for SQLite and once
                a second for other databases; what it raises ends the waiting.
            act: what to do; done again from its beginning if the lock was lost meanwhile.
        """
        lock = _LOCKS[self._engine.dialect.name]
        while True:
            try:
                with lock(self._storage, self._study, waiting) as self._turn:
                    return self._checked(act)
            except TurnLost:
                continue
            finally:
                self._turn = None

    def _checked(self, act: Callable[[], Done]) -> Done:
        """Do something in this worker's turn; raise TurnLost where that is why it can't be done.

        Another worker may have run a trial that this one had begun. Optuna then refuses to store
        anything of it before it writes, and so before the turn is checked.
        """
        try:
            return act()
        except UpdateFinishedTrialError:
            self._storage.patiently(self._storage.update_nothing)
            raise

    def give_back(self) -> None:
        event.remove(self._engine, "after_cursor_execute", self._refuse_if_lost)
        # If that can't be stored, the next worker finds that this process is gone, or silent.
        unstored = (SQLAlchemyError, ConnectionLost)
        with suppress(*unstored), without_waiting(), self._engine.begin() as connection:
            connection.execute(_WORKERS.delete().where(self._mine))

    def _live_others(self) -> list[KnownWorker]:
        """Remove the rows of dead workers, and return those of the other live ones."""
        return self._storage.patiently(self._remove_dead_rows)

    def _remove_dead_rows(self) -> list[KnownWorker]:
        in_contact_s = self._storage.reconnection.in_contact_s()
        with self._engine.begin() as connection:
            rows = [
                row.model_copy(update={"silent_s": min(row.silent_s, in_contact_s)})
                for row in _rows(connection, self._study)
                if row.id != self.worker.id
            ]
            for dead in (row for row in rows if row.is_dead):
                columns = _WORKERS.c  # a worker with a new heartbeat is alive and stays
                unheard = (columns.id == dead.id) & (columns.heartbeats == dead.heartbeats)
                connection.execute(
                    _WORKERS.delete().where(unheard & (columns.study == self._study))
                )
        return [row for row in rows if not row.is_dead]


def living(storage: ReconnectingStorage, study: str) -> tuple[KnownWorker, ...]:
    """Return a study's live workers in the order in which they began.

    The storage is not changed.
    """
    engine = storage.engine

    def read() -> list[KnownWorker]:
        with engine.connect() as connection:
            if not engine.dialect.has_table(connection, _WORKERS.name):
                return []
            return [row for row in _rows(connection, study) if not row.is_dead]

    alive = storage.patiently(read)
    return tuple(sorted(alive, key=lambda row: (row.began_at_s, row.id)))


def _rows(connection: Connection, study: str) -> list[KnownWorker]:
    known = (
        column.label(column.key) for column in _WORKERS.c if column.key in KnownWorker.model_fields
    )
    engine = connection.engine
    since = literal_column(_SERVES_SINCE[engine.dialect.name], Double)
    heard_at_s = case((_WORKERS.c.heard_at_s > since, _WORKERS.c.heard_at_s), else_=since)
    silent_s = (_clock_s(engine) - heard_at_s).label("silent_s")
    rows = connection.execute(select(*known, silent_s).where(_WORKERS.c.study == study)).mappings()
    return [KnownWorker(**row) for row in rows]


def _clock_s(engine: Engine) -> Any:
    dialect = engine.dialect.name
    return literal_column(_CLOCKS[dialect], Double)


@contextmanager
def _lock_by_file(
    storage: ReconnectingStorage, study: str, waiting: Callable[[], None]
) -> Iterator[None]:
    """Hold the lock of all studies in an SQLite file, which has one writer at a time anyway."""
    with lock_file(workers_lock_path(Path(str(storage.engine.url.database)))) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_LOOK_AGAIN_S)
        yield


@contextmanager
def _lock_by_postgresql(
    storage: ReconnectingStorage, study: str, waiting: Callable[[], None]
) -> Iterator[str]:
    """Hold a study's lock in PostgreSQL, which serves waiting workers in their order.

    Yields the name of the turn. The next turn waits for the end of all transactions that have found
    this turn to be the latest.
    """
    while (connection := storage.patiently(partial(_try_lock, storage.engine, study))) is None:
        waiting()
    try:
        turn = secrets.token_hex(16)
        storage.patiently(partial(_begin_turn, storage.engine, study, turn))
        yield turn
    finally:
        with suppress(ConnectionLost):  # a lock is lost with its connection
            connection.close()


def _try_lock(engine: Engine, study: str) -> Connection | None:
    """Return a connection that holds a study's lock; None if it was not free for a second.

    The lock is a transaction's, which a rollback gives back. A session's lock that is granted just
    as the waiting for it times out would stay held unnoticed.
    """
    key = {"key": int.from_bytes(_digest(study)[:8], signed=True)}
    with ExitStack() as opened:
        connection = opened.enter_context(engine.connect())
        try:
            connection.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_S}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), key)
        except OperationalError as error:
            if sql_state(error.orig) != _TAKEN:
                raise
            return None
        opened.pop_all()
        return connection


def _begin_turn(engine: Engine, study: str, turn: str) -> None:
    begin = insert_or_update(_TURNS).values(study=study, turn=turn)
    with engine.begin() as connection:
        connection.execute(
            begin.on_conflict_do_update(index_elements=[_TURNS.c.study], set_={"turn": turn})
        )


_LOCKS = {"sqlite": _lock_by_file, "postgresql": _lock_by_postgresql}


def _digest(study: str) -> bytes:
    return hashlib.sha256(f"carbonopt {study}".encode()).digest()


@contextmanager
def leased(storage: ReconnectingStorage, study: str, *, joins: bool = False) -> Iterator[Lease]:
    """Hold the right to work on a study, for a worker that leads it or joins it.

    Raises BadInput if a live worker leads the study that this one would lead.
    """
    lease = Lease(storage, study, joins=joins)
    lease.take()
    try:
        yield lease
    finally:
        lease.give_back()


@cache
def _system() -> str:
    """Return a name for the system in which process numbers are unique.

    It is made of the machine's last start and the container.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # hidden by a sandbox; then other processes count as being elsewhere
        return secrets.token_hex(8)


def _process(pid: int) -> str:
    """Return a unique name of a process; "ended" if it is gone or a zombie.

    A later process with the same number has another name.
    """
    try:
        state, *others = (
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    # Field 22 of proc(5): the time when the process was started.
    return "ended" if state in "ZX" else f"{_system()} {others[18]}"


def _uptime_s() -> float:
    """Return the time of a monotonic clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
