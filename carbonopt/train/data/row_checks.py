"""Checks of a data set's first rows, which the preparation makes of all rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carbonopt.core.errors import BadInput
from carbonopt.core.format import quoted_names
from carbonopt.train.data.labels import (
    check_alike,
    check_classes,
    check_known,
    filled_text,
    label_text,
)
from carbonopt.train.data.pairs import pair_of, prompt_of
from carbonopt.train.data.rows import Row, split_rows
from carbonopt.train.data.spellings import check_spellings
from carbonopt.train.data.text import split_documents

# Special tokens that a tokenizer may add to a text: at its beginning, before its first word, and at
# its end.
_SPECIAL = 3
# The columns of texts without which a row is left out.
_NEEDED = {
    "causal_lm": ("text_column",),
    "sft": ("response_column",),
    "seq2seq": ("source_column", "target_column"),
}


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a data set."""

    train: list[Row]
    evaluation: list[Row] | None  # None: the last rows of the training data
    eval_fraction: float  # of the training rows, if the evaluation has no rows of its own
    is_whole: bool  # whether the training data has no more rows than these

    def check(self, task: str, columns: Mapping[str, str | None]) -> None:
        """Check that the task can use the rows.

        Args:
            columns: the names of the columns that the task reads, by their keys.

        Raises:
            BadInput: if it can't use one of them, or they are too few.
        """
        every = [*self.train, *(self.evaluation or ())]
        if task in ("reward", "dpo"):
            chosen, rejected = str(columns["chosen_column"]), str(columns["rejected_column"])
            for row in every:
                pair_of(row, columns["prompt_column"], chosen, rejected)
        if task == "rlhf":
            for row in every:
                prompt_of(row, str(columns["prompt_column"]))
        if task == "classification":
            self._check_labelled(columns)
        elif self.is_whole:
            self._check_parts(task, columns)

    def _check_labelled(self, columns: Mapping[str, str | None]) -> None:
        label, text = str(columns["label_column"]), columns.get("text_column")
        every = [*self.train, *(self.evaluation or ())]
        words = [label_text(row, label) for row in every]
        if text is not None:
            for row in every:
                filled_text(row, text)
        if not self.is_whole:
            return
        known = words[: len(self.train)]
        check_alike(self.train, label)
        check_spellings(words, every, label)
        check_classes(Counter(known), label, None if self.evaluation else self.eval_fraction)
        if self.evaluation is not None:
            check_known(words[len(known) :], self.evaluation, sorted({*known}), label)

    def _check_parts(self, task: str, columns: Mapping[str, str | None]) -> None:
        """Check that there are rows to train on and to evaluate, and that each part has texts."""
        parts = {"training": self.train, "evaluation": self.evaluation}
        # The texts of causal_lm are split where none is empty, and a single one within it.
        if self.evaluation is None and task != "causal_lm":
            split = split_rows(self.train, self.eval_fraction)
            parts = {"training": split.train, "evaluation": split.evaluation}
        named = [columns.get(key) for key in _NEEDED.get(task, ())]
        needed = [name for name in named if name is not None]
        for part, rows in parts.items():
            if rows and not any(all(_has_text(row, name) for name in needed) for row in rows):
                raise BadInput(
                    f"the {part} rows must have a text in {quoted_names(needed)}, but none of"
                    f" {len(rows)} has; name other columns, or give other data."
                )


def _has_text(row: Row, column: str) -> bool:
    """Return whether a column has a text or messages."""
    value = row.values[column]
    return bool(value) if isinstance(value, list) else bool(row.text(column).strip())


def most_tokens(texts: Sequence[str], eval_fraction: float | None) -> int:
    """Return the most tokens that texts can be for training, a token for each byte.

    Args:
        texts: all texts of the training data, one of which is not empty.
        eval_fraction: the share that is set aside; None: the evaluation has texts of its own.

    Raises:
        BadInput: if there is too little text to be split.
    """
    documents = [text for text in texts if text]
    if eval_fraction is not None:
        documents = split_documents(documents, eval_fraction).train
    return sum(len(text.encode()) + _SPECIAL for text in documents)
