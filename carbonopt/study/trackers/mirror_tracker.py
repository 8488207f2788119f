"""The base of trackers that have the same run for a trial in all commands of a study.

Runs are found again by the study's identity. A run is compared with the trial's record when the
trial ends, so that what an earlier command could not send is sent by the next one, and nothing is
there twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trackers.tracker import Tracker

PREFIX = "carbonopt/"  # of the metrics that are not qualities


@dataclass(frozen=True)
class RunSettings:
    """The facts of a trial that are known when it starts."""

    number: int
    attempt: int
    params: dict[str, Any]  # by name, with the seed
    started_at: str | None  # of the attempt; ISO 8601, UTC; None: not known

    @classmethod
    def of(cls, trial: TrialSpec | TrialRecord, started_at: str | None) -> "RunSettings":
        repeat = {} if trial.repeat_of is None else {"repeat_of": trial.repeat_of}
        params = {**trial.params.as_record(), "seed": trial.seed, **repeat}
        number = trial.trial if isinstance(trial, TrialRecord) else trial.number
        return cls(number, trial.attempt, params, started_at)


@dataclass
class MirrorRun:
    """A trial's run in a tracker."""

    key: str  # the tracker's own name of the run
    has_settings: bool = True  # False: its parameters could not be sent
    # the quality at each step that was sent; None: it was not finite
    points: dict[int, float | None] = field(default_factory=dict)
    ended_attempt: int | None = None  # the attempt whose end was sent; None: none was


class MirrorTracker(Tracker, ABC):
    """The base class of trackers that have the same runs in all commands of a study."""

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._runs: dict[int, MirrorRun] = {}  # by the trial's number
        self._settings: dict[int, RunSettings] = {}  # of the trials that this command has started

    @property
    def study(self) -> StudyData:
        """The study as this command has found it."""
        return self._study

    def study_began(self, data: StudyData) -> None:
        self._study = data
        self._runs = self.find_runs()

    def earlier_trial(self, record: TrialRecord) -> None:
        run = self._runs.get(record.trial)
        if not self._joins and (run is None or run.ended_attempt != record.attempt):
            self.trial_ended(record)

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        settings = self._settings[spec.number] = RunSettings.of(spec, started_at)
        self._runs[spec.number] = self.begin_run(settings, self._runs.get(spec.number))

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        if number not in self._settings:  # its start was dropped from a full queue
            return
        run = self._runs[number]
        if any(step >= point.step for step in run.points):  # the trial has begun again
            run = self._replace(self._settings[number])
        self._send(run, [point])

    def trial_ended(self, record: TrialRecord) -> None:
        run, settings = self._runs.get(record.trial), RunSettings.of(record, record.started_at)
        measured = {point.step: point.value for point in record.evals}
        if run is None or not run.has_settings:
            run = self._runs[record.trial] = self.begin_run(settings, run)
        elif any(step not in measured or measured[step] != run.points[step] for step in run.points):
            run = self._replace(settings)
        self._send(run, [point for point in record.evals if point.step not in run.points])
        self.end_run(run, record)
        if record.has_finished:
            run.ended_attempt = record.attempt

    def abandon(self) -> None:
        """Do nothing, because a call that hangs does so in a daemon thread."""

    def _send(self, run: MirrorRun, points: list[EvalPoint]) -> None:
        if points:
            self.send_points(run, points)
            run.points |= {point.step: point.value for point in points}

    def _replace(self, settings: RunSettings) -> MirrorRun:
        """Begin a run anew whose points are those of an attempt that does not count."""
        self.delete_run(self._runs[settings.number])
        run = self._runs[settings.number] = self.begin_run(settings, None)
        return run

    @abstractmethod
    def find_runs(self) -> dict[int, MirrorRun]:
        """Return the runs that earlier commands of the study have made, by the trial's number."""

    @abstractmethod
    def begin_run(self, settings: RunSettings, earlier: MirrorRun | None) -> MirrorRun:
        """Begin a trial's run, or go on with the one that an earlier attempt has."""

    @abstractmethod
    def send_points(self, run: MirrorRun, points: list[EvalPoint]) -> None: ...

    @abstractmethod
    def end_run(self, run: MirrorRun, record: TrialRecord) -> None:
        """End a run; if the trial has not finished, it was interrupted and will be run again."""

    @abstractmethod
    def delete_run(self, run: MirrorRun) -> None: ...


def point_metrics(point: EvalPoint, data: StudyData) -> dict[str, float]:
    """Return the metrics of an evaluation; values that are not known or not finite are left out.

    Energies are in kWh without PUE, emissions in kg CO2e with it, both from the training's begin.
    """
    train_kwh = point.train_energy_kwh
    metrics = {
        data.config.quality.name: point.value,
        **point.other_qualities,
        f"{PREFIX}train_kwh": train_kwh,
        f"{PREFIX}emissions_kg_co2e": None
        if train_kwh is None
        else data.emissions_kg_co2e(train_kwh),
        f"{PREFIX}tokens": point.tokens,
    }
    return _known(metrics.items())


def record_metrics(record: TrialRecord, data: StudyData) -> dict[str, float]:
    """Return the metrics of a trial at its end: energies in kWh, durations in s, emissions.

    What is null in an export, because it is not known, is left out.
    """
    exported = record.as_exported(is_replay=data.provenance.is_replay)
    metrics: dict[str, float | None] = {
        record.quality.name: record.value,
        f"{PREFIX}emissions_kg_co2e": record.emissions_kg_co2e,
        f"{PREFIX}peak_memory_gib": record.peak_memory_gib,
        f"{PREFIX}gpu_utilisation": record.gpu_utilisation,
        f"{PREFIX}cpu_wait_fraction": record.cpu_wait_fraction,
    }
    for quantity, unit in (("energy_kwh", "kwh"), ("duration_s", "s")):
        parts = exported[quantity] or {}
        metrics |= {f"{PREFIX}{name}_{unit}": value for name, value in parts.items()}
    if record.earlier_attempts_energy_kwh:
        metrics[f"{PREFIX}earlier_attempts_kwh"] = record.earlier_attempts_energy_kwh
    return _known(metrics.items())


def study_metrics(data: StudyData) -> dict[str, float]:
    """Return the metrics of the whole study: what all its trials and attempts have used."""
    spent_kwh = data.spent_kwh()
    return {
        f"{PREFIX}study_kwh": spent_kwh,
        f"{PREFIX}study_emissions_kg_co2e": data.emissions_kg_co2e(spent_kwh),
        f"{PREFIX}trials": float(len(data.records)),
    }


def _known(metrics: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics if value is not None}
