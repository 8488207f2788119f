"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), an optimizer of hidden matrices.

Hidden matrices take orthogonalized steps of momentum; AdamW trains all other parameters.
DeepSpeed's own Muon trains as SGD without ZeRO (DeepSpeed #8441). `torch.optim.Muon` takes
matrices alone, one at a time, and would need a second optimizer for the rest. The steps here are
the same (`tests/train/test_muon.py`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from carbonopt.core.errors import BadInput
from carbonopt.train.models.model import head_names

_MOMENTUM = 0.95
_ITERATIONS = 5
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # a, b, c of x ← a x + (b x xᵀ + c (x xᵀ)²) x
# RMS of an update's elements, the one that AdamW's have: Liu et al. 2025, arXiv 2502.16982,
# equation 4
_RMS = 0.2


class Muon(torch.optim.AdamW):
    """An optimizer that takes Muon's steps for some groups and AdamW's (fused) for the others.

    Groups with `orthogonal: True` take Muon's steps. One learning rate serves both, because an
    orthogonalized update is scaled to the size of AdamW's. All matrices of a shape are
    orthogonalized together.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        """Make the optimizer.

        Args:
            groups: Parameter groups from `groups_of`.
            options: Options of AdamW.
        """
        super().__init__(groups, **options, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "neither the Trainer nor DeepSpeed has one"
        groups = self.param_groups
        for group in groups:
            if group["orthogonal"]:
                self._orthogonal_step(group)
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        step(
            weights,
            [weight.grad for weight in weights],
            momenta,
            group["lr"],
            group["weight_decay"],
        )


def step(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    rate: float | Tensor,
    weight_decay: float,
) -> None:
    """Update matrices and their momenta in place.

    Args:
        weights: The matrices.
        gradients: Their gradients.
        momenta: Their momenta.
        rate: The learning rate: a number, or a tensor without dimensions where a CUDA graph reads
            it.
        weight_decay: The weight decay.
    """
    torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
    ahead = list(torch._foreach_lerp(gradients, momenta, _MOMENTUM))  # Nesterov's momentum
    torch._foreach_mul_(weights, 1 - rate * weight_decay)
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, weight in enumerate(weights):
        by_shape[tuple(sorted(weight.shape))].append(place)
    for shape, places in by_shape.items():
        wide = torch.stack([_wide(ahead[place]) for place in places])
        updates = orthogonalized(wide).to(wide.dtype) * (-rate * _RMS * math.sqrt(max(shape)))
        for place, update in zip(places, updates, strict=True):
            ahead[place] = update if _is_wide(ahead[place]) else update.mT
    torch._foreach_add_(weights, ahead)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return roughly the nearest matrix with orthogonal rows for each matrix.

    Singular values become 0.7 to 1.2, by five Newton-Schulz iterations, in bf16 on a GPU.

    Args:
        matrices: [count, rows, columns], with no more rows than columns.
    """
    a, b, c = _POLYNOMIAL
    x = matrices if matrices.is_cpu else matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # now no singular value is above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _wide(matrix: Tensor) -> Tensor:
    return matrix if _is_wide(matrix) else matrix.mT


def groups_of(model: Any, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for `Muon`.

    Parameters in `decayed` get weight decay.

    Raises:
        BadInput: None of the parameters is a hidden matrix.
    """
    matrices = {id(matrix) for matrix in hidden_matrices(model)}
    parts: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts.setdefault((id(parameter) in matrices, name in decayed), []).append(parameter)
    if not any(orthogonal for orthogonal, _ in parts):
        needs = "optimizer: muon needs hidden linear layers to train"
        raise BadInput(f"{needs}, but {model.config.model_type} has none here; leave it out.")
    return [
        {
            "params": parameters,
            "orthogonal": orthogonal,
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (orthogonal, decays), parameters in parts.items()
    ]


def hidden_matrices(model: Any) -> Iterator[Tensor]:
    """Generate the trained matrices of linear layers, without those that make the outputs."""
    whole: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    outer = [whole.get_submodule(name) for name in head_names(whole)]
    if (output_layer := whole.get_output_embeddings()) is not None:
        outer.append(output_layer)
    last = {id(parameter) for module in outer for parameter in module.parameters()}
    for module in model.modules():
        if (
            isinstance(module, nn.Linear | Conv1D)
            and module.weight.requires_grad
            and id(module.weight) not in last
        ):
            yield module.weight
