"""The points of the Pareto figure, sorted into groups, and the unit of its axis; for the page and for paper alike."""

import math
from collections.abc import Sequence
from sys import float_info
from typing import Literal, get_args

from carbonopt.analysis.confidence import Repeats, configurations
from carbonopt.analysis.front import is_finite
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.core.quality import Quality
from carbonopt.core.study import StudyData
from carbonopt.core.trial import EvalPoint, TrialRecord, TrialState
from carbonopt.core.units import emissions_unit
from carbonopt.core.values import Frozen

Group = Literal["complete", "front", "stopped", "failed"]
GROUPS: tuple[Group, ...] = get_args(Group)

LOG_FROM_RATIO = 8.0  # largest ÷ smallest; from here on a linear axis crowds the small values
MARGIN = 0.08  # share of the axis on each side
CROWD = 1500  # points of one group; from here on those that would lie on one another are drawn once
CELLS = (96, 60)  # of the frame, across and up: about as wide as a mark where the figure is widest


class Point(Frozen):
    trial: int
    group: Group
    emissions: float  # in the figure's unit
    quality: float


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
    repeated: tuple[Repeats, ...]
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

    def holds(self, point: Point) -> bool:
        return self.x.holds(point.emissions) and self.y.holds(point.quality)

    def outside(self) -> list[Point]:
        return [point for point in self.points if not self.holds(point)]


def scatter(data: StudyData, rec: Recommendation, repeated: tuple[Repeats, ...], quality: Quality) -> Scatter:
    """Complete trials at their end, others where their last evaluation left them.

    A repeated configuration is on the front by its means, as the answer is: beside the points of its runs it has one.
    """
    places = [(record, at) for record in data.records if (at := _coordinates(record))]
    # As the tables choose it, so that no figure says mg beside their g.
    complete_kg = [kg for record, (kg, _) in places if record.state == TrialState.COMPLETE]
    unit, per_kg = emissions_unit(max(complete_kg, default=1.0))
    on_front = [config for config in configurations(data.records) if config.first.trial in rec.pareto_front]
    once = frozenset(config.first.trial for config in on_front if config.n == 1)
    unsorted = [
        Point(trial=record.trial, group=_group(record, once), emissions=emissions_kg * per_kg, quality=reached)
        for record, (emissions_kg, reached) in places
    ]
    for config in on_front:
        if config.n > 1:
            emissions, mean = config.emissions_kg_co2e * per_kg, config.value
            unsorted.append(Point(trial=config.first.trial, group="front", emissions=emissions, quality=mean))
    points = sorted(unsorted, key=lambda point: (point.emissions, point.trial))
    framed = [point for point in points if point.group in ("complete", "front")] or points
    placed = {point.trial for point in points}
    return Scatter(
        unit=unit,
        per_kg=per_kg,
        points=tuple(points),
        x=frame([point.emissions for point in framed] or [0.0]),
        y=frame([point.quality for point in framed] + [rec.target.value]),
        repeated=repeated,
        unevaluated=tuple(
            (record.trial, kg * per_kg)
            for record in data.records
            if record.trial not in placed and record.state is not TrialState.RUNNING
            if (kg := record.emissions_kg_co2e) is not None and is_finite(kg)
        ),
    )


def layers(plot: Scatter, rec: Recommendation, knee: int | None = None) -> dict[str, list[Point]]:
    """The points by the mark that they get, from the lowest layer to the highest; a trial may be in several.

    The recommended and the baseline stand at the figures that the answer gives, which may be means over seeds.
    """
    return {
        "stopped": plot.drawn("stopped"),
        "failed": plot.drawn("failed"),
        "complete": plot.drawn("complete"),
        "front": plot.of("front"),
        "knee": [point for point in plot.of("front") if point.trial == knee],
        "baseline": _of_answer(plot, rec.baseline) if rec.baseline and rec.baseline.trial != rec.trial else [],
        "recommended": _of_answer(plot, rec),
    }


def _of_answer(plot: Scatter, chosen: Recommendation | Baseline) -> list[Point]:
    if chosen.trial is None or chosen.emissions_kg_co2e is None or chosen.value is None:
        return []
    at = chosen.emissions_kg_co2e * plot.per_kg
    return [Point(trial=chosen.trial, group="complete", emissions=at, quality=chosen.value)]


def last_value(record: TrialRecord) -> tuple[float | None, EvalPoint | None]:
    """A complete trial's, and None; else its last evaluation's, and that one; (None, None): it has none."""
    if record.state is TrialState.COMPLETE:
        return record.value, None
    return (record.evals[-1].value, record.evals[-1]) if record.evals else (None, None)


def _coordinates(record: TrialRecord) -> tuple[float, float] | None:
    """(emissions in kg, quality), or None where one of them is not known."""
    reached, _ = last_value(record)
    if record.emissions_kg_co2e is None or reached is None:
        return None
    return (record.emissions_kg_co2e, reached) if is_finite(record.emissions_kg_co2e + reached) else None


def _group(record: TrialRecord, front: frozenset[int]) -> Group:
    if record.state in (TrialState.PRUNED, TrialState.RUNNING):
        return "stopped"
    if record.state is not TrialState.COMPLETE:
        return "failed"
    return "front" if record.trial in front else "complete"


def wants_log(values: Sequence[float]) -> bool:
    """Whether a linear axis would crowd the small values."""
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM_RATIO


def frame(values: list[float]) -> Axis:
    """The range of the values and a margin around them; logarithmic where they are far apart."""
    low, high = min(values), max(values)
    if wants_log(values):
        # A diverged trial's quality can be so large that neither its ratio to another nor a margin fits a float.
        margin = 10 ** (MARGIN * (math.log10(high) - math.log10(low)))
        return Axis(log=True, low=max(low / margin, float_info.min), high=min(high * margin, float_info.max))
    space = MARGIN * (high - low) or MARGIN * abs(high) or 1.0
    return Axis(log=False, low=low - space, high=high + space)
