"""Examples that stand for themselves, kept as arrays: rows of tokens of any length, images, classes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from carbonopt.train.data.packing import Division, Indices, MicroBatches, Tokens

PADDED_TO = 8  # a multiple of it: the shapes that tensor cores take whole, and fewer of them


class Examples(ABC):
    """Those for training, or those for evaluation.

    Args:
        weights: int64 [examples], how much of the loss's mean each counts for: 1, or its target tokens.
        lengths: [examples]; those of similar length stand in one micro batch, for less padding. None: all are alike.
    """

    def __init__(self, weights: Indices, lengths: Indices | None = None) -> None:
        self.weights = weights
        self.order = np.arange(len(weights)) if lengths is None else np.argsort(lengths, kind="stable")

    def __len__(self) -> int:
        return len(self.weights)

    @abstractmethod
    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """What a model reads and is judged by. An index of −1 is a filler, with a weight of 0 in `weights`, float32
        [batch]."""

    def weights_of(self, indices: Indices) -> torch.Tensor:
        """float32 [batch]."""
        return torch.from_numpy(np.where(indices < 0, 0, self.weights[indices]).astype(np.float32))


class ExampleMicroBatches(MicroBatches):
    """Each has its `loss_count`, int64: the weights of its whole global batch, over which the loss is a mean. Whole
    numbers, since the Trainer makes all others half as precise where the model is."""

    def __init__(self, examples: Examples, division: Division) -> None:
        super().__init__(len(examples), division)
        self._of = examples
        self._place_in_order = np.empty(len(examples), np.int64)
        self._place_in_order[examples.order] = np.arange(len(examples))

    def global_batch(self, index: int) -> Indices:
        """By length: of Tiny Shakespeare's speeches with their answers, 128 a step and 16 a micro batch, a third of the
        inputs are then padding, and else two thirds."""
        examples = super().global_batch(index)
        return examples[np.argsort(self._place_in_order[examples])]

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """As `Examples.batch`."""
        total = int(self._of.weights[self.global_batch(index)].sum())
        return {**self._of.batch(self.indices(index)), "loss_count": torch.tensor(max(total, 1))}


def padded_length(length: int, multiple: int = PADDED_TO) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


class Rows(NamedTuple):
    """Rows of tokens, one after the other."""

    tokens: Tokens
    starts: Indices  # [rows + 1]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | npt.NDArray[Any]], vocab_size: int) -> "Rows":
        lengths = np.array([len(row) for row in rows], np.int64)
        joined = np.fromiter((token for row in rows for token in row), np.int64, int(lengths.sum()))
        tokens: Tokens = joined.astype(np.uint16) if vocab_size <= 2**16 else joined.astype(np.uint32)
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> Indices:
        return np.diff(self.starts)

    def padded(
        self, indices: Indices, fill: int, multiple: int = PADDED_TO, longest: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of these rows and whether each is one, int64 [batch, the longest row's length, rounded up]; `fill`
        stands at the end of the shorter ones, and in all of row −1. `longest`: the most that the model has positions
        for, to which no row's length is rounded up beyond."""
        lengths = np.where(indices < 0, 0, self.lengths[indices])
        width = max(multiple, padded_length(int(lengths.max()), multiple))
        width = width if longest is None else min(width, longest)
        places = np.arange(width)
        present = places < lengths[:, None]
        positions = np.where(present, self.starts[np.maximum(indices, 0)][:, None] + places, 0)
        tokens = np.where(present, self.tokens[positions].astype(np.int64), fill)
        return torch.from_numpy(tokens), torch.from_numpy(present.astype(np.int64))


def save_arrays(folder: Path, **arrays: npt.NDArray[Any]) -> None:
    """One file each, in a new folder."""
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def open_arrays(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """By name, mapped: ranks and trials share their pages."""
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
