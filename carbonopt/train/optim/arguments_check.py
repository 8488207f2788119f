"""Check whether trials can train with a study's `training_arguments`.

The functions that trials use make the scheduler, optimizer and the rest once, on a model of one
layer.
"""

import copy
import dataclasses
import inspect
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args, get_origin, get_type_hints

import torch
from accelerate.utils import TorchDynamoPlugin
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SchedulerType,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.liger import apply_liger_kernel
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from carbonopt.core.dimensions import DIMENSIONS, scheduler_arguments
from carbonopt.core.errors import BadInput
from carbonopt.core.refusals import hint
from carbonopt.space.search_space import check_lr_schedule, lowest
from carbonopt.spec.space_settings import Space, values_of
from carbonopt.train.failures import refused

# Arguments that a study may not set, by the reason: carbonopt sets them (the text says where
# instead), or they would have no effect or do harm in a trial.
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
    "use track in the study file": (
        "report_to run_name project disable_tqdm logging_* trackio_* log_completions* "
        "log_multimodal log_unique_prompts num_completions_to_print"
    ),
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
    "trials always train with DeepSpeed": (
        "fsdp fsdp_config parallelism_config accelerator_config ddp_*"
    ),
    "the loss is the token-weighted cross entropy": (
        "label_smoothing_factor average_tokens_across_devices"
    ),
    "carbonopt feeds the data itself": (
        "remove_unused_columns label_names train_sampling_strategy length_column_name"
        " dataloader_drop_last dataloader_prefetch_factor dataloader_persistent_workers"
        " dataloader_multiprocessing_context include_num_input_tokens_seen ignore_data_skip"
    ),
    "use checkpoint in the study file": (
        "resume_from_checkpoint enable_jit_checkpoint restore_callback_states_from_checkpoint"
        " save_*"
    ),
    "the quality of a trial is that of its last step": (
        "load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "a trial uploads nothing": "push_to_hub hub_*",
    "evaluation is workload.evaluations and workload.eval_batch_size_per_gpu": (
        "do_train do_eval do_predict per_device_eval_batch_size prediction_loss_only"
        " batch_eval_metrics include_for_metrics eval_*"
    ),
}

_PLACE = "workload.training_arguments"
# parameters of schedules that the Trainer passes itself
_OF_EACH_SCHEDULER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
_STEPS = 8  # length of the schedule that is tried; its first step warms up
# arguments that have no effect without one of these arguments, or dimensions of that name
_OF_OTHERS = {
    "liger_kernel_config": ("use_liger_kernel",),
    "gradient_checkpointing_kwargs": DIMENSIONS["gradient_checkpointing"].arguments,
    "activation_checkpointing_kwargs": DIMENSIONS["gradient_checkpointing"].arguments,
}
_UNMAKEABLE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError, AssertionError,
    ArithmeticError, RuntimeError,
)  # fmt: skip


def check_training_arguments(
    given: dict[str, Any], space: Space, kind: type[TrainingArguments] = TrainingArguments
) -> None:
    """Raise BadInput if trials can't train with these training arguments.

    Args:
        given: The study's `training_arguments`.
        space: The search space.
        kind: The task's class of arguments.

    Raises:
        BadInput: A key is unknown to the class, set by carbonopt or also searched; a value is
            refused, has no effect or can't be trained with on this machine; or the space has a
            setting of the schedule that these arguments' scheduler lacks.
    """
    check_keys(given, space, kind)
    with refused(
        f"{_PLACE} is not what transformers takes: {{}}.", ValueError, TypeError, ImportError
    ):
        arguments = kind(output_dir="unused", report_to="none", use_cpu=True, bf16=False, **given)
    if space["lr_scheduler"] is None:
        fixed = str(SchedulerType(arguments.lr_scheduler_type).value)
        check_lr_schedule(space, (fixed,), f"{fixed} in {_PLACE}")
    names = list(map(str, values_of(space["lr_scheduler"]))) or [
        str(SchedulerType(arguments.lr_scheduler_type).value)
    ]
    if "warmup_steps" in given and not any(map(DIMENSIONS["warmup_ratio"].acts_with, names)):
        raise BadInput(
            f"{_PLACE}.warmup_steps has no effect with lr_scheduler {' or '.join(names)}; leave it"
            " out."
        )
    of_scheduler: Any = arguments.lr_scheduler_kwargs or {}
    for scheduler in values_of(space["lr_scheduler"]) or (arguments.lr_scheduler_type,):
        _check_scheduler(SchedulerType(scheduler), of_scheduler, space)
    _check_optimizer(arguments, given, space)
    _check_libraries(arguments)
    with refused(f"{_PLACE}.log_level can't be had: {{}}; choose another one.", KeyError):
        arguments.get_process_log_level()


def check_keys(given: dict[str, Any], space: Space, kind: type[TrainingArguments]) -> None:
    """Raise BadInput for a key that can't be set, or a value that no machine could train with."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in defaults:
            allowed = sorted(name for name in defaults if _why_owned(name) is None)
            raise BadInput(f"unknown key {_PLACE}.{key}; {hint(key, allowed)}")
        if (why := _why_owned(key)) is not None:
            raise BadInput(f"{_PLACE} can't have {key}: carbonopt sets it; {why}.")
        # transformers itself checks few of its values.
        kinds = {get_origin(part) or part for part in (hints[key], *get_args(hints[key]))}
        if isinstance(default := defaults[key], int | float):
            fits = isinstance(value, int | float) and isinstance(value, bool) == isinstance(
                default, bool
            )
            if not fits or not math.isfinite(value) or value < min(0, default):
                wanted = (
                    "true or false"
                    if isinstance(default, bool)
                    else f"a number from {min(0, default)}"
                )
                raise BadInput(f"{_PLACE}.{key} must be {wanted}, but got {value!r}.")
        if isinstance(value, float) and int in kinds and float not in kinds:
            raise BadInput(f"{_PLACE}.{key} must be a whole number, but got {value!r}.")
        if isinstance(value, str) and dict in kinds:
            raise BadInput(
                f"{_PLACE}.{key} must hold keys and their values, but got the text {value!r:.80}."
            )
        if (
            key in _OF_OTHERS
            and not any(map(given.get, _OF_OTHERS[key]))
            and not _is_on(space, _OF_OTHERS[key])
        ):
            raise BadInput(
                f"{_PLACE}.{key} has no effect without {' or '.join(_OF_OTHERS[key])}; leave it"
                " out."
            )
    for name in space.domains():
        for argument in DIMENSIONS[name].arguments:
            if argument in given:
                rule = f"{argument} must be in {_PLACE} or, as {name}, in search.space"
                raise BadInput(f"{rule}, but is in both; leave it out of one.")


def _is_on(space: Space, names: tuple[str, ...]) -> bool:
    """Return whether a dimension of one of these names may be on."""
    return any(name in DIMENSIONS and True in values_of(space[name]) for name in names)


def _check_scheduler(scheduler: SchedulerType, given: Mapping[str, Any], space: Space) -> None:
    """Raise BadInput for arguments that the scheduler lacks or can't use, or a missing one."""
    place = f"{_PLACE}.lr_scheduler_kwargs"
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[scheduler]
    parameters = inspect.signature(schedule).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.name not in _OF_EACH_SCHEDULER]
    for key in given:
        if key not in known and not any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters
        ):
            takes = ", ".join(known) or "it takes none"
            rule = f"{place}.{key} is nothing that lr_scheduler {scheduler.value} takes ({takes})"
            raise BadInput(f"{rule}; leave it out, or choose another scheduler.")
    # Some arguments must not exceed the learning rate, so the lowest rate is the strictest.
    rate = 1.0 if space["learning_rate"] is None else float(lowest(space["learning_rate"]))
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=rate)
    of_scheduler = {**scheduler_arguments(scheduler.value, None, _STEPS), **given}
    sentence = (
        f"lr_scheduler {scheduler.value} can't be made with {place} {dict(given) or 'left out'}:"
        " {}; change that."
    )
    with refused(sentence, *_UNMAKEABLE):
        scheduled = get_scheduler(scheduler, optimizer, 1, _STEPS, of_scheduler)
        for _ in range(_STEPS if isinstance(scheduled, torch.optim.lr_scheduler.LambdaLR) else 0):
            optimizer.step()
            scheduled.step()


def _check_optimizer(arguments: TrainingArguments, given: Mapping[str, Any], space: Space) -> None:
    """Raise BadInput for an optimizer that can't be used, or for arguments that it ignores.

    It can't be used if it can't be made here or can't be divided by the space's ZeRO stages.
    """
    name = getattr(arguments.optim, "value", arguments.optim)
    whole = copy.copy(arguments)
    if arguments.optim_target_modules is not None:
        whole.optim_target_modules = "all-linear"  # the study's names belong to another model
    instead = "change optim, optim_args or the values that begin with adam_"
    with refused(
        f"{_PLACE}: the optimizer {name} can't be made here: {{}}; {instead}.", *_UNMAKEABLE
    ):
        optimizer, options = _optimizer(whole)
        weights: Any = list(_one_layer().parameters())
        # keys under which the Trainer passes parameters
        for name_of_weights in ("params", "model", "optimizer_dict"):
            weights = options.pop(name_of_weights, weights)
        has_state = bool(optimizer(weights, **options).state)
    if has_state and any(stage != 0 for stage in values_of(space["zero_stage"]) or (1,)):
        rule = f"{_PLACE}.optim {name} has a state before its first step, which ZeRO can't divide"
        raise BadInput(f"{rule}; fix search.space.zero_stage at 0, or choose another one.")
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if key in given and _changes_nothing(whole, **{key: getattr(arguments, key) / 2}):
            raise BadInput(f"{_PLACE}.{key} changes nothing of the optimizer {name}; leave it out.")
    parts = [part for part in (arguments.optim_args or "").split(",") if part]
    for part in parts:
        if _changes_nothing(whole, optim_args=",".join(other for other in parts if other != part)):
            raise BadInput(
                f"{_PLACE}.optim_args: {part} changes nothing of the optimizer {name}; leave it"
                " out."
            )
    has_targets = arguments.optim_target_modules is not None
    if has_targets and _changes_nothing(whole, optim_target_modules=None):
        raise BadInput(
            f"{_PLACE}.optim_target_modules changes nothing of the optimizer {name}; leave it out."
        )


def _changes_nothing(arguments: TrainingArguments, **changes: Any) -> bool:
    """Return whether these changes of the arguments leave the optimizer the same."""
    changed = copy.copy(arguments)
    for key, value in changes.items():
        setattr(changed, key, value)
    try:
        return repr(_optimizer(changed)) == repr(_optimizer(arguments))
    except _UNMAKEABLE:  # the optimizer needs the argument
        return False


def _optimizer(arguments: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer's class and options, as the Trainer has them."""
    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(arguments, _one_layer())
    return optimizer, options


def _one_layer() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    return model


def _check_libraries(arguments: TrainingArguments) -> None:
    """Raise BadInput for what torch, accelerate or Liger can't do with these arguments."""
    if arguments.use_liger_kernel:
        with refused(
            f"{_PLACE}.use_liger_kernel can't be had here: {{}}; leave it out.", *_UNMAKEABLE
        ):
            apply_liger_kernel(torch.nn.Linear(1, 1), arguments.liger_kernel_config)
    if arguments.torch_compile:
        chosen = (
            f"torch_compile_backend {arguments.torch_compile_backend} and torch_compile_mode"
            f" {arguments.torch_compile_mode}"
        )
        with refused(
            f"{_PLACE}: {chosen} can't be compiled with: {{}}; give others.", *_UNMAKEABLE
        ):
            plugin = TorchDynamoPlugin(
                backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode
            )
            torch.compile(torch.nn.Identity(), **plugin.to_kwargs())
    name = "activation_checkpointing"
    if not hasattr(arguments, name):  # transformers 5.17 has only the old name
        name = "gradient_checkpointing"
    if given := getattr(arguments, f"{name}_kwargs"):
        _check_checkpointing(name, given)


def _check_checkpointing(name: str, given: Any) -> None:
    """Raise BadInput for checkpointing arguments that don't work when one layer runs with them.

    The options are divided between model and checkpointing as the Trainer does.

    Args:
        name: The name in transformers' arguments and methods.
        given: The options.
    """
    options = dict(given)
    of_model = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    sentence = (
        f"{_PLACE}.gradient_checkpointing_kwargs {given} is not what checkpointing takes: {{}};"
        " change it."
    )
    with refused(sentence, *_UNMAKEABLE):
        small: Any = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
                vocab_size=2, max_position_embeddings=2,
            )
        )  # fmt: skip
        getattr(small, f"{name}_enable")(**{f"{name}_kwargs": options or None}, **of_model)
        checkpoint(
            torch.nn.Identity(),
            torch.zeros(1, requires_grad=True),
            **{"use_reentrant": False, **options},
        )


def _why_owned(key: str) -> str | None:
    """Return why the study may not give this argument, or None if it may."""
    owned = ((why, pattern) for why, patterns in _WHY_OWNED.items() for pattern in patterns.split())
    return next((why for why, pattern in owned if fnmatchcase(key, pattern)), None)
