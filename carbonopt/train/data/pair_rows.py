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
from carbonopt.train.data.tokens import Encoder

PAD = "<|pad|>"
Row = npt.NDArray[np.uint32]  # token ids


def plain_texts(pairs: Sequence[Pair]) -> list[str]:
    """From which a tokenizer can be learnt. Messages need one that has a chat template, and has learnt already."""
    texts = [(pair.prompt, pair.chosen, pair.rejected) for pair in pairs if not pair.are_messages]
    return [f"{prompt}{answer}" for prompt, *answers in texts for answer in answers]


def set_pad_token(tokenizer: PreTrainedTokenizerBase, can_grow: bool) -> int:
    """The id of the token that fills up the shorter rows of a batch. By it decoders know a row's last token, whose
    score is the text's: transformers takes the last one that is not this. A tokenizer that has none gets one where the
    model's vocabulary can still grow; else it is the end-of-text token. Raises BadInput if there is neither."""
    if tokenizer.pad_token_id is None and can_grow:
        tokenizer.add_special_tokens({"pad_token": PAD})
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            rule = "the model's tokenizer must have a padding token or an end-of-text token, but has neither"
            raise BadInput(f"{rule}; give a model whose tokenizer has one.")
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


@dataclass(frozen=True)
class PairTokens:
    """A part's pairs, row 2i the chosen answer of pair i with its prompt, row 2i + 1 the rejected one."""

    rows: list[Row]
    notes: tuple[str, ...]  # what was left out, or cut

    def __len__(self) -> int:
        return len(self.rows) // 2

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    def save(self, folder: Path, vocab_size: int, pad: int) -> None:
        rows = Rows.of(self.rows, vocab_size)
        save_arrays(folder, tokens=rows.tokens, starts=rows.starts, pad=np.array(pad))


def tokenized(pairs: Sequence[Pair], encoder: Encoder, length: int, part: str, ends: bool = False) -> PairTokens:
    """Of pairs with a row above `length` tokens, both rows lose the same beginning of their prompt; where that would
    cut an answer, the pair is left out. `part`: its name in sentences. `ends`: a plain text ends with the end-of-text
    token also where that fills up rows. Raises BadInput for a pair whose rows are the same, and if none is left."""
    texts = [text for pair in pairs for text in pair.texts(encoder.tokenizer)]
    ids = (row.astype(np.uint32) for row in encoder.rows(texts))
    # A chat template brings its own special tokens.
    around = Frame.of([], []) if pairs[0].are_messages else Frame.around(encoder.tokenizer, texts[1], ends)
    rows: list[Row] = []
    cut = left_out = 0
    for pair, prompt, chosen, rejected in zip(pairs, ids, ids, ids, strict=True):
        if np.array_equal(chosen, rejected):
            rule = f"{pair.where}: the chosen and the rejected answer must differ"
            raise BadInput(f"{rule}, but are the same {len(chosen)} tokens, prompt included; take the row out.")
        excess = max(len(chosen), len(rejected)) + around.length - length
        if excess > min(_shared(prompt, chosen), _shared(prompt, rejected)):
            left_out += 1
            continue
        cut += excess > 0
        rows += [around.put(row[max(excess, 0) :]) for row in (chosen, rejected)]
    if not rows:
        rule = f"workload.sequence_length must leave room for answers, but each of the {len(pairs)} {part} pairs"
        raise BadInput(f"{rule} has one that is longer than {length} tokens; make it larger.")
    of = f"of {len(pairs)} {part} pairs"
    said = {
        f"{left_out} {of} were left out: an answer is longer than {length} tokens.": left_out,
        f"{cut} {of} lost the beginning of their prompt, to have at most {length} tokens.": cut,
    }
    return PairTokens(rows, tuple(note for note, count in said.items() if count))


def _shared(prompt: Tokens, row: Tokens) -> int:
    """How many tokens of the row belong to the prompt alone: where its end and the answer's beginning make one token,
    that is the answer's."""
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
        """Those that the tokenizer itself puts around `text`, and an end-of-text token, at which all of it has been
        read; without `ends` not where rows are filled up with the same."""
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text)["input_ids"]
        begins = next(start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
        before, after = whole[:begins], whole[begins + len(plain) :]
        end = tokenizer.eos_token_id
        if end is not None and (ends or end != tokenizer.pad_token_id) and not after:
            after = [end]
        return cls.of(before, after)

    @property
    def length(self) -> int:
        return len(self.before) + len(self.after)

    def put(self, row: Row) -> Row:
        return np.concatenate([self.before, row, self.after])


class PairExamples(Examples):
    """A batch has the chosen rows of all its pairs, then the rejected ones, in the same order."""

    def __init__(self, folder: Path) -> None:
        arrays = open_arrays(folder)
        self.rows, self._pad = Rows(arrays["tokens"], arrays["starts"]), int(arrays["pad"])
        lengths = self.rows.lengths.reshape(-1, 2).max(axis=1)
        self._longest = int(lengths.max())
        super().__init__(np.ones(len(lengths), np.int64), lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, int64 [2 · pairs, the longest]; `weights`. A filler is the first pair, with
        a weight of 0: a row without any token would have no score."""
        chosen = 2 * np.maximum(indices, 0)
        tokens, present = self.rows.padded(np.concatenate([chosen, chosen + 1]), self._pad)
        return {
            "input_ids": tokens[:, : self._longest],
            "attention_mask": present[:, : self._longest],
            "weights": self.weights_of(indices),
        }


class PreferenceExamples(PairExamples):
    """With what a language model is asked of them: how likely it finds the answers.

    Args:
        first: the number of the first pair among those for training and for evaluation together.
    """

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__(folder)
        self._first = first
        rows = [self.rows.tokens[begin:end] for begin, end in itertools.pairwise(self.rows.starts)]
        self._differs_at = np.array([_shared(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)])

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Beside those of pairs `targets`, int64 [2 · pairs, the longest], from each pair's first difference on: what
        stands before is as likely in both answers. And `pair`, int64 [pairs]: their numbers."""
        batch = super().batch(indices)
        places = torch.arange(batch["input_ids"].shape[1])
        begins = torch.from_numpy(self._differs_at[np.maximum(indices, 0)]).repeat(2)[:, None]
        is_target = (places >= begins) & (batch["attention_mask"] > 0)
        # A model's logits at a place are of the next token.
        targets = torch.where(is_target, batch["input_ids"], IGNORED).roll(-1, 1)
        targets[:, -1] = IGNORED
        return {**batch, "targets": targets, "pair": torch.from_numpy(self._first + np.maximum(indices, 0))}
