"""Pairs of a source and a target text, as texts, tokens and batches of encoder-decoder models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.core.files import write_json
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.examples import Examples, Rows, open_arrays, save_arrays
from carbonopt.train.data.packing import IGNORED, Indices
from carbonopt.train.data.rows import Row, read_rows
from carbonopt.train.data.tokens import cut_rows, kept_end


class SourceTarget(NamedTuple):
    source: str
    target: str
    where: str  # where the row stands, for errors


class SplitSourceTargets(NamedTuple):
    train: list[SourceTarget]
    evaluation: list[SourceTarget]
    notes: list[str]  # on rows that were left out


class Encoded(NamedTuple):
    sources: list[list[int]]
    targets: list[list[int]]
    cut_sources: int  # number of sources that were cut
    kept_end: str  # which tokens of those were kept, "first" or "last"
    cut_targets: list[int]  # indices of targets that were cut


def read_pairs(
    dataset: Dataset, source_column: str, target_column: str, prefix: str
) -> SplitSourceTargets:
    """Read the pairs that have both texts, with `prefix` before each source.

    Raises:
        BadInput: as `read_rows` does, for a value that is no text, and if no pair is left.
    """
    parts, notes = [], []
    for name, rows in zip(
        ("training", "evaluation"), read_rows(dataset, (source_column, target_column)), strict=True
    ):
        pairs = [_pair(row, source_column, target_column) for row in rows]
        kept = [
            pair._replace(source=prefix + pair.source)
            for pair in pairs
            if pair.source and pair.target
        ]
        if not kept:
            both = f"a text in both {source_column!r} and {target_column!r}"
            raise BadInput(
                f"the {name} rows must have {both}, but none of {len(pairs)} has; name other"
                " columns."
            )
        if lost := len(pairs) - len(kept):
            notes.append(
                f"{lost} of {len(pairs)} {name} rows have no source or no target and were left out."
            )
        parts.append(kept)
    return SplitSourceTargets(parts[0], parts[1], notes)


def _pair(row: Row, source_column: str, target_column: str) -> SourceTarget:
    return SourceTarget(row.text(source_column).strip(), row.text(target_column).strip(), row.where)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[SourceTarget],
    source_length: int,
    target_length: int,
) -> Encoded:
    """Tokenize pairs, and cut texts that are too long.

    The tokenizer cuts a source, so that it still ends with its end token. A target that is cut has
    no end token, since it doesn't end there.
    """
    texts = [pair.source for pair in pairs]
    sources = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    long = [index for index, row in enumerate(sources) if len(row) > source_length]
    if long:
        cut = cut_rows(tokenizer, [texts[index] for index in long], source_length)
        for index, row in zip(long, cut, strict=True):
            sources[index] = row
    encoded = tokenizer(
        text_target=[pair.target for pair in pairs], return_attention_mask=False, verbose=False
    )
    targets = encoded["input_ids"]
    cut_targets = [index for index, row in enumerate(targets) if len(row) > target_length]
    kept_targets = [row[:target_length] for row in targets]
    return Encoded(sources, kept_targets, len(long), kept_end(tokenizer), cut_targets)


def save_pairs(
    folder: Path, pairs: Sequence[SourceTarget], encoded: Encoded, padding: int, decoder_start: int
) -> None:
    """Write what `SourceTargetExamples` and `open_texts` read into a new folder."""
    sources, targets = (Rows.of(rows) for rows in (encoded.sources, encoded.targets))
    save_arrays(
        folder,
        source_tokens=sources.tokens,
        source_starts=sources.starts,
        target_tokens=targets.tokens,
        target_starts=targets.starts,
        padding_and_decoder_start=np.array([padding, decoder_start], np.int64),
    )
    write_json(folder / _TEXTS, [(pair.source, pair.target) for pair in pairs])


_TEXTS = "texts.json"


def open_texts(folder: Path) -> list[tuple[str, str]]:
    """Return each pair's source, with its prefix, and target, both uncut."""
    return [
        (source, target)
        for source, target in json.loads((folder / _TEXTS).read_text(encoding="utf-8"))
    ]


class SourceTargetExamples(Examples):
    """Pairs of a source and a target, each of which counts for its target tokens."""

    def __init__(self, folder: Path) -> None:
        arrays = open_arrays(folder)
        self._sources = Rows(arrays["source_tokens"], arrays["source_starts"])
        self._targets = Rows(arrays["target_tokens"], arrays["target_starts"])
        self._padding, self._decoder_start = map(int, arrays["padding_and_decoder_start"])
        super().__init__(self._targets.lengths, self._sources.lengths + self._targets.lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """Return sources and targets of these pairs, int64 [batch, length].

        The decoder reads what it has to predict one token later. Targets are IGNORED after their
        end. A filler has the first pair's source, with no target that counts: attention to a row
        without tokens would give NaN.
        """
        present = np.maximum(indices, 0)
        input_ids, attention_mask = self._sources.padded(present, self._padding)
        labels, _ = self._targets.padded(present, IGNORED)
        labels[torch.from_numpy(indices < 0)] = IGNORED
        decoder_input_ids = labels.roll(1, dims=1)
        decoder_input_ids[decoder_input_ids == IGNORED] = self._padding
        decoder_input_ids[:, 0] = self._decoder_start
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "labels": labels,
        }
