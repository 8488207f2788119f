"""Studies in jobs of a real Slurm: whatever happens to a job, the study reaches its total, and
nothing is lost.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import within
from lasting_trials import lasting
from slurm.conftest import NODES, Cluster
from small_studies import study as small_study
from small_studies import trial
from sqlalchemy.engine import make_url
from study.test_resume import read, wait_for, workers

from carbonopt.analysis.footprint import footprint
from carbonopt.cli.slurm_submission import _check
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.trial import Durations, TrialState
from carbonopt.core.units import kwh_from_joules
from carbonopt.energy.codecarbon import power_models
from carbonopt.engines.slurm import Jobs
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect
from carbonopt.study.hopeless_studies import check_job_is_long_enough
from carbonopt.study_file.reader import parse_study


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 91),
        ("08:00:00", 480),
        ("1-0", 1440),
        ("2-12:30", 3630),
        ("1-00:00:01", 1441),
        (5, 5),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text: str | int, minutes: int) -> None:
    assert SlurmLaunch(kind="slurm", time=text).time == minutes


@pytest.mark.parametrize(
    ("launch", "refusal"),
    [
        (
            {"time": "an hour"},
            "launch.time: must be a time as sbatch takes it, such as 08:00:00, but got 'an hour'",
        ),
        ({"time": "9" * 400}, "launch.time: must be a time as sbatch takes it"),
        ({"time": 0}, "launch.time"),
        (
            {"memory_gib": 1e-4},
            "launch.memory_gib",
        ),  # of which sbatch would make 0: all that a node has
        (
            {"nodes": 2, "gpus_per_node": 4, "gpus_per_trial": 2},
            (
                "gpus_per_trial is for trials within one node; give nodes_per_trial: 1 beside it,"
                " or leave it out"
            ),
        ),
        ({"nodes": 3, "nodes_per_trial": 2}, "nodes_per_trial must divide nodes, but got 2 and 3"),
        (
            {"gpus_per_node": 3, "gpus_per_trial": 2},
            "gpus_per_trial must divide gpus_per_node, but got 2 and 3",
        ),
        (
            {"gpus_per_node": 0, "gpus_per_trial": 1},
            "gpus_per_trial needs GPUs, but gpus_per_node is 0",
        ),
        ({"gpus": [0]}, "launch.gpus"),
    ],
)
def test_launches_that_cannot_be_are_refused(launch: dict, refusal: str, tiny_study: dict) -> None:
    with pytest.raises(BadInput, match=re.escape(refusal)):
        parse_study({**tiny_study, "launch": {"kind": "slurm", **launch}}, "here")


def test_the_same_study_may_be_asked_for_otherwise(tiny_study: dict) -> None:
    """In another partition, for longer; not on other GPUs."""
    identities = [
        parse_study({**tiny_study, "launch": {"kind": "slurm", **launch}}, "here").identity()
        for launch in ({}, {"partition": "big", "time": 600, "workers": 3}, {"gpus_per_node": 2})
    ]
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(
    ("seconds", "attempt", "others", "ends"),
    [
        (800.0, 1, {}, False),
        (820.0, 1, {}, True),
        (460.0, 1, {}, False),
        (460.0, 2, {}, True),
        (440.0, 2, {}, False),
        (460.0, 2, {"worker": "job-2"}, False),  # another trial had the job before it
        (460.0, 2, {"worker": "job-1"}, True),
    ],
)
def test_a_trial_that_no_job_is_long_enough_for_ends_the_study(
    seconds: float, attempt: int, others: dict, ends: bool, tiny_study: dict
) -> None:
    """At once where it had nearly a whole job, and else when it had most of a second one."""
    config = parse_study(
        {**tiny_study, "launch": {"kind": "slurm", "gpus_per_node": 0, "time": 20}}, "here"
    )
    assert (config.launch.warned_s, config.launch.usable_s) == (300, 900)
    took = Durations(train=1, setup=1, eval=1, total=seconds)
    own = {"worker": "job-2", "started_at": "2026-01-01T02:00:00+00:00", "attempt": attempt}
    cut = trial(3, duration_s=took, **own)
    before = trial(2, started_at="2026-01-01T01:00:00+00:00", **others)
    data = small_study(before, cut)
    with pytest.raises(CarbonoptError, match=r"trial 3 .* 20 min") if ends else nullcontext():
        check_job_is_long_enough(cut, None, data, config)


def test_a_folder_that_would_end_a_line_of_the_jobs_script_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    paths = StudyPaths(tmp_path / "out\necho here; echo")
    with pytest.raises(
        BadInput, match=r"must have printable characters alone, but is .*out\\necho here"
    ):
        _check(SlurmLaunch(kind="slurm"), paths, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"jobs": 5}', "{}"])
def test_a_damaged_list_of_jobs_is_said(text: str, tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    paths.slurm_jobs.write_text(text)
    with pytest.raises(BadInput, match=r"slurm.json (is damaged|must list the study's jobs)"):
        Jobs(paths).alive()
    paths.slurm.mkdir()
    (paths.slurm / "exit-code-0.json").write_text("{x")
    with pytest.raises(BadInput, match=r"exit-code-0.json is damaged"):
        Jobs(paths).exit_code()


@pytest.fixture
def job_study(study_of_seconds: dict) -> dict:
    launch = {"kind": "slurm", "gpus_per_node": 0, "time": 10, "partition": "usual"}
    return study_of_seconds | {"budget": {"trials": 4}, "launch": launch}


def command(cluster: Cluster, study: Path, folder: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=cluster.environment,
    )


def trains(folder: Path, number: int, attempt: int = 1) -> bool:
    """Whether this attempt of a trial has spent energy on training, and said so."""
    if not StudyPaths(folder).trial(number).exists():
        return False
    records = {record.trial: record for record in read(folder).records}
    run = records.get(number)
    return (
        run is not None
        and run.attempt == attempt
        and run.state is TrialState.RUNNING
        and bool(run.energy_kwh)
    )


def job_of(folder: Path) -> str:
    return json.loads(StudyPaths(folder).slurm_jobs.read_text())["jobs"][0]


@pytest.mark.slow
def test_a_study_survives_what_happens_to_its_jobs(
    cluster: Cluster, job_study: dict, write_study, tmp_path: Path
) -> None:
    """Requeued, preempted, warned as before a time limit, its node gone, and cancelled, each in
    mid-trial.
    """
    job_study = lasting(job_study, tmp_path, brief="/0000/output-3$|/0001/output-4$")
    job_study["budget"] = {"trials": 2}
    study, folder = write_study(job_study), tmp_path / "out"
    assert command(cluster, study, folder, "--detach").wait(60) == 0
    job = job_of(folder)
    wait_for(lambda: trains(folder, 0), 120)
    following = command(cluster, study, folder)
    cluster.asked("scontrol", "requeue", job)
    wait_for(lambda: trains(folder, 0, attempt=2), 120)
    urgent = [
        "--partition",
        "urgent",
        "--nodes",
        str(NODES),
        "--exclusive",
        "--parsable",
        "--wrap",
        "sleep 1",
    ]
    cluster.asked("sbatch", *urgent, "--output", "/dev/null")

    wait_for(lambda: trains(folder, 1), 120)
    cluster.asked("scancel", "--signal", "USR2", job)  # as Slurm does before a time limit
    wait_for(lambda: trains(folder, 1, attempt=2), 120)
    node = int(cluster.asked("squeue", "-h", "-j", job, "-o", "%N").removeprefix("n"))
    cluster.kill_node(node)
    wait_for(lambda: trains(folder, 1, attempt=3), 120)
    cluster.start_node(node)
    spent_kwh = sum(record.spent_kwh for record in read(folder).records)
    cluster.asked("scancel", job)
    said, _ = following.communicate(timeout=60)
    assert following.returncode == 130, "it had the time to say that it was interrupted"
    assert "run the same command again" in said
    assert f"carbonopt: job {job} was interrupted" in said.splitlines()[-1]
    wait_for(lambda: workers(folder) == [], 10)

    again = within("run", study, "--out", folder, **cluster.environment)
    assert again.returncode in (0, 3), again.stderr
    data = read(folder)
    assert [(record.state, record.attempt) for record in data.records] == [
        (TrialState.COMPLETE, 3),
        (TrialState.COMPLETE, 4),
    ]
    assert all(record.earlier_attempts_energy_kwh > 0 for record in data.records)
    assert sum(record.spent_kwh for record in data.records) > spent_kwh
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)
    assert data.ended is not None

    job = job_of(folder)
    result = within("run", study, "--out", folder, **cluster.environment)
    assert result.returncode == again.returncode and "Report: " in result.stdout
    assert job_of(folder) == job, "a finished study needs no job"
    assert workers(folder) == []


@pytest.mark.slow
def test_a_trial_over_two_nodes_survives_a_requeue_and_is_as_on_one(
    cluster: Cluster, job_study: dict, write_study, tmp_path: Path
) -> None:
    job_study["search"]["space"] = {"global_batch_size": 16, "learning_rate": 2e-3, "epochs": 1}
    job_study["budget"] = {"trials": 1}
    job_study["launch"] |= {"nodes": 2, "cpu_ranks": 2, "exclusive": True}
    study, folder = write_study(job_study), tmp_path / "out"
    for number in range(1, NODES + 1):
        cluster.counter(number).write_text("7000 J\n")
    following = command(cluster, study, folder)
    wait_for(lambda: trains(folder, 0), 120)
    # What Slurm reads of a job's own nodes is a third account: of each 3 kJ, whatever was before.
    for number in range(1, NODES + 1):
        cluster.counter(number).write_text("10000 J\n")
    wait_for(lambda: bool(read(folder).sessions[0].slurm_kwh), 60)
    cluster.asked("scontrol", "requeue", job_of(folder))
    said, _ = following.communicate(timeout=240)
    assert following.returncode in (0, 3), said
    data = read(folder)
    record = data.records[0]
    assert (record.state, record.attempt) == (TrialState.COMPLETE, 2)
    assert record.earlier_attempts_energy_kwh > 0
    assert [node.name for node in record.nodes] == ["n1", "n2"]
    assert sum(node.readings.total for node in record.nodes) == pytest.approx(
        record.energy_kwh.total, rel=1e-12
    )
    assert footprint(data).closure == pytest.approx(1.0, abs=1e-6)
    assert [session.slurm_kwh for session in data.sessions] == [
        pytest.approx(kwh_from_joules(6000.0)),
        None,
    ]
    assert workers(folder) == []

    job_study["launch"] = {"kind": "local", "gpus": [], "cpu_ranks": 4}
    alone = within(
        "run",
        write_study({**job_study, "name": "alone"}, "alone.yaml"),
        "--out",
        tmp_path / "alone",
    )
    assert alone.returncode in (0, 3), alone.stderr
    assert read(tmp_path / "alone").records[0].value == pytest.approx(record.value, rel=1e-3)


def test_trials_share_a_jobs_nodes_as_asked() -> None:
    asked = {"nodes": 4, "gpus_per_node": 8}
    shares = [
        {},
        {"nodes_per_trial": 2},
        {"nodes_per_trial": 1},
        {"nodes_per_trial": 1, "gpus_per_trial": 2},
    ]
    launches = [SlurmLaunch(kind="slurm", **asked, **share) for share in shares]
    assert [(launch.world_size, launch.slots) for launch in launches] == [
        (32, 1),
        (16, 2),
        (8, 4),
        (2, 16),
    ]


@pytest.mark.slow
def test_the_doctor_says_what_a_job_has(cluster: Cluster) -> None:
    look = "from carbonopt.energy.slurm_energy import step_energy; print(step_energy())"
    assert cluster.asked("srun", "--ntasks", "1", sys.executable, "-c", look) == "None", (
        "others may share its node"
    )
    look = (
        "from carbonopt.doctor.slurm_check import slurm; print(slurm(2).status, slurm(2).as_text())"
    )
    found = cluster.asked("srun", "--ntasks", "1", sys.executable, "-c", look)
    cores = len(os.sched_getaffinity(0))
    has = rf"job \d+ on n\d: 2 GPUs, \d+ of {cores} cores"
    assert re.fullmatch(
        rf"warning {has}, bound to none of them: .* → carbon: \{{objective: gpu\}}", found
    )
    bound = cluster.asked(
        "srun", "--ntasks", "1", "taskset", "--cpu-list", "0", sys.executable, "-c", look
    )
    assert re.fullmatch(rf"ok {has}; of the node's CPU and RAM energy their share counts", bound)


@pytest.mark.slow
def test_a_command_in_an_allocation_uses_its_nodes_side_by_side(
    cluster: Cluster, job_study: dict, write_study, tmp_path: Path
) -> None:
    job_study["launch"] |= {"nodes": 2, "nodes_per_trial": 1}
    run = [
        sys.executable,
        "-m",
        "carbonopt",
        "run",
        str(write_study(job_study)),
        "--out",
        str(tmp_path / "out"),
    ]
    wrong = subprocess.run(
        ["salloc", "--nodes", "1", *run], env=cluster.environment, capture_output=True, text=True
    )
    assert "a job of the study must have 2 nodes (launch.nodes), but this one has 1" in wrong.stderr
    done = subprocess.run(
        ["salloc", "--nodes", "2", *run], env=cluster.environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 3), done.stderr
    data = read(tmp_path / "out")
    assert [record.state for record in data.records] == [TrialState.COMPLETE] * 4
    assert {node.name for record in data.records for node in record.nodes} == {"n1", "n2"}
    assert all(len(record.nodes) == 1 for record in data.records)
    assert footprint(data).closure == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_several_jobs_share_a_study(
    cluster: Cluster, postgresql_url: str, job_study: dict, write_study, tmp_path: Path
) -> None:
    job_study["launch"]["workers"] = 2
    study, folder = write_study(job_study), tmp_path / "out"
    run = ("run", study, "--out", folder)
    alone = within(*run, **cluster.environment)
    assert "several jobs need a storage that all of them reach" in alone.stderr
    with_password = within(*run, "--storage", postgresql_url, **cluster.environment)
    assert "give it by ~/.pgpass or PGPASSWORD" in with_password.stderr
    password = make_url(postgresql_url).password
    without = postgresql_url.replace(f":{password}@", "@")
    environment = {**cluster.environment, "PGPASSWORD": password}
    assert within(*run, "--storage", without, "--detach", **environment).returncode == 0
    leader, worker = json.loads(StudyPaths(folder).slurm_jobs.read_text())["jobs"]
    wait_for(lambda: cluster.state(leader) == cluster.state(worker) == "RUNNING")
    cluster.asked("scancel", leader)  # while it prepares; the worker waits for a leader
    wait_for(lambda: cluster.state(leader) == "CANCELLED")
    following = within(*run, "--storage", without, **environment)
    assert following.returncode in (0, 3), following.stderr
    jobs = json.loads(StudyPaths(folder).slurm_jobs.read_text())["jobs"]
    assert jobs[0] != leader and jobs[1] == worker, "the leader alone was replaced"
    assert (StudyPaths(folder).report / "index.html").exists()
    data = StudyStorage.of_folder(connect(postgresql_url), StudyPaths(folder)).read()
    assert [record.state for record in data.records] == [TrialState.COMPLETE] * 4
    assert len({record.params for record in data.records}) == 4
    assert len(data.sessions) == 2
    assert data.provenance.models == power_models(), "of the machine, not of a job's part"


@pytest.mark.slow
def test_a_follower_leaves_its_job_running(
    cluster: Cluster, job_study: dict, write_study, tmp_path: Path
) -> None:
    study, folder = write_study(job_study), tmp_path / "out"
    following = command(cluster, study, folder)
    wait_for(
        lambda: (
            StudyPaths(folder).slurm_jobs.exists() and cluster.state(job_of(folder)) == "RUNNING"
        )
    )
    cluster.stop_controller()
    printed = b""

    def says_so() -> bool:
        nonlocal printed
        with suppress(BlockingIOError):
            printed += os.read(following.stdout.fileno(), 1 << 16)
        return b"Slurm does not answer" in printed

    os.set_blocking(following.stdout.fileno(), False)
    wait_for(says_so)
    assert following.poll() is None, "it asks again"
    cluster.start_controller()
    os.set_blocking(following.stdout.fileno(), True)
    os.kill(following.pid, signal.SIGINT)
    said, _ = following.communicate(timeout=60)
    assert following.returncode == 130
    job = job_of(folder)
    assert f"job {job} " in said and "the same command follows it" in said
    assert cluster.state(job) == "RUNNING"
    cluster.asked("scancel", job)
    wait_for(lambda: cluster.state(job) == "CANCELLED")


@pytest.mark.slow
def test_a_job_that_waits_for_its_hours_and_is_cancelled_has_not_succeeded(
    cluster: Cluster, job_study: dict, write_study, tmp_path: Path
) -> None:
    """An earlier call's exit code says nothing of it."""
    opens = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(hours=1)
    job_study["schedule"] = {
        "finish_by": "+20h",
        "hours": [f"{opens:%H:%M}-{opens + timedelta(hours=3):%H:%M}"],
        "time_zone": "UTC",
    }
    study, folder = write_study(job_study), tmp_path / "out"
    paths = StudyPaths(folder)
    paths.slurm.mkdir(parents=True)
    (paths.slurm / "exit-code-0.json").write_text("0")
    following = command(cluster, study, folder)
    wait_for(lambda: paths.slurm_jobs.exists())
    job = job_of(folder)
    wait_for(lambda: cluster.asked("squeue", "-h", "-j", job, "-o", "%r") == "BeginTime")
    begins = datetime.fromisoformat(cluster.asked("squeue", "-h", "-j", job, "-o", "%S"))
    assert abs(begins.astimezone(UTC) - opens) < timedelta(seconds=30)
    cluster.asked("scancel", job)
    said, _ = following.communicate(timeout=60)
    assert following.returncode == 1, said
    assert job in said and not paths.storage.exists()


def test_without_slurm_a_study_of_jobs_is_refused(
    job_study: dict, write_study, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "carbonopt",
            "run",
            str(write_study(job_study)),
            "--out",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": "/nowhere"},
    )
    assert done.returncode == 2
    assert (
        "launch.kind: slurm needs Slurm's sbatch on PATH; run it on a login node, or in a job."
        in done.stderr
    )
    assert not (tmp_path / "out").exists()
