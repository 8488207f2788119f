"""What a trial's process does while it waits to be told which trial it is: it loads the kernels, and draws the random
model that the trial will most likely train. On a CPU there is nothing to load, so that nothing here is called."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, set_seed

from carbonopt.core.files import PreparedFolder
from carbonopt.core.trial import Prepared, TrialSpec
from carbonopt.train.model import parameter_count, random_model
from carbonopt.train.tasks.trainer_task import TrainerTask

# Parameters beside another trial that runs; both are 1 GB.
_MOST_PARAMETERS = 250_000_000  # of a model that waits in the host's memory, in float32
_MOST_WARMED_UP = 60_000_000  # of one that kernels are loaded by, with gradients and optimizer


class _Prefetched(NamedTuple):
    folder: PreparedFolder
    seed: int
    model: PreTrainedModel
    generators: tuple[Any, Any, torch.Tensor]  # Python's, NumPy's and torch's, as they stood afterwards


_prefetched: _Prefetched | None = None


def prefetch_model(task: TrainerTask, folder: PreparedFolder, prepared: Prepared, seed: int) -> None:
    """Draws the model of the prepared configuration, unless it is too big to wait or needs code from elsewhere."""
    global _prefetched
    config = AutoConfig.from_pretrained(folder.model_config)
    if hasattr(config, "auto_map") or prepared.model_parameters > _MOST_PARAMETERS:
        return
    set_seed(seed)
    model = random_model(task.model_kind, config, attention=None, trust_remote_code=False)
    _prefetched = _Prefetched(folder, seed, model, (random.getstate(), np.random.get_state(), torch.get_rng_state()))


def take_prefetched_model(spec: TrialSpec) -> PreTrainedModel | None:
    """The model that was drawn, once, if it is the one that the trial would draw from its seed now. The generators then
    stand as if it just had."""
    global _prefetched
    prefetched, _prefetched = _prefetched, None
    if prefetched is None or spec.params.attention_implementation is not None:
        return None
    if (prefetched.folder, prefetched.seed) != (PreparedFolder(Path(spec.prepared_dir)), spec.seed):
        return None
    python, numpy, cpu = prefetched.generators
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    return prefetched.model


def warm_up_kernels(task: TrainerTask, folder: PreparedFolder, prepared: Prepared, device: torch.device) -> None:
    """One step of a model of the workload's kind with a single layer. Nothing that it draws or learns is kept."""
    config = AutoConfig.from_pretrained(folder.model_config)
    config.num_hidden_layers = 1
    kind = task.model_kind
    if hasattr(config, "auto_map") or parameter_count(kind, config, trust_remote_code=False) > _MOST_WARMED_UP:
        return
    with device:
        model = kind.auto().from_config(config, dtype=torch.bfloat16)
    master = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(master, fused=True)
    model.train()
    task.example_loss(model, prepared).backward()
    for weights, parameter in zip(master, model.parameters(), strict=True):
        weights.grad = torch.zeros_like(weights) if parameter.grad is None else parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        task.example_loss(model, prepared)
