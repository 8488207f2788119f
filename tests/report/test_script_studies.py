"""The report of studies that search a training script of the user's own: own dimensions, own qualities."""

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from browser import browser
from documents import document_of, rows_of, tables_of, written
from small_studies import BLEU, WER, script_run, script_study

from carbonopt.core.format import number_from
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.study import StudyData
from carbonopt.core.trial import EvalPoint
from carbonopt.report.build import write_report
from carbonopt.report.data import TRIALS_PARQUET, data_files

# ------------------------------------------------------------------------------------------------ own qualities


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
def test_a_number_of_a_range_without_a_begin_lies_in_it(begin: float, end: float, number: str) -> None:
    assert number_from(begin, end) == number
    assert min(begin, end) < float(number) < max(begin, end)


OWN_QUALITIES = {
    "rising": (BLEU, {"quality": "bleu", "at_least": 20}, {"26": None, "24": 0, "21": 1, "-1e12": 1}),
    "falling": (WER, {"quality": "wer", "at_most": 24}, {"20": None, "-5": None, "21.5": 0, "1e12": 1}),
}


@pytest.mark.parametrize("kind", OWN_QUALITIES)
def test_the_slider_of_a_quality_without_bounds(kind: str, tmp_path: Path) -> None:
    quality, target, answers = OWN_QUALITIES[kind]
    values = (25.0, 21.0) if quality.direction == "maximize" else (21.0, 25.0)
    good, cheap = script_run(0, values[0], quality=quality, train_kwh=2e-3), script_run(1, values[1], quality=quality)
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
            assert said.startswith("No trial" if trial_number is None else f"Trial {trial_number} "), typed
            assert tab.run("document.getElementById('step-number').validationMessage") == ""
        for at, starts in enumerate(("No trial", "Trial 0 ", "Trial 1 ")):
            tab.run(
                f"(one => {{ one.value = '{at}'; one.dispatchEvent(new Event('input')); }})"
                "(document.getElementById('step-range'))"
            )
            said = tab.run("document.querySelector('#step-answer span').textContent")
            typed = float(tab.run("document.getElementById('step-number').value"))
            assert said.startswith(starts) and quality.rank(typed) < quality.rank(values[1]) + 0.1 * at
        content = tab.run("document.getElementById('content').textContent")
        assert json.loads(content, parse_constant=pytest.fail)["steps"]["steps"][0]["begins"] is None
        assert tab.complaints() == []


@pytest.mark.parametrize("values", [(), (None,), (1e308, None), (-1e12, 1e12), (0.0, 25.0)])
def test_whatever_an_own_quality_was_there_is_a_report(values: tuple[float | None, ...], tmp_path: Path) -> None:
    records = [script_run(number, value, train_kwh=1e-3 * (number + 1)) for number, value in enumerate(values)]
    write_report(script_study(*records), tmp_path / "report")
    steps = next(
        b for s in document_of(script_study(*records))["sections"] for b in s["blocks"] if b["kind"] == "steps"
    )
    assert steps["steps"][0].get("begins") is None and steps["steps"][0].get("row") is None


def test_perplexities_at_the_end_of_floats_are_drawn(tmp_path: Path) -> None:
    def at(step: int, perplexity: float) -> EvalPoint:
        point = EvalPoint.of(PERPLEXITY, math.log(perplexity), 1, step=step, tokens=None)
        return point.model_copy(update={"train_energy_kwh": 1e-4 * step})

    evals = (at(1, 1.7e308), at(2, 50.0), at(3, 5.0))
    records = [script_run(0, 5.0, quality=PERPLEXITY, evals=evals), script_run(1, 1e308, quality=PERPLEXITY)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(script_study(*records, target={"perplexity": 20}), tmp_path / "report")
    assert (tmp_path / "report/paper/figure-returns.pdf").read_bytes().startswith(b"%PDF")


# ---------------------------------------------------------------------------------------------- own dimensions

MIXED = (1, "1", True, 2.5)
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
        for own in [{"opt": ("adam", "sgd")[number % 2], "nesterov": number % 3 > 0, "width": MIXED[number % 4]}]
    ]
    return script_study(*records, space=space, workload={"command": COMMAND})


def test_words_flags_and_mixed_choices_are_tables_and_columns(tmp_path: Path) -> None:
    document = written(own_dimensions(), tmp_path / "report")
    front = rows_of(tables_of(document)["pareto"])
    assert [row["opt"] for row in front[:4]] == ["adam", "sgd", "adam", "sgd"]
    assert [row["nesterov"] for row in front[:4]] == ["no", "yes", "yes", "no"]
    assert [row["width"] for row in front[:4]] == ["1", "1", "yes", "2.5"]
    table = pyarrow.parquet.read_table(tmp_path / "report/data/trials.parquet")
    assert table["params.width"].to_pylist()[:4] == ["1", "1", "True", "2.5"]
    assert table["params.nesterov"].to_pylist()[:2] == [False, True]
    effects = [row for row in rows_of(tables_of(document)["effects-emissions"]) if row["Parameter"] == "width"]
    assert [(row["Value"], row["Trials"]) for row in effects] == [("1", "3"), ("1", "3"), ("yes", "3"), ("2.5", "3")]


@pytest.mark.parametrize("kinds", [(1, "1"), (1, True), (True, 2.5), (1, "a", True, 2.5), ("a", 1)])
def test_a_column_of_several_kinds_is_text(kinds: tuple[Any, ...]) -> None:
    rows = [script_run(number, 21.0, own={"width": value}) for number, value in enumerate(kinds)]
    table = pyarrow.parquet.read_table(io.BytesIO(data_files(rows)[TRIALS_PARQUET]))
    assert table["params.width"].to_pylist() == [str(value) for value in kinds]
