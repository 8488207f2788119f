"""What longer runs make of the ranking: a run compiles and warms up once, however long it is."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from carbonopt.analysis.confidence import Configuration, Evidence, Standing
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.stages import Speed, Stages, compiles
from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialState
from carbonopt.core.values import Frozen

WORTH_SAYING = 0.01  # of a training's energy: what a first step took more elsewhere
_ROUNDING = 1e-9  # relative: what two equal figures may differ by


class CheapestFrom(Frozen):
    """A configuration that no other undercuts from some length of the runs on, up to where the next one begins."""

    trial: int
    from_length: float  # in lengths of the runs as they were: so many times their steps
    excess_kwh: float  # once a run
    energy_per_length_kwh: float  # the rest of the training
    less_in_the_limit: float  # of the recommended one's energy, in runs so long that no first step counts; 0 for itself
    less_interval: tuple[float, float] | None  # of it, as of savings; None: nothing was repeated, or it is itself


class AsFirst(Frozen):
    """The recommended one charged as if nothing had been compiled before it."""

    like: int  # the trial with the largest excess among those that compile the same
    excess_kwh: float  # its
    energy_kwh: float  # of the recommended one's training with that excess
    cheapest: int  # which one it is once each is charged so
    cheapest_energy_kwh: float


class NotCompared(Frozen):
    """Of the compiled trials that are not compared, for they were stopped or may not be recommended, the one whose
    steps cost least. What a token costs it is known, and so what a long run would; which quality that reaches isn't.
    """

    trial: int
    of: int  # such trials
    less_a_token: float  # of the energy that the recommended one takes a token after its first step; negative: more


class Amortisation(Frozen):
    """Of a configuration that was repeated, and is judged by that, all figures are means over its runs."""

    trial: int  # the recommended one; where no trial met the target, the complete one with the least energy
    met: bool
    compared: int  # configurations, itself included: those that may be recommended, or all complete ones
    unknown: int  # as many more of these, whose first steps were not measured
    energy_kwh: float  # of its training
    excess_kwh: float  # of that, once a run
    largest_excess_share: float  # of any trial of the study
    cheapest: tuple[CheapestFrom, ...]  # by length, `trial` first; it alone: it stays the cheapest
    as_first: AsFirst | None  # None: that costs hardly more
    compiles: bool = False  # `trial` does
    not_compared: NotCompared | None = None  # None: there is no such trial


@dataclass(frozen=True)
class Line:
    """A run's energy over its length, a straight one."""

    config: Configuration
    excess_kwh: float
    per_length_kwh: float

    @property
    def energy_kwh(self) -> float:
        return self.excess_kwh + self.per_length_kwh

    @property
    def trial(self) -> int:
        return self.config.first.trial


def amortisation(data: StudyData, rec: Recommendation, timed: Stages) -> Amortisation | None:
    """None: no trial completed, or the first steps of the recommended one were not measured."""
    evidence = Evidence.of(data, rec.target)
    standings = {config.first.trial: evidence.standing(config) for config in evidence.configurations}
    standing = None if rec.trial is None else standings[rec.trial]
    # What is recommended is the cheapest of the best standing that there is.
    eligible = [config for config in evidence.configurations if standing in (None, standings[config.first.trial])]
    speeds = {speed.trial: speed for speed in timed.speeds}
    by_first = standing is Standing.UNREPLICATED
    lines = [line for config in eligible if (line := _line(config, speeds, by_first=by_first))]
    lines.sort(key=lambda line: (line.trial != rec.trial, line.energy_kwh, line.config.mean_rank[1:]))
    if not lines or (rec.met and lines[0].trial != rec.trial):
        return None
    first = lines[0]
    return Amortisation(
        trial=first.trial,
        met=rec.met,
        compared=len(lines),
        unknown=len(eligible) - len(lines),
        energy_kwh=first.energy_kwh,
        excess_kwh=first.excess_kwh,
        largest_excess_share=max(speed.first_step_excess_share for speed in timed.speeds),
        cheapest=tuple(
            CheapestFrom(
                trial=line.trial,
                from_length=length,
                excess_kwh=line.excess_kwh,
                energy_per_length_kwh=line.per_length_kwh,
                less_in_the_limit=0.0 if line is first else 1 - line.per_length_kwh / first.per_length_kwh,
                less_interval=None if line is first else _less_interval(evidence, line, first),
            )
            for length, line in envelope(lines)
        ),
        as_first=_as_first(data, lines, speeds),
        compiles=compiles(first.config.first.params, data),
        not_compared=_not_compared(data, {config.first.trial for config in eligible}, first.config, speeds),
    )


def _line(config: Configuration, speeds: Mapping[int, Speed], *, by_first: bool) -> Line | None:
    """`by_first`: by the search's own run alone, as configurations are ranked that weren't run with all their seeds."""
    runs = config.runs[:1] if by_first else config.runs
    parts = [
        (run.energy_kwh.train, min(speeds[run.trial].first_step_excess_kwh, run.energy_kwh.train))
        for run in runs
        if run.energy_kwh is not None and run.trial in speeds
    ]
    if len(parts) < len(runs):
        return None
    excess_kwh = statistics.fmean(excess_kwh for _, excess_kwh in parts)
    return Line(config, excess_kwh, statistics.fmean(train_kwh - excess_kwh for train_kwh, excess_kwh in parts))


def envelope(lines: Sequence[Line]) -> list[tuple[float, Line]]:
    """Which one is the cheapest from which length on. The first one is at length 1; where two begin to be at the same
    length, the one with the lower slope counts, which is the cheaper one behind it."""
    steps = [(1.0, lines[0])]
    while True:
        length, now = steps[-1]
        overtaking = [
            (max(length, (line.excess_kwh - now.excess_kwh) / (now.per_length_kwh - line.per_length_kwh)), line)
            for line in lines
            if line.per_length_kwh < now.per_length_kwh * (1 - _ROUNDING)
        ]
        if not overtaking:
            return steps
        next_length = min(at for at, _ in overtaking)
        there = [line for at, line in overtaking if at <= next_length * (1 + _ROUNDING)]
        steps.append((next_length, min(there, key=lambda line: (line.per_length_kwh, line.config.mean_rank[1:]))))


def _less_interval(evidence: Evidence, line: Line, first: Line) -> tuple[float, float] | None:
    """With the margin that the ratio of the two whole runs has."""
    whole = evidence.saving_interval(line.config, first.config)
    if whole is None or not line.per_length_kwh > 0:
        return None
    margin = math.log((1 - whole[0]) * first.config.emissions_kg_co2e / line.config.emissions_kg_co2e)
    ratio = line.per_length_kwh / first.per_length_kwh
    return 1 - ratio * math.exp(margin), 1 - ratio * math.exp(-margin)


def _as_first(data: StudyData, lines: Sequence[Line], speeds: Mapping[int, Speed]) -> AsFirst | None:
    largest: dict[tuple[object, ...], Speed] = {}  # by what was compiled; a stopped trial may have been the first
    for record in data.records:
        if speed := speeds.get(record.trial):
            compiled = _compiled_by(record.params)
            largest[compiled] = max(largest.get(compiled, speed), speed, key=attrgetter("first_step_excess_kwh"))
    like = [largest[_compiled_by(line.config.first.params)] for line in lines]
    energies_kwh = [line.per_length_kwh + speed.first_step_excess_kwh for line, speed in zip(lines, like, strict=True)]
    if energies_kwh[0] <= (1 + WORTH_SAYING) * lines[0].energy_kwh:
        return None
    cheapest = 0
    for index, energy_kwh in enumerate(energies_kwh):
        if energy_kwh < energies_kwh[cheapest] * (1 - _ROUNDING):
            cheapest = index
    return AsFirst(
        like=like[0].trial,
        excess_kwh=like[0].first_step_excess_kwh,
        energy_kwh=energies_kwh[0],
        cheapest=lines[cheapest].trial,
        cheapest_energy_kwh=energies_kwh[cheapest],
    )


def _compiled_by(params: TrialParams) -> tuple[object, ...]:
    """Equal where two runs compile the same kernels, so that another one finds them in the cache."""
    return tuple(getattr(params, name) for name in affecting("kernels"))


def _not_compared(
    data: StudyData, compared: set[int], first: Configuration, speeds: Mapping[int, Speed]
) -> NotCompared | None:
    millijoules = {
        record.trial: speeds[record.trial].millijoules_per_token
        for record in data.records
        if record.state in (TrialState.PRUNED, TrialState.COMPLETE)
        and record.trial in speeds
        and not {record.trial, record.repeat_of} & compared
        and compiles(record.params, data)
    }
    own = statistics.fmean(speeds[run.trial].millijoules_per_token for run in first.runs if run.trial in speeds)
    if not millijoules or not own > 0:
        return None
    least = min(millijoules, key=lambda trial: millijoules[trial])
    return NotCompared(trial=least, of=len(millijoules), less_a_token=1 - millijoules[least] / own)
