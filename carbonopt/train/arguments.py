"""transformers.TrainingArguments of one trial: the study's own, checked, and what carbonopt sets."""

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from transformers import SchedulerType, Trainer, TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from carbonopt.core.config import Space, Workload, values_of
from carbonopt.core.dimensions import DIMENSIONS, TrainingParams, scheduler_arguments
from carbonopt.core.errors import BadInput, hint
from carbonopt.core.space import check_schedule
from carbonopt.train.failures import refused

# What carbonopt sets (where instead), or what would have no effect or harm in a trial (why), and by which arguments.
_WHY_OWNED = {
    "it is the trial's folder": "output_dir",
    "it is derived from the batch sizes": "gradient_accumulation_steps",
    "use search.space.micro_batch_size_per_gpu": "per_device_train_batch_size auto_find_batch_size",
    "use search.space.learning_rate": "learning_rate",
    "use search.space.epochs": "num_train_epochs max_steps",
    "use search.space.precision": "bf16 fp16 bf16_full_eval fp16_full_eval",
    "use search.seed": "seed data_seed",
    "use launch.gpus: []": "use_cpu",
    "use workload.deepspeed": "deepspeed",
    "use track in the study file": "report_to run_name project disable_tqdm logging_* trackio_* log_completions* "
    "log_multimodal log_unique_prompts num_completions_to_print",
    "use search.space.num_generations": "num_generations num_generations_eval",
    "use steps_per_generation": "generation_batch_size",
    "use workload.max_completion_length": "max_completion_length",
    "use workload.temperature": "temperature",
    "use search.space.kl_coefficient": "beta",
    "use workload.model": "model_init_kwargs trust_remote_code",
    "there is one reward": "reward_weights multi_objective_aggregation",
    "evaluations tell how far the policy is from where it began": "sync_ref_model ref_model_*",
    "the launcher sets it": "local_rank",
    "training has no use for it": "use_cache",
    "trials always train with DeepSpeed": "fsdp fsdp_config parallelism_config accelerator_config ddp_*",
    "the loss is the token-weighted cross entropy": "label_smoothing_factor average_tokens_across_devices",
    "carbonopt feeds the data itself": "remove_unused_columns label_names train_sampling_strategy length_column_name "
    "dataloader_drop_last ignore_data_skip",
    "a trial writes no checkpoints": "resume_from_checkpoint load_best_model_at_end metric_for_best_model push_to_hub "
    "enable_jit_checkpoint restore_callback_states_from_checkpoint save_* hub_*",
    "evaluation is workload.evaluations and workload.eval_batch_size_per_gpu": "do_train do_eval do_predict "
    "per_device_eval_batch_size prediction_loss_only batch_eval_metrics include_for_metrics eval_*",
}


_OF_EACH_SCHEDULER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")  # which the Trainer gives


def check_training_arguments(
    given: dict[str, Any], space: Space, kind: type[TrainingArguments] = TrainingArguments
) -> None:
    """Raises BadInput for a key that the task's class of arguments doesn't know, that carbonopt sets, or that is also
    searched; and for a value that it refuses."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    for key, value in given.items():
        if key not in defaults:
            allowed = sorted(name for name in defaults if _why_owned(name) is None)
            raise BadInput(f"unknown key workload.training_arguments.{key}; {hint(key, allowed)}")
        if (why := _why_owned(key)) is not None:
            raise BadInput(f"workload.training_arguments can't have {key}: carbonopt sets it; {why}.")
        if isinstance(default := defaults[key], int | float):  # transformers itself looks at few of its values
            fits = isinstance(value, int | float) and isinstance(value, bool) == isinstance(default, bool)
            if not fits or not math.isfinite(value) or value < min(0, default):
                wanted = "true or false" if isinstance(default, bool) else f"a number from {min(0, default)}"
                raise BadInput(f"workload.training_arguments.{key} must be {wanted}, but got {value!r}.")
    for name in space.domains():
        for argument in DIMENSIONS[name].arguments:
            if argument in given:
                rule = f"{argument} must be in workload.training_arguments or, as {name}, in search.space"
                raise BadInput(f"{rule}, but is in both; leave it out of one.")
    with refused("workload.training_arguments is not what transformers takes: {}.", ValueError, TypeError, ImportError):
        made = kind(output_dir="unused", report_to="none", use_cpu=True, bf16=False, **given)
    if space["lr_scheduler"] is None:
        given_one = str(SchedulerType(made.lr_scheduler_type).value)
        check_schedule(space, (given_one,), f"{given_one} in workload.training_arguments")
    of_scheduler: Any = made.lr_scheduler_kwargs or {}
    for scheduler in values_of(space["lr_scheduler"]) or (made.lr_scheduler_type,):
        _check_scheduler(SchedulerType(scheduler), of_scheduler)


def _check_scheduler(scheduler: SchedulerType, given: Mapping[str, Any]) -> None:
    """Raises BadInput for an argument that the scheduler doesn't have."""
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[scheduler]
    parameters = inspect.signature(schedule).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    own = [parameter.name for parameter in parameters if parameter.name not in _OF_EACH_SCHEDULER]
    for key in given:
        if key not in own:
            place, takes = "workload.training_arguments.lr_scheduler_kwargs", ", ".join(own) or "it takes none"
            rule = f"{place}.{key} is nothing that lr_scheduler {scheduler.value} takes ({takes})"
            raise BadInput(f"{rule}; leave it out, or choose another scheduler.")


def _why_owned(key: str) -> str | None:
    """None: the study may give it."""
    owned = ((why, pattern) for why, patterns in _WHY_OWNED.items() for pattern in patterns.split())
    return next((why for why, pattern in owned if fnmatchcase(key, pattern)), None)


def training_arguments(
    params: TrainingParams,
    workload: Workload,
    steps: int,
    seed: int,
    on_gpu: bool,
    folder: str,
    deepspeed: dict[str, Any],
    kind: type[TrainingArguments] = TrainingArguments,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingArguments:
    """The trial's arguments, of a class and with more of its fields that the task says. Making them starts
    torch.distributed and announces the ZeRO stage to transformers."""
    searched = {
        dimension.argument: dimension.to_argument(value, steps)
        for name, dimension in DIMENSIONS.items()
        if name != "epochs" and dimension.argument is not None and (value := getattr(params, name)) is not None
    }
    owned = {"output_dir": folder, "deepspeed": deepspeed, "max_steps": steps, "seed": seed, "use_cpu": not on_gpu}
    owned |= {"bf16": params.precision == "bf16", "fp16": params.precision == "fp16"}
    owned |= {"gradient_accumulation_steps": params.gradient_accumulation_steps, "disable_tqdm": True}
    owned |= {"report_to": "none", "eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no"}
    owned["logging_nan_inf_filter"] = False  # it would wait for the GPU at every step, and hide a divergence
    owned["average_tokens_across_devices"] = False  # the loss is already divided by the whole global batch's tokens
    given: dict[str, Any] = {"optim": "adamw_torch_fused", "dataloader_pin_memory": on_gpu, **more}
    given = given | workload.training_arguments | searched | owned
    if needed := scheduler_arguments(given.get("lr_scheduler_type"), params.decay_ratio, steps):
        given["lr_scheduler_kwargs"] = needed | (given.get("lr_scheduler_kwargs") or {})
    arguments = kind(**given)
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


def chosen_optimizer(params: TrainingParams, workload: Workload, trainer: Trainer) -> Any:
    """Class and options of Muon where it is searched, and of DeepSpeed's CPU AdamW where states leave a GPU, unless the
    study chose an optimizer: torch's is several times slower there. Given to the Trainer, not to DeepSpeed, it gets the
    same parameter groups as torch's, so that offload changes no weight decay. None: `arguments.optim`; on a host
    without GPU torch's AdamW needs no compiler. Raises BadInput as `muon.groups_of`."""
    arguments, model = trainer.args, trainer.model
    assert model is not None
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}
    if params.optimizer == "muon":
        from carbonopt.train.muon import Muon, groups_of

        groups = groups_of(model, trainer.get_decay_parameter_names(model), arguments.weight_decay)
        return Muon, {**options, "params": groups}
    if params.offload == "none" or arguments.use_cpu or "optim" in workload.training_arguments:
        return None
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam, options
