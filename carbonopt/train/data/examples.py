"""Independent examples, kept as arrays: rows of tokens of any length, images, classes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from carbonopt.train.data.packing import Division, Indices, MicroBatches, Tokens, stored

# Rows are padded to a multiple of this. Tensor cores take such shapes whole, and there are fewer
# shapes.
PADDED_TO = 8


class Examples(ABC):
    """The examples for training, or those for evaluation.

    Args:
        weights: int64 [examples], how much each example counts in the loss's mean: 1, or its number
            of target tokens.
        lengths: [examples]; examples of similar length share a micro batch, for less padding. None:
            all have the same length.
    """

    def __init__(self, weights: Indices, lengths: Indices | None = None) -> None:
        self.weights = weights
        self.order = (
            np.arange(len(weights)) if lengths is None else np.argsort(lengths, kind="stable")
        )

    def __len__(self) -> int:
        return len(self.weights)

    @abstractmethod
    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return a batch of the model's inputs, with what its outputs are judged by.

        An index of −1 stands for a filler, which counts for nothing: its weight in `weights`,
        float32 [batch], is 0, or all of its targets are IGNORED.
        """

    def weights_of(self, indices: Indices) -> torch.Tensor:
        """Return the examples' weights, float32 [batch], with 0 for fillers."""
        return torch.from_numpy(np.where(indices < 0, 0, self.weights[indices]).astype(np.float32))


class ExampleMicroBatches(MicroBatches):
    """Micro batches of examples, each with its `loss_count`.

    `loss_count`, int64, is the sum of the weights of the whole global batch, over which the loss is
    a mean. It is a whole number, since the Trainer turns all other numbers into half precision
    where the model has it.
    """

    def __init__(self, examples: Examples, division: Division) -> None:
        super().__init__(len(examples), division)
        self._of = examples
        self._place_in_order = np.empty(len(examples), np.int64)
        self._place_in_order[examples.order] = np.arange(len(examples))

    def global_batch(self, index: int) -> Indices:
        """Return the step's examples over all ranks, sorted by length.

        For Tiny Shakespeare's speeches with their answers, 128 a step and 16 a micro batch, a third
        of the inputs are then padding, instead of two thirds.
        """
        examples = super().global_batch(index)
        return examples[np.argsort(self._place_in_order[examples])]

    def batch(self, index: int) -> dict[str, torch.Tensor]:
        """Return micro batch `index` as `Examples.batch` does, with its `loss_count`."""
        total = int(self._of.weights[self.global_batch(index)].sum())
        return {**self._of.batch(self.indices(index)), "loss_count": torch.tensor(max(total, 1))}


def padded_length(length: int, multiple: int = PADDED_TO) -> int:
    """Return a length rounded up to the next multiple."""
    return -(-length // multiple) * multiple


class Rows(NamedTuple):
    """Rows of tokens, stored one after the other."""

    tokens: Tokens
    starts: Indices  # [rows + 1], where each row starts, and the end of the last one

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | npt.NDArray[Any]]) -> "Rows":
        lengths = np.array([len(row) for row in rows], np.int64)
        joined = np.fromiter((token for row in rows for token in row), np.int64, int(lengths.sum()))
        return cls(stored(joined), np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> Indices:
        return np.diff(self.starts)

    def padded(
        self, indices: Indices, fill: int, multiple: int = PADDED_TO, longest: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of these rows, and 1 for each that is a token of the row and 0 if not.

        Both are int64 [batch, the longest row's length, rounded up].

        Args:
            fill: the token at the end of shorter rows, and in all of row −1.
            multiple: what the length is rounded up to a multiple of.
            longest: the number of positions that the model has, above which no length is rounded.
        """
        lengths = np.where(indices < 0, 0, self.lengths[indices])
        width = max(multiple, padded_length(int(lengths.max()), multiple))
        width = width if longest is None else min(width, longest)
        places = np.arange(width)
        present = places < lengths[:, None]
        positions = np.where(present, self.starts[np.maximum(indices, 0)][:, None] + places, 0)
        tokens = np.where(present, self.tokens[positions].astype(np.int64), fill)
        return torch.from_numpy(tokens), torch.from_numpy(present.astype(np.int64))


def save_arrays(folder: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write each array into a file of its own in a new folder."""
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)


def open_arrays(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of a folder, by name; ranks and trials share their pages."""
    return {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
        for path in sorted(folder.glob("*.npy"))
    }
