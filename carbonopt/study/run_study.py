"""Run a whole study: prepare it, or find what an earlier call has stored, and run its trials."""

import contextlib
import time
from collections.abc import Callable
from functools import partial

from optuna.storages import RDBStorage

from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.locked_storage import STUDY_S, Patience
from carbonopt.storage.study_storage import StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, has_storage, remember_storage, storage_url
from carbonopt.storage.workers import Lease, leased, living
from carbonopt.study.input_files import input_files
from carbonopt.study.local_workers import LocalWorker
from carbonopt.study.resume import (
    LEAD,
    already_done,
    load_stored,
    note_study,
    provenance_of,
    recorded_inputs,
)
from carbonopt.study.session import Session
from carbonopt.study.trial_loop import LOOK_AGAIN_S, StudyWorker

_END_TOGETHER_S = 10.0  # longest wait after the last trial for the other workers' last reading


def run_study(session: Session) -> StudyData:
    """Run a study until it ends, or resume it. docs/search.md says when a study ends.

    The caller holds the folder's lock.

    Raises:
        BadInput: Before this worker begins its first trial: at once for what can be known then, and
            after the engine has begun for mistakes that the preparation finds or for a worker that
            does not fit the study. Also if another worker leads the study, or there is no study to
            join.
        StudyInterrupted: After `interrupted` returned True; the running trial has been put back.
        MeasurementError: If no energy can be measured.
        CarbonoptError: If the study can't go on, such as for changed input files.
    """
    checked, paths, joins = session.checked, session.paths, session.joins
    if joins and session.local_worker is None and not has_storage(paths, session.url):
        raise BadInput(f"--worker joins a study, but {paths.root} has none yet: {LEAD}.")
    database = connect(
        storage_url(paths, session.url),
        must_exist=joins,
        patience=Patience(STUDY_S, session.display.warn, session.interrupted),
    )
    check_folder_is_free(database, paths, checked.config.name)
    where = str(paths.root) if session.url is None else "the storage"
    with (
        leased(database, checked.config.name, joins=joins) as lease,
        contextlib.closing(checked.engine),
    ):
        asked_to_end = partial(_asked_to_end, lease, session.interrupted)
        worker = StudyWorker(session, lease, asked_to_end)
        inputs = input_files(checked.config)
        waits = session.local_worker is not None or (
            joins and checked.config.launch.kind == "slurm"
        )
        if waits:
            # The energy of its devices is the study's from here on, also while it waits.
            worker.begin(inputs, prepares=False)
            _await_study(database, checked.config.name, session.local_worker, asked_to_end)
        stored, worker.checked = load_stored(database, checked, paths, where, joins=joins)
        if stored is not None:
            done = already_done(
                stored, worker.checked, paths, session.as_step, session.display.warn
            )
            if done is not None:
                return done
        inputs = recorded_inputs(inputs, stored, where, asked_to_end)
        session.on_begin()
        if not waits:
            worker.begin(inputs, prepares=not joins)
        prepared, inputs = worker.prepare(inputs, session.meanwhile)
        provenance = provenance_of(worker.checked, prepared, session.study_file)
        session.before_measuring()
        remember_storage(paths, session.url, checked.config.name)
        stored = note_study(database, stored, worker.checked, lease, provenance, prepared, inputs)
        worker.run_trials(stored, inputs, prepared)
        return _read_after_others(database, stored, lease, asked_to_end)


def _await_study(
    database: RDBStorage,
    name: str,
    local_worker: LocalWorker | None,
    interrupted: Callable[[], bool],
) -> None:
    """Wait until there is a study to join.

    A local worker is notified by its command. A Slurm job may begin before the job that leads.
    """
    if local_worker is not None:
        local_worker.await_study(interrupted)
    while StudyStorage.load(database, name) is None:
        if interrupted():
            raise StudyInterrupted(BEFORE_A_TRIAL)
        time.sleep(LOOK_AGAIN_S)


def _read_after_others(
    database: RDBStorage, stored: StudyStorage, lease: Lease, interrupted: Callable[[], bool]
) -> StudyData:
    """Read the finished study; a leading worker first waits for the other workers to end.

    The others store the energy that they used while they ended, which belongs in the report. The
    wait is short, because one of them may still run a trial of a study that was interrupted.
    """
    deadline = time.monotonic() + (0.0 if lease.joins else _END_TOGETHER_S)
    study = stored.study.study_name
    while (
        time.monotonic() < deadline
        and living(database, study) - {lease.worker.id}
        and not interrupted()
    ):
        time.sleep(LOOK_AGAIN_S)
    return stored.read()


def _asked_to_end(lease: Lease, interrupted: Callable[[], bool]) -> bool:
    """Return `interrupted()`, after storing this worker's heartbeat if one is due."""
    lease.renew()
    return interrupted()
