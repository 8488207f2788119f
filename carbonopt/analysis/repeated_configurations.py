"""The repeats of each configuration, as the report lists them."""

import statistics
from collections.abc import Iterable, Sequence

from carbonopt.analysis.confidence import LEVEL, Configuration, Evidence, Standing, configurations
from carbonopt.analysis.front import objectives
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Target
from carbonopt.core.trial import TrialRecord
from carbonopt.core.values import Frozen, Spread


class Repeats(Frozen):
    """One configuration that completed at least twice."""

    params: TrialParams
    trials: tuple[int, ...]  # numbers of its runs
    seeds: tuple[int, ...]  # without repeats; with a single seed the quality should not differ
    value: Spread  # spread of the quality
    emissions_kg_co2e: Spread  # spread of the training window's, PUE included
    # The next figures are from the repeats with other seeds, by the same means and bounds as the
    # recommendation's confidence.
    value_mean: float  # mean of the quality, as `Configuration.value`
    # bound of that mean over all seeds, at `level`; None: no repeats, or beyond all bounds
    value_bound: float | None
    level: float = LEVEL
    failed_replicate: bool  # whether it diverged or did not fit with another seed

    def standing(self, target: Target) -> Standing | None:
        """Return the standing against a target.

        None: the configuration completed more than once within the search alone, which was not made
        to judge it.
        """
        if self.failed_replicate or (
            self.value_bound is not None and not target.is_met_by(self.value_mean)
        ):
            return Standing.REJECTED
        if self.value_bound is None:
            return None
        return Standing.CONFIRMED if target.is_met_by(self.value_bound) else Standing.INCONCLUSIVE

    @property
    def n(self) -> int:
        return len(self.trials)


def repeats(records: Iterable[TrialRecord]) -> tuple[Repeats, ...]:
    """Return all configurations that completed at least twice, by their first trial.

    Runs whose figures are not finite don't count.
    """
    records = tuple(records)
    # Only the bounds of this evidence are used, which depend on no target.
    evidence = Evidence(configurations(records), None, seeds=1)
    judged = {again.first.params: again for again in evidence.configurations if again.repeated}
    by_params: dict[TrialParams, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda record: record.trial):
        if objectives(record):
            by_params.setdefault(record.params, []).append(record)
    return tuple(
        _repeats(runs, judged.get(params), evidence)
        for params, runs in by_params.items()
        if len(runs) >= 2
    )


def _repeats(
    runs: Sequence[TrialRecord], judged: Configuration | None, evidence: Evidence
) -> Repeats:
    every_run = Configuration(runs)
    return Repeats(
        params=runs[0].params,
        trials=tuple(run.trial for run in runs),
        seeds=tuple(sorted({run.seed for run in runs})),
        value=_spread(every_run.values),
        emissions_kg_co2e=_spread(every_run.emissions_of_runs),
        value_mean=(judged or every_run).value,
        value_bound=None if judged is None else evidence.bound(judged),
        failed_replicate=judged is not None and judged.failed_replicate,
    )


def repeats_of(params: TrialParams | None, every: Iterable[Repeats]) -> Repeats | None:
    return next((repeated for repeated in every if repeated.params == params), None)


def _spread(values: Sequence[float]) -> Spread:
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return Spread(mean=mean, standard_deviation=deviation, lowest=min(values), highest=max(values))
