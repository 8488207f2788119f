"""The limits of a study's budget, and its remaining time, estimated from its trials so far."""

from collections.abc import Iterable
from datetime import timedelta
from statistics import fmean
from typing import NamedTuple

from carbonopt.core.trial import TrialRecord
from carbonopt.spec.search_settings import Budget
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData


class Limit(NamedTuple):
    """One limit of a budget, the number of trials aside, and what of it is used."""

    unit: str  # hours, kWh or kg CO2e
    limit: float
    used: float


def limits(
    budget: Budget, used_hours: float, used_kwh: float, used_kg_co2e: float
) -> tuple[Limit, ...]:
    """Return the limits that a budget has, the number of trials aside."""
    each = (
        ("hours", budget.hours, used_hours),
        ("kWh", budget.energy_kwh, used_kwh),
        ("kg CO2e", budget.emissions_kg_co2e, used_kg_co2e),
    )
    return tuple(Limit(unit, limit, used) for unit, limit, used in each if limit is not None)


def used_up(limits: Iterable[Limit]) -> str | None:
    """Return which limit is used up, in words; None: none is."""
    for unit, limit, used in limits:
        if used >= limit:
            return f"the budget of {limit:g} {unit} is used up"
    return None


def remaining_time(
    config: StudyConfig,
    data: StudyData,
    used_hours: float,
    used_kwh: float,
    used_kg_co2e: float,
    workers: int,
) -> timedelta | None:
    """Estimate how long the rest of a study takes at most; None: no limit tells, before any trial.

    The shortest of what the budget's limits leave, at the pace of the finished trials. Running and
    interrupted ones are still to do.
    """
    finished = [record for record in data.records if record.has_finished]
    budget, left_s = config.budget, list[float]()
    if budget.hours is not None:
        left_s.append(3600 * (budget.hours - used_hours))
    trial, count = mean_duration(data.records), len(_measured(data.records))
    if trial is not None:
        pace_s = trial.total_seconds() / workers
        if budget.trials is not None:
            left = budget.trials - sum(record.repeat_of is None for record in finished)
            if config.confirm is not None:
                ran = sum(record.repeat_of is not None for record in finished)
                left += config.confirm.most_repeats - ran
            left_s.append(pace_s * left)
        for limit, used in (
            (budget.energy_kwh, used_kwh),
            (budget.emissions_kg_co2e, used_kg_co2e),
        ):
            if limit is not None and used > 0:
                left_s.append(pace_s * count * (limit - used) / used)
    return timedelta(seconds=max(0.0, min(left_s))) if left_s else None


def _measured(records: tuple[TrialRecord, ...]) -> list[float]:
    return [
        record.duration_s.total
        for record in records
        if record.duration_s is not None and record.has_finished
    ]


def mean_duration(records: tuple[TrialRecord, ...]) -> timedelta | None:
    """Return the mean duration of the finished trials; None if it is known of none."""
    durations = _measured(records)
    return timedelta(seconds=fmean(durations)) if durations else None
