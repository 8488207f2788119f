"""The loss of tokens, in training and in evaluation."""

from typing import Any

import torch
import torch.nn.functional as F

from carbonopt.train.data.packing import IGNORED
from carbonopt.train.speed.output_layer import FusedOutputLayer


def token_nll(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the negative log-likelihood of target tokens in nats, in float32.

    Args:
        logits: [batch, length, vocabulary].
        targets: [batch, length].
        reduction: "sum", or "none" for that of each target (0 where it is IGNORED).
    """
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction=reduction, ignore_index=IGNORED)


class TokenLoss:
    """The negative log-likelihood of target tokens, which the output layer may itself compute.

    Compiled, it never writes the logits in float32, which for a vocabulary of 50,304 are six times
    the model's activations.
    """

    def __init__(self, model: Any, compiled: bool) -> None:
        self._output_layer = model.get_output_embeddings()
        self._fused = isinstance(self._output_layer, FusedOutputLayer)
        self._token_nll = torch.compile(token_nll) if compiled else token_nll

    def expect(self, targets: torch.Tensor) -> None:
        """Set the targets of a training step, before its forward pass."""
        if self._fused:
            self._output_layer.targets = targets

    def sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum in nats for a training step's forward pass.

        With a fused output layer the logits are the sum itself.
        """
        return logits if self._fused else self._token_nll(logits, targets, "sum")

    def of_each(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each target's loss in an evaluation, in nats: float32 [targets].

        It is 0 where a target is IGNORED.
        """
        nll: torch.Tensor = self._token_nll(logits, targets, "none")
        return nll
