"""What a report says of energy: by two readings, how sure it is, what it adds up to, and its price
at other hours.
"""

import math
from typing import Any

import pytest
from documents import caveats_of, document_of, markdown_of, numbers_of, rows_of, tables_of
from small_studies import REPLAY, SAME, TRACE, gpu_study, on_gpu, pruned, study, trial

from carbonopt.cli.display import LiveDisplay
from carbonopt.core.format import (
    difference_text,
    emissions_scale,
    energy_scale,
    spread_text,
    uncertainty_text,
)
from carbonopt.core.trial import Energy
from carbonopt.core.units import kwh_from_joules
from carbonopt.core.values import Spread
from carbonopt.report.figures.energy_figure import energy as energy_figure
from carbonopt.report.sections import energy_section
from carbonopt.report.sections.citation_section import sentence
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import SessionLedger, StudyData


def shown_of(data: StudyData) -> dict[str, dict[str, Any]]:
    """The report's tables."""
    return tables_of(document_of(data))


def test_both_readings_their_difference_and_what_is_idle():
    shown = shown_of(gpu_study(on_gpu(0), on_gpu(1, 20e3, disagreement=-0.03, perplexity=4.0)))
    training, total = (
        row for row in rows_of(shown["readings"]) if row["Phase"] in ("training", "sum")
    )
    assert training == {
        "Phase": "training",
        "Counters (kJ)": "30.0",  # 10 + 20
        "±": "± 0.12 %",  # √2 × 25 J
        "CodeCarbon (kJ)": "29.4",  # 10.05 + 19.4
        "Difference": "-1.8 %",
        "Idle share": "20 %",
        "Net of idle (kJ)": "24.0",
    }
    assert total["Counters (kJ)"] == "33.0"
    first, second = rows_of(shown["components"])
    assert first == {
        "Trial": "0",
        "GPU by its counter (kJ)": "10.0",
        "±": "± 0.25 %",
        "GPU net of idle (kJ)": "7.00",
        "CodeCarbon differs by": "+0.5 %",
        "CPU modelled (kJ)": "0.100",
        "RAM modelled (kJ)": "0.900",
    }
    assert second["CodeCarbon differs by"] == "-3 %"
    marked = [
        [cell["text"] for cell in row if cell.get("strong")] for row in shown["components"]["rows"]
    ]
    assert marked == [[], ["-3 %"]]
    data = gpu_study(on_gpu(0), on_gpu(1, 20e3, disagreement=-0.03, perplexity=4.0))
    assert numbers_of(data, "readings_disagree") == {"count": 1, "trial": 1, "difference": -0.03}


def test_a_net_of_idle_that_can_not_be_is_not_known_and_says_why():
    shown = shown_of(
        gpu_study(on_gpu(0, 2e3), on_gpu(1, 20e3, perplexity=4.0))
    )  # 3 kJ idle in each training
    assert [row["GPU net of idle (kJ)"] for row in rows_of(shown["components"])] == ["–", "17.0"]
    training = next(row for row in rows_of(shown["readings"]) if row["Phase"] == "training")
    assert (training["Idle share"], training["Net of idle (kJ)"]) == (
        "27.3 %",
        "16.0",
    )  # of both: 22 and 6 kJ
    why = energy_section.NET_NOTE
    assert why in shown["components"]["note"] and why not in shown["readings"]["note"]

    shown = shown_of(gpu_study(on_gpu(0, 2e3)))
    row = next(row for row in rows_of(shown["readings"]) if row["Phase"] == "training")
    assert (row["Idle share"], row["Net of idle (kJ)"]) == ("–", "–")
    assert why in shown["readings"]["note"]


def test_the_time_within_which_codecarbon_is_deaf_is_its_own(monkeypatch):
    monkeypatch.setattr(energy_section, "READINGS_APART_S", 0.07)
    assert "twice within 70 ms" in shown_of(gpu_study(on_gpu(0)))["readings"]["note"]


def test_closure_of_the_gpus_and_of_the_whole():
    data = gpu_study(on_gpu(0), outer=1.004)
    shown = shown_of(data)
    assert [(row["Phase"], row["GPUs' part (kJ)"]) for row in rows_of(shown["by-phase"])] == [
        ("preparation, at each start of carbonopt run", "0"),
        ("between trials, and the study beside them", "0.300"),
        ("start-up and end of trials", "1.00"),
        ("training", "10.0"),
        ("evaluation", "0.500"),
        ("sum", "11.8"),
    ]
    assert [row["The parts add up to"] for row in rows_of(shown["closure"])] == [
        "99.60 %",
        "100.00 %",
    ]
    assert not {"closure_gpus", "closure_whole"} & caveats_of(data).keys()
    caveats = caveats_of(gpu_study(on_gpu(0), outer=0.99))
    assert (
        caveats["closure_gpus"].numbers == {"fraction": pytest.approx(1 / 0.99)}
        and "closure_whole" not in caveats
    )
    assert "101.01 %" in caveats["closure_gpus"].text
    assert "closure" not in shown_of(study(trial(0)))
    assert "closure" not in shown_of(study(trial(0), raw=REPLAY))


def test_energy_that_a_replay_cannot_know_is_not_zero():
    """A recorded 0, here of the evaluations, stays one."""
    kwh = kwh_from_joules(3600)
    energy = Energy(train=kwh, setup=0, eval=0, total=kwh)
    session = SessionLedger(
        started_at="2026-01-01T00:00:00Z", outer_kwh=kwh, outer_gpu_kwh=kwh, prepare_gpu_kwh=0.0
    )
    data = study(trial(0, energy_kwh=energy), raw=REPLAY, sessions=(session,))
    spent = StudyView(data).spent
    unknown = dict.fromkeys(("prepare", "gap", "setup"))
    assert spent.by_phase_kwh == {**unknown, "train": kwh, "eval": 0.0}
    assert spent.gpu_parts_kwh["prepare"] is None
    assert (spent.outer_kwh, spent.closure) == (kwh, 1.0), "all that was recorded is counted once"
    shown = shown_of(data)
    cells = ("Energy (kJ)", "Share")
    by_phase = [[row[cell] for cell in cells] for row in rows_of(shown["by-phase"])]
    assert by_phase == [["–", "–"]] * 3 + [["3.60", "100 %"], ["0", "0 %"], ["3.60", "100 %"]]
    by_state = [[row[cell] for cell in cells] for row in rows_of(shown["by-state"])]
    assert by_state == [["3.60", "100 %"], ["–", "–"], ["3.60", "100 %"]]
    figure = energy_figure(StudyView(data).spent)
    assert figure is not None
    assert figure.alt == "training 100 %; evaluation 0 %"


def test_where_only_the_gpus_count_the_rest_is_shown_and_says_so():
    carbon = {"country": "USA", "intensity_g_co2e_per_kwh": 230, "pue": 1.0, "objective": "gpu"}
    shown = shown_of(gpu_study(on_gpu(0), raw={"carbon": carbon}))
    assert [row["Share"] for row in rows_of(shown["by-component"])] == ["100 %", "–", "–"]
    assert rows_of(shown["components"])[0]["RAM modelled, not counted (kJ)"] == "0.900"
    facts = {row["What"]: row["Value"] for row in rows_of(shown["provenance"])}
    assert facts["Emissions count"] == "the GPUs alone (carbon.objective: gpu)"
    assert facts["PUE"] == "1 (given or the default, not measured)"
    assert facts["Idle power of GPU 0"].startswith("100.0 ± 0.7 W")
    assert "gpus_only" in caveats_of(gpu_study(on_gpu(0), raw={"carbon": carbon}))
    assert [column["label"] for column in shown["by-phase"]["columns"]][1:3] == [
        "Energy (kJ)",
        "Emissions (g CO2e)",
    ]


def test_a_repeated_configuration_shows_its_spread():
    again = on_gpu(1, 11e3, seed=4, perplexity=5.2, **SAME)
    shown = shown_of(gpu_study(on_gpu(0, **SAME), again, on_gpu(2, perplexity=9.0)))
    (row,) = rows_of(shown["repeats"])
    assert (row["Trials"], row["n"], row["Seeds"], row["Perplexity"]) == (
        "0, 1",
        "2",
        "3, 4",
        "5.10 ± 0.14",
    )
    # 11 and 12 kJ × 230 g/kWh × 1.1: 0.773 and 0.843 g
    assert row["Emissions (g CO2e)"] == "0.81 ± 0.05"
    data = gpu_study(on_gpu(0, **SAME), again, on_gpu(2, perplexity=9.0))
    assert "n = 2, 0.81 ± 0.05 g CO2e and 5.10 ± 0.14, mean ± standard deviation" in sentence(
        StudyView(data)
    )
    assert not {"single_run", "single_runs", "one_seed"} & caveats_of(data).keys()
    data = study(trial(0, **SAME), trial(1, **SAME), trial(2, 1e-5, 5.5))
    caveats = caveats_of(data)
    assert caveats["single_run"].numbers == {"candidates": 3} and "one_seed" in caveats
    assert "(n = 1; the baseline: n = 2, " in sentence(StudyView(data))


def test_the_sentence_says_how_many_runs_and_on_what():
    two = study().provenance.hardware.model_copy(update={"gpus": ("H200", "H200")})
    data = study(trial(0), trial(1, 2e-3, 4.0))
    data = data.model_copy(
        update={"provenance": data.provenance.model_copy(update={"hardware": two})}
    )
    text = sentence(StudyView(data))
    assert "2 trials with carbonopt on 2 × H200" in text and "(n = 1; the baseline: n = 1)" in text
    assert "that replay recorded runs" in sentence(StudyView(study(trial(0), raw=REPLAY)))


def test_tables_say_where_interrupted_attempts_are():
    again = {"attempt": 2, "earlier_attempts_energy_kwh": 1e-4, "earlier_attempts_gpu_kwh": 1e-4}
    shown = shown_of(gpu_study(on_gpu(0, **again)))
    assert (
        "with its earlier attempts" in shown["by-state"]["note"]
        and "not in it" in shown["by-component"]["note"]
    )
    assert "360 J" in shown["all-trials"]["note"], "the table's energies and times lack it"
    attempts, total = rows_of(shown["by-phase"])[-2:]
    assert (attempts["GPUs' part (kJ)"], total["GPUs' part (kJ)"]) == ("0.360", "12.2")
    shown = shown_of(gpu_study(on_gpu(0)))
    assert not any(shown[key].get("note") for key in ("by-state", "by-component", "all-trials"))


def test_the_same_joules_at_other_hours():
    shown = shown_of(gpu_study(on_gpu(0), trace=TRACE))
    assert "grid.csv" in shown["hours"]["caption"]
    # 11 kJ at 100 and 400 g/kWh × 1.1, mean of the two; the study: 12.8 kJ at 100 g/kWh × 1.1
    assert [(row["Start (UTC)"], row["Emissions (g CO2e)"]) for row in rows_of(shown["hours"])] == [
        ("–", "0.773"),
        ("–", "0.840"),
        ("2026-01-01 00:00", "0.336"),
        ("2026-01-01 02:00", "1.34"),
        ("–", "0.900"),
        ("–", "0.391"),
    ]
    assert [row["g CO2e/kWh"] for row in rows_of(shown["hours"])] == [
        "230",
        "250",
        "100",
        "400",
        "230",
        "100",
    ]
    assert "from 2026-01-01 00:00 to 2026-01-01 02:00 (UTC)" in shown["hours"]["note"]
    facts = {row["What"]: row["Value"] for row in rows_of(shown["provenance"])}
    assert facts["Carbon trace"].startswith("grid.csv: 3 hours from 2026-01-01T00:00:00")
    assert "Highest ÷ lowest: 4." in shown["hours"]["note"] and "1 hour" in shown["hours"]["note"]


def test_without_a_trace_or_a_run_nothing_is_said_by_the_hour():
    untimed = gpu_study(on_gpu(0, duration_s=None), trace=TRACE)
    for data in (gpu_study(on_gpu(0)), gpu_study(pruned(0), trace=TRACE), untimed):
        assert "hours" not in shown_of(data)
    assert "carbon.trace" in markdown_of(gpu_study(on_gpu(0)))


@pytest.mark.parametrize(
    ("figure", "large", "small", "said", "of"),
    [
        (
            "disagreement",
            0.0312,
            0.02,
            "CodeCarbon reads +3.1 % against the GPUs' counters",
            "CodeCarbon",
        ),
        (
            "cpu_wait_fraction",
            0.366,
            0.04,
            "other work had the cores for 37 % of its time",
            "cores",
        ),
    ],
)
def test_the_display_says_where_readings_disagree_or_cores_were_shared(
    figure, large, small, said, of, capsys
):
    display = LiveDisplay(study().config)
    display.trial_ended(on_gpu(0, **{figure: large}))
    display.trial_ended(on_gpu(1, **{figure: small}))
    display.close()
    first, second = capsys.readouterr().err.splitlines()
    assert said in first and of not in second


def test_without_a_terminal_one_line_says_that_preparation_began(capsys):
    for anything in (True, False):
        display = LiveDisplay(study().config)
        display.preparing(anything)
        display.close()
    assert capsys.readouterr().err.splitlines() == [
        "preparing data, tokenizer and DeepSpeed's ops, a minute or two at first …",
        "starting …",
    ]


def test_a_column_has_one_unit():
    joules = energy_scale(map(kwh_from_joules, (17_600, 4_990, 335, 0.0)))
    assert joules.label("Energy") == "Energy (kJ)"
    texts = [
        joules.text(kwh_from_joules(energy_j))
        for energy_j in (17_600, 4_990, 335, 9.96, 0.4, 0.0, -4_990)
    ]
    assert texts == ["17.6", "4.99", "0.335", "0.010", "0.000", "0", "-4.99"]
    assert energy_scale([None, math.inf]).text(None) == "–"
    grams = emissions_scale([0.0172, 9.99e-6])
    assert (grams.unit, grams.text(0.00096), grams.text(9.99e-6), grams.text(math.nan)) == (
        "g CO2e",
        "0.960",
        "0.010",
        "–",
    )


def test_digits_of_spread_difference_and_uncertainty():
    def spread(mean: float, deviation: float) -> str:
        return spread_text(Spread(mean=mean, standard_deviation=deviation, lowest=0, highest=1))

    assert spread(0.71812, 0.00412) == "0.718 ± 0.004"
    assert spread(0.71812, 0.00123) == "0.7181 ± 0.0012"
    assert spread(1234.5, 67.0) == "1,234 ± 67"
    assert spread(4.346, 0.0) == "4.346 ± 0.000"
    assert spread(4.346, 1e-15) == "4.34600 ± 0.00000"
    assert [
        difference_text(difference) for difference in (0.031, -0.0004, 8e-7, 0.0, 2.5, None)
    ] == [
        "+3.1 %",
        "-0.04 %",
        "+0 %",
        "+0 %",
        "+250 %",
        "–",
    ]
    assert [uncertainty_text(uncertainty) for uncertainty in (0.00123, 0.076, 1.5)] == [
        "± 0.12 %",
        "± 7.6 %",
        "± 150 %",
    ]


def test_time_in_which_no_machine_was_read_is_said() -> None:
    ledger = study().sessions[0]
    by_time = {
        seconds: caveats_of(
            study(trial(0), sessions=(ledger.model_copy(update={"unread_s": seconds}),))
        )
        for seconds in (2.0, 38.0)
    }
    assert "machine_lost" not in by_time[2.0]
    assert "For 38 s," in by_time[38.0]["machine_lost"].text


@pytest.mark.parametrize(
    ("launch", "advice", "not_advised"),
    [
        ({"kind": "local", "gpus": [0]}, "launch.workers", "launch.exclusive"),
        ({"kind": "slurm", "gpus_per_node": 1}, "launch.exclusive", "launch.workers"),
    ],
)
def test_who_counts_a_machine_twice_is_told_what_their_launch_has(
    launch: dict, advice: str, not_advised: str
) -> None:
    own = {"machine_share": 1.0, "duration_s": 60.0, "started_at": "2026-01-01T00:00:00Z"}
    ledger = study().sessions[0].model_copy(update=own)
    both = tuple(ledger.model_copy(update={"worker": f"host-{pid}-{pid:08x}"}) for pid in (1, 2))
    text = caveats_of(study(trial(0), sessions=both, raw={"launch": launch}))["counted_twice"].text
    assert advice in text and not_advised not in text
