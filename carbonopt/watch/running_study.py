"""The present of a study: its running trials, its workers, and the work that is left."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.analysis.remaining import remaining_time
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.units import JOULES_PER_KWH
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData, wall_clock_s
from carbonopt.storage.workers import KnownWorker

# Trials whose power is drawn, and readings of a running trial that are kept.
_POWERED_TRIALS, _KEPT_READINGS = 60, 120
_LAST_TRIALS = 5  # ended trials that are listed


class PowerSpan(NamedTuple):
    """The mean power of one trial, or probe, over a span of time."""

    begin_s: float  # seconds since 1970; of a replay, of training since the first one that is drawn
    end_s: float
    power_w: float
    of_running: bool


class _Reading(NamedTuple):
    duration_s: float
    energy_kwh: float


class PowerHistory:
    """The power of running trials between the energies that they have stored.

    The storage keeps only the latest energy of a trial. Earlier ones are known from the looks of
    this command, so that a trial which ran before it was started has one mean for that time.
    """

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], list[_Reading]] = {}  # by trial and attempt

    def note(self, running: Sequence[TrialRecord]) -> None:
        """Note the energies of the running trials; forget those of all others."""
        kept: dict[tuple[int, int], list[_Reading]] = {}
        for record in running:
            key = record.trial, record.attempt
            readings = self._readings.get(key, [])
            if record.energy_kwh is not None and record.duration_s is not None:
                latest = _Reading(record.duration_s.total, record.energy_kwh.total)
                if not readings or latest.duration_s > readings[-1].duration_s:
                    readings = [*readings, latest]
            kept[key] = _thinned(readings)
        self._readings = kept

    def spans(self, records: Iterable[TrialRecord]) -> list[PowerSpan]:
        """Return the power of the latest trials over time, by their begin."""
        spans = []
        for record in self.latest(records):
            begin_s = _begin_s(record)
            readings = self._readings.get((record.trial, record.attempt), [])
            running = record.state is TrialState.RUNNING and bool(readings)
            before = _Reading(0.0, 0.0)
            for reading in readings if running else [_whole(record)]:
                seconds = reading.duration_s - before.duration_s
                if seconds > 0:
                    joules = (reading.energy_kwh - before.energy_kwh) * JOULES_PER_KWH
                    spans.append(
                        PowerSpan(
                            begin_s + before.duration_s,
                            begin_s + reading.duration_s,
                            max(0.0, joules / seconds),
                            running,
                        )
                    )
                before = reading
        return spans

    @staticmethod
    def latest(records: Iterable[TrialRecord]) -> list[TrialRecord]:
        """Return the trials whose power is drawn, by their begin."""
        known = [record for record in records if _is_timed(record)]
        return sorted(known, key=_begin_s)[-_POWERED_TRIALS:]


def _thinned(readings: list[_Reading]) -> list[_Reading]:
    """Leave out every other reading where there are too many; the latest one stays."""
    return readings if len(readings) <= _KEPT_READINGS else readings[::-2][::-1]


def _is_timed(record: TrialRecord) -> bool:
    """Return whether the mean power since the last attempt's begin is known.

    The energy of a trial that went on from a checkpoint has earlier attempts' in it.
    """
    return None not in (record.span, record.energy_kwh) and not record.continued_at_steps


def _begin_s(record: TrialRecord) -> float:
    assert record.started_at is not None
    return datetime.fromisoformat(record.started_at).timestamp()


def _whole(record: TrialRecord) -> _Reading:
    assert record.duration_s is not None
    assert record.energy_kwh is not None
    return _Reading(record.duration_s.total, record.energy_kwh.total)


def recorded_spans(records: Iterable[TrialRecord]) -> list[PowerSpan]:
    """Return the power of a replay's trainings, laid one after another by their begin.

    Recorded runs have no time of day, and their evaluations have energy but no time.
    """
    spans: list[PowerSpan] = []
    for record in sorted(filter(_is_timed, records), key=_begin_s):
        assert record.duration_s is not None
        assert record.energy_kwh is not None
        seconds, kwh = record.duration_s.train, record.energy_kwh.train
        if seconds > 0:
            begin_s = spans[-1].end_s if spans else 0.0
            power_w = kwh * JOULES_PER_KWH / seconds
            running = record.state is TrialState.RUNNING
            spans.append(PowerSpan(begin_s, begin_s + seconds, power_w, running))
    return spans


def running_trials(data: StudyData) -> list[TrialRecord]:
    """Return the trials that run now."""
    return [record for record in data.records if record.state is TrialState.RUNNING]


def trial_left_s(record: TrialRecord) -> float | None:
    """Estimate how long a running trial's training still takes, at the pace of its steps so far.

    None: nothing is known of its pace yet.
    """
    if record.duration_s is None or not record.steps_done or record.total_steps is None:
        return None
    pace_s = (record.duration_s.train + record.duration_s.eval) / record.steps_done
    return max(0.0, pace_s * (record.total_steps - record.steps_done))


def work_left(
    data: StudyData, workers: Sequence[KnownWorker], spent_kwh: float
) -> timedelta | None:
    """Estimate how long the rest of the study takes at most, its running trials included.

    Waits for the hours of a schedule are not in it.
    The pace is that of the trials that have ended. None: nothing tells, or the study has ended.

    Args:
        data: The study.
        workers: Its live workers.
        spent_kwh: The energy of the whole study so far, in kWh without PUE.
    """
    if data.ended is not None:
        return None
    return remaining_time(
        data.config,
        data,
        wall_clock_s(data.sessions) / 3600,
        spent_kwh,
        data.emissions_kg_co2e(spent_kwh),
        max(1, len(workers)),
    )


@dataclass(frozen=True)
class EndedTrials:
    """The trials of a study that do not run, and those of them that the panel shows."""

    config: StudyConfig
    records: tuple[TrialRecord, ...]
    recommendation: Recommendation  # as the report's header has it
    last: list[TrialRecord]  # the latest first
    powered: list[TrialRecord]  # by their begin

    @classmethod
    def of(cls, data: StudyData, before: "EndedTrials | None") -> "EndedTrials":
        """Return a study's ended trials; `before` itself if none has ended since."""
        records = tuple(own for own in data.records if own.state is not TrialState.RUNNING)
        if before is not None and (before.config, before.records) == (data.config, records):
            return before
        powered = PowerHistory.latest(records)
        last = last_trials(data, _LAST_TRIALS)
        return cls(data.config, records, recommend(data), last, powered)

    @property
    def best(self) -> TrialRecord | None:
        """The first run of the recommended configuration; None: no trial meets the target."""
        best = self.recommendation.trial
        return next((record for record in self.records if record.trial == best), None)


def last_trials(data: StudyData, count: int) -> list[TrialRecord]:
    """Return the trials that ended last, the latest first."""

    def ended_s(record: TrialRecord) -> float:
        if record.span is not None and not data.provenance.is_replay:  # which takes no time
            return record.span[1].timestamp()
        return _begin_s(record) if record.started_at else 0.0  # at the earliest

    ended = [record for record in data.records if record.state is not TrialState.RUNNING]
    return sorted(ended, key=lambda record: (ended_s(record), record.trial))[: -count - 1 : -1]


def clock_text(moment: datetime) -> str:
    """Return a time as the page shows it, in the machine's own time zone."""
    return moment.astimezone().isoformat(sep=" ", timespec="seconds")


def from_seconds(seconds: float) -> datetime:
    """Return the moment that lies so many seconds after the begin of 1970."""
    return datetime.fromtimestamp(seconds, UTC)
