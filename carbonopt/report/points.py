"""The points of the Pareto figure, sorted into groups, and the unit of its axis; for the page and for paper alike."""

from typing import Literal

from carbonopt.analysis.front import is_finite
from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.trial import Frozen, TrialRecord, TrialState
from carbonopt.units import GRAMS_PER_KG

Group = Literal["complete", "front", "stopped"]

LOG_FROM_RATIO = 8.0  # largest ÷ smallest; from here on a linear axis crowds the small values

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
    "stopped": "stopped, at its last evaluation",
    "baseline": "baseline",
    "recommended": "recommended",
}


class Point(Frozen):
    trial: int
    group: Group
    emissions: float  # in the figure's unit
    perplexity: float


class Scatter(Frozen):
    """All points that have both coordinates."""

    unit: str
    points: tuple[Point, ...]
    log_x: bool
    log_y: bool

    def of(self, *groups: Group) -> list[Point]:
        return [point for point in self.points if point.group in groups]

    def trial(self, number: int | None) -> list[Point]:
        """The trial's point, in a list that is empty if it has none."""
        return [point for point in self.points if point.trial == number]


def scatter(data: StudyData, rec: Recommendation) -> Scatter:
    """Complete trials at their end, others where their last evaluation left them."""
    found = [(record, *point) for record in data.records if (point := _coordinates(record))]
    factor, unit = _axis_unit([emissions_kg for _, emissions_kg, _ in found])
    points = tuple(
        Point(
            trial=record.trial,
            group=_group(record, rec),
            emissions=emissions_kg * factor,
            perplexity=perplexity,
        )
        for record, emissions_kg, perplexity in found
    )
    return Scatter(
        unit=unit,
        points=points,
        log_x=_wide([point.emissions for point in points]),
        log_y=_wide([point.perplexity for point in points] + [rec.target_perplexity]),
    )


def without_point(data: StudyData, plot: Scatter) -> list[TrialRecord]:
    shown = {point.trial for point in plot.points}
    return [record for record in data.records if record.trial not in shown]


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


def _axis_unit(emissions_kg: list[float]) -> tuple[float, str]:
    """What to multiply kg by, and the unit's name, so that the middle point has few digits before the point."""
    middle = sorted(emissions_kg)[len(emissions_kg) // 2] if emissions_kg else 1.0
    if middle >= 1:
        return 1.0, "kg CO2e"
    return (GRAMS_PER_KG, "g CO2e") if middle * GRAMS_PER_KG >= 1 else (GRAMS_PER_KG * 1000, "mg CO2e")


def _wide(values: list[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM_RATIO
