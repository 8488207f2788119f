"""Processes that work for a study: heard, ended, and never left behind."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from carbonopt.core.errors import BadInput, StudyInterrupted
from carbonopt.core.events import Exited, Failed, PhaseChanged, Progress
from carbonopt.core.trial import Phase, StopReason
from carbonopt.engines.process import environment
from carbonopt.engines.process.environment import (
    Ranks,
    check_environment,
    free_port,
    work_environment,
)
from carbonopt.engines.process.extensions import cache_folder, locks_of, wait_for
from carbonopt.engines.process.launcher import ProcessLauncher
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.spec.launch_settings import LocalLaunch

SPEAKING = """
import json, os, socket, sys
connection = socket.socket(fileno=int(os.environ["CARBONOPT_CHANNEL_FD"]))
lines = connection.makefile("rb")
def say(event, **fields):
    connection.sendall(json.dumps({"event": event, **fields}).encode() + b"\\n")
"""


def start(script: str, tmp_path: Path, ranks: int = 1) -> WorkProcesses:
    argv = [
        sys.executable,
        "-c",
        SPEAKING + textwrap.dedent(script) if ranks == 1 else textwrap.dedent(script),
    ]
    return WorkProcesses(
        argv, [{"RANK": str(rank)} for rank in range(ranks)], dict(os.environ), tmp_path / "log.txt"
    )


def until_exit(work: WorkProcesses, limit_s: float = 20.0) -> list:
    events = []
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        event = work.receive(0.5)
        if event is not None:
            events.append(event)
        if isinstance(event, Exited):
            return events
        if isinstance(event, PhaseChanged):
            work.answer(stop=StopReason.CAP)
    raise AssertionError(f"no exit within {limit_s} s, only {events}")


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_what_a_trial_says_is_heard_and_answered(tmp_path: Path) -> None:
    work = start(
        """
        say("PhaseChanged", phase="train")
        answer = json.loads(lines.readline())
        say("Failed", kind="crash", text=answer["stop"])
        print("last words")
        sys.exit(3)
        """,
        tmp_path,
    )
    events = until_exit(work)
    work.end()
    assert events == [
        PhaseChanged(phase=Phase.TRAIN),
        Failed(kind="crash", text="cap"),
        Exited(code=3),
    ]
    assert work.log_tail() == "last words"
    again = start("time = 1 / 0", tmp_path)
    until_exit(again)
    again.end()
    assert "ZeroDivisionError" in again.log_tail() and "last words" not in again.log_tail()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, 137), (signal.SIGBUS, 135), (signal.SIGTERM, 143)]
)
def test_a_signal_shows_in_the_exit_code(number: int, code: int, tmp_path: Path) -> None:
    work = start(f"os.kill(os.getpid(), {int(number)})", tmp_path)
    assert until_exit(work) == [Exited(code=code)]
    work.end()


@pytest.mark.slow
def test_the_death_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(78)
        time.sleep(600)
    """
    work = start(script, tmp_path, ranks=3)
    began = time.monotonic()
    assert until_exit(work)[-1] == Exited(code=78)
    assert time.monotonic() - began < 15
    work.end()


def test_end_leaves_no_process(tmp_path: Path) -> None:
    work = start(
        """
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        say("Progress", step=child.pid, total_steps=os.getpid())
        time.sleep(600)
        """,
        tmp_path,
    )
    heard = work.receive(20)
    assert isinstance(heard, Progress)
    work.end()
    assert gone(heard.step)
    assert gone(heard.total_steps)


@pytest.mark.parametrize(
    "busy", ["time.sleep(600)", "sum(iter(lambda: 1, 0))"], ids=["asleep", "holding the lock"]
)
def test_the_study_killed_takes_the_trial_along(busy: str, tmp_path: Path) -> None:
    """SIGKILL of the study leaves neither ranks nor what they started."""
    script = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["PIDS"], "w") as file:
            file.write(f"{{os.getpid()}} {{child.pid}} {{os.getppid()}}\\n")
        {busy}
    """
    pids = tmp_path / "pids"
    parent = f"""
import os, sys, time
from pathlib import Path
from carbonopt.engines.process.processes import WorkProcesses
script = {SPEAKING + textwrap.dedent(script)!r}
log = Path({str(tmp_path / "log")!r})
WorkProcesses([sys.executable, "-c", script], [{{"PIDS": {str(pids)!r}}}], dict(os.environ), log)
time.sleep(600)
"""
    study = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 20
    while not (pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = [int(pid) for pid in pids.read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in processes)
    study.kill()
    study.wait()
    assert [pid for pid in processes if not gone(pid)] == []


def test_ranks_see_exactly_the_launchs_devices() -> None:
    user = {"CUDA_VISIBLE_DEVICES": "GPU-1234", "TORCH_CUDA_ARCH_LIST": "8.0;9.0a", "PATH": "/bin"}
    environment = work_environment(LocalLaunch(gpus=(2, 0)), ("GPU-c", "GPU-a"), user)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CARBONOPT_GPU_UUIDS"] == "GPU-c,GPU-a"
    assert environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0"
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin", (
        "its own ninja, whatever else is there"
    )
    on_cpu = work_environment(LocalLaunch(gpus=(), cpu_ranks=2), (), user)
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["DS_ACCELERATOR"]) == ("", "cpu")
    assert "ACCELERATE_USE_CPU" not in on_cpu, "with it accelerate sets DeepSpeed aside"


def test_what_launchers_tell_their_workers_is_not_for_ranks() -> None:
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
                "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
                "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")  # fmt: skip
    others = (
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_FSDP",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
    )
    kept = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "MY_RANK": "2",
        "AWS_ROLE_ARN": "a",
        "NCCL_DEBUG": "INFO",
        "PMIX": "x",
    }
    environment = work_environment(
        LocalLaunch(gpus=(0,)), (), dict.fromkeys(torchrun + others, "1") | kept
    )
    assert environment.keys() & {*torchrun, *others} == set()
    assert environment.items() >= kept.items()


def test_no_trial_goes_on_with_a_tracked_run_of_the_users_shell() -> None:
    one_run = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "MLFLOW_RUN_ID",
               "COMET_EXPERIMENT_KEY", "NEPTUNE_CUSTOM_RUN_ID")  # fmt: skip
    kept = {
        "WANDB_PROJECT": "p",
        "WANDB_MODE": "offline",
        "WANDB_RUN_GROUP": "g",
        "MLFLOW_TRACKING_URI": "file:x",
    }
    environment = work_environment(LocalLaunch(gpus=()), (), dict.fromkeys(one_run, "1") | kept)
    assert environment.keys() & set(one_run) == set()
    assert environment.items() >= kept.items()


@pytest.mark.parametrize("value", ["abc", "4,2", "0", "-1", "1e3", "1_0", "٤", "4 2", " "])
def test_a_number_of_threads_that_trials_would_die_of(value: str, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(
        BadInput,
        match=f"OMP_NUM_THREADS must be one whole number.*{value!r}.*unset OMP_NUM_THREADS",
    ):
        ProcessLauncher(LocalLaunch(gpus=()), (), print)


def test_a_number_of_threads_that_is_one() -> None:
    for given, threads in (("7", "7"), (" 3 ", " 3 ")):
        check_environment({"OMP_NUM_THREADS": given})
        assert (
            work_environment(LocalLaunch(gpus=()), (), {"OMP_NUM_THREADS": given})[
                "OMP_NUM_THREADS"
            ]
            == threads
        )
    check_environment({"OMP_NUM_THREADS": ""})
    assert (
        int(work_environment(LocalLaunch(gpus=()), (), {"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"])
        > 0
    )


def test_what_is_compiled_is_kept_where_it_can_be(tmp_path: Path, monkeypatch) -> None:
    name, launch = "TORCHINDUCTOR_CACHE_DIR", LocalLaunch(gpus=())
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert work_environment(launch, (), {})[name] == str(tmp_path / ".cache" / "torchinductor")
    assert work_environment(launch, (), {name: ""})[name] == str(
        tmp_path / ".cache" / "torchinductor"
    )
    assert (
        work_environment(launch, (), {"XDG_CACHE_HOME": str(tmp_path / "x")})[name]
        == f"{tmp_path}/x/torchinductor"
    )
    for relative in ("relative", ""):
        environment = work_environment(launch, (), {"XDG_CACHE_HOME": relative})
        assert environment[name] == str(tmp_path / ".cache" / "torchinductor")
        assert "XDG_CACHE_HOME" not in environment
        assert cache_folder({"XDG_CACHE_HOME": relative}) == tmp_path / ".cache"
    (tmp_path / "file").touch()
    for nowhere in ("/proc/nope", str(tmp_path / "file")):
        assert name not in work_environment(launch, (), {"XDG_CACHE_HOME": nowhere})
        monkeypatch.setenv("HOME", nowhere)
        assert name not in work_environment(launch, (), {})
        # Torch's own default can be made there, and is, as it is imported.
        check_environment({})
    mine = tmp_path / "mine"
    check_environment({name: str(mine)})
    assert work_environment(launch, (), {name: str(mine)})[name] == str(mine)
    for bad in ("/proc/nope/cache", str(tmp_path / "file"), str(tmp_path / "file" / "in it")):
        monkeypatch.setenv(name, bad)
        with pytest.raises(BadInput, match=f"{name} must be a folder .*{bad!r}.*unset {name}"):
            ProcessLauncher(launch, (), print)


def test_the_ranks_port_is_none_that_a_connection_is_given() -> None:
    first, last = (
        int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    )
    ports = {free_port() for _ in range(200)}
    assert not ports & set(range(first, last + 1))
    assert len(ports) > 190  # and those of two studies differ


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_a_user_without_name_and_home_gets_torchs_own_folder(tmp_path: Path) -> None:
    """As in a container that runs as a number."""
    script = "from carbonopt.spec.launch_settings import LocalLaunch\n"
    script += "from carbonopt.engines.process.environment import work_environment\n"
    script += (
        "import os\nos.setuid(54321)\nprint(work_environment(LocalLaunch(gpus=()),"
        " ()).get('TORCHINDUCTOR_CACHE_DIR'))"
    )
    script += (
        "\nfrom carbonopt.engines.process.extensions import"
        " extensions_folder\nprint(extensions_folder())"
    )
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["None", "~/.cache/torch_extensions"], done.stderr


CHOICE = """
import sys
{without}
from carbonopt.engines.process.processes import run_module
print(" ".join(run_module("a.module", "x")[1:]))
"""
WITHOUT_EDITABLE = (
    "sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one).lower()]"
)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "where", "path", "options"),
    [
        (True, "elsewhere", None, "-P -m"),
        (True, "checkout", None, "-P -m"),
        (False, "elsewhere", ROOT, "-P -m"),
        (False, "checkout", None, "-m"),
    ],
)
def test_our_modules_are_run_without_the_working_folder_unless_they_are_in_it(
    installed: bool, where: str, path: Path | None, options: str, tmp_path: Path
) -> None:
    script = CHOICE.format(without="" if installed else WITHOUT_EDITABLE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT if where == "checkout" else tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{options} a.module x\n", done.stderr


def test_threads_look_for_work_for_long_where_it_is_noticed_that_others_need_the_core(monkeypatch):
    launch = LocalLaunch(gpus=())
    assert work_environment(launch, (), {})["GOMP_SPINCOUNT"] == "30000", (
        "this kernel tells for how long threads wait"
    )
    for given in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}):
        passed = work_environment(launch, (), given)
        assert {
            name: passed[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in passed
        } == given
    monkeypatch.setattr(environment, "_kernel_tells_waits", lambda: False)
    assert work_environment(launch, (), {})["GOMP_SPINCOUNT"] == "1000"


def test_every_rank_knows_its_place() -> None:
    ranks = Ranks.alone(3).environments
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-fp", "--mount-proc", "true"], capture_output=True).returncode
    != 0,
    reason="needs the right to make a process namespace",
)
def test_the_first_process_of_a_container_can_end_a_trial(tmp_path: Path) -> None:
    """It is the parent of every orphan and reaps none, so that killed ranks stay zombies."""
    script = f"""
import os, sys, time
from pathlib import Path
from carbonopt.engines.process.processes import WorkProcesses
work = WorkProcesses([sys.executable, "-c", "import time; time.sleep(600)"], [{{}}] * 2, dict(os.environ),
                     Path({str(tmp_path / "log")!r}))
time.sleep(1)
assert os.getpid() == 1
work.end(patience_s=5)
"""
    command = ["unshare", "-fp", "--mount-proc", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# As torch and ninja do: the lock is held open, and the compiler has a process group of its own.
COMPILING = """
import os, subprocess, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
child = subprocess.Popen(["sleep", "600"], process_group=0)
print(f"{os.getpid()} {child.pid}", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end", "killed", "guard killed"])
def test_an_interrupted_compilation_leaves_neither_compilers_nor_its_lock(
    how: str, tmp_path: Path
) -> None:
    extensions, root = tmp_path / "extensions", tmp_path / "[root]"
    own, others = extensions / "ours" / "lock", extensions / "theirs" / "lock"
    scratch, kept = root / ".prepared.1.part", root / "prepared"
    for folder in (own.parent, others.parent, scratch, kept):
        folder.mkdir(parents=True)
    others.touch()
    log = tmp_path / "log"
    script = f"""
import os, sys, time
from pathlib import Path
from carbonopt.engines.process.processes import WorkProcesses
argv = [sys.executable, "-c", {COMPILING!r}, {str(own)!r}]
work = WorkProcesses(argv, [{{}}], dict(os.environ), Path({str(log)!r}), scratch=({str(root)!r}, ".prepared.*"))
sys.stdin.readline()
work.end()
"""
    study = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions)},
    )
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    rank, compiler = (int(pid) for pid in log.read_text().split())
    assert own.exists()
    if how == "killed":
        study.kill()
    elif how == "guard killed":
        os.kill(psutil.Process(rank).ppid(), signal.SIGKILL)
        assert gone(rank)
        study.communicate(b"\n")
    else:
        study.communicate(b"\n")
    study.wait()
    assert gone(rank)
    assert gone(compiler)
    deadline = time.monotonic() + 10
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not scratch.exists()
    assert own.exists() == (how == "guard killed")  # whose lock it was can't be known then
    assert others.exists()
    assert kept.exists()


def test_a_study_waits_for_who_compiles_and_for_nobody_else(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    operators = ["deepspeed_shm_comm"]
    wait_for(operators, lambda: pytest.fail("nothing is locked"))

    def compiling() -> subprocess.Popen:
        lock.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILING, lock], stdout=subprocess.PIPE, process_group=0
        )
        process.stdout.readline()
        os.utime(lock, (0, 0))
        return process

    process = compiling()
    (operator_lock,) = locks_of(operators)
    assert (
        operator_lock.operator,
        operator_lock.path,
        operator_lock.holder,
        operator_lock.is_dead,
    ) == (
        operators[0],
        lock,
        f"process {process.pid}",
        False,
    )
    assert locks_of(["cpu_adam"]) == []
    with pytest.raises(StudyInterrupted):
        wait_for(operators, lambda: True)

    def killed() -> bool:
        for victim in (*psutil.Process(process.pid).children(), process):
            victim.kill()
        process.wait()
        return False

    wait_for(operators, killed)
    assert not lock.exists(), "what a killed build has left is cleared away"

    process = compiling()

    def finished() -> bool:
        lock.unlink()
        return killed()

    wait_for(operators, finished)
