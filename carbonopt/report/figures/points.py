"""The points of the Pareto figure, sorted into groups, and the unit of its axis; for the page and for paper alike."""

import math
from collections.abc import Sequence
from sys import float_info
from typing import Literal, get_args

from carbonopt.analysis.confidence import configurations
from carbonopt.analysis.front import is_finite
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.analysis.replicates import Repeats
from carbonopt.core.quality import Quality
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.units import emissions_unit
from carbonopt.core.values import Frozen
from carbonopt.report import quality_text

Group = Literal["complete", "front", "stopped", "failed"]
GROUPS: tuple[Group, ...] = get_args(Group)

LOG_FROM_RATIO = 8.0  # largest ÷ smallest; from here on a linear axis crowds the small values
MARGIN = 0.08  # share of the axis on each side
CROWD = 1500  # points of one group; from here on those that would lie on one another are drawn once
CELLS = (96, 60)  # of the frame, across and up: about as wide as a mark where the figure is widest

# Okabe and Ito's palette, which people with any colour vision tell apart; shapes tell the same in grey.
COLOURS = {
    "front": "#0072B2",
    "complete": "#56B4E9",
    "stopped": "#999999",
    "failed": "#E69F00",
    "knee": "#0072B2",
    "baseline": "#D55E00",
    "recommended": "#009E73",
    "target": "#CC79A7",
}
LABELS = {
    "front": "Pareto front",
    "complete": "complete",
    "stopped": "stopped (last evaluation)",
    "failed": "failed or diverged (last evaluation)",
    "knee": "knee of the front",
    "baseline": "baseline",
    "recommended": "recommended",
}


class Point(Frozen):
    trial: int
    group: Group
    emissions: float  # in the figure's unit
    quality: float


class Mean(Frozen):
    """A configuration that was repeated, in the figure's unit: means and standard deviations of one run."""

    trials: tuple[int, ...]
    emissions: float
    emissions_deviation: float
    quality: float
    quality_deviation: float


class Axis(Frozen):
    """The part of an axis that the figure opens with, in the figure's unit."""

    log: bool
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high end; from -1 to 2 for what lies outside."""
        if not self.log:
            share = (value - self.low) / (self.high - self.low)
        else:
            low, high = math.log10(self.low), math.log10(self.high)
            share = (math.log10(value) - low) / (high - low) if value > 0 else -1.0
        return min(max(share, -1.0), 2.0)


class Scatter(Frozen):
    """All points that have both coordinates, by emissions.

    The axes frame the complete trials and the target: stopped trials are often far away and would crush them.
    """

    unit: str
    per_kg: float  # how many of the unit make a kg CO2e
    points: tuple[Point, ...]
    x: Axis
    y: Axis
    means: tuple[Mean, ...]
    unevaluated: tuple[tuple[int, float], ...]  # (trial, emissions) of those that ended before an evaluation

    def of(self, group: Group) -> list[Point]:
        return [point for point in self.points if point.group == group]

    def drawn(self, group: Group) -> list[Point]:
        """Those of a group that a reader can tell apart: of a crowd, one of each cell of the frame."""
        points = self.of(group)
        if len(points) <= CROWD:
            return points
        cells: dict[tuple[int, int], Point] = {}
        for point in points:
            across, up = self.x.share(point.emissions), self.y.share(point.quality)
            cells.setdefault((math.floor(across * CELLS[0]), math.floor(up * CELLS[1])), point)
        return list(cells.values())

    def outside(self) -> list[Point]:
        return [point for point in self.points if not (self.x.holds(point.emissions) and self.y.holds(point.quality))]


def scatter(data: StudyData, rec: Recommendation, repeated: Sequence[Repeats], quality: Quality) -> Scatter:
    """Complete trials at their end, others where their last evaluation left them.

    A repeated configuration is on the front by its means, as the answer is: beside the points of its runs it has one.
    """
    # As the tables choose it, so that no figure says mg beside their g.
    complete_kg = [at[0] for one in data.records if one.state == TrialState.COMPLETE and (at := _coordinates(one))]
    unit, per_kg = emissions_unit(max(complete_kg, default=1.0))
    on_front = [one for one in configurations(data.records) if one.first.trial in rec.pareto_front]
    means = [
        Point(
            trial=one.first.trial,
            group="front",
            emissions=one.emissions_kg_co2e * per_kg,
            quality=quality_text.known(one),
        )
        for one in on_front
        if one.n > 1
    ]
    front = frozenset(one.first.trial for one in on_front if one.n == 1)
    runs = [
        Point(trial=record.trial, group=_group(record, front), emissions=at[0] * per_kg, quality=at[1])
        for record in data.records
        if (at := _coordinates(record))
    ]
    points = sorted(runs + means, key=lambda point: (point.emissions, point.trial))
    placed = {point.trial for point in points}
    framed = [point for point in points if point.group in ("complete", "front")] or points
    return Scatter(
        unit=unit,
        per_kg=per_kg,
        points=tuple(points),
        x=frame([point.emissions for point in framed] or [0.0]),
        y=frame([point.quality for point in framed] + [rec.target.value]),
        means=tuple(_mean(one, per_kg) for one in repeated),
        unevaluated=tuple(
            (record.trial, record.emissions_kg_co2e * per_kg)
            for record in data.records
            if record.trial not in placed
            and record.emissions_kg_co2e is not None
            and is_finite(record.emissions_kg_co2e)
            and record.state is not TrialState.RUNNING
        ),
    )


def layers(plot: Scatter, rec: Recommendation, knee: int | None = None) -> dict[str, list[Point]]:
    """The points by the mark that they get, from the lowest layer to the highest; a trial may be in several.

    The recommended and the baseline stand at the figures that the answer gives, which may be means over seeds.
    """
    baseline = rec.baseline if rec.baseline is not None and rec.baseline.trial != rec.trial else None
    return {
        "stopped": plot.drawn("stopped"),
        "failed": plot.drawn("failed"),
        "complete": plot.drawn("complete"),
        "front": plot.of("front"),
        "knee": [point for point in plot.of("front") if point.trial == knee],
        "baseline": _of_answer(plot, baseline),
        "recommended": _of_answer(plot, rec),
    }


def _of_answer(plot: Scatter, chosen: Recommendation | Baseline | None) -> list[Point]:
    if chosen is None or chosen.trial is None or chosen.emissions_kg_co2e is None:
        return []
    at = chosen.emissions_kg_co2e * plot.per_kg
    return [Point(trial=chosen.trial, group="complete", emissions=at, quality=quality_text.known(chosen))]


def _mean(repeat: Repeats, per_kg: float) -> Mean:
    spread = repeat.value
    return Mean(
        trials=repeat.trials,
        emissions=repeat.emissions_kg_co2e.mean * per_kg,
        emissions_deviation=repeat.emissions_kg_co2e.standard_deviation * per_kg,
        quality=spread.mean,
        quality_deviation=spread.standard_deviation,
    )


def _coordinates(record: TrialRecord) -> tuple[float, float] | None:
    """(emissions in kg, quality), or None where one of them is not known."""
    reached, _ = quality_text.last_value(record)
    if record.emissions_kg_co2e is None or reached is None:
        return None
    return (record.emissions_kg_co2e, reached) if is_finite(record.emissions_kg_co2e + reached) else None


def _group(record: TrialRecord, front: frozenset[int]) -> Group:
    if record.state in (TrialState.PRUNED, TrialState.RUNNING):
        return "stopped"
    if record.state is not TrialState.COMPLETE:
        return "failed"
    return "front" if record.trial in front else "complete"


def frame(values: list[float]) -> Axis:
    """The range of the values and a margin around them; logarithmic where they are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM_RATIO:
        # A diverged trial's quality can be so large that neither its ratio to another nor a margin fits a float.
        margin = 10 ** (MARGIN * (math.log10(high) - math.log10(low)))
        return Axis(log=True, low=max(low / margin, float_info.min), high=min(high * margin, float_info.max))
    space = MARGIN * (high - low) or MARGIN * abs(high) or 1.0
    return Axis(log=False, low=low - space, high=high + space)
