"""`carbonopt.run` and `carbonopt.load`: what the commands do and say, as values."""

import asyncio
import importlib.metadata
import inspect
import io
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import ChainMap, UserDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pandas
import pytest
import yaml
from commands import within
from matplotlib.figure import Figure
from small_studies import study as small_study
from small_studies import trial

import carbonopt
from carbonopt.api.export_forms import FORMATS
from carbonopt.api.logging_display import LOG
from carbonopt.core.trial import Failure, TrialState
from carbonopt.report.assemble import FIGURES
from carbonopt.spec.pipeline_file import Pipeline, PipelineStep
from carbonopt.storage.paths import PipelinePaths, StudyPaths
from carbonopt.storage.pipeline_storage import Ledger, read_study
from carbonopt.study_file.reader import load_study, study_of
from carbonopt.study_file.yaml_file import read_yaml, yaml_text

ROOT = Path(__file__).parents[2]
PUBLICATION = {"license": "CC0-1.0", "url": "https://example.org/x", "creator": "Ada"}
MET_BY_NONE = 1.5  # a perplexity below that of every recorded run


@pytest.fixture(scope="module")
def study(finished_study: Path) -> carbonopt.Study:
    return carbonopt.load(finished_study)


def results(study: carbonopt.Study) -> pandas.DataFrame:
    columns = [name for name in study.trials if name.startswith("params.")]
    return study.trials[["trial", *columns, "state", "quality.value", "emissions_kg_co2e"]]


class AfterTrial(logging.Handler):
    """Acts when a study logs that a trial has ended; `over` says so from then on."""

    def __init__(self, number: int, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.number, self.act, self.over = number, act, False

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(f"trial {self.number} complete"):
            self.over = True
            self.act()

    def __enter__(self) -> "AfterTrial":
        LOG.setLevel(logging.INFO)
        LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        LOG.removeHandler(self)
        LOG.setLevel(logging.NOTSET)


# ------------------------------------------------------------------------------------------------
# reading


def test_the_tables_are_those_of_the_report(study: carbonopt.Study) -> None:
    data = study.folder / "report" / "data"
    whole = pandas.read_parquet(data / "trials.parquet")
    assert "evals" in whole
    csv = list(pandas.read_csv(data / "trials.csv"))
    names = [name for name in csv if name in study.trials]
    pandas.testing.assert_frame_equal(study.trials[names], whole[names])
    assert list(study.trials)[: len(names)] == names
    # What no trial of a study has, the report's table has as one empty column, if at all.
    assert whole[[name for name in csv if name not in names]].isna().all(axis=None)
    assert study.trials[[name for name in study.trials if name not in names]].isna().all(axis=None)
    read = pandas.read_csv(data / "evaluations.csv")
    pandas.testing.assert_frame_equal(
        study.evaluations, read.astype(study.evaluations.dtypes), check_exact=True
    )
    assert len(study.trials) == 12
    assert len(study.evaluations) == sum(len(evals) for evals in whole["evals"])


def test_a_replays_records_have_no_zero_for_what_the_table_lacks(study: carbonopt.Study) -> None:
    unknown = ["energy_kwh.setup", "duration_s.setup", "duration_s.eval"]
    assert study.trials[unknown].isna().all(axis=None)
    data = study.folder / "report" / "data"
    tables = [pandas.read_csv(data / "trials.csv"), pandas.read_parquet(data / "trials.parquet")]
    tables.append(
        pandas.read_csv(io.StringIO(within("export", study.folder, "--format", "csv").stdout))
    )
    for table in tables:
        assert table[unknown].isna().all(axis=None)
        for part, known in (("energy_kwh", ["train", "eval"]), ("duration_s", ["train"])):
            sums = table[[f"{part}.{name}" for name in known]].sum(axis=1)
            numpy.testing.assert_allclose(table[f"{part}.total"], sums)
    for line in within("export", study.folder).stdout.splitlines():
        record = json.loads(line)
        assert record["energy_kwh"]["setup"] is None and record["energy_kwh"]["eval"] is not None


def test_the_recommendation_is_that_of_the_command(study: carbonopt.Study) -> None:
    for target in (None, 6.0):
        given = () if target is None else ("--target", target)
        printed = json.loads(within("recommend", study.folder, "--json", *given).stdout)
        found = study.recommend(target)
        assert json.loads(json.dumps(found.as_json())) == printed
        assert (found.trial, found.energy_kwh) == (printed["trial"], printed["energy_kwh"])
        assert found.params.learning_rate == printed["params"]["learning_rate"]
        assert [caveat.key for caveat in found.caveats] == [
            caveat["key"] for caveat in printed["caveats"]
        ]
        assert found.met


def test_a_target_that_nothing_meets_raises_with_the_closest(study: carbonopt.Study) -> None:
    printed = json.loads(
        within("recommend", study.folder, "--json", "--target", MET_BY_NONE).stdout
    )
    assert not printed["met"]
    with pytest.raises(carbonopt.TargetNotMet, match=f"trial {printed['closest']['trial']}") as no:
        study.recommend(MET_BY_NONE)
    assert no.value.closest is not None
    assert no.value.closest.value == printed["closest"]["value"]
    assert isinstance(no.value, ValueError) and isinstance(no.value, carbonopt.CarbonoptError)
    with pytest.raises(carbonopt.BadInput, match="nan"):
        study.recommend(float("nan"))


def test_every_figure_of_the_report_can_be_had(study: carbonopt.Study) -> None:
    files = {path.stem for path in (study.folder / "report" / "paper").glob("figure-*.pdf")}
    for name in FIGURES:
        if f"figure-{name}" in files:
            figure = study.figure(name)
            assert isinstance(figure, Figure) and figure.axes
        else:
            with pytest.raises(carbonopt.BadInput, match=name):
                study.figure(name)
    assert "figure-pareto" in files
    with pytest.raises(carbonopt.BadInput, match="did you mean pareto"):
        study.figure("paretto")


def test_a_figure_can_be_changed_and_a_notebook_shows_it(
    study: carbonopt.Study, tmp_path: Path
) -> None:
    figure = study.figure("pareto")
    shown = figure._repr_png_()  # type: ignore[attr-defined]
    assert shown.startswith(b"\x89PNG")
    figure.axes[0].set_title("mine")
    assert figure._repr_png_() != shown  # type: ignore[attr-defined]
    figure.savefig(tmp_path / "mine.pdf")
    assert (tmp_path / "mine.pdf").read_bytes().startswith(b"%PDF")
    stars = figure.axes[0].collections[-1]  # the recommendation lies above all else
    ((_, quality),) = numpy.asarray(stars.get_offsets())
    assert quality == pytest.approx(study.recommend().value, rel=1e-9)


def test_the_docstrings_name_every_figure_and_every_format() -> None:
    for method, argument, names in (("figure", "name", FIGURES), ("export", "format", FORMATS)):
        docstring = inspect.getdoc(getattr(carbonopt.Study, method)) or ""
        text = docstring.partition(f" {argument}: ")[2].partition(".")[0]
        assert re.findall(r"`([a-z-]+)`", text) == list(names)


@pytest.mark.parametrize("form", FORMATS)
def test_exports_are_those_of_the_command(form: str, finished: Path) -> None:
    study = carbonopt.load(finished)
    publication = PUBLICATION if form == "croissant" else {}
    options = [text for name, value in publication.items() for text in (f"--{name}", value)]
    done = within("export", finished, "--format", form, *options)
    if done.returncode == 2:
        with pytest.raises(carbonopt.BadInput) as refused:
            study.export(form)
        assert done.stderr == f"carbonopt: {refused.value}\n"
        assert not (finished / "export").exists()
        return
    first, *others = study.export(form, **publication)
    assert first.read_bytes().decode() == done.stdout
    assert {path.parent for path in (first, *others)} == {finished / "export"}
    if form == "croissant":
        tables = {path.name: path.read_bytes() for path in others}
        report = finished / "report" / "data"
        assert tables == {name: (report / name).read_bytes() for name in tables} != {}


def test_an_export_goes_where_it_is_told_or_is_refused(
    study: carbonopt.Study, tmp_path: Path
) -> None:
    assert study.export("csv", tmp_path / "a" / "b") == [tmp_path / "a" / "b" / "records.csv"]
    (tmp_path / "file").touch()
    with pytest.raises(carbonopt.BadInput, match="file"):
        study.export("csv", tmp_path / "file")
    with pytest.raises(carbonopt.BadInput, match="did you mean codecarbon"):
        study.export("codecarbn")
    with pytest.raises(carbonopt.BadInput, match="license"):
        study.export("croissant")
    with pytest.raises(carbonopt.BadInput, match="url goes with"):
        study.export("csv", url="https://example.org")


def test_a_home_is_expanded_in_every_function(
    study: carbonopt.Study,
    finished_study: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert study.export("sci", "~/exp")[0].parent == tmp_path / "exp"
    assert study.export("sci", "./~/exp")[0].resolve().parent == tmp_path / "~" / "exp"
    (tmp_path / "linked").symlink_to(finished_study)
    assert carbonopt.load("~/linked").name == study.name


@pytest.mark.parametrize("path", ["~nouser/x", "a\0b", "", 5, b"a", ["a"], [10**5000]])
def test_what_is_no_path_is_refused(
    path: Any, study: carbonopt.Study, replay_study: dict, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for call, named in (
        (lambda: carbonopt.run(replay_study, path), "out"),
        (lambda: carbonopt.load(path), "dir"),
        (lambda: study.export("sci", path), "folder"),
        (lambda: carbonopt.run(path), "config"),
    ):
        with pytest.raises(carbonopt.BadInput, match=f"^{named} must"):
            call()
    with pytest.raises(carbonopt.BadInput, match="empty"):
        carbonopt.load("")
    with pytest.raises(carbonopt.BadInput, match="dir must"):
        carbonopt.load(None)  # type: ignore[arg-type]
    assert [made.name for made in tmp_path.iterdir()] == ["table.jsonl"]


@pytest.mark.parametrize("value", [5, None, b"a", ["a"], True, pytest.param(10**5000, id="huge")])
def test_what_is_no_text_is_refused(value: Any, study: carbonopt.Study, replay_study: dict) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: study.figure(value), "figure"),
        (lambda: study.export(value), "format"),
        (lambda: study.export("croissant", **{**PUBLICATION, "creator": value}), "creator"),
        (lambda: study.export("croissant", **{**PUBLICATION, "url": value}), "url"),
    ]
    if value is not None:
        calls.append((lambda: carbonopt.run(replay_study, storage=value), "storage"))
        calls.append((lambda: carbonopt.load(study.folder, storage=value), "storage"))
    for call, named in calls:
        with pytest.raises(carbonopt.BadInput, match=named):
            call()


def test_no_function_that_stops_is_refused_before_anything_is_made(
    replay_study: dict, tmp_path: Path
) -> None:
    for value in (3, threading.Event(), True):
        with pytest.raises(carbonopt.BadInput, match="should_stop must"):
            carbonopt.run(replay_study, tmp_path / "out", should_stop=value)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_tables_have_their_columns_without_a_trial(tmp_path: Path, study: carbonopt.Study) -> None:
    unmeasured = trial(0, energy_kwh=None, duration_s=None, emissions_kg_co2e=None, evals=())
    failure = Failure(kind="crash", text="It died.")
    failed = trial(1, perplexity=None, state=TrialState.FAILED, failure=failure, evals=())
    for records in ((), (unmeasured,), (unmeasured, failed)):
        opened = carbonopt.Study(StudyPaths(tmp_path), small_study(*records))
        expected = {name for name in study.trials if not name.startswith("params.")}
        assert expected == {name for name in opened.trials if not name.startswith("params.")}
        assert {"stages.steps.energy_kwh", "gpu_energy_kwh.eval.counter"} <= expected
        assert {"failure.kind", "forecast.step", "after_reported.duration_s"} <= expected
        assert not {"failure", "stages", "forecast", "gpu_energy_kwh"} & expected
        assert opened.trials["failure.kind"].notna().sum() == (failed in records)
        assert set(study.evaluations) == set(opened.evaluations)
        rows = opened.trials[["trial", "state", "quality.value", "energy_kwh.train"]]
        assert (len(rows), len(opened.evaluations)) == (len(records), 0)
        assert rows["energy_kwh.train"].isna()[:1].all()


def test_what_is_no_study_is_refused(tmp_path: Path, write_study: Any) -> None:
    with pytest.raises(carbonopt.BadInput, match=str(tmp_path)):
        carbonopt.load(tmp_path)
    with pytest.raises(carbonopt.BadInput, match="mysql") as refused:
        carbonopt.load(tmp_path, "mysql://me:hunter2@localhost/x")
    assert "hunter2" not in str(refused.value)
    (tmp_path / "pipeline.json").write_text("{}")
    with pytest.raises(carbonopt.BadInput, match="pipeline"):
        carbonopt.load(tmp_path)


# ------------------------------------------------------------------------------------------------
# running


@pytest.mark.slow
def test_a_study_is_the_same_however_it_is_given(
    replay_study: dict, tmp_path: Path, write_study: Any
) -> None:
    replay_study["search"] |= {"sampler": "random"}
    replay_study["budget"] = {"trials": 4}
    file = write_study(replay_study)
    table = Path(replay_study["launch"]["table"])
    forms = {
        "path": str(file),
        "parsed": load_study(file),
        "dict": {**replay_study, "launch": {"kind": "replay", "table": table}},
    }
    made = {name: carbonopt.run(form, tmp_path / name) for name, form in forms.items()}
    assert len(made["path"].trials) == 4
    for name in made:
        pandas.testing.assert_frame_equal(results(made[name]), results(made["path"]))
        again = carbonopt.run(forms[name], tmp_path / name)
        pandas.testing.assert_frame_equal(again.trials, made[name].trials)
        assert again.ended == made[name].ended is not None
        assert (tmp_path / name / "report" / "index.html").is_file()
    text = read_study(StudyPaths(tmp_path / "dict")).read().provenance.study_file
    (tmp_path / "again.yaml").write_text(text)
    assert load_study(tmp_path / "again.yaml") == forms["parsed"]


def test_a_dictionary_is_checked_as_a_file_is(
    replay_study: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replay_study["launch"]["table"] = "missing.jsonl"  # of the working directory
    with pytest.raises(carbonopt.BadInput, match=str(tmp_path / "missing.jsonl")):
        carbonopt.run(replay_study)
    for values, named in (
        ({**replay_study, "budgt": {"trials": 2}}, "did you mean budget"),
        ({**replay_study, "budget": {"trials": numpy.int64(2)}}, "int64"),
        ({**replay_study, "budget": {"trials": True}}, "budget.trials"),
        ([replay_study], "list"),
    ):
        with pytest.raises(carbonopt.BadInput, match=named):
            carbonopt.run(values)  # type: ignore[arg-type]
    loop: dict[str, Any] = {**replay_study}
    loop["search"] = loop
    with pytest.raises(carbonopt.BadInput, match="config"):
        carbonopt.run(loop)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_mapping_of_any_type_is_read_as_a_dictionary_is(replay_study: dict) -> None:
    nested = {**replay_study, "search": MappingProxyType(replay_study["search"])}
    expected, text = study_of(replay_study, ROOT)
    for mapping in (MappingProxyType(nested), UserDict(nested), ChainMap(nested)):
        assert study_of(mapping, ROOT) == (expected, text)


def test_plain_values_are_written_so_that_they_are_read_the_same(tmp_path: Path) -> None:
    texts = ["1e-3", "no", "NO", "true", "2024-01-01", "1:30", "0x1f", ".5", "=", "", "null", "é\n"]
    shared = [*texts, "+", "-", "@", "\t"]
    values = {"a": shared, "b": shared, "c": [1e-3, 1e300, 10**30, None, True, 0.1 + 0.2]}
    (tmp_path / "x.yaml").write_text(yaml_text(values))
    assert read_yaml(tmp_path / "x.yaml", "x").values == values


def test_a_pipeline_is_refused_before_a_license_is_asked_for(tmp_path: Path) -> None:
    step = PipelineStep(step="one", study="one.yaml")
    Ledger(pipeline=Pipeline(name="chain", pipeline=(step,))).save(PipelinePaths(tmp_path))
    done = within("export", tmp_path, "--format", "croissant")
    assert done.returncode == 2 and "license" not in done.stderr and str(tmp_path) in done.stderr


def test_a_pipeline_is_for_the_command(tmp_path: Path, replay_study: dict) -> None:
    (tmp_path / "step.yaml").write_text(yaml.safe_dump(replay_study))
    pipeline = {"name": "chain", "pipeline": [{"step": "one", "study": "step.yaml"}]}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(pipeline))
    with pytest.raises(carbonopt.BadInput, match=r"chain\.yaml"):
        carbonopt.run(tmp_path / "chain.yaml", tmp_path / "out")


def test_nothing_is_printed_and_the_log_has_it(
    replay_study: dict,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    replay_study["budget"] = {"trials": 3}
    with caplog.at_level(logging.INFO, "carbonopt"):
        study = carbonopt.run(replay_study, tmp_path / "out")
    study.recommend(1000.0)
    study.figure("pareto")
    study.export("sci")
    assert capfd.readouterr() == ("", "")
    ends = [line for line in caplog.messages if line.startswith("trial") and "begins" not in line]
    assert len(ends) == 3 and all("complete" in line or "pruned" in line for line in ends)


QUIET = """
import carbonopt, sys, yaml
from carbonopt.api.logging_display import LOG
LOG.warning("shown by no handler")
carbonopt.run(yaml.safe_load(open(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.slow
def test_nothing_is_printed_in_a_process_of_its_own(
    replay_study: dict, tmp_path: Path, write_study: Any
) -> None:
    replay_study["budget"] = {"trials": 2}
    file = write_study(replay_study)
    done = subprocess.run(
        [sys.executable, "-c", QUIET, file, tmp_path / "out"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_study_runs_in_a_thread_and_can_be_stopped(wide_replay: dict, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ended: list[Any] = []

    def work(stop: Callable[[], bool] | None) -> None:
        try:
            ended.append(carbonopt.run(wide_replay, tmp_path / "out", should_stop=stop))
        except carbonopt.CarbonoptError as error:
            ended.append(error)

    with AfterTrial(2) as after:
        for stop in (lambda: after.over, None):
            thread = threading.Thread(target=work, args=(stop,))
            thread.start()
            thread.join()
            if stop is not None:
                assert 3 <= len(carbonopt.load(tmp_path / "out").trials) < 25
    assert isinstance(ended[0], carbonopt.StudyInterrupted)
    assert "call again" in str(ended[0]) and str(tmp_path / "out") in str(ended[0])
    assert len(ended[1].trials) == 25 and ended[1].ended is not None
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_call_that_stops_before_its_study_begins_names_nothing_to_read(
    replay_study: dict, tmp_path: Path
) -> None:
    asked = [0]

    def at_the_second() -> bool:
        asked[0] += 1
        return asked[0] > 1

    for number, (should_stop, can_be_read) in enumerate(
        ((lambda: True, False), (at_the_second, True))
    ):
        folder = tmp_path / str(number)
        with pytest.raises(carbonopt.StudyInterrupted) as stopped:
            carbonopt.run(replay_study, folder, should_stop=should_stop)
        assert ("carbonopt.load" in str(stopped.value)) == can_be_read
        if can_be_read:
            assert len(carbonopt.load(folder).trials) == 0
        else:
            with pytest.raises(carbonopt.BadInput):
                carbonopt.load(folder)


@pytest.mark.slow
def test_a_study_runs_where_an_event_loop_does(replay_study: dict, tmp_path: Path) -> None:
    replay_study["budget"] = {"trials": 2}

    async def cell() -> carbonopt.Study:
        return carbonopt.run(replay_study, tmp_path / "out")

    assert len(asyncio.run(cell()).trials) == 2


@pytest.mark.slow
def test_ctrl_c_stores_the_study_and_is_raised(wide_replay: dict, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with (
        AfterTrial(2, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        carbonopt.run(wide_replay, tmp_path / "out")
    assert signal.getsignal(signal.SIGINT) is before
    cut = carbonopt.load(tmp_path / "out")
    assert cut.ended is None and "running" not in set(cut.trials["state"])
    assert 3 <= len(cut.trials) < 25
    whole = carbonopt.run(wide_replay, tmp_path / "out")
    assert len(whole.trials) == 25
    pandas.testing.assert_frame_equal(results(whole)[:3], results(cut)[:3])


TERMINATED = """
import carbonopt, logging, os, signal, sys
class Handler(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("trial 2 complete"):
            os.kill(os.getpid(), signal.SIGTERM)
logging.basicConfig(level=logging.INFO, handlers=[Handler()])
carbonopt.run(sys.argv[1], sys.argv[2])
print("went on")
"""


@pytest.mark.slow
def test_sigterm_ends_the_program_once_the_study_is_stored(
    wide_replay: dict, tmp_path: Path, write_study: Any
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, write_study(wide_replay), tmp_path / "out"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    cut = carbonopt.load(tmp_path / "out")
    assert cut.ended is None and "running" not in set(cut.trials["state"])
    assert 3 <= len(cut.trials) < 25


@pytest.mark.slow
def test_a_report_that_cannot_be_written_leaves_the_study(
    replay_study: dict, tmp_path: Path
) -> None:
    replay_study["budget"] = {"trials": 2}
    assert len(carbonopt.run(replay_study, tmp_path / "out").trials) == 2
    report = tmp_path / "out" / "report" / "data" / "report.json"
    report.write_text(json.dumps({"study": {"name": "another", "began": None}}))
    with pytest.raises(carbonopt.CarbonoptError, match="another") as kept:
        carbonopt.run(replay_study, tmp_path / "out")
    assert str(tmp_path / "out") in str(kept.value)
    assert len(carbonopt.load(tmp_path / "out").trials) == 2


@pytest.mark.slow
def test_real_trials_of_two_workers_print_nothing_in_a_thread(
    study_of_seconds: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two forked workers with trials on the CPU, called from a thread of a program."""
    study_of_seconds["launch"] = {"kind": "local", "gpus": [], "workers": 2}
    study_of_seconds["budget"] = {"trials": 3}
    results: list[carbonopt.Study] = []

    def work() -> None:
        results.append(carbonopt.run(study_of_seconds, tmp_path / "out"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert capfd.readouterr() == ("", "")
    (study,) = results
    assert (study.trials["state"] == "complete").sum() == 3
    assert (study.trials["energy_kwh.train"] > 0).all()
    (log,) = (tmp_path / "out" / "workers").glob("*/log.txt")
    assert "Traceback" not in log.read_text()


# ------------------------------------------------------------------------------------------------
# importing


HEAVY = {"torch", "optuna", "pandas", "numpy", "matplotlib", "pydantic", "yaml", "pyarrow", "typer"}


def test_the_import_takes_no_time_and_loads_nothing_heavy() -> None:
    """The least of ten starts of Python with the import is at most 0.3 s above that without it."""
    script = "import sys, carbonopt; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert set(loaded.stdout.split()) & HEAVY == set()
    took_s = {code: [started_s(code) for _ in range(10)] for code in ("pass", "import carbonopt")}
    bare, imported = (min(times) for times in took_s.values())
    assert imported - bare <= 0.3, {code: statistics.median(took_s[code]) for code in took_s}


def started_s(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def test_public_names_are_those_that_are_listed() -> None:
    assert set(carbonopt.__all__) <= set(dir(carbonopt))
    for name in carbonopt.__all__:
        assert getattr(carbonopt, name).__module__.startswith("carbonopt.")
    with pytest.raises(AttributeError, match="lod"):
        carbonopt.lod  # noqa: B018
    assert carbonopt.__version__ == importlib.metadata.version("carbonopt")


def test_type_checkers_take_the_packages_own_types() -> None:
    """`make types` checks what they find in a script: tests/typed_script.py."""
    assert (Path(carbonopt.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("target", ["0.9", True, [6.0], float("nan"), 10**400, [-(10**5000)]])
def test_a_target_that_is_no_number_is_refused(study: carbonopt.Study, target: object) -> None:
    with pytest.raises(carbonopt.BadInput, match="target"):
        study.recommend(target)
