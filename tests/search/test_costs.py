"""What a step costs and whether it fits in memory, as learned from other settings."""

import itertools
import math

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from carbonopt.search.models.costs import SettingModel, chance_to_fit
from carbonopt.search.models.features import SpaceEncoder
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS
from carbonopt.search.sampler import CarbonSampler

DISTRIBUTIONS = {
    "global_batch_size": CategoricalDistribution((64, 128)),
    "micro_batch_size_per_gpu": CategoricalDistribution((2, 4, 8, 16, 32, 64)),
    "learning_rate": CategoricalDistribution((1e-4, 3e-4, 1e-3, 3e-3)),
    "epochs": CategoricalDistribution((1, 2, 4)),
    "zero_stage": CategoricalDistribution((0, 1, 2, 3)),
    "offload": CategoricalDistribution(("none", "optimizer")),
}
SEEDS = 2
ENCODER = SpaceEncoder(DISTRIBUTIONS)
EVERY = [
    dict(zip(DISTRIBUTIONS, combination, strict=True))
    for combination in itertools.product(*(d.choices for d in DISTRIBUTIONS.values()))
]


def step_cost(values: dict) -> float:
    """Joules: a large micro batch is cheap, partitioning and offload are dear."""
    batch, micro = values["global_batch_size"], values["micro_batch_size_per_gpu"]
    dear = (1, 1.02, 1.1, 1.4)[values["zero_stage"]] * (
        1.6 if values["offload"] == "optimizer" else 1.0
    )
    return batch * (0.5 + 2.0 / micro) * dear


def test_the_cost_of_a_step_is_told_between_known_settings() -> None:
    rng = np.random.default_rng(0)
    known = [EVERY[index] for index in rng.permutation(len(EVERY))[:40]]
    asked = [EVERY[index] for index in rng.permutation(len(EVERY))[:200]]
    model = SettingModel(
        ENCODER.system_rows(known), np.array([step_cost(values) for values in known])
    )
    mean, spread = model.predict(ENCODER.system_rows(asked))
    off = np.abs(mean - np.log([step_cost(values) for values in asked]))
    assert np.median(off) < 0.05
    assert off.max() < 0.4
    assert (off < 3 * spread + 0.05).mean() > 0.95
    at_known, sure = model.predict(ENCODER.system_rows(known))
    np.testing.assert_allclose(np.exp(at_known), [step_cost(values) for values in known], rtol=0.05)
    assert sure.max() < 0.1


def test_settings_that_leave_the_cost_alone_are_one_setting() -> None:
    setting = {**EVERY[0], "learning_rate": 1e-4, "epochs": 1}
    same = {**setting, "learning_rate": 3e-3, "epochs": 4}
    model = SettingModel(ENCODER.system_rows([setting, same]), np.array([10.0, 11.0]))
    assert model.known == 1
    drawn = model.sample(ENCODER.system_rows([setting, same]), 50, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_what_was_measured_beside_other_work_gives_way_to_what_was_not() -> None:
    """A probe that waited for a third of its time said 2.8 times as much as trials after it, on two
    cores.
    """
    rows = ENCODER.system_rows([EVERY[0], EVERY[0]])
    mean, spread = SettingModel(rows, np.array([2.8, 1.0]), np.array([0.36, 0.02])).predict(
        rows[:1]
    )
    assert math.exp(mean[0]) == pytest.approx(1.0, rel=0.02)
    alone, unsure = SettingModel(rows[:1], np.array([2.8]), np.array([0.36])).predict(rows[:1])
    assert math.exp(alone[0]) == pytest.approx(2.8) and unsure[0] > 5 * spread[0]
    alike, _ = SettingModel(rows, np.array([2.8, 1.0])).predict(rows[:1])
    assert math.exp(alike[0]) == pytest.approx(math.sqrt(2.8))


def test_with_nothing_known_larger_batches_cost_more_but_less_than_in_proportion() -> None:
    model = SettingModel(np.zeros((0, 3)), np.zeros(0))
    mean, spread = model.predict(
        ENCODER.system_rows(
            [
                {**EVERY[0], "global_batch_size": batch, "micro_batch_size_per_gpu": batch}
                for batch in (16, 32)
            ]
        )
    )
    assert 0 < mean[1] - mean[0] < math.log(2)
    assert (spread > 0).all()


def test_draws_are_spread_as_predictions_are() -> None:
    known, asked = EVERY[::97], EVERY[::53]
    model = SettingModel(
        ENCODER.system_rows(known), np.array([step_cost(values) for values in known])
    )
    mean, spread = model.predict(ENCODER.system_rows(asked))
    drawn = model.sample(ENCODER.system_rows(asked), 20_000, np.random.default_rng(1))
    np.testing.assert_allclose(drawn.mean(1), mean, atol=0.05 * max(spread))
    np.testing.assert_allclose(drawn.std(1), spread, rtol=0.05, atol=2e-3)


# --------------------------------------------------------------------------------------------------------------
# memory


def memory_gib(values: dict) -> float:
    """Of the model and its optimizer, by stage; and of the activations."""
    states = (24, 14, 12, 8)[values["zero_stage"]] - (6 if values["offload"] == "optimizer" else 0)
    return states + 1.2 * values["micro_batch_size_per_gpu"]


def told(*trials: tuple[dict, float | None]) -> tuple[np.ndarray, list[float | None]]:
    return ENCODER.memory_rows([values for values, _ in trials]), [peak for _, peak in trials]


BASE = {
    "global_batch_size": 64,
    "learning_rate": 1e-3,
    "epochs": 1,
    "zero_stage": 1,
    "offload": "none",
}


def micro(size: int, **changes: object) -> dict:
    return {**BASE, "micro_batch_size_per_gpu": size, **changes}


@pytest.mark.parametrize("capacity_gib", [None, 80.0])
def test_nothing_known_is_no_reason_against_anything(capacity_gib: float | None) -> None:
    rows = ENCODER.memory_rows([micro(2), micro(64)])
    assert (
        chance_to_fit(rows, ENCODER.memory_rows([]).reshape(0, 0), [], capacity_gib) == 1.0
    ).all()


def test_what_ran_out_of_memory_speaks_against_itself_and_all_that_needs_more() -> None:
    known, peaks = told((micro(8), 24.0), (micro(32), None))
    chances = chance_to_fit(
        ENCODER.memory_rows([micro(4), micro(8), micro(32), micro(64)]), known, peaks, None
    )
    assert (chances[:2] > 0.8).all()
    assert (chances[2:] < 0.2).all()


def test_a_known_capacity_warns_before_anything_ran_out_of_memory() -> None:
    known, peaks = told((micro(8), 20.0), (micro(16), 38.0))
    chances = chance_to_fit(ENCODER.memory_rows([micro(16), micro(64)]), known, peaks, 40.0)
    assert chances[0] > 0.8
    assert chances[1] < 0.2


def test_a_measured_peak_without_any_trouble_is_no_reason_either() -> None:
    known, peaks = told((micro(8), 20.0))
    assert (chance_to_fit(ENCODER.memory_rows([micro(64)]), known, peaks, None) == 1.0).all()


CAPACITY_GIB = 36.0


def nll(values: dict, share: float) -> float:
    steps = 4096 * values["epochs"] / values["global_batch_size"] * share
    off = math.log(values["learning_rate"] / 1e-3)
    return 1.5 + 6.0 * (steps * values["global_batch_size"]) ** -0.35 + 0.1 * off**2


def out_of_memory(seed: int, known_capacity_gib: float | None, trials: int = 30) -> list[bool]:
    """Of each trial of a simulated study, whether it ran out of memory."""
    sampler = CarbonSampler(
        "perplexity",
        12.0,
        valid=exists,
        memory_gib=known_capacity_gib,
        search_space=DISTRIBUTIONS,
        seed=seed,
    )
    study = optuna.create_study(directions=["minimize"] * 2, sampler=sampler)
    ended = []
    for _ in range(trials):
        trial = study.ask()
        values = {
            name: trial._suggest(name, distribution) for name, distribution in DISTRIBUTIONS.items()
        }
        if memory_gib(values) > CAPACITY_GIB:
            ended.append(True)
            trial.set_user_attr("out_of_memory", True)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        total = 4096 * values["epochs"] // values["global_batch_size"]
        trial.set_user_attr(TOTAL_STEPS, total)
        trial.set_user_attr(COST_PER_STEP, step_cost(values))
        trial.set_user_attr("peak_memory_gib", memory_gib(values))
        trial.set_user_attr(CURVE, [[total // 2, nll(values, 0.5)], [total, nll(values, 1.0)]])
        study.tell(trial, [total * step_cost(values), math.exp(nll(values, 1.0))])
        ended.append(False)
    return ended


def exists(values: dict) -> bool:
    return values["micro_batch_size_per_gpu"] <= values["global_batch_size"] and not (
        values["offload"] == "optimizer" and values["zero_stage"] == 0
    )


@pytest.mark.slow
def test_few_trials_run_out_of_memory() -> None:
    assert (
        sum(not exists(values) or memory_gib(values) > CAPACITY_GIB for values in EVERY)
        > len(EVERY) / 4
    )
    assert np.mean([out_of_memory(seed, CAPACITY_GIB) for seed in range(SEEDS)]) < 0.05


@pytest.mark.slow
def test_where_the_capacity_is_not_known_the_first_out_of_memory_teaches_it() -> None:
    after_the_first = []
    for seed in range(SEEDS):
        ended = out_of_memory(seed, None)
        after_the_first += ended[ended.index(True) + 1 :] if True in ended else []
    assert after_the_first, "no study met the limit"
    assert np.mean(after_the_first) < 0.05
