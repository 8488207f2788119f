"""One worker's part of a call of `carbonopt run`: the study, its folder, and who is told of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from carbonopt.core.trial import TrialRecord
from carbonopt.engines.engine import EngineObserver, MeterProvider
from carbonopt.spec.study_data import PlannedStart, StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.local_workers import LocalWorker, LocalWorkers
from carbonopt.study.notifications import Notifications
from carbonopt.study.trial_observer import StudyObserver, TrialObserver
from carbonopt.study_file.study_checks import CheckedStudy


@dataclass(frozen=True)
class AsStep:
    """The requirements that a pipeline has of a study which is one of its steps."""

    hands_on: int  # number of configurations whose weights later steps need
    meter_provider: MeterProvider  # returns the meter that all steps of the pipeline share


class StudyDisplay(TrialObserver, EngineObserver, Protocol):
    """The interface of a display that shows a study while it runs."""

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None: ...
    def still_running(self, spent_kwh: float) -> None:
        """Show that a trial goes on and what this attempt has used.

        It is called about twice a second, and before each `progress`.
        """

    def used(self, hours: float, energy_kwh: float) -> None:
        """Note what the study has used so far, as its budget counts it; called between runs."""

    def study_started(self, data: StudyData, hours_before: float) -> None: ...
    def waiting(self, start: PlannedStart) -> None: ...
    def probe_started(self, spec: TrialSpec) -> None: ...
    def probe_ended(self, record: TrialRecord) -> None: ...


@dataclass(frozen=True)
class Session:
    """One worker's part of a call of `carbonopt run`; a call with several slots has several."""

    checked: CheckedStudy
    study_file: str  # content of the study file
    paths: StudyPaths
    display: StudyDisplay
    trackers: StudyObserver
    # called a few times a second; returns True to end the study, which can then be resumed
    interrupted: Callable[[], bool]
    notifications: Notifications | None = None  # None: the user is sent nothing
    # URL of the storage; None: the storage that the folder already has, else a file in it
    url: str | None = None
    warnings: Sequence[str] = ()  # shown when there is something left to run
    # called in a thread of its own while processes import; it returns before the first trial
    meanwhile: Callable[[], None] = lambda: None
    # called once, when the preparation has ended and before the first trial begins
    before_measuring: Callable[[], None] = lambda: None
    # requirements of the pipeline that the study is a step of; None: it is no step
    as_step: AsStep | None = None
    # True: the worker joins the study, which another call leads or has led; it never leads itself
    joins: bool = False
    # The workers in the launch's other slots.
    local_workers: LocalWorkers = field(default_factory=LocalWorkers)
    local_worker: LocalWorker | None = None  # set where this worker is in one of those slots itself
