"""The Pareto front in (emissions, perplexity), both minimized."""

import math
from collections.abc import Iterable

from carbonopt.trial import TrialRecord, TrialState


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def objectives(record: TrialRecord) -> tuple[float, float] | None:
    """(emissions in kg CO2e, perplexity) of a complete trial; None if it did not complete or either is not finite."""
    if record.state is not TrialState.COMPLETE or record.emissions_kg_co2e is None or record.perplexity is None:
        return None
    point = (record.emissions_kg_co2e, record.perplexity)
    return point if all(map(math.isfinite, point)) else None


def pareto_front(records: Iterable[TrialRecord]) -> tuple[int, ...]:
    """Numbers of the complete trials that no other beats in one objective without being worse in the other.

    Identical points don't beat each other: all of them stay. Sorted by emissions, then by trial number.
    """
    points = sorted((*point, record.trial) for record in records if (point := objectives(record)))
    front: list[int] = []
    best = (math.inf, math.inf)  # the front's last point: least perplexity so far, at the least emissions for it
    for emissions_kg, perplexity, trial in points:
        if perplexity < best[1] or (emissions_kg, perplexity) == best:
            front.append(trial)
            best = (emissions_kg, perplexity)
    return tuple(front)
