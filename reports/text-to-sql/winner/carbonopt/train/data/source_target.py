"""Pairs of a source and a target text: read, as tokens, and as the batches of an encoder-decoder model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from carbonopt.core.config import Dataset
from carbonopt.core.errors import BadInput
from carbonopt.core.files import write_json
from carbonopt.train.data.examples import Examples, Rows, open_arrays, save_arrays
from carbonopt.train.data.packing import IGNORED, Indices
from carbonopt.train.data.rows import Row, read_rows


class Pair(NamedTuple):
    source: str
    target: str
    where: str  # it stands, for errors


class SplitPairs(NamedTuple):
    train: list[Pair]
    evaluation: list[Pair]
    notes: list[str]  # of what was left out


class Encoded(NamedTuple):
    sources: list[list[int]]
    targets: list[list[int]]
    cut_sources: int  # how many were longer
    cut_targets: list[int]  # which ones


def read_pairs(dataset: Dataset, source_column: str, target_column: str, prefix: str) -> SplitPairs:
    """Without those that lack one of the two. `prefix` stands before each source. Raises BadInput as `read_rows`, for
    what is no text, and if nothing is left."""
    parts, notes = [], []
    for name, rows in zip(("training", "evaluation"), read_rows(dataset, (source_column, target_column)), strict=True):
        pairs = [_pair(row, source_column, target_column) for row in rows]
        kept = [pair._replace(source=prefix + pair.source) for pair in pairs if pair.source and pair.target]
        if not kept:
            both = f"a text in both {source_column!r} and {target_column!r}"
            raise BadInput(f"the {name} rows must have {both}, but none of {len(pairs)} has; name other columns.")
        if lost := len(pairs) - len(kept):
            notes.append(f"{lost} of {len(pairs)} {name} rows have no source or no target and were left out.")
        parts.append(kept)
    return SplitPairs(parts[0], parts[1], notes)


def _pair(row: Row, source_column: str, target_column: str) -> Pair:
    return Pair(row.text(source_column).strip(), row.text(target_column).strip(), row.where)


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], source_length: int, target_length: int
) -> Encoded:
    """What is longer is cut: a source as the tokenizer does it, so that it still ends with its end token; a target
    without one, since it doesn't end there."""
    texts = [pair.source for pair in pairs]
    sources = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    long = [index for index, row in enumerate(sources) if len(row) > source_length]
    for index in long:
        sources[index] = tokenizer(texts[index], truncation=True, max_length=source_length)["input_ids"]
    encoded = tokenizer(text_target=[pair.target for pair in pairs], return_attention_mask=False, verbose=False)
    targets = encoded["input_ids"]
    cut_targets = [index for index, row in enumerate(targets) if len(row) > target_length]
    return Encoded(sources, [row[:target_length] for row in targets], len(long), cut_targets)


def save_pairs(
    folder: Path, pairs: Sequence[Pair], encoded: Encoded, vocab_size: int, padding: int, decoder_start: int
) -> None:
    """Writes what `PairExamples` and `open_texts` read into a new folder."""
    sources, targets = (Rows.of(rows, vocab_size) for rows in (encoded.sources, encoded.targets))
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
    """Sources, with their prefix, and targets, uncut."""
    return [(source, target) for source, target in json.loads((folder / _TEXTS).read_text(encoding="utf-8"))]


class PairExamples(Examples):
    """Each counts for its target tokens."""

    def __init__(self, folder: Path) -> None:
        arrays = open_arrays(folder)
        self._sources = Rows(arrays["source_tokens"], arrays["source_starts"])
        self._targets = Rows(arrays["target_tokens"], arrays["target_starts"])
        self._padding, self._decoder_start = map(int, arrays["padding_and_decoder_start"])
        super().__init__(self._targets.lengths, self._sources.lengths + self._targets.lengths)

    def batch(self, indices: Indices) -> dict[str, torch.Tensor]:
        """int64 [batch, length], of sources and of targets. The decoder reads what it has to predict one token later;
        targets are IGNORED behind their end. A filler is the first example, of whose targets none counts: attention to
        a row without tokens would be no number."""
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
