"""Checks the keys of a workload that only DeepSpeed and transformers know."""

import json

from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.answer_cache import CachedAnswer
from carbonopt.study_file.cached_check import CachedCheck
from carbonopt.study_file.model_questions import Answers


def check_library_keys(config: StudyConfig, answers: Answers) -> None:
    """Check the keys of `workload.deepspeed` and `workload.training_arguments`.

    Args:
        config: The study.
        answers: The process that is asked, which has the libraries.

    Raises:
        BadInput: If a key is unknown, has a wrong value or is carbonopt's to set.
        CarbonoptError: If the check itself fails.
    """
    if (check := _check_of(config)) is not None:
        check.run(answers)


def has_unchecked_keys(config: StudyConfig) -> bool:
    """Return whether `check_library_keys` has to ask, because no earlier answer accepted them."""
    check = _check_of(config)
    return check is not None and not check.has_passed


def _check_of(config: StudyConfig) -> CachedCheck | None:
    """Return the check of a study's keys; None: it has none of them."""
    workload = config.workload
    if workload is None or workload.is_script or not config.launch.trains:
        return None
    if not workload.deepspeed and not workload.training_arguments:
        return None
    parts = (workload, config.search.space)
    question = json.dumps([part.model_dump(mode="json") for part in parts])
    cached = CachedAnswer("keys", question, ())
    return CachedCheck("keys", question, "the keys of workload", cached)
