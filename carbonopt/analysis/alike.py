"""Find values of a dimension that change nothing.

Trials that differ in that dimension alone then have the same evaluations.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from carbonopt.analysis.confidence import NOT_BY_CHANCE, curve
from carbonopt.core.dimensions import affecting
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Scalar
from carbonopt.spec.study_data import StudyData


@dataclass(frozen=True)
class Alike:
    """Two values of a dimension that gave the same evaluations wherever all else was alike.

    The evaluations are equal to the last digit.
    """

    dimension: str
    values: tuple[Scalar, Scalar]
    trials: tuple[int, ...]  # trials with these values that were compared


def alike(data: StudyData) -> tuple[Alike, ...]:
    """Find the values that make no difference to a script's trials.

    The dimension may affect the quality, as far as is known. A script that ignores it has such
    values, as does one with argparse's type=bool, for which "false" is true.
    """
    space, workload = data.config.search.space, data.config.workload
    # What carbonopt trains by itself uses all of its dimensions.
    if workload is None or not workload.is_script:
        return ()
    found: list[Alike] = []
    for dimension in affecting("quality", tuple(space.free()), space.affects()):
        compared: dict[tuple[Scalar, Scalar], list[tuple[TrialRecord, TrialRecord]]] = defaultdict(
            list
        )
        for first, second in _pairs(data.records, dimension):
            one, other = first.params.value(dimension), second.params.value(dimension)
            if one is not None and other is not None:
                compared[(one, other) if str(one) <= str(other) else (other, one)].append(
                    (first, second)
                )
        for values, pairs in compared.items():
            if not all(_evaluated_alike(first, second) for first, second in pairs):
                continue
            equal = sum(len(_common(first, second)) for first, second in pairs)
            if equal >= (NOT_BY_CHANCE if data.config.quality.is_share else 1):
                trials = tuple(sorted({record.trial for pair in pairs for record in pair}))
                found.append(Alike(dimension, values, trials))
    return tuple(found)


def _pairs(records: Sequence[TrialRecord], dimension: str) -> list[tuple[TrialRecord, TrialRecord]]:
    """Return pairs of trials with evaluations in common that differ in this dimension alone."""
    groups: dict[tuple[object, ...], list[TrialRecord]] = defaultdict(list)
    for record in records:
        if record.state in (TrialState.COMPLETE, TrialState.PRUNED) and record.evals:
            others = {
                name: value
                for name, value in record.params.model_dump().items()
                if name != dimension
            }
            groups[
                (record.seed, *sorted((name, str(value)) for name, value in others.items()))
            ].append(record)
    pairs = (pair for group in groups.values() for pair in itertools.combinations(group, 2))
    return [
        (first, second)
        for first, second in pairs
        if first.params.value(dimension) != second.params.value(dimension)
        and (_both_complete(first, second) or len(_common(first, second)) > 1)
    ]


def _both_complete(first: TrialRecord, second: TrialRecord) -> bool:
    return first.state is second.state is TrialState.COMPLETE


def _evaluated_alike(first: TrialRecord, second: TrialRecord) -> bool:
    """Return whether complete trials had the same evaluations, and others those in common."""
    # The quality is that of the last evaluation; most trials differ in it.
    if _both_complete(first, second):
        return first.quality == second.quality and curve(first) == curve(second)
    common = _common(first, second)
    one, other = ([point for point in curve(run) if point[0] in common] for run in (first, second))
    return one == other


def _common(first: TrialRecord, second: TrialRecord) -> set[int]:
    """Return the steps at which both trials were evaluated."""
    return {point.step for point in first.evals} & {point.step for point in second.evals}
