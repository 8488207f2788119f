"""Removes what a script's trials have written into their `{output_dir}`.

`workload.keep_outputs` says which outputs are kept.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from carbonopt.analysis.front import pareto_front
from carbonopt.analysis.recommend import recommend
from carbonopt.core.files import remove
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths


def remove_outputs(
    data: StudyData, paths: StudyPaths, warn: Callable[[str], None], *, ended: bool
) -> None:
    """Remove the outputs that are not needed any more; records, logs and measurements stay.

    Args:
        data: The study as it is stored; only outputs of its trials can be removed.
        warn: Called for each output that can't be removed.
        ended: Whether no trial is running or will follow. Until then, each trial on the Pareto
            front may become the answer. With `confirm`, every complete trial may: repeats can move
            a configuration to another place.
    """
    workload = data.config.workload
    keeps = "all" if workload is None else (workload.model_extra or {}).get("keep_outputs", "all")
    if keeps == "all":
        return
    needed = set[int]()
    if keeps == "winner":
        needed = _answer(data) if ended else _candidates(data)
    for folder in _outputs(
        (record for record in data.records if record.trial not in needed), paths
    ):
        try:
            remove(folder)
        except OSError as error:
            warn(f"{folder} can't be removed: {error.strerror}; workload.keep_outputs is {keeps}.")


def _candidates(data: StudyData) -> set[int]:
    """Return the trials that may become the answer while the study goes on."""
    if data.config.confirm is None:
        return set(pareto_front(data.records))
    return {
        record.trial
        for record in data.records
        if record.repeat_of is None and record.state is TrialState.COMPLETE
    }


def _answer(data: StudyData) -> set[int]:
    """Return the recommended trial, or the one closest to the target; empty if none completed."""
    recommendation = recommend(data)
    closest = None if recommendation.closest is None else recommendation.closest.trial
    trial = closest if recommendation.trial is None else recommendation.trial
    return set() if trial is None else {trial}


def _outputs(records: Iterable[TrialRecord], paths: StudyPaths) -> list[Path]:
    """Return the output folders of trials that have finished and will not be run again."""
    over = (record.trial for record in records if record.has_finished)
    return [folder for number in over for folder in paths.trial_outputs(number)]
