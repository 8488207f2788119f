"""CPU time is that of a process and all that it starts, however those end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from carbonopt.energy import cpu_time
from carbonopt.energy.cpu_time import (
    CpuTime,
    ProcessTree,
    StudyProcesses,
    busy_seconds,
    usable_cores,
)

pytestmark = pytest.mark.timed

SPIN = "import time\nwhile time.process_time() < {s}: pass\n"


def spin(seconds: float) -> list[str]:
    return [sys.executable, "-S", "-c", SPIN.format(s=seconds)]


def python(source: str) -> subprocess.Popen[bytes]:
    """It ends when its standard input is closed."""
    waits = (
        f"import os, signal, subprocess, sys, time\n{source}\nprint(flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # it has done what it had to
    return process


STARTS = f"spins = [sys.executable, '-S', '-c', {SPIN.format(s=0.3)!r}]\n"
FAMILIES = {
    "itself": SPIN.format(s=0.3),
    "a thread that has ended": (
        "import threading\n"
        "thread = threading.Thread(target=lambda: exec('while time.thread_time() < 0.3: pass'))\n"
        "thread.start(); thread.join()"
    ),
    "children that have ended": (
        STARTS + "for _ in range(2): subprocess.run([*spins[:3], spins[3].replace('0.3', '0.15')])"
    ),
    "grandchildren that have ended": (
        STARTS
        + "subprocess.run([spins[0], '-S', '-c', f'import subprocess; subprocess.run({spins!r})'])"
    ),
    "a child that lives": (
        STARTS + "spins[3] += 'time.sleep(5)'\n"
        "subprocess.Popen(spins, stdout=subprocess.DEVNULL)\ntime.sleep(1.5)"
    ),
    "an orphan": (
        STARTS + "import ctypes; ctypes.CDLL(None).prctl(36, 1)\n"
        "subprocess.run(['sh', '-c', '\"$@\" &', 'sh', *spins])\nos.wait()"
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_tree_has_the_time_of_all_that_it_started(family: str) -> None:
    process = python(FAMILIES[family])
    ran_s = ProcessTree(process.pid).read().ran_s
    process.kill()
    process.communicate()
    assert 0.28 <= ran_s < 0.9, "with what it takes to start some interpreters on a busy machine"


def test_what_children_had_whom_nobody_waits_for_is_kept() -> None:
    """The kernel adds it to nobody's where SIGCHLD is ignored."""
    source = STARTS + "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    process = python(
        f"{source}subprocess.Popen([*spins[:3], spins[3] + 'time.sleep(1)'])\ntime.sleep(1.2)"
    )
    tree = ProcessTree(process.pid)
    seen_s = tree.read().ran_s
    deadline = time.monotonic() + 20
    while cpu_time._children(process.pid, [process.pid]) and time.monotonic() < deadline:
        time.sleep(0.05)
        seen_s = max(seen_s, tree.read().ran_s)
    assert not cpu_time._children(process.pid, [process.pid])
    assert tree.read().ran_s >= seen_s >= 0.28
    process.communicate(b"")
    assert tree.read().ran_s >= seen_s, "after its own end, too"


def test_a_tree_does_not_grow_while_nothing_runs() -> None:
    process = python("pass")
    tree = ProcessTree(process.pid)
    first = tree.read().ran_s
    for _ in range(20):
        tree.read()
    assert tree.read().ran_s == pytest.approx(first, abs=0.005)
    process.communicate(b"")


def test_without_the_kernels_lists_parents_tell_their_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = python(FAMILIES["a child that lives"])
    listed = ProcessTree(process.pid).read().ran_s
    monkeypatch.setattr(cpu_time, "_kernel_lists_children", lambda: False)
    assert ProcessTree(process.pid).read().ran_s == pytest.approx(listed, abs=0.2)
    process.kill()
    process.communicate()


def test_a_process_is_the_studys_until_it_becomes_a_trial() -> None:
    study = StudyProcesses()
    process = python(SPIN.format(s=0.2))
    counted = study.add(process.pid)
    assert study.read().trials.ran_s == 0
    before_s = study.read().study_s
    counted.become_trial()
    process.communicate(b"")
    counted.end(1.0)  # as its guard tells
    ended = study.read()
    assert ended.trials.ran_s == pytest.approx(1.0 - 0.25, abs=0.15)
    assert ended.study_s < before_s + 0.3
    for _ in range(3):
        assert study.read().trials == ended.trials, "what has ended is counted once"


def test_waiting_for_a_core_is_known_where_the_kernel_tells() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"os.sched_setaffinity(0, [{core}])\n"
    both = [
        subprocess.Popen([sys.executable, "-c", f"import os\n{pinned}{SPIN.format(s=1.0)}"])
        for _ in range(2)
    ]
    trees, waited_s = [ProcessTree(process.pid) for process in both], 0.0
    while any(process.poll() is None for process in both):
        waited_s = sum(tree.read().waited_s for tree in trees)
        time.sleep(0.05)
    if cpu_time._waited_s(os.getpid(), os.getpid()) == 0:
        pytest.skip("this kernel doesn't tell for how long threads wait")
    assert waited_s > 0.5, "two seconds of work on one core"


def test_sleeping_is_no_waiting_for_a_core() -> None:
    if (slept := CpuTime(1.0, 1.0).wait_fraction(10.0)) is None:
        pytest.skip("this kernel doesn't tell for how long threads wait")
    assert slept == pytest.approx(0.1)
    assert CpuTime(6.0, 6.0).wait_fraction(4.0) == pytest.approx(0.5), "three threads"


def test_busy_cores_are_counted_where_the_kernel_tells() -> None:
    core = min(os.sched_getaffinity(0))
    began = busy_seconds()
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.sched_setaffinity(0, [{core}])\n{SPIN.format(s=1.0)}",
        ],
        check=True,
    )
    if not began:
        pytest.skip("this kernel doesn't count what cores do")
    assert busy_seconds()[core] - began[core] > 0.8


QUOTAS: list[tuple[str, dict[str, str], float]] = [
    ("0::/job\n", {"job/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
    ("0::/job/step\n", {"job/cpu.max": "50000 100000", "job/step/cpu.max": "400000 100000"}, 0.5),
    (
        "4:cpu,cpuacct:/job\n",
        {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
        2.5,
    ),
    (
        "4:cpu:/outside/of/the/container\n",
        {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
        1.0,
    ),
    (
        "4:cpu:/\n3:memory:/x\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        4.0,
    ),
    ("0::/\n", {}, 4.0),
]


@pytest.mark.parametrize(("entry", "files", "cores"), QUOTAS)
def test_a_containers_quota_limits_what_it_reserves(
    entry, files, cores, tmp_path, monkeypatch
) -> None:
    (tmp_path / "cgroup").write_text(entry)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    monkeypatch.setattr(cpu_time, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cpu_time, "_CGROUPS", tmp_path / "fs")
    assert usable_cores(4) == cores


def test_a_kernel_that_counts_nothing_tells_nothing(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tells: Callable[[str], int] = (tmp_path / "stat").write_text
    monkeypatch.setattr(cpu_time, "_STAT", tmp_path / "stat")
    assert busy_seconds() == {}
    tells("cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\nintr 0\n")
    assert busy_seconds() == {}
    tells(
        "cpu 5 4 3 2 1 1 1 9 2 0\ncpu0 100 200 300 9999 50 10 20 700 80 0\ncpu7 100 0 0 9 0 0 0 0"
        " 0 0\n"
    )
    per_s = os.sysconf("SC_CLK_TCK")
    assert busy_seconds() == {
        0: 630 / per_s,
        7: 100 / per_s,
    }, "idle, waiting for disks, stolen and guests' aren't busy"
