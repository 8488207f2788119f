"""Averaged weights, with which a model is evaluated and saved while training uses its own.

They lie nearer to where training is heading than its last steps do (Izmailov et al. 2018, arXiv
1803.05407; Ajroldi et al. 2025, arXiv 2502.06761).

torch's `swa_utils.AveragedModel` copies the whole module and averages its weights in their own
precision. Here the averages are in float32, from DeepSpeed's float32 weights where it has them, and
the model itself is given them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class WeightAverage:
    """The average of the weights after each step, in float32; updates don't wait for a GPU."""

    def __init__(self, engine: Any, reach: float) -> None:
        """Start the average with the present weights.

        Args:
            engine: DeepSpeed's engine after `install_fast_step`, whose ranks have whole weights
                (ZeRO 0 to 2).
            reach: See `share_of_newest`.
        """
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

        self._reach, optimizer = reach, engine.optimizer
        # read its float32 weights, of which the model's are rounded copies
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            self._weights = [weight for group in optimizer.fp16_groups for weight in group]
            self._read = [master for group in optimizer.fp32_groups for master in group]
        else:
            self._weights = [
                weight for weight in engine.module.parameters() if weight.requires_grad
            ]
            self._read = self._weights
        self._averages = [weight.detach().to(torch.float32, copy=True) for weight in self._read]
        self._one_kernel = all(weight.dtype == torch.float32 for weight in self._read)

    @property
    def averages(self) -> list[torch.Tensor]:
        """The averaged weights, in the order of the trained weights."""
        return self._averages

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the present weights; call it after each step, with its number from 1."""
        share = share_of_newest(step, self._reach)
        if self._one_kernel:
            torch._foreach_lerp_(self._averages, self._read, share)
        else:  # lerp takes only one precision
            torch._foreach_mul_(self._averages, 1 - share)
            torch._foreach_add_(self._averages, self._read, alpha=share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within, at the same addresses.

        Afterwards it has its own again, to the last bit.
        """
        with torch.no_grad():
            own = [weight.clone() for weight in self._weights]
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)


def share_of_newest(step: int, reach: float) -> float:
    """Return the share with which the weights after a step enter their average.

    After n steps, the mean age of the averaged weights is `reach` × n steps: the weights after the
    first s steps together have the share (s/n)^(1/reach - 1). At each evaluation the average thus
    reaches back over the same fraction of the steps so far, however long the training is (Karras et
    al. 2024, arXiv 2312.02696, section 3.1).

    Args:
        step: The step's number, from 1.
        reach: Above 0 and at most 0.5. At 0.5 all steps count alike.
    """
    return float(1 - (1 - 1 / step) ** (1 / reach - 1))
