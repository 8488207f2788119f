"""Prompts with responses as examples, one in each row or several packed into a row."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.train.data.chat import Chat, Marked, marked
from carbonopt.train.data.examples import PADDED_TO, Examples, Rows, open_arrays, save_arrays
from carbonopt.train.data.packing import IGNORED, Indices


class Kept(NamedTuple):
    """The examples of a data set's rows that have a response to learn or to predict."""

    examples: list[Marked]
    note: str  # how many rows were left out or cut; empty: none

    @property
    def response_tokens(self) -> int:
        return sum(int(_targets_in_response(example).sum()) for example in self.examples)

    @property
    def tokens(self) -> int:
        """The number of tokens that the model reads, as `save_responses` writes them."""
        return sum(len(example.tokens) - 1 for example in self.examples)


def keep(
    chats: Sequence[Chat],
    tokenizer: PreTrainedTokenizerBase,
    plain: bool,
    sequence_length: int,
    part: str,
) -> Kept:
    """Tokenize chats, and keep those with a response within `sequence_length`.

    Each example is cut after `sequence_length` tokens that the model reads, and one more that it
    predicts. An example's first token has none before it from which it could be predicted, so that
    a response of one token needs a prompt or a beginning-of-text token.

    Raises:
        BadInput: if no example is left, or the assistant is called otherwise.
    """
    for chat in chats:
        chat.check_roles()
    answered = [chat for chat in chats if chat.answers]
    whole = list(marked(answered, tokenizer, plain))
    most = sequence_length + 1
    unpredictable = [example for example in whole if not _targets_in_response(example).any()]
    fitting = [
        example for example in whole if _targets_in_response(example)[:sequence_length].any()
    ]
    examples = [Marked(example.tokens[:most], example.in_response[:most]) for example in fitting]
    counts = {
        "{} had no response": len(chats) - len(answered),
        "{} had a response of one token and no prompt to predict it from": len(unpredictable),
        "the prompt of {} left no room for a response": (
            len(whole) - len(fitting) - len(unpredictable)
        ),
        f"{{}} were cut to their first {sequence_length} tokens": sum(
            len(example.tokens) > most for example in fitting
        ),
    }
    said = ", ".join(words.format(count) for words, count in counts.items() if count)
    if not examples:
        rule = (
            f"the {part} data must have rows with a response that begins within {sequence_length}"
            " tokens"
        )
        raise BadInput(f"{rule}, but of its {len(chats)} rows {said or 'there are none'}.")
    return Kept(
        examples,
        (
            f"Of {count_text(len(chats), f'{part} row')} {len(examples)} are used: {said}."
            if said
            else ""
        ),
    )


def _targets_in_response(example: Marked) -> npt.NDArray[np.bool_]:
    """Return which targets are in a response, bool [tokens - 1]; the first token is no target."""
    return example.in_response[1:]


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the indices of the examples that share each row.

    The method is best fit decreasing: the longest example first, each into the fullest row that has
    room for it.

    Args:
        lengths: the examples' lengths, each at most `row_length`.
    """
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the free lengths of which there are rows, sorted
    for example in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if (place := bisect_left(rooms, lengths[example])) < len(rooms):
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms.pop(place)
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(example)
        if left := room - lengths[example]:
            if not rows_by_room[left]:
                insort(rooms, left)
            rows_by_room[left].append(row)
    return rows


def save_responses(folder: Path, examples: Sequence[Marked], packed_to: int | None = None) -> int:
    """Write the examples' inputs and targets into a new folder.

    A target is the token after an input, or IGNORED outside of responses. Packed rows also get
    positions, which begin anew with each example.

    Args:
        packed_to: the tokens of a row; None: each example is a row.

    Returns:
        The number of rows.
    """
    lengths = [len(example.tokens) - 1 for example in examples]
    rows = (
        [[index] for index in range(len(examples))]
        if packed_to is None
        else pack(lengths, packed_to)
    )
    inputs = [np.concatenate([examples[index].tokens[:-1] for index in row]) for row in rows]
    targets = [
        np.where(_targets_in_response(examples[index]), examples[index].tokens[1:], IGNORED)
        for row in rows
        for index in row
    ]
    read = Rows.of(inputs)
    arrays = {
        "inputs": read.tokens,
        "starts": read.starts,
        "targets": np.concatenate(targets).astype(np.int32),
    }
    if packed_to is not None:
        positions = [np.arange(lengths[index], dtype=np.int32) for row in rows for index in row]
        arrays["positions"] = np.concatenate(positions)
    save_arrays(folder, **arrays)
    return len(rows)


class Responses(Examples):
    """The examples that `save_responses` wrote; each row weighs as much as it has targets."""

    def __init__(self, folder: Path, sequence_length: int) -> None:
        arrays = open_arrays(folder)
        starts, positions = arrays["starts"], arrays.get("positions")
        self._sequence_length = sequence_length
        self._inputs, self._targets = (
            Rows(arrays["inputs"], starts),
            Rows(arrays["targets"], starts),
        )
        self._positions = None if positions is None else Rows(positions, starts)
        # padding at a row's end counts as one more sequence
        self._most_in_a_row = (
            0
            if positions is None
            else 1 + int(np.add.reduceat(positions == 0, starts[:-1], dtype=np.int64).max())
        )
        weights: Indices = np.add.reduceat(
            arrays["targets"] != IGNORED, starts[:-1], dtype=np.int64
        )
        super().__init__(weights, lengths=self._inputs.lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return inputs and targets, and of packed rows `position_ids` and `example_starts`.

        They are int64 [batch, length], where the length is the longest row's, rounded up, or, with
        packing, the sequence length. No mask is needed: a causal model reads nothing of the padding
        at a row's end for its targets. By the positions each padding token of a packed row is a
        sequence of its own. `example_starts`, int32 [batch, most], are the places where a row's
        examples and its padding begin, filled up with the sequence length.
        """
        longest, positions = self._sequence_length, self._positions
        multiple = PADDED_TO if positions is None else longest
        inputs, _ = self._inputs.padded(indices, 0, multiple, longest)
        targets, _ = self._targets.padded(indices, IGNORED, multiple, longest)
        batch = {"input_ids": inputs, "targets": targets}
        if positions is not None:
            batch["position_ids"], present = positions.padded(indices, 0, multiple, longest)
            begins = (batch["position_ids"] == 0) & (present == 1)
            batch["example_starts"] = self._starts(begins.numpy(), present.numpy())
        return batch

    def _starts(
        self, begins: npt.NDArray[np.bool_], present: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the `example_starts` of packed rows.

        Args:
            begins: bool [batch, length], whether an example begins at a place.
            present: [batch, length], 0 where a row has padding.
        """
        length = begins.shape[1]
        starts = np.full((len(begins), self._most_in_a_row), length, np.int32)
        for row, places in enumerate(map(np.flatnonzero, begins)):
            starts[row, : len(places)] = places
            starts[row, len(places)] = present[row].sum()
        return torch.from_numpy(starts)
