"""Repeats of a study's configurations with other seeds: which is due, and what they showed."""

from carbonopt.analysis.confirmation import Available, Repeat, confirmation_progress, outcome
from carbonopt.analysis.pipeline_summary import handed_on
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.engines.engine import Engine
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.session import AsStep

_NOT_ENDED = (StopReason.INTERRUPTED, StopReason.BUDGET)


def _available(engine: Engine) -> Available:
    return lambda seed, params: engine.seed(seed, params) == seed


def next_repeat(
    data: StudyData, engine: Engine, paths: StudyPaths, as_step: AsStep | None
) -> Repeat | None:
    due = confirmation_progress(data, _available(engine)).next if data.config.confirm else None
    if due is not None or as_step is None:
        return due
    # Each configuration that is handed on is repeated at least once, to save its weights.
    for trial in handed_on(data, as_step.hands_on):
        own = [record for record in data.records if trial in (record.trial, record.repeat_of)]
        repeats = [
            record
            for record in own
            if record.repeat_of == trial and record.stop_reason not in _NOT_ENDED
        ]
        failed = any(record.state is not TrialState.COMPLETE for record in repeats)
        if not failed and not any(paths.trial_model(record.trial).is_dir() for record in repeats):
            return Repeat(trial=trial, seed=1 + max(record.seed for record in own))
    return None


def all_trials_run_text(trials: int) -> str:
    if trials == 1:
        return "the one trial of the budget has been run"
    return f"all {trials} trials of the budget have been run"


def with_confirmation(ended: str, data: StudyData, engine: Engine) -> str:
    return ended if data.config.confirm is None else f"{ended}; {outcome(data, _available(engine))}"
