"""Choose the search space of `space: auto` from the model and the prepared data."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.space.auto_space import choose
from carbonopt.spec.auto_facts import AutoSpace, known_facts
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train.models.model_check import FLOAT8_CAPABILITY, lacking
from carbonopt.train.tasks.trainer_task import TrainerTask


def chosen_space(
    task: TrainerTask, config: PreTrainedConfig, prepared: Prepared, world_size: int
) -> AutoSpace:
    """Return the space that suits the prepared data, the model and this process's GPU."""
    facts = known_facts(task.workload, world_size, torch.cuda.is_available())
    text = config.get_text_config()
    known: dict[str, Any] = {
        "parameters": prepared.model_parameters,
        "layers": getattr(text, "num_hidden_layers", None),
        "width": getattr(text, "hidden_size", None),
        "vocab_size": prepared.vocab_size,
        "train_examples": prepared.train_examples,
        "train_tokens": prepared.train_tokens,
    }
    if facts.on_gpu:
        known["gpu_memory_gib"] = torch.cuda.get_device_properties(0).total_memory / BYTES_PER_GIB
        known["has_bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        known["has_float8"] = torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
    chosen = choose(facts.model_copy(update=known))
    if not (lacks := lacking(task, config, chosen.space)):
        return chosen
    return choose(chosen.facts.model_copy(update={"lacking": chosen.facts.lacking | lacks}))
