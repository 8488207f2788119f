"""Find the study that is stored, check that this call may resume it, and whether it is done."""

import dataclasses
from collections.abc import Callable

from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import InputFile, StudyData, wall_clock_s
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.reconnecting_storage import ReconnectingStorage
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, has_storage, storage_url
from carbonopt.study.input_files import check_unchanged, input_files
from carbonopt.study.repeats import next_repeat, with_confirmation
from carbonopt.study.session import AsStep, Session
from carbonopt.study.study_budget import all_trials_run
from carbonopt.study.study_checks import CheckedStudy, as_prepared

LEAD = "start it by `carbonopt run` without --worker and join it when its first trial has begun"


def load_stored(
    database: ReconnectingStorage, session: Session
) -> tuple[StudyStorage | None, Session]:
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
        checked = _as_begun(checked, stored)
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
    return checked if prepared.auto is None else checked.settled(prepared)


def _as_begun(checked: CheckedStudy, stored: StudyStorage) -> CheckedStudy:
    """Return the checked study with the carbon intensity that it began with.

    The bundled data of another CodeCarbon may have another figure for the same country, and a study
    has one for all its trials, whose emissions are compared.
    """
    return dataclasses.replace(checked, intensity=stored.read().provenance.intensity)


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


def ended_study(
    checked: CheckedStudy, paths: StudyPaths, url: str | None, warn: Callable[[str], None]
) -> StudyData | None:
    """Return a stored study of which nothing is left to do; None if there is none.

    Raises:
        BadInput: If the storage holds another study.
    """
    if not has_storage(paths, url):
        return None
    database = connect(storage_url(paths, url), must_exist=True)
    stored = StudyStorage.load(database, checked.config.name)
    if stored is None:
        return None
    checked = _as_stored(checked, stored, paths)
    stored.check_same(checked.config, str(paths.root), joins=False)
    return already_done(stored, _as_begun(checked, stored), paths, warn)


def already_done(
    stored: StudyStorage,
    checked: CheckedStudy,
    paths: StudyPaths,
    warn: Callable[[str], None],
    as_step: AsStep | None = None,
    *,
    joins: bool = False,
) -> StudyData | None:
    """Return the study if nothing is left to do, without starting anything to find that out.

    A joining worker does not rely on a stored end: the leading call may be about to go on with a
    larger budget.
    """
    config, seen = checked.config, stored.snapshot()
    all_run = all_trials_run(config.budget.trials, seen)
    stays_ended = not joins and _stays_ended(seen.data, config)
    if all_run is None and not stays_ended:
        return None
    data = seen.data.model_copy(update={"config": config})
    limit = checked.limit_reached(wall_clock_s(data.sessions) / 3600, data.spent_kwh())
    may_repeat = not stays_ended or limit is None  # no repeat begins with a budget that is used up
    if may_repeat and next_repeat(data, checked.engine, paths, as_step) is not None:
        return None
    stored.set_id()
    stored.set_trace(checked.trace)
    # Embodied emissions only price measurements, so they may be set later, like the trace.
    embodied, before = config.carbon.embodied, seen.data.config
    if embodied != before.carbon.embodied:
        carbon = before.carbon.model_copy(update={"embodied": embodied})
        stored.refresh(before.model_copy(update={"carbon": carbon}), data.provenance)
    if config.is_script:
        try:
            files = input_files(config)
            check_unchanged(data.inputs or (), files, str(paths.root), lambda: False, data.records)
        except BadInput as error:
            warn(f"this answer is that of the earlier files: {error}")
    # The study was killed before it stored its end, or was interrupted and now has fewer trials.
    if data.ended is None and all_run is not None:
        stored.refresh(config, data.provenance)
        stored.set_ended(with_confirmation(all_run, data, checked.engine), by_budget=True)
    return stored.read()


def _stays_ended(data: StudyData, config: StudyConfig) -> bool:
    """Return whether a study has ended, and nothing that ends it was changed in its file since."""
    before = data.config
    return data.ended is not None and (
        (before.budget, before.confirm, before.search.learn_from)
        == (config.budget, config.confirm, config.search.learn_from)
    )
