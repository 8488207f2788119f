"""Prompts with their responses as examples: each a row of its own, or several packed into one."""

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
    """Of a data set's rows those that have a response to learn or to predict."""

    examples: list[Marked]
    note: str  # how many were left out or cut; empty: none

    @property
    def response_tokens(self) -> int:
        return sum(int(_targets_in_response(example).sum()) for example in self.examples)

    @property
    def tokens(self) -> int:
        """Those that the model reads, as `save_responses` writes them."""
        return sum(len(example.tokens) - 1 for example in self.examples)


def keep(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, plain: bool, sequence_length: int, part: str
) -> Kept:
    """Each example is cut after `sequence_length` tokens that the model reads, and one more that it predicts. Raises
    BadInput if none is left."""
    answered = [chat for chat in chats if chat.answers]
    whole = list(marked(answered, tokenizer, plain))
    most = sequence_length + 1
    fitting = [example for example in whole if _targets_in_response(example)[:sequence_length].any()]
    examples = [Marked(example.tokens[:most], example.in_response[:most]) for example in fitting]
    counts = {
        "{} had no response": len(chats) - len(answered),
        "the prompt of {} left no room for a response": len(whole) - len(fitting),
        f"{{}} were cut to {sequence_length} tokens": sum(len(example.tokens) > most for example in fitting),
    }
    said = ", ".join(words.format(count) for words, count in counts.items() if count)
    if not examples:
        rule = f"the {part} data must have rows with a response that begins within {sequence_length} tokens"
        raise BadInput(f"{rule}, but of its {len(chats)} rows {said or 'there are none'}.")
    return Kept(
        examples, f"Of {count_text(len(chats), f'{part} row')} {len(examples)} are used: {said}." if said else ""
    )


def _targets_in_response(example: Marked) -> npt.NDArray[np.bool_]:
    """bool [tokens - 1]: the first token is never predicted."""
    return example.in_response[1:]


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Which examples share a row, best fit decreasing: the longest first, each into the fullest row that has room for
    it. `lengths`: of each, at most `row_length`."""
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # of which there are rows, sorted
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


def save_responses(folder: Path, examples: Sequence[Marked], vocab_size: int, packed_to: int | None = None) -> int:
    """Writes inputs, targets (the token after each, IGNORED outside of responses) and, of packed rows, positions, which
    begin anew with each example. `packed_to`: the tokens of a row; None: each example is a row. Returns how many rows
    there are."""
    lengths = [len(example.tokens) - 1 for example in examples]
    rows = [[index] for index in range(len(examples))] if packed_to is None else pack(lengths, packed_to)
    inputs = [np.concatenate([examples[index].tokens[:-1] for index in row]) for row in rows]
    targets = [
        np.where(_targets_in_response(examples[index]), examples[index].tokens[1:], IGNORED)
        for row in rows
        for index in row
    ]
    read = Rows.of(inputs, vocab_size)
    arrays = {"inputs": read.tokens, "starts": read.starts, "targets": np.concatenate(targets).astype(np.int32)}
    if packed_to is not None:
        positions = [np.arange(lengths[index], dtype=np.int32) for row in rows for index in row]
        arrays["positions"] = np.concatenate(positions)
    save_arrays(folder, **arrays)
    return len(rows)


class Responses(Examples):
    """What `save_responses` wrote. An example, or packed row, weighs as many as it has targets."""

    def __init__(self, folder: Path, sequence_length: int) -> None:
        arrays = open_arrays(folder)
        starts, positions = arrays["starts"], arrays.get("positions")
        self._sequence_length = sequence_length
        self._inputs, self._targets = Rows(arrays["inputs"], starts), Rows(arrays["targets"], starts)
        self._positions = None if positions is None else Rows(positions, starts)
        weights: Indices = np.add.reduceat(arrays["targets"] != IGNORED, starts[:-1], dtype=np.int64)
        super().__init__(weights, lengths=self._inputs.lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Inputs and targets, int64 [batch, the longest or, packed, the sequence length]; position_ids of packed rows.
        What fills a row up lies behind all that a causal model reads for its targets, so no mask is needed; in a packed
        row each such token is a sequence of its own."""
        longest, positions = self._sequence_length, self._positions
        multiple = PADDED_TO if positions is None else longest
        inputs, _ = self._inputs.padded(indices, 0, multiple, longest)
        targets, _ = self._targets.padded(indices, IGNORED, multiple, longest)
        batch = {"input_ids": inputs, "targets": targets}
        if positions is not None:
            batch["position_ids"], _ = positions.padded(indices, 0, multiple, longest)
        return batch
