"""What parameters do, learned from trials of functions whose effects are known, and from recorded
H200 runs.
"""

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from documents import texts_of
from small_studies import study, trial

from carbonopt.analysis.influence import (
    FEWEST,
    MOST_TRIALS,
    RESAMPLES,
    Gap,
    Influence,
    NotKnown,
    influence,
)
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import TrialState
from carbonopt.engines.replay import RecordedRun, read_table
from carbonopt.report.sections.influence_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData
from carbonopt.study_file.reader import parse_study

TABLES = Path(__file__).parents[2] / "reports" / "search" / "tables"
FEW = 40  # resamples: enough to see which way an interval goes
SPACE: dict[str, Any] = {
    "global_batch_size": {"choices": [8, 16, 32, 64]},
    "learning_rate": {"low": 1e-5, "high": 1e-2, "log": True},
    "epochs": {"choices": [1, 2, 4]},
    "lr_scheduler": {"choices": ["linear", "cosine", "constant"]},
    "zero_stage": 1,
}


def data(space: dict[str, Any], runs: list[tuple[dict, float, float]], **changes) -> StudyData:
    """A study of complete trials: parameters, emissions in kg CO2e, perplexity."""
    records = [
        trial(number, 1e-3, perplexity, params=params, emissions_kg_co2e=emissions_kg, **changes)
        for number, (params, emissions_kg, perplexity) in enumerate(runs)
    ]
    plain = study(*records)
    raw = {**plain.config.model_dump(mode="json"), "search": {"space": space}}
    return plain.model_copy(update={"config": parse_study(raw, "test")})


def true_log_perplexity(params: dict) -> float:
    rate = math.log10(params["learning_rate"]) + 3.5
    return 1.2 + 0.1 * rate**2 + 0.4 / params["epochs"]


def known(count: int, seed: int) -> list[tuple[dict, float, float]]:
    """Runs whose emissions follow from epochs and batch, and their perplexity from epochs and rate;
    1 % noise.
    """
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(count):
        batch = int(rng.choice([8, 16, 32, 64]))
        params = {
            "global_batch_size": batch,
            "micro_batch_size_per_gpu": batch,
            "learning_rate": float(10 ** rng.uniform(-5, -2)),
            "epochs": int(rng.choice([1, 2, 4])),
            "lr_scheduler": str(rng.choice(["linear", "cosine", "constant"])),
        }
        emissions_kg = 1e-3 * params["epochs"] * batch**-0.3 * math.exp(0.01 * rng.normal())
        runs.append(
            (params, emissions_kg, math.exp(true_log_perplexity(params) + 0.01 * rng.normal()))
        )
    return runs


def both(data: StudyData, resamples: int = FEW) -> tuple[Influence, Influence]:
    emissions, perplexity = influence(data, resamples=resamples)
    assert isinstance(emissions, Influence) and isinstance(perplexity, Influence)
    assert (emissions.objective, perplexity.objective) == ("emissions", "perplexity")
    return emissions, perplexity


def test_a_quality_that_differs_by_rounding_alone_has_no_parameters() -> None:
    """Other ZeRO stages and micro batches add up the same losses in another order."""
    space = {
        "global_batch_size": 64,
        "micro_batch_size_per_gpu": {"choices": [4, 16, 64]},
        "learning_rate": 1e-3,
        "epochs": 1,
        "zero_stage": {"choices": [0, 1, 2, 3]},
    }
    runs = []
    for micro in (4, 16, 64):
        for stage in range(4):
            params = {
                "global_batch_size": 64,
                "micro_batch_size_per_gpu": micro,
                "learning_rate": 1e-3,
                "epochs": 1,
                "zero_stage": stage,
            }
            perplexity = 18.0 * (1 + 1e-8 * stage + 2e-8 * math.log(micro))
            runs.append((params, 1e-3 * (1 + 0.1 * stage), perplexity))
    emissions, quality = influence(data(space, runs), resamples=2)
    assert isinstance(emissions, Influence)
    assert isinstance(quality, NotKnown) and quality.needed == 2


@pytest.mark.slow
def test_what_matters_comes_first_and_what_does_not_is_near_nothing() -> None:
    emissions, perplexity = both(data(SPACE, known(30, seed=1)))
    assert [parameter.name for parameter in emissions.parameters[:2]] == [
        "epochs",
        "global_batch_size",
    ]
    assert {parameter.name for parameter in perplexity.parameters[:2]} == {
        "epochs",
        "learning_rate",
    }
    for learned_influence in (emissions, perplexity):
        assert {parameter.name for parameter in learned_influence.parameters} == set(SPACE) - {
            "zero_stage"
        }
        assert sum(
            parameter.importance for parameter in learned_influence.parameters
        ) == pytest.approx(1)
        relevant, irrelevant = learned_influence.parameters[:2], learned_influence.parameters[2:]
        assert max(parameter.importance_highest for parameter in irrelevant) < 0.05
        assert min(parameter.importance_lowest for parameter in relevant) > 0.05
        assert learned_influence.explained is not None and learned_influence.explained > 0.9
        for parameter in learned_influence.parameters:
            assert (
                parameter.importance_lowest <= parameter.importance <= parameter.importance_highest
            )
            assert all(
                effect.lowest <= effect.expected <= effect.highest for effect in parameter.effects
            )
            assert (
                sum(effect.trials for effect in parameter.effects) == learned_influence.trials == 30
            )


@pytest.mark.slow
def test_the_interval_of_an_effect_holds_the_true_one_most_of_the_time() -> None:
    held = []
    for seed in range(4):
        runs = known(24, seed)
        _, perplexity = both(data(SPACE, runs))
        for parameter in perplexity.parameters:
            for effect in parameter.effects:
                true = fmean(
                    true_log_perplexity({**params, parameter.name: effect.value})
                    for params, _, _ in runs
                )
                if effect.lowest is not None:  # one configuration alone has no interval
                    held.append(effect.lowest <= math.exp(true) <= effect.highest)
    assert len(held) > 4 * (4 + 6 + 3 + 3) - 8
    assert fmean(held) > 0.75


def recorded(
    name: str, count: int, seed: int
) -> tuple[list[RecordedRun], list[RecordedRun], StudyData]:
    """The whole table, the runs drawn from it, and a study of these."""
    table = read_table(TABLES / f"{name}.jsonl", PERPLEXITY)
    drawn = np.random.default_rng(seed).permutation(len(table))[:count]
    runs = [table[index] for index in sorted(drawn)]
    space = {
        key: {"choices": sorted({run.params[key] for run in table})} for key in table[0].params
    }  # type: ignore[type-var]
    tried = [
        ({"micro_batch_size_per_gpu": 1, **run.params}, joules(run), math.exp(run.evals[-1].nll))
        for run in runs
    ]
    return table, runs, data(space, tried)


def joules(run: RecordedRun) -> float:
    return run.joules_per_step * run.total_steps


@pytest.mark.parametrize("name", ["text2sql-tune", "wikitext-overfit"])
@pytest.mark.slow
def test_a_few_recorded_runs_tell_the_effects_in_the_whole_table(name: str) -> None:
    table, runs, some = recorded(name, 30, seed=2)
    emissions, perplexity = both(some)
    assert emissions.parameters[0].name == "epochs"
    assert perplexity.explained is not None and perplexity.explained > 0.6
    by_params = {tuple(run.params.items()): run for run in table}
    held = []
    for learned_influence, outcome in (
        (emissions, lambda run: math.log(joules(run))),
        (perplexity, lambda run: run.evals[-1].nll),
    ):
        for parameter in learned_influence.parameters:
            for effect in parameter.effects:
                same = [
                    by_params[tuple({**run.params, parameter.name: effect.value}.items())]
                    for run in runs
                ]
                true = fmean(outcome(run) for run in same)
                if effect.lowest is not None:
                    held.append(
                        math.log(effect.lowest) - 0.002 <= true <= math.log(effect.highest) + 0.002
                    )
    assert fmean(held) > 0.75


def test_values_are_the_tried_ones_and_of_a_range_a_few() -> None:
    runs = known(26, seed=3)
    emissions, _ = both(data(SPACE, runs))
    values = {
        parameter.name: [effect.value for effect in parameter.effects]
        for parameter in emissions.parameters
    }
    assert values["global_batch_size"] == [8, 16, 32, 64]
    assert values["lr_scheduler"] == ["linear", "cosine", "constant"]
    rates = values["learning_rate"]
    assert len(rates) <= 6
    assert (rates[0], rates[-1]) == (
        min(params["learning_rate"] for params, _, _ in runs),
        max(params["learning_rate"] for params, _, _ in runs),
    )


def test_true_and_false_stay_what_they_are() -> None:
    runs = [
        (
            {"gradient_checkpointing": number % 2 == 0},
            1e-3 * (1 + number % 2) * (1 + 1e-3 * number),
            5.0 + number,
        )
        for number in range(12)
    ]
    emissions, _ = both(data({**SPACE, "gradient_checkpointing": {"choices": [True, False]}}, runs))
    parameter = next(
        candidate
        for candidate in emissions.parameters
        if candidate.name == "gradient_checkpointing"
    )
    assert [effect.value for effect in parameter.effects] == [False, True]
    assert parameter.effects[0].expected == pytest.approx(
        2 * parameter.effects[1].expected, rel=0.02
    )


@pytest.mark.slow
def test_the_same_trials_say_the_same_again() -> None:
    again = data(SPACE, known(12, seed=4))
    assert influence(again, resamples=FEW) == influence(again, resamples=FEW)


@pytest.mark.parametrize("processes", [2, 7])
def test_however_many_processes_find_it_they_say_the_same(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    influences = []
    for count in (1, processes):
        monkeypatch.setattr("carbonopt.analysis.influence.processes", lambda count=count: count)
        influences.append(both(data(SPACE, known(20, seed=1)), resamples=10))
    assert influences[0] == influences[1]


def test_repeats_count_as_runs_but_explain_nothing_about_themselves() -> None:
    """Three runs of each configuration, and an outcome that no parameter has to do with."""
    rng = np.random.default_rng(0)
    runs = []
    for params, _, _ in known(8, seed=5):
        level = float(rng.normal())
        runs += [(params, math.exp(level + 1e-3 * seed), 5.0 + level) for seed in range(3)]
    emissions, perplexity = influence(data(SPACE, runs), resamples=FEW)
    assert (emissions.trials, perplexity.trials) == (24, 24)
    # Of what explains less than the mean does, no parameter's importance is told.
    assert (
        isinstance(emissions, NotKnown)
        and emissions.explained is not None
        and emissions.explained <= 0
    )


@pytest.mark.slow
def test_repeats_do_not_make_intervals_narrower() -> None:
    """Five runs of a configuration that differ by nothing but noise tell no more of the parameters
    than one.
    """
    once = known(12, seed=11)
    rng = np.random.default_rng(0)
    often = [
        (params, kg, perplexity * math.exp(1e-4 * rng.normal()))
        for params, kg, perplexity in once * 5
    ]
    widths = []
    for runs in (once, often):
        _, perplexity = both(data(SPACE, runs))
        assert (perplexity.trials, perplexity.repeats) == (len(runs), len(runs) - 12)
        effects = [effect for parameter in perplexity.parameters for effect in parameter.effects]
        widths.append(
            fmean(math.log(effect.highest / effect.lowest) for effect in effects if effect.lowest)
        )
    assert widths[1] > 0.6 * widths[0]


def test_what_does_nothing_has_an_interval_nevertheless() -> None:
    """Of ten noisy runs no resample can be sure that a parameter does nothing, whatever lengths all
    runs gave.
    """
    rng = np.random.default_rng(2)
    runs = [
        (params, 1e-3 * params["epochs"] * math.exp(0.2 * rng.normal()), perplexity)
        for params, _, perplexity in known(16, seed=12)
    ]
    emissions, _ = both(data(SPACE, runs))
    assert emissions.parameters[0].name == "epochs"
    assert max(parameter.importance_highest for parameter in emissions.parameters[1:]) > 0.05
    assert emissions.parameters[0].importance_lowest < 0.95


def test_a_value_that_one_configuration_had_is_not_extrapolated_to() -> None:
    """A third of the resamples lack it: what these expect there is no uncertainty of what was seen."""
    runs = [
        (params, kg, perplexity)
        for params, kg, perplexity in known(30, seed=14)
        if params["epochs"] != 4
    ]
    longest = next(run for run in known(30, seed=14) if run[0]["epochs"] == 4)
    emissions, _ = both(data(SPACE, [*runs, longest]))
    epochs = next(parameter for parameter in emissions.parameters if parameter.name == "epochs")
    assert [(effect.value, effect.trials) for effect in epochs.effects][-1] == (4, 1)
    two, four = epochs.effects[-2:]
    assert four.expected > 1.5 * two.expected  # in truth twice as much
    assert (four.lowest, four.highest) == (None, None), "one configuration shows no spread"


@pytest.mark.slow
def test_where_no_trial_completed_is_said_and_no_effect_given() -> None:
    space = {
        **SPACE,
        "epochs": {"choices": [1, 2, 4, 8, 16]},
        "weight_decay": {"low": 0, "high": 0.1},
        "warmup_ratio": {"low": 0, "high": 0.2},
    }
    runs = [
        ({**params, "weight_decay": 0.1 * (number % 2), "warmup_ratio": 0.1}, kg, perplexity)
        for number, (params, kg, perplexity) in enumerate(known(30, seed=13))
        if params["learning_rate"] < 1e-3
    ]
    influences = influence(data(space, runs), resamples=FEW)
    emissions = influences[0]
    assert isinstance(emissions, Influence)
    tried = [params["learning_rate"] for params, _, _ in runs]
    assert emissions.gaps == (
        Gap(name="learning_rate", tried=(min(tried), max(tried)), low=1e-5, high=1e-2),
        Gap(name="epochs", tried=(1, 2, 4), untried=(8, 16)),
        Gap(name="warmup_ratio", tried=(0.1,), low=0, high=0.2),
    )
    values = {
        parameter.name: [effect.value for effect in parameter.effects]
        for parameter in emissions.parameters
    }
    assert "warmup_ratio" not in values and values["epochs"] == [1, 2, 4]
    assert max(values["learning_rate"]) == max(tried)  # type: ignore[type-var]
    untried = texts_of(section(StudyView(data(space, runs), influence=influences)), "untried")
    assert [row[0] for row in untried] == ["learning_rate", "epochs", "warmup_ratio"]
    assert [row[2] for row in untried] == [
        "the rest of 1e-05 to 0.01",
        "8, 16",
        "the rest of 0 to 0.2",
    ]
    covered = data(
        {**SPACE, "learning_rate": {"low": min(tried), "high": max(tried), "log": True}}, runs
    )
    assert (
        texts_of(section(StudyView(covered, influence=influence(covered, resamples=2))), "untried")
        == []
    )


def test_an_importance_is_never_said_to_be_the_whole() -> None:
    made = data(SPACE, known(30, seed=1))
    emissions, perplexity = both(made)
    first = emissions.parameters[0].model_copy(
        update={"importance": 0.99999, "importance_lowest": 0.9996, "importance_highest": 1.0}
    )
    shown = section(
        StudyView(
            made, influence=(emissions.model_copy(update={"parameters": (first,)}), perplexity)
        )
    )
    assert texts_of(shown, "importance-emissions")[0] == ["epochs", "over 99.9 %", "over 99.9 %"]


def test_with_few_trials_it_is_not_known() -> None:
    few = data(SPACE, known(FEWEST - 1, seed=6))
    assert influence(few) == (
        NotKnown(objective="emissions", trials=7, needed=8),
        NotKnown(objective="perplexity", trials=7, needed=8),
    )
    wide = {
        **SPACE,
        "warmup_ratio": {"low": 0, "high": 0.1},
        "weight_decay": {"low": 0, "high": 0.1},
    }
    runs = [
        (
            {**params, "warmup_ratio": 0.01 * number, "weight_decay": 0.1 - 0.01 * number},
            emissions_kg,
            perplexity,
        )
        for number, (params, emissions_kg, perplexity) in enumerate(known(9, seed=6))
    ]
    assert influence(data(wide, runs))[0] == NotKnown(objective="emissions", trials=9, needed=12)
    assert influence(study())[0] == NotKnown(objective="emissions", trials=0, needed=8)
    again = influence(data(SPACE, known(3, seed=6) * 4))
    assert again[0] == NotKnown(objective="emissions", trials=12, repeats=9, needed=8)
    row, _ = texts_of(section(StudyView(study(), influence=again)), "influence-fit")
    assert row[:3] == ["emissions", "12", "3"] and "it takes 8 configurations" in row[4]


def test_where_nothing_differed_it_is_not_known() -> None:
    unsearched = [({"learning_rate": 1e-3, "lora_rank": n}, 1e-3 * (1 + n), 5.0) for n in range(9)]
    assert influence(data(SPACE, unsearched))[0] == NotKnown(
        objective="emissions", trials=9, needed=2
    )
    level = [(params, 1e-3, perplexity) for params, _, perplexity in known(9, seed=7)]
    emissions, perplexity = influence(data(SPACE, level), resamples=FEW)
    assert isinstance(emissions, NotKnown) and emissions.needed == 2
    assert isinstance(perplexity, Influence)


@pytest.mark.slow
def test_only_complete_trials_with_finite_outcomes_are_learned_from() -> None:
    runs = known(10, seed=8)
    stopped = data(SPACE, known(10, seed=9), state=TrialState.PRUNED).records
    infinite = data(SPACE, [(runs[0][0], 1e-3, math.inf)]).records
    whole = data(SPACE, runs)
    more = whole.model_copy(update={"records": (*whole.records, *stopped, *infinite)})
    assert influence(more, resamples=FEW) == influence(whole, resamples=FEW)


@pytest.mark.slow
def test_ten_thousand_trials_take_seconds() -> None:
    many = data(SPACE, known(10_000, seed=10))
    started = time.process_time()
    emissions, perplexity = both(many, RESAMPLES)
    assert time.process_time() - started < 12  # 6 on an idle machine
    assert (emissions.trials, emissions.left_out) == (MOST_TRIALS, 10_000 - MOST_TRIALS)
    shown = texts_of(section(StudyView(many, influence=(emissions, perplexity))), "influence-fit")
    assert shown[0][:4] == [
        "emissions",
        str(MOST_TRIALS),
        str(MOST_TRIALS),
        str(10_000 - MOST_TRIALS),
    ]
    assert {parameter.name for parameter in perplexity.parameters[:2]} == {
        "epochs",
        "learning_rate",
    }
