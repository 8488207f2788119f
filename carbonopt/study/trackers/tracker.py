"""The base class of trackers, and the figures that they show of a trial."""

from datetime import UTC, datetime, timedelta
from typing import Any

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec

ENDED_WELL = (TrialState.COMPLETE, TrialState.PRUNED)


class Tracker:
    """The base class of trackers, whose methods are called in the trackers' thread.

    The constructor is called before, perhaps in another thread, and `abandon` can also be called
    from the study's thread. What a tracker does not override does nothing.
    """

    name: str

    def study_began(self, data: StudyData) -> None:
        """Learn of the study, before any of its trials, as this command has found it."""

    def earlier_trial(self, record: TrialRecord) -> None:
        """Learn of a trial that has finished before this command."""

    def study_ended(self, data: StudyData) -> None:
        """Learn of the study as this command leaves it."""

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        """Learn of a trial before its processes start.

        Args:
            spec: What its processes are to do.
            started_at: When its attempt began, as in its record; ISO 8601, UTC. The tracker may
                learn of it much later, if it first sends what earlier commands could not send.
        """

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        """Learn of an evaluation, and of the trial's emissions so far."""

    def trial_ended(self, record: TrialRecord) -> None:
        """Learn of a trial that has finished, or was interrupted and will be run again."""

    def close(self) -> None:
        """Finish, at the end of the command."""

    def abandon(self) -> None:
        """End at once whatever would delay the study's end.

        Called if a method, `close` among them, failed or hangs.
        """


def point_scalars(point: EvalPoint, quality: str, emissions_kg_co2e: float) -> dict[str, float]:
    scalars = {quality: point.value, "emissions_kg_co2e": emissions_kg_co2e}
    scalars |= {name: getattr(point, name) for name in ("tokens", "train_energy_kwh")}
    return {name: value for name, value in scalars.items() if value is not None}


def end_of(record: TrialRecord) -> datetime | None:
    """Return when a trial's last attempt ended by its record; None where its begin isn't known.

    If it went on from a checkpoint, the durations are those of all attempts: this is the latest
    time at which the last one can have ended, and not later than now.
    """
    if record.span is not None:
        return record.span[1]
    if record.started_at is None:
        return None
    total_s = 0.0 if record.duration_s is None else record.duration_s.total
    begin = datetime.fromisoformat(record.started_at)
    return min(begin + timedelta(seconds=total_s + (record.standstill_s or 0.0)), datetime.now(UTC))


def outcome(record: TrialRecord) -> dict[str, Any]:
    same = {
        "state",
        "stop_reason",
        "emissions_kg_co2e",
        "peak_memory_gib",
        "gpu_utilisation",
        "cpu_wait_fraction",
    }
    outcome = record.model_dump(mode="json", include={*same, "kernels"}) | {
        record.quality.name: record.value
    }
    if record.energy_kwh:
        outcome |= {
            "train_energy_kwh": record.energy_kwh.train,
            "total_energy_kwh": record.energy_kwh.total,
        }
    if record.duration_s:
        outcome["train_duration_s"] = record.duration_s.train
    return {name: value for name, value in outcome.items() if value is not None}
