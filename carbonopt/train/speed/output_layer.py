"""A causal language model's output layer that computes the loss itself, some tokens at a time.

The logits of a micro batch never all exist. For a large vocabulary they are most of a training
step's memory, and writing and reading them takes a tenth of its time. With float8 the three
products take half the time on H100-class GPUs.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from carbonopt.train.data.packing import IGNORED

# 2 GiB in half precision; beyond 2**31 compiled kernels also index by slow 64-bit numbers
_LOGITS_AT_ONCE = 2**30
_FLOAT8_MULTIPLE = 16  # divides each side of a float8 product's matrices
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_E4M3_LARGEST, _E5M2_LARGEST = torch.finfo(_E4M3).max, torch.finfo(_E5M2).max
# Options for kernels compiled for GPUs. Fast math computes exp by the GPU's own instruction, which
# is off by two units in the last place of a float32.
_FAST: dict[str, Any] = {"use_fast_math": True}
_SEARCHED = _FAST | {"coordinate_descent_tuning": True}


class FusedOutputLayer(torch.nn.Linear):
    """A linear layer without bias that in training returns the loss in place of the logits.

    The loss is the tokens' summed negative log-likelihood, a float32 scalar in nats. `targets`,
    int64 [batch, length], must be set before. In evaluation it acts as the layer that it replaces,
    whose weights it shares, in full precision.

    With float8, hidden states and weights are rounded to E4M3, each scaled by its largest element.
    The gradient of the logits, which for a sum over tokens lies within [-1, 1], is rounded to E5M2
    with a constant scale. See Micikevicius et al., FP8 Formats for Deep Learning, 2022
    (arXiv:2209.05433).

    Raises:
        ValueError: The layer has a bias or, with float8, a number of inputs that is not a multiple
            of 16.
    """

    def __init__(self, layer: torch.nn.Linear, float8: bool, compiled: bool) -> None:
        if layer.bias is not None:
            raise ValueError("must have no bias, but has one")
        if float8 and layer.in_features % _FLOAT8_MULTIPLE:
            raise ValueError(
                f"must have a multiple of {_FLOAT8_MULTIPLE} inputs, but has {layer.in_features}"
            )
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.targets: Tensor | None = None
        self._parts: _Parts = _Float8Parts(compiled) if float8 else _Parts(compiled)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return super().forward(hidden)
        assert self.targets is not None
        nll_sum: Tensor = _NllSum.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.targets, self._parts
        )
        return nll_sum

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing.

        The parts that gain by it are compiled already; traced as a whole, they would become one
        again.
        """


class _NllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, parts: "_Parts") -> Any:
        """Compute the sum, and the gradients too while each part's logits exist.

        `backward` only scales the gradients.
        """
        rows = hidden.flatten(0, -2)
        grad_rows, size = torch.empty_like(rows), _rows_at_once(len(rows), len(weight))
        pieces = zip(
            rows.split(size), targets.flatten().split(size), grad_rows.split(size), strict=True
        )
        nll_sum, grad_weight = parts.run(pieces, weight, ctx.needs_input_grad[1])
        ctx.save_for_backward(grad_rows.view_as(hidden), grad_weight)
        ctx.weight_dtype = weight.dtype
        return nll_sum

    @staticmethod
    def backward(ctx: Any, grad_nll_sum: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_nll_sum).to(ctx.weight_dtype)
        return grad_hidden * grad_nll_sum.to(grad_hidden.dtype), grad_weight, None, None


def _rows_at_once(rows: int, vocab_size: int) -> int:
    """Return the number of rows in a part, for a power of two of parts, as many as are needed.

    Most batches are then divided evenly, and kernels are compiled for one size.
    """
    parts = 1
    while rows / parts * vocab_size > _LOGITS_AT_ONCE and parts < rows:
        parts *= 2
    return -(-rows // (parts * _FLOAT8_MULTIPLE)) * _FLOAT8_MULTIPLE


# hidden states, targets, and the tensor for the states' gradients
Pieces = Iterable[tuple[Tensor, Tensor, Tensor]]


class _Parts:
    """Loss and gradients of each part, in the layer's own precision."""

    def __init__(self, compiled: bool) -> None:
        # Few kernels are worth a search for a faster one: the kernel of the sums gains a fifth by
        # it, the others, already as fast as memory, gain nothing.
        self._log_sums = _maybe_compiled(_log_sums, compiled, _SEARCHED)
        self._gradient = _maybe_compiled(_gradient, compiled, _FAST)

    def run(self, pieces: Pieces, weight: Tensor, of_weight: bool) -> tuple[Tensor, Tensor | None]:
        """Return the sum in nats and, if asked for, the weight's gradient, in float32."""
        nll_sum, grad_weight = torch.zeros((), device=weight.device), None
        for part, target, grad in pieces:
            logits = part @ weight.t()
            nll, log_sums, p = self._log_sums(logits, target, len(weight))
            nll_sum += nll
            grad_logits = self._gradient(logits, log_sums, len(weight), part.dtype, 1.0)
            _put(grad_logits, target, p, 1.0)
            torch.mm(grad_logits, weight, out=grad)
            if of_weight:
                grad_weight = _added(grad_weight, grad_logits.t() @ part)
        return nll_sum, grad_weight


class _Float8Parts(_Parts):
    def __init__(self, compiled: bool) -> None:
        super().__init__(compiled)
        self._to_e4m3 = _maybe_compiled(_to_e4m3, compiled)
        self._both_ways = _maybe_compiled(_gradient_both_ways, compiled, _FAST)

    def run(self, pieces: Pieces, weight: Tensor, of_weight: bool) -> tuple[Tensor, Tensor | None]:
        vocab_size = len(weight)
        w, w_t, w_scale = self._to_e4m3(_padded(weight, 0.0))
        grad_scale = torch.tensor(1 / _E5M2_LARGEST, device=weight.device)
        nll_sum, grad_weight = torch.zeros((), device=weight.device), None
        for part, target, grad in pieces:
            x, x_t, x_scale = self._to_e4m3(_padded(part, 0.0))
            logits = _product(x, w.t(), x_scale, w_scale, fast=True)
            target = _padded(target, IGNORED)
            nll, log_sums, p = self._log_sums(logits, target, vocab_size)
            nll_sum += nll
            grad_logits, transposed = self._both_ways(
                logits, log_sums, vocab_size, _E5M2, _E5M2_LARGEST
            )
            for way in (grad_logits, transposed.t()):
                _put(way, target, p, _E5M2_LARGEST)
            grad.copy_(_product(grad_logits, w_t.t(), grad_scale, w_scale)[: len(part)])
            if of_weight:
                grad_weight = _added(
                    grad_weight, _product(transposed, x_t.t(), grad_scale, x_scale)[:vocab_size]
                )
        return nll_sum, grad_weight


def _maybe_compiled(function: Any, compiled: bool, options: dict[str, Any] | None = None) -> Any:
    return torch.compile(function, dynamic=False, options=options) if compiled else function


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    """Return the sum in float32, added in place if there is a total already."""
    return more.float() if total is None else total.add_(more)


def _log_sums(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed negative log-likelihood in nats and, for each token, log-sum-exp and p.

    Both are float32 [tokens, 1]; p is the probability of the target. For a token that isn't counted
    they are infinite and 1.

    Args:
        logits: [tokens, columns]; columns from `vocab_size` on are padding.
        targets: int64 [tokens].
        vocab_size: The number of columns that are no padding.
    """
    counted = (targets != IGNORED)[:, None]
    pieces = _unpadded(logits, vocab_size).unflatten(-1, (-1, _piece(logits.shape[-1])))
    log_sums = torch.logsumexp(torch.logsumexp(pieces, -1), -1, keepdim=True)
    log_p = logits.gather(-1, targets.clamp(min=0)[:, None]).float() - log_sums
    log_p = torch.where(counted, log_p, 0.0)
    return -log_p.sum(), torch.where(counted, log_sums, torch.inf), torch.exp(log_p)


def _piece(columns: int) -> int:
    """Return the largest divisor of the columns that one block of a GPU can hold, if not too small.

    A block reads its piece once, where larger ones take two passes (an H200, 50,304 columns: 260
    instead of 355 us for 8,192 rows).
    """
    return next((piece for piece in range(1024, 511, -1) if columns % piece == 0), columns)


def _gradient(
    logits: Tensor, log_sums: Tensor, vocab_size: int, dtype: torch.dtype, scale: float
) -> Tensor:
    """Return the gradient of the sum by the logits times `scale`, without the targets' part.

    It has `dtype`. `_put` adds the part of the targets.
    """
    return (torch.exp(_unpadded(logits, vocab_size) - log_sums) * scale).to(dtype)


def _gradient_both_ways(*args: Any) -> tuple[Tensor, Tensor]:
    """Return `_gradient` and the same transposed.

    Float8 products need both, and one kernel reads the logits once for both.
    """
    gradient = _gradient(*args)
    as_bytes = gradient.view(torch.uint8)  # compilers handle bytes better than float8
    return gradient, as_bytes.t().contiguous().view(gradient.dtype)


def _put(gradient: Tensor, targets: Tensor, p: Tensor, scale: float) -> None:
    """Set the gradients of the targets' logits in place: probability minus one, times `scale`.

    Comparing each column with the target in the kernel instead would take half as long again.
    """
    of_targets = ((p - 1) * scale).to(gradient.dtype)
    if gradient.element_size() == 1:  # float8 can't be scattered, bytes can
        gradient, of_targets = gradient.view(torch.uint8), of_targets.view(torch.uint8)
    gradient.scatter_(-1, targets.clamp(min=0)[:, None], of_targets)


def _unpadded(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits in float32, with minus infinity from column `vocab_size` on."""
    logits = logits.float()
    if logits.shape[-1] == vocab_size:
        return logits
    return torch.where(
        torch.arange(logits.shape[-1], device=logits.device) < vocab_size, logits, -torch.inf
    )


def _to_e4m3(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix and its transpose in float8, and the factor that restores their elements."""
    scale = _E4M3_LARGEST / matrix.abs().amax().float().clamp(
        min=torch.finfo(torch.float32).tiny * _E4M3_LARGEST
    )
    scaled = (matrix.float() * scale).clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(_E4M3)
    return scaled, scaled.t().contiguous(), 1 / scale


def _padded(tensor: Tensor, value: float) -> Tensor:
    """Return the tensor with rows of `value` added up to a multiple of 16."""
    missing = -len(tensor) % _FLOAT8_MULTIPLE
    return (
        F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value)
        if missing
        else tensor
    )


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool = False
) -> Tensor:
    """Return the product in bfloat16.

    `fast` sums in the tensor cores' own precision, which is too little for gradients.
    """
    scales = (left_scale, ScalingType.TensorWise, right_scale, ScalingType.TensorWise)
    return F.scaled_mm(left, right, *scales, output_dtype=torch.bfloat16, use_fast_accum=fast)
