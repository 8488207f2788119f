"""Averaged weights, by which a model is judged and saved while training goes on with its own. They lie nearer to where
the training is heading than its last steps do (Izmailov et al. 2018, arXiv 1803.05407; Ajroldi et al. 2025, arXiv
2502.06761)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WeightAverage:
    """Of the trained weights after each step, in float32. On a GPU no update waits for it."""

    def __init__(self, engine: Any, reach: float) -> None:
        """`engine`: DeepSpeed's, after `install_fast_step`, whose ranks have whole weights (ZeRO 0 to 2). `reach`: as
        `share_of_newest` has it."""
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        self._reach, optimizer = reach, engine.optimizer
        if isinstance(optimizer, FP16_UnfusedOptimizer):  # its float32 weights, of which the model's are rounded
            self._weights = [weight for group in optimizer.fp16_groups for weight in group]
            self._read = [master for group in optimizer.fp32_groups for master in group]
        else:
            self._weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
            self._read = self._weights
        self._averages = [weight.detach().to(torch.float32, copy=True) for weight in self._read]
        self._one_kernel = all(weight.dtype == torch.float32 for weight in self._read)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """To be called after each step, with its number from 1."""
        share = share_of_newest(step, self._reach)
        if self._one_kernel:
            torch._foreach_lerp_(self._averages, self._read, share)
        else:  # which takes no two precisions
            torch._foreach_mul_(self._averages, 1 - share)
            torch._foreach_add_(self._averages, self._read, alpha=share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights, at the same addresses, and then its own again to the last bit."""
        with torch.no_grad():
            own = [weight.clone() for weight in self._weights]
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)


def share_of_newest(step: int, reach: float) -> float:
    """By which the weights after this step, from 1, enter an average of weights that are `reach` of the steps so far
    old on average: of n steps the first s together count (s/n)^(1/reach - 1). So at each evaluation it reaches as far
    back as at the end, however long the training is (Karras et al. 2024, arXiv 2312.02696, section 3.1).

    Args:
        reach: Above 0, at most 0.5, with which all steps count alike.
    """
    return float(1 - (1 - 1 / step) ** (1 / reach - 1))
