"""Whether the gold reward came along with the reward, against figures worked out by hand and
SciPy's.
"""

import math

import pytest
from scipy.stats import spearmanr
from small_studies import reward_study, rewarded, study, trial

from carbonopt.analysis.overoptimisation import Overoptimisation, overoptimisation
from carbonopt.analysis.recommend import recommend
from carbonopt.core.trial import TrialState
from carbonopt.spec.study_data import StudyData


def found(data: StudyData) -> Overoptimisation:
    made = overoptimisation(data, recommend(data))
    assert made is not None
    return made


def golds(number: int, *points: tuple[float, float | None], **changes):
    """Each a reward and a gold reward."""
    return rewarded(
        number,
        *((reward, {} if gold is None else {"gold_reward": gold}) for reward, gold in points),
        **changes,
    )


@pytest.mark.parametrize(
    ("points", "step"),
    [
        (((0.2, 0.3), (0.4, 0.8), (0.6, 0.5)), 20),
        (((0.2, 0.9), (0.4, 0.8), (0.6, 0.5)), 10),
        (((0.2, 0.3), (0.6, 0.8), (0.6, 0.5)), 20),  # the reward is no lower than there
        (((0.2, 0.3), (0.7, 0.8), (0.6, 0.5)), None),  # both fell
        (((0.2, 0.55), (0.7, 0.8), (0.6, 0.5)), 10),  # best where the reward was not above the last
        (((0.2, 0.3), (0.4, 0.5), (0.6, 0.8)), None),
        (((0.2, 0.3), (0.4, 0.8), (0.6, 0.76)), None),  # less than a tenth of 0.3 to 0.8
        (((0.2, 0.3), (0.4, 0.8), (0.6, 0.74)), 20),
        (((0.2, 0.5), (0.4, 0.5), (0.6, 0.5)), None),
        (((0.6, 0.5),), None),
        (((0.2, 0.8), (0.4, None), (0.6, 0.5)), 10),
        (((0.2, 0.8), (0.6, 0.5), (0.7, None)), None),  # not known of the end
        (
            ((0.2, 0.8), (0.6, 0.5), (math.nan, 0.9)),
            10,
        ),  # no reward there: as if it had not been evaluated
    ],
)
def test_the_gold_reward_fell_while_the_reward_did_not(points, step) -> None:
    (run,) = found(reward_study(golds(0, *points), target=0.1)).runs
    assert (run.fell_from and run.fell_from.step) == step


def test_an_evaluation_has_what_was_found_beside_the_reward() -> None:
    beside = {
        "gold_reward": 0.4,
        "kl_nats": 2.0,
        "completion_tokens": 12.0,
        "generated_tokens": 1e3,
    }
    run = found(reward_study(rewarded(3, (0.2, {}), (0.6, beside)))).shown
    assert run is not None and (run.trial, run.complete) == (3, True)
    assert run.first.model_dump() == {**dict.fromkeys(list(beside)[:3]), "step": 10, "reward": 0.2}
    assert run.last.model_dump() == {
        "step": 20,
        "reward": 0.6,
        **{name: beside[name] for name in list(beside)[:3]},
    }
    assert run.best_gold == run.last


def test_shown_is_the_recommended_trial_else_the_closest() -> None:
    records = (
        golds(0, (0.7, 0.2), train_kwh=2e-3),
        golds(1, (0.6, 0.3)),
        golds(2, (0.4, 0.4), train_kwh=1e-4),
    )
    shown = [found(reward_study(*records, target=target)).shown for target in (0.5, 0.9)]
    assert [run and run.trial for run in shown] == [1, 0]


def test_ranks_are_compared_over_complete_trials() -> None:
    rewards, gold = (0.1, 0.5, 0.5, 0.9, 0.7), (0.2, 0.1, 0.4, 0.3, 0.4)
    records = [golds(number, point) for number, point in enumerate(zip(rewards, gold, strict=True))]
    stopped = golds(5, (1.0, 1.0), state=TrialState.PRUNED, stop_reason="cap")
    ranking = found(reward_study(*records, stopped, golds(6, (0.95, None)))).ranking
    assert ranking is not None
    assert (ranking.trials, ranking.best_reward, ranking.best_gold) == (
        5,
        3,
        4,
    )  # of 0.4 the one with more reward
    assert ranking.correlation == pytest.approx(spearmanr(rewards, gold).statistic)


@pytest.mark.parametrize("gold", [(0.1, 0.2, 0.3), (0.2, 0.2, 0.2, 0.2)])
def test_few_or_equal_trials_have_no_rank_correlation(gold) -> None:
    ranking = found(
        reward_study(*(golds(number, (0.6 + number, each)) for number, each in enumerate(gold)))
    ).ranking
    assert ranking is not None and ranking.correlation is None and ranking.trials == len(gold)
    assert found(reward_study(golds(0, (0.6, 0.1)))).ranking is None


def test_other_studies_have_none() -> None:
    for data in (
        study(trial(0)),
        reward_study(),
        reward_study(rewarded(0, (0.6, {"completion_tokens": 4.0}))),
    ):
        assert overoptimisation(data, recommend(data)) is None
    assert found(reward_study(rewarded(0, (0.6, {"kl_nats": 0.0})))).ranking is None


def test_what_it_begins_with_is_the_first_point():
    start = {"start_reward": 0.1, "start_gold_reward": 0.5}
    run = found(
        reward_study(rewarded(0, (0.6, {"gold_reward": 0.2, "kl_nats": 3.0, **start})))
    ).runs[0]
    assert [
        (point.step, point.reward, point.gold_reward, point.kl_nats) for point in run.points
    ] == [
        (0, 0.1, 0.5, 0.0),
        (10, 0.6, 0.2, 3.0),
    ]
    assert run.fell_from == run.first, "before the first evaluation"
