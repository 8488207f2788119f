"""The recommendation for every target: what a reader moves the target over, and finds what `recommend` would say."""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter

from carbonopt.analysis.confidence import Configuration, Evidence
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import Best, break_even_interval, break_even_runs, find_baseline, saving_fraction
from carbonopt.core.study import StudyData
from carbonopt.core.trial import Frozen

LOWEST_PERPLEXITY = 1.0  # each token was certain


class TargetRange(Frozen):
    """What is recommended for all targets from `from_perplexity` on, up to and without the next answer's."""

    from_perplexity: float  # 1 for the first answer: no perplexity is below
    # The study's own target alone: its repeats were made for it, so that a configuration that holds it comes before a
    # cheaper one that ran once. Just above it, the answer before goes on.
    study_target_only: bool
    trial: int | None  # None: no trial meets such a target
    seeds: int  # complete runs of its configuration; 0: there is none
    perplexity: float | None
    perplexity_bound: float | None  # of its mean over all seeds, at LEVEL; None: it ran once, or no bound is known
    emissions_kg_co2e: float | None
    energy_kwh: float | None
    baseline_trial: int | None
    saving_fraction: float | None  # against that baseline
    saving_interval: tuple[float, float] | None  # as in Recommendation, like the next two
    break_even_runs: int | None
    break_even_interval: tuple[int, int | None] | None


def recommendation_by_target(data: StudyData) -> tuple[TargetRange, ...]:
    """A step function of the target, from LOWEST_PERPLEXITY on; sorted, no two neighbours recommend the same.

    For any such target, `target_range_for` finds in it what `recommend` would say.
    """
    own_target = data.config.target.perplexity
    evidence = Evidence.of(data, own_target)
    baseline = find_baseline(data, evidence.configurations, own_target)
    against = {one.first.trial: one for one in evidence.configurations}.get(baseline.trial) if baseline else None
    study_kg = footprint(data).emissions_kg_co2e

    def answer(lowest: float, only: bool, winner: Configuration | None) -> TargetRange:
        interval = evidence.saving_interval(winner, against) if winner and against else None
        return TargetRange(
            from_perplexity=lowest,
            study_target_only=only,
            trial=winner.first.trial if winner else None,
            seeds=winner.n if winner else 0,
            perplexity=winner.perplexity if winner else None,
            perplexity_bound=evidence.bound(winner) if winner else None,
            emissions_kg_co2e=winner.emissions_kg_co2e if winner else None,
            energy_kwh=winner.energy_kwh if winner else None,
            baseline_trial=baseline.trial if baseline else None,
            saving_fraction=saving_fraction(winner, baseline),
            saving_interval=interval,
            break_even_runs=break_even_runs(study_kg, winner, baseline),
            break_even_interval=break_even_interval(study_kg, interval, baseline),
        )

    return tuple(answer(*step) for step in _steps(evidence, own_target))


def target_range_for(found: Sequence[TargetRange], target_perplexity: float) -> TargetRange:
    """The answer at a target of LOWEST_PERPLEXITY or more."""
    return next(
        one
        for one in reversed(found)
        if one.from_perplexity == target_perplexity
        or (one.from_perplexity < target_perplexity and not one.study_target_only)
    )


def _steps(evidence: Evidence, own_target: float) -> Iterator[tuple[float, bool, Configuration | None]]:
    """Where an answer begins, whether it is the own target's alone, and which it is."""
    changes = [
        (max(lowest, LOWEST_PERPLEXITY), one, standing)
        for one in evidence.configurations
        for lowest, standing in evidence.standings(one)
    ]
    changes.sort(key=itemgetter(0))  # stable: a configuration's standings stay in their order
    best, last = Best(), None
    at = {lowest: list(group) for lowest, group in itertools.groupby(changes, key=itemgetter(0))}
    for lowest in sorted({LOWEST_PERPLEXITY, own_target, *at}):
        for _, one, standing in at.get(lowest, ()):
            best.take(one, standing)
        winner = best.answer(confirmed_for_it=False)
        if winner is not last or lowest == LOWEST_PERPLEXITY:
            yield lowest, False, winner
        last = winner
        if lowest == own_target and (confirmed := best.answer(confirmed_for_it=True)) is not winner:
            yield lowest, True, confirmed
