"""The energy and time of one worker's session, as the study's ledger and budget count them.

A session is one worker's part of a call of `carbonopt run`; a call with several slots has several.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from carbonopt.analysis.remaining import remaining_time
from carbonopt.core.trial import Phase
from carbonopt.core.units import now_utc
from carbonopt.engines.engine import Engine
from carbonopt.spec.study_data import SessionLedger, StudyData, Wait
from carbonopt.storage.study_storage import Snapshot
from carbonopt.study.study_checks import CheckedStudy


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
            started_at=now_utc("milliseconds"), worker=worker, machine_share=engine.machine_share
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


def all_trials_run(trials: int | None, seen: Snapshot) -> str | None:
    """Return, in words, that all trials of a budget have been run; None: some are left.

    Args:
        trials: `budget.trials`; None: it limits no trials.
        seen: The study.
    """
    if trials is None or seen.finished_count() < trials:
        return None
    if trials == 1:
        return "the one trial of the budget has been run"
    return f"all {trials} trials of the budget have been run"


def limit_reached(checked: CheckedStudy, used_hours: float, energy_kwh: float) -> str | None:
    """Return which limit of its budget a study has reached, in words, the number of trials aside.

    Args:
        checked: The study.
        used_hours: The hours in which it has worked.
        energy_kwh: The energy that it has used, without PUE.
    """
    budget = checked.config.budget
    for unit, limit, used in (
        ("hours", budget.hours, used_hours),
        ("kWh", budget.energy_kwh, energy_kwh),
        ("kg CO2e", budget.emissions_kg_co2e, checked.emissions_kg_co2e(energy_kwh)),
    ):
        if limit is not None and used >= limit:
            return f"the budget of {limit:g} {unit} is used up"
    return None


class StudyBudget:
    """The limits of a study's budget, the number of trials aside.

    Args:
        checked: The study.
        account: The account of this worker's session.
        hours_before: Hours in which at least one worker has worked before this session; they count,
            too.
    """

    def __init__(self, checked: CheckedStudy, account: SessionAccount, hours_before: float) -> None:
        self._checked = checked
        self._account = account
        self._hours_before = hours_before

    @property
    def limits_energy(self) -> bool:
        budget = self._checked.config.budget
        return budget.energy_kwh is not None or budget.emissions_kg_co2e is not None

    @property
    def used_hours(self) -> float:
        """The hours in which the study has worked; waiting for its schedule's hours is no work."""
        return self._hours_before + (self._account.duration_s - self._account.waited_s) / 3600

    def remaining(self, data: StudyData, workers: int) -> timedelta | None:
        """Estimate how long the rest of the study takes (see `remaining_time`)."""
        energy_kwh = data.spent_kwh()
        return remaining_time(
            self._checked.config,
            data,
            self.used_hours,
            energy_kwh,
            self._checked.emissions_kg_co2e(energy_kwh),
            workers,
        )

    def limit_reached(self, energy_kwh: float) -> str | None:
        """Return which limit a study that has used this energy has reached, in words."""
        return limit_reached(self._checked, self.used_hours, energy_kwh)
