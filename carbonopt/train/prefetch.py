"""The random model that a trial will most likely train, drawn while its process waits to be told which trial it is."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from carbonopt.core.files import PreparedFolder
from carbonopt.core.trial import Prepared, TrialSpec
from carbonopt.train.model import random_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Parameters of a model that waits in the host's memory beside the trial that runs; in float32 1 GB.
_MOST_PARAMETERS = 250_000_000


@dataclass(frozen=True)
class _Drawn:
    folder: PreparedFolder
    seed: int
    model: "PreTrainedModel"
    generators: tuple[Any, Any, torch.Tensor]  # Python's, NumPy's and torch's, as they stood afterwards


_drawn: _Drawn | None = None


def draw(folder: PreparedFolder, prepared: Prepared, seed: int) -> None:
    """Draws the model of the prepared configuration, unless it is too big to wait or needs code from elsewhere."""
    from transformers import AutoConfig, set_seed

    global _drawn
    config = AutoConfig.from_pretrained(folder.model_config)
    if hasattr(config, "auto_map") or prepared.model_parameters > _MOST_PARAMETERS:
        return
    set_seed(seed)
    model = random_model(config, attention=None, trust_remote_code=False)
    _drawn = _Drawn(folder, seed, model, (random.getstate(), np.random.get_state(), torch.get_rng_state()))


def taken(spec: TrialSpec) -> "PreTrainedModel | None":
    """The model that was drawn, once, if it is the one that the trial would draw from its seed now. The generators then
    stand as if it just had."""
    global _drawn
    drawn, _drawn = _drawn, None
    if drawn is None or (drawn.folder, drawn.seed) != (PreparedFolder(Path(spec.prepared_dir)), spec.seed):
        return None
    if spec.params.attention_implementation is not None:
        return None
    python, numpy, cpu = drawn.generators
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    return drawn.model
