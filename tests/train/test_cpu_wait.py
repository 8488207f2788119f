"""How long a training waits for a core, and that its threads sleep sooner where it does."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

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

torch.ones(2**20).sum()  # the main thread's team
crowded = sys.argv[1] == "crowded"
others = [threading.Thread(target=busy, args=(3.0,)) for _ in range(8 if crowded else 0)]
for thread in others:
    thread.start()
before = len(os.listdir("/proc/self/task"))
throttle = SpinThrottle()
throttle.start()
time.sleep(2.0)
print("threads", len(os.listdir("/proc/self/task")) - before, flush=True)
throttle.end()
throttle.join(10)
print("alive", throttle.is_alive())
for thread in others:
    thread.join()
"""


@pytest.mark.slow
def test_a_team_that_does_nothing_is_made_where_threads_wait() -> None:
    environment = {**os.environ, "TESTS": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", THROTTLING, "crowded"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert said[0] == "Other work wants this machine's cores: threads sleep sooner from now on."
    assert said[1] == "threads 2", "its own and one more of its team"
    assert said[2] == "alive False"
