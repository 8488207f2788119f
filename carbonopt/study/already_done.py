"""Find whether anything is left to do of a stored study, without starting anything."""

from collections.abc import Callable

from carbonopt.core.errors import BadInput
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData, wall_clock_s
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, has_storage, storage_url
from carbonopt.study.repeats import next_repeat, with_confirmation
from carbonopt.study.session import AsStep
from carbonopt.study.study_budget import all_trials_run, budget_used, limit_reached
from carbonopt.study_file.input_files import input_files, recorded_inputs
from carbonopt.study_file.study_checks import CheckedStudy, as_resumed


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
    checked = as_resumed(checked, stored, paths.prepared, str(paths.root), joins=False)
    return already_done(stored, checked, paths, warn)


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
    limit = limit_reached(checked, wall_clock_s(data.sessions) / 3600, data.spent_kwh())
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
    try:
        recorded_inputs(data, input_files(config), str(paths.root), lambda: False)
    except BadInput as error:
        warn(f"this answer is that of the earlier files: {error}")
    # The study was killed before it stored its end, was interrupted and now has fewer trials, or
    # its file has another budget or confirmation by now.
    is_stale = data.ended is None or not (joins or stays_ended)
    if is_stale and all_run is not None:
        stored.set_ended(None)
        stored.refresh(config, data.provenance)
        why = budget_used(config.budget.trials, seen, limit) or all_run
        stored.set_ended(with_confirmation(why, data, checked.engine, limit), by_budget=True)
    return stored.read()


def _stays_ended(data: StudyData, config: StudyConfig) -> bool:
    """Return whether a study has ended, and nothing that ends it was changed in its file since."""
    before = data.config
    return data.ended is not None and (
        (before.budget, before.confirm, before.search.learn_from)
        == (config.budget, config.confirm, config.search.learn_from)
    )
