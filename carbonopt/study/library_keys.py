"""Checks the keys of a workload that only DeepSpeed and transformers know."""

import json
from dataclasses import dataclass
from typing import Self

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import parsed_json
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study.answer_cache import CachedAnswer
from carbonopt.study.model_questions import Answers


def check_library_keys(config: StudyConfig, answers: Answers) -> None:
    """Check the keys of `workload.deepspeed` and `workload.training_arguments`.

    Args:
        config: The study.
        answers: The process that is asked, which has the libraries.

    Raises:
        BadInput: If a key is unknown, has a wrong value or is carbonopt's to set.
        CarbonoptError: If the check itself fails.
    """
    unchecked = _UncheckedKeys.of(config)
    if unchecked is None:
        return
    try:
        answer = answers.ask("keys", unchecked.question)
    except CarbonoptError as error:
        raise CarbonoptError(f"the keys of workload can't be checked: {error}.") from error
    if (refusal := json.loads(answer)) is not None:
        raise BadInput(refusal)
    unchecked.cached.keep(answer)


def has_unchecked_keys(config: StudyConfig) -> bool:
    """Return whether `check_library_keys` has to ask, because no earlier answer accepted them."""
    return _UncheckedKeys.of(config) is not None


@dataclass(frozen=True)
class _UncheckedKeys:
    """A question about keys that no earlier answer has accepted."""

    question: str
    cached: CachedAnswer

    @classmethod
    def of(cls, config: StudyConfig) -> Self | None:
        workload = config.workload
        if workload is None or workload.is_script or not config.launch.trains:
            return None
        if not workload.deepspeed and not workload.training_arguments:
            return None
        parts = (workload, config.search.space)
        question = json.dumps([part.model_dump(mode="json") for part in parts])
        cached = CachedAnswer("keys", question, ())
        return None if cached.read(_accepted) else cls(question, cached)


def _accepted(answer: str) -> bool:
    return parsed_json(answer) is None
