"""The page of several studies: its caveats, its tables and its figure."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from documents import rows_of, tables_of
from pydantic_core import to_json
from small_studies import REPLAY, gpu_study, on_gpu, script_run, script_study, study, trial

from carbonopt.core.trial import Durations, TrialRecord, TrialState
from carbonopt.report.comparison_report import StudiesView, compared
from carbonopt.report.document import Document
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import COMPARISON_NAMES, write_comparison
from carbonopt.spec.study_data import InputFile, StudyData
from carbonopt.spec.trial_spec import Prepared


def document_of(**studies: StudyData) -> Document:
    return compared(StudiesView({name: StudyView(data) for name, data in studies.items()}))


def numbers_of(**studies: StudyData) -> dict[str, dict[str, Any]]:
    """Of each caveat by its key."""
    return {caveat.key: caveat.numbers for caveat in document_of(**studies).caveats}


SMALL, LARGE = study(trial(0), trial(1, 2e-3, 4.0)), study(trial(0, 4e-3), trial(1, 8e-3, 4.0))
PREPARED = Prepared(
    fingerprint="f", train_examples=9, eval_examples=3, eval_tokens=100, versions={}
)


def test_the_headline_compares_the_least_with_the_next():
    headline = document_of(small=SMALL, large=LARGE, largest=study(trial(0, 9e-3))).headline
    assert headline == (
        "small: 75 % less CO2e a run (run-to-run spread not known), at 230 g CO2e/kWh, than large,"
        " the next best"
    )
    missed = study(trial(0, perplexity=9.0))
    assert document_of(small=SMALL, missed=missed).headline == "small alone met its target"
    assert document_of(missed=missed, other=missed).headline == "No study met its target"


def test_tables_have_each_study_and_the_ratio_of_joules():
    tables = tables_of(
        json.loads(to_json(document_of(small=SMALL, missed=study(), large=LARGE).as_json()))
    )
    rows = rows_of(tables["recommended"])
    assert [row["Study"] for row in rows] == ["small", "missed", "large"]
    assert [row["Relative to the least"] for row in rows] == ["1.00", "–", "4.00"]
    assert rows[1]["Configuration"] == "none meets the target" and rows[0]["Perplexity"] == "5.000"
    assert [row["Trials and repeats"] for row in rows_of(tables["spent"])] == ["2", "0", "2"]
    assert [row["Trial"] for row in rows_of(tables["fronts"])] == ["0", "1", "0", "1"]
    (first, *_) = rows_of(tables["studies"])
    assert (first["Target (at most)"], first["PUE"]) == ("6.000", "1.1")
    assert "Data" not in first and "Data of all: python-docs." in tables["studies"]["note"], (
        "said once"
    )


@pytest.mark.slow
def test_what_makes_a_comparison_doubtful_is_said():
    alike = numbers_of(a=SMALL, b=LARGE)
    assert not alike.keys() & {
        "different_targets",
        "different_data",
        "different_objectives",
        "different_energy_sources",
    }
    assert alike["compared_single_runs"] == {"studies": "a, b"}

    other_target = study(trial(0), target=8.0)
    assert numbers_of(a=SMALL, b=other_target)["different_targets"] == {
        "targets": "a: 6.000; b: 8.000"
    }
    assert document_of(a=SMALL, b=other_target).headline.endswith("their targets differ")
    one, other = (
        SMALL.model_copy(update={"prepared": PREPARED.model_copy(update={"eval_tokens": n})})
        for n in (9, 8)
    )
    assert numbers_of(a=one, b=other)["different_data"]["quality"] == "perplexity"
    assert document_of(a=one, b=other).headline == "What these studies recommend can't be compared"
    assert "different_data" not in numbers_of(a=one, b=one)
    gpus = study(
        trial(0),
        raw={"carbon": {**SMALL.config.carbon.model_dump(exclude_none=True), "objective": "gpu"}},
    )
    assert numbers_of(a=SMALL, b=gpus)["different_objectives"] == {"objectives": "a: all; b: gpu"}
    assert "different_energy_sources" in numbers_of(a=SMALL, b=gpu_study(on_gpu(0), on_gpu(1)))
    running = SMALL.model_copy(update={"ended": None})
    assert numbers_of(a=running, b=LARGE)["compared_before_its_end"] == {"study": "a"}
    noisy = study(trial(0), trial(1, 2e-3, 4.0, cpu_wait_fraction=0.5))
    assert numbers_of(a=SMALL, b=noisy)["own_critical_caveat"]["study"] == "b"


def begun(*moments: str) -> StudyData:
    """Trials that began then."""
    return study(
        *(trial(number, started_at=f"2026-01-01T{at}+00:00") for number, at in enumerate(moments))
    )


def test_trials_whose_energy_a_sum_lacks_are_named():
    lost = trial(4, energy_kwh=None, emissions_kg_co2e=None, state=TrialState.FAILED)
    found = numbers_of(here=study(trial(0), lost), there=study(trial(0)))
    assert found["unmeasured_trials_of"] == {"study": "here", "trials": (4,)}


def test_a_copy_of_a_study_is_no_other_study():
    first, gone_on, other = (
        begun("01:00:00.001", "01:00:07.002"),
        begun("01:00:00.001"),
        begun("01:00:00.002"),
    )
    assert numbers_of(a=first, b=first)["same_trials"] == {"studies": "a and b", "count": 2}
    assert numbers_of(a=first, b=other, c=gone_on)["same_trials"] == {
        "studies": "a and c",
        "count": 1,
    }
    assert not {"same_trials"} & (
        numbers_of(a=first, b=other).keys() | numbers_of(a=SMALL, b=SMALL).keys()
    )


DOUBTFUL = {"different_data", "unknown_data"}


def doubts(**studies: StudyData) -> set[str]:
    """Return the caveats about the data, after a look at the headline that follows from them."""
    document = document_of(**studies)
    found = {caveat.key for caveat in document.caveats} & DOUBTFUL
    assert ("CO2e" not in document.headline) is bool(found)
    assert all(caveat.level == 0 for caveat in document.caveats if caveat.key in found)
    return found


def with_inputs(data: StudyData, /, **sha256s: str | None) -> StudyData:
    files = (
        InputFile(path=path, bytes=1, mtime_ns=0, sha256=sha256) for path, sha256 in sha256s.items()
    )
    return data.model_copy(update={"inputs": tuple(files)})


def replay_of(sha256: str | None = None) -> StudyData:
    return with_inputs(study(trial(0), raw=REPLAY), **{"/somewhere/runs.jsonl": sha256})


def test_replays_are_compared_where_their_runs_are_of_one_table():
    assert doubts(a=replay_of("1"), b=replay_of("1")) == set()
    for others in (replay_of("2"), replay_of(), SMALL):
        assert doubts(a=replay_of("1"), b=others) == {"unknown_data"}
    assert doubts(a=replay_of(), b=replay_of()) == {"unknown_data"}
    assert doubts(a=replay_of("1"), b=replay_of("1"), c=SMALL) == {"unknown_data"}


def test_recorded_runs_that_two_replays_recommend_are_counted():
    def replay(*records: TrialRecord) -> StudyData:
        return study(*records, raw=REPLAY)

    again = trial(1, 1.1e-3, seed=4, repeat_of=0, params={"learning_rate": 1e-3})
    dearer = trial(1, 2e-3, 4.0)
    both, one = replay(trial(0), again), replay(trial(0), dearer)
    assert numbers_of(a=both, b=both)["same_recorded_runs"]["count"] == 2
    assert numbers_of(a=both, b=one)["same_recorded_runs"] == {"studies": "a and b", "count": 1}
    other = replay(trial(0, 1.5e-3))
    assert "same_recorded_runs" not in numbers_of(a=both, b=other)
    assert "same_recorded_runs" not in numbers_of(a=SMALL, b=SMALL), "these were trained"


def test_what_a_replay_spent_has_no_preparation():
    def note(**studies: StudyData) -> str:
        return tables_of(json.loads(to_json(document_of(**studies).as_json())))["spent"]["note"]

    assert "preparation" in note(a=SMALL, b=LARGE)
    assert "preparation" not in note(a=replay_of("1"), b=replay_of("1"))
    assert "Of b: " in note(a=SMALL, b=replay_of("1"))


def script_with(**sha256s: str | None) -> StudyData:
    return with_inputs(script_study(script_run(0, 25.0)), **sha256s)


def test_scripts_are_compared_where_their_files_are_the_same():
    same = script_with(train="1", data="2")
    assert doubts(a=same, b=script_with(other="1", moved="2")) == set()
    for other in (script_with(train="1", data="3"), script_with(train=None), script_with()):
        assert doubts(a=same, b=other) == {"unknown_data"}
    assert doubts(a=script_with(), b=script_with()) == {"unknown_data"}


def test_evaluation_files_decide_and_not_their_names_or_the_training_data():
    def of(*, train: str, sha256: str | None, tokens: int = 100) -> StudyData:
        ends = f"/home/{train}/test.txt"
        workload = SMALL.config.workload.model_dump(exclude_none=True)
        workload["dataset"] = {"train_files": [f"/home/me/{train}.txt"], "eval_files": [ends]}
        prepared = PREPARED.model_copy(update={"eval_tokens": tokens})
        data = study(trial(0), raw={"workload": workload}, prepared=prepared)
        return with_inputs(data, **{ends: sha256})

    one = of(train="one", sha256="8")
    assert doubts(a=one, b=of(train="two", sha256="8")) == set()
    assert doubts(a=one, b=of(train="one", sha256=None)) == set()
    assert doubts(a=one, b=of(train="one", sha256="9")) == {"different_data"}
    fewer = of(train="one", sha256="8", tokens=99)
    assert doubts(a=one, b=fewer) == {"different_data"}
    text = numbers_of(a=one, b=fewer)["different_data"]["data"]
    assert "test.txt, 100 target" in text and "one.txt" not in text


def test_energy_of_other_sources_gives_no_saving():
    def source(known: dict[str, str], objective: str = "all") -> StudyData:
        carbon = SMALL.config.carbon.model_dump(exclude_none=True) | {"objective": objective}
        data = study(trial(0), raw={"carbon": carbon})
        provenance = data.provenance.model_copy(update={"energy_source": known})
        return data.model_copy(update={"provenance": provenance})

    ours, theirs = {"gpu": "measured", "cpu": "modelled"}, {"gpu": "measured", "cpu": "measured"}
    differing = document_of(a=source(ours), b=source(theirs))
    assert [caveat.level for caveat in differing.caveats if "sources" in caveat.key] == [0]
    assert "CO2e" not in differing.headline
    gpus = document_of(a=source(ours, "gpu"), b=source(theirs, "gpu"))
    assert not [caveat for caveat in gpus.caveats if "energy" in caveat.key]
    assert "CO2e" in gpus.headline


def test_a_training_cant_be_compared_with_a_whole_process():
    reported = {"duration_s": Durations(train=50, setup=9, eval=1, total=60)}
    whole, lines = script_study(script_run(0, 30.0)), script_study(script_run(0, 30.0, **reported))
    differing = document_of(a=whole, b=lines)
    assert ("different_windows", 0) in [(each.key, each.level) for each in differing.caveats]
    assert "CO2e" not in differing.headline
    assert "different_windows" not in numbers_of(a=lines, b=lines)


def test_scripts_that_differ_are_said():
    def of(**sha256s: str | None) -> StudyData:
        return script_with(**{f"/home/me/{name}.py": sha256 for name, sha256 in sha256s.items()})

    differing = numbers_of(a=of(train="1", data="2"), b=of(train="3", data="2"))[
        "different_scripts"
    ]
    assert differing == {"files": "a: train.py; b: train.py", "quality": "bleu"}
    more = numbers_of(a=of(train="1"), b=of(train="1", data="2"))["different_scripts"]
    assert more["files"] == "b: data.py"
    for alike in (of(train="1"), of(renamed="1"), of(train=None), of()):
        assert "different_scripts" not in numbers_of(a=of(train="1"), b=alike)


def test_the_page_replaces_an_older_one_and_leaves_other_files(tmp_path: Path):
    view = StudiesView(
        {name: StudyView(data) for name, data in (("small", SMALL), ("<b>large", LARGE))}
    )
    page = write_comparison(view, compared(view), tmp_path / "page")
    files = {
        str(path.relative_to(page.parent)): path.read_bytes()
        for path in page.parent.rglob("*")
        if path.is_file()
    }
    assert files.keys() == COMPARISON_NAMES
    assert b"<b>large" not in files["index.html"] and b"&lt;b&gt;large" in files["index.html"]
    data = json.loads(files["data/comparison.json"])
    assert data["studies"][0]["recommended"]["energy_kwh"] == 1e-3
    assert data["provenance"]["small"]["Data set"] == "python-docs"
    (page.parent / "notes.txt").write_text("mine")
    write_comparison(view, compared(view), tmp_path / "page")
    assert (page.parent / "notes.txt").read_text() == "mine"
    assert {name: (page.parent / name).read_bytes() for name in files} == files, (
        "the same data gives the same bytes"
    )


@pytest.mark.parametrize("count", [2, 9])
def test_the_figure_has_every_front_and_every_study_in_its_legend(count: int):
    studies = {
        f"machine {n}": study(trial(0, 1e-3 * (n + 1)), trial(1, 2e-3 * (n + 1), 4.0))
        for n in range(count)
    }
    (figure,) = document_of(**studies).paper_figures()
    assert (
        all(f"machine {n}" in figure.svg for n in range(count)) and "230 g CO₂e/kWh" in figure.svg
    )
    assert figure.pdf.startswith(b"%PDF") and figure.png.startswith(b"\x89PNG")


def test_without_anything_complete_there_is_no_figure():
    assert document_of(a=study(), b=study(raw=REPLAY)).paper_figures() == []


def test_the_headline_has_the_interval_of_repeated_runs():
    """Two runs of each, 10 % apart: a difference of 4 % is then within the noise."""
    repeats = [study(trial(0, kwh), trial(1, kwh * 1.1, repeat_of=0)) for kwh in (1e-3, 1.04e-3)]
    view = StudiesView({name: StudyView(data) for name, data in zip("ab", repeats, strict=True)})
    lowest, highest = view.comparison.less_interval
    assert lowest < 0 < highest
    verdict, figures = compared(view).headline.split(";")
    assert "95 %" in verdict and "less" not in verdict and "3.85 % less" in figures
    # Each has half the squared distance of its logarithms as variance: two degrees of freedom.
    margin = 4.302653 * math.log(1.1) / math.sqrt(2)
    assert 1 - lowest == pytest.approx(math.exp(margin) / 1.04, rel=1e-6)


def test_a_difference_beyond_the_noise_is_stated_first():
    repeats = [study(trial(0, kwh), trial(1, kwh * 1.01, repeat_of=0)) for kwh in (1e-3, 2e-3)]
    document = document_of(a=repeats[0], b=repeats[1])
    assert document.headline.startswith("a: 50 % less CO2e a run (")


@pytest.mark.parametrize("is_charged_by_cpu_time", [True, False])
def test_other_work_beside_what_is_compared_is_a_caveat(is_charged_by_cpu_time: bool):
    def of(*waits: float) -> StudyData:
        """Return a study of one trial and its repeats, and of a costlier one that waited."""
        runs = [
            trial(number, 1e-3, repeat_of=0 if number else None, cpu_wait_fraction=wait)
            for number, wait in enumerate(waits)
        ]
        other = trial(len(runs), 2e-3, cpu_wait_fraction=0.9)
        if not is_charged_by_cpu_time:
            return study(*runs, other)
        return script_study(*runs, other, target={"perplexity": 6.0})

    calm, slowed = of(0.03, 0.04), of(0.03, 0.5, 0.3)
    assert "compared_contention" not in numbers_of(a=calm, b=calm)
    (caveat,) = (
        caveat
        for caveat in document_of(a=calm, b=slowed).caveats
        if caveat.key == "compared_contention"
    )
    assert caveat.level == 1
    assert "b: trial 1" in caveat.numbers["trials"] and "50 %" in caveat.numbers["trials"]
    assert "a:" not in caveat.numbers["trials"]


def test_the_same_data_in_sequences_of_other_lengths_is_not_called_other_data() -> None:
    def cut(length: int, tokens: int, sha256: str = "8") -> StudyData:
        workload = SMALL.config.workload.model_dump(exclude_none=True)
        workload["dataset"] = {"train_files": ["/train.txt"], "eval_files": ["/test.txt"]}
        workload["sequence_length"] = length
        prepared = PREPARED.model_copy(update={"eval_tokens": tokens, "sequence_length": length})
        data = study(trial(0, 1e-3 * length), raw={"workload": workload}, prepared=prepared)
        return with_inputs(data, **{"/test.txt": sha256})

    short, long = cut(64, 99), cut(128, 98)
    alike, found = document_of(a=short, b=long), numbers_of(a=short, b=long)
    assert found["other_lengths"] == {"lengths": "64 and of 128", "quality": "perplexity"}
    assert "different_data" not in found
    assert alike.headline == "What these studies recommend can't be compared"
    assert "different_data" in numbers_of(a=short, b=cut(128, 98, sha256="9"))
    (table,) = (
        block
        for section in alike.sections
        for block in section.blocks
        if getattr(block, "key", "") == "recommended"
    )
    assert "Relative to the least" not in [column.label for column in table.columns]
    assert not any(cell.strong for row in table.rows for cell in row)
