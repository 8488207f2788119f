"""transformers.TrainingArguments of one trial: the study's own, checked, and what carbonopt sets."""

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from carbonopt.core.config import Space, Workload
from carbonopt.core.dimensions import DIMENSIONS, TrialParams
from carbonopt.core.errors import BadInput, hint

if TYPE_CHECKING:
    from transformers import TrainingArguments

MAX_GRAD_NORM = 1.0  # Hugging Face's default

_OWN_EVALUATION = "evaluation is workload.evaluations and workload.eval_batch_size_per_gpu"
_OWN_LOSS = "the loss is the token-weighted cross entropy"
_OWN_DATA = "carbonopt feeds the data itself"
_NO_CHECKPOINTS = "a trial writes no checkpoints"
_OWN_REPORTS = "use track in the study file"
_DEEPSPEED_ONLY = "trials always train with DeepSpeed"

# What carbonopt sets (say where instead), or what would have no effect or harm in a trial (say why).
OWNED = {
    "output_dir": "it is the trial's folder",
    "gradient_accumulation_steps": "it is derived from the batch sizes",
    "auto_find_batch_size": "use search.space.micro_batch_size_per_gpu",
    "max_steps": "use search.space.epochs",
    "bf16": "use search.space.precision",
    "fp16": "use search.space.precision",
    "bf16_full_eval": "use search.space.precision",
    "fp16_full_eval": "use search.space.precision",
    "deepspeed": "use workload.deepspeed",
    "fsdp": _DEEPSPEED_ONLY,
    "fsdp_config": _DEEPSPEED_ONLY,
    "parallelism_config": _DEEPSPEED_ONLY,
    "accelerator_config": _DEEPSPEED_ONLY,
    "local_rank": "the launcher sets it",
    "use_cpu": "use launch.gpus: []",
    "seed": "use search.seed",
    "data_seed": "use search.seed",
    "label_smoothing_factor": _OWN_LOSS,
    "average_tokens_across_devices": _OWN_LOSS,
    "use_cache": "training has no use for it",
    "remove_unused_columns": _OWN_DATA,
    "label_names": _OWN_DATA,
    "train_sampling_strategy": _OWN_DATA,
    "length_column_name": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "ignore_data_skip": _OWN_DATA,
    "resume_from_checkpoint": _NO_CHECKPOINTS,
    "load_best_model_at_end": _NO_CHECKPOINTS,
    "metric_for_best_model": _NO_CHECKPOINTS,
    "enable_jit_checkpoint": _NO_CHECKPOINTS,
    "restore_callback_states_from_checkpoint": _NO_CHECKPOINTS,
    "push_to_hub": _NO_CHECKPOINTS,
    "do_train": _OWN_EVALUATION,
    "do_eval": _OWN_EVALUATION,
    "do_predict": _OWN_EVALUATION,
    "per_device_eval_batch_size": _OWN_EVALUATION,
    "prediction_loss_only": _OWN_EVALUATION,
    "batch_eval_metrics": _OWN_EVALUATION,
    "include_for_metrics": _OWN_EVALUATION,
    "report_to": _OWN_REPORTS,
    "run_name": _OWN_REPORTS,
    "project": _OWN_REPORTS,
    "disable_tqdm": _OWN_REPORTS,
}
_OWNED_PREFIXES = {
    "eval_": _OWN_EVALUATION,
    "save_": _NO_CHECKPOINTS,
    "hub_": _NO_CHECKPOINTS,
    "logging_": _OWN_REPORTS,
    "trackio_": _OWN_REPORTS,
    "ddp_": _DEEPSPEED_ONLY,
}
# Arguments that every trial gets from a dimension; those of the others may be given here instead of being searched.
_ALWAYS_SEARCHED = ("micro_batch_size_per_gpu", "learning_rate", "epochs")
OWNED |= {str(DIMENSIONS[name].argument): f"use search.space.{name}" for name in _ALWAYS_SEARCHED}


def check_training_arguments(given: dict[str, Any], space: Space) -> None:
    """Raises BadInput for a key that transformers doesn't know, that carbonopt sets, or that is also searched; and for
    a value that transformers refuses."""
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments) if field.init}
    known = set(defaults)
    for key in given:
        instead = OWNED.get(key) or next((why for start, why in _OWNED_PREFIXES.items() if key.startswith(start)), None)
        if instead is not None:
            raise BadInput(f"workload.training_arguments can't have {key}: carbonopt sets it; {instead}.")
        if key not in known:
            raise BadInput(f"unknown key workload.training_arguments.{key}; {hint(key, sorted(_allowed(known)))}")
        if isinstance(defaults[key], int | float):  # transformers itself looks at few of its values
            _check_number(key, given[key], defaults[key])
    for name in space.domains():
        if (argument := DIMENSIONS[name].argument) in given:
            raise BadInput(
                f"{argument} must be in workload.training_arguments or, as {name}, in search.space, but is in both."
            )
    try:
        TrainingArguments(output_dir="unused", report_to="none", use_cpu=True, **given)
    except (ValueError, TypeError, ImportError) as error:
        raise BadInput(
            f"workload.training_arguments is not what transformers takes: {' '.join(str(error).split())}"
        ) from error


def _check_number(key: str, value: Any, default: Any) -> None:
    kind = bool if isinstance(default, bool) else (int, float)
    number = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
    if not number or not math.isfinite(value) or value < min(0, default):
        wanted = "true or false" if isinstance(default, bool) else f"a number from {min(0, default)}"
        raise BadInput(f"workload.training_arguments.{key} must be {wanted}, but got {value!r}.")


def _allowed(known: set[str]) -> set[str]:
    return {key for key in known - OWNED.keys() if not key.startswith(tuple(_OWNED_PREFIXES))}


def max_grad_norm(workload: Workload) -> float:
    """The norm that gradients are clipped to: the study's, else Hugging Face's default."""
    return float(workload.training_arguments.get("max_grad_norm", MAX_GRAD_NORM))


def training_arguments(
    params: TrialParams, workload: Workload, steps: int, seed: int, on_gpu: bool, folder: str, deepspeed: dict[str, Any]
) -> "TrainingArguments":
    """The trial's arguments. Making them starts torch.distributed and announces the ZeRO stage to transformers."""
    from transformers import TrainingArguments

    owned: dict[str, Any] = {
        "output_dir": folder,
        "gradient_accumulation_steps": params.gradient_accumulation_steps,
        "max_steps": steps,
        "seed": seed,
        "bf16": params.precision == "bf16",
        "fp16": params.precision == "fp16",
        "max_grad_norm": max_grad_norm(workload),
        "use_cpu": not on_gpu,
        "deepspeed": deepspeed,
        "report_to": "none",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # it would wait for the GPU at every step, and hide a divergence
        "average_tokens_across_devices": False,  # the loss is already divided by the whole global batch's tokens
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {"optim": "adamw_torch_fused", "dataloader_pin_memory": on_gpu}
    arguments = TrainingArguments(**(given | workload.training_arguments | _searched(params, steps) | owned))
    if not on_gpu and params.world_size > 1:
        # There accelerate starts torch.distributed without DeepSpeed's part, and ZeRO-3, loading, would see one rank.
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)
    if arguments.torch_compile:
        # Layer by layer, not the whole model: on an H200 (GPT-2 124M, 128 x 512 tokens, torch 2.11) 1.24 mJ a token
        # against 1.31, after 8 s of compilation against 15. Before torch 2.14 transformers can't tell, while all of it
        # is traced, that the mask is causal, and attention computes the half that is masked, too.
        os.environ.setdefault("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    return arguments


def _searched(params: TrialParams, steps: int) -> dict[str, Any]:
    """The arguments that the search sets; a dimension that it leaves out stays as the study or Hugging Face has it."""
    return {
        dimension.argument: dimension.to_argument(value, steps)
        for name, dimension in DIMENSIONS.items()
        if dimension.argument is not None and (value := getattr(params, name)) is not None and name != "epochs"
    }
