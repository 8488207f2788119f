"""The points of the Pareto figure, sorted into groups, and the unit of its axis; for the page and for paper alike."""

import math
from sys import float_info
from typing import Literal

from carbonopt.analysis.front import is_finite
from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.trial import Frozen, TrialRecord, TrialState
from carbonopt.units import GRAMS_PER_KG

Group = Literal["complete", "front", "stopped"]

LOG_FROM_RATIO = 8.0  # largest ÷ smallest; from here on a linear axis crowds the small values
MARGIN = 0.08  # share of the axis on each side

# Okabe and Ito's palette, which people with any colour vision tell apart; shapes tell the same in grey.
COLOURS = {
    "front": "#0072B2",
    "complete": "#56B4E9",
    "stopped": "#999999",
    "baseline": "#D55E00",
    "recommended": "#009E73",
    "target": "#CC79A7",
}
LABELS = {
    "front": "Pareto front",
    "complete": "complete",
    "stopped": "stopped (last evaluation)",
    "baseline": "baseline",
    "recommended": "recommended",
}


class Point(Frozen):
    trial: int
    group: Group
    emissions: float  # in the figure's unit
    perplexity: float


class Axis(Frozen):
    """The part of an axis that the figure opens with, in the figure's unit."""

    log: bool
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Scatter(Frozen):
    """All points that have both coordinates, by emissions.

    The axes frame the complete trials and the target: stopped trials are often far away and would crush them.
    """

    unit: str
    points: tuple[Point, ...]
    x: Axis
    y: Axis

    def of(self, group: Group) -> list[Point]:
        return [point for point in self.points if point.group == group]

    def trial(self, number: int | None) -> list[Point]:
        """The trial's point, in a list that is empty if it has none."""
        return [point for point in self.points if point.trial == number]

    def outside(self) -> list[Point]:
        return [
            point for point in self.points if not (self.x.holds(point.emissions) and self.y.holds(point.perplexity))
        ]


def scatter(data: StudyData, rec: Recommendation) -> Scatter:
    """Complete trials at their end, others where their last evaluation left them."""
    found = [(record, *point) for record in data.records if (point := _coordinates(record))]
    factor, unit = _unit([emissions_kg for _, emissions_kg, _ in found])
    points = sorted(
        (
            Point(
                trial=record.trial,
                group=_group(record, rec),
                emissions=emissions_kg * factor,
                perplexity=perplexity,
            )
            for record, emissions_kg, perplexity in found
        ),
        key=lambda point: (point.emissions, point.trial),
    )
    framed = [point for point in points if point.group != "stopped"] or points
    return Scatter(
        unit=unit,
        points=tuple(points),
        x=_axis([point.emissions for point in framed] or [0.0]),
        y=_axis([point.perplexity for point in framed] + [rec.target_perplexity]),
    )


def layers(plot: Scatter, rec: Recommendation) -> dict[str, list[Point]]:
    """The points by the mark that they get, from the lowest layer to the highest; a trial may be in several."""
    baseline = rec.baseline.trial if rec.baseline is not None and rec.baseline.trial != rec.trial else None
    return {
        "stopped": plot.of("stopped"),
        "complete": plot.of("complete"),
        "front": plot.of("front"),
        "baseline": plot.trial(baseline),
        "recommended": plot.trial(rec.trial),
    }


def _coordinates(record: TrialRecord) -> tuple[float, float] | None:
    """(emissions in kg, perplexity), or None where one of them is not known."""
    perplexity = record.perplexity
    if record.state is not TrialState.COMPLETE and record.evals:
        perplexity = record.evals[-1].perplexity
    if record.emissions_kg_co2e is None or perplexity is None:
        return None
    return (record.emissions_kg_co2e, perplexity) if is_finite(record.emissions_kg_co2e + perplexity) else None


def _group(record: TrialRecord, rec: Recommendation) -> Group:
    if record.state is not TrialState.COMPLETE:
        return "stopped"
    return "front" if record.trial in rec.pareto_front else "complete"


def _unit(emissions_kg: list[float]) -> tuple[float, str]:
    """What to multiply kg by, and the unit's name, so that the middle point has few digits before the point."""
    middle = sorted(emissions_kg)[len(emissions_kg) // 2] if emissions_kg else 1.0
    if middle >= 1:
        return 1.0, "kg CO2e"
    return (GRAMS_PER_KG, "g CO2e") if middle * GRAMS_PER_KG >= 1 else (GRAMS_PER_KG * 1000, "mg CO2e")


def _axis(values: list[float]) -> Axis:
    """The range of the values and a margin around them; logarithmic where they are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM_RATIO:
        # A diverged trial's perplexity can be so large that neither its ratio to another nor a margin fits a float.
        margin = 10 ** (MARGIN * (math.log10(high) - math.log10(low)))
        return Axis(log=True, low=max(low / margin, float_info.min), high=min(high * margin, float_info.max))
    space = MARGIN * (high - low) or MARGIN * abs(high) or 1.0
    return Axis(log=False, low=low - space, high=high + space)
