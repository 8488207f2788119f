"""The loss of tokens: negative log-likelihoods, summed, and divided by constants that don't depend on how the tokens
are divided into micro batches and ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from carbonopt.train import ranks
from carbonopt.train.data.packing import IGNORED, Tokens, batches_of_rank, sequence_count, sequences
from carbonopt.train.loop import TrialTrainer
from carbonopt.train.output_layer import FusedOutputLayer

TokenNll = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def token_nll(compiled: bool) -> TokenNll:
    """The negative log-likelihood of target tokens in nats, computed in float32: a function of the logits [batch,
    length, vocabulary], the targets [batch, length] and the reduction: "sum", or "none" for each target (0 where it is
    IGNORED). Compiled, it never writes the logits in float32, which for a vocabulary of 50,304 are six times the
    model's activations."""

    def nll(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), reduction=reduction, ignore_index=IGNORED)

    return torch.compile(nll) if compiled else nll


class TokenLoss:
    """Cross entropy summed over a micro batch's targets and divided by the target tokens of a whole global batch.
    DeepSpeed averages gradients over ranks, so each rank's sum counts world-size-fold. Divided by a constant, gradients
    need no averaging later (transformers #45305 is about averaging twice or not at all). All of a training sequence's
    targets count: packing drops the ragged tail."""

    def __init__(self, model: Any, global_batch_tokens: int, world_size: int, compiled: bool) -> None:
        self._scale = world_size / global_batch_tokens
        output_layer = model.get_output_embeddings()
        # One that gives the sum itself, in place of the logits.
        self._fused = output_layer if isinstance(output_layer, FusedOutputLayer) else None
        self.nll = token_nll(compiled)

    def announce(self, targets: torch.Tensor) -> None:
        """Must be called before the model's forward pass, with int64 [batch, length]."""
        if self._fused is not None:
            self._fused.targets = targets

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"]
        return (self.nll(logits, labels, "sum") if self._fused is None else logits) * self._scale


class TokenTrainer(TrialTrainer):
    """A trial's trainer whose loss is a TokenLoss."""

    compute_loss_func: TokenLoss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.compute_loss_func.announce(inputs["labels"])
        return super().compute_loss(model, inputs, *args, **kwargs)


@torch.no_grad()
def evaluate(model: Any, tokens: Tokens, sequence_length: int, batch_size: int, nll: TokenNll) -> tuple[float, int]:
    """The total negative log-likelihood in nats and the number of target tokens, over all ranks: each counts once, in
    float64. `model` is the DeepSpeed engine and is left in training mode; `nll` is made by `token_nll`."""
    count = sequence_count(len(tokens), sequence_length, keep_tail=True)
    device = ranks.device()
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    target_count = 0
    model.eval()
    for indices in batches_of_rank(count, batch_size, ranks.rank(), ranks.world_size()):
        inputs, targets = sequences(tokens, indices, sequence_length)
        target_count += int((targets != IGNORED).sum())
        logits = model(input_ids=inputs.to(device)).logits
        nll_sum += nll(logits, targets.to(device), "none").double().sum()
    model.train()
    total_nll, total_targets = ranks.summed([float(nll_sum), float(target_count)])
    return total_nll, round(total_targets)
