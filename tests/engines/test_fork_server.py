"""Trials forked from a process that has imported everything: as fresh, as well watched, with the
same digits.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from commands import within
from engines.test_local import gone, until_exit

from carbonopt.core.errors import CarbonoptError
from carbonopt.core.events import Exited, Progress
from carbonopt.engines.process.forking import CannotFork, ForkedWork, ForkServer
from carbonopt.engines.process.launcher import ProcessLauncher
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.trial_spec import TrialSpec

# What ranks are forked from here: quick to import, and it speaks as a trial does.
MODULE = """
import json, os, socket, sys, time

imported_by = os.getpid()

def unfit():
    return os.environ.get("UNFIT")

def say(event, **fields):
    connection = socket.socket(fileno=int(os.environ["CARBONOPT_CHANNEL_FD"]))
    connection.sendall(json.dumps({"event": event, **fields}).encode() + b"\\n")
    connection.detach()

def run():
    os.read(int(os.environ["CARBONOPT_GATE_FD"]), 1)
    return eval(os.pread(int(os.environ["CARBONOPT_SPEC_FD"]), 10000, 0).decode()) or 0
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "forked_here.py").write_text(textwrap.dedent(MODULE))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    }


@pytest.fixture
def fork_server(environment: dict[str, str], tmp_path: Path):
    made = ForkServer("forked_here", environment, tmp_path / "fork-server-log.txt")
    assert made.ready(30)
    yield made
    made.close()


def start(
    fork_server: ForkServer, expression: str, tmp_path: Path, ranks: int = 1
) -> WorkProcesses:
    trial = prelaunched(fork_server, tmp_path, ranks)
    trial.begin(expression, tmp_path / "trial" / "log.txt")
    return trial


def prelaunched(fork_server: ForkServer, tmp_path: Path, ranks: int = 1) -> ForkedWork:
    environments = [{"RANK": str(rank)} for rank in range(ranks)]
    return ForkedWork(fork_server, environments, tmp_path / "waiting.txt")


def test_each_trial_is_a_process_of_its_own_that_imports_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    seen = []
    for _ in range(3):
        work = start(
            fork_server,
            "say('Progress', step=os.getpid(), total_steps=imported_by) or print('said')",
            tmp_path,
        )
        heard, ended = until_exit(work)
        work.end()
        assert isinstance(heard, Progress)
        assert ended == Exited(code=0)
        seen.append(heard)
    assert len({progress.step for progress in seen}) == 3
    (parent,) = {progress.total_steps for progress in seen}
    assert psutil.Process(parent).is_running()
    assert (tmp_path / "trial" / "log.txt").read_text() == "said\n"
    assert not (tmp_path / "waiting.txt").exists()


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("3", 3),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 7)", 135),
        ("1 / 0", 1),
        ("sys.exit(5)", 1),
    ],
)
def test_how_a_forked_trial_ended_is_known(
    expression: str, code: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    work = start(fork_server, expression, tmp_path)
    assert until_exit(work) == [Exited(code=code)]
    work.end()
    assert ("ZeroDivisionError" in work.log_tail()) == (expression == "1 / 0")
    again = start(fork_server, "4", tmp_path)
    assert until_exit(again) == [Exited(code=4)]
    again.end()


@pytest.mark.slow
def test_the_death_of_one_forked_rank_ends_the_others(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    work = start(
        fork_server, "78 if os.environ['RANK'] == '1' else time.sleep(600)", tmp_path, ranks=3
    )
    began = time.monotonic()
    assert until_exit(work)[-1] == Exited(code=78)
    assert time.monotonic() - began < 15
    work.end()


def test_end_leaves_no_forked_process(fork_server: ForkServer, tmp_path: Path) -> None:
    expression = (
        "say('Progress', step=__import__('subprocess').Popen(['sleep', '600']).pid,"
        " total_steps=os.getpid())"
    )
    work = start(fork_server, f"{expression} or time.sleep(600)", tmp_path)
    heard = work.receive(20)
    assert isinstance(heard, Progress)
    guard = psutil.Process(heard.total_steps).parent().pid
    work.end()
    assert [pid for pid in (heard.step, heard.total_steps, guard) if not gone(pid)] == []


def test_the_study_killed_takes_fork_server_and_trial_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
from carbonopt.engines.process.forking import ForkServer, ForkedWork
fork_server = ForkServer("forked_here", dict(os.environ), Path({str(tmp_path / "t")!r}))
while not fork_server.ready(1):
    pass
logs = (Path({str(tmp_path)!r}) / name for name in "ab")
first, second = (ForkedWork(fork_server, [{{}}], log) for log in logs)
first.begin("say('Progress', step=os.getpid(), total_steps=imported_by) or time.sleep(600)",
            Path({str(tmp_path / "log")!r}))
heard = first.receive(20)
print(heard.step, heard.total_steps, second._guard.pid, flush=True)
time.sleep(600)
"""
    study = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in study.stdout.readline().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    study.kill()
    study.wait()
    assert [pid for pid in pids if not gone(pid)] == []


def test_a_trial_outlives_its_fork_server(fork_server: ForkServer, tmp_path: Path) -> None:
    """The fork server can be what the kernel kills for want of memory; the trial that runs goes on."""
    work = start(
        fork_server,
        "say('Progress', step=imported_by, total_steps=1) or time.sleep(1) or say('Progress',"
        " step=2, total_steps=2)",
        tmp_path,
    )
    heard = work.receive(20)
    assert isinstance(heard, Progress)
    os.kill(heard.step, signal.SIGKILL)
    assert until_exit(work) == [Progress(step=2, total_steps=2), Exited(code=0)]
    work.end()
    with pytest.raises(CannotFork, match="ended with code 137"):
        start(fork_server, "0", tmp_path)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_fork_server_that_dies_over_a_fork_is_noticed_at_once_and_leaves_no_descriptor(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """As it does where there is no process left to be had."""
    no_more = (
        "import os\n\ndef no_fork():\n    raise BlockingIOError(11, 'no process left')\n\nos.fork ="
        " no_fork\n"
    )
    module = tmp_path / "forked_here.py"
    module.write_text(no_more + module.read_text())
    log = tmp_path / "fork-server-log.txt"
    log.write_text("of an earlier call\n")
    dying = ForkServer("forked_here", environment, log)
    try:
        assert dying.ready(30)
        for _ in range(2):  # it dies of the first; the second can't even be sent
            before = open_descriptors()
            began = time.monotonic()
            with pytest.raises(
                CannotFork,
                match=r"ended with code 1: BlockingIOError: .*no process left \(log: .*\)",
            ):
                prelaunched(dying, tmp_path)
            assert time.monotonic() - began < 20
            assert open_descriptors() == before
    finally:
        dying.close()


def test_a_fork_server_that_was_killed_has_its_own_last_words(
    environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "fork-server-log.txt"
    log.write_text("of an earlier call\n")
    (tmp_path / "forked_here.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    killed = ForkServer("forked_here", environment, log)
    try:
        with pytest.raises(CannotFork, match="ended with code 137: it said nothing"):
            killed.ready(30)
    finally:
        killed.close()


def ranks_of(trial: ForkedWork, count: int) -> list[int]:
    deadline = time.monotonic() + 10
    while len(ranks := psutil.Process(trial._guard.pid).children()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [rank.pid for rank in ranks]


def test_one_that_waits_does_nothing_until_it_is_told_and_can_be_dropped(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    trial = prelaunched(fork_server, tmp_path, ranks=2)
    guard = trial._guard.pid
    processes = [guard, *ranks_of(trial, 2)]
    time.sleep(0.5)
    assert not trial.has_died
    assert sorted(psutil.Process(pid).name() for pid in processes) == ["guard", "rank 0", "rank 1"]
    trial.end()
    assert [pid for pid in processes if not gone(pid)] == []
    assert not (tmp_path / "waiting.txt").exists()


def test_one_that_died_while_it_waited_is_noticed(fork_server: ForkServer, tmp_path: Path) -> None:
    trial = prelaunched(fork_server, tmp_path)
    (rank,) = ranks_of(trial, 1)
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not trial.has_died:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trial.end()


def launcher_of(fork_server: ForkServer, tmp_path: Path, gpus: list[int]) -> ProcessLauncher:
    launcher = ProcessLauncher(
        LocalLaunch(kind="local", gpus=gpus), ["GPU-a"] * len(gpus), pytest.fail
    )
    launcher._fork_server = fork_server
    launcher._prelaunch_logs = (tmp_path / f"waiting-{number}.txt" for number in itertools.count())
    return launcher


def test_one_trial_waits_for_the_next_and_is_replaced_if_it_dies(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    launcher = launcher_of(fork_server, tmp_path, [0])
    params = {
        "global_batch_size": 1,
        "micro_batch_size_per_gpu": 1,
        "learning_rate": 1e-3,
        "epochs": 1,
    }
    spec = TrialSpec(
        number=0,
        attempt=1,
        seed=0,
        params=params,
        workload={},
        prepared_dir="",
        trial_dir=str(tmp_path),
    )
    launcher.prepare_next()
    waits = launcher._next
    launcher.prepare_next()
    assert waits is not None and launcher._next is waits, "one is enough"
    work = launcher.start(spec, tmp_path / "log.txt")
    assert work is waits and launcher._next is None, "none beside a trial that is still set up"
    work.end()
    launcher.prepare_next()
    dead = launcher._next
    assert dead is not None
    (rank,) = ranks_of(dead, 1)
    os.kill(rank, signal.SIGKILL)
    while not dead.has_died:
        time.sleep(0.05)
    replaced = launcher.start(spec, tmp_path / "log.txt")
    assert replaced is not dead and [gone(pid) for pid in (rank, dead._guard.pid)] == [True, True]
    replaced.end()
    launcher.close()


class Preparing:
    """What a launcher waits for, until the test has seen enough. A real one would need a GPU."""

    is_needed = True

    def __init__(self, until, work: object) -> None:
        self.until, self.work, self.closed = until, work, False

    def result(self, interrupted) -> str:
        deadline = time.monotonic() + 30
        while not self.until():
            assert not interrupted() and time.monotonic() < deadline
            time.sleep(0.05)
        assert not self.closed
        return "prepared"

    def close(self) -> None:
        self.closed = True


def test_the_first_trial_waits_while_its_data_is_still_prepared(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    launcher = launcher_of(fork_server, tmp_path, [0])
    launcher._preparation = Preparing(until=lambda: launcher._next is not None, work=object())
    assert launcher.prepare(lambda: False) == "prepared"
    assert launcher._next is not None and not launcher._next.has_died
    launcher.close()


def test_the_preparation_goes_on_where_there_is_nothing_to_fork_from(
    environment: dict[str, str], tmp_path: Path
) -> None:
    notes: list[str] = []
    launcher = ProcessLauncher(LocalLaunch(kind="local", gpus=[]), [], notes.append)
    launcher._fork_server = ForkServer(
        "no_such_module", environment, tmp_path / "fork-server-log.txt"
    )
    launcher._preparation = Preparing(until=lambda: notes, work=None)
    assert launcher.prepare(lambda: False) == "prepared"
    assert "no_such_module" in notes[0] and launcher._fork_server is None
    launcher.close()


def test_without_gpus_none_waits(fork_server: ForkServer, tmp_path: Path) -> None:
    launcher = launcher_of(fork_server, tmp_path, [])
    launcher.prepare_next()
    assert launcher._next is None


@pytest.mark.slow
def test_a_fork_server_that_still_imports_dies_with_the_study(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    study = f"""
import os, pathlib, time
from carbonopt.engines.process.forking import ForkServer
fork_server = ForkServer("slow_to_import", os.environ, pathlib.Path({str(tmp_path / "log")!r}))
print(fork_server._process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", study], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        fork_server = int(parent.stdout.readline())
        while "slow_to_import" not in psutil.Process(fork_server).cmdline():
            time.sleep(0.05)
        time.sleep(1.0)
        assert not gone(fork_server)
        parent.kill()
    deadline = time.monotonic() + 5
    while not gone(fork_server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_fork_server_that_cant_says_why(environment: dict[str, str], tmp_path: Path) -> None:
    unfit = ForkServer(
        "forked_here", {**environment, "UNFIT": "it has opened a GPU"}, tmp_path / "log"
    )
    broken = ForkServer("no_such_module", environment, tmp_path / "log")
    try:
        with pytest.raises(CannotFork, match="it has opened a GPU"):
            unfit.ready(30)
        with pytest.raises(
            CarbonoptError,
            match=r"ended with code 1: ModuleNotFound.*'no_such_module' \(log: .*log\)",
        ):
            broken.ready(30)
        assert "No module named 'no_such_module'" in (tmp_path / "log").read_text()
    finally:
        unfit.close()
        broken.close()


# -------------------------------------------------------------------------------------------------------
# real training

STUDY = """
name: warm
workload:
  model: {{from_config: {{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 32, n_positions: 32}}}}
  tokenizer: {{kind: byte}}
  dataset: {{builtin: python-docs}}
  sequence_length: 32
  evaluations: 2
target: {{perplexity: 1000000.0}}
search:
  space:
    global_batch_size: 16
    learning_rate: 1.0e-2
    epochs: 0.1
    zero_stage: {stage}
  pruning: {{target: false, cap: false}}
  sampler: grid
  seed: 3
budget: {{trials: 1}}
carbon: {{intensity_g_co2e_per_kwh: 100}}
launch: {{gpus: [], cpu_ranks: {ranks}, warm_start: {warm}}}
"""


# As of one of torchrun's and accelerate's own workers.
OUTER = {
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1", "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true", "LOCAL_WORLD_SIZE": "4", "RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "7",
    "OMPI_COMM_WORLD_RANK": "7",
}  # fmt: skip


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, **study: object) -> dict:
    """In this folder, with files named as libraries are."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("datasets", "accelerate", "tqdm"):
        (folder / f"{name}.py").write_text("raise SystemExit('the user\\'s own file')\n")
    (folder / "study.yaml").write_text(STUDY.format(**study))
    # With two threads one trial in some hundred ends with another last digit, forked or not: the
    # activation function of its first step differs by it.
    done = within("run", "study.yaml", "--out", "run", **OUTER, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "imports everything anew" not in done.stderr
    return json.loads(within("export", "run", "--format", "jsonl").stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (3, 2)], ids=["one rank", "two ranks"])
def test_warm_and_cold_trials_end_with_the_same_digits(
    stage: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever launcher the study itself has, and whatever lies about."""
    study = {"stage": stage, "ranks": ranks}
    warm = record(tmp_path / "warm", monkeypatch, **study, warm="true")
    cold = record(tmp_path / "cold", monkeypatch, **study, warm="false")
    for trial in (warm, cold):
        assert (trial["state"], trial.get("failure")) == ("complete", None)
    assert [point["sum"] for point in warm["evals"]] == [point["sum"] for point in cold["evals"]]
    imports_s = [trial["stages"]["imports"]["duration_s"] for trial in (warm, cold)]
    assert imports_s[0] < imports_s[1]
    check_stages_add_up(warm)


def check_stages_add_up(record: dict) -> None:
    stages = record["stages"].values()
    energy_kwh, total_kwh = (
        sum(stage["energy_kwh"] for stage in stages),
        record["energy_kwh"]["total"],
    )
    assert energy_kwh == pytest.approx(total_kwh, rel=1e-9)
    duration_s, total_s = (
        sum(stage["duration_s"] for stage in stages),
        record["duration_s"]["total"],
    )
    assert duration_s == pytest.approx(total_s, abs=0.1)
    assert set(record["stages"]) == {
        "imports", "data", "model", "engine", "compile", "steps", "evaluation", "teardown",
    }  # fmt: skip
