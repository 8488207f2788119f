"""Checks whether folders of pretrained models have all weights that their configurations name."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import REWARDS
from carbonopt.study.asked import asked

_KEYS = ("model", *REWARDS)


def check_weights(studies: Iterable[tuple[StudyConfig, Collection[str]]]) -> None:
    """Check the names and shapes of the tensors in the studies' model folders.

    Models on a hub are not checked here, but in the preparation.

    Args:
        studies: Each study with the keys of its workload whose models are handed on in a pipeline,
            which are not checked.

    Raises:
        BadInput: If weights are missing, can't be read or have another shape.
        CarbonoptError: If the check itself fails.
    """
    question = []
    for config, handed_on in studies:
        if config.workload is not None and config.launch.trains:
            names = config.workload.names_or_paths
            if keys := [
                key
                for key in _KEYS
                if key in names and key not in handed_on and Path(names[key]).is_dir()
            ]:
                question.append((config.workload.model_dump(mode="json"), keys))
    if not question:
        return
    try:
        refusal = json.loads(asked("carbonopt.train.models.weight_check", json.dumps(question)))
    except CarbonoptError as error:
        raise CarbonoptError(
            f"the weights of {question[0][1][0]} can't be checked: {error}."
        ) from error
    if refusal is not None:
        raise BadInput(refusal)
