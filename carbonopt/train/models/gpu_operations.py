"""Run on torch's meta device what runs on a GPU, and keep there what a GPU keeps.

Tensors on the meta device have shapes but no numbers. Some of torch's functions are carried out
otherwise there than on a GPU, and keep other tensors for the backward pass.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carbonopt.train.models.live_memory import LiveMemory

_CROSS_ENTROPY = F.cross_entropy


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention as `scaled_dot_product_attention` does on a GPU, by a fused kernel.

    Fused kernels keep no scores, whereas the meta device has only the implementation that keeps
    them. Flash attention takes half precision without a mask; the memory-efficient kernel takes
    anything but a mask whose last dimension is not contiguous. A boolean mask becomes one that is
    added.

    Raises:
        RuntimeError: The real one can't have tensors of these shapes.
    """
    _check_shapes(query, key, value, attn_mask, enable_gqa)
    operations = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = operations._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return _unfused_attention(query, key, value, attn_mask, dropout_p, scale)
    efficient = operations._scaled_dot_product_efficient_attention
    attended = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return attended[0]  # type: ignore[no-any-return]


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> None:
    """Raise RuntimeError for shapes that attention can't have; kernels without numbers take any."""
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    batches = [shape[:-2] for shape in shapes]
    if enable_gqa:
        heads, *others = (batch[-1] for batch in batches)
        if others[0] != others[1] or heads % others[0]:
            raise RuntimeError(f"{heads} query heads can't share {others[0]} key and value heads")
        batches = [batch[:-1] for batch in batches]
    try:
        torch.broadcast_shapes(*batches)
        scores = (*batches[0], *shapes[0][len(batches[0]) : -1], shapes[1][-2])
        if mask is not None:
            torch.broadcast_shapes(mask.shape, scores)
        fit = shapes[0][-1] == shapes[1][-1] and shapes[1][-2] == shapes[2][-2]
    except RuntimeError:
        fit = False
    if not fit:
        raise RuntimeError(f"attention can't have query, key and value of the shapes {shapes}")


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
    loss: torch.Tensor = nll_loss(F.log_softmax(input, -1), target, None, reduction, ignored)[0]
    return loss


def tracing_compiler(live: LiveMemory, traced: Callable[[], None]) -> Callable[..., Any]:
    """Return a replacement of `torch.compile` that makes no kernels.

    It keeps the compiler's own division between forward and backward pass, which decides what is
    kept and what is recomputed.

    Args:
        live: Counts what the compiled functions keep.
        traced: Is called for each forward or backward pass that has been traced.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def kernels(graph: Any, inputs: Any) -> Any:
        traced()

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
def no_autocast() -> Iterator[None]:
    """Let code turn autocast off for tensors without numbers, which have none.

    PEFT's adapters of experts do so, and torch raises.
    """
    own = torch.autocast

    def autocast(device_type: str, *arguments: Any, **options: Any) -> Any:
        if device_type == "meta":
            return nullcontext()
        return own(device_type, *arguments, **options)

    torch.autocast = autocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = own  # type: ignore[misc]


@contextmanager
def as_on_a_gpu(compile_: Callable[..., Any] | None) -> Iterator[None]:
    """Replace what torch does otherwise on the meta device than on a GPU.

    Args:
        compile_: The replacement of `torch.compile`; None: nothing is compiled.
    """
    places: tuple[tuple[Any, str, Any], ...] = (
        (F, "scaled_dot_product_attention", attention),
        (F, "dropout", _dropout),
        (F, "cross_entropy", _cross_entropy),
        *([(torch, "compile", compile_)] if compile_ is not None else []),
    )
    own = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        with no_autocast():
            yield
    finally:
        for (module, name, _), function in zip(places, own, strict=True):
            setattr(module, name, function)
