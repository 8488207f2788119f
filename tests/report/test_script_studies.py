"""The report of studies that search a training script of the user's own: own dimensions, own
qualities.
"""

import csv
import io
import json
import math
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from browser import browser
from documents import caveats_of, document_of, numbers_of, rows_of, tables_of, written
from small_studies import BLEU, WER, evaluation, script_run, script_study, study, trial

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import number_from
from carbonopt.core.quality import PERPLEXITY, quality_of
from carbonopt.core.trial import Durations, QualityLines, Stage, StageCost, TrialRecord, TrialState
from carbonopt.report.data_files import TRIALS_PARQUET, data_files
from carbonopt.report.document import Level
from carbonopt.report.sections import trial_conduct_section
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report
from carbonopt.spec.study_data import StudyData

# ------------------------------------------------------------------------------------------------
# own qualities


@pytest.mark.parametrize(
    ("begin", "end", "number"),
    [
        (-math.inf, 25.0, "24.99"),
        (-math.inf, 0.25, "0.2499"),
        (-math.inf, -3.0, "-3.001"),
        (math.inf, 25.0, "25.01"),
        (math.inf, 0.0, "1"),
        (-math.inf, 0.0, "-1"),
        (math.inf, -math.inf, "0"),
    ],
)
def test_a_number_of_a_range_without_a_begin_lies_in_it(
    begin: float, end: float, number: str
) -> None:
    assert number_from(begin, end) == number
    assert min(begin, end) < float(number) < max(begin, end)


OWN_QUALITIES = {
    "rising": (
        BLEU,
        {"quality": "bleu", "at_least": 20},
        {"26": None, "24": 0, "21": 1, "-1e12": 1},
    ),
    "falling": (
        WER,
        {"quality": "wer", "at_most": 24},
        {"20": None, "-5": None, "21.5": 0, "1e12": 1},
    ),
}


@pytest.mark.parametrize("kind", OWN_QUALITIES)
@pytest.mark.slow
def test_the_slider_of_a_quality_without_bounds(kind: str, tmp_path: Path) -> None:
    quality, target, answers = OWN_QUALITIES[kind]
    values = (25.0, 21.0) if quality.direction == "maximize" else (21.0, 25.0)
    good, cheap = (
        script_run(0, values[0], quality=quality, train_kwh=2e-3),
        script_run(1, values[1], quality=quality),
    )
    data = script_study(good, cheap, script_run(2, None, quality=quality), target=target)
    index = write_report(data, tmp_path / "report")
    json.loads((tmp_path / "report/data/report.json").read_text(), parse_constant=pytest.fail)
    with browser(tmp_path / "profile") as tab:
        tab.open(index)
        for typed, trial_number in answers.items():
            tab.run(
                f"(one => {{ one.value = '{typed}'; one.dispatchEvent(new Event('input')); }})"
                "(document.getElementById('step-number'))"
            )
            said = tab.run("document.querySelector('#step-answer span').textContent")
            assert said.startswith(
                "No trial" if trial_number is None else f"Trial {trial_number} "
            ), typed
            assert tab.run("document.getElementById('step-number').validationMessage") == ""
        for at, starts in enumerate(("No trial", "Trial 0 ", "Trial 1 ")):
            tab.run(
                f"(one => {{ one.value = '{at}'; one.dispatchEvent(new Event('input')); }})"
                "(document.getElementById('step-range'))"
            )
            said = tab.run("document.querySelector('#step-answer span').textContent")
            typed = float(tab.run("document.getElementById('step-number').value"))
            assert (
                said.startswith(starts) and quality.rank(typed) < quality.rank(values[1]) + 0.1 * at
            )
        content = tab.run("document.getElementById('content').textContent")
        assert (
            json.loads(content, parse_constant=pytest.fail)["steps"]["steps"][0]["begins"] is None
        )
        assert tab.complaints() == []


@pytest.mark.parametrize("values", [(), (None,), (1e308, None), (-1e12, 1e12), (0.0, 25.0)])
def test_whatever_an_own_quality_was_there_is_a_report(
    values: tuple[float | None, ...], tmp_path: Path
) -> None:
    records = [
        script_run(number, value, train_kwh=1e-3 * (number + 1))
        for number, value in enumerate(values)
    ]
    write_report(script_study(*records), tmp_path / "report")
    steps = next(
        b
        for s in document_of(script_study(*records))["sections"]
        for b in s["blocks"]
        if b["kind"] == "steps"
    )
    assert steps["steps"][0].get("begins") is None and steps["steps"][0].get("row") is None


def test_perplexities_at_the_end_of_floats_are_drawn(tmp_path: Path) -> None:
    def at(step: int, perplexity: float) -> EvalPoint:
        point = EvalPoint.of(PERPLEXITY, math.log(perplexity), 1, step=step, tokens=None)
        return point.model_copy(update={"train_energy_kwh": 1e-4 * step})

    evals = (at(1, 1.7e308), at(2, 50.0), at(3, 5.0))
    records = [
        script_run(0, 5.0, quality=PERPLEXITY, evals=evals),
        script_run(1, 1e308, quality=PERPLEXITY),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(script_study(*records, target={"perplexity": 20}), tmp_path / "report")
    assert (tmp_path / "report/paper/figure-returns.pdf").read_bytes().startswith(b"%PDF")


# ---------------------------------------------------------------------------------------------- own
# dimensions

MIXED = (3, "one", True, 2.5)
COMMAND = "python train.py {learning_rate} {opt} {nesterov} {width}"


def own_dimensions() -> StudyData:
    space = {
        "opt": {"choices": ["adam", "sgd"]},
        "nesterov": {"choices": [False, True]},
        "width": {"choices": [*MIXED]},
    }
    records = [
        script_run(number, 21.0 + number, train_kwh=1e-3 * (number + 1), own=own)
        for number in range(12)
        for own in [
            {
                "opt": ("adam", "sgd")[number % 2],
                "nesterov": number % 3 > 0,
                "width": MIXED[number % 4],
            }
        ]
    ]
    return script_study(*records, space=space, workload={"command": COMMAND})


@pytest.mark.slow
def test_words_flags_and_mixed_choices_are_tables_and_columns(tmp_path: Path) -> None:
    document = written(own_dimensions(), tmp_path / "report")
    front = rows_of(tables_of(document)["pareto"])
    assert [row["opt"] for row in front[:4]] == ["adam", "sgd", "adam", "sgd"]
    assert [row["nesterov"] for row in front[:4]] == ["no", "yes", "yes", "no"]
    assert [row["width"] for row in front[:4]] == ["3", "one", "yes", "2.5"]
    table = pyarrow.parquet.read_table(tmp_path / "report/data/trials.parquet")
    assert table["params.width"].to_pylist()[:4] == ["3", "one", "True", "2.5"]
    assert table["params.nesterov"].to_pylist()[:2] == [False, True]
    effects = [
        row
        for row in rows_of(tables_of(document)["effects-emissions"])
        if row["Parameter"] == "width"
    ]
    assert [(row["Value"], row["Trials"]) for row in effects] == [
        ("3", "3"),
        ("one", "3"),
        ("yes", "3"),
        ("2.5", "3"),
    ]


@pytest.mark.slow
def test_an_own_dimension_may_be_called_as_a_method_is(tmp_path: Path) -> None:
    space = {"copy": {"choices": ["deep", "flat"]}, "model_dump": {"choices": [1, 2]}}
    records = [
        script_run(
            n,
            21.0 + n,
            1e-3 * (n + 1),
            own={"copy": ("deep", "flat")[n % 2], "model_dump": 1 + n % 3 // 2},
        )
        for n in range(12)
    ]
    data = script_study(
        *records, space=space, workload={"command": "python train.py {copy} {model_dump}"}
    )
    front = rows_of(tables_of(written(data, tmp_path / "report"))["pareto"])
    assert [(row["copy"], row["model_dump"]) for row in front[:3]] == [
        ("deep", "1"),
        ("flat", "1"),
        ("deep", "2"),
    ]


@pytest.mark.parametrize("kinds", [(1, "1"), (1, True), (True, 2.5), (1, "a", True, 2.5), ("a", 1)])
def test_a_column_of_several_kinds_is_text(kinds: tuple[Any, ...]) -> None:
    rows = [script_run(number, 21.0, own={"width": value}) for number, value in enumerate(kinds)]
    table = pyarrow.parquet.read_table(io.BytesIO(data_files(rows)[TRIALS_PARQUET]))
    assert table["params.width"].to_pylist() == [str(value) for value in kinds]


EVIL_WORDS = ("<img src=x>", '"; rm -rf x"', "$(x)", "a_b & 50 % #1 {c} \\d ~^")


@pytest.mark.slow
def test_own_words_stay_words(tmp_path: Path) -> None:
    space = {"loss": {"choices": [*EVIL_WORDS]}}
    records = [
        script_run(n, 21.0 + n, 1e-3 * (n + 1), own={"loss": EVIL_WORDS[n % 4]}) for n in range(12)
    ]
    data = script_study(
        *records, space=space, workload={"command": "python train.py {learning_rate} {loss}"}
    )
    document = written(data, tmp_path / "report")
    assert [row["loss"] for row in rows_of(tables_of(document)["pareto"])[:4]] == [*EVIL_WORDS]
    assert "<img src=x>" not in (tmp_path / "report/index.html").read_text()
    assert "<img src=x>" not in (tmp_path / "report/report.md").read_text()
    with (tmp_path / "report/data/trials.csv").open() as file:
        assert [row["params.loss"] for row in csv.DictReader(file)][:4] == [*EVIL_WORDS]
    if shutil.which("pdflatex") is None:
        pytest.skip("no LaTeX")
    compiled = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main"]
    done = subprocess.run(compiled, cwd=tmp_path / "report/paper", capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_single_rank_is_no_setting_of_a_script(tmp_path: Path) -> None:
    def settings(**own: Any) -> set[str]:
        document = document_of(
            script_study(script_run(0, 21.0, own=own), script_run(1, 25.0, 2e-3, own=own))
        )
        return {row["Setting"] for row in rows_of(tables_of(document)["configuration"])}

    assert settings(width=8) == {"learning_rate", "width"}
    assert settings(width=8, world_size=2) == {"learning_rate", "width", "world_size"}


# -------------------------------------------------------------------------------------------------------
# phases


def test_a_script_that_tells_no_phases_has_no_stages_and_counts_whole() -> None:
    untold = script_study(script_run(0, 25.0), script_run(1, None))
    assert caveats_of(untold).keys() & {"whole_processes", "fixed_intensity"} == {"whole_processes"}
    assert "by-stage" not in tables_of(document_of(untold))
    parts = {"duration_s": Durations(train=50, setup=8, eval=2, total=60)}
    told = script_study(script_run(0, 25.0, **parts), script_run(1, 24.0, **parts))
    assert caveats_of(told).keys() & {"whole_processes", "fixed_intensity"} == {"fixed_intensity"}
    assert "by-stage" in tables_of(document_of(told))
    # Of a training by carbonopt such durations say nothing of its phases.
    whole = study(trial(0, duration_s=Durations(train=60, setup=0, eval=0, total=60)))
    assert "fixed_intensity" in caveats_of(whole)


def in_steps(*values: float, **changes) -> TrialRecord:
    """Evaluated every 10 steps."""
    points = [
        EvalPoint.of(BLEU, value, 1, step=10 * (i + 1), tokens=None)
        for i, value in enumerate(values)
    ]
    evals = tuple(
        point.model_copy(update={"train_energy_kwh": 1e-5 * point.step}) for point in points
    )
    return script_run(0, values[-1], evals=evals, total_steps=10 * len(values), **changes)


def test_the_learning_rate_of_a_script_is_not_known_to_fall() -> None:
    record = in_steps(10.0, 22.0, 25.0)
    assert StudyView(script_study(record)).diminishing_returns.rate_decays is False
    assert (
        StudyView(script_study(record, space={"epochs": 3})).diminishing_returns.rate_decays
        is False
    )
    trained = study(
        trial(0, evals=(evaluation(5.0, 1).model_copy(update={"train_energy_kwh": 1e-3}),))
    )
    assert StudyView(trained).diminishing_returns.rate_decays is True


def test_what_a_missed_target_advises_is_in_the_space() -> None:
    """More epochs only where there are epochs, and so for all that a script need not have."""
    rising, falling = in_steps(10.0, 15.0, 18.0), in_steps(10.0, 19.0, 15.0)
    assert numbers_of(script_study(rising), "loss_still_fell")["advice"] == "train for more steps"
    epochs = {"epochs": {"choices": [2, 4]}}
    with_epochs = script_study(in_steps(10.0, 15.0, 18.0, own={"epochs": 2}), space=epochs)
    assert "epochs" in numbers_of(with_epochs, "loss_still_fell")["advice"]
    assert numbers_of(script_study(falling), "loss_rose")["advice"] == "allow a lower learning rate"
    none = script_study(
        script_run(0, None), script_run(1, 5.0, state=TrialState.INFEASIBLE, evals=())
    )
    for key in ("diverged", "out_of_memory"):
        text = caveats_of(none)[key].text
        assert not any(
            name in text for name in ("warmup_ratio", "micro_batch", "workload.", "offload")
        )
    assert "few_trials" not in caveats_of(none)


def test_what_recorded_runs_of_a_language_model_showed_is_said_of_perplexity_alone() -> None:
    assert numbers_of(script_study(script_run(0, 20.01)), "near_target_single_run")["seen"] == ""
    assert "H200" in numbers_of(study(trial(0, perplexity=5.99)), "near_target_single_run")["seen"]


# ---------------------------------------------------------------------------------------------
# short trainings


@pytest.mark.parametrize(
    ("recommended_s", "baseline_s", "trial_number", "share"),
    [
        (0.13, 5.0, 0, 0.77),
        (5.0, 0.5, 1, 0.2),
        (0.99, 0.999, 0, 0.1),
        (0.04, 0.5, 0, 1.0),
        (1.0, 1.5, None, None),
    ],
)
@pytest.mark.parametrize("source", ["measured", "modelled"])
def test_trainings_of_a_few_readings_are_uncertain(
    source: str,
    recommended_s: float,
    baseline_s: float,
    trial_number: int | None,
    share: float | None,
) -> None:
    def took(train_s: float) -> dict[str, Durations]:
        return {"duration_s": Durations(train=train_s, setup=0, eval=0, total=train_s)}

    cheap = script_run(0, 21.0, **took(recommended_s))
    records = (
        cheap,
        script_run(1, 25.0, 2e-3, **took(baseline_s)),
        script_run(2, 20.5, 3e-3, **took(0.01)),
    )
    data = script_study(*records)
    known = data.provenance.model_copy(update={"energy_source": {"cpu": source, "ram": "modelled"}})
    caveats = caveats_of(data.model_copy(update={"provenance": known}))
    unknown = share is not None and share >= 0.5  # half of the energy or more
    assert ("short_training" in caveats) == (trial_number is not None and not unknown)
    assert ("too_short_training" in caveats) == unknown
    if trial_number is not None:
        told = caveats["too_short_training" if unknown else "short_training"]
        assert (told.level, told.numbers["trial"], told.numbers["share"]) == (
            Level.CRITICAL if unknown else Level.WARNING,
            trial_number,
            share,
        )
        assert told.numbers["components"] == "CPU"


def test_of_gpus_alone_no_reading_of_the_cpu_counts() -> None:
    took = {"duration_s": Durations(train=0.5, setup=0, eval=0, total=0.5)}
    measured = study().provenance.model_copy(
        update={"energy_source": {"gpu": "measured", "cpu": "measured"}}
    )
    for objective, warned in (("gpu", False), ("all", True)):
        raw = {
            "carbon": {
                "country": "USA",
                "intensity_g_co2e_per_kwh": 230.0,
                "pue": 1.1,
                "objective": objective,
            }
        }
        data = study(trial(0, **took), raw=raw, provenance=measured)
        assert ("short_training" in caveats_of(data)) == warned


@pytest.mark.parametrize(
    ("target", "values", "suspected"),
    [
        ({"quality": "f1", "at_least": 0.9}, (82.0, 45.5), True),
        ({"quality": "wer", "at_most": 0.1}, (12.3, 30.0), True),
        ({"quality": "f1", "at_least": 80}, (0.82, 0.0), True),
        ({"quality": "wer", "at_most": 10}, (0.12, 0.3), True),
        ({"quality": "bleu", "at_least": 30}, (31.2, 0.4), False),
        ({"quality": "loss", "at_most": 0.9}, (1.4, 2.3), False),
        ({"quality": "my_reward", "at_least": 0.5}, (3.2, 7.0), False),
        ({"accuracy": 0.9}, (0.4, 0.5), False),
    ],
)
def test_a_target_on_another_scale_than_the_values_is_said(
    target: dict, values: tuple[float, ...], suspected: bool
) -> None:
    quality = quality_of(target.get("quality", "accuracy"), "maximize")
    records = [script_run(number, value, quality=quality) for number, value in enumerate(values)]
    study = StudyView(script_study(*records, target=target))
    assert (
        "other_scale" in {caveat.key for caveat in trial_conduct_section.caveats(study)}
    ) is suspected


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        (("epoch 1: acc 25.1", "epoch 9: acc 25.5"), "several_lines"),
        (("epoch 1: val acc 25.1", "test acc 25.5"), "unlike_lines"),
        (None, None),
    ],
)
def test_several_lines_with_values_are_said(lines: tuple[str, str] | None, key: str | None) -> None:
    own = None if lines is None else QualityLines(count=9, first=lines[0], last=lines[1])
    data = script_study(script_run(0, 25.5, quality_lines=own), script_run(1, 25.6))
    found = [each for each in trial_conduct_section.caveats(StudyView(data)) if "line" in each.key]
    assert [each.key for each in found] == ([] if key is None else [key])
    for each in found:
        assert "trial 0" in each.text and all(line in each.text for line in lines)


@pytest.mark.parametrize(
    ("before", "after_kwh", "said"),
    [(25.0, 5e-4, True), (25.0, 5e-5, False), (26.0, 5e-4, False), (None, 5e-4, False)],
)
def test_a_quality_that_uncharged_work_improves_is_said(
    before: float | None, after_kwh: float, said: bool
) -> None:
    stages = {
        Stage.STEPS: StageCost(duration_s=30, energy_kwh=1e-3 - after_kwh),
        Stage.AFTER: StageCost(duration_s=30, energy_kwh=after_kwh),
    }
    data = script_study(script_run(0, 25.5, replaced_value=before, stages=stages))
    found = [each.key for each in trial_conduct_section.caveats(StudyView(data))]
    assert ("uncharged_work" in found) is said
