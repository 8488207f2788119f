"""Studies beside each other: the same joules at one intensity, and what can't be compared."""

import math

import numpy as np
import pytest
from small_studies import INTENSITY_G_PER_KWH, REPLAY, pruned, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.study_comparison import StudiesComparison, compare_studies
from carbonopt.core.errors import BadInput
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.spec.study_data import Intensity, SessionLedger, StudyData


def at(data: StudyData, g_co2e_per_kwh: float, pue: float) -> StudyData:
    """The same study in another place, its records priced there."""
    intensity = Intensity(g_co2e_per_kwh=g_co2e_per_kwh, source="test")
    records = tuple(
        record.model_copy(
            update={
                "emissions_kg_co2e": emissions_kg_co2e(record.energy_kwh.train, g_co2e_per_kwh, pue)
            }
        )
        for record in data.records
    )
    carbon = data.config.carbon.model_copy(
        update={"pue": pue, "intensity_g_co2e_per_kwh": g_co2e_per_kwh}
    )
    changes = {
        "records": records,
        "provenance": data.provenance.model_copy(update={"intensity": intensity}),
        "config": data.config.model_copy(update={"carbon": carbon}),
    }
    return data.model_copy(update=changes)


def compared(**studies: StudyData) -> StudiesComparison:
    return compare_studies(studies, {name: recommend(data) for name, data in studies.items()})


def test_at_the_common_intensity_emissions_are_as_joules():
    here = study(trial(0, 2e-3), trial(1, 1e-3, 5.5))
    there = at(study(trial(0, 3e-3, 5.2), trial(1, 9e-3, 2.0)), 50.0, 1.5)
    comparison = compared(here=here, there=there)
    assert (comparison.task, comparison.g_co2e_per_kwh, comparison.pue) == (
        "causal_lm",
        INTENSITY_G_PER_KWH,
        1.1,
    )
    first, second = (each.recommended for each in comparison.studies)
    assert (first.trial, second.trial) == (1, 0)
    assert (first.energy_kwh, second.energy_kwh) == (1e-3, 3e-3)
    assert first.common_emissions_kg_co2e == pytest.approx(first.emissions_kg_co2e)
    assert second.emissions_kg_co2e == pytest.approx(3e-3 * 0.05 * 1.5)
    assert second.common_emissions_kg_co2e / first.common_emissions_kg_co2e == pytest.approx(3.0)
    assert [each.name for each in comparison.by_emissions] == ["here", "there"]
    assert second.emissions_kg_co2e < first.emissions_kg_co2e, (
        "by its grid alone the other would seem to be better"
    )
    assert [run.trial for run in comparison.studies[1].front] == [0, 1]


def test_what_a_study_spent_is_all_of_it():
    began = (
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:00:40Z",
        "2026-01-01T01:00:00Z",
    )  # two of them at once
    sessions = tuple(
        SessionLedger(started_at=at, duration_s=s, gap_kwh=1e-5)
        for at, s in zip(began, (70.0, 20.0, 30.0), strict=True)
    )
    data = study(trial(0), pruned(1), sessions=sessions)
    spent = compared(a=data, b=at(data, 2 * INTENSITY_G_PER_KWH, 2.2)).studies
    energy_kwh = math.fsum(record.energy_kwh.total for record in data.records) + 3e-5
    for each in spent:
        assert (each.trials, each.spent_duration_s) == (2, 100.0)
        assert each.spent_energy_kwh == pytest.approx(energy_kwh)
        assert each.spent_common_emissions_kg_co2e == pytest.approx(
            energy_kwh * INTENSITY_G_PER_KWH / 1e3 * 1.1
        )
    assert spent[1].spent_emissions_kg_co2e == pytest.approx(4 * spent[0].spent_emissions_kg_co2e)


def test_a_replay_has_no_time_of_what_was_recorded() -> None:
    """Its calls took seconds, in which the recorded runs used nothing."""
    replayed, trained = compared(a=study(trial(0), raw=REPLAY), b=study(trial(0))).studies
    assert (replayed.spent_duration_s, trained.spent_duration_s) == (None, 70.0)
    assert replayed.spent_energy_kwh > 0


def test_a_repeated_configuration_stands_at_its_means():
    again = trial(1, 3e-3, 4.0, repeat_of=0, seed=4, params={"learning_rate": 1e-3})
    (repeated, _) = compared(a=study(trial(0), again), b=study(trial(0))).studies
    run = repeated.recommended
    assert (run.trial, run.seeds, run.energy_kwh) == (0, 2, pytest.approx(2e-3))
    assert run.value == pytest.approx(math.sqrt(5.0 * 4.0)) and run.duration_s == 60


def test_who_missed_the_target_is_shown_and_ranked_nowhere():
    comparison = compared(
        met=study(trial(0)), missed=study(trial(0, perplexity=9.0)), nothing=study(pruned(0))
    )
    assert [each.recommended is None for each in comparison.studies] == [False, True, True]
    assert [len(each.front) for each in comparison.studies] == [1, 1, 0]
    assert [each.name for each in comparison.by_emissions] == ["met"]


def test_what_is_not_known_is_none():
    unknown = trial(0).model_copy(update={"energy_kwh": None, "duration_s": None})
    run = compared(a=study(unknown), b=study(trial(0))).studies[0].recommended
    assert run.energy_kwh is run.common_emissions_kg_co2e is run.duration_s is None
    assert run.emissions_kg_co2e == trial(0).emissions_kg_co2e


def test_json_has_the_target_as_study_files_have_it():
    dumped = compared(a=study(trial(0)), b=study(trial(0), target=8.0)).as_json()
    assert [each["target"] for each in dumped["studies"]] == [
        {"quality": "perplexity", "at_most": target} for target in (6.0, 8.0)
    ]


def test_studies_of_different_tasks_or_qualities_are_refused():
    replay, accuracy = (
        study(trial(0), raw=REPLAY),
        study(raw={**REPLAY, "target": {"accuracy": 0.5}}),
    )
    workload = {
        **study().config.workload.model_dump(mode="json", exclude_none=True),
        "task": "reward",
    }
    of_reward = study(
        raw={"workload": workload | {"dataset": {"builtin": "python-docs"}}}
        | {"target": {"preference_accuracy": 0.5}}
    )
    assert compared(replay=replay, trained=study(trial(0))).task == "causal_lm", (
        "a replay's table names no task"
    )
    with pytest.raises(
        BadInput, match=r"same quality, but replay has perplexity .* and other has accuracy"
    ):
        compared(replay=replay, other=accuracy)
    with pytest.raises(
        BadInput,
        match="same task, but lm has causal_lm and judge has reward; leave one of them out",
    ):
        compared(lm=study(trial(0)), judge=of_reward)


def spreading(
    rng: np.random.Generator, deviation: float, seeds: int, configurations: int
) -> StudyData:
    """A study whose configurations truly emit the same, and whose runs spread by this share."""
    runs = []
    for number in range(configurations):
        for seed in range(seeds):
            run = trial(number, 1e-3 * math.exp(rng.normal(0, deviation)), seed=seed)
            repeat = {"trial": 100 * (number + 1) + seed, "repeat_of": number} if seed else {}
            runs.append(run.model_copy(update=repeat))
    return study(*runs)


def test_interval_holds_the_truth_where_machines_spread_differently() -> None:
    """With one spread for both, that of the quiet machine, it held in 77 %."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        quiet, loud = spreading(rng, 0.003, 3, 3), spreading(rng, 0.03, 3, 1)
        lowest, highest = compared(quiet=quiet, loud=loud).less_interval
        held += lowest <= 0 <= highest
    assert held >= 0.92 * 300


def test_study_that_repeated_nothing_borrows_no_spread_from_another() -> None:
    rng = np.random.default_rng(0)
    quiet, once = spreading(rng, 0.003, 3, 3), spreading(rng, 0.03, 1, 1)
    assert compared(quiet=quiet, once=once).less_interval is None
