"""Run a whole study: prepare it, or find what an earlier call has stored, and run its trials."""

import contextlib
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import carbonopt
from carbonopt.core.errors import BadInput, MachineLost
from carbonopt.core.trial import Phase
from carbonopt.engines.engine import own_meter
from carbonopt.spec.study_data import InputFile, Provenance, StudyData
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.locked_storage import STUDY_S, Patience
from carbonopt.storage.reconnecting_storage import ReconnectingStorage
from carbonopt.storage.study_storage import StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, has_storage, remember_storage, storage_place
from carbonopt.storage.workers import Lease, leased
from carbonopt.study.account import EarlySessions, SessionAccount
from carbonopt.study.already_done import already_done
from carbonopt.study.session import Session
from carbonopt.study.start_schedule import check_schedule, now_in_utc
from carbonopt.study.trial_loop import TrialLoop
from carbonopt.study_file.input_files import (
    input_files,
    recorded_inputs,
    with_sha256,
    workload_fingerprint,
)
from carbonopt.study_file.study_checks import as_resumed

_LEAD = "start it by `carbonopt run` without --worker and join it when its first trial has begun"


def run_study(session: Session) -> StudyData:
    """Run a study until it ends, or resume it. docs/search.md says when a study ends.

    The caller holds the folder's lock.

    Raises:
        BadInput: Before this worker begins its first trial:
            - if another worker leads the study, or there is no study to join;
            - for a mistake that can be known before the engine begins;
            - for a mistake that the preparation finds;
            - for input files that have changed since an earlier call;
            - if this call's devices are not those of the study.
        StudyInterrupted: After `interrupted` returned True; the running trial has been put back.
        MeasurementError: If no energy can be measured.
        CarbonoptError: If the study can't go on, such as for input files that change meanwhile.
    """
    paths, joins, name = session.paths, session.joins, session.checked.config.name
    if joins and session.local_worker is None and not has_storage(paths, session.url):
        raise BadInput(f"--worker joins a study, but {paths.root} has none yet: {_LEAD}.")
    patience = Patience(
        STUDY_S, session.display.warn, session.interrupted, partial(_say_stalled, session)
    )
    url, noted_study = storage_place(paths, session.url)
    database = connect(url, must_exist=joins, patience=patience)
    check_folder_is_free(database, paths, name, noted_study)
    with (
        leased(database, name, joins=joins) as lease,
        contextlib.closing(session.checked.engine),
    ):
        interrupted = partial(_renew_and_ask, lease, session.interrupted)
        return _run_leased(database, replace(session, interrupted=interrupted), lease)


def _run_leased(database: ReconnectingStorage, session: Session, lease: Lease) -> StudyData:
    """Run a study as the worker that holds the lease; see `run_study`."""
    paths, joins, where = session.paths, session.joins, _where_stored(session)
    checked = session.checked
    name = checked.config.name
    early = EarlySessions(paths.early_sessions)
    if not joins:  # the leading call may be moving them meanwhile
        early.check()
    inputs = input_files(checked.config)
    waits_for_leader = _waits_for_leader(session)
    if waits_for_leader:
        # From here on its devices' energy counts for the study, even while it waits.
        account = _begin_engine(session, inputs, lease.worker.id, prepares=False)
        with account.stored_if_it_ends(early):
            if session.local_worker is not None:
                session.local_worker.await_study(session.interrupted)
            StudyStorage.await_begun(database, name, session.interrupted)
    stored = StudyStorage.load(database, name)
    if stored is None:
        if joins:
            none = f"{where} has none called {name!r} yet"
            raise BadInput(f"--worker joins a study, but {none}: {_LEAD}.")
        check_schedule(checked, now_in_utc())
    else:
        checked = as_resumed(checked, stored, paths.prepared, where, joins=joins)
        session = replace(session, checked=checked)
        if not joins:
            early.move_to(stored)
            # An earlier call's plan: this one may have another schedule, and plans anew.
            stored.set_planned_start(None)
        if waits_for_leader:
            # What it used while it waited counts, even if no trial is left for it.
            account.store(stored)
        warn, as_step = session.display.warn, session.as_step
        done = already_done(stored, checked, paths, warn, as_step, joins=joins)
        if done is not None:
            return done
        inputs = recorded_inputs(stored.read(), inputs, where, session.interrupted)
    session.local_workers.begin()
    for warning in session.warnings:
        session.display.warn(warning)
    if not waits_for_leader:
        account = _begin_engine(session, inputs, lease.worker.id, prepares=not joins)
    with account.stored_after(stored or early):
        # The meter has begun, so that hashing counts as preparation.
        inputs = with_sha256(inputs, session.interrupted)
        session, prepared = _prepare(session)
    lease.renew()
    stored = _begin_study(database, stored, session, prepared, inputs)
    if not joins:
        early.move_to(stored)
    try:
        return TrialLoop(session, lease, account, stored, prepared, inputs).run()
    except MachineLost:
        account.store_unread(stored)
        raise


def _waits_for_leader(session: Session) -> bool:
    """Return whether a worker waits for the study, as it may begin before the call that leads.

    A local worker is notified by its command. A job of Slurm looks for the study.
    """
    is_job = session.joins and session.checked.config.launch.kind == "slurm"
    return session.local_worker is not None or is_job


def _where_stored(session: Session) -> str:
    """Return the place of the stored study, in the user's words, without the storage's URL."""
    return str(session.paths.root) if session.url is None else "the storage"


def _begin_engine(
    session: Session, inputs: Sequence[InputFile], worker: str, *, prepares: bool
) -> SessionAccount:
    """Start a session's engine and its meter, and open the account (see `Engine.begin`)."""
    checked, as_step = session.checked, session.as_step
    engine = checked.engine
    engine.begin(
        session.paths,
        workload_fingerprint(checked.config, inputs, auto=checked.auto is not None),
        session.display,
        session.interrupted,
        own_meter if as_step is None else as_step.meter_provider,
        prepares=prepares,
    )
    return SessionAccount(engine, worker)


def _prepare(session: Session) -> tuple[Session, Prepared | None]:
    """Wait until trials can be started.

    Returns:
        The session, whose search space may have been chosen only now, and what has been prepared.
    """
    checked = session.checked
    with ThreadPoolExecutor(1) as aside:
        done = aside.submit(session.meanwhile)
        prepared = checked.engine.prepare(session.interrupted)
        if prepared is not None:
            if not checked.is_settled:
                checked = checked.settled(prepared)
            checked.space.check_fits(prepared.train_examples)
        checked.engine.meter.enter(Phase.GAP)
    done.result()
    return replace(session, checked=checked), prepared


def _begin_study(
    database: ReconnectingStorage,
    stored: StudyStorage | None,
    session: Session,
    prepared: Prepared | None,
    inputs: tuple[InputFile, ...],
) -> StudyStorage:
    """Store what is known before the first trial; create the study if it had not begun.

    Raises:
        BadInput: If this call's trials would not be comparable with the study's.
    """
    checked, joins = session.checked, session.joins
    provenance = _provenance(session, prepared)
    session.before_measuring()
    remember_storage(session.paths, session.url, checked.config.name)
    if stored is not None:
        stored.check_same_devices(provenance, joins=joins)
        if joins:
            return stored
        # Clear the end first: if this call were killed before it stores the new study file, the
        # next one would find the old file's end, and take the study for ended.
        stored.set_ended(None)
        stored.set_id()
        stored.refresh(checked.config, provenance)
    storage = stored or StudyStorage.create(database, checked.config, provenance)
    if prepared is not None:
        storage.set_prepared(prepared)
    storage.set_inputs(inputs)
    storage.set_trace(checked.trace)
    return storage


def _provenance(session: Session, prepared: Prepared | None) -> Provenance:
    checked = session.checked
    # The versions of what decides proposals and figures in this process; the preparation adds those
    # of the trials' packages.
    versions = {"carbonopt": carbonopt.__version__, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("optuna", "codecarbon")}
    return Provenance(
        hardware=checked.engine.hardware,
        versions=versions | (prepared.versions if prepared else {}),
        intensity=checked.intensity,
        energy_source=checked.engine.meter.energy_source,
        models=checked.engine.meter.models,
        study_file=session.study_file,
    )


def _say_stalled(session: Session, text: str) -> None:
    if session.notifications is not None:
        session.notifications.send("stalled", f"The study may stand still: {text}")


def _renew_and_ask(lease: Lease, interrupted: Callable[[], bool]) -> bool:
    """Store this worker's heartbeat, if one is due, and return whether the study is to end."""
    lease.renew()
    return interrupted()
