"""The energy and time of one worker's session, as the study's ledger and budget count them.

A session is one worker's part of a call of `carbonopt run`; a call with several slots has several.
"""

import time
from typing import Any

from carbonopt.core.trial import Phase
from carbonopt.core.units import now_utc
from carbonopt.engines.engine import Engine
from carbonopt.spec.study_data import SessionLedger
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.study.study_checks import CheckedStudy


class SessionAccount:
    """The energy and time that a worker uses outside its trials, from now on.

    The engine has begun.
    """

    def __init__(self, engine: Engine, worker: str) -> None:
        self._meter = engine.meter
        self._began_s = time.monotonic()
        self._ledger = SessionLedger(
            started_at=now_utc(), worker=worker, machine_share=engine.machine_share
        )

    @property
    def started_at(self) -> str:
        return self._ledger.started_at

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._began_s

    def store(self, storage: StudyStorage) -> None:
        """Store the ledger as it is now; the meter is in GAP or in one of a trial's phases."""
        meter = self._meter
        parts, outer = meter.parts_and_outer(Phase.PREPARE, Phase.GAP, Phase.OTHER)
        readings = {"prepare": parts[Phase.PREPARE], "gap": parts[Phase.GAP], "outer": outer}
        update: dict[str, Any] = {
            "duration_s": self.duration_s,
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

    def limit_reached(self, energy_kwh: float) -> str | None:
        """Return which limit a study that has used this energy has reached, in words."""
        budget = self._checked.config.budget
        hours = self._hours_before + self._account.duration_s / 3600
        emissions = self._checked.emissions_kg_co2e(energy_kwh)
        for unit, limit, used in (
            ("hours", budget.hours, hours),
            ("kWh", budget.energy_kwh, energy_kwh),
            ("kg CO2e", budget.emissions_kg_co2e, emissions),
        ):
            if limit is not None and used >= limit:
                return f"the budget of {limit:g} {unit} is used up"
        return None
