"""Studies in a real Trackio project, read back by Trackio's own classes, in a process of its own,
because Trackio reads its folder's variable when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import carbonopt, within

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as storage
runs = {}
for run in storage.get_run_records(sys.argv[1]):
    name, identity = run["name"], run["id"]
    runs[identity] = {
        "name": name,
        "config": storage.get_run_config(sys.argv[1], name, run_id=identity),
        "logs": storage.get_logs(sys.argv[1], name, run_id=identity),
    }
print(json.dumps(runs))
"""
CALLS = """
import sys
from pathlib import Path
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.study.trackers import open_trackers
from tracked_studies import POINTS, record, spec, study, study_data
def command(*earlier):
    config = study(trackio={"project": "calls"})
    tracked = open_trackers(config, Path("none"), lambda text: print(text, flush=True))
    tracked.study_began(study_data(*earlier))
    return tracked
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No project of the person who runs the tests."""
    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    # Variables that would have Trackio send runs away, and read them from there.
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACKIO_DATASET_ID", "somebody/data")
    monkeypatch.setenv("TRACKIO_BUCKET_ID", "somebody/bucket")
    return folder


def python(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(project: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    with monkeypatch.context() as patch:
        for name in ("TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID"):
            patch.delenv(name)
        return json.loads(python(READ, project))


def test_a_finished_study_is_in_the_project_as_in_the_storage(finished, tmp_path, monkeypatch):
    path = tmp_path / "study.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["track"] = {"trackio": {"project": "mine"}}
    path.write_text(yaml.safe_dump(raw))
    for _ in range(2):  # the second time nothing is missing
        done = carbonopt("run", path, "--out", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        assert "trackio" not in (done.stderr + done.stdout).lower()
        runs = read("mine", monkeypatch)
        lines = within("export", tmp_path / "out", "--format", "jsonl").stdout.splitlines()
        records = {json.loads(line)["trial"]: json.loads(line) for line in lines}
        by_trial = {run["config"]["trial"]: run for run in runs.values()}
        assert by_trial.keys() == records.keys()
        assert len(runs) == len(records)
        for number, record in records.items():
            run = by_trial[number]
            assert run["name"] == f"replayed-{number:04d}"
            assert run["config"]["state"] == record["state"]
            points = [
                (row["step"], row["perplexity"])
                for row in run["logs"]
                if "carbonopt/total_kwh" not in row
            ]
            assert points == [(point["step"], point["value"]) for point in record["evals"]]
            end = run["logs"][-1]
            for name, kwh in record["energy_kwh"].items():
                assert end.get(f"carbonopt/{name}_kwh") == kwh  # null: not sent
            assert end["carbonopt/emissions_kg_co2e"] == record["emissions_kg_co2e"]
            for name, value in record["params"].items():
                assert run["config"][name] == value


def test_resume_goes_on_with_the_same_runs(monkeypatch):
    first = """
tracked = command()
tracked.trial_started(spec(0), None)
for point in POINTS: tracked.evaluated(0, point, 0.0)
tracked.trial_ended(record(0))
tracked.trial_started(spec(1), None)
tracked.evaluated(1, POINTS[0], 0.0)
tracked.close()
"""
    assert python(CALLS + first) == ""
    before = read("calls", monkeypatch)
    assert [len(run["logs"]) for run in before.values()] == [4, 1]
    second = """
running = record(1, TrialState.RUNNING).model_copy(update={"evals": tuple(POINTS[:1])})
tracked = command(record(0), running, record(2))
tracked.trial_started(spec(1, attempt=2), None)
for point in POINTS[1:]: tracked.evaluated(1, point, 0.0)
tracked.trial_ended(record(1))
tracked.close()
"""
    assert python(CALLS + second) == ""
    after = read("calls", monkeypatch)
    assert after.keys() >= before.keys()
    assert len(after) == 3
    for run in after.values():
        assert [row["step"] for row in run["logs"]] == [10, 20, 30, 30]
        assert run["config"]["state"] == "complete"
    third = """
again = record(1).model_copy(update={"evals": tuple(POINTS[:2]), "attempt": 3})
tracked = command(record(0), record(2))
tracked.trial_started(spec(1, attempt=3), None)
for point in POINTS[:2]: tracked.evaluated(1, point, 0.0)
tracked.trial_ended(again)
tracked.close()
"""
    assert python(CALLS + third) == ""
    (begun_again,) = [
        run for run in read("calls", monkeypatch).values() if run["config"]["trial"] == 1
    ]
    assert [row["step"] for row in begun_again["logs"]] == [10, 20, 20]
    assert begun_again["config"]["attempt"] == 3


def test_nothing_is_sent_anywhere_or_listened_to():
    script = """
import socket
def refuse(*arguments): raise AssertionError(f"the network was used: {arguments}")
for name in ("connect", "connect_ex", "bind", "listen"):
    setattr(socket.socket, name, refuse)
tracked = command()
tracked.trial_started(spec(0), None)
for point in POINTS: tracked.evaluated(0, point, 0.0)
tracked.trial_ended(record(0))
tracked.close()
"""
    assert python(CALLS + script) == ""


def test_folder_that_cannot_be_written_is_one_warning(own_folder):
    own_folder.write_text("a file where the folder should be")
    script = """
tracked = command()
for number in (0, 1):
    tracked.trial_started(spec(number), None)
    tracked.trial_ended(record(number))
tracked.close()
"""
    (warning,) = python(CALLS + script).splitlines()
    assert warning.startswith("trackio is switched off for the rest of this run")


def test_names_that_are_accepted_are_trackios_own():
    script = """
from trackio.sqlite_storage import SQLiteStorage as storage
from trackio.utils import canonical_project_name
from carbonopt.core.errors import BadInput
def theirs(name):
    try:
        storage.validate_project_name(name)
    except ValueError:
        return False
    return canonical_project_name(name) == name
def ours(name):
    try:
        study(trackio={"project": name})
    except BadInput as error:
        # What stands below `track` may be a secret, and is not shown.
        assert "track.trackio.project" in str(error) and repr(name) not in str(error), error
        return False
    return True
endings = [f"_{t}" for t in ("system", "configs", "traces", *storage._ARTIFACT_PARQUET_TABLES)]
for name in ["a", "a-b_c", "a.b", "a b", "a/b", "registry-a", "a-registry-", *(f"a{e}" for e in endings)]:
    print(name, ours(name), theirs(name))
"""
    rows = [line.rsplit(" ", 2) for line in python(CALLS + script).splitlines()]
    assert [row[0] for row in rows if row[1] != row[2]] == []
    assert {row[1] for row in rows} == {"True", "False"}
