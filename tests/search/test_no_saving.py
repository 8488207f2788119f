"""What costs as much as a trial that met the target is not proposed, nor what trains to the same
quality as one that missed it; values are typed ones.
"""

import math
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import create_trial
from simulated_searches import Simulated, Training
from small_studies import reward_study

from carbonopt.core.dimensions import affecting_run_cost
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import ACCURACY
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.core.values import as_typed, stepped
from carbonopt.search.candidates import draw
from carbonopt.search.inner_samplers import INNER, ValidSampler
from carbonopt.search.observation import of_record
from carbonopt.search.probe_plan import Probing
from carbonopt.search.sampler import CarbonSampler
from carbonopt.space.search_space import SearchSpace
from carbonopt.study_file.reader import parse_study

BATCHES, EPOCHS, RATES = [16, 32, 64], [1, 2, 4], [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
DECIDING = ("global_batch_size", "epochs")
TARGET = 0.8


def training(values: Any) -> Training:
    """The rate decides the quality alone."""
    steps = 6400 * values["epochs"] // values["global_batch_size"]
    off = math.log10(values["learning_rate"] / 1e-3) ** 2
    accuracy = 0.93 - 0.1 * off - 0.1 / values["epochs"] - 0.0005 * values["global_batch_size"]
    return Training(steps, 1e-6 * values["global_batch_size"] ** 0.6, accuracy)


def measured(number: int, true: Training) -> Training:
    """Steps scatter by 1 %, and the first one takes up to a fifth of a training: with luck, another
    trial of the same cost takes less than the first that met the target.
    """
    rng = np.random.default_rng(number)
    excess_kwh = 0.2 * true.cost_kwh * rng.random()
    step_kwh = true.step_kwh * math.exp(0.01 * rng.standard_normal())
    return Training(true.steps, step_kwh, true.accuracy, excess_kwh)


@pytest.mark.parametrize("seed", range(3))
def test_no_proposal_costs_as_much_as_one_that_met_the_target(seed: int) -> None:
    choices = {"global_batch_size": BATCHES, "learning_rate": RATES, "epochs": EPOCHS}
    ended = Simulated(choices, training, measured=measured, is_script=False).run(seed)
    met: set[tuple[Any, ...]] = set()
    as_costly = 0
    for trial in ended.trials:
        key = tuple(trial.params[name] for name in DECIDING)
        as_costly += key in met
        if trial.values is not None and trial.values[1] >= TARGET:
            met.add(key)
    assert met and as_costly == 0
    left = [tuple(values[name] for name in DECIDING) for values in ended.left()]
    assert any(key in met for key in left)  # which others than a full grid leave
    assert ended.cheaper_left(0.05) == []


def test_a_study_ends_where_nothing_but_the_rate_is_left() -> None:
    """And says how many are left, and why."""
    choices = {"learning_rate": RATES, "global_batch_size": [16], "epochs": [4]}
    ended = Simulated(
        choices,
        training,
        start={"learning_rate": 1e-3, "global_batch_size": 16, "epochs": 4},
        is_script=False,
    ).run()
    assert [trial.params["learning_rate"] for trial in ended.trials] == [1e-3]
    assert "4 untried configurations" in str(ended.why) and "cost" in str(ended.why)


STAGES = [0, 1, 2]


def sharded(values: Any) -> Training:
    """The ZeRO stage decides the cost alone."""
    true = training(values)
    return Training(true.steps, true.step_kwh * (1 + 0.1 * values["zero_stage"]), true.accuracy)


@pytest.mark.parametrize("seed", range(3))
def test_no_proposal_trains_to_the_quality_of_one_that_missed_the_target(seed: int) -> None:
    choices = {
        "zero_stage": STAGES,
        "global_batch_size": [16, 64],
        "learning_rate": RATES[::2],
        "epochs": [1, 4],
    }
    start = {"zero_stage": 1, "global_batch_size": 16, "learning_rate": 1e-4, "epochs": 1}
    ended = Simulated(choices, sharded, start=start, is_script=False).run(seed)
    missed: set[tuple[Any, ...]] = set()
    for trial in ended.trials:
        key = tuple(trial.params[name] for name in ("learning_rate", *DECIDING))
        assert key not in missed
        if trial.values is not None and trial.values[1] < TARGET:
            missed.add(key)
    assert missed and ended.cheaper_left(0.05) == []


def test_a_study_ends_where_nothing_but_the_stage_is_left() -> None:
    """Though no trial met the target."""
    choices = {
        "zero_stage": STAGES,
        "global_batch_size": [64],
        "learning_rate": [1e-4],
        "epochs": [1],
    }
    ended = Simulated(choices, sharded, is_script=False).run()
    assert len(ended.trials) == 1 and ended.records[0].value < TARGET
    assert "2 untried configurations" in str(ended.why) and "quality" in str(ended.why)


@pytest.mark.parametrize(
    ("state", "stop_reason", "accuracy", "meets"),
    [
        (TrialState.COMPLETE, None, 0.79, False),
        (TrialState.COMPLETE, None, 0.8, True),
        (TrialState.PRUNED, StopReason.TARGET, 0.5, False),
        (TrialState.PRUNED, StopReason.CAP, 0.5, None),
        (TrialState.PRUNED, StopReason.BUDGET, 0.5, None),
        (TrialState.DIVERGED, None, 0.5, False),
        (TrialState.FAILED, None, 0.5, None),
        (TrialState.INFEASIBLE, None, 0.5, None),
        (TrialState.RUNNING, None, 0.9, None),
    ],
)
def test_a_trial_missed_the_target_if_its_end_or_its_forecast_did(
    state: TrialState, stop_reason: StopReason | None, accuracy: float, meets: bool | None
) -> None:
    observation = of_record(changed(state=state, stop_reason=stop_reason, accuracy=accuracy))
    assert observation.meets(ACCURACY.loss_of(TARGET)) is meets


def changed(accuracy: float, **changes: object) -> TrialRecord:
    """The record of a trial of one configuration, with another end."""
    choices = {"global_batch_size": [64], "learning_rate": [1e-3], "epochs": [1]}
    record = Simulated(choices, training, is_script=False).run().records[0]
    last = EvalPoint.of(ACCURACY, accuracy * 1000, 1000, step=record.total_steps, tokens=None)
    return record.model_copy(update={"evals": (last,), **changes})


def test_the_micro_batch_may_decide_the_quality() -> None:
    """By batch normalisation, or as a script's whole batch."""

    def divided(values: Any) -> Training:
        return Training(100, 1e-6, 0.7 if values["micro_batch_size_per_gpu"] == 1 else 0.9)

    choices = {"micro_batch_size_per_gpu": [1, 2, 4], "learning_rate": [1e-3]}
    start = {"micro_batch_size_per_gpu": 1, "learning_rate": 1e-3}
    ended = Simulated(choices, divided, start=start).run()
    assert ended.best["micro_batch_size_per_gpu"] in (2, 4)


@pytest.mark.parametrize(
    ("ends", "missing"), [((0.79,), 2), ((0.79, 0.7), 2), ((0.85, 0.79), 0), ((0.85,), 0)]
)
def test_a_configuration_of_which_one_seed_met_the_target_is_not_given_up(
    ends: tuple[float, ...], missing: int
) -> None:
    space = {
        "rate": CategoricalDistribution([1e-3, 1e-2]),
        "stage": CategoricalDistribution([0, 1, 2]),
    }
    sampler = CarbonSampler("accuracy", TARGET, search_space=space, affects={"stage": "cost"})
    trials = [
        create_trial(params={"rate": 1e-3, "stage": 0}, distributions=space, values=[1.0, end])
        for end in ends
    ]
    assert sampler.plan(trials, space, len(ends)).left.missing == missing


@pytest.mark.parametrize("seed", range(4))
def test_no_probed_settings_train_like_a_trial_that_missed_the_target(seed: int) -> None:
    """Settings that a probe may choose differ from the proposed ones in the micro batch, too."""
    choices = {"learning_rate": [1e-4, 3e-4], "micro_batch_size_per_gpu": [2, 4, 8]}
    space = {
        name: CategoricalDistribution(values)
        for name, values in {**choices, "zero_stage": STAGES, "epochs": [1]}.items()
    }
    sampler = CarbonSampler(
        "accuracy",
        TARGET,
        search_space=space,
        complete=lambda values: {**values, "global_batch_size": 8},
        seed=seed,
    )
    missed = {"learning_rate": 3e-4, "micro_batch_size_per_gpu": 8, "epochs": 1}
    trials = [
        create_trial(
            params={**missed, "zero_stage": 2, **changes},
            distributions=space,
            values=[cost, accuracy],
            user_attrs={"curve": [[50, accuracy - 0.1], [100, accuracy]], "total_steps": 100},
        )
        for changes, accuracy, cost in (({}, 0.7995, 1.2), ({"learning_rate": 1e-4}, 0.5, 3.0))
    ]
    for number, trial in enumerate(trials):
        trial.number = number
    for probing in (None, Probing(10, 0.01)):
        planned = sampler.plan(trials, space, len(trials), probing=probing).values
        assert planned is not None
        assert any(planned[name] != value for name, value in missed.items())


@pytest.mark.parametrize("seed", range(8))
def test_optunas_studies_repeat_nothing_while_something_is_untried(seed: int) -> None:
    choices = {"rate": [1e-3, 3e-3, 1e-2], "stage": [0, 1, 2]}
    space = {name: CategoricalDistribution(values) for name, values in choices.items()}
    sampler = CarbonSampler(
        "accuracy", TARGET, search_space=space, affects={"stage": "cost"}, seed=seed
    )
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    for _ in range(9):
        trial = study.ask(space)
        study.tell(trial, [1.0 + trial.params["stage"], 0.5 + 40 * trial.params["rate"]])
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 9


def test_settings_decide_the_cost_where_nothing_else_sets_the_steps(
    tiny_study: dict, replay_study: dict
) -> None:
    script = {"task": "script", "command": "python train.py {learning_rate}"}
    space = {"learning_rate": {"choices": [1e-3, 2e-3]}}
    own = {"workload": script, "search": {"space": space}, "target": {"accuracy": 0.9}}
    expected = {True: [tiny_study], False: [replay_study, {**tiny_study, **own}]}
    for decide, studies in expected.items():
        for raw in studies:
            assert parse_study(raw, "test").settings_decide_cost is decide
    assert not reward_study().config.settings_decide_cost


def test_the_rate_affects_no_cost_but_epochs_and_what_nobody_knows_do() -> None:
    names = ("learning_rate", "epochs", "width", "seed_of_data", "micro_batch_size_per_gpu")
    stated = {"seed_of_data": "quality"}
    assert affecting_run_cost(names, stated) == ("epochs", "width", "micro_batch_size_per_gpu")


@pytest.mark.parametrize(
    ("value", "low", "high", "log", "typed"),
    [
        (0.029999999999999995, 1e-4, 1e-1, True, 0.03),
        (0.0123456, 1e-4, 1e-1, True, 0.0123),
        (1.23456e-7, 1e-9, 1e-3, True, 1.23e-7),
        (123456.0, 1.0, 1e6, True, 123000.0),
        (0.003051234, 0.0030, 0.0031, True, 0.0030512),  # three digits would be 11 values
        (1e-4, 1.23456e-4, 1e-1, True, 1.23456e-4),  # an end, as it was typed
        (0.0437219, 0.0, 0.1, False, 0.0437),
        (0.30000000000000004, 0.0, 1.0, False, 0.3),
        (2.0, 2.0, 2.0, False, 2.0),
    ],
)
def test_a_value_is_one_that_somebody_would_type(
    value: float, low: float, high: float, log: bool, typed: float
) -> None:
    assert as_typed(value, low, high, log=log) == typed


def test_values_of_steps_are_as_typed() -> None:
    assert stepped(0.1, 0.7, 0.1) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert stepped(8, 32, 8) == [8, 16, 24, 32]
    assert FloatDistribution(0.1, 0.7, step=0.1)._contains(stepped(0.1, 0.7, 0.1)[2])


def test_drawn_rates_have_three_digits() -> None:
    rng, rate = np.random.default_rng(0), FloatDistribution(1e-5, 1e-1, log=True)
    drawn = [draw(rate, rng) for _ in range(300)]
    assert all(float(f"{value:.3g}") == value for value in drawn)
    assert len(set(drawn)) > 250


@pytest.mark.parametrize("name", sorted(INNER))
def test_optunas_samplers_propose_typed_values(name: str) -> None:
    simulated = Simulated({"global_batch_size": BATCHES}, training)
    config = simulated._config(0)
    raw = config.search.space.model_dump() | {
        "learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}
    }
    space = SearchSpace(type(config.search.space)(**raw), 1, on_gpu=False, own_dimensions=True)
    study = optuna.create_study(directions=["minimize", "maximize"])
    study.sampler = ValidSampler(name, space, 0, 0, [])
    trial = study.ask(study.sampler._distributions)
    assert float(f"{trial.params['learning_rate']:.3g}") == trial.params["learning_rate"]
