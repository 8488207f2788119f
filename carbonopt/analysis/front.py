"""The Pareto front in emissions, of which fewer are better, and quality, in its own direction."""

import math
from collections.abc import Iterable

from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import to_rounding


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def objectives(record: TrialRecord) -> tuple[float, float] | None:
    """Return (emissions in kg CO2e, quality) of a complete trial.

    None: it did not complete, or one of them is not known or not finite.
    """
    if (
        record.state is not TrialState.COMPLETE
        or record.emissions_kg_co2e is None
        or record.value is None
    ):
        return None
    return (record.emissions_kg_co2e, record.value) if math.isfinite(record.value) else None


def pareto_front(records: Iterable[TrialRecord]) -> tuple[int, ...]:
    """Return the numbers of the trials on the Pareto front, sorted by emissions, then by number.

    These are the complete trials that no other beats in one objective without being worse in the
    other. Both compare to rounding: of equal qualities the cheaper beats the other, and of equal
    emissions the better. Identical points don't beat each other: all of them stay.
    """
    complete = ((*point, record) for record in records if (point := objectives(record)))
    front: list[int] = []
    # The front's last point: the least emissions for the best rank so far, and that rank.
    best = (math.inf, math.inf)
    points = sorted(
        (to_rounding(kg), run.quality.of.rank_to_rounding(value), run.trial)
        for kg, value, run in complete
    )
    for emissions_kg, rank, trial in points:
        if rank < best[1] or (emissions_kg, rank) == best:
            front.append(trial)
            best = (emissions_kg, rank)
    return tuple(front)


def knee(records: Iterable[TrialRecord]) -> int | None:
    """Return the number of the trial at the front's knee.

    Beyond the knee, either objective improves only at a high price in the other. It is the front's
    point that lies farthest from the chord between its two ends, on the side of lower emissions and
    better quality (Das, On characterizing the "knee" of the Pareto curve, Structural Optimization
    18, 1999; among other measures in Branke et al., Finding knees in multi-objective optimization,
    PPSN VIII, 2004). The axes are the logarithm of emissions and the scale of the quality
    (`Quality.scaled`), from 0 to 1 between the ends: equal shares are equal distances. If there are
    several, it is the one with least emissions, then the earliest.

    None: the front has fewer than three different points, none of them lies on that side, or one
    has no logarithm.
    """
    by_trial = {record.trial: record for record in records}
    front = [
        (*point, trial)
        for trial in pareto_front(by_trial.values())
        if (point := objectives(by_trial[trial]))
    ]
    if not front or front[0][0] <= 0:
        return None
    logs = [
        (math.log(kg), by_trial[trial].quality.of.scaled(value), trial)
        for kg, value, trial in front
    ]
    (cheapest, worst, _), (dearest, best, _) = logs[0], logs[-1]
    if not (cheapest < dearest and best < worst):
        return None  # all points are the same

    def inside(point: tuple[float, float, int]) -> float:
        """Return the distance from the chord, in units that all points share.

        It is positive on the side of lower values.
        """
        return 1 - (point[0] - cheapest) / (dearest - cheapest) - (point[1] - best) / (worst - best)

    farthest = max(logs[1:-1], key=inside, default=None)  # the first one if there are several
    # Rounding errors are no knee.
    return farthest[2] if farthest and inside(farthest) > 1e-9 else None
