"""The Optuna storage: readable by Optuna's own tools, on SQLite and PostgreSQL."""

import json
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import yaml
from commands import free_port, within
from replays import study_over, write_table
from search.test_study import Silent
from small_studies import probe

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY, Target
from carbonopt.core.trial import QualityResult, StopReason, TrialRecord, TrialState
from carbonopt.search.strategy import Strategy
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.stored_records import COST
from carbonopt.storage.study_storage import (
    CONSTRAINT,
    WORST_VIOLATION,
    StudyStorage,
    _first_difference,
    violation,
)
from carbonopt.storage.url import connect
from carbonopt.study.run_study import run_study
from carbonopt.study.session import Session
from carbonopt.study_file.reader import load_study, parse_study
from carbonopt.study_file.study_checks import check


def ran(study: Path, folder: Path, trials: int | None = None) -> StudyData:
    """What `carbonopt run` does, without its report."""
    paths, config = StudyPaths(folder), load_study(study)
    paths.root.mkdir(exist_ok=True)
    if trials is not None:
        config = config.model_copy(
            update={"budget": config.budget.model_copy(update={"trials": trials})}
        )
    text = study.read_text(encoding="utf-8")
    return run_study(Session(check(config), text, paths, Silent(), Silent(), lambda: False))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that was never interrupted, its study file beside it. Nobody writes
    into it.
    """
    root = tmp_path_factory.mktemp("whole")
    (root / "study.yaml").write_text(yaml.safe_dump(study_over(write_table(root))))
    assert ran(root / "study.yaml", root / "out").ended is not None
    return root / "out"


def trials_in(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(
        study_name="replayed", storage=f"sqlite:///{StudyPaths(folder).storage}"
    ).trials


@pytest.mark.slow
def test_optuna_dashboard_shows_the_study(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "out")
    port = free_port()
    program = Path(sys.executable).with_name("optuna-dashboard")
    server = subprocess.Popen(
        [str(program), f"sqlite:///{folder / 'study.db'}", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/api/studies", timeout=5
                ) as answer:
                    (summary,) = json.load(answer)["study_summaries"]
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.3)
        url = f"http://127.0.0.1:{port}/api/studies/{summary['study_id']}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            study = json.load(answer)
    finally:
        server.terminate()
        server.wait()
    assert study["directions"] == ["minimize", "minimize"]
    complete = next(trial for trial in study["trials"] if trial["state"] == "Complete")
    attributes = {attribute["key"]: attribute["value"] for attribute in complete["user_attrs"]}
    assert "global_batch_size=" in attributes["configuration"]
    assert "complete" in attributes["state"]


def test_the_target_is_optunas_constraint(whole: Path, replay_study: dict) -> None:
    study = optuna.load_study(study_name="replayed", storage=f"sqlite:///{whole / 'study.db'}")
    assert study.metric_names == ["emissions_kg_co2e", "perplexity"]
    target = replay_study["target"]["perplexity"]
    for trial in study.trials:
        value = trial.system_attrs[f"constraints:{CONSTRAINT}"]
        if trial.state == optuna.trial.TrialState.COMPLETE:
            assert (value <= 0) == (trial.values[1] <= target)
    assert study.best_trials
    assert all(trial.values[1] <= target for trial in study.best_trials)


@pytest.mark.slow
def test_a_study_in_postgresql(
    replay_study: dict, write_study, tmp_path: Path, postgresql_url: str
) -> None:
    study, folder = write_study(replay_study), tmp_path / "out"
    done = within("run", study, "--out", folder, "--storage", postgresql_url, "--trials", 5)
    assert done.returncode in (0, 3), done.stderr
    assert not (folder / "study.db").exists()
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), (
            f"{path} holds the password"
        )
    again = within(
        "run", study, "--out", folder, PGPASSWORD="s3cret"
    )  # the folder knows the rest of the URL
    assert again.returncode == 0, again.stderr
    records = within("export", folder, PGPASSWORD="s3cret")
    assert 5 < len(records.stdout.splitlines()) <= 12
    refused = within(
        "run",
        study,
        "--out",
        tmp_path / "other",
        "--storage",
        postgresql_url.replace("s3cret", "wr0ng"),
    )
    assert refused.returncode == 2
    assert "wr0ng" not in refused.stderr


# ------------------------------------------------------------------------------------------------------------
# sampling


def record(state: TrialState, perplexity: float | None = None, **more: object) -> TrialRecord:
    params = TrialParams(
        global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=1
    )
    quality = QualityResult(name=PERPLEXITY.name, value=perplexity)
    return TrialRecord(trial=0, state=state, seed=0, params=params, quality=quality, **more)


def test_only_what_meets_the_target_is_feasible() -> None:
    target = Target(PERPLEXITY, 10.0)
    assert violation(record(TrialState.COMPLETE, 9.0), target) < 0
    assert violation(record(TrialState.COMPLETE, 10.0), target) == 0
    assert violation(record(TrialState.COMPLETE, 11.0), target) > 0
    assert violation(record(TrialState.COMPLETE, float("inf")), target) == WORST_VIOLATION
    for state in (
        TrialState.INFEASIBLE,
        TrialState.DIVERGED,
        TrialState.FAILED,
        TrialState.TIMEOUT,
    ):
        assert violation(record(state), target) == WORST_VIOLATION
    point = EvalPoint.of(PERPLEXITY, 0.5, 1, step=1, tokens=1)
    stopped = record(TrialState.PRUNED, evals=(point,), stop_reason=StopReason.TARGET)
    assert violation(stopped, target) > 0, (
        "a trial that can't reach the target must not look feasible"
    )


OFFLOADS = ["none", "optimizer"]


@pytest.mark.parametrize(
    ("name", "offloads"),
    [
        *((name, OFFLOADS) for name in ("carbon", "tpe", "nsga2", "random", "grid")),
        ("gp", OFFLOADS[:1]),  # two proposals more than the ten that it draws: each takes seconds
    ],
)
def test_samplers_propose_only_what_can_exist_and_nothing_twice(
    name: str, offloads: list[str], tiny_study: dict
) -> None:
    tiny_study["search"] |= {
        "sampler": name,
        "goal": "front",
    }  # for which carbon, too, runs all that exists
    tiny_study["search"]["space"] = {
        "global_batch_size": {"choices": [4, 8]},
        "micro_batch_size_per_gpu": {"choices": [4, 8]},
        "learning_rate": {"choices": [1e-3, 1e-2]},
        "epochs": 1,
        "zero_stage": {"choices": [0, 3]},
        "offload": {"choices": offloads},
    }
    config = parse_study(tiny_study, "here")
    space = SearchSpace(config.search.space, 1, on_gpu=False)
    strategy = Strategy(config, space, None)
    study = optuna.create_study(directions=["minimize"] * 2)
    seen = set()
    while (plan := strategy.plan(study.trials, len(seen))).why_ended is None:
        study.sampler = plan.sampler
        trial = study.ask(strategy.distributions)
        assert space.rule_broken(trial.params) is None
        seen.add(tuple(trial.params.values()))
        value = trial.params["learning_rate"] * trial.params["global_batch_size"]
        trial.set_constraint(CONSTRAINT, value - 0.05)
        study.tell(trial, [value, 1 / value])
        assert len(seen) == len(study.trials)
    assert len(seen) == len(space.combinations)


FULL = """
import sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from carbonopt.cli import app as cli

@event.listens_for(Engine, "connect")
def limit(connection, _):
    connection.execute(f"PRAGMA max_page_count = {pages}")

cli.main()
"""


@pytest.mark.slow
def test_a_full_disk_gets_one_sentence_and_loses_no_trial(whole: Path, tmp_path: Path) -> None:
    study, folder = whole.parent / "study.yaml", tmp_path / "out"
    ran(study, folder, trials=3)
    with closing(sqlite3.connect(folder / "study.db")) as database:
        ((pages,),) = database.execute("PRAGMA page_count")
    program = FULL.replace("{pages}", str(pages))
    command = [sys.executable, "-c", program, "run", str(study), "--out", str(folder)]
    full = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert full.returncode == 1
    assert (
        full.stderr.splitlines()[-1]
        == f"carbonopt: no space left for the storage of {folder}; make room and type the same"
        " command again."
    )
    assert "Traceback" not in full.stderr
    assert within("run", study, "--out", folder).returncode == 0
    there, undisturbed = (
        [(trial.params, trial.values) for trial in trials_in(root)] for root in (folder, whole)
    )
    assert there == undisturbed


def test_an_interrupted_search_proposes_what_the_uninterrupted_one_would(
    whole: Path, tmp_path: Path
) -> None:
    for trials in (3, 7, 12):
        ran(whole.parent / "study.yaml", tmp_path / "parts", trials)
    assert [trial.params for trial in trials_in(tmp_path / "parts")] == [
        trial.params for trial in trials_in(whole)
    ]


KILLED_WHILE_IT_WROTE = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
database.execute("BEGIN IMMEDIATE")
database.execute("CREATE TABLE half (text)")
database.executemany("INSERT INTO half VALUES (?)", (("x" * 5000,) for _ in range(100)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_storage_whose_writer_was_killed_opens_again(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    optuna.create_study(storage=f"sqlite:///{file}", study_name="kept")
    subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WROTE, str(file)])
    assert file.with_name("study.db-journal").stat().st_size, (
        "nothing to undo: the test would show nothing"
    )
    assert connect(f"sqlite:///{file}", must_exist=True).get_all_studies()[0].study_name == "kept"
    with closing(sqlite3.connect(file)) as database:
        assert (
            database.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
        )


@pytest.mark.parametrize("attributes", [[], ["config"]])
def test_a_study_that_was_killed_as_it_was_made_begins_again(
    attributes: list, whole: Path, tmp_path: Path
) -> None:
    shutil.copy(whole.parent / "study.yaml", tmp_path / "study.yaml")
    (tmp_path / "out").mkdir()
    config = load_study(tmp_path / "study.yaml")
    database = connect(f"sqlite:///{StudyPaths(tmp_path / 'out').storage}")
    directions = ["minimize", config.quality.direction]
    made = optuna.create_study(study_name=config.name, storage=database, directions=directions)
    made.set_metric_names([COST, config.quality.name])
    for name in attributes:
        made.set_user_attr(name, config.model_dump(mode="json"))
    data = ran(tmp_path / "study.yaml", tmp_path / "out", trials=2)
    assert len(data.records) == 2 and data.ended is not None


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        ("probe 1", {}, "probe 1 has the record of probe 0"),
        ("probe x", {}, "probe x has the record of probe 0"),
        ("probe 0", {"state": "complete"}, "probe 0 can't have ended as its record says"),
        ("probe 0", {"energy_kwh": None}, "probe 0 can't have ended as its record says"),
        ("probe 0", {"evals": None}, "probe 0: "),
        ("probe 0", {"hello": 1}, "probe 0: unknown key hello"),
        ("probe 0", None, "probe 0: "),
    ],
)
def test_a_damaged_probe_is_named(
    key: str, changes: dict | None, says: str, whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "out")
    paths = StudyPaths(folder)
    study = optuna.load_study(study_name="replayed", storage=f"sqlite:///{paths.storage}")
    study.set_user_attr(key, None if changes is None else probe(0).as_json() | changes)
    storage = StudyStorage.of_folder(connect(f"sqlite:///{paths.storage}"), paths)
    with pytest.raises(BadInput, match=says):
        storage.read()


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ([0, 1, 4], [False, True, 4]),
        ([1, 2], [1.0, 2.0]),
        (1, True),
        ("1", 1),
        ([{"a": 0}], [{"a": 0.0}]),
    ],
)
def test_values_of_other_types_are_other_values(stored: object, given: object) -> None:
    difference = _first_difference({"space": {"h": stored}}, {"space": {"h": given}})
    assert str(difference).startswith(f"space.h is {given!r} now")
    assert _first_difference({"h": stored}, {"h": stored}) is None


@pytest.mark.parametrize(
    ("stored", "given", "is_of_place"),
    [
        ("/a/project", "/b", True),
        (["/a/train.csv"], ["/b/train.csv", "/b/more.csv"], True),
        ("gpt2", "/b/gpt2", False),
        (["/a/train.csv"], None, False),
        (1, 2, False),
    ],
)
def test_paths_that_differ_may_have_been_moved(
    stored: object, given: object, is_of_place: bool
) -> None:
    difference = _first_difference({"folder": stored}, {"folder": given})
    assert difference is not None
    assert difference.is_of_place is is_of_place


def test_the_first_line_of_a_text_that_differs_is_named() -> None:
    stored, given = ({"text": f"a: 1\nb: {value}\nc: 3"} for value in (2, 4))
    difference = str(_first_difference(stored, given))
    assert "line 2 of text" in difference
    assert "'b: 4'" in difference and "'b: 2'" in difference and "c: 3" not in difference
    assert "None in" in str(_first_difference({"text": "a"}, {"text": "a\nb"}))
