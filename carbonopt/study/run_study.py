"""Run a whole study: prepare it, or find what an earlier call has stored, and run its trials."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from carbonopt.core.errors import BadInput, MachineLost
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.locked_storage import STUDY_S, Patience
from carbonopt.storage.reconnecting_storage import ReconnectingStorage
from carbonopt.storage.study_storage import StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, has_storage, storage_place
from carbonopt.storage.workers import Lease, leased
from carbonopt.study.account import EarlySessions, SessionAccount
from carbonopt.study.already_done import already_done
from carbonopt.study.input_files import input_files, recorded_inputs, with_sha256
from carbonopt.study.session import Session
from carbonopt.study.start_schedule import check_schedule, now_in_utc
from carbonopt.study.study_beginning import begin_study, prepare
from carbonopt.study.study_checks import as_resumed
from carbonopt.study.trial_loop import TrialLoop

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
    paths, joins = session.paths, session.joins
    checked = session.checked
    name = checked.config.name
    early = EarlySessions(paths.early_sessions)
    if not joins:  # the leading call may be moving them meanwhile
        early.check()
    inputs = input_files(checked.config)
    if session.waits_for_leader:
        # The energy of its devices is the study's from here on, also while it waits.
        account = SessionAccount.begin(session, inputs, lease.worker.id, prepares=False)
        with account.stored_if_it_ends(early):
            if session.local_worker is not None:
                session.local_worker.await_study(session.interrupted)
            StudyStorage.await_begun(database, name, session.interrupted)
    stored = StudyStorage.load(database, name)
    if stored is None:
        if joins:
            none = f"{session.where} has none called {name!r} yet"
            raise BadInput(f"--worker joins a study, but {none}: {_LEAD}.")
        check_schedule(checked, now_in_utc())
    else:
        checked = as_resumed(checked, stored, paths.prepared, session.where, joins=joins)
        session = replace(session, checked=checked)
        if not joins:
            early.move_to(stored)
            # An earlier call's plan: this one may have another schedule, and plans anew.
            stored.set_planned_start(None)
        if session.waits_for_leader:
            # What it used while it waited counts, even if no trial is left for it.
            account.store(stored)
        warn, as_step = session.display.warn, session.as_step
        done = already_done(stored, checked, paths, warn, as_step, joins=joins)
        if done is not None:
            return done
        inputs = recorded_inputs(stored.read(), inputs, session.where, session.interrupted)
    session.on_begin()
    if not session.waits_for_leader:
        account = SessionAccount.begin(session, inputs, lease.worker.id, prepares=not joins)
    with account.stored_after(stored or early):
        # The meter has begun, so that hashing counts as preparation.
        inputs = with_sha256(inputs, session.interrupted)
        session, prepared = prepare(session)
    lease.renew()
    stored = begin_study(database, stored, session, prepared, inputs)
    if not joins:
        early.move_to(stored)
    try:
        return TrialLoop(session, lease, account, stored, prepared, inputs).run()
    except MachineLost:
        account.store_unread(stored)
        raise


def _say_stalled(session: Session, text: str) -> None:
    if session.notifications is not None:
        session.notifications.send("stalled", f"The study may stand still: {text}")


def _renew_and_ask(lease: Lease, interrupted: Callable[[], bool]) -> bool:
    """Store this worker's heartbeat, if one is due, and return whether the study is to end."""
    lease.renew()
    return interrupted()
