"""Repeats of a study's configurations with other seeds: which is due, and what they showed."""

from carbonopt.analysis.confirmation import (
    Available,
    Repeat,
    confirmation_progress,
    outcome,
)
from carbonopt.analysis.pipeline_summary import handed_on
from carbonopt.core.trial import TrialState
from carbonopt.engines.engine import Engine
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.session import AsStep


def _available(engine: Engine) -> Available:
    return lambda seed, params: engine.seed(seed, params) == seed


def prefers_new(data: StudyData, engine: Engine) -> bool:
    """Return whether the confirmation should try a new configuration in place of a repeat."""
    if data.config.confirm is None:
        return False
    return confirmation_progress(data, _available(engine)).prefers_new


def next_repeat(
    data: StudyData, engine: Engine, paths: StudyPaths, as_step: AsStep | None
) -> Repeat | None:
    """Return the repeat that is due next; None if none is.

    Repeats are due for the study's confirmation. In a pipeline, each configuration whose model the
    next step takes is also repeated, until one run has saved its weights.
    """
    due = confirmation_progress(data, _available(engine)).next if data.config.confirm else None
    if due is not None or as_step is None:
        return due
    # Each configuration that is handed on is repeated at least once, to save its weights.
    for trial in handed_on(data, as_step.hands_on):
        own = [record for record in data.records if trial in (record.trial, record.repeat_of)]
        repeats = [record for record in own if record.repeat_of == trial and not record.was_cut_off]
        failed = any(record.state is not TrialState.COMPLETE for record in repeats)
        if not failed and not any(paths.trial_model(record.trial).is_dir() for record in repeats):
            return Repeat(trial=trial, seed=1 + max(record.seed for record in own))
    return None


def with_confirmation(ended: str, data: StudyData, engine: Engine, limit: str | None) -> str:
    """Return why a study ended, with what its confirmation has found or lacks, if it has one.

    These are sentences; the first begins in lower case, and the last has no full stop.

    Args:
        limit: Which limit of the budget is reached, in words; None: none is.
    """
    if data.config.confirm is None:
        return ended
    cut_off = None if limit is None or limit == ended else limit
    return f"{ended}. {outcome(data, _available(engine), cut_off)}"
