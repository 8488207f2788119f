"""What a search says when it ends is true of what it left."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from simulated_searches import TARGET, Simulated, Training, Values, random_table
from small_studies import script_run

from carbonopt.core.trial import Stage, StageCost, StopReason, TrialState
from carbonopt.search.observation import of_record

WIDTHS = [64, 256, 1024]
RATES = [1e-3, 3e-3]


def by_width(power: float, excess_kwh: float = 0.0):
    """A training whose step costs a power of the width; every width meets the target."""

    def training(values: Values) -> Training:
        step_kwh = 1e-6 * (values["width"] / 64) ** power
        return Training(200, step_kwh, TARGET + 0.1, excess_kwh)

    return training


def assert_true(simulated: Simulated, seed: int = 0) -> None:
    ended = simulated.run(seed)
    assert ended.why is not None
    assert ended.cheaper_left(by=0.05) == [], (ended.why, [trial.params for trial in ended.trials])


@pytest.mark.parametrize("power", [0.9, -0.9, 0.45])
@pytest.mark.parametrize("excess_steps", [0, 200, 5000])
def test_a_width_that_was_never_tried_is_not_taken_to_cost_more(
    power: float, excess_steps: int
) -> None:
    """From 1024, with a first step that takes up to 25 times all others of the cheapest width."""
    study = {"width": WIDTHS, "learning_rate": RATES}
    start = {"width": 1024 if power > 0 else 64, "learning_rate": 1e-3}
    assert_true(Simulated(study, by_width(power, excess_steps * 1e-6), start))


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_choice_of_words_may_cost_tenfold_or_a_tenth(factor: float) -> None:
    def training(values: Values) -> Training:
        step_kwh = 1e-6 * (factor if values["kind"] == "b" else 1.0)
        return Training(200, step_kwh, TARGET + 0.1)

    assert_true(
        Simulated(
            {"kind": ["a", "b", "c"], "learning_rate": RATES},
            training,
            {"kind": "a", "learning_rate": 1e-3},
        )
    )


@pytest.mark.parametrize("compiling", [0, 1, 2])
def test_a_first_step_that_compiled_in_one_trial_alone_speaks_for_no_other(compiling: int) -> None:
    def measured(number: int, true: Training) -> Training:
        return (
            dataclasses.replace(true, excess_kwh=100 * true.cost_kwh)
            if number == compiling
            else true
        )

    start = {"width": 1024, "learning_rate": 1e-3}
    assert_true(
        Simulated({"width": WIDTHS, "learning_rate": RATES}, by_width(0.9), start, measured)
    )


@pytest.mark.parametrize("times", [15.0, 3.0, 0.3])
def test_a_first_trial_that_was_measured_wrongly_ends_nothing(times: float) -> None:
    """On a busy machine one configuration took 9.5 and then 0.65 mg."""

    def measured(number: int, true: Training) -> Training:
        return dataclasses.replace(true, step_kwh=true.step_kwh * times) if number == 0 else true

    start = {"width": 256, "learning_rate": 1e-3}
    assert_true(
        Simulated({"width": WIDTHS, "learning_rate": RATES}, by_width(0.9), start, measured)
    )


def test_an_end_that_is_stated_names_how_many_are_left_and_how_unlikely_they_are() -> None:
    """With a choice that decides the cost alone, all dearer widths stay untried."""
    study = {"width": [64, 128, 256, 512, 1024, 2048], "learning_rate": [1e-3, 2e-3, 3e-3, 4e-3]}
    ended = Simulated(study, by_width(1.0), {"width": 2048, "learning_rate": 1e-3}).run()
    assert ended.why is not None and ended.best["width"] == 64
    assert len(ended.left()) > 0 and f" {len(ended.left())} untried configurations " in ended.why


@pytest.mark.parametrize(
    "choices", [{"width": WIDTHS}, {"kind": ["a", "b", "c"]}, {"epochs": [1, 2, 4]}]
)
def test_of_three_configurations_the_cheapest_is_found_from_each(choices: dict) -> None:
    ((name, values),) = choices.items()

    def training(chosen: Values) -> Training:
        return Training(100, 1e-6 * 8.0 ** values.index(chosen[name]), TARGET + 0.1)

    for start in values:
        ended = Simulated(choices, training, {name: start}).run()
        assert ended.best == {name: values[0]} and ended.cheaper_left(by=0.0) == []


def test_steps_that_do_not_follow_the_batch_end_nothing_before_the_trials_tell() -> None:
    """A script of a fixed number of steps: a small batch is cheap, where more steps were expected
    of it.
    """

    def training(values: Values) -> Training:
        return Training(200, 1e-6 * values["global_batch_size"], TARGET + 0.1)

    start = {"global_batch_size": 64, "learning_rate": 1e-3}
    assert_true(
        Simulated({"global_batch_size": [4, 16, 64], "learning_rate": RATES}, training, start)
    )


def test_a_dimension_of_the_users_own_may_decide_the_number_of_steps() -> None:
    def training(values: Values) -> Training:
        return Training(values["iterations"], 1e-6, TARGET + 0.1)

    start = {"iterations": 1000, "learning_rate": 1e-3}
    assert_true(Simulated({"iterations": [50, 200, 1000], "learning_rate": RATES}, training, start))


@pytest.mark.parametrize("power", [0.7, -0.7], ids=["a high rate stops early", "a low one does"])
@pytest.mark.parametrize("batches", [[32], [16, 32, 64]])
def test_a_loop_that_stops_by_itself_may_do_so_by_its_rate(power: float, batches: list) -> None:
    """Of the rate the table says that it affects the quality alone, which holds for a given number
    of steps.
    """

    def training(values: Values) -> Training:
        steps = round(1000 * (1e-3 / values["learning_rate"]) ** power)
        step_kwh = 1e-6 * values["global_batch_size"] ** 0.5
        return Training(steps, step_kwh, TARGET + 0.1, planned_steps=100_000)

    rates = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
    start = {"learning_rate": 1e-3, "global_batch_size": 32}
    for seed in range(2):
        assert_true(
            Simulated({"learning_rate": rates, "global_batch_size": batches}, training, start), seed
        )


def test_words_that_decide_when_a_loop_stops_are_all_tried() -> None:
    def training(values: Values) -> Training:
        steps = {"linear": 1000, "cosine": 300, "constant": 100}[values["lr_scheduler"]]
        return Training(steps, 1e-6, TARGET + 0.1, planned_steps=100_000)

    schedulers = {"lr_scheduler": ["linear", "cosine", "constant"]}
    assert_true(Simulated(schedulers, training, {"lr_scheduler": "linear"}))


def test_a_script_may_have_stopped_by_itself_where_its_steps_are_not_as_it_said() -> None:
    def may_stop(**changes: Any) -> bool:
        return of_record(script_run(0, 0.9, **changes)).may_stop_itself

    whole = StageCost(duration_s=1.0, energy_kwh=1e-3)
    training = {Stage.COMPILE: whole, Stage.STEPS: whole}
    assert may_stop(stages={Stage.STEPS: whole})  # without carbonopt's lines
    assert may_stop(stages=training, planned_steps=40)
    assert not may_stop(stages=training)
    pruned = {"state": TrialState.PRUNED, "stop_reason": StopReason.CAP}
    assert not may_stop(stages=training, planned_steps=40, **pruned)


@pytest.mark.parametrize("working", [0, 2, 5])
def test_where_all_trials_but_one_fail_every_configuration_is_tried(working: int) -> None:
    choices = {"width": WIDTHS, "learning_rate": RATES}
    one = Simulated(choices, by_width(0.9)).configurations[working]

    def training(values: Values) -> Training:
        return dataclasses.replace(by_width(0.9)(values), fails=dict(values) != one)

    ended = Simulated(choices, training).run()
    assert ended.best == one and ended.cheaper_left(by=0.0) == []


@pytest.mark.slow
def test_random_tables_end_truly() -> None:
    """Of 300 such searches 179 stated an end, and one had left a configuration that is 5 % cheaper:
    with 95 % confidence at most 2.7 % do. Before candidates were compared with what the model says
    of the best, 5 of 66 did.
    """
    for seed in range(12):
        table = random_table(np.random.default_rng(seed))
        ended = table.run(seed)
        if ended.why is not None and ended.left():
            assert ended.cheaper_left(by=0.05) == [], seed
