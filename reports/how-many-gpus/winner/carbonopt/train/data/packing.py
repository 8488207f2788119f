"""Token arrays as sequences: which tokens a sequence holds, in which order a trial sees them, and how many at once."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from carbonopt.core.errors import BadInput
from carbonopt.train import ranks

IGNORED = -100  # a target that is not counted, as torch's cross entropy has it

_MICRO_BATCHES_AHEAD = 8  # a step's are asked for all at once
_USEFUL_TOKENS = 2**15  # in a forward pass
_SHARE_FOR_LOGITS = 16  # one such part of the memory
_BYTES_PER_LOGIT = 6  # in half precision, and in float32 for the loss

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]


def open_tokens(path: Path) -> Tokens:
    """Mapped: ranks and trials share its pages, and nothing is read before it is needed."""
    tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    return tokens


def sequence_count(tokens: int, sequence_length: int, keep_tail: bool) -> int:
    """Every token but the first is a target, once. Training drops the ragged tail (keep_tail false), evaluation not."""
    targets = max(0, tokens - 1)
    return -(-targets // sequence_length) if keep_tail else targets // sequence_length


def sequences(tokens: Tokens, indices: Indices, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs tokens[i·L : i·L+L] and targets tokens[i·L+1 : i·L+L+1] of sequences i, both int64 [len(indices), L]. What
    a ragged last sequence lacks, and all of an index −1, is filled with token 0 and the target IGNORED."""
    positions = indices[:, None] * length + np.arange(length + 1)
    present = (positions < len(tokens)) & (indices[:, None] >= 0)
    window = tokens[np.where(present, positions, 0)].astype(np.int64)
    inputs = np.where(present[:, :-1], window[:, :-1], 0)
    targets = np.where(present[:, 1:], window[:, 1:], IGNORED)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def total_steps(train_examples: int, global_batch_size: int, epochs: float) -> int:
    """Epochs × the whole global batches in an epoch, rounded, at least one. Raises BadInput if there is none."""
    steps_per_epoch = train_examples // global_batch_size
    if steps_per_epoch == 0:
        rule = f"global_batch_size must be at most the training set's {train_examples} examples"
        smaller = "make it, or of one text sequence_length, smaller, or give more to train on"
        raise BadInput(f"{rule}, but got {global_batch_size}; {smaller}.")
    return max(1, round(epochs * steps_per_epoch))


def evaluation_steps(total_steps: int, evaluations: int) -> list[int]:
    """The steps after which a trial is evaluated: at even fractions, distinct, the last at its end."""
    return sorted({max(1, round(k * total_steps / evaluations)) for k in range(1, evaluations + 1)})


def batch_size_that_fits(memory_bytes: int, vocab_size: int, sequence_length: int, count: int) -> int:
    """Sequences in a forward pass of an evaluation, of `count`, on a GPU: as many as its tensor cores have a use for,
    unless their logits took too much of its memory. All trials' perplexities are then computed alike."""
    tokens = min(_USEFUL_TOKENS, memory_bytes // _SHARE_FOR_LOGITS // (_BYTES_PER_LOGIT * vocab_size))
    largest = max(1, tokens // sequence_length)
    return -(-count // -(-count // largest))  # in passes of equal size


def batches_of_rank(count: int, batch_size: int, rank: int, world_size: int) -> Indices:
    """The sequences that a rank evaluates, int64 [batches, batch_size]: rank, rank + world size, …; −1 is none. Under
    ZeRO-3 a rank with fewer batches would leave the others waiting for its part of the weights."""
    batches = -(-count // (world_size * batch_size))
    indices = np.full(batches * batch_size, -1, np.int64)
    own = np.arange(rank, count, world_size)
    indices[: len(own)] = own
    return indices.reshape(batches, batch_size)


@dataclass(frozen=True)
class Division:
    """How a trial's examples are divided into global batches, and these into the micro batches of this rank."""

    global_batch_size: int
    micro_batch_size: int
    steps: int
    seed: int
    rank: int
    world_size: int

    @property
    def accumulation_steps(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.world_size)


class MicroBatches(Dataset[dict[str, torch.Tensor]], ABC):
    """One rank's micro batches in the order of training; item i is one forward pass. Each epoch permutes the examples,
    from (seed, epoch), and keeps whole global batches: they are the same however they are divided into micro batches,
    accumulation steps and ranks."""

    def __init__(self, examples: int, division: Division) -> None:
        self._examples, self.division, self._epoch = examples, division, -1

    def __len__(self) -> int:
        return self.division.steps * self.division.accumulation_steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.batch(index)

    @abstractmethod
    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Micro batch `index` of this rank."""

    def indices(self, index: int) -> Indices:
        """The examples of micro batch `index` of this rank."""
        accumulation = index % self.division.accumulation_steps
        start = (accumulation * self.division.world_size + self.division.rank) * self.division.micro_batch_size
        return self.global_batch(index)[start : start + self.division.micro_batch_size]

    def global_batch(self, index: int) -> Indices:
        """The examples, over all ranks, of the step that micro batch `index` belongs to."""
        size = self.division.global_batch_size
        epoch, step = divmod(index // self.division.accumulation_steps, self._examples // size)
        if epoch != self._epoch:
            self._epoch = epoch
            self.begin_epoch(np.random.default_rng((self.division.seed, epoch)))
        return self._permutation[step * size : (step + 1) * size]

    def begin_epoch(self, random: np.random.Generator) -> None:
        """Draws what an epoch has of its own."""
        self._permutation = random.permutation(self._examples)


class TextMicroBatches(MicroBatches):
    """Of one text, which each epoch cuts anew from an offset. Cut at the same places in every epoch, a small model
    learns its sequences by heart: on Tiny Shakespeare (10.7 million parameters, H200) the evaluation loss then turned
    at 1.48 nats after 25 epochs."""

    def __init__(self, tokens: Tokens, sequence_length: int, division: Division) -> None:
        super().__init__(sequence_count(len(tokens), sequence_length, keep_tail=False), division)
        self._tokens, self._length = tokens, sequence_length

    def begin_epoch(self, random: np.random.Generator) -> None:
        super().begin_epoch(random)
        self.offset = int(random.integers(self._length))

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Inputs and the tokens after them, int64 [micro batch, length]."""
        indices, length = self.indices(index), self._length
        positions = self.offset + indices[:, None] * length + np.arange(length + 1)
        # What lies before the offset follows the text's end, so that no token is lost.
        window = torch.from_numpy(self._tokens[positions % len(self._tokens)].astype(np.int64))
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


class PrefetchLoader(DataLoader[Any]):
    """Micro batches on this rank's device: made by a thread while it computes, copied without waiting for it. Made
    between two steps they left an H200 idle for 2 to 46 ms a step (GPT-2 124M, 4 micro batches of 128 x 512 tokens)."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:  # type: ignore[override]
        batches, device = super().__iter__(), ranks.device()
        # Pinning memory is an affair of the thread's current device, which else would be the first.
        on_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        thread = ThreadPoolExecutor(1, "batches", *on_device)
        try:
            ahead = deque(thread.submit(next, batches, None) for _ in range(_MICRO_BATCHES_AHEAD))
            while (batch := ahead.popleft().result()) is not None:
                ahead.append(thread.submit(next, batches, None))
                yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        finally:
            thread.shutdown(cancel_futures=True)
