"""Who works on a study: each call of `carbonopt run` is a worker, with an identity and a heartbeat in the storage.

One live worker at a time has a study. A second one is refused, also one that starts in the same instant; a dead one is
replaced, and its trials are taken over. Dead is a worker of this machine as soon as its process is gone (not while it
is stopped, or too busy to be heard), and one elsewhere when it was last heard more than DEAD_AFTER_S ago by the clock
of the storage's database; if it lives, it finds out before the next thing that it stores, and ends its trial.
A worker is heard every HEARTBEAT_S, wherever it asks whether it was interrupted, and not by a thread of its own: what
hangs isn't heard either.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from optuna.storages import RDBStorage
from sqlalchemy import Column, Connection, Double, Integer, MetaData, String, Table, literal_column, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.units import human_duration
from carbonopt.core.values import Frozen
from carbonopt.storage.url import made_by_two

HEARTBEAT_S = 5.0
DEAD_AFTER_S = 60.0  # without a heartbeat; as long as a virtual machine may stand still while it is moved
_TRIES = 5  # to take a study over, while others do, too

# One row for each study that has a worker. Only the database's clock is used, in seconds since 1970.
_WORKERS = Table(
    "carbonopt_workers",
    MetaData(),
    Column("study", String(512), primary_key=True),
    Column("worker", String(320), key="id", nullable=False),
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


class _Holder(Worker):
    """The worker that has a study, as the storage knows it now."""

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
        return f"{who}, {heard}; wait for it, {advice}, or give the study another name."


class Lease:
    """A worker's right to work on a study. Whoever has it calls `renew` before anything that it stores."""

    def __init__(self, storage: RDBStorage, study: str) -> None:
        self._engine, self._study = storage.engine, study
        self.worker = Worker.this()
        dialect = self._engine.dialect.name
        if dialect not in _CLOCKS:
            raise BadInput(f"--storage must be one of {', '.join(_CLOCKS)}, but is {dialect}.")
        self._clock_s = literal_column(_CLOCKS[dialect], Double)
        self._heard_at_s = 0.0
        self._mine = (_WORKERS.c.study == study) & (_WORKERS.c.id == self.worker.id)

    def take(self) -> None:
        """Takes the study, also from a dead worker. Raises BadInput if a live one has it: who that is, since when, and
        what to do."""
        made_by_two(lambda: _WORKERS.create(self._engine, checkfirst=True))
        for _ in range(_TRIES):
            heard_at_s = _uptime_s()
            with self._engine.begin() as connection:
                holder = self._holder(connection)
                if holder is not None and not holder.is_dead:
                    raise BadInput(holder.refusal(self._study))
            with suppress(IntegrityError), self._engine.begin() as connection:  # else another one was quicker
                if self._put_in_place_of(holder, connection):
                    self._heard_at_s = heard_at_s
                    return
        raise CarbonoptError(f"several commands take the study {self._study!r} from each other; start one of them.")

    def renew(self) -> None:
        """Is heard, if that is due. Raises CarbonoptError if another worker has the study, which has not heard of this
        one for too long."""
        now_s = _uptime_s()
        if now_s - self._heard_at_s < HEARTBEAT_S:
            return
        beat = {"heard_at_s": self._clock_s, "heartbeats": _WORKERS.c.heartbeats + 1}
        with self._engine.begin() as connection:
            has_it = connection.execute(_WORKERS.update().where(self._mine).values(beat)).rowcount == 1
        if not has_it:
            taken = f"the study {self._study!r} was taken over by another worker"
            silent = f"because this one was not heard for {human_duration(now_s - self._heard_at_s)}"
            raise CarbonoptError(f"{taken}, {silent}; what it had stored by then counts.")
        self._heard_at_s = now_s

    def give_back(self) -> None:
        # Where that can't be stored, whoever comes next finds that this process is gone, or silent.
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            connection.execute(_WORKERS.delete().where(self._mine))

    def _holder(self, connection: Connection) -> _Holder | None:
        known = (column.label(column.key) for column in _WORKERS.c if column.key in _Holder.model_fields)
        silent_s = (self._clock_s - _WORKERS.c.heard_at_s).label("silent_s")
        rows = connection.execute(select(*known, silent_s).where(_WORKERS.c.study == self._study)).mappings()
        return next((_Holder(**row) for row in rows), None)

    def _put_in_place_of(self, dead: _Holder | None, connection: Connection) -> bool:
        """Whether nobody else was quicker. Raises IntegrityError if somebody came where nobody was."""
        me = self.worker.model_dump() | {"began_at_s": self._clock_s, "heard_at_s": self._clock_s, "heartbeats": 0}
        if dead is None:
            connection.execute(_WORKERS.insert().values(study=self._study, **me))
            return True
        columns = _WORKERS.c
        unheard = (columns.study == self._study) & (columns.id == dead.id) & (columns.heartbeats == dead.heartbeats)
        return connection.execute(_WORKERS.update().where(unheard).values(me)).rowcount == 1


@contextmanager
def leased(storage: RDBStorage, study: str) -> Iterator[Lease]:
    """The study, for this worker alone. Raises BadInput if a live worker has it."""
    lease = Lease(storage, study)
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
