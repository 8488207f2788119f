"""How far a repetition differs: complete trials of one configuration, whatever their seeds."""

import statistics
from collections.abc import Iterable, Sequence

from carbonopt.analysis.confidence import LEVEL, Configuration, Evidence, Standing, configurations
from carbonopt.analysis.front import objectives
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Target
from carbonopt.core.statistics import Spread
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Frozen


class Repeats(Frozen):
    """One configuration that completed at least twice."""

    params: TrialParams
    trials: tuple[int, ...]  # their numbers
    seeds: tuple[int, ...]  # different ones; a single seed leaves the quality no reason to differ
    value: Spread  # of the quality
    emissions_kg_co2e: Spread  # of the training window, PUE in
    # What its repeats with other seeds say, by the same means and bounds as the recommendation's confidence:
    value_mean: float  # as `Configuration.value`
    value_bound: float | None  # of that mean over all seeds, at `level`; None: no repeats, or beyond all bounds
    level: float
    failed_replicate: bool  # with another seed it diverged or did not fit in memory

    def standing(self, target: Target) -> Standing | None:
        """None: it completed more than once within the search alone, which was not made to judge it."""
        if self.failed_replicate or (self.value_bound is not None and not target.is_met_by(self.value_mean)):
            return Standing.REJECTED
        if self.value_bound is None:
            return None
        return Standing.CONFIRMED if target.is_met_by(self.value_bound) else Standing.INCONCLUSIVE

    @property
    def n(self) -> int:
        return len(self.trials)


def repeats(records: Iterable[TrialRecord]) -> tuple[Repeats, ...]:
    """All configurations that completed at least twice, by their first trial; what is not finite doesn't count."""
    records = tuple(records)
    evidence = Evidence(configurations(records), None, seeds=1)  # of its bounds alone, which know no target
    judged = {one.first.params: one for one in evidence.configurations if one.n > 1 or one.failed_replicate}
    by_params: dict[TrialParams, list[tuple[float, float, TrialRecord]]] = {}
    for record in sorted(records, key=lambda one: one.trial):
        if point := objectives(record):
            by_params.setdefault(record.params, []).append((*point, record))
    return tuple(
        Repeats(
            params=params,
            trials=tuple(record.trial for _, _, record in runs),
            seeds=tuple(sorted({record.seed for _, _, record in runs})),
            value=_spread([value for _, value, _ in runs]),
            emissions_kg_co2e=_spread([emissions_kg for emissions_kg, _, _ in runs]),
            value_mean=_mean(judged.get(params), [record for _, _, record in runs]),
            value_bound=evidence.bound(judged[params]) if params in judged else None,
            level=LEVEL,
            failed_replicate=params in judged and judged[params].failed_replicate,
        )
        for params, runs in by_params.items()
        if len(runs) >= 2
    )


def repeats_of(params: TrialParams | None, found: Iterable[Repeats]) -> Repeats | None:
    """Those of one configuration."""
    return next((one for one in found if one.params == params), None)


def _mean(judged: Configuration | None, runs: Sequence[TrialRecord]) -> float:
    return Configuration(tuple(runs)).value if judged is None else judged.value


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        mean=statistics.mean(values),
        standard_deviation=statistics.stdev(values),
        lowest=min(values),
        highest=max(values),
    )
