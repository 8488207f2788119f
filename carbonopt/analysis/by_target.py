"""The recommendation for every target: what a reader moves the target over, and finds what `recommend` would say."""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter

from carbonopt.analysis.confidence import Configuration, Evidence
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import Answer, Best, answer, find_baseline
from carbonopt.core.quality import Target
from carbonopt.core.study import StudyData


class TargetRange(Answer):
    """What is recommended for all targets from `from_value` on, each easier to meet, up to and without the next's."""

    from_value: float  # of the first range the best that there can be
    # The study's own target alone: its repeats were made for it, so that a configuration that holds it comes before a
    # cheaper one that ran once. Just above it, the answer before goes on.
    study_target_only: bool
    seeds: int  # complete runs of its configuration; 0: there is none
    value_bound: float | None  # of its mean over all seeds, at LEVEL; None: it ran once, or no bound is known
    baseline_trial: int | None


def recommendation_by_target(data: StudyData) -> tuple[TargetRange, ...]:
    """A step function of the target, from the best value on; sorted, no two neighbours recommend the same.

    For any such target, `target_range_for` finds in it what `recommend` would say.
    """
    own_target = data.config.target.at()
    evidence = Evidence.of(data, own_target)
    baseline = find_baseline(data, evidence.configurations)
    study_kg = footprint(data).emissions_kg_co2e
    return tuple(
        TargetRange(
            **dict(answer(evidence, winner, baseline, study_kg)),
            from_value=from_value,
            study_target_only=only,
            seeds=winner.n if winner else 0,
            value_bound=evidence.bound(winner) if winner else None,
            baseline_trial=baseline.first.trial if baseline else None,
        )
        for from_value, only, winner in _steps(evidence, own_target)
    )


def target_range_for(ranges: Sequence[TargetRange], target: Target) -> TargetRange:
    """The range that a target lies in."""
    rank = target.quality.rank
    return next(
        target_range
        for target_range in reversed(ranges)
        if target_range.from_value == target.value
        or (rank(target_range.from_value) < rank(target.value) and not target_range.study_target_only)
    )


def _steps(evidence: Evidence, own_target: Target) -> Iterator[tuple[float, bool, Configuration | None]]:
    """Where a range begins, whether it is the own target's alone, and what is recommended there."""
    quality = own_target.quality
    best_rank, own_rank = quality.rank(quality.best), quality.rank(own_target.value)
    changes = [
        (max(quality.rank(value), best_rank), configuration, standing)
        for configuration in evidence.configurations
        for value, standing in evidence.standings(configuration)
    ]
    changes.sort(key=itemgetter(0))  # stable: a configuration's standings stay in their order
    best, last = Best(), None
    at = {rank: list(group) for rank, group in itertools.groupby(changes, key=itemgetter(0))}
    for rank in sorted({best_rank, own_rank, *at}):
        for _, configuration, standing in at.get(rank, ()):
            best.take(configuration, standing)
        winner = best.answer(confirmed_for_it=False)
        if winner is not last or rank == best_rank:
            yield quality.rank(rank), False, winner
        last = winner
        if rank == own_rank and (confirmed := best.answer(confirmed_for_it=True)) is not winner:
            yield quality.rank(rank), True, confirmed
