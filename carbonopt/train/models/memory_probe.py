"""Estimate the GPU memory that training a model needs, without a GPU.

A forward and a backward pass run on tensors that have shapes but no numbers (torch's meta device).
Autograd keeps and frees them as it does on a GPU.

`python -m carbonopt.train.models.memory_probe` reads a MemorySpec from standard input and prints a
MemoryAnswer.
"""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils.other import compile_regions_deepspeed
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, Trainer, TrainingArguments

from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput
from carbonopt.core.values import Scalar
from carbonopt.spec.model_memory import (
    PROFILED,
    Activations,
    MemoryAnswer,
    MemoryProfile,
    MemorySpec,
    ModelMemory,
)
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Range, Space, values_of
from carbonopt.train.failures import reason, refused
from carbonopt.train.models import model as models
from carbonopt.train.models.layer_extrapolation import by_layers
from carbonopt.train.models.live_memory import MOST_S, LiveMemory
from carbonopt.train.optim import muon
from carbonopt.train.speed.float8_layers import train_in_float8
from carbonopt.train.tasks.task import SMALLEST_EVAL_BATCH, task_for
from carbonopt.train.tasks.trainer_task import TrainerTask

# Settings that have no estimate: how the compiler divides a checkpointed layer can't be followed.
_WITHOUT_ESTIMATE = "torch_compile with gradient_checkpointing"
_ELEMENTS = 2**20  # size of the parameter on which an optimizer is tried
_MOST_COMPILED = 10_000  # versions of a function's code, more than a study has settings
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CROSS_ENTROPY = F.cross_entropy
# Errors raised by running a model without numbers, where its code or a library's looks at numbers
# or needs a device.
_UNRUNNABLE = (
    ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError,
    AssertionError, ImportError, ZeroDivisionError,
)  # fmt: skip


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention as `scaled_dot_product_attention` does on a GPU, by a fused kernel.

    Fused kernels keep no scores, whereas the meta device has only the implementation that keeps
    them. Flash attention takes half precision without a mask; the memory-efficient kernel takes
    anything but a mask whose last dimension is not contiguous. A boolean mask becomes one that is
    added.
    """
    operations = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return _unfused_attention(query, key, value, attn_mask, dropout_p, scale)
    if attn_mask is None and query.dtype in _HALF.values():
        flash = operations._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    efficient = operations._scaled_dot_product_efficient_attention
    attended = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return attended[0]  # type: ignore[no-any-return]


def _unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float, scale: float | None
) -> Tensor:
    """Compute attention in float32 without a fused kernel.

    Follows `_scaled_dot_product_attention_math` in aten/src/ATen/native/transformers/attention.cpp.
    """
    each = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (query.float() * each) @ (key.float().transpose(-2, -1) * each)
    weights = torch.ops.aten._safe_softmax(scores.add_(mask), -1)
    attended: Tensor = _dropout(weights, dropout_p, training=True) @ value.float()
    return attended.to(query.dtype)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout as a GPU does, where the mask that is kept has one byte per element."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


def _cross_entropy(input: Tensor, target: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Compute the cross entropy by the operation that has a gradient.

    torch 2.13's compiler doesn't find that operation on the meta device.
    """
    if input.dim() != 2 or arguments or options.keys() - {"reduction", "ignore_index"}:
        return _CROSS_ENTROPY(input, target, *arguments, **options)
    reduction = ("none", "mean", "sum").index(options.get("reduction", "mean"))
    nll_loss, ignored = torch.ops.aten.nll_loss_forward, options.get("ignore_index", -100)
    return nll_loss(F.log_softmax(input, -1), target, None, reduction, ignored)[0]  # type: ignore[no-any-return]


def _compiled(live: LiveMemory) -> Callable[..., Any]:
    """Return a replacement of `torch.compile` that makes no kernels.

    It keeps the compiler's own division between forward and backward pass, which decides what is
    kept and what is recomputed.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def kernels(graph: Any, inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            with live.one_kernel():
                given = tuple(arguments)
                arguments.clear()
                return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=kernels,
        bw_compiler=kernels,
        inference_compiler=kernels,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    own = torch.compile
    return lambda function, **options: own(function, backend=backend, dynamic=False)


@contextmanager
def _as_on_a_gpu(live: LiveMemory, compiles: bool) -> Iterator[None]:
    places: tuple[tuple[Any, str, Any], ...] = (
        (F, "scaled_dot_product_attention", _attention),
        (F, "dropout", _dropout),
        (F, "cross_entropy", _cross_entropy),
        *([(torch, "compile", _compiled(live))] if compiles else []),
    )
    own = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(places, own, strict=True):
            setattr(module, name, function)


def model_memory(
    task: TrainerTask,
    config: PreTrainedConfig,
    space: Space,
    world_size: int,
    eval_batch_size: int | None,
    folder: PreparedFolder | None = None,
) -> ModelMemory:
    """Return the memory profile of a model in all settings of the search space.

    Examples have the length of the longest in the prepared folder or, without one, the longest
    length that the workload allows.

    Raises:
        BadInput: The model can't run without numbers, profiling takes longer than a minute, or the
            task doesn't say what its batches are.
    """
    if (dropout := space["dropout"]) is not None:  # any value but 0 keeps a mask
        config = models.with_dropout(config, max(map(float, _ends(dropout))))
    zero = task.workload.deepspeed.get("zero_optimization", {})
    given = {
        "reduce_bucket_elements": "reduce_bucket_size",
        "live_parameters": "stage3_max_live_parameters",
    }
    given["overlapped"] = "overlap_comm"
    states, in_step = _optimizer_bytes(task.workload.training_arguments)
    sentence = f"{config.model_type} can't be run without numbers ({{}})"
    until = time.monotonic() + MOST_S
    every = list(_settings(space))
    known = [settings for settings in every if not _has_no_estimate(task, settings)]
    if not known:
        raise BadInput(f"there is no estimate for {_WITHOUT_ESTIMATE}")
    with refused(sentence, *_UNRUNNABLE):
        profiles = tuple(
            _profile(
                task,
                config,
                settings,
                _micro_batches(space, world_size),
                eval_batch_size,
                folder,
                until,
                by_muon="muon" in values_of(space["optimizer"]),
            )
            for settings in known
        )
    return ModelMemory(
        profiles=profiles,
        optimizer_bytes_per_parameter=states,
        optimizer_step_bytes_per_parameter=in_step,
        left_out=None if len(known) == len(every) else _WITHOUT_ESTIMATE,
        **{name: zero[key] for name, key in given.items() if key in zero},
    )


def _settings(space: Space) -> Iterator[dict[str, Scalar | None]]:
    """Generate the combinations of the PROFILED dimensions, with both ends of a range.

    Those that can't exist are left out.
    """
    values = [_ends(space[name]) or (None,) for name in PROFILED]
    for combination in itertools.product(*values):
        settings = dict(zip(PROFILED, combination, strict=True))
        if settings["torch_compile"] or settings["float8"] in (None, "none"):
            yield settings


def _has_no_estimate(task: TrainerTask, settings: dict[str, Scalar | None]) -> bool:
    """Return whether these settings are those of `_WITHOUT_ESTIMATE`."""
    return bool(
        _setting(task, settings, "torch_compile")
        and _setting(task, settings, "gradient_checkpointing")
    )


def _micro_batches(space: Space, world_size: int) -> tuple[int, ...]:
    """Return the smallest and the largest micro batch size, or the only one."""
    sizes = [int(size) for size in _ends(space["micro_batch_size_per_gpu"])]
    sizes = sizes or [max(1, int(size) // world_size) for size in _ends(space["global_batch_size"])]
    return tuple(sorted({min(sizes), max(sizes)}))


def _ends(domain: Any) -> tuple[Scalar, ...]:
    """Return a range's ends, whole numbers as int, or all choices of another domain."""
    if not isinstance(domain, Range):
        return values_of(domain)
    return tuple(int(end) if float(end).is_integer() else end for end in (domain.low, domain.high))


def _profile(
    task: TrainerTask, config: PreTrainedConfig, settings: dict[str, Any], sizes: tuple[int, ...],
    eval_size: int | None, folder: PreparedFolder | None, until: float, by_muon: bool,
) -> MemoryProfile:  # fmt: skip
    model = _model(task, config, settings)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    matrices = muon.hidden_matrices(model) if by_muon else []
    hidden = [torch.empty(matrix.shape, device="meta") for matrix in matrices]

    def passes(config: PreTrainedConfig) -> tuple[int, list[Activations]]:
        return _passes(task, config, settings, sizes, eval_size, folder, until)

    compiles = bool(_setting(task, settings, "torch_compile"))
    by_rule = None if compiles else by_layers(config, sum(trained), passes)
    activations = by_rule or passes(config)[1]
    return MemoryProfile(
        settings=settings,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_parameters=sum(trained),
        largest_parameter=max(trained),
        hidden_parameters=sum(matrix.numel() for matrix in hidden),
        muon_step_bytes=_muon_step_bytes(hidden) if hidden else 0,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        activations=tuple(activations),
    )


def _passes(
    task: TrainerTask, config: PreTrainedConfig, settings: dict[str, Any], sizes: tuple[int, ...],
    eval_size: int | None, folder: PreparedFolder | None, until: float,
) -> tuple[int, list[Activations]]:  # fmt: skip
    """Return the trained parameters of a model, and its activation memory for each micro batch."""
    live = LiveMemory(task.masks_attention, until)
    compiles = bool(_setting(task, settings, "torch_compile"))
    fused = settings["output_layer"] not in (None, "standard")
    flexible = settings["attention_implementation"] == "flex_attention"
    with _as_on_a_gpu(live, compiles=compiles or fused or flexible):
        model = _model(task, config, settings)
        if fused:
            # A process otherwise compiles at most eight versions of one function's code and runs
            # the ninth uncompiled.
            torch._dynamo.config.recompile_limit = _MOST_COMPILED  # type: ignore[attr-defined]
            torch._dynamo.config.accumulated_recompile_limit = _MOST_COMPILED  # type: ignore[attr-defined]
        if compiles:
            # What the compiler keeps of a layer can depend on what it has compiled before.
            torch._dynamo.reset()  # type: ignore[no-untyped-call]
            # Compile layer by layer, as accelerate does where `train.optim.arguments` asks for it.
            compile_regions_deepspeed(model)
        activations = [
            _activations(task, model, live, size, eval_size, compiles, folder) for size in sizes
        ]
    trained = sum(weights.numel() for weights in model.parameters() if weights.requires_grad)
    return trained, activations


def _model(task: TrainerTask, config: PreTrainedConfig, settings: dict[str, Any]) -> Any:
    """Make the model on the meta device as `training_loop.train` and DeepSpeed's engine would."""
    kind, workload, given = task.model_kind, task.workload, task.workload.training_arguments
    checkpointing = bool(_setting(task, settings, "gradient_checkpointing"))
    with torch.device("meta"):
        attention, trusted = settings["attention_implementation"], workload.model.trust_remote_code
        model = models.random_model(kind, config, attention, trusted)
        if settings["output_layer"] not in (None, "standard"):
            models.fuse_output_layer(model, str(settings["output_layer"]), compiled=True)
        if settings["float8"] not in (None, "none"):
            train_in_float8(model, str(settings["float8"]))
        if settings["lora_rank"]:
            model = models.with_lora(kind, model, int(settings["lora_rank"]), checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable(given.get("gradient_checkpointing_kwargs"))
    if (dtype := _HALF.get(settings["precision"])) is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    model.config.use_cache = False
    return model


def _setting(task: TrainerTask, settings: dict[str, Any], name: str) -> Any:
    """Return an on/off dimension's value, which may stand in `training_arguments` instead."""
    value = settings[name]
    given = task.workload.training_arguments
    return any(map(given.get, DIMENSIONS[name].arguments)) if value is None else value


def _activations(
    task: TrainerTask, model: Any, live: LiveMemory, size: int, eval_size: int | None,
    compiles: bool, folder: PreparedFolder | None,
) -> Activations:  # fmt: skip
    live.begin(itertools.chain(model.parameters(), model.buffers()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [
        parameter.register_post_accumulate_grad_hook(live.gradient_is_made) for parameter in trained
    ]
    with live:
        model.train()
        task.largest_loss(model, size, compiles, folder).backward()
        moments = live.moments
        for parameter in trained:
            parameter.grad = None
        model.eval()
        live.begin(itertools.chain(model.parameters(), model.buffers()))
        with torch.no_grad():
            task.largest_evaluation(model, eval_size or max(size, SMALLEST_EVAL_BATCH), folder)
    for hook in hooks:
        hook.remove()
    return Activations(micro_batch_size=size, moments=moments, evaluation_bytes=live.peak_bytes)


def _optimizer_bytes(given: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes per parameter of the Trainer's optimizer: its states, and its step's extra.

    Raises:
        BadInput: The optimizer can't be made without a GPU.
    """
    chosen = {key: value for key, value in given.items() if key in ("optim", "optim_args")}
    arguments = TrainingArguments(
        output_dir="unused",
        report_to="none",
        use_cpu=True,
        **{"optim": "adamw_torch_fused"} | chosen,
    )
    sentence = (
        f"the optimizer {getattr(arguments.optim, 'value', arguments.optim)} can't be made without"
        " a GPU ({})"
    )
    with refused(sentence, *_UNRUNNABLE):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
        fused = options.pop("fused", False)
        weights = torch.nn.Parameter(torch.empty(_ELEMENTS, device="meta"))
        # On a GPU torch's own optimizers take all parameters at once by default, for which they
        # make copies; fused ones don't.
        together = (
            {"foreach": True} if kind.__module__.startswith("torch.optim") and not fused else {}
        )
        optimizer = kind([weights], **options, **together)
        weights.grad = torch.empty_like(weights)
        optimizer.step()
        states = [
            value for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)
        ]
        live = LiveMemory()
        live.begin((weights, weights.grad, *states))
        with live:
            optimizer.step()
    return sum(state.nbytes for state in states) / _ELEMENTS, (
        0.0 if fused else live.peak_bytes / _ELEMENTS
    )


def _muon_step_bytes(matrices: list[Tensor]) -> int:
    """Return the bytes that a Muon step needs beside the matrices, their gradients and momenta."""
    gradients, momenta = ([torch.empty_like(matrix) for matrix in matrices] for _ in range(2))
    live = LiveMemory()
    live.begin((*matrices, *gradients, *momenta))
    with live:
        muon.step(matrices, gradients, momenta, torch.zeros((), device="meta"), weight_decay=0.1)
    return live.peak_bytes


def expected_memory(spec: MemorySpec) -> ModelMemory:
    """Return the memory that a study's model needs, before anything is prepared.

    Raises:
        BadInput: There can be no estimate.
    """
    task = task_for(spec.workload)
    if not isinstance(task, TrainerTask):
        raise BadInput(f"what the task {task.workload.task} trains is not known")
    config, eval_batch_size = task.expected_config(), task.workload.eval_batch_size_per_gpu
    if eval_batch_size is None and spec.gpu_memory_bytes is not None:
        eval_batch_size = task.eval_batch_size(config, spec.gpu_memory_bytes)
    return model_memory(task, config, spec.space, spec.world_size, eval_batch_size)


def main() -> None:
    """Run the program; standard output has the answer only."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        spec = MemorySpec.model_validate_json(sys.stdin.read())
        try:
            answer = MemoryAnswer(memory=expected_memory(spec))
        except (BadInput, OSError) as error:
            answer = MemoryAnswer(why_none=reason(error))
        print(answer.model_dump_json(), file=answers)


if __name__ == "__main__":
    main()
