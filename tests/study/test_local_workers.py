"""Trials side by side on one machine: one command, several workers, and nobody left when it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lasting_trials import lasting
from storage.test_workers import closes
from study.test_resume import read, start, wait_for, workers

from carbonopt.analysis.footprint import footprint
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.storage.paths import StudyPaths
from carbonopt.study_file.reader import parse_study

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("gpus", "each", "slots"),
    [([0], None, [(0,)]), ([0, 1], None, [(0, 1)]), ([3, 1, 2, 0], 1, [(3,), (1,), (2,), (0,)]),
     ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]), ([5, 6], 2, [(5, 6)])],
)  # fmt: skip
def test_each_gpu_has_one_slot(
    gpus: list[int], each: int | None, slots: list[tuple[int, ...]]
) -> None:
    launch = LocalLaunch(gpus=tuple(gpus), gpus_per_trial=each)
    assert [launch.of_slot(slot).gpus for slot in range(launch.slots)] == slots
    assert (
        {launch.of_slot(slot).world_size for slot in range(launch.slots)}
        == {launch.world_size}
        == {len(slots[0])}
    )


@pytest.mark.parametrize(
    ("launch", "refusal"),
    [
        (
            {"gpus": [0, 1, 2], "gpus_per_trial": 2},
            "gpus_per_trial must divide the number of gpus, but got 2 and 3",
        ),
        ({"gpus": [], "gpus_per_trial": 1}, "gpus_per_trial needs GPUs, but launch.gpus is []"),
        (
            {"gpus": [0, 1], "workers": 2},
            "workers goes with gpus: [] only; with GPUs give gpus_per_trial",
        ),
        ({"gpus": [0], "gpus_per_trial": 0}, "launch.gpus_per_trial"),
    ],
)
def test_slots_that_cannot_be_are_refused(launch: dict, refusal: str, tiny_study: dict) -> None:
    with pytest.raises(BadInput, match=refusal.replace("[", r"\[").replace("]", r"\]")):
        parse_study({**tiny_study, "launch": {"kind": "local", **launch}}, "here")


@pytest.fixture
def wide_study(study_of_seconds: dict) -> dict:
    """Two trials at once."""
    study_of_seconds["budget"] = {"trials": 3}
    study_of_seconds["launch"] = {"kind": "local", "gpus": [], "workers": 2}
    return study_of_seconds


def members(command: subprocess.Popen) -> list[psutil.Process]:
    """The other workers: forks of the command, with its own command line."""
    own = psutil.Process(command.pid)
    return [child for child in own.children() if child.cmdline() == own.cmdline()]


def running(folder: Path) -> list[int]:
    if not StudyPaths(folder).storage.exists() or not StudyPaths(folder).trials.exists():
        return []
    records = read(folder).records
    return [
        run.trial
        for run in records
        if run.state is TrialState.RUNNING and run.energy_kwh is not None
    ]


def check_complete(folder: Path, trials: int) -> None:
    data = read(folder)
    assert [record.state for record in data.records] == [TrialState.COMPLETE] * trials
    assert len({record.params for record in data.records}) == trials
    assert {record.worker for record in data.records} <= {
        session.worker for session in data.sessions
    }
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)


def begun(study: Path, folder: Path) -> subprocess.Popen:
    """The command, with two trials under way."""
    command = start(study, folder)
    wait_for(lambda: len(running(folder)) == 2 and len(members(command)) == 1)
    wait_for(lambda: closes(folder))
    return command


@pytest.mark.slow
def test_a_crew_that_is_killed_or_terminated_leaves_nobody_and_loses_nothing(
    wide_study: dict, write_study, tmp_path: Path
) -> None:
    """SIGKILL of the command, and SIGTERM of its second try."""
    wide_study = lasting(wide_study, tmp_path, brief="/output-3$|/0002/")
    study, folder = write_study(wide_study), tmp_path / "out"
    spent_kwh = 0.0
    for attempt, number in enumerate((signal.SIGKILL, signal.SIGTERM), 1):
        command = begun(study, folder)
        (member,) = members(command)
        cores = [psutil.Process(pid).cpu_affinity() for pid in (command.pid, member.pid)]
        assert not set(cores[0]) & set(cores[1])
        assert sorted(cores[0] + cores[1]) == sorted(os.sched_getaffinity(0))
        os.kill(command.pid, number)
        command.communicate(timeout=60)
        assert command.returncode == (130 if number is signal.SIGTERM else -number)
        wait_for(lambda member=member: workers(folder) == [] and not member.is_running(), 10)
        interrupted = read(folder).records
        assert [(run.stop_reason, run.attempt) for run in interrupted] == [
            (StopReason.INTERRUPTED, attempt)
        ] * 2
        earlier = [run.earlier_attempts_energy_kwh for run in interrupted]
        assert sum(earlier) == pytest.approx(spent_kwh)
        spent_kwh += sum(run.energy_kwh.total for run in interrupted)

    command = start(study, folder)
    _, errors = command.communicate(timeout=240)
    assert command.returncode == 0, errors
    check_complete(folder, 3)
    data = read(folder)
    assert [record.attempt for record in data.records] == [3, 3, 1]
    assert sum(record.earlier_attempts_energy_kwh for record in data.records) == pytest.approx(
        spent_kwh
    )
    assert len(data.sessions) == 6


@pytest.mark.slow
def test_a_crew_whose_member_dies_goes_on_and_loses_nothing(
    wide_study: dict, write_study, tmp_path: Path
) -> None:
    """Real training, each worker's forked from a process of its own."""
    study, folder = write_study(wide_study), tmp_path / "out"
    command = begun(study, folder)
    (member,) = members(command)
    member.kill()
    _, errors = command.communicate(timeout=240)
    assert command.returncode in (0, 3), errors
    assert "local worker 1 ended with code -9; the others go on" in errors
    assert [f"trial   {number}  complete" in errors for number in range(3)] == [True] * 3, errors
    check_complete(folder, 3)
    data = read(folder)
    assert sorted(record.attempt for record in data.records) == [1, 1, 2]
    assert sum(record.earlier_attempts_energy_kwh for record in data.records) > 0
    assert len(data.sessions) == 2
    assert workers(folder) == []


@pytest.mark.slow
def test_slots_need_cores(wide_study: dict, write_study, tmp_path: Path) -> None:
    wide_study["launch"]["workers"] = 64
    command = start(write_study(wide_study), tmp_path / "out")
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 2
    cores = len(os.sched_getaffinity(0))
    if cores < 64:
        assert (
            f"each of 64 trials side by side needs a core, but this command may use {cores}"
            in errors
        )


def test_a_fork_whose_output_is_closed_never_goes_on_with_the_commands_work() -> None:
    program = """
import sys, time
from carbonopt.study.local_workers import forked_workers
with forked_workers(2, lambda worker: sys.stdout.close()) as others:
    others.begin()
    while others.is_working:
        time.sleep(0.01)
        for ended in others.ended():
            pass
print("the command")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the command\n", "")
