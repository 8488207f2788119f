"""Preference data: pairs of answers to one prompt, one chosen and one rejected.

The answers are texts or chat messages.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from carbonopt.core.errors import BadInput
from carbonopt.spec.base_settings import Name
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data import templates
from carbonopt.train.data.messages import Message, read_messages
from carbonopt.train.data.rows import Row, read_rows
from carbonopt.train.failures import refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[Message]
# Words of a builtin prompt or answer, and the distance of words that a rejected answer misspells.
_BUILTIN_WORDS, _EVERY = 8, 4


class PairDataset(Dataset, extra="forbid"):
    prompt_column: Name | None = "prompt"
    """The prompts' column in jsonl, json, csv, parquet and hub data sets; `null`: the answers'
    columns hold whole texts."""

    chosen_column: Name = "chosen"
    """The column of the better answers."""

    rejected_column: Name = "rejected"
    """The column of the worse answers."""

    def violations(self) -> dict[str, bool]:
        columns = self.columns
        differ = (
            "prompt_column, chosen_column and rejected_column must differ, but are"
            f" {', '.join(columns)}"
        )
        return {**super().violations(), differ: len({*columns}) < len(columns)}

    @property
    def columns(self) -> tuple[str, ...]:
        prompt = () if self.prompt_column is None else (self.prompt_column,)
        return (*prompt, self.chosen_column, self.rejected_column)


class Pair(NamedTuple):
    """A prompt with its two answers, all three texts or all three lists of messages.

    Messages have `role` and `content`.
    """

    prompt: str | Messages  # empty: there is no prompt
    chosen: str | Messages
    rejected: str | Messages
    where: str  # where the row stands, for errors

    @property
    def are_messages(self) -> bool:
        return not isinstance(self.chosen, str)

    def texts(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str, str]:
        """Return the prompt, and the prompt with each of its answers, as the model reads them.

        Messages are written by the tokenizer's chat template.

        Raises:
            BadInput: if the tokenizer has no chat template, or the template refuses the messages.
        """
        if isinstance(self.prompt, str):
            return self.prompt, f"{self.prompt}{self.chosen}", f"{self.prompt}{self.rejected}"
        prompt = spelt(self.prompt, tokenizer, self.where) if self.prompt else ""
        with template_of(tokenizer, self.where):
            whole = ([*self.prompt, *answer] for answer in (self.chosen, self.rejected))
            chosen, rejected = (
                templates.apply(tokenizer, messages, tokenize=False) for messages in whole
            )
        return prompt, str(chosen), str(rejected)


class SplitPairs(NamedTuple):
    train: list[Pair]
    evaluation: list[Pair]


def read_pairs(dataset: PairDataset) -> SplitPairs:
    """Read the whole data set.

    A source without a split of its own is split by `eval_fraction`; the last pairs are for
    evaluation.

    Raises:
        BadInput: as `read_rows` does, and for a row with an empty answer or without texts or
            messages.
    """
    if dataset.builtin is None:
        return SplitPairs(
            *(
                [
                    pair_of(
                        row, dataset.prompt_column, dataset.chosen_column, dataset.rejected_column
                    )
                    for row in rows
                ]
                for rows in read_rows(dataset, dataset.columns)
            )
        )
    pairs = list(builtin_pairs())
    cut = len(pairs) - max(1, round(len(pairs) * dataset.eval_fraction))
    return SplitPairs(pairs[:cut], pairs[cut:])


def pair_of(row: Row, prompt_column: str | None, chosen_column: str, rejected_column: str) -> Pair:
    """Return a row's pair.

    Args:
        prompt_column: None: the answers are whole texts.

    Raises:
        BadInput: if an answer is empty, or a value is neither text nor a list of messages.
    """
    answers = {column: row.values[column] for column in (chosen_column, rejected_column)}
    prompt = None if prompt_column is None else row.values[prompt_column]
    kinds = {type(value) for value in answers.values()}
    if str in kinds or list not in kinds:
        for column in answers:
            if not row.text(column).strip():
                raise BadInput(f"column {column!r} must hold an answer, but {row.where} has none.")
        text = "" if prompt_column is None else row.text(prompt_column)
        chosen_text, rejected_text = map(row.text, answers)
        return Pair(text, chosen_text, rejected_text, row.where)
    if isinstance(prompt, str):
        raise BadInput(
            f"column {prompt_column!r} must hold messages as {chosen_column!r} does, but"
            f" {row.where} has the text {prompt!r:.40}; if {chosen_column!r} and"
            f" {rejected_column!r} hold whole chats, set prompt_column: null."
        )
    given = {} if prompt is None else {str(prompt_column): prompt}
    messages = {
        column: chat_messages(value, column, row.where)
        for column, value in {**given, **answers}.items()
    }
    for column in answers:
        if not messages[column] or not messages[column][-1]["content"].strip():
            raise BadInput(f"column {column!r} must hold an answer, but {row.where} has none.")
    chosen, rejected = (messages[column] for column in answers)
    return Pair(messages[str(prompt_column)] if given else [], chosen, rejected, row.where)


def prompt_of(row: Row, column: str) -> str | Messages:
    """Return a row's prompt.

    Raises:
        BadInput: if it is empty, or neither text nor a list of messages.
    """
    value = row.values[column]
    prompt = (
        chat_messages(value, column, row.where) if isinstance(value, list) else row.text(column)
    )
    if not prompt:
        raise BadInput(f"column {column!r} must hold a prompt, but {row.where} has none.")
    return prompt


def chat_messages(value: Any, column: str, where: str) -> Messages:
    """Return a value as a list of messages; a missing value is an empty list.

    Raises:
        BadInput: if the value is no list of messages with texts.
    """
    rule = (
        f"column {column!r} must hold text, or messages such as [{{role: user, content: ...}}], as"
        " the row's other columns"
    )
    return read_messages(value, rule, where)


def spelt(prompt: str | Messages, tokenizer: "PreTrainedTokenizerBase", where: str) -> str:
    """Return a prompt as the model reads it; the tokenizer's chat template writes messages.

    Raises:
        BadInput: as `Pair.texts` does.
    """
    if isinstance(prompt, str):
        return prompt
    with template_of(tokenizer, where):
        return str(templates.apply(tokenizer, prompt, tokenize=False, add_generation_prompt=True))


def template_of(tokenizer: "PreTrainedTokenizerBase", where: str) -> AbstractContextManager[None]:
    """Return a context in which the tokenizer's chat template can be used.

    Raises:
        BadInput: if the tokenizer has no chat template; in the context, if the template refuses the
            messages.
    """
    if tokenizer.chat_template is None:
        rule = f"{where}: messages need a tokenizer with a chat template, but this one has none"
        raise BadInput(f"{rule}; choose another workload.tokenizer, or give texts.")
    return refused(
        f"{where}: the tokenizer's chat template doesn't take its messages: {{}}.", Exception
    )


def builtin_pairs() -> Iterator[Pair]:
    """Make pairs of the paragraphs of the reference topics that every Python carries.

    The chosen answer is how a paragraph goes on, the rejected one the same with some of its words
    spelled backwards.
    """
    from pydoc_data.topics import topics

    paragraphs = [
        words
        for name in sorted(topics)
        for text in topics[name].split("\n\n")
        if (words := text.split())
    ]
    for number, words in enumerate(paragraphs, start=1):
        for start in range(0, len(words), 2 * _BUILTIN_WORDS):
            prompt, answer = (
                words[begin : begin + _BUILTIN_WORDS] for begin in (start, start + _BUILTIN_WORDS)
            )
            misspelt = [word if place % _EVERY else word[::-1] for place, word in enumerate(answer)]
            if len(answer) == _BUILTIN_WORDS and misspelt != answer:
                chosen, rejected = (f" {' '.join(part)}" for part in (answer, misspelt))
                yield Pair(" ".join(prompt), chosen, rejected, f"paragraph {number}")
