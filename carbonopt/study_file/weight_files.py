"""Checks whether folders of pretrained models have all weights that their configurations name."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import REWARDS
from carbonopt.study_file.answer_cache import CachedAnswer
from carbonopt.study_file.cached_check import CachedCheck
from carbonopt.study_file.model_questions import Answers

_KEYS = ("model", *REWARDS)


Studies = Iterable[tuple[StudyConfig, Collection[str]]]


def check_weights(studies: Studies, answers: Answers) -> list[str]:
    """Check the names and shapes of the tensors in the studies' model folders.

    Models on a hub are not checked here, but in the preparation.

    Args:
        studies: Each study with the keys of its workload whose models are handed on in a pipeline,
            which are not checked.
        answers: The process that is asked.

    Returns:
        Sentences on tensors of the folders that models leave unused.

    Raises:
        BadInput: If weights are missing, can't be read or have another shape.
        CarbonoptError: If the check itself fails.
    """
    check = _check_of(studies)
    return [] if check is None else check.run(answers)


def has_unchecked_weights(studies: Studies) -> bool:
    """Return whether `check_weights` has to read files of weights.

    It doesn't where these files have passed before and have not changed.
    """
    check = _check_of(studies)
    return check is not None and not check.has_passed


def _check_of(studies: Studies) -> CachedCheck | None:
    """Return the check of the studies' model folders; None: they have none."""
    asked, places = [], []
    for config, handed_on in studies:
        if config.workload is None or not config.launch.trains:
            continue
        names = config.workload.names_or_paths
        keys = [
            key
            for key in _KEYS
            if key in names and key not in handed_on and Path(names[key]).is_dir()
        ]
        if keys:
            asked.append((config.workload.model_dump(mode="json"), keys))
            places += [names[key] for key in keys]
    if not asked:
        return None
    question, first_key = json.dumps(asked), asked[0][1][0]
    cached = CachedAnswer("weights", question, places)
    return CachedCheck("weights", question, f"the weights of {first_key}", cached)
