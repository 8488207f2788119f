"""How long a training waits for a core, and that its threads sleep sooner where it does."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from carbonopt.train import cpu_wait
from carbonopt.train.cpu_wait import CpuWait


def busy(seconds: float) -> None:
    """Work outside the interpreter's lock, so that threads of it compete for cores."""
    data = bytes(2**23)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.sha256(data)


def waited(threads: int, seconds: float = 1.0) -> float:
    wait = CpuWait()
    assert wait.share is None
    wait.begin()
    working = [threading.Thread(target=busy, args=(seconds,)) for _ in range(threads)]
    for thread in working:
        thread.start()
    time.sleep(0.8 * seconds)  # a thread's times are known while it lives
    wait.end()
    for thread in working:
        thread.join()
    assert wait.share is not None
    return wait.share


def test_more_threads_than_cores_wait_for_one() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 0.5 < waited(4 * cores) <= 1


def test_sleeping_is_no_waiting_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that works for 0.1 s, waits for 0.1 s and sleeps for the rest of a second."""
    times = iter([(5.0, 2.0), (5.1, 2.1), (5.1, 2.1), (9.1, 6.1)])
    monkeypatch.setattr(cpu_wait, "_thread_times_s", lambda: next(times))
    clock = iter([100.0, 101.0, 105.0, 107.0])
    monkeypatch.setattr(cpu_wait.time, "monotonic", lambda: next(clock))
    wait = CpuWait()
    wait.begin()
    assert wait.end() == pytest.approx(0.1)
    wait.begin()
    assert wait.end() == pytest.approx((0.1 + 4.0) / (0.2 + 8.0)), "four threads, for two seconds"


def test_windows_add_up() -> None:
    wait = CpuWait()
    ran_s = []
    for _ in range(3):
        wait.begin()
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            busy(0.01)
        wait.end()
        ran_s.append(wait._ran_s)
    assert 0 < ran_s[0] < ran_s[1] < ran_s[2] == pytest.approx(0.9, abs=0.3), (
        "to the kernel's own ticks"
    )


THROTTLING = """
import os, sys, threading, time
import torch
from carbonopt.train.cpu_wait import SpinThrottle
sys.path.insert(0, os.environ["TESTS"])
from train.test_cpu_wait import busy

def threads():
    return len(os.listdir("/proc/self/task"))

torch.ones(2**20).sum()  # the main thread's team
before = threads()
throttle = SpinThrottle()
throttle.start()
for _ in range(2):
    others = [threading.Thread(target=busy, args=(3.0,)) for _ in range(8)]
    for thread in others:
        thread.start()
    time.sleep(2.0)
    print("threads", threads() - len(others) - before, flush=True)
    for thread in others:
        thread.join()
    deadline = time.monotonic() + 30
    while threads() - before > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    print("threads", threads() - before, flush=True)
throttle.end()
throttle.join(10)
print("alive", throttle.is_alive())
"""


@pytest.mark.slow
def test_an_idle_team_is_kept_while_threads_wait() -> None:
    environment = {**os.environ, "TESTS": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", THROTTLING],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told, *counts, alive = done.stdout.splitlines()
    assert told == "Other work wants this machine's cores: threads sleep sooner while it does."
    # the throttle's own, and while others want the cores a thread with a team of two
    assert counts == ["threads 3", "threads 1"] * 2
    assert alive == "alive False"
