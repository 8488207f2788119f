"""When a trial is evaluated, and which part of the evaluation data a rank takes."""

import numpy as np

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
