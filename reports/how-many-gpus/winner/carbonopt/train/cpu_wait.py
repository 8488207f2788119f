"""Cores that other work on the machine wants, too: how long a training waits for one, and what it does then."""

import contextlib
import threading
from pathlib import Path

_LOOK_EVERY_S = 0.5
_CPU_CONTENTION_FROM = 0.15  # share of the time without a core; the quickstart alone on two cores has 0.03 to 0.04
_ENOUGH_FOR_A_TEAM = 2**20  # elements; from 2**15 on torch divides a sum among threads


class CpuWait:
    """Of this process's threads, over all windows between `begin` and `end`; `end` again makes the last one longer."""

    def __init__(self) -> None:
        self._ran_s = self._waited_s = 0.0
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        self._began = _thread_times_s()

    def end(self) -> float | None:
        """Returns `share`."""
        ran_s, waited_s = _thread_times_s()
        self._ran_s += max(0.0, ran_s - self._began[0])  # a thread that has ended meanwhile takes its times along
        self._waited_s += max(0.0, waited_s - self._began[1])
        self._began = ran_s, waited_s
        return self.share

    @property
    def share(self) -> float | None:
        """Of the threads' time in which they were ready to run: that without a core. None where the kernel doesn't
        tell (it does where it was built with CONFIG_SCHED_INFO)."""
        return self._waited_s / (self._ran_s + self._waited_s) if self._ran_s else None


class SpinThrottle(threading.Thread):
    """Lets OpenMP's threads sleep sooner, to the trial's end, once other work wants their cores. Between two parallel
    regions they look for the next one, GOMP_SPINCOUNT times, before they sleep: 30,000 are best for a trial alone, and
    ruin one beside a busy process (reports/performance.md). A running process can't set the number, but libgomp looks
    1,000 times at most (`gomp_throttled_spin_count_var`) once its threads outnumber the cores: hence an idle team."""

    def __init__(self) -> None:
        super().__init__(name="spin throttle", daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        import torch  # here, as a user's script may have no torch, and its wait is measured too

        while not self._ended.is_set():
            wait = CpuWait()
            wait.begin()
            self._ended.wait(_LOOK_EVERY_S)
            if (wait.end() or 0.0) > _CPU_CONTENTION_FROM:
                print("Other work wants this machine's cores: threads sleep sooner from now on.", flush=True)
                torch.ones(_ENOUGH_FOR_A_TEAM).sum()  # in this thread, whose team it makes, and which has to stay
                self._ended.wait()

    def end(self) -> None:
        self._ended.set()


def _thread_times_s() -> tuple[float, float]:
    """Seconds for which the threads have run, and for which they were ready to and had no core."""
    ran_ns = waited_ns = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            ran, waited, _ = map(int, thread.read_text().split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return ran_ns / 1e9, waited_ns / 1e9
