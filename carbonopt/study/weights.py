"""Asks whether folders with pretrained models have all weights that their configurations say."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from carbonopt.core.config import REWARDS, StudyConfig
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.study.asked import asked

_KEYS = ("model", *REWARDS)


def check_weights(studies: Iterable[tuple[StudyConfig, Collection[str]]]) -> None:
    """Reads the folders' names and shapes of tensors; of a hub's models nothing, which the preparation looks at. Beside
    a study: the keys of its workload whose models are others then, handed on in a pipeline. Raises BadInput where
    weights are missing, can't be read or have another shape; CarbonoptError where that can't be told."""
    question = []
    for config, handed_on in studies:
        if config.workload is not None and config.launch.trains:
            names = config.workload.names_or_paths
            if keys := [key for key in _KEYS if key in names and key not in handed_on and Path(names[key]).is_dir()]:
                question.append((config.workload.model_dump(mode="json"), keys))
    if not question:
        return
    try:
        refusal = json.loads(asked("carbonopt.train.weights", json.dumps(question)))
    except CarbonoptError as error:
        raise CarbonoptError(f"the weights of {question[0][1][0]} can't be checked: {error}.") from error
    if refusal is not None:
        raise BadInput(refusal)
