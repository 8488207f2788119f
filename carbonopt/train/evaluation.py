"""Token-weighted evaluation: sums over all target tokens of all ranks, divided nowhere here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from carbonopt.train import ranks
from carbonopt.train.data.packing import IGNORED, Tokens, sequence_count, sequences

_USEFUL_TOKENS = 2**15  # in a forward pass
_SHARE_FOR_LOGITS = 16  # one such part of the memory
_BYTES_PER_LOGIT = 6  # in half precision, and in float32 for the loss


def evaluation_steps(total_steps: int, evaluations: int) -> list[int]:
    """The steps after which a trial is evaluated: at even fractions, distinct, the last at its end."""
    return sorted({max(1, round(k * total_steps / evaluations)) for k in range(1, evaluations + 1)})


def batch_size_that_fits(memory_bytes: int, vocab_size: int, sequence_length: int, count: int) -> int:
    """Sequences in a forward pass of an evaluation on a GPU of so much memory, of `count` in all: as many as its tensor
    cores have a use for, unless their logits took too much of it. The same for all trials, whatever else they hold, so
    that their perplexities are computed alike."""
    tokens = min(_USEFUL_TOKENS, memory_bytes // _SHARE_FOR_LOGITS // (_BYTES_PER_LOGIT * vocab_size))
    largest = max(1, tokens // sequence_length)
    return -(-count // -(-count // largest))  # in passes of equal size


def batches_of_rank(count: int, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """The sequences that a rank evaluates, int64 [batches, batch_size]: rank, rank + world size, …; −1 is none.

    Every rank has as many batches as the others, full of −1 where it has fewer sequences: under ZeRO-3 a rank that
    stopped early would leave the others waiting for its part of the weights.
    """
    per_rank = -(-count // world_size)
    batches = -(-per_rank // batch_size)
    indices = np.full(batches * batch_size, -1, np.int64)
    own = np.arange(rank, count, world_size)
    indices[: len(own)] = own
    return indices.reshape(batches, batch_size)


TokenNll = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def token_nll(compiled: bool) -> TokenNll:
    """The negative log-likelihood of target tokens in nats, computed in float32.

    Compiled, it never writes the logits in float32, which for a vocabulary of 50,304 are six times the model's
    activations.

    Returns:
        A function of the logits [batch, length, vocabulary], the targets [batch, length] and the reduction: "sum", or
        "none" for each target (0 where it is IGNORED).
    """

    def nll(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), reduction=reduction, ignore_index=IGNORED)

    return torch.compile(nll) if compiled else nll


@torch.no_grad()
def evaluate(model: Any, tokens: Tokens, sequence_length: int, batch_size: int, nll: TokenNll) -> tuple[float, int]:
    """The total negative log-likelihood in nats and the number of target tokens, over all ranks.

    Every target token counts once, in float64; `model` is the DeepSpeed engine and is left in training mode. `nll` is
    made by `token_nll`.
    """
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
