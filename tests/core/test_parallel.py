"""Work in forks: its order, its errors, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
from engines.test_local import gone

from carbonopt.core import parallel
from carbonopt.core.errors import CarbonoptError
from carbonopt.core.parallel import in_forks


def test_results_come_in_the_order_of_the_parts_from_a_process_each() -> None:
    results = in_forks(lambda part: (part, os.getpid()), [3, 1, 2])
    assert [part for part, _ in results] == [3, 1, 2]
    pids = [pid for _, pid in results]
    assert len(set(pids)) == 3 and pids[-1] == os.getpid() and all(gone(pid) for pid in pids[:-1])
    assert in_forks(str, []) == []


def test_an_error_in_a_fork_is_the_callers() -> None:
    def work(part: int) -> float:
        return 1 / part

    with pytest.raises(ZeroDivisionError):
        in_forks(work, [1, 0, 1])


def test_an_error_that_cannot_be_sent_has_its_type_and_text() -> None:
    class Unsent(Exception):
        def __init__(self, what: str, count: int) -> None:
            super().__init__(f"{count} {what}")

    def work(part: int) -> int:
        if part:
            raise Unsent("heads", part)
        return part

    with pytest.raises(CarbonoptError, match=r"^Unsent: 12 heads$"):
        in_forks(work, [12, 0])


def test_a_fork_that_dies_is_noticed() -> None:
    def work(part: Callable[[], object]) -> object:
        return part()

    with pytest.raises(CarbonoptError, match="ended with code -9"):
        in_forks(work, [lambda: os.kill(os.getpid(), signal.SIGKILL), int])


def test_forks_of_a_killed_parent_end_with_it() -> None:
    script = """
        import os, time
        from carbonopt.core.parallel import in_forks

        def work(seconds):
            os.write(1, f"{os.getpid()}\\n".encode())  # at once, or lines of several processes mix
            time.sleep(seconds)

        in_forks(work, [60, 60, 60])
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        parent.kill()
    until = time.monotonic() + 20
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_forks_end_with_a_parent_that_ends_early_whatever_it_does_at_a_sigterm() -> None:
    script = """
        import os, signal, time
        from carbonopt.core.parallel import in_forks

        def work(seconds):
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(seconds)
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, lambda *_: None)
        in_forks(work, [60, 60, 1])
    """
    argv = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        parent.wait(20)
    assert all(gone(pid) for pid in pids)


def test_one_process_for_each_core_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (224, 16)):
        monkeypatch.setattr(
            parallel.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores))
        )
        assert parallel.processes() == expected
