"""The Optuna storage: readable by Optuna's own tools, on SQLite and PostgreSQL."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import PERPLEXITY, Target
from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import EvalPoint, QualityResult, StopReason, TrialRecord, TrialState
from carbonopt.search.strategy import Strategy
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study import CONSTRAINT, WORST_VIOLATION, violation
from carbonopt.storage.url import connect
from carbonopt.study.file import parse_study


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(study: Path, folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


def test_optuna_dashboard_shows_the_study(replay_study: dict, write_study, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(write_study(replay_study), folder).returncode == 0
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
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=5) as answer:
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


def test_the_target_is_optunas_constraint(replay_study: dict, write_study, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(write_study(replay_study), folder).returncode == 0
    study = optuna.load_study(study_name="replayed", storage=f"sqlite:///{folder / 'study.db'}")
    assert study.metric_names == ["emissions_kg_co2e", "perplexity"]
    target = replay_study["target"]["perplexity"]
    for trial in study.trials:
        value = trial.system_attrs[f"constraints:{CONSTRAINT}"]
        if trial.state == optuna.trial.TrialState.COMPLETE:
            assert (value <= 0) == (trial.values[1] <= target)
    assert study.best_trials
    assert all(trial.values[1] <= target for trial in study.best_trials)


def test_a_study_in_postgresql(replay_study: dict, write_study, tmp_path: Path, postgresql_url: str) -> None:
    study, folder = write_study(replay_study), tmp_path / "out"
    done = run(study, folder, "--storage", postgresql_url, "--trials", "5")
    assert done.returncode in (0, 3), done.stderr
    assert not (folder / "study.db").exists()
    for path in folder.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), f"{path} holds the password"
    again = run(study, folder, PGPASSWORD="s3cret")  # the folder knows the rest of the URL
    assert again.returncode == 0, again.stderr
    export = [sys.executable, "-m", "carbonopt", "export", str(folder)]
    records = subprocess.run(export, capture_output=True, text=True, env={**os.environ, "PGPASSWORD": "s3cret"})
    assert 5 < len(records.stdout.splitlines()) <= 12
    refused = run(study, tmp_path / "other", "--storage", postgresql_url.replace("s3cret", "wr0ng"))
    assert refused.returncode == 2
    assert "wr0ng" not in refused.stderr


# ------------------------------------------------------------------------------------------------------------ sampling


def record(state: TrialState, perplexity: float | None = None, **more: object) -> TrialRecord:
    params = TrialParams(global_batch_size=8, micro_batch_size_per_gpu=8, learning_rate=1e-3, epochs=1)
    quality = QualityResult(name=PERPLEXITY.name, value=perplexity)
    return TrialRecord(trial=0, state=state, seed=0, params=params, quality=quality, **more)


def test_only_what_meets_the_target_is_feasible() -> None:
    target = Target(PERPLEXITY, 10.0)
    assert violation(record(TrialState.COMPLETE, 9.0), target) < 0
    assert violation(record(TrialState.COMPLETE, 10.0), target) == 0
    assert violation(record(TrialState.COMPLETE, 11.0), target) > 0
    assert violation(record(TrialState.COMPLETE, float("inf")), target) == WORST_VIOLATION
    for state in (TrialState.INFEASIBLE, TrialState.DIVERGED, TrialState.FAILED, TrialState.TIMEOUT):
        assert violation(record(state), target) == WORST_VIOLATION
    point = EvalPoint.of(PERPLEXITY, 0.5, 1, step=1, tokens=1)
    stopped = record(TrialState.PRUNED, evals=(point,), stop_reason=StopReason.TARGET)
    assert violation(stopped, target) > 0, "a trial that can't reach the target must not look feasible"


@pytest.mark.parametrize("name", ["carbon", "tpe", "nsga2", "gp", "random", "grid"])
def test_samplers_propose_only_what_can_exist_and_nothing_twice(name: str, tiny_study: dict) -> None:
    tiny_study["search"] |= {"sampler": name, "goal": "front"}  # for which carbon, too, runs all that exists
    tiny_study["search"]["space"] = {
        "global_batch_size": {"choices": [4, 8]},
        "micro_batch_size_per_gpu": {"choices": [4, 8]},
        "learning_rate": {"choices": [1e-3, 1e-2]},
        "epochs": 1,
        "zero_stage": {"choices": [0, 3]},
        "offload": {"choices": ["none", "optimizer"]},
    }
    config = parse_study(tiny_study, "here")
    space = SearchSpace(config.search.space, 1, on_gpu=False)
    strategy = Strategy(config, space, None)
    study = optuna.create_study(directions=["minimize"] * 2)
    seen = set()
    while strategy.why_ended(study, len(seen)) is None:
        study.sampler = strategy.sampler(study, len(seen))
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


def test_a_full_disk_gets_one_sentence_and_loses_no_trial(replay_study: dict, write_study, tmp_path: Path) -> None:
    study, folder = write_study(replay_study), tmp_path / "out"
    assert run(study, folder, "--trials", "3").returncode in (0, 3)
    with closing(sqlite3.connect(folder / "study.db")) as database:
        ((pages,),) = database.execute("PRAGMA page_count")
    program = FULL.replace("{pages}", str(pages + 1))
    command = [sys.executable, "-c", program, "run", str(study), "--out", str(folder)]
    full = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == (
        f"carbonopt: no space left for the storage of {folder}; make room and type the same command again."
    )
    assert "Traceback" not in full.stderr
    assert run(study, folder).returncode == 0
    assert run(study, tmp_path / "whole").returncode == 0
    there, whole = (
        [(trial.params, trial.values) for trial in optuna.load_study(study_name="replayed", storage=url).trials]
        for url in (f"sqlite:///{folder / 'study.db'}", f"sqlite:///{tmp_path / 'whole' / 'study.db'}")
    )
    assert there == whole


def test_an_interrupted_search_proposes_what_the_uninterrupted_one_would(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    study = write_study(replay_study)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(study, whole).returncode == 0
    for trials in ("3", "7", "12"):
        assert run(study, parts, "--trials", trials).returncode in (0, 3)

    def proposed(folder: Path) -> list[dict]:
        url = f"sqlite:///{StudyPaths(folder).storage}"
        return [trial.params for trial in optuna.load_study(study_name="replayed", storage=url).trials]

    assert proposed(parts) == proposed(whole)


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
    assert file.with_name("study.db-journal").stat().st_size, "nothing to undo: the test would show nothing"
    assert connect(f"sqlite:///{file}", must_exist=True).get_all_studies()[0].study_name == "kept"
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
