"""Pairs of answers as rows of tokens, and as batches."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.train.data.examples import Examples, Rows, open_arrays, save_arrays
from carbonopt.train.data.packing import IGNORED, Indices, Tokens
from carbonopt.train.data.pairs import Pair
from carbonopt.train.data.tokens import TextEncoder, special_tokens_around

PAD = "<|pad|>"
Row = npt.NDArray[np.uint32]  # token ids


def plain_texts(pairs: Sequence[Pair]) -> list[str]:
    """Return the texts from which a tokenizer can be trained.

    Messages are not among them: they need a tokenizer with a chat template, which is already
    trained.
    """
    texts = [(pair.prompt, pair.chosen, pair.rejected) for pair in pairs if not pair.are_messages]
    return [f"{prompt}{answer}" for prompt, *answers in texts for answer in answers]


@dataclass(frozen=True)
class PairTokens:
    """The tokenized pairs of the training or evaluation part.

    Row 2i is the chosen answer of pair i with its prompt, row 2i + 1 the rejected one.
    """

    rows: list[Row]
    notes: tuple[str, ...]  # on pairs that were left out or cut

    def __len__(self) -> int:
        return len(self.rows) // 2

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    def save(self, folder: Path, pad: int) -> None:
        rows = Rows.of(self.rows)
        save_arrays(folder, tokens=rows.tokens, starts=rows.starts, pad=np.array(pad))


def tokenized(
    pairs: Sequence[Pair], encoder: TextEncoder, length: int, part: str, ends: bool = False
) -> PairTokens:
    """Tokenize pairs, and shorten prompts of pairs that are too long.

    If a row has more than `length` tokens, both rows of its pair lose the same beginning of their
    prompt. Where that would cut an answer, the pair is left out.

    Args:
        part: the name of this part of the data, for use in sentences.
        ends: True to end plain texts with the end-of-text token even if that token also pads rows.

    Raises:
        BadInput: if both rows of a pair are the same, or no pair is left.
    """
    texts = [text for pair in pairs for text in pair.texts(encoder.tokenizer)]
    ids = (row.astype(np.uint32) for row in encoder.rows(texts))
    # A chat template brings its own special tokens.
    around = (
        Frame.of([], [])
        if pairs[0].are_messages
        else Frame.around(encoder.tokenizer, texts[1], ends)
    )
    rows: list[Row] = []
    cut = left_out = 0
    for pair, prompt, chosen, rejected in zip(pairs, ids, ids, ids, strict=True):
        if np.array_equal(chosen, rejected):
            rule = f"{pair.where}: the chosen and the rejected answer must differ"
            raise BadInput(
                f"{rule}, but are the same {len(chosen)} tokens, prompt included; take the row out."
            )
        excess = max(len(chosen), len(rejected)) + around.length - length
        if excess > min(_shared(prompt, chosen), _shared(prompt, rejected)):
            left_out += 1
            continue
        cut += excess > 0
        rows += [around.put(row[max(excess, 0) :]) for row in (chosen, rejected)]
    if not rows:
        rule = (
            f"workload.sequence_length must leave room for answers, but each of the {len(pairs)}"
            f" {part} pairs"
        )
        raise BadInput(f"{rule} has one that is longer than {length} tokens; make it larger.")
    of = f"of {len(pairs)} {part} pairs"
    said = {
        f"{left_out} {of} were left out: an answer is longer than {length} tokens.": left_out,
        f"{cut} {of} lost the beginning of their prompt, to have at most {length} tokens.": cut,
    }
    return PairTokens(rows, tuple(note for note, count in said.items() if count))


def _shared(prompt: Tokens, row: Tokens) -> int:
    """Count the first tokens of a row that belong to the prompt alone.

    Where the prompt's end and the answer's beginning make one token, it belongs to the answer.
    """
    length = min(len(prompt), len(row))
    differing = np.flatnonzero(prompt[:length] != row[:length])
    return int(differing[0]) if len(differing) else length


@dataclass(frozen=True)
class Frame:
    """The special tokens around a plain text."""

    before: Row
    after: Row

    @classmethod
    def of(cls, before: Sequence[int], after: Sequence[int]) -> "Frame":
        return cls(np.array(before, np.uint32), np.array(after, np.uint32))

    @classmethod
    def around(cls, tokenizer: PreTrainedTokenizerBase, text: str, ends: bool) -> "Frame":
        """Return the special tokens around `text`, with an end-of-text token after it.

        They are those that the tokenizer itself puts there. Where it puts none after the text, the
        end-of-text token is added, at which all of the text has been read; without `ends` it is
        left out if it pads rows or may do so.
        """
        before, after = special_tokens_around(tokenizer, text=text)
        end = tokenizer.eos_token_id
        may_pad = tokenizer.pad_token_id in (None, end)
        if end is not None and (ends or not may_pad) and not after:
            after = [end]
        return cls.of(before, after)

    @property
    def length(self) -> int:
        return len(self.before) + len(self.after)

    def put(self, row: Row) -> Row:
        return np.concatenate([self.before, row, self.after])


class PairExamples(Examples):
    """Pairs of answers; a batch has all chosen rows, then the rejected ones in the same order."""

    def __init__(self, folder: Path) -> None:
        arrays = open_arrays(folder)
        self.rows, self._pad = Rows(arrays["tokens"], arrays["starts"]), int(arrays["pad"])
        lengths = self.rows.lengths.reshape(-1, 2).max(axis=1)
        self._longest = int(lengths.max())
        super().__init__(np.ones(len(lengths), np.int64), lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return the rows of these pairs, and the pairs' weights.

        `input_ids` and `attention_mask` are int64 [2 · pairs, the longest], `weights` float32
        [pairs]. A filler is the first pair with a weight of 0, since a row without any token would
        have no score.
        """
        chosen = 2 * np.maximum(indices, 0)
        tokens, present = self.rows.padded(np.concatenate([chosen, chosen + 1]), self._pad)
        return {
            "input_ids": tokens[:, : self._longest],
            "attention_mask": present[:, : self._longest],
            "weights": self.weights_of(indices),
        }


class PreferenceExamples(PairExamples):
    """Pairs of answers with the targets that show how likely a language model finds each answer.

    Args:
        first: the number of the first pair, counted over those for training and then those for
            evaluation.
    """

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__(folder)
        self._first = first
        rows = [self.rows.tokens[begin:end] for begin, end in itertools.pairwise(self.rows.starts)]
        self._differs_at = np.array(
            [_shared(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        )

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return the batch of `PairExamples` with targets and the pairs' numbers.

        `targets`, int64 [2 · pairs, the longest], count from each pair's first difference on, since
        what stands before it is as likely in both answers. `pair`, int64 [pairs], are the numbers.
        """
        batch = super().batch(indices)
        places = torch.arange(batch["input_ids"].shape[1])
        begins = torch.from_numpy(self._differs_at[np.maximum(indices, 0)]).repeat(2)[:, None]
        is_target = (places >= begins) & (batch["attention_mask"] > 0)
        # A model's logits at a position predict the token after it.
        targets = torch.where(is_target, batch["input_ids"], IGNORED).roll(-1, 1)
        targets[:, -1] = IGNORED
        return {
            **batch,
            "targets": targets,
            "pair": torch.from_numpy(self._first + np.maximum(indices, 0)),
        }
