"""How far a repetition differs: complete trials of one configuration, whatever their seeds."""

import statistics
from collections.abc import Iterable, Sequence

from carbonopt.analysis.front import objectives
from carbonopt.trial import Frozen, TrialParams, TrialRecord


class Spread(Frozen):
    """Of two or more values."""

    mean: float
    standard_deviation: float  # of a sample: n − 1
    lowest: float
    highest: float


class Repeats(Frozen):
    """One configuration that completed at least twice."""

    params: TrialParams
    trials: tuple[int, ...]  # their numbers
    seeds: tuple[int, ...]  # different ones; a single seed leaves the perplexity no reason to differ
    perplexity: Spread
    emissions_kg_co2e: Spread  # of the training window, PUE in

    @property
    def n(self) -> int:
        return len(self.trials)


def repeats(records: Iterable[TrialRecord]) -> tuple[Repeats, ...]:
    """All configurations that completed at least twice, by their first trial; what is not finite doesn't count."""
    by_params: dict[TrialParams, list[tuple[float, float, TrialRecord]]] = {}
    for record in sorted(records, key=lambda one: one.trial):
        if point := objectives(record):
            by_params.setdefault(record.params, []).append((*point, record))
    return tuple(
        Repeats(
            params=params,
            trials=tuple(record.trial for _, _, record in runs),
            seeds=tuple(sorted({record.seed for _, _, record in runs})),
            perplexity=_spread([perplexity for _, perplexity, _ in runs]),
            emissions_kg_co2e=_spread([emissions_kg for emissions_kg, _, _ in runs]),
        )
        for params, runs in by_params.items()
        if len(runs) >= 2
    )


def repeats_of(params: TrialParams | None, found: Iterable[Repeats]) -> Repeats | None:
    """Those of one configuration."""
    return next((one for one in found if one.params == params), None)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        mean=statistics.mean(values),
        standard_deviation=statistics.stdev(values),
        lowest=min(values),
        highest=max(values),
    )
