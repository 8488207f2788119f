"""The energy and time of one worker's session, and where they are stored.

A session is one worker's part of a call of `carbonopt run`; a call with several slots has several.
It is stored in its study, or among the early sessions if there is no study yet.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from carbonopt.core.errors import BadInput, MachineLost
from carbonopt.core.files import read_text, write_bytes
from carbonopt.core.refusals import first_error
from carbonopt.core.trial import Phase
from carbonopt.core.units import now_utc
from carbonopt.engines.engine import Engine
from carbonopt.spec.study_data import SessionLedger, Wait
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.study.command_outputs import command_outputs

_MAX_MIB = 8  # of an early session's ledger


class SessionStore(Protocol):
    """The interface of what stores sessions."""

    def set_session(self, ledger: SessionLedger) -> None: ...


class SessionAccount:
    """The energy and time that a worker uses outside its trials, from now on.

    The engine has begun.
    """

    def __init__(self, engine: Engine, worker: str) -> None:
        self._meter = engine.meter
        self._began_s = time.monotonic()
        self._ledger = SessionLedger(
            started_at=now_utc("milliseconds"),
            worker=worker,
            output_files=tuple(command_outputs().values()),
            machine_share=engine.machine_share,
        )
        self._ended_waits: tuple[Wait, ...] = ()
        self._wait: _OpenWait | None = None  # the wait that goes on

    @property
    def started_at(self) -> str:
        return self._ledger.started_at

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._began_s

    def store(self, storage: SessionStore) -> None:
        """Store the ledger as it is now; the meter is in GAP or in one of a trial's phases."""
        meter = self._meter
        parts, outer = meter.parts_and_outer(Phase.PREPARE, Phase.GAP, Phase.OTHER)
        readings = {"prepare": parts[Phase.PREPARE], "gap": parts[Phase.GAP], "outer": outer}
        update: dict[str, Any] = {
            "duration_s": self.duration_s,
            "waits": self._waits(parts[Phase.GAP].total_kwh),
            "other_kwh": parts[Phase.OTHER].total_kwh,
            "slurm_kwh": outer.slurm_kwh,
            "codecarbon_cpu_kwh": outer.codecarbon_cpu_kwh,
            "idle": meter.idle,
        }
        for name, reading in readings.items():
            update[f"{name}_kwh"] = reading.total_kwh
            update[f"{name}_gpu_kwh"] = reading.gpu_kwh
        self._ledger = self._ledger.model_copy(update=update)
        storage.set_session(self._ledger)

    def store_unread(self, storage: SessionStore) -> None:
        """Store for how long nothing was read, when the connection to a machine was lost.

        All machines are read together, so the other machines' energy of that time is missing, too.
        """
        duration_s = self.duration_s
        unread_s = duration_s - self._ledger.duration_s
        self._ledger = self._ledger.model_copy(
            update={"duration_s": duration_s, "unread_s": unread_s}
        )
        storage.set_session(self._ledger)

    @contextlib.contextmanager
    def stored_if_it_ends(self, storage: SessionStore) -> Iterator[None]:
        """Store what the session has used if an error or an interruption ends it in the context.

        The study needs that energy even if it has not begun.
        """
        try:
            yield
        except MachineLost:  # its meter can't be read any more
            self.store_unread(storage)
            raise
        except BaseException:
            self.store(storage)
            raise

    @contextlib.contextmanager
    def stored_after(self, storage: SessionStore) -> Iterator[None]:
        """Store what the session has used when the context ends, with an error or without."""
        with self.stored_if_it_ends(storage):
            yield
        self.store(storage)

    @property
    def waits(self) -> bool:
        return self._wait is not None

    @property
    def waited_s(self) -> float:
        """The seconds that this session has waited for the hours of its schedule."""
        waited_s = sum(wait.duration_s for wait in self._ended_waits)
        return waited_s + (0.0 if self._wait is None else time.monotonic() - self._wait.began_s)

    def begin_wait(self, storage: SessionStore, expected_saving: float | None) -> None:
        """Begin a wait for the hours of the schedule, unless one goes on already.

        Args:
            expected_saving: as that of the planned start.
        """
        if self._wait is None:
            self.store(storage)
            before_kwh = self._ledger.gap_kwh
            self._wait = _OpenWait(
                now_utc("milliseconds"), time.monotonic(), before_kwh, expected_saving
            )
            self.store(storage)  # the wait itself, so that it isn't lost if the process is killed

    def end_wait(self, storage: SessionStore) -> None:
        if self._wait is not None:
            self.store(storage)
            self._wait, self._ended_waits = None, self._ledger.waits

    def _waits(self, gap_kwh: float) -> tuple[Wait, ...]:
        if self._wait is None:
            return self._ended_waits
        return *self._ended_waits, self._wait.until_now(gap_kwh)


@dataclass(frozen=True)
class _OpenWait:
    """A wait that goes on.

    Args:
        started_at: when it began; ISO 8601, UTC.
        began_s: the same by the monotonic clock.
        before_kwh: the session's energy of phase GAP until then.
        expected_saving: the share of the emissions that it was expected to save then, or None.
    """

    started_at: str
    began_s: float
    before_kwh: float
    expected_saving: float | None

    def until_now(self, gap_kwh: float) -> Wait:
        return Wait(
            started_at=self.started_at,
            duration_s=time.monotonic() - self.began_s,
            energy_kwh=gap_kwh - self.before_kwh,
            expected_saving=self.expected_saving,
        )


class EarlySessions:
    """The ledgers of calls that ended while they prepared a study, before it was stored.

    What they have prepared is used by the call that begins the study, so that their energy is its
    cost. They are in a folder of the study's, which is gone once they are stored with it. Each
    worker has a file of its own, since all of a study's workers may end at once.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Check the ledgers before a call uses energy.

        Raises:
            BadInput: If one is damaged, or the folder is a link, whose files are not this study's.
        """
        if self._folder.is_symlink():
            raise BadInput(f"{self._folder} must be a folder, but is a link; remove it.")
        for path in self._folder.glob("*.json"):
            _read(path)

    def set_session(self, ledger: SessionLedger) -> None:
        """Store a session's ledger under its worker, as `StudyStorage.set_session` does."""
        early = ledger.model_copy(update={"before_study": True})
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{ledger.worker}.json"
        write_bytes(path, early.model_dump_json(indent=2).encode() + b"\n")

    def move_to(self, storage: StudyStorage) -> None:
        """Store the ledgers in their study. Only the call that leads it does so."""
        if not self._folder.is_dir():
            return
        known = {session.worker for session in storage.read().sessions}
        for path in sorted(self._folder.glob("*.json")):
            ledger = _read(path)
            if ledger.worker not in known:  # else a call was killed after it had stored it
                storage.set_session(ledger)
            path.unlink()
        with contextlib.suppress(OSError):  # another worker has just ended early, too
            self._folder.rmdir()


def _read(path: Path) -> SessionLedger:
    try:
        return SessionLedger.model_validate_json(read_text(path, "a call of the study", _MAX_MIB))
    except ValidationError as error:
        raise BadInput(f"{path} is damaged: {first_error(error)}; restore or remove it.") from error
