"""What a study asks of whatever runs its trials: of an engine, and of a running trial.

An engine is one file that derives from `Engine`, and one line in `kinds.ENGINES`. Nobody else asks for the kind of
launch: it is told by a launch's properties, the meter's readings and the provenance.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.events import Event
from carbonopt.core.space import SearchSpace
from carbonopt.core.study import Hardware
from carbonopt.core.trial import Prepared, StopReason, TrialSpec
from carbonopt.energy.meter import Meter
from carbonopt.storage.paths import StudyPaths

_SIGNALS_APART_S = 1.0

LendMeter = Callable[[Callable[[], Meter]], Meter]


def own_meter(opened: Callable[[], Meter]) -> Meter:
    """A meter for this study alone."""
    return opened()


def was_interrupted(interrupted: Callable[[], bool]) -> bool:
    """Of processes that have ended without a word: whether the study is asked to end, too. Who ends a job signals all
    its processes (Slurm, systemd), in any order."""
    deadline = time.monotonic() + _SIGNALS_APART_S
    while not interrupted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class RunningTrial(Protocol):
    """A trial from its start to its end, wherever its ranks are."""

    @property
    def log(self) -> Path:
        """What its ranks print; of several machines, what there is to be read first."""

    def receive(self, timeout_s: float) -> Event | None:
        """The next event; None after so long without one. After `Exited` nothing comes."""

    def answer(self, stop: StopReason | None = None) -> None:
        """Lets the trial go on, or tells it to stop and why. Only what waits for an answer hears it."""

    def end(self) -> None:
        """Ends what is left of it and returns when nothing is: the next trial finds free memory."""

    def log_tail(self, lines: int = ...) -> str:
        """The last lines of its log; a few, unless more are asked for."""


class EngineObserver(Protocol):
    """Who is told of what happens before the first trial and between trials."""

    def warn(self, text: str) -> None: ...

    def preparing(self, anything: bool) -> None:
        """Processes have been started; `anything`: they prepare data, else an earlier call has."""


class Engine(Protocol):
    """Runs trials and meters what they take. To make one from a study's configuration reads and starts nothing.

    Its methods are called in this order: `check`; `begin`; `prepare`; then for each trial `await_free`, `start`, and
    `prepare_next` while it trains; `close`. Whoever has called `begin` calls `close`, also after an error.
    An engine that has nothing to do in one of them leaves it out, but for `start` and `close`.
    """

    description: str  # where trials run, in a few words
    max_power_w: float | None  # what its devices can draw; 0: it runs nothing; None: not known
    meter: Meter  # of all its nodes, from `begin` on
    machine_share: float | None = None  # of this machine's CPU and RAM energy that its meter counts, from `begin` on
    hardware: Hardware | None = None  # what trials run on, from `begin` on; None: a table, which says nothing of it

    def check(self, space: SearchSpace) -> None:
        """Whatever can be known before anything is started; raises a BadInput for what is wrong."""

    def seed(self, seed: int, params: TrialParams) -> int:
        """The seed that this configuration will be trained with: the one asked for, where that can be had."""
        return seed

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        lend: LendMeter = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        """Starts what takes long, and the meter, which is in PREPARE from then on. The caller holds the study's lock;
        `fingerprint` is of all that the prepared data depends on; `lend` gives another meter than the engine's own.
        `prepares`: False where another worker does, which is over when `prepare` is called.

        Raises:
            BadInput: for devices that aren't there, or what in the user's environment every trial would die of.
            MeasurementError: if no energy can be measured.
            StudyInterrupted: soon after `interrupted` says so.
        """

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        """Waits until the data is prepared and trials can be started; None where there is nothing to prepare.

        Raises:
            BadInput: for what is wrong with the workload.
            CarbonoptError: if the preparation fails.
            StudyInterrupted: soon after `interrupted` says so.
        """

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        """Waits until the devices are as free as before the first trial, for so long as that can take; says in words
        what isn't free then, once."""

    @abstractmethod
    def start(self, spec: TrialSpec, log: Path) -> RunningTrial:
        """Starts a trial, whose output goes to `log`."""

    def prepare_next(self) -> None:
        """Does ahead what the next trial needs, whichever it is. Called at every report of a trial's steps."""

    @abstractmethod
    def close(self) -> None:
        """Closes the meter's last window, and ends all that was started. Again it does nothing."""
