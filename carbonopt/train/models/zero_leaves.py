"""The parts of a model that ZeRO-3 gathers and reduces as one, DeepSpeed's leaf modules.

DeepSpeed otherwise prepares every submodule by itself, in Python: with 24 layers that takes longer
than a small GPU kernel does.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from carbonopt.core.errors import BadInput
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Domain, ends_of
from carbonopt.spec.trial_spec import ZeroLeaves
from carbonopt.train.failures import reason
from carbonopt.train.models.gpu_operations import no_autocast
from carbonopt.train.models.live_memory import LiveMemory
from carbonopt.train.models.model import random_model, with_lora
from carbonopt.train.tasks.trainer_task import TrainerTask

_UNRUNNABLE = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError)
_THRESHOLD = "stage3_module_granularity_threshold"
_CHOICES = (_THRESHOLD, "leaf_module")


def zero_leaves(
    task: TrainerTask, config: PreTrainedConfig, folder: PreparedFolder, lora_rank: Domain | None
) -> ZeroLeaves | None:
    """Return the model's blocks that can be leaves, such as LlamaDecoderLayer, by their classes.

    These are the classes that transformers never splits among devices, where they are repeated in a
    list. The model runs without numbers on an example of the prepared folder.

    Args:
        lora_rank: The ranks of adapters in the search space, whose model has other names; leaves
            that the study chooses must be there in each of its models.

    Returns:
        The leaves; without classes if the study chooses them. None: there are none.

    Raises:
        BadInput: `workload.deepspeed` chooses a leaf that a model lacks, or that DeepSpeed would
            not train.
    """
    zero = task.workload.deepspeed.get("zero_optimization", {})
    if any(zero.get(key) for key in _CHOICES):
        return _chosen_leaves(task, config, folder, lora_rank)
    model = _model(task, config, None)
    blocks = _blocks(model)
    try:
        untrained = _untrained(task, model, blocks, folder)
    except _UNRUNNABLE:  # the model's own code looks at numbers: DeepSpeed's own way remains
        return None
    classes = {type(block) for block in blocks} - {type(block) for block in untrained}
    if not classes:
        return None
    names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in classes)
    return _leaves(model, names, [block for block in blocks if type(block) in classes])


def _model(task: TrainerTask, config: PreTrainedConfig, rank: int | None) -> Any:
    """Return the model without numbers as ZeRO 3 trains it, with adapters of a rank if given."""
    kind, trusted = task.model_kind, task.workload.model.trust_remote_code
    with torch.device("meta"):
        model = random_model(kind, config, None, trusted)
        if rank is not None:
            model = with_lora(kind, model, rank, inputs_need_gradients=True)
    return model.train()


def _chosen_leaves(
    task: TrainerTask, config: PreTrainedConfig, folder: PreparedFolder, lora_rank: Domain | None
) -> ZeroLeaves | None:
    """Return the leaves that the study's settings choose in each model of the search space.

    Raises BadInput if a model lacks one of them, or DeepSpeed wouldn't train it.
    """
    ranks = [int(rank) for rank in ends_of(lora_rank)]
    models: dict[str, int | None] = {}
    if not ranks or min(ranks) == 0:
        models["without adapters"] = None
    if any(ranks):
        models["with adapters (lora_rank)"] = max(ranks)
    zero = task.workload.deepspeed.get("zero_optimization", {})
    found = []
    for which, rank in models.items():
        model = _model(task, config, rank)
        chosen = _chosen(task, model, zero, folder, which if any(ranks) else "")
        if chosen:
            found.append(_leaves(model, (), chosen))
    return max(found, key=lambda leaves: leaves.model_parameters, default=None)


def _leaves(model: Any, classes: Iterable[str], leaves: Iterable[nn.Module]) -> ZeroLeaves:
    return ZeroLeaves(
        classes=tuple(classes),
        largest_parameters=max(
            sum(parameter.numel() for parameter in leaf.parameters()) for leaf in leaves
        ),
        model_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _blocks(model: Any) -> list[nn.Module]:
    """Return all modules of the classes that are never split and are repeated in a list."""
    whole = set(model._no_split_modules or ())
    repeated = {
        type(part)
        for parts in model.modules()
        if isinstance(parts, nn.ModuleList)
        for part in parts
        if type(part).__name__ in whole
    }
    return [part for part in model.modules() if type(part) in repeated]


def _untrained(
    task: TrainerTask, model: Any, leaves: Iterable[nn.Module], folder: PreparedFolder
) -> list[nn.Module]:
    """Return those of the leaves whose gradients DeepSpeed would reduce before they exist.

    It reduces a leaf's gradients as soon as the gradients of the leaf's positional inputs are
    known (PyTorch's full backward hook, `reduce_leaf_module_grads` in
    deepspeed/runtime/zero/stage3.py). Without such an input that is at once, and with two calls
    after the first of them. Parameters that are used elsewhere, too, may get more afterwards.
    """
    calls = dict.fromkeys(leaves, 0)
    without_gradient = set()

    def called(leaf: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[leaf] += 1
        if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            without_gradient.add(leaf)

    hooks = [leaf.register_forward_pre_hook(called) for leaf in calls]
    with (
        no_autocast(),
        LiveMemory(task.masks_attention),
    ):  # it answers what models ask about their masks
        task.largest_loss(model, 1, folder=folder)
    for hook in hooks:
        hook.remove()
    owners = Counter(
        id(parameter) for part in model.modules() for parameter in part._parameters.values()
    )
    return [
        leaf
        for leaf, count in calls.items()
        if count != 1
        or leaf in without_gradient
        or any(owners[id(parameter)] > 1 for parameter in leaf.parameters())
    ]


def _chosen(
    task: TrainerTask, model: Any, zero: dict[str, Any], folder: PreparedFolder, which: str
) -> list[nn.Module]:
    """Return the leaves that the study's settings choose.

    Raises BadInput if the model lacks one of them, or DeepSpeed wouldn't train it.

    Args:
        which: Which of the search space's models it is, for messages; empty: it has but one.
    """
    leaves = _named(model, zero, which) + _by_threshold(model, zero)
    sentence = "workload.deepspeed.zero_optimization chooses leaf modules"
    try:
        untrained = _untrained(task, model, leaves, folder)
    except _UNRUNNABLE as error:
        raise BadInput(
            f"{sentence}, but whether DeepSpeed trains them can't be told, as the model doesn't run"
            f" without numbers ({reason(error)}); leave {' and '.join(_CHOICES)} out."
        ) from error
    if untrained:
        raise BadInput(
            f"{sentence}, of which DeepSpeed would not train {type(untrained[0]).__name__}: it"
            " must be called once a step, with an input that has a gradient and is given by"
            f" position, and share no parameters; leave {' and '.join(_CHOICES)} out, and carbonopt"
            " chooses the model's blocks."
        )
    return leaves


def _named(model: Any, zero: dict[str, Any], which: str) -> list[nn.Module]:
    """Return the leaves that `leaf_module` names. Raises BadInput if the model lacks one."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

    chosen, leaves = DeepSpeedZeroConfig(**zero).leaf_module, dict[nn.Module, None]()
    for key in zero.get("leaf_module") or {}:
        for name in getattr(chosen, key):
            alone = {"classes": [], "names": [], "name_suffixes": []} | {key: [name]}
            config = DeepSpeedZeroConfig(leaf_module=alone).leaf_module
            if not (found := apply_zero_leaf_module_config(model, config)):
                raise BadInput(
                    f"workload.deepspeed.zero_optimization.leaf_module.{key} must name modules of"
                    f" the model, but {' '.join(filter(None, (type(model).__name__, which)))} has"
                    f" no {name!r}; leave leaf_module out, and carbonopt chooses the model's"
                    " blocks."
                )
            leaves |= dict.fromkeys(found)
    return list(leaves)


def _by_threshold(model: Any, zero: dict[str, Any]) -> list[nn.Module]:
    """Return the leaves that DeepSpeed chooses by their size. Raises BadInput if there are none."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    if not (threshold := zero.get(_THRESHOLD)):
        return []
    chooser = DeepSpeedZeRoOffload.__new__(DeepSpeedZeRoOffload)
    chooser.min_granularity_value, chooser.min_granularity_layer = sys.maxsize, None
    chooser.granularity_info, chooser.z3_leaf_layers = set(), []
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
    chooser._get_granularity_recursively(model)
    if chooser.min_granularity_value <= threshold:
        chooser._set_leaf_by_threshold_preorder(model, threshold)
    if not chooser.z3_leaf_layers:
        raise BadInput(
            f"workload.deepspeed.zero_optimization.{_THRESHOLD} must be at least"
            f" {chooser.min_granularity_value:,}, the finest module of the model, but is"
            f" {threshold:,}, which chooses none; leave it out."
        )
    return list(chooser.z3_leaf_layers)
