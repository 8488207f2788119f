"""Run a whole study: prepare it, or find what an earlier call has stored, and run its trials."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from optuna.storages import RDBStorage

from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.trial import Phase
from carbonopt.engines.engine import own_meter
from carbonopt.spec.study_data import InputFile, StudyData
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.locked_storage import STUDY_S, Patience
from carbonopt.storage.study_storage import StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, has_storage, remember_storage, storage_url
from carbonopt.storage.workers import Lease, leased, living
from carbonopt.study.account import SessionAccount
from carbonopt.study.input_files import input_files, with_sha256, workload_fingerprint
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
from carbonopt.study.study_checks import CheckedStudy
from carbonopt.study.trial_loop import LOOK_AGAIN_S, TrialLoop

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
        inputs = input_files(checked.config)
        waits_for_leader = session.local_worker is not None or (
            joins and checked.config.launch.kind == "slurm"
        )
        if waits_for_leader:
            # The energy of its devices is the study's from here on, also while it waits.
            account = _begin_engine(session, checked, inputs, lease, asked_to_end, prepares=False)
            _await_study(database, checked.config.name, session.local_worker, asked_to_end)
        stored, checked = load_stored(database, checked, paths, where, joins=joins)
        if stored is not None:
            done = already_done(stored, checked, paths, session.as_step, session.display.warn)
            if done is not None:
                return done
        inputs = recorded_inputs(inputs, stored, where, asked_to_end)
        session.on_begin()
        if not waits_for_leader:
            account = _begin_engine(
                session, checked, inputs, lease, asked_to_end, prepares=not joins
            )
        # Hashed after the meter has begun, so that the energy of it is measured as preparation.
        inputs = with_sha256(inputs, asked_to_end)
        checked, prepared = _prepare(checked, session.meanwhile, asked_to_end)
        lease.renew()
        provenance = provenance_of(checked, prepared, session.study_file)
        session.before_measuring()
        remember_storage(paths, session.url, checked.config.name)
        stored = note_study(database, stored, checked, lease, provenance, prepared, inputs)
        session = replace(session, checked=checked, interrupted=asked_to_end)
        TrialLoop(session, lease, account, stored, prepared).run(inputs)
        return _read_after_others(database, stored, lease, asked_to_end)


def _begin_engine(
    session: Session,
    checked: CheckedStudy,
    inputs: tuple[InputFile, ...],
    lease: Lease,
    interrupted: Callable[[], bool],
    *,
    prepares: bool,
) -> SessionAccount:
    """Start the engine and its meter (for `prepares` see `Engine.begin`), and open the account."""
    as_step = session.as_step
    checked.engine.begin(
        session.paths,
        workload_fingerprint(checked.config, inputs, auto=checked.auto is not None),
        session.display,
        interrupted,
        own_meter if as_step is None else as_step.meter_provider,
        prepares=prepares,
    )
    return SessionAccount(checked.engine, lease.worker.id)


def _prepare(
    checked: CheckedStudy, meanwhile: Callable[[], None], interrupted: Callable[[], bool]
) -> tuple[CheckedStudy, Prepared | None]:
    """Wait until trials can be started.

    Returns:
        The checked study, with the search space if it has only now been chosen, and what has been
        prepared.
    """
    with ThreadPoolExecutor(1) as aside:
        done = aside.submit(meanwhile)
        prepared = checked.engine.prepare(interrupted)
        if prepared is not None:
            if not checked.is_settled:
                assert prepared.auto is not None
                checked = checked.settled(prepared.auto)
            checked.space.check_fits(prepared.train_examples)
        checked.engine.meter.enter(Phase.GAP)
    done.result()
    return checked, prepared


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
