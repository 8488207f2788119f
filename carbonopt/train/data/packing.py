"""Sequences of token arrays, the order in which a trial sees them, and the sizes of batches."""

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

IGNORED = -100  # the target that is not counted, as in torch's cross entropy

_MICRO_BATCHES_AHEAD = 8  # a step's micro batches are asked for all at once
_USEFUL_TOKENS = 2**15  # the most tokens of a forward pass that tensor cores have a use for
_SHARE_FOR_LOGITS = 16  # logits may take one such part of the memory
_BYTES_PER_LOGIT = 6  # once in half precision, and once in float32 for the loss

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]


def stored(ids: npt.NDArray[Any]) -> Tokens:
    """Return token ids as uint16 if that holds the largest of them, else as uint32."""
    return ids.astype(np.uint16) if not len(ids) or ids.max() < 2**16 else ids.astype(np.uint32)


def open_tokens(path: Path) -> Tokens:
    """Map token ids from a file.

    Ranks and trials share its pages, and nothing is read before it is needed.
    """
    tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    return tokens


def sequence_count(tokens: int, sequence_length: int, keep_tail: bool) -> int:
    """Return how many sequences an array of tokens has.

    Every token but the first is a target, once.

    Args:
        keep_tail: False to drop the ragged last sequence, as training does; evaluation keeps it.
    """
    targets = max(0, tokens - 1)
    return -(-targets // sequence_length) if keep_tail else targets // sequence_length


def sequences(tokens: Tokens, indices: Indices, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of sequences, both int64 [len(indices), L].

    Sequence i has the inputs tokens[i·L : i·L+L] and the targets tokens[i·L+1 : i·L+L+1]. What a
    ragged last sequence lacks, and all of an index −1, is filled with token 0 and the target
    IGNORED.
    """
    positions = indices[:, None] * length + np.arange(length + 1)
    present = (positions < len(tokens)) & (indices[:, None] >= 0)
    window = tokens[np.where(present, positions, 0)].astype(np.int64)
    inputs = np.where(present[:, :-1], window[:, :-1], 0)
    targets = np.where(present[:, 1:], window[:, 1:], IGNORED)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def total_steps(train_examples: int, global_batch_size: int, epochs: float) -> int:
    """Return the number of a trial's steps.

    This is epochs × the whole global batches in an epoch, rounded, and at least one.

    Raises:
        BadInput: if an epoch has no whole global batch.
    """
    steps_per_epoch = train_examples // global_batch_size
    if steps_per_epoch == 0:
        rule = f"global_batch_size must be at most the training set's {train_examples} examples"
        smaller = (
            "give a smaller one or more training data (of plain text, a smaller"
            " workload.sequence_length makes more examples)"
        )
        raise BadInput(f"{rule}, but got {global_batch_size}; {smaller}.")
    return max(1, round(epochs * steps_per_epoch))


def evaluation_steps(total_steps: int, evaluations: int) -> list[int]:
    """Return the steps after which a trial is evaluated.

    They are distinct and lie at even fractions of the trial; the last one is its end.
    """
    return sorted({max(1, round(k * total_steps / evaluations)) for k in range(1, evaluations + 1)})


def batch_size_that_fits(
    memory_bytes: int, vocab_size: int, sequence_length: int, count: int
) -> int:
    """Return the number of sequences in a forward pass of an evaluation of `count` on a GPU.

    It is as many as the tensor cores have a use for, or fewer where their logits would take too
    much of the GPU's memory. So the perplexities of all trials are computed alike.
    """
    tokens = min(
        _USEFUL_TOKENS, memory_bytes // _SHARE_FOR_LOGITS // (_BYTES_PER_LOGIT * vocab_size)
    )
    largest = max(1, tokens // sequence_length)
    return -(-count // -(-count // largest))  # for passes of equal size


def batches_of_rank(count: int, batch_size: int, rank: int, world_size: int) -> Indices:
    """Return the sequences that a rank evaluates, int64 [batches, batch_size].

    They are rank, rank + world size and so on; −1 is no sequence. All ranks get the same number of
    batches: under ZeRO-3 a rank with fewer would leave the others waiting for its part of the
    weights.
    """
    batches = -(-count // (world_size * batch_size))
    indices = np.full(batches * batch_size, -1, np.int64)
    own = np.arange(rank, count, world_size)
    indices[: len(own)] = own
    return indices.reshape(batches, batch_size)


@dataclass(frozen=True)
class Division:
    """The division of a trial's examples into global batches, and of these into micro batches.

    The micro batches are those of this rank.
    """

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
    """One rank's micro batches in the order of training; each item is one forward pass.

    Each epoch permutes the examples, from (seed, epoch), and keeps whole global batches. So global
    batches are the same however they are divided into micro batches, accumulation steps and ranks.
    """

    def __init__(self, examples: int, division: Division) -> None:
        self._examples, self.division, self._epoch = examples, division, -1
        self._steps_before = 0

    def begin_after(self, step: int) -> None:
        """Leave out the micro batches of the first steps, up to this one."""
        self._steps_before = step

    def __len__(self) -> int:
        return (self.division.steps - self._steps_before) * self.division.accumulation_steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.batch(self._steps_before * self.division.accumulation_steps + index)

    @abstractmethod
    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Return micro batch `index` of this rank."""

    def indices(self, index: int) -> Indices:
        """Return the examples of micro batch `index` of this rank."""
        accumulation = index % self.division.accumulation_steps
        start = (
            accumulation * self.division.world_size + self.division.rank
        ) * self.division.micro_batch_size
        return self.global_batch(index)[start : start + self.division.micro_batch_size]

    def global_batch(self, index: int) -> Indices:
        """Return all ranks' examples in the step that micro batch `index` belongs to."""
        size = self.division.global_batch_size
        epoch, step = divmod(index // self.division.accumulation_steps, self._examples // size)
        if epoch != self._epoch:
            self._epoch = epoch
            self.begin_epoch(np.random.default_rng((self.division.seed, epoch)))
        return self._permutation[step * size : (step + 1) * size]

    def begin_epoch(self, random: np.random.Generator) -> None:
        """Draw an epoch's random choices, such as the order of the examples."""
        self._permutation = random.permutation(self._examples)


class TextMicroBatches(MicroBatches):
    """Micro batches of one text, which each epoch cuts into sequences from a new offset.

    If every epoch cut it at the same places, a small model would learn the sequences by heart: on
    Tiny Shakespeare (10.7 million parameters, H200) the evaluation loss then turned at 1.48 nats
    after 25 epochs.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, division: Division) -> None:
        super().__init__(sequence_count(len(tokens), sequence_length, keep_tail=False), division)
        self._tokens, self._length = tokens, sequence_length

    def begin_epoch(self, random: np.random.Generator) -> None:
        super().begin_epoch(random)
        self.offset = int(random.integers(self._length))

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Return inputs and the tokens after them, int64 [micro batch, length]."""
        indices, length = self.indices(index), self._length
        positions = self.offset + indices[:, None] * length + np.arange(length + 1)
        # What lies before the offset follows after the text's end, so that no token is lost.
        window = torch.from_numpy(self._tokens[positions % len(self._tokens)].astype(np.int64))
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


class PrefetchLoader(DataLoader[Any]):
    """Micro batches on this rank's device, prepared while it computes.

    A thread makes them, and they are copied without waiting. Made between two steps, they left an
    H200 idle for 2 to 46 ms a step (GPT-2 124M, 4 micro batches of 128 x 512 tokens).
    """

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:  # type: ignore[override]
        batches, device = super().__iter__(), ranks.device()
        # Memory is pinned for the thread's current device, which would otherwise be the first one.
        on_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        thread = ThreadPoolExecutor(1, "batches", *on_device)
        try:
            ahead = deque(thread.submit(next, batches, None) for _ in range(_MICRO_BATCHES_AHEAD))
            while (batch := ahead.popleft().result()) is not None:
                ahead.append(thread.submit(next, batches, None))
                yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        finally:
            thread.shutdown(cancel_futures=True)
