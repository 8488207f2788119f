"""Measure how long a training waits for cores that other work wants too, and reduce the harm."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from carbonopt.core.last_error import SLEEPS_SOONER
from carbonopt.core.states import CPU_CONTENTION_FROM

_LOOK_EVERY_S = 0.5
_ENOUGH_FOR_A_TEAM = 2**20  # elements; from 2**15 on torch divides a sum among threads


class CpuWait:
    """The time for which this process's threads wait for a core, over windows of `begin` and `end`.

    A second `end` extends the last window.
    """

    def __init__(self) -> None:
        self._ran_s = self._waited_s = self._elapsed_s = 0.0
        self._began, self._began_s = (0.0, 0.0), 0.0

    def begin(self) -> None:
        self._began, self._began_s = _thread_times_s(), time.monotonic()

    def end(self) -> float | None:
        """End a window and return `share`."""
        (ran_s, waited_s), now_s = _thread_times_s(), time.monotonic()
        # a thread that has ended meanwhile takes its times along
        self._ran_s += max(0.0, ran_s - self._began[0])
        self._waited_s += max(0.0, waited_s - self._began[1])
        self._elapsed_s += now_s - self._began_s
        self._began, self._began_s = (ran_s, waited_s), now_s
        return self.share

    @property
    def share(self) -> float | None:
        """The share of the windows' time in which the threads were ready to run but had no core.

        If several threads were ready for longer together, it is the share of their time. None where
        the kernel doesn't tell (it does if it was built with CONFIG_SCHED_INFO).
        """
        if not self._ran_s:
            return None
        return self._waited_s / max(self._ran_s + self._waited_s, self._elapsed_s)


class SpinThrottle(threading.Thread):
    """A thread that lets OpenMP's threads sleep sooner while other work wants their cores.

    Between two parallel regions OpenMP's threads look for the next one, GOMP_SPINCOUNT times,
    before they sleep: 30,000 are best for a trial alone, and ruin one beside a busy process
    (reports/performance.md). A running process can't set the number, but libgomp looks 100 times at
    most (`gomp_throttled_spin_count_var`) while its threads outnumber the cores. An idle team of
    threads makes them do so. It is dismissed as soon as the threads no longer wait: on a machine
    that is idle again, waking threads at each region takes several times the energy.
    """

    def __init__(self) -> None:
        super().__init__(name="spin throttle", daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        is_told = False
        while not self._ended.is_set():
            if not self._is_contended():
                continue
            if not is_told:
                print(SLEEPS_SOONER, flush=True)
                is_told = True
            with _idle_team():
                while self._is_contended():
                    pass

    def _is_contended(self) -> bool:
        """Return whether the threads wait for cores in the next window; not once it has ended."""
        wait = CpuWait()
        wait.begin()
        has_ended = self._ended.wait(_LOOK_EVERY_S)
        return not has_ended and (wait.end() or 0.0) > CPU_CONTENTION_FROM

    def end(self) -> None:
        self._ended.set()


@contextlib.contextmanager
def _idle_team() -> Iterator[None]:
    """Keep a team of OpenMP threads that does nothing, by a thread of its own."""
    # imported here because a user's script, whose wait is measured too, may have no torch
    import torch

    dismissed = threading.Event()

    def keep() -> None:
        torch.ones(_ENOUGH_FOR_A_TEAM).sum()
        dismissed.wait()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        dismissed.set()  # libgomp ends a team with the thread that made it
        keeper.join()


def _thread_times_s() -> tuple[float, float]:
    """Return for how many seconds the threads ran, and were ready to run without a core."""
    ran_ns = waited_ns = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        # a thread may just have ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ran, waited, _ = map(int, thread.read_text().split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return ran_ns / 1e9, waited_ns / 1e9
