"""Reward overoptimization: check whether a learnt policy still serves the gold reward.

The gold reward is what the reward that it learnt from stands for. Beside both stands the divergence
from the start, as in Gao et al. 2022, Scaling laws for reward model overoptimization (arXiv
2210.10760).
"""

import statistics
from collections.abc import Sequence

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.quality import REWARD
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData

# Share of the gold reward's range over a trial's evaluations: a smaller fall is taken for noise.
LEAST_FALL = 0.1
FEWEST_RANKED = 4  # number of complete trials; for fewer a rank correlation says nothing


class PolicyPoint(Frozen):
    """One evaluation, as means over the evaluation prompts."""

    step: int
    reward: float
    gold_reward: float | None  # None: the study has none, or it was not finite
    # divergence of a completion from the start; None: not recorded, or not finite
    kl_nats: float | None
    completion_tokens: float | None


class PolicyRun(Frozen):
    """A trial's evaluations, preceded by its start, at step 0, where that is recorded."""

    trial: int
    complete: bool
    points: tuple[PolicyPoint, ...]  # sorted by step, at least one; only those with a finite reward
    best_gold: PolicyPoint | None  # None: the gold reward is not known
    # The evaluation since which the gold reward fell though the reward did not. Of the evaluations
    # with no more reward than the last one, it is the best by gold reward, if the last one's gold
    # reward is lower by more than LEAST_FALL. None: it did not fall so.
    fell_from: PolicyPoint | None

    @property
    def first(self) -> PolicyPoint:
        return self.points[0]

    @property
    def last(self) -> PolicyPoint:
        return self.points[-1]


class Ranking(Frozen):
    """The agreement of the reward with the gold reward on the order of complete trials.

    Trials are ordered by their last evaluations.
    """

    trials: int  # number of trials for which both are known
    best_reward: int  # number of the trial; of equal ones, that with more gold reward
    best_gold: int  # number of the trial; of equal ones, that with more reward
    # Spearman's; None: fewer than FEWEST_RANKED trials, or all have the same value of one reward
    correlation: float | None


class Overoptimisation(Frozen):
    # the run of the recommended trial, else of the closest; None: there is neither
    shown: PolicyRun | None
    runs: tuple[PolicyRun, ...]  # runs of all trials that were evaluated, by number
    # None: the gold reward is known for fewer than two complete trials
    ranking: Ranking | None


def overoptimisation(data: StudyData, rec: Recommendation) -> Overoptimisation | None:
    """Return the rewards and the gold rewards of a study's trials.

    None: the study is not judged by a reward, or records neither a gold reward nor a divergence.
    """
    if data.config.quality is not REWARD:
        return None
    runs = tuple(_run(record, points) for record in data.records if (points := _points(record)))
    if all(
        point.gold_reward is None and point.kl_nats is None for run in runs for point in run.points
    ):
        return None
    number = rec.trial if rec.closest is None else rec.closest.trial
    shown = next((run for run in runs if run.trial == number), None)
    return Overoptimisation(shown=shown, runs=runs, ranking=_ranking(runs))


def _points(record: TrialRecord) -> tuple[PolicyPoint, ...]:
    names = ("gold_reward", "kl_nats", "completion_tokens")
    evaluated = tuple(
        PolicyPoint(
            step=point.step,
            reward=point.value,
            **{name: point.other_qualities.get(name) for name in names},
        )
        for point in record.evals
        if point.value is not None
    )
    at_start = record.evals[0].other_qualities if record.evals else {}
    if "start_reward" not in at_start or not evaluated:
        return evaluated
    gold = at_start.get("start_gold_reward")
    start = PolicyPoint(
        step=0,
        reward=at_start["start_reward"],
        gold_reward=gold,
        kl_nats=0.0,
        completion_tokens=None,
    )
    return (start, *evaluated)


def _run(record: TrialRecord, points: tuple[PolicyPoint, ...]) -> PolicyRun:
    return PolicyRun(
        trial=record.trial,
        complete=record.state is TrialState.COMPLETE,
        points=points,
        best_gold=max(
            (point for point in points if point.gold_reward is not None), key=_gold, default=None
        ),
        fell_from=_fell_from(points),
    )


def _gold(point: PolicyPoint) -> float:
    assert point.gold_reward is not None
    return point.gold_reward


def _fell_from(points: Sequence[PolicyPoint]) -> PolicyPoint | None:
    known, last = [point for point in points if point.gold_reward is not None], points[-1]
    if last.gold_reward is None:
        return None
    # The last one itself is among these.
    best = max((point for point in known if point.reward <= last.reward), key=_gold)
    span = max(map(_gold, known)) - min(map(_gold, known))
    return best if _gold(best) - last.gold_reward > LEAST_FALL * span else None


def _ranking(runs: Sequence[PolicyRun]) -> Ranking | None:
    ends = {run.trial: run.last for run in runs if run.complete}
    ends = {trial: end for trial, end in ends.items() if end.gold_reward is not None}
    if len(ends) < 2:
        return None
    rewards, golds = [end.reward for end in ends.values()], list(map(_gold, ends.values()))
    return Ranking(
        trials=len(ends),
        best_reward=max(ends, key=lambda trial: (ends[trial].reward, _gold(ends[trial]))),
        best_gold=max(ends, key=lambda trial: (_gold(ends[trial]), ends[trial].reward)),
        correlation=_rank_correlation(rewards, golds) if len(ends) >= FEWEST_RANKED else None,
    )


def _rank_correlation(rewards: Sequence[float], golds: Sequence[float]) -> float | None:
    """Return Pearson's correlation of the ranks; equal values share the mean of their ranks.

    It avoids the second that importing scipy.stats takes; `statistics` has it from Python 3.12 on.
    """
    if len(set(rewards)) == 1 or len(set(golds)) == 1:
        return None
    return statistics.correlation(_ranks(rewards), _ranks(golds))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of the values, from 0 on."""
    return [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]
