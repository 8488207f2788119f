"""The points of the Pareto figure in groups, with the frame and the unit of its axes.

The figures for the page and for paper use the same points.
"""

import math
from sys import float_info
from typing import Literal, NamedTuple, get_args

from carbonopt.analysis.confidence import configurations
from carbonopt.analysis.front import is_finite
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.analysis.repeated_configurations import Repeats
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import Quality
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.units import emissions_unit
from carbonopt.core.values import Frozen
from carbonopt.report.figures.style import wants_log, with_target
from carbonopt.spec.study_data import StudyData

Group = Literal["complete", "front", "stopped", "failed"]
GROUPS: tuple[Group, ...] = get_args(Group)
# Trials in any other state count as failed.
_GROUP_OF: dict[TrialState, Group] = {TrialState.COMPLETE: "complete"}
_GROUP_OF |= dict.fromkeys((TrialState.PRUNED, TrialState.RUNNING), "stopped")
MARGIN = 0.08  # share of the axis on each side
CROWD = 1500  # points of one group; of more, those that would lie on one another are drawn once
# The number of cells in the frame, across and up; a cell is about as wide as a mark where the
# figure is widest.
CELLS = (96, 60)


class Point(NamedTuple):
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
        """Return where a value lies, from 0 at the low end to 1 at the high end.

        A value outside the axis gets -1 at the least and 2 at the most.
        """
        if self.log and value <= 0:
            return -1.0
        at, low, high = (
            math.log10(end) if self.log else end for end in (value, self.low, self.high)
        )
        return min(max((at - low) / (high - low), -1.0), 2.0)


class Scatter(Frozen):
    """All points that have both coordinates, by emissions.

    The axes frame the complete trials and, unless it is far away, the target: stopped trials are
    often far away and would crush the others.
    """

    unit: str
    per_kg: float  # how many of the unit make a kg CO2e
    points: tuple[Point, ...]
    x: Axis
    y: Axis
    framed: tuple[float, ...]  # the qualities that `y` is made for
    repeated: tuple[Repeats, ...]
    # (trial, emissions) of the trials that ended before an evaluation
    unevaluated: tuple[tuple[int, float], ...]

    def of(self, group: Group) -> list[Point]:
        return [point for point in self.points if point.group == group]

    def drawn(self, group: Group) -> list[Point]:
        """Return the points of a group that a reader can tell apart.

        In a crowd, they are one point for each cell of the frame.
        """
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


def scatter(
    data: StudyData, rec: Recommendation, repeated: tuple[Repeats, ...], quality: Quality
) -> Scatter:
    """Place complete trials at their end, and others where their last evaluation left them.

    A repeated configuration is on the front by its means, as in the answer: it has one point there
    beside the points of its runs.
    """
    places = [(record, at) for record in data.records if (at := _coordinates(record))]
    # The unit is chosen as in the tables, so that no figure says mg where they say g.
    complete_kg = [kg for record, (kg, _) in places if record.state == TrialState.COMPLETE]
    unit, per_kg = emissions_unit(max(complete_kg, default=1.0))
    on_front = [
        config for config in configurations(data.records) if config.first.trial in rec.pareto_front
    ]
    once = {config.first.trial for config in on_front if config.n == 1}
    points = []
    for record, (run_kg, reached) in places:
        group = "front" if record.trial in once else _GROUP_OF.get(record.state, "failed")
        points.append(Point(record.trial, group, run_kg * per_kg, reached))
    for config in on_front:
        if config.n > 1:
            points.append(
                Point(config.first.trial, "front", config.emissions_kg_co2e * per_kg, config.value)
            )
    points.sort(key=lambda point: (point.emissions, point.trial))
    framed = [point for point in points if point.group in ("complete", "front")] or points
    qualities = tuple(point.quality for point in framed)
    placed = {point.trial for point in points}
    return Scatter(
        unit=unit,
        per_kg=per_kg,
        points=tuple(points),
        x=frame([point.emissions for point in framed] or [0.0]),
        y=frame(with_target(qualities, rec.target.value)),
        framed=qualities,
        repeated=repeated,
        unevaluated=tuple(
            (record.trial, kg * per_kg)
            for record in data.records
            if record.trial not in placed and record.state is not TrialState.RUNNING
            if (kg := record.emissions_kg_co2e) is not None and is_finite(kg)
        ),
    )


def layers(plot: Scatter, rec: Recommendation, knee: int | None = None) -> dict[str, list[Point]]:
    """Return the points by the label of their mark, from the lowest layer to the highest.

    A trial may be in several layers. The recommended trial and the baseline stand at the figures
    that the answer gives, which may be means over seeds.
    """
    return {
        "stopped (last evaluation)": plot.drawn("stopped"),
        "failed or diverged (last evaluation)": plot.drawn("failed"),
        "complete": plot.drawn("complete"),
        "Pareto front": plot.of("front"),
        "knee of the front": [point for point in plot.of("front") if point.trial == knee],
        "baseline": (
            _of_answer(plot, rec.baseline)
            if rec.baseline and rec.baseline.trial != rec.trial
            else []
        ),
        "recommended": _of_answer(plot, rec),
    }


def _of_answer(plot: Scatter, chosen: Recommendation | Baseline) -> list[Point]:
    if chosen.trial is None or chosen.emissions_kg_co2e is None or chosen.value is None:
        return []
    return [Point(chosen.trial, "complete", chosen.emissions_kg_co2e * plot.per_kg, chosen.value)]


def last_value(record: TrialRecord) -> tuple[float | None, EvalPoint | None]:
    """Return the last quality of a trial, and the evaluation that found it.

    A complete trial has its own value and None. A trial without an evaluation has (None, None).
    """
    if record.state is TrialState.COMPLETE:
        return record.value, None
    return (record.evals[-1].value, record.evals[-1]) if record.evals else (None, None)


def _coordinates(record: TrialRecord) -> tuple[float, float] | None:
    """Return (emissions in kg, quality), or None unless both are known and finite."""
    reached, _ = last_value(record)
    if record.emissions_kg_co2e is None or reached is None:
        return None
    return (
        (record.emissions_kg_co2e, reached)
        if is_finite(record.emissions_kg_co2e + reached)
        else None
    )


def frame(values: list[float]) -> Axis:
    """Return the range of the values with a margin around them.

    It is logarithmic where the values are far apart.
    """
    low, high = min(values), max(values)
    if wants_log(values):
        # A diverged trial's quality can be so large that neither its ratio to another nor a margin
        # fits a float.
        margin = 10 ** (MARGIN * (math.log10(high) - math.log10(low)))
        return Axis(
            log=True, low=max(low / margin, float_info.min), high=min(high * margin, float_info.max)
        )
    space = MARGIN * (high - low) or MARGIN * abs(high) or 1.0
    return Axis(log=False, low=low - space, high=high + space)
