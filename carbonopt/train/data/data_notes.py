"""Sentences for the report on the data of a study, collected while its files are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)


@contextmanager
def data_notes() -> Iterator[list[str]]:
    """Collect the sentences for the report on all data that are read within the context."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(sentence: str) -> None:
    """Add a sentence to the report, if the data are read for a study."""
    if (notes := _notes.get()) is not None:
        notes.append(sentence)
