"""Prepare a study's trials, and begin or resume the study in its storage."""

import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version

import carbonopt
from carbonopt.core.trial import Phase
from carbonopt.spec.study_data import InputFile, Provenance
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.reconnecting_storage import ReconnectingStorage
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import remember_storage
from carbonopt.study.session import Session


def prepare(session: Session) -> tuple[Session, Prepared | None]:
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


def begin_study(
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
