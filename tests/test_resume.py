"""Interruption at any moment: the same command goes on to the configured total, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from carbonopt.analysis.footprint import footprint
from carbonopt.paths import StudyPaths
from carbonopt.storage import StudyStorage
from carbonopt.storage_url import connect, storage_url
from carbonopt.trial import StopReason, TrialState


def read(folder: Path):
    paths = StudyPaths(folder)
    return StudyStorage.of_folder(connect(storage_url(paths, None)), paths).read(live=False)


def start(study: Path, folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def workers(folder: Path) -> list[int]:
    """Processes that work for the study of this folder, its command not counted."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(folder) in command and "carbonopt run" not in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def wait_for(condition, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def training_in(folder: Path, number: int) -> bool:
    """Whether a trial has spent energy on training and said so to the storage."""
    if not StudyPaths(folder).trial(number).exists():  # before the first trial the storage may be half made
        return False
    records = {record.trial: record for record in read(folder).records}
    record = records.get(number)
    return record is not None and record.energy_kwh is not None and record.energy_kwh.train > 0


@pytest.fixture
def slow_study(tiny_study: dict) -> dict:
    """Two trials of some seconds of training each."""
    tiny_study["search"]["space"]["epochs"] = 2
    tiny_study["search"]["space"]["global_batch_size"] = {"choices": [8, 16]}
    tiny_study["search"]["pruning"] = {"target": False, "cap": False}
    tiny_study["budget"] = {"trials": 2}
    return tiny_study


def test_killed_terminated_and_finished(slow_study: dict, write_study, tmp_path: Path) -> None:
    """SIGKILL of the command, then SIGTERM of its second try, then a third that reaches the total."""
    study, folder = write_study(slow_study), tmp_path / "out"

    command = start(study, folder)
    wait_for(lambda: training_in(folder, 0))
    command.kill()
    command.wait()
    wait_for(lambda: workers(folder) == [], 15)
    (killed,) = read(folder).records
    assert (killed.state, killed.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)
    used = killed.energy_kwh.total
    assert used > 0
    StudyPaths(folder).prepare_log.unlink()

    command = start(study, folder)
    wait_for(lambda: training_in(folder, 0) and read(folder).records[0].attempt == 2)
    os.kill(command.pid, signal.SIGTERM)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "the same command goes on" in errors
    assert workers(folder) == []
    (terminated,) = read(folder).records
    assert terminated.attempt == 2
    assert terminated.earlier_attempts_energy_kwh == pytest.approx(used)

    command = start(study, folder)
    _, errors = command.communicate(timeout=240)
    assert command.returncode in (0, 3), errors
    data = read(folder)
    assert [record.state for record in data.records] == [TrialState.COMPLETE] * 2
    assert [record.attempt for record in data.records] == [3, 1]
    first = data.records[0]
    assert first.params == killed.params
    assert first.earlier_attempts_energy_kwh > used
    assert len(data.sessions) == 3
    assert not StudyPaths(folder).prepare_log.exists(), "prepared once, for all three"

    # Nothing is lost: phases make up their trial, and trials, gaps and preparation the study.
    for record in data.records:
        energy = record.energy_kwh
        assert energy.train + energy.setup + energy.eval == pytest.approx(energy.total, rel=1e-9)
        assert energy.train_cpu + energy.train_ram == pytest.approx(energy.train, rel=1e-9)
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)
    assert not list(folder.rglob("*.part"))
    report = json.loads((folder / "report" / "data" / "report.json").read_text())
    assert report


def test_a_killed_trial_is_a_failed_trial_and_the_study_goes_on(slow_study: dict, write_study, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = start(write_study(slow_study), folder)
    wait_for(lambda: training_in(folder, 0))
    ranks = [pid for pid in workers(folder) if psutil.Process(pid).name().startswith("rank ")]
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=240)
    killed, other = read(folder).records
    assert (killed.state, killed.stop_reason) == (TrialState.FAILED, None)
    assert "signal 9" in killed.failure.text
    assert killed.energy_kwh.total > 0
    assert other.state == TrialState.COMPLETE
    assert workers(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_operators_are_compiled(number: int, tiny_study: dict, write_study, tmp_path: Path) -> None:
    """Neither compilers, nor the lock that would make everyone wait for ever, nor half a prepared folder is left."""
    study, folder, extensions = write_study(tiny_study), tmp_path / "out", tmp_path / "extensions"
    lock = extensions / "deepspeed_shm_comm" / "lock"

    def compilers() -> list[int]:
        return [
            one.pid
            for one in psutil.process_iter(["cwd", "status"])
            if one.info["cwd"] == str(lock.parent) and one.info["status"] != psutil.STATUS_ZOMBIE
        ]

    command = start(study, folder, TORCH_EXTENSIONS_DIR=str(extensions))
    wait_for(lambda: lock.exists() and len(compilers()) > 1)  # ninja and what it runs
    assert list(folder.glob(".prepared.*"))
    os.kill(command.pid, number)
    _, errors = command.communicate(timeout=60)
    if number == signal.SIGINT:
        assert command.returncode == 130
        assert errors.endswith("carbonopt: interrupted before the first trial; the same command begins again.\n")
    wait_for(lambda: workers(folder) == [], 15 if number == signal.SIGKILL else 0.1)
    assert compilers() == []
    wait_for(lambda: not lock.exists() and not list(folder.glob(".prepared.*")), 5 if number == signal.SIGKILL else 0.1)
