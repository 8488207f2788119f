"""Measures the time in which a trial did not run.

Such a standstill happens when a laptop is suspended, or processes are stopped and continued.
"""

import time
from collections.abc import Callable

_LATE_FROM_S = 3.0  # longer than a busy machine keeps a process from running
_SAMPLED_EVERY_S = 0.2
_IDLE = 0.01  # in cores: the CPU time of a trial that uses fewer shows nothing


class Standstill:
    """A detector of standstill, which compares the time waited with the time that was intended.

    If only this process was stopped, the trial has gone on running: it has had CPU time meanwhile,
    as before.

    Args:
        cpu_seconds: Returns the trial's CPU time so far. None: the trial runs on another machine,
            for which a standstill of this one does not matter.
    """

    def __init__(self, cpu_seconds: Callable[[], float | None]) -> None:
        self._cpu_seconds = cpu_seconds
        self._sampled_at_s, self._ran_s = time.monotonic(), cpu_seconds()
        self._cores = 0.0  # cores that the trial has used between the last two samples
        self.begin()

    def begin(self) -> None:
        """Take the time before waiting."""
        now_s = time.monotonic()
        if now_s - self._sampled_at_s >= _SAMPLED_EVERY_S:
            ran_s = self._cpu_seconds()
            if ran_s is not None and self._ran_s is not None:
                self._cores = (ran_s - self._ran_s) / (now_s - self._sampled_at_s)
            self._sampled_at_s, self._ran_s = now_s, ran_s
        self._began_s = now_s
        self._asleep_s = _asleep_s()

    def waited_s(self) -> float:
        """Return the seconds since `begin`."""
        return time.monotonic() - self._began_s

    def stood_still_s(self, limit_s: float) -> float:
        """Return how many seconds the trial stood still while this process waited.

        The time that a suspended machine's clock leaves out is not included (see `asleep_s`).

        Args:
            limit_s: The longest time that the waiting was meant to last.
        """
        late_s = self.waited_s() - limit_s
        if late_s < _LATE_FROM_S or self._ran_s is None:
            return 0.0
        ran_s = self._cpu_seconds()
        if ran_s is None or self._cores < _IDLE:
            return late_s
        return late_s * max(0.0, 1 - (ran_s - self._ran_s) / (self._cores * late_s))

    @property
    def asleep_s(self) -> float:
        """The seconds since `begin` in which the machine was suspended.

        Only those are included that the monotonic clock left out.
        """
        slept_s = _asleep_s() - self._asleep_s
        return slept_s if slept_s > 1.0 else 0.0


def _asleep_s() -> float:
    """Return how long the machine has been suspended since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
