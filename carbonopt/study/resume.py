"""Find the study that is stored, check that this call may resume it, and store what it knows."""

import dataclasses
import platform
from importlib.metadata import version

from optuna.storages import RDBStorage

import carbonopt
from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_data import InputFile, Provenance, StudyData
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.workers import Lease
from carbonopt.study.input_files import check_unchanged, input_files
from carbonopt.study.repeats import all_trials_run_text, next_repeat, with_confirmation
from carbonopt.study.session import Session
from carbonopt.study.study_checks import CheckedStudy, as_prepared

LEAD = "start it by `carbonopt run` without --worker and join it when its first trial has begun"


def load_stored(database: RDBStorage, session: Session) -> tuple[StudyStorage | None, Session]:
    """Return the stored study, if it has begun, and the session that resumes it.

    Raises:
        BadInput: If the storage holds another study, or there is none for a worker to join.
    """
    checked = session.checked
    stored = StudyStorage.load(database, checked.config.name)
    if session.joins and stored is None:
        raise BadInput(
            f"--worker joins a study, but {session.where} has none called"
            f" {checked.config.name!r} yet: {LEAD}."
        )
    checked = _as_stored(checked, stored, session.paths)
    if stored is not None:
        stored.check_same(checked.config, session.where, joins=session.joins)
        if session.joins:
            checked = _as_led(checked, stored)
    return stored, dataclasses.replace(session, checked=checked)


def recorded_inputs(
    inputs: tuple[InputFile, ...], stored: StudyStorage | None, session: Session
) -> tuple[InputFile, ...]:
    """Return the input files as the study recorded them; as they are, if it has no trials yet.

    Raises:
        BadInput: If they have changed since.
    """
    if stored is None or not (before := stored.read()).records or before.inputs is None:
        return inputs
    return check_unchanged(
        before.inputs, inputs, session.where, session.interrupted, may_write(before)
    )


def may_write(data: StudyData) -> tuple[TrialRecord, ...]:
    """Return the trials that can have written into the study's inputs: those of a user's script."""
    return data.records if data.config.is_script else ()


def _as_stored(
    checked: CheckedStudy, stored: StudyStorage | None, paths: StudyPaths
) -> CheckedStudy:
    """Return the checked study with the search space that an earlier call has chosen."""
    if checked.is_settled or stored is None:
        return checked
    prepared = stored.read().prepared
    if prepared is None:  # the earlier call was killed as soon as it had created the study
        return as_prepared(checked, paths.prepared)
    return checked if prepared.auto is None else checked.settled(prepared.auto)


def _as_led(checked: CheckedStudy, stored: StudyStorage) -> CheckedStudy:
    """Return the checked study with the leading call's budget and confirmation.

    Raises:
        BadInput: If this worker would give a trial another number of ranks.
    """
    led, own = stored.read().config, checked.config
    if led.launch.world_size != own.launch.world_size:
        rule = "the workers of a study must give a trial as many ranks, because trials are compared"
        raise BadInput(
            f"--worker: {rule}, but this one has {own.launch.world_size}, not"
            f" {led.launch.world_size}."
        )
    update = {"budget": led.budget, "confirm": led.confirm}
    return dataclasses.replace(checked, config=checked.config.model_copy(update=update))


def _check_alike(stored: Provenance, own: Provenance) -> None:
    """Raise BadInput if a joining worker's trials would not be comparable with the study's."""
    if stored.hardware is None or own.hardware is None:
        return
    theirs, ours = (
        f"{', '.join(hardware.gpus) or hardware.cpu} on {count_text(hardware.nodes, 'machine')}"
        for hardware in (stored.hardware, own.hardware)
    )
    if theirs != ours:
        rule = (
            "the workers of a study must have the same devices, because their trials' energy is"
            " compared"
        )
        raise BadInput(f"--worker: {rule}, but this one has {ours} and the study {theirs}.")


def note_study(
    database: RDBStorage,
    stored: StudyStorage | None,
    checked: CheckedStudy,
    lease: Lease,
    provenance: Provenance,
    prepared: Prepared | None,
    inputs: tuple[InputFile, ...],
) -> StudyStorage:
    """Store what is known before the first trial; create the study if it had not begun.

    Raises:
        BadInput: If a worker joins whose trials would not be comparable with the study's.
    """
    if stored is not None and lease.joins:
        _check_alike(stored.read().provenance, provenance)
        return stored
    if stored is not None:
        stored.refresh(checked.config, provenance)
    storage = stored or StudyStorage.create(database, checked.config, provenance)
    if prepared is not None:
        storage.set_prepared(prepared)
    storage.set_inputs(inputs)
    storage.set_trace(checked.trace)
    return storage


def already_done(stored: StudyStorage, session: Session) -> StudyData | None:
    """Return the study if nothing is left to do, without starting anything to find that out."""
    checked, paths = session.checked, session.paths
    config, trials = checked.config, checked.config.budget.trials
    if trials is None or (seen := stored.snapshot()).finished_count() < trials:
        return None
    data = seen.data.model_copy(update={"config": config})
    if next_repeat(data, checked.engine, paths, session.as_step) is not None:
        return None
    stored.set_trace(checked.trace)
    if config.is_script:
        try:
            files = input_files(config)
            check_unchanged(data.inputs or (), files, str(paths.root), lambda: False, data.records)
        except BadInput as error:
            session.display.warn(f"this answer is that of the earlier files: {error}")
    # The study was killed before it stored its end, or was interrupted and now has fewer trials.
    if data.ended is None:
        stored.refresh(config, data.provenance)
        why = with_confirmation(all_trials_run_text(trials), data, checked.engine)
        stored.set_ended(why, by_budget=True)
    return stored.read()


def provenance_of(checked: CheckedStudy, prepared: Prepared | None, study_file: str) -> Provenance:
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
        study_file=study_file,
    )
