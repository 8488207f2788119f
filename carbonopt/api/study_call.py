"""One call of a study, from the checks of the machine to the report; `Caller` says who called."""

import contextlib
import dataclasses
import importlib
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from carbonopt.api.end_messages import end_event, said_if_it_fails, say_the_end
from carbonopt.api.report_files import write_own_report
from carbonopt.core.errors import BadInput
from carbonopt.core.files import check_kinds
from carbonopt.doctor import before_run
from carbonopt.doctor.check_result import Status
from carbonopt.engines.slurm import here
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.folder import HeldFolder, own_folder
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.storage_errors import written
from carbonopt.study.already_done import ended_study
from carbonopt.study.local_workers import LocalWorker, LocalWorkers, forked_workers, printed_to
from carbonopt.study.notifications import Notifications
from carbonopt.study.run_study import run_study
from carbonopt.study.session import AsStep, Session, StudyDisplay
from carbonopt.study.stop_request import StopRequest
from carbonopt.study.trackers import Trackers, open_trackers
from carbonopt.study_file.study_checks import CheckedStudy, check


class CallDisplay(StudyDisplay, Protocol):
    """A display of one call, which ends with it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Caller:
    """The caller of a study: how the study is shown, and how its user can stop it."""

    display: "Callable[[StudyConfig], CallDisplay]"
    interruptible: Callable[[], AbstractContextManager[StopRequest]]
    # runs the part of a forked worker, whose process ends with it
    as_worker: Callable[[Callable[[], None]], object]


def worker_paths(root: Path) -> StudyPaths:
    """Return the paths of a worker that joins the study of a folder."""
    return StudyPaths(root, f"{socket.gethostname()}-{os.getpid()}")


def call_study(
    caller: Caller,
    config: StudyConfig,
    text: str,
    paths: StudyPaths,
    storage: str | None,
    as_step: AsStep | None = None,
    *,
    joins: bool = False,
) -> tuple[StudyData, Path | None]:
    """Run or resume a study and write its report, in all slots of its launch.

    Args:
        text: The content of the study file.
        joins: Whether this call joins a study that another one leads; it writes no report then.

    Returns:
        The study, and the page of its report, if one was written.
    """
    checked = check(config)
    if os.path.realpath(paths.root) in map(os.path.realpath, config.search.learn_from):
        raise BadInput(
            f"search.learn_from must name earlier studies, but {paths.root} is this one's folder;"
            " leave it out."
        )
    findings = before_run(here(config), paths.root)
    if failures := [str(check) for check in findings if check.status == Status.FAILURE]:
        raise BadInput("; ".join(failures))
    warnings = [str(check) for check in findings if check.status == Status.WARNING]
    call = _SlotCall(caller, checked, text, paths, storage, as_step, joins, warnings)

    def beside(local_worker: LocalWorker) -> None:
        in_folder = worker_paths(paths.root)

        def join() -> None:
            call.in_slot(local_worker, in_folder).run()

        with printed_to(in_folder.worker_log):
            caller.as_worker(join)

    with forked_workers(config.launch.slots, beside) as others:
        return dataclasses.replace(call, local_workers=others).run()


def call_ended_study(
    checked: CheckedStudy, paths: StudyPaths, storage: str | None, warn: Callable[[str], None]
) -> tuple[StudyData, Path] | None:
    """End the call of a study of which nothing is left to do; start nothing to find that out.

    Returns:
        The study, and the page of its report; None if something is left to do.
    """
    if not paths.root.is_dir():
        return None
    with own_folder(paths) as held, written(paths.root):
        held.keep()
        data = ended_study(checked, paths, storage, warn)
        if data is None:
            return None
        with contextlib.closing(open_trackers(checked.config, paths.trackers, warn)) as trackers:
            trackers.study_ended(data)
        page = write_own_report(data, paths)
        if (event := end_event(checked.config, data)) is not None:
            notifications = Notifications.of(checked.config, warn, joins=False)
            say_the_end(notifications, event, data, page, paths, storage)
        return data, page


@dataclass(frozen=True)
class _SlotCall:
    """The part of a call that works in one slot of the study's launch; see `call_study`."""

    caller: Caller
    checked: CheckedStudy
    text: str
    paths: StudyPaths
    storage: str | None
    as_step: AsStep | None = None
    joins: bool = False
    warnings: Sequence[str] = ()  # shown when there is something left to run
    local_workers: LocalWorkers = field(default_factory=LocalWorkers)  # in the other slots
    local_worker: LocalWorker | None = None  # set where this call is in one of those itself

    def in_slot(self, local_worker: LocalWorker, paths: StudyPaths) -> "_SlotCall":
        """Return the part of the same call that joins the study in another slot."""
        checked = self.checked.in_slot(local_worker.slot)
        return _SlotCall(
            self.caller,
            checked,
            self.text,
            paths,
            self.storage,
            joins=True,
            local_worker=local_worker,
        )

    def run(self) -> tuple[StudyData, Path | None]:
        """Work on the study until it ends; tell who follows it, and write its report."""
        paths, config = self.paths, self.checked.config
        with own_folder(paths) as held, self.caller.interruptible() as interrupted:
            display = self.caller.display(config)
            notifications = Notifications.of(config, display.warn, joins=self.joins)
            trackers = open_trackers(config, paths.trackers, display.warn, joins=self.joins)
            session = self._session(held, display, notifications, trackers, interrupted)
            with (
                contextlib.closing(notifications),
                said_if_it_fails(notifications),
                written(paths.root),  # its message says what the command says
            ):
                try:
                    data = run_study(session)
                    if not self.joins:
                        trackers.study_ended(data)
                finally:
                    trackers.close(interrupted)
                    display.close()
                held.keep()
                # All measurements are stored, so a signal may end it at once.
                interrupted.raise_on_signal()
                if self.joins:
                    return data, None
                page = write_own_report(data, paths)
                if (event := end_event(config, data)) is not None:
                    say_the_end(notifications, event, data, page, paths, self.storage)
            return data, page

    def _session(
        self,
        held: HeldFolder,
        display: CallDisplay,
        notifications: Notifications,
        trackers: Trackers,
        interrupted: StopRequest,
    ) -> Session:
        def before_measuring() -> None:
            held.keep()
            interrupted.let_signals_wait()

        return Session(
            self.checked,
            self.text,
            self.paths,
            display,
            trackers,
            interrupted,
            notifications=notifications,
            url=self.storage,
            warnings=self.warnings,
            meanwhile=lambda: _look_ahead(self.paths, trackers),
            before_measuring=before_measuring,
            as_step=self.as_step,
            joins=self.joins,
            local_workers=self.local_workers,
            local_worker=self.local_worker,
        )


def _look_ahead(paths: StudyPaths, trackers: Trackers) -> None:
    """Import the search, the report and trackers; check that the report can be written.

    This takes seconds. A study has time for it when it begins, while its trials' processes import,
    but not between trials or later.
    """
    libraries = ("sklearn.inspection", "matplotlib.backends.backend_pdf", "pyarrow.parquet")
    for module in ("carbonopt.search.strategy", "carbonopt.report.writing", *libraries):
        importlib.import_module(module)
    from carbonopt.report.writing import NAMES

    check_kinds(paths.report, NAMES)
    trackers.open()
