"""Studies in a real MLflow server, read back by REST; and servers that are down, refuse, hang or
have lost what they had.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from commands import carbonopt, within
from mlflow_servers import (
    MlflowServer,
    flooding_server,
    mute_server,
    refusing_server,
    slow_proxy,
)
from tracked_studies import POINTS, STARTED_AT, record, spec, study, study_data

from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.spec.study_data import SessionLedger, StudyData
from carbonopt.study.trackers import open_trackers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ENDS_WITHIN_S = 6.0  # 5 s, and what it takes to notice


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    # For the processes that tests start.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Command:
    """One call of `carbonopt run`, as far as its trackers see it."""

    def __init__(self, url: str, experiment: str, data: StudyData, *, joins: bool = False) -> None:
        self.warnings: list[str] = []
        config = study(mlflow={"uri": url, "experiment": experiment})
        self._tracked = open_trackers(config, Path("none"), self.warnings.append, joins=joins)
        self._tracked.study_began(data)

    def starts(self, number: int, attempt: int = 1, started_at: str | None = None) -> None:
        self._tracked.trial_started(spec(number, attempt), started_at)

    def evaluates(self, number: int, *points: int) -> None:
        for point in points:
            self._tracked.evaluated(number, POINTS[point], 1e-8)

    def ends(self, done: TrialRecord) -> None:
        self._tracked.trial_ended(done)

    def runs_trial(self, number: int, state: TrialState = TrialState.COMPLETE) -> None:
        self.starts(number)
        self.evaluates(number, *range(len(POINTS)))
        self.ends(record(number, state))

    def wait_for_warning(self) -> None:
        """Wait until the tracker has been switched off."""
        deadline = time.monotonic() + 60
        while not self.warnings and time.monotonic() < deadline:
            self._tracked.evaluated(999, POINTS[0], 0.0)  # of no trial; it passes warnings on
            time.sleep(0.1)

    def finishes(self, data: StudyData | None = None) -> float:
        """End the call; return the seconds that its end waited."""
        if data is not None:
            self._tracked.study_ended(data)
        self._tracked._all_opened.wait(60)  # the imports are no server's fault
        began = time.monotonic()
        self._tracked.close()
        return time.monotonic() - began


def tracked_file(folder: Path, replay: dict, url: str, experiment: str) -> Path:
    replay["track"] = {"mlflow": {"uri": url, "experiment": experiment}}
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(replay))
    return path


def exported(out: Path) -> list[dict]:
    lines = within("export", out, "--format", "jsonl").stdout.splitlines()
    return [json.loads(line) for line in lines]


def assert_same_as_storage(server: MlflowServer, experiment: str, out: Path) -> dict[int, str]:
    """Compare all figures in the server with the storage's; return the children's identities."""
    parent, children = server.study_runs(experiment)
    records = exported(out)
    assert sorted(children) == [done["trial"] for done in records]
    for done in records:
        run = children[done["trial"]]
        assert run.tags["carbonopt.state"] == done["state"]
        assert run.status == "FINISHED"  # complete or pruned
        points = [(point["step"], point["value"]) for point in done["evals"]]
        final = [] if done["quality"]["value"] is None else [points[-1]]
        assert run.history("perplexity") == sorted(points + final)
        for name, kwh in done["energy_kwh"].items():
            sent = run.metrics.get(f"carbonopt/{name}_kwh")
            assert sent is None if kwh is None else sent == pytest.approx(kwh, rel=1e-9)
        assert run.metrics["carbonopt/emissions_kg_co2e"] == pytest.approx(
            done["emissions_kg_co2e"], rel=1e-9
        )
        expected = {name: str(value) for name, value in done["params"].items()}
        assert run.params == {**expected, "seed": str(done["seed"])}
    answer = json.loads(within("recommend", out, "--json").stdout)
    assert parent.metrics["carbonopt/study_kwh"] == pytest.approx(
        answer["study"]["energy_kwh"], rel=1e-9
    )
    assert parent.status == "FINISHED"
    return {number: run.id for number, run in children.items()}


def test_a_study_is_in_the_server_as_it_is_in_the_storage(server, tmp_path, replay_study):
    path = tracked_file(tmp_path, replay_study, server.url, "whole")
    done = within("run", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "mlflow" not in done.stderr + done.stdout
    assert_same_as_storage(server, "whole", tmp_path / "out")


def test_a_finished_study_is_sent_by_its_command_and_only_once(server, tmp_path, finished):
    study_file = tmp_path / "study.yaml"
    trials = len(exported(tmp_path / "out"))
    raw = yaml.safe_load(study_file.read_text())
    path = tracked_file(tmp_path, raw, server.url, "later")
    first = within("run", path, "--out", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    before = assert_same_as_storage(server, "later", tmp_path / "out")
    assert len(before) == trials  # none was run again
    assert within("run", path, "--out", tmp_path / "out").returncode == 0
    assert assert_same_as_storage(server, "later", tmp_path / "out") == before


def test_server_killed_in_the_middle_costs_one_warning_and_the_same_command_fills_the_gap(
    server,
):
    records = [record(number) for number in range(4)]
    first = Command(server.url, "killed", study_data())
    first.runs_trial(0)
    first.starts(1)
    first.evaluates(1, 0)
    first.finishes()
    parent, children = server.study_runs("killed")
    assert first.warnings == []
    assert {number: run.status for number, run in children.items()} == {
        0: "FINISHED",
        1: "RUNNING",
    }
    ids = {number: run.id for number, run in children.items()}

    second = Command(server.url, "killed", study_data(records[0]))
    second.starts(1, attempt=2)
    second.evaluates(1, 1)
    time.sleep(3)
    server.kill()
    second.evaluates(1, 2)
    second.ends(records[1])
    second.runs_trial(2)
    assert second.finishes() < ENDS_WITHIN_S
    assert len(second.warnings) == 1
    assert second.warnings[0].startswith("mlflow is switched off for the rest of this run")

    server.start()
    third = Command(server.url, "killed", study_data(*records[:3]))
    third.runs_trial(3)
    third.finishes(study_data(*records, ended="all trials have been run"))
    assert third.warnings == []
    again, children = server.study_runs("killed")
    assert again.id == parent.id
    assert again.status == "FINISHED"
    assert {number: children[number].id for number in ids} == ids
    final = (POINTS[-1].step, POINTS[-1].value)
    for run in children.values():
        assert run.history("perplexity") == sorted(
            [*((point.step, point.value) for point in POINTS), final]
        )
        assert run.status == "FINISHED"
        assert run.metrics["carbonopt/train_kwh"] == 3e-6


def test_trial_that_begins_again_leaves_no_point_of_its_earlier_attempt(server):
    first = Command(server.url, "again", study_data())
    first.starts(0)
    first.evaluates(0, 0, 1, 2)
    first.ends(record(0, TrialState.FAILED, StopReason.INTERRUPTED))
    first.finishes()
    _, children = server.study_runs("again")
    assert children[0].status == "KILLED"

    done = record(0).model_copy(update={"evals": tuple(POINTS[:2]), "attempt": 2})
    second = Command(server.url, "again", study_data())
    second.starts(0, attempt=2)
    second.evaluates(0, 0, 1)
    second.ends(done)
    second.finishes(study_data(done))
    assert first.warnings == second.warnings == []
    _, children = server.study_runs("again")
    assert [step for step, _ in children[0].history("carbonopt/tokens")] == [10, 20]
    assert children[0].tags["carbonopt.attempt"] == "2"


def _ended(done: TrialRecord, **changes) -> TrialRecord:
    return done.model_copy(update={"started_at": STARTED_AT, **changes})


def _seconds_after_start(at_ms: int | None) -> float | None:
    began_ms = datetime.fromisoformat(STARTED_AT).timestamp() * 1000
    return None if at_ms is None else (at_ms - began_ms) / 1000


def test_runs_have_the_times_of_the_records_whenever_they_are_sent(server):
    session = SessionLedger(started_at=STARTED_AT, duration_s=60.0)
    records = [
        _ended(record(0)),
        _ended(record(1), continued_at_steps=(10,), standstill_s=2.0),
        _ended(record(2), duration_s=None, energy_kwh=None),
    ]
    command = Command(
        server.url, "times", study_data(*records).model_copy(update={"sessions": (session,)})
    )
    command.starts(3, started_at=STARTED_AT)  # queued behind the earlier ones
    command.ends(_ended(record(3)))
    command.starts(4, started_at=STARTED_AT)
    command.ends(_ended(record(4, TrialState.FAILED, StopReason.INTERRUPTED)))
    command.finishes(study_data().model_copy(update={"sessions": (session,)}))
    assert command.warnings == []
    parent, children = server.study_runs("times")
    runs = [children[number] for number in range(5)]
    assert [_seconds_after_start(run.begin_ms) for run in (*runs, parent)] == [0.0] * 6
    assert [_seconds_after_start(run.end_ms) for run in (*runs, parent)] == [5, 7, 0, 5, 5, 60]


@pytest.mark.parametrize("nth_create", [1, 2])  # the study's run, and the first trial's
def test_run_that_is_made_after_its_time_is_found_again_and_gets_its_parameters(server, nth_create):
    experiment, done = f"slow-{nth_create}", record(0)
    with slow_proxy(server.url, nth_create, delay_s=6.0) as (url, passed):
        first = Command(url, experiment, study_data())
        first.runs_trial(0)
        first.wait_for_warning()
        first.finishes(study_data(done))
        deadline = time.monotonic() + 60
        creates = [path for path in passed if path.endswith("runs/create")]
        while len(creates) < nth_create and time.monotonic() < deadline:
            time.sleep(0.1)
            creates = [path for path in passed if path.endswith("runs/create")]
    assert len(first.warnings) == 1
    assert len(server.runs(experiment)) == nth_create

    second = Command(server.url, experiment, study_data(done))
    second.finishes(study_data(done, ended="all trials have been run"))
    assert second.warnings == []
    parent, children = server.study_runs(experiment)
    assert set(parent.params) == {"target", "sampler"}
    assert parent.status == children[0].status == "FINISHED"
    assert children[0].params["seed"] == "0"


def test_empty_second_runs_are_deleted(server):
    done = record(0)
    first = Command(server.url, "second", study_data())
    first.runs_trial(0)
    first.finishes(study_data(done))
    parent, children = server.study_runs("second")
    for run in (parent, children[0]):
        tags = [{"key": key, "value": value} for key, value in run.tags.items()]
        body = {"experiment_id": server.experiment("second"), "start_time": 1, "tags": tags}
        server.call("runs/create", body)

    second = Command(server.url, "second", study_data(done))
    second.finishes(study_data(done, ended="all trials have been run"))
    assert second.warnings == []
    again, kept = server.study_runs("second")
    assert (again.id, kept[0].id) == (parent.id, children[0].id)


def test_two_workers_have_one_parent_and_send_each_trial_once(server):
    leads = Command(server.url, "workers", study_data(record(0)))
    leads.runs_trial(1)
    leads.finishes(study_data(record(0), record(1)))
    joins = Command(server.url, "workers", study_data(record(0), record(1)), joins=True)
    joins.runs_trial(2)
    joins.finishes()
    parent, children = server.study_runs("workers")
    assert leads.warnings == joins.warnings == []
    assert sorted(children) == [0, 1, 2]
    assert parent.tags["carbonopt.study"] == study_data().id


def test_names_that_mlflow_does_not_take_lose_signs_and_nothing_else(server):
    from carbonopt.study.trackers.mlflow_tracker import _metric_name

    assert _metric_name("carbonopt/train_kwh") == "carbonopt/train_kwh"
    assert _metric_name("BLEU (4)%") == "BLEU _4__"


def test_server_that_is_down_costs_one_warning_and_never_the_answer(tmp_path, replay_study):
    path = tracked_file(tmp_path, replay_study, "http://127.0.0.1:9", "none")
    done = carbonopt("run", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (done.stderr + done.stdout).count("mlflow is switched off") == 1
    assert within("recommend", tmp_path / "out").stdout in done.stdout


def test_server_that_refuses_costs_one_warning_without_the_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "somebody")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret-word")
    with refusing_server() as (url, asked):
        command = Command(url, "refused", study_data())
        command.runs_trial(0)
        command.runs_trial(1)
        assert command.finishes() < ENDS_WITHIN_S
    assert asked
    assert len(command.warnings) == 1
    assert "401" in command.warnings[0]
    assert "s3cret" not in command.warnings[0]


@pytest.mark.parametrize("status", [200, 404])
def test_answer_without_an_end_is_not_read_to_the_end(status):
    with flooding_server(status, most_mib=400) as (url, sent):
        command = Command(url, "flooded", study_data())
        command.runs_trial(0)
        command.wait_for_warning()
        assert command.finishes() < ENDS_WITHIN_S
    assert len(command.warnings) == 1
    assert "32 MiB" in command.warnings[0]
    assert 32 <= len(sent) < 64


def test_server_that_hangs_holds_up_neither_the_end_nor_the_exit():
    script = (
        "import sys, time\n"
        "from tests.study.test_mlflow_tracker import Command, study_data\n"
        "command = Command(sys.argv[1], 'mute', study_data())\n"
        "command.runs_trial(0)\n"
        "print(command.finishes(), len(command.warnings))\n"
        "print(time.monotonic())\n"
    )
    with mute_server() as url:
        done = subprocess.run(
            [sys.executable, "-c", script, url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
        )
        left_s = time.monotonic() - float(done.stdout.split()[-1])
    assert (done.returncode, done.stderr) == (0, "")
    waited_s, warnings = done.stdout.splitlines()[0].split()
    assert float(waited_s) < ENDS_WITHIN_S
    assert int(warnings) == 1
    assert left_s < 5


def test_experiment_that_is_lost_costs_one_warning(server):
    first = Command(server.url, "lost", study_data())
    first.runs_trial(0)
    first.finishes()
    found = server.call("experiments/get-by-name?experiment_name=lost")
    identity = found["experiment"]["experiment_id"]
    second = Command(server.url, "lost", study_data(record(0)))
    second.starts(1)
    time.sleep(3)
    server.call("experiments/delete", {"experiment_id": identity})
    second.evaluates(1, 0, 1, 2)
    second.ends(record(1))
    assert second.finishes() < ENDS_WITHIN_S
    assert len(second.warnings) == 1

    third = Command(server.url, "lost", study_data(record(0), record(1)))
    third.runs_trial(2)
    third.finishes()
    assert len(third.warnings) == 1
    assert "LookupError: the experiment 'lost' has been deleted" in third.warnings[0]
    server.call("experiments/restore", {"experiment_id": identity})


def test_server_that_has_lost_everything_is_filled_again(server):
    first = Command(server.url, "empty", study_data())
    first.runs_trial(0)
    first.starts(1)
    time.sleep(5)
    server.kill()
    server.lose_everything()
    server.start()
    first.evaluates(1, 0)
    first.ends(record(1))
    assert first.finishes() < ENDS_WITHIN_S
    assert len(first.warnings) == 1

    second = Command(server.url, "empty", study_data(record(0), record(1)))
    second.runs_trial(2)
    second.finishes(study_data(*map(record, range(3)), ended="all trials have been run"))
    assert second.warnings == []
    parent, children = server.study_runs("empty")
    assert sorted(children) == [0, 1, 2]
    assert parent.status == "FINISHED"


def test_nothing_is_sent_but_to_the_server(server):
    script = (
        "import socket, sys\n"
        "peers, connect = set(), socket.socket.connect\n"
        "def noted(self, address):\n"
        "    peers.add(address)\n"
        "    return connect(self, address)\n"
        "socket.socket.connect = socket.socket.connect_ex = noted\n"
        "from tests.study.test_mlflow_tracker import Command, study_data\n"
        "command = Command(sys.argv[1], 'alone', study_data())\n"
        "command.runs_trial(0)\n"
        "command.finishes()\n"
        "from mlflow.telemetry import get_telemetry_client\n"
        "print(sorted(peers), get_telemetry_client(), command.warnings)\n"
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        # MLflow sends nothing from a test or from CI, as it finds by these.
        if name not in ("CI", "PYTEST_CURRENT_TEST", "PYTEST_VERSION", "GITHUB_ACTIONS")
        and not name.startswith("MLFLOW_")
    }
    done = subprocess.run(
        [sys.executable, "-c", script, server.url],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=180,
    )
    port = int(server.url.rpartition(":")[2])
    assert done.stdout.strip() == f"[('127.0.0.1', {port})] None []", done.stderr
    assert done.stderr == ""
