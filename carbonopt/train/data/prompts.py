"""Prompts, as texts or as chat messages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from carbonopt.core.errors import BadInput
from carbonopt.train.data.pairs import Messages, builtin_pairs, prompt_of, spelt
from carbonopt.train.data.rows import Row, read_rows, split_rows
from carbonopt.train.data.tokens import END_OF_TEXT

if TYPE_CHECKING:
    from carbonopt.train.tasks.rlhf import PromptDataset


@dataclass(frozen=True)
class Prompts:
    """The prompts for training, or those for evaluation, as the model reads them."""

    texts: list[str]
    notes: tuple[str, ...] = ()  # on prompts that were left out

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.texts), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Prompts":
        return cls(json.loads(path.read_text(encoding="utf-8")))


class RawPrompts(NamedTuple):
    """The prompts for training, or those for evaluation, as the data set has them."""

    part: str  # the name of this part of the data, for use in sentences
    prompts: list[tuple[str | Messages, str]]  # each with where it stands, for errors

    @property
    def has_messages(self) -> bool:
        return any(not isinstance(prompt, str) for prompt, _ in self.prompts)

    @property
    def plain_texts(self) -> list[str]:
        """The texts from which a tokenizer can be trained."""
        return [prompt for prompt, _ in self.prompts if isinstance(prompt, str)]

    def kept(self, tokenizer: PreTrainedTokenizerBase, length: int) -> Prompts:
        """Return the prompts of at most `length` tokens, as the model reads them.

        Raises:
            BadInput: if no prompt is left, or the chat template can't write messages.
        """
        texts = [_as_given(prompt, tokenizer, where) for prompt, where in self.prompts]
        short = [text for text in texts if len(tokenizer(text)["input_ids"]) <= length]
        if not short:
            each = (
                f"but each of the {len(texts)} {self.part} prompts is longer than {length} tokens"
            )
            raise BadInput(
                f"workload.sequence_length must leave room for prompts, {each}; make it larger."
            )
        left_out = len(texts) - len(short)
        note = (
            f"{left_out} of {len(texts)} {self.part} prompts were left out: they are longer than"
            f" {length} tokens."
        )
        return Prompts(short, (note,) if left_out else ())


def _as_given(prompt: str | Messages, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """Return a prompt as the tokenizer is given it.

    Many chat templates write the beginning-of-text token. Where the tokenizer itself puts one
    before each text, as TRL and a reward model ask for, a chat would begin with two.
    """
    text, begin = spelt(prompt, tokenizer, where), tokenizer.bos_token_id
    if isinstance(prompt, str) or begin is None or tokenizer("")["input_ids"][:1] != [begin]:
        return text
    return text.removeprefix(str(tokenizer.bos_token))


def read_prompts(dataset: "PromptDataset") -> tuple[RawPrompts, RawPrompts]:
    """Read the prompts for training and those for evaluation.

    A source without a split of its own is split by `eval_fraction`; the last prompts are for
    evaluation.

    Raises:
        BadInput: as `read_rows` does, and for an empty prompt.
    """
    column = dataset.prompt_column
    if dataset.builtin is not None:
        unique = dict.fromkeys((str(pair.prompt), pair.where) for pair in builtin_pairs())
        split = split_rows(
            [Row({column: f"{text} "}, where) for text, where in unique], dataset.eval_fraction
        )
    else:
        split = read_rows(dataset, (column,))
    parts = zip(("training", "evaluation"), split, strict=True)
    train, evaluation = (
        RawPrompts(name, [(prompt_of(row, column), row.where) for row in rows])
        for name, rows in parts
    )
    return train, evaluation


def complete(tokenizer: PreTrainedTokenizerBase, can_grow: bool) -> None:
    """Give the tokenizer what generating needs: an end-of-text token and a padding token.

    The padding token fills up the beginning of shorter prompts.

    Raises:
        BadInput: if it has no end-of-text token and the model's vocabulary can't grow.
    """
    if tokenizer.eos_token is None and can_grow:
        tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
    if tokenizer.eos_token is None:
        raise BadInput(
            "the model's tokenizer must have an end-of-text token, but has none; give one that has."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
