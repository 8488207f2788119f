"""Which configuration is tried next, in cases that can be reasoned out; and how long that takes."""

import itertools
import math
import time

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from carbonopt.core.quality import PERPLEXITY
from carbonopt.search.knowledge import EXPECTED_FROM, Knowledge
from carbonopt.search.observation import CURVE, TOTAL_STEPS, Observation
from carbonopt.search.proposal import TIE, first, propose
from carbonopt.search.sampler import CarbonSampler

SEQUENCES = 12_800
SPACE: dict[str, BaseDistribution] = {
    "global_batch_size": CategoricalDistribution((16, 32, 64)),
    "learning_rate": CategoricalDistribution((3e-4, 1e-3, 3e-3, 1e-2)),
    "epochs": CategoricalDistribution((1, 2, 4)),
    "micro_batch_size_per_gpu": CategoricalDistribution((4, 8, 16)),
}
EVERY = [
    dict(zip(SPACE, combination, strict=True))
    for combination in itertools.product(*(distribution.choices for distribution in SPACE.values()))
]


def steps(values: dict) -> float:
    return SEQUENCES * values["epochs"] / values["global_batch_size"]


def nll(values: dict, share: float = 1.0) -> float:
    off = math.log(values["learning_rate"] / (2e-3 * math.sqrt(values["global_batch_size"] / 32)))
    return 1.4 + 5.0 * (values["epochs"] * SEQUENCES * share / 32) ** -0.3 + 0.04 * off**2


def step_cost(values: dict) -> float:
    return values["global_batch_size"] ** 0.7 * (1 + 8 / values["micro_batch_size_per_gpu"])


def cost(values: dict) -> float:
    return steps(values) * step_cost(values)


def ran(number: int, values: dict, evaluations: int = 8, **changes: object) -> Observation:
    settings = {
        "number": number,
        "params": values,
        "curve": tuple(
            (k / evaluations, nll(values, k / evaluations)) for k in range(1, evaluations + 1)
        ),
        "total_steps": int(steps(values)),
        "cost_per_step": step_cost(values),
        "cost": cost(values),
        "overhead_cost": 0.0,
        "complete": True,
        "out_of_memory": False,
        "peak_memory_gib": None,
    }
    return Observation(**{**settings, **changes})


def proposed(
    candidates: list[dict],
    known: list[dict],
    target_nll: float,
    best: dict | None = None,
    seed: int = 0,
):
    """`best`: of the known ones, the one that is to be beaten."""
    trials = [ran(number, values) for number, values in enumerate(known)]
    meeting = [trial for trial in trials if trial.params == best]
    knowledge = Knowledge(PERPLEXITY, SPACE, trials)
    return propose(
        candidates, knowledge, target_nll, meeting, np.random.default_rng(seed), by_mean=False
    )


def test_with_much_known_the_cheapest_that_meets_the_target_is_next() -> None:
    left = EVERY[::7]
    known = [values for values in EVERY if values not in left]
    losses = sorted(map(nll, left))
    target_nll = (losses[len(left) // 2] + losses[len(left) // 2 + 1]) / 2  # clear of all of them
    cheapest = min((values for values in left if nll(values) <= target_nll), key=cost)
    answer = proposed(left, known, target_nll)
    assert answer is not None and cost(left[answer.index]) <= cost(cheapest) * (1 + 2 * TIE)
    assert nll(left[answer.index]) <= target_nll
    assert answer.expected_cost == pytest.approx(cost(cheapest), rel=0.1)
    assert answer.chance_of_any > 0.95
    assert answer.expected_gain == math.inf, "nothing meets the target yet"


def test_equal_answers_share_a_draw_and_one_of_them_is_taken() -> None:
    values = EVERY[5]
    twins = [values, dict(values)]
    answer = proposed(twins, EVERY[::3], nll(values) + 0.2)
    assert answer is not None and answer.index in (0, 1)
    assert answer.chance_of_any > 0.95


def test_nothing_is_proposed_where_nothing_can_be_cheaper() -> None:
    left = EVERY[::7]
    known = [values for values in EVERY if values not in left]
    cheapest = min(known, key=cost)
    dearer = [values for values in left if cost(values) > cost(cheapest)]
    assert proposed(dearer, known, max(map(nll, EVERY)), best=cheapest) is None
    second = min(
        (values for values in EVERY if cost(values) > 1.1 * min(map(cost, EVERY))), key=cost
    )
    others = [values for values in EVERY if cost(values) >= cost(second)]
    assert proposed([min(EVERY, key=cost)], others, max(map(nll, EVERY)), best=second) is not None


def test_what_can_be_saved_is_the_difference_to_the_best() -> None:
    left = EVERY[::7]
    known = [values for values in EVERY if values not in left]
    target_nll = sorted(map(nll, left))[len(left) // 2] + 0.005
    cheapest = min(cost(values) for values in left if nll(values) <= target_nll)
    best = min(known, key=lambda values: abs(cost(values) - 2 * cheapest))
    answer = proposed(left, known, target_nll, best=best)
    assert answer is not None and answer.expected_gain == pytest.approx(
        cost(best) - cheapest, rel=0.15
    )


def test_what_can_be_saved_is_what_the_next_trial_alone_can_save() -> None:
    """Not what the cheapest of all candidates would save, whichever it turns out to be."""
    known = EVERY[:6]
    best, left = max(known, key=cost), [values for values in EVERY if values not in known][::8]
    target_nll = float(np.quantile(list(map(nll, EVERY)), 0.3))
    answer = proposed(left, known, target_nll, best=best)
    assert answer is not None and answer.chance_of_any > answer.chance
    of_each = [proposed([values], known, target_nll, best=best) for values in left]
    alone = [each for each in of_each if each is not None]
    most = max(alone, key=lambda each: each.expected_gain / each.expected_cost)
    assert answer.expected_gain / answer.expected_cost == pytest.approx(
        most.expected_gain / most.expected_cost, rel=0.2
    )
    cheapest = min(cost(values) for values in left if nll(values) <= target_nll)
    assert answer.expected_gain < cost(best) - cheapest


def test_where_nothing_meets_the_target_what_comes_close_is_learned_from() -> None:
    left = EVERY[::7]
    known = [values for values in EVERY if values not in left]
    answer = proposed(left, known, 0.5 * min(map(nll, EVERY)))
    assert answer is not None and answer.chance_of_any == 0
    assert nll(left[answer.index]) <= np.quantile(list(map(nll, left)), 0.25)


def test_what_ran_out_of_memory_is_left_alone_while_anything_else_is_left() -> None:
    full = [values for values in EVERY if values["micro_batch_size_per_gpu"] == 16]
    fitting = [values for values in EVERY if values["micro_batch_size_per_gpu"] < 16]
    told = [ran(0, fitting[0], peak_memory_gib=10.0), ran(1, fitting[-1], peak_memory_gib=14.0)]
    none = {
        "curve": (),
        "cost": None,
        "cost_per_step": None,
        "complete": False,
        "out_of_memory": True,
    }
    knowledge = Knowledge(PERPLEXITY, SPACE, [*told, ran(2, full[0], **none)])
    rng = np.random.default_rng(0)
    left = [*full[1:], *fitting[1:-1]]
    answer = propose(left, knowledge, max(map(nll, EVERY)), [], rng, by_mean=False)
    assert answer is not None and left[answer.index]["micro_batch_size_per_gpu"] < 16
    assert propose(full[1:], knowledge, max(map(nll, EVERY)), [], rng, by_mean=False) is not None, (
        "nothing else is left"
    )


def test_the_first_trial_is_short_and_in_the_middle() -> None:
    values = EVERY[first(EVERY, np.random.default_rng(0), {})]
    assert values["epochs"] == 1
    assert (values["global_batch_size"], values["micro_batch_size_per_gpu"]) == (32, 8)
    assert values["learning_rate"] in (1e-3, 3e-3)


def test_the_first_trial_is_near_what_is_advised() -> None:
    values = EVERY[
        first(EVERY, np.random.default_rng(0), {"learning_rate": 4e-4, "global_batch_size": 60.0})
    ]
    assert (values["epochs"], values["global_batch_size"], values["learning_rate"]) == (1, 64, 3e-4)


def test_the_best_is_expected_at_what_is_advised_where_that_is_in_the_space() -> None:
    def centre(**advised: float) -> tuple[float, float]:
        return Knowledge(PERPLEXITY, SPACE, [], advised=advised).encoder.centre()

    middle = math.log(32), (math.log(3e-4) + math.log(1e-2)) / 2
    assert centre() == pytest.approx(middle)
    assert centre(learning_rate=5e-4) == pytest.approx((middle[0], math.log(5e-4)))
    assert centre(learning_rate=1.0, global_batch_size=16.0) == pytest.approx(
        (math.log(16), middle[1])
    )


# ---------------------------------------------------------------------------------------------------------
# calibration


def test_forecasts_are_trusted_as_far_as_complete_trials_ended_near_them() -> None:
    told = [ran(number, values) for number, values in enumerate(EVERY[::9])]
    assert Knowledge(PERPLEXITY, SPACE, []).calibration == 1
    assert Knowledge(PERPLEXITY, SPACE, told[:1]).calibration == 1, (
        "there is no other one to foretell it"
    )
    knowledge = Knowledge(PERPLEXITY, SPACE, told)
    own = [knowledge.curves.points.trial == trial.number for trial in told]
    off = [knowledge.curves.surprise(mask) for mask in own]
    assert knowledge.calibration**2 * (EXPECTED_FROM + len(told)) == pytest.approx(
        EXPECTED_FROM + sum(surprise**2 for surprise in off)
    )
    assert knowledge.calibration < 0.9, "these follow a law without any noise"


# ----------------------------------------------------------------------------------------------------------------
# time


@pytest.mark.parametrize(("trials", "limit_s"), [(100, 0.5), (200, 1.0)])
def test_a_proposal_takes_little_time(trials: int, limit_s: float) -> None:
    """CPU time, the best of three, with room for a slow machine: twice the limit."""
    sampler = CarbonSampler("perplexity", 8.0)
    space = {**SPACE, "learning_rate": FloatDistribution(1e-4, 1e-2, log=True)}
    study = optuna.create_study(directions=["minimize"] * 2)
    rng = np.random.default_rng(0)
    for _ in range(trials):
        values = {
            **EVERY[rng.integers(len(EVERY))],
            "learning_rate": float(10 ** rng.uniform(-4, -2)),
        }
        trial = optuna.trial.create_trial(
            params=values,
            distributions=space,
            values=[cost(values), math.exp(nll(values))],
            user_attrs={
                TOTAL_STEPS: int(steps(values)),
                CURVE: [[int(steps(values)) * k / 8, nll(values, k / 8)] for k in range(1, 9)],
            },
        )
        study.add_trial(trial)
    taken = []
    for _ in range(3):
        began = time.process_time()
        assert sampler.plan(study.trials, space, trials).proposal is not None
        taken.append(time.process_time() - began)
    assert min(taken) <= 2 * limit_s, f"{min(taken):.2f} s"
