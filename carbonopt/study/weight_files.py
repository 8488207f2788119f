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
    asked = _Question.of(studies)
    if asked is None:
        return []
    if (known := asked.cached.read(_notes)) is not None:
        return known
    try:
        answer = answers.ask("weights", asked.text)
    except CarbonoptError as error:
        raise CarbonoptError(f"the weights of {asked.key} can't be checked: {error}.") from error
    notes = _notes(answer)
    if notes is None:
        raise BadInput(json.loads(answer))
    asked.cached.keep(answer)
    return notes


def has_unchecked_weights(studies: Studies) -> bool:
    """Return whether `check_weights` has to read files of weights.

    It doesn't where these files have passed before and have not changed.
    """
    asked = _Question.of(studies)
    return asked is not None and asked.cached.read(_notes) is None


@dataclass(frozen=True)
class _Question:
    """A question about weights."""

    text: str
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
        return cls(question, asked[0][1][0], CachedAnswer("weights", question, places))


def _notes(answer: str) -> list[str] | None:
    """Return the sentences of an answer that accepts the weights; None if it refuses them."""
    notes = parsed_json(answer)
    return notes if isinstance(notes, list) else None
