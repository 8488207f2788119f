import os
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from tracked_studies import POINTS, STARTED_AT, record, spec, study, study_data

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study import trackers
from carbonopt.study.trackers import Trackers, open_trackers
from carbonopt.study.trackers.tracker import Tracker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """No key, no settings and no cache of the person who runs the tests."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    # For the processes that tests start.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return home


def run_trial(tracked: Trackers, number: int, state: TrialState = TrialState.COMPLETE) -> None:
    tracked.trial_started(spec(number), STARTED_AT)
    for point in POINTS:
        tracked.evaluated(number, point, 1e-8 * point.step)
    tracked.trial_ended(record(number, state).model_copy(update={"started_at": STARTED_AT}))


def wandb_services() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    warnings: list[str] = []
    tracked = open_trackers(study(tensorboard=True), tmp_path / "track", warnings.append)
    run_trial(tracked, 0)
    run_trial(tracked, 1, TrialState.FAILED)
    tracked.close()

    assert warnings == []
    folders = sorted((tmp_path / "track" / "tensorboard").iterdir())
    assert [folder.name for folder in folders] == ["0000", "0001"]
    statuses = []
    for folder in folders:
        events = EventAccumulator(str(folder)).Reload()
        perplexities = events.Scalars("perplexity")
        assert [event.step for event in perplexities] == [10, 20, 30]
        assert [event.value for event in perplexities] == pytest.approx(
            [point.value for point in POINTS]
        )
        assert events.Scalars("emissions_kg_co2e")[-1].value == pytest.approx(3e-7)
        assert events.Scalars("final/total_energy_kwh")[0].value == pytest.approx(5e-6)
        hparams = {
            tag: plugin_data_pb2.HParamsPluginData.FromString(content)
            for tag, content in events.PluginTagToContent("hparams").items()
        }
        start = hparams["_hparams_/session_start_info"].session_start_info
        assert start.hparams["global_batch_size"].number_value == 16
        assert start.hparams["offload"].string_value == "none"
        assert start.hparams["torch_compile"].bool_value is True
        end = hparams["_hparams_/session_end_info"].session_end_info
        assert end.end_time_secs - start.start_time_secs == pytest.approx(5)
        assert start.start_time_secs == datetime.fromisoformat(STARTED_AT).timestamp()
        statuses.append(end.status)
    assert statuses == [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE]


@pytest.mark.slow
def test_wandb_writes_a_run_for_each_trial_and_leaves_nothing_behind(
    tmp_path, own_home, capfd, monkeypatch
):
    # Its import falls into the time to close here, as it never does after a study; on busy cores
    # that takes longer.
    monkeypatch.setattr("carbonopt.study.trackers._CLOSE_S", 60)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID"):  # of a shell in which another run was resumed
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("WANDB_RESUME", "must")
    warnings: list[str] = []
    tracked = open_trackers(study(wandb={"project": "p"}), tmp_path / "track", warnings.append)
    run_trial(tracked, 0)
    run_trial(tracked, 1, TrialState.PRUNED)
    tracked.close()

    assert warnings == []
    files = sorted((tmp_path / "track").glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 2
    assert not any(b"elsewhere" in file.read_bytes() for file in files)
    logged = [file.read_bytes() for file in files]
    assert any(b"tracked-0000" in data for data in logged)
    assert all(
        b"train_energy_kwh" in data and b"gradient_accumulation_steps" in data for data in logged
    )
    assert wandb_services() == []
    assert list(own_home.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_no_tracker_is_imported_or_started_before_the_first_trial(tmp_path):
    script = (
        "import sys, threading\nfrom pathlib import Path\nfrom tests.study.test_trackers import"
        " study\nfrom carbonopt.study.trackers import open_trackers\ntracked ="
        " open_trackers(study(wandb={}, tensorboard=True, trackio={'project': 'p'},"
        " mlflow={'uri': 'http://127.0.0.1:9', 'experiment': 'e'}),"
        f" Path({str(tmp_path)!r}) / 'track', print)\n"
        "tracked.close()\nprint(threading.active_count(), sorted({'wandb', 'tensorboard',"
        " 'mlflow', 'trackio', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1 []"
    assert not (tmp_path / "track").exists()


def test_a_study_without_trackers_starts_no_thread(tmp_path):
    before = threading.active_count()
    tracked = open_trackers(study(), tmp_path / "track", pytest.fail)
    run_trial(tracked, 0)
    assert threading.active_count() == before
    tracked.close()


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ({"tensorboard": True}, "tensorboard is switched off"),
        ({"wandb": {"project": "p"}}, "wandb is switched off"),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, track, message):
    (tmp_path / "track").write_text("a file where the folder should be")
    warnings: list[str] = []
    tracked = open_trackers(study(**track), tmp_path / "track", warnings.append)
    run_trial(tracked, 0)
    run_trial(tracked, 1)
    tracked.close()
    assert len(warnings) == 1
    assert message in warnings[0]
    assert (tmp_path / "track").read_text().startswith("a file")


def test_one_broken_tracker_leaves_the_other_alone(tmp_path):
    warnings: list[str] = []
    hostile = {"project": "a/../#?%:", "entity": "../..%00"}
    tracked = open_trackers(
        study(wandb=hostile, tensorboard=True), tmp_path / "track", warnings.append
    )
    run_trial(tracked, 0)
    tracked.close()
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "wandb is switched off for the rest of this run: UsageError: Invalid project name"
    )
    assert list((tmp_path / "track" / "tensorboard").glob("0000/events.*"))


def test_online_without_a_key_goes_offline_and_says_so(tmp_path, own_home):
    warnings: list[str] = []
    open_trackers(study(wandb={"mode": "online"}), tmp_path / "track", warnings.append).close()
    assert len(warnings) == 1
    assert "WANDB_API_KEY" in warnings[0]
    (own_home / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    open_trackers(study(wandb={"mode": "online"}), tmp_path / "track", pytest.fail).close()


class Stuck(Tracker):
    """A tracker that never returns from its first call, as one does whose server is gone."""

    name = "stuck"
    abandoned = False

    def __init__(self) -> None:
        self.released = threading.Event()

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        self.released.wait(60)

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None: ...

    def trial_ended(self, record: TrialRecord) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        self.abandoned = True


def test_a_hanging_tracker_delays_neither_trials_nor_the_end(monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.3)
    monkeypatch.setattr(trackers, "_QUEUE_SIZE", 4)
    stuck = Stuck()
    warnings: list[str] = []
    tracked = Trackers({"stuck": lambda: stuck}, warnings.append)
    began = time.monotonic()
    for number in range(20):
        run_trial(tracked, number)
    assert time.monotonic() - began < 15, "the tracker hangs for 60 s"
    tracked.close()
    tracked.close()
    assert time.monotonic() - began < 30
    stuck.released.set()

    assert stuck.abandoned
    assert warnings[0] == "the trackers are too slow; some of what happens will be missing there."
    assert "did not finish within 0.3 s" in warnings[1]
    assert "messages to them were left out" in warnings[2]
    assert len(warnings) == 3


def test_a_command_with_nothing_left_to_run_waits_longer(monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.2)

    class Slow(Tracker):
        name = "mlflow"

        def study_ended(self, data) -> None:
            time.sleep(0.8)

        def abandon(self) -> None: ...

    for is_begun, expected in ((True, 1), (False, 0)):
        warnings: list[str] = []
        tracked = Trackers({"mlflow": Slow}, warnings.append)
        if is_begun:
            tracked.study_began(study_data())
        tracked.study_ended(study_data())
        tracked.close()
        assert len(warnings) == expected


def test_points_of_trackers_that_catch_up_are_not_called_lost(monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.3)
    stuck, closed = Stuck(), Closed()
    stuck.name, closed.name = "mlflow", "tensorboard"
    for openers, lost in (
        ({"mlflow": lambda: stuck}, []),
        ({"mlflow": lambda: stuck, "tensorboard": lambda: closed}, ["tensorboard"]),
        ({"tensorboard": lambda: closed, "mlflow": lambda: stuck}, ["tensorboard"]),
    ):
        warnings: list[str] = []
        tracked = Trackers(openers, warnings.append)
        run_trial(tracked, 0)
        tracked.close()
        later, _, others = warnings[0].partition(";")
        assert "mlflow" in later and "lost" not in later and "again" in later
        assert [name for name in ("mlflow", "tensorboard") if name in others] == lost
    stuck.released.set()


class Failing(Tracker):
    """A tracker that can be neither closed nor abandoned."""

    name = "failing"
    abandoned = 0

    def close(self) -> None:
        raise RuntimeError("can't close")

    def abandon(self) -> None:
        self.abandoned += 1
        raise RuntimeError("can't be abandoned")


class Closed(Tracker):
    name = "closed"
    calls: tuple[str, ...] = ()

    def close(self) -> None:
        self.calls += ("close",)

    def abandon(self) -> None:
        self.calls += ("abandon",)


def test_a_tracker_that_cannot_be_closed_is_abandoned_and_no_other():
    closed, failing = Closed(), Failing()
    warnings: list[str] = []
    tracked = Trackers({"failing": lambda: failing, "closed": lambda: closed}, warnings.append)
    run_trial(tracked, 0)
    tracked.close()
    assert (failing.abandoned, closed.calls) == (1, ("close",))
    assert ["can't close" in text for text in warnings] == [True, False]


def test_a_tracker_that_hangs_when_it_is_closed_is_abandoned_and_no_other(monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.3)
    closed, stuck, failing = Closed(), Stuck(), Failing()
    monkeypatch.setattr(stuck, "trial_started", lambda *_: None)
    monkeypatch.setattr(stuck, "close", lambda: stuck.released.wait(60))
    warnings: list[str] = []
    openers = {"closed": lambda: closed, "stuck": lambda: stuck, "failing": lambda: failing}
    tracked = Trackers(openers, warnings.append)
    run_trial(tracked, 0)
    tracked.close()
    assert (closed.calls, stuck.abandoned, failing.abandoned) == (("close",), True, 1)
    assert len(warnings) == 2 and "can't be abandoned" in warnings[1]
    stuck.released.set()


@pytest.mark.slow
def test_a_server_that_never_answers_holds_up_neither_close_nor_exit(tmp_path):
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from carbonopt.study import trackers\n"
        "from tests.study.test_trackers import run_trial, study, wandb_services\n"
        "trackers._CLOSE_S = 0.5\n"
        f"folder = Path({str(tmp_path)!r}) / 'track'\n"
        "config = study(wandb={'mode': 'online'})\n"
        "tracked = trackers.open_trackers(config, folder, lambda text: None)\n"
        "run_trial(tracked, 0)\n"
        "while not wandb_services():\n"
        "    time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
        "print(time.monotonic())\n"
        "tracked.close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as mute:
        server = {
            "WANDB_API_KEY": "a" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{mute.getsockname()[1]}",
        }
        command, environment = [sys.executable, "-c", script], {**os.environ, **server}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - float(done.stdout) < 30


@pytest.mark.skipif(os.name != "posix", reason="ends a process the POSIX way")
def test_wandbs_service_does_not_outlive_a_killed_study(tmp_path):
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from tests.study.test_trackers import spec, study, wandb_services\n"
        "from carbonopt.study.trackers import open_trackers\n"
        f"tracked = open_trackers(study(wandb={{}}), Path({str(tmp_path)!r}) / 'track', print)\n"
        "tracked.trial_started(spec(0), None)\n"
        "while not wandb_services():\n"
        "    time.sleep(0.05)\n"
        "print(wandb_services()[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as study_process:
        assert study_process.stdout is not None
        service = psutil.Process(int(study_process.stdout.readline()))
        study_process.kill()
    deadline = time.monotonic() + 20
    while (
        service.is_running()
        and service.status() != psutil.STATUS_ZOMBIE
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE
