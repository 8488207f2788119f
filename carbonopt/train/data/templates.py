"""A tokenizer's chat template, made to write the same text on any day.

Templates may write today's date, and choose words at random. A study may go on tomorrow, and its
winner is trained again next year: with other tokens, their figures could not be compared.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL_ROLES = ("assistant", "developer", "system", "tool", "user")  # as templates know them
TODAY = datetime(2026, 1, 1)  # the date that templates take for today
_NOW = "strftime_now"  # the function by which templates ask for the date


class _ThatDay(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """Return TODAY, whatever the clock says."""
        return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)


def apply(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], **options: Any
) -> Any:
    """Return what the tokenizer's `apply_chat_template` returns with these options on TODAY."""
    with _on_that_day(), _drawn_alike():
        return tokenizer.apply_chat_template(list(messages), **options)


def note(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a note for the study's user on the template's date, or "" if it writes none."""
    if _NOW not in str(tokenizer.chat_template):
        return ""
    return (
        f"The chat template writes today's date: {TODAY:%Y-%m-%d} in all trials, so that they read"
        " the same tokens."
    )


@contextmanager
def _on_that_day() -> Iterator[None]:
    """Make transformers' `strftime_now` return TODAY.

    The function can't be replaced by an argument: transformers 5.23 turns whatever a template gets
    beside its messages into plain data.
    """
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    clock, module.datetime = module.datetime, _ThatDay
    try:
        yield
    finally:
        module.datetime = clock


@contextmanager
def _drawn_alike() -> Iterator[None]:
    """Seed Python's generator, from which a template's `random` filter draws.

    The generator's state is restored afterwards.
    """

    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


def with_usual_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the usual roles are written as templates know them.

    Templates compare roles letter by letter: an Assistant would be nobody.
    """
    return [{**message, "role": _usual_role(message["role"])} for message in messages]


def _usual_role(role: str) -> str:
    usual = role.strip().lower()
    return usual if usual in USUAL_ROLES else role
