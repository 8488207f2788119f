"""Checks whether folders of pretrained models have all weights that their configurations name."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import parsed_json
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import REWARDS
from carbonopt.study.answer_cache import CachedAnswer
from carbonopt.study.model_questions import Answers

_KEYS = ("model", *REWARDS)


Studies = Iterable[tuple[StudyConfig, Collection[str]]]


def check_weights(studies: Studies, answers: Answers) -> None:
    """Check the names and shapes of the tensors in the studies' model folders.

    Models on a hub are not checked here, but in the preparation.

    Args:
        studies: Each study with the keys of its workload whose models are handed on in a pipeline,
            which are not checked.
        answers: The process that is asked.

    Raises:
        BadInput: If weights are missing, can't be read or have another shape.
        CarbonoptError: If the check itself fails.
    """
    unchecked = _Unchecked.of(studies)
    if unchecked is None:
        return
    try:
        answer = answers.ask("weights", unchecked.question)
    except CarbonoptError as error:
        raise CarbonoptError(
            f"the weights of {unchecked.key} can't be checked: {error}."
        ) from error
    if (refusal := json.loads(answer)) is not None:
        raise BadInput(refusal)
    unchecked.cached.keep(answer)


def has_unchecked_weights(studies: Studies) -> bool:
    """Return whether `check_weights` has to read files of weights.

    It doesn't where these files have passed before and have not changed.
    """
    return _Unchecked.of(studies) is not None


@dataclass(frozen=True)
class _Unchecked:
    """A question about weights that no earlier answer has accepted."""

    question: str
    key: str  # the first key of a workload that it is about
    cached: CachedAnswer

    @classmethod
    def of(cls, studies: Studies) -> Self | None:
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
        question = json.dumps(asked)
        cached = CachedAnswer("weights", question, places)
        if cached.read(_accepted):
            return None
        return cls(question, asked[0][1][0], cached)


def _accepted(answer: str) -> bool:
    return parsed_json(answer) is None
