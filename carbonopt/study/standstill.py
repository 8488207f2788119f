"""Measures the time in which a trial did not run.

Such a standstill happens when a laptop is suspended, or processes are stopped and continued.
"""

import time
from collections.abc import Callable

_LATE_FROM_S = 3.0  # longer than a busy machine keeps a process from running
_SAMPLED_EVERY_S = 0.2
# If one of a trial's processes is stopped, and at most so many of its threads can run on average,
# then the whole trial counts as stopped. With more, its other processes are still at work.
_STOPPED = 0.1
# If fewer of a trial's threads than this can run on average, their time does not show whether the
# trial has gone on, and it counts as having stood still.
_IDLE = 0.01


class Standstill:
    """A detector of standstill, which compares the time waited with the time that was intended.

    If only this process was stopped, the trial has gone on: its threads have run meanwhile, or
    have waited for a core, as before. (Running time alone would not do: beside other work, the
    trial may get less of it than before.)

    Args:
        runnable_s: Returns the seconds so far in which the trial's threads ran or waited for a
            core. None: the trial runs on another machine, for which a standstill of this one does
            not matter.
        runnable_while_stopped_s: Returns the same seconds of the trial alone, if one of its
            processes was stopped when `runnable_s` was called; else None.
    """

    def __init__(
        self,
        runnable_s: Callable[[], float | None],
        runnable_while_stopped_s: Callable[[], float | None],
    ) -> None:
        self._read_runnable_s = runnable_s
        self._read_runnable_while_stopped_s = runnable_while_stopped_s
        self._sampled_at_s, self._runnable_s = time.monotonic(), runnable_s()
        self._threads = 0.0  # threads that could run between the last two samples, in the mean
        self.begin()

    def begin_waiting(self, *, trial_waits: bool) -> None:
        """Begin to wait, `begin` having been called when the wait before this one had ended.

        If this process took as long in between as if it had been stopped, that time counts as if it
        had waited: what the trial's threads did meanwhile shows whether the trial was stopped, too.

        Args:
            trial_waits: Whether the trial waited for this process in between, so that its threads
                show nothing.
        """
        if trial_waits or self.waited_s() < _LATE_FROM_S or self._threads < _IDLE:
            self.begin()

    def begin(self) -> None:
        """Take the time from which on standstill is looked for."""
        now_s = time.monotonic()
        if now_s - self._sampled_at_s >= _SAMPLED_EVERY_S:
            runnable_s = self._read_runnable_s()
            if runnable_s is not None and self._runnable_s is not None:
                self._threads = (runnable_s - self._runnable_s) / (now_s - self._sampled_at_s)
            self._sampled_at_s, self._runnable_s = now_s, runnable_s
        self._runnable_while_stopped_s = self._read_runnable_while_stopped_s()
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
        if late_s < _LATE_FROM_S or self._runnable_s is None:
            return 0.0
        runnable_s = self._read_runnable_s()
        if runnable_s is None or self._threads < _IDLE:
            return late_s
        went_on = (runnable_s - self._runnable_s) / (self._threads * late_s)
        return late_s * max(0.0, 1 - went_on)

    def was_stopped_s(self) -> float:
        """Return how many seconds the trial's processes were stopped while this one waited.

        Either the whole time of waiting counts or none of it, so the beginning and the end of a
        stop are left out. Nothing is read as long as no process is stopped.
        """
        waited_s, before_s = self.waited_s(), self._runnable_while_stopped_s
        if before_s is None or waited_s < _SAMPLED_EVERY_S:
            return 0.0
        self._read_runnable_s()
        now_s = self._read_runnable_while_stopped_s()
        has_run = now_s is None or now_s - before_s > _STOPPED * waited_s
        return 0.0 if has_run else waited_s

    @property
    def asleep_s(self) -> float:
        """The seconds since `begin` in which the machine was suspended.

        Only time that the monotonic clock left out is included.
        """
        slept_s = _asleep_s() - self._asleep_s
        return slept_s if slept_s > 1.0 else 0.0


def _asleep_s() -> float:
    """Return how long the machine has been suspended since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
