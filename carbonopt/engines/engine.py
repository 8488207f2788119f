"""The interface between a study and what runs its trials: `Engine` and `RunningTrial`.

A new engine is a class that derives from `Engine`, its line in `kinds.ENGINES` and the keys of its
launch in the study file; docs/add-an-engine has each place.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.events import Event
from carbonopt.core.trial import StopReason
from carbonopt.energy.meter import Meter
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.study_data import Hardware
from carbonopt.spec.trial_spec import Prepared, TrialSpec
from carbonopt.storage.paths import StudyPaths

_SIGNALS_APART_S = 1.0

MeterProvider = Callable[[Callable[[], Meter]], Meter]


def own_meter(opened: Callable[[], Meter]) -> Meter:
    """Open a meter for this study alone."""
    return opened()


def await_own_signal(interrupted: Callable[[], bool]) -> bool:
    """Wait up to a second for the study's own signal; return whether it came.

    Slurm and systemd end a job by signalling all its processes, in any order: a trial's processes
    may end first.
    """
    deadline = time.monotonic() + _SIGNALS_APART_S
    while not interrupted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class RunningTrial(Protocol):
    """A trial from its start to its end, wherever its ranks run."""

    @property
    def log(self) -> Path | None:
        """The log of the ranks' output; with several machines, the log to read first.

        None: a replayed trial, which writes none.
        """

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event; None if none comes in time. `Exited` is the last event."""

    def answer(self, stop: StopReason | None = None) -> None:
        """Let the trial go on, or tell it to stop and why.

        The trial reads this only after an event that waits for an answer.
        """

    def runnable_s(self) -> float | None:
        """Return the seconds in which the trial's threads ran or waited for a core, summed.

        None where this machine can't know it.
        """

    def cpu_wait_fraction(self) -> float | None:
        """Return the share of their time in which the trial's threads lacked a core, so far.

        It is read from outside, and covers all of the trial's processes; with several machines, it
        is that of the machine where they waited most. None where it can't be known.
        """

    def runnable_while_stopped_s(self) -> float | None:
        """Return the trial's own runnable seconds so far, if one of its processes is stopped.

        These are the seconds in which the trial's threads ran or waited for a core, summed, as the
        last call of `runnable_s` has read them. None: no process was stopped then, as by SIGSTOP,
        or this machine can't know it.
        """

    def end(self) -> None:
        """End all that is left of the trial and wait for it, so that its memory is free again."""

    def log_tail(self, lines: int = ...) -> str:
        """Return the last lines of the trial's log; a few by default."""


class EngineObserver(Protocol):
    """Receiver of an engine's messages before the first trial and between trials."""

    def warn(self, text: str) -> None: ...

    def preparing(self, anything: bool) -> None:
        """Report that processes have been started.

        `anything` says whether they prepare data; if not, an earlier call has prepared it.
        """


class Engine(Protocol):
    """Runs trials and meters their energy. Constructing an engine reads and starts nothing.

    The methods are called in this order: `check`; `begin`; `prepare`; then for each trial and each
    probe `await_free`, `start`, and `prepare_next` while it trains; `close`. `seed` can be called
    at any time after `check`, also before `begin`. `close` ends a run, also after an error, and
    also if `begin` failed or was never called. An engine that has begun nothing may be dropped
    without `close`, so `check` and `seed` must leave nothing open.

    An engine must implement `start` and `close`, set `description` and `max_power_w` in its
    constructor, and set `meter` in `begin`. It implements the other methods, and sets the other
    attributes, only where it has something to do or to say.
    """

    description: str  # where trials run, in a few words
    max_power_w: float | None  # its devices' largest power; 0: it trains nothing; None: unknown
    meter: Meter  # meter of all its nodes, from `begin` on
    # Share of this machine's CPU and RAM energy that the meter counts, from `begin` on.
    machine_share: float | None = None
    # The hardware that trials run on, from `begin` on; None: replayed from a table, unknown.
    hardware: Hardware | None = None

    def check(self, space: SearchSpace) -> None:
        """Check all that can be known before anything is started; raise BadInput for a mistake."""

    def seed(self, seed: int, params: TrialParams) -> int:
        """Return the seed that this configuration will be trained with.

        It is `seed`, unless the trial is replayed from a table that has no run with it.
        """
        return seed

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        meter_provider: MeterProvider = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        """Start what takes long, and the meter, which is in phase PREPARE from then on.

        The caller holds the lock of the study's folder.

        Args:
            paths: the study's folder.
            fingerprint: the fingerprint of all that the prepared data depends on.
            observer: receives warnings and the start of the preparation.
            interrupted: returns whether the study is asked to end.
            meter_provider: opens the engine's meter, or returns a shared meter in its place.
            prepares: False where another worker prepares the data, which must be done when
                `prepare` is called.

        Raises:
            BadInput: for devices that don't exist, or settings of the user's environment that would
                make every trial fail.
            MeasurementError: if no energy can be measured.
            StudyInterrupted: soon after `interrupted` returns true.
        """

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        """Wait until the data is prepared and trials can be started, and return what was prepared.

        Returns None where there is nothing to prepare.

        Raises:
            BadInput: for mistakes in the workload.
            CarbonoptError: if the preparation fails.
            StudyInterrupted: soon after `interrupted` returns true.
        """

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        """Wait, for a limited time, until the devices are as free as before the first trial.

        Returns a message, once, about what still isn't free then.
        """

    @abstractmethod
    def start(self, spec: TrialSpec, log: Path) -> RunningTrial:
        """Start a trial or a probe whose output goes to `log`."""

    def prepare_next(self) -> None:
        """Prepare ahead what the next trial needs, whichever trial it is.

        Called at every report of a trial's steps.
        """

    def drop_next(self) -> None:
        """End what `prepare_next` has begun, so that nothing holds a device while a study waits."""

    @abstractmethod
    def close(self) -> None:
        """Close the meter's last window and end all that was started; again, it does nothing."""
