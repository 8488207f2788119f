"""Every error that carbonopt raises on purpose.

The command line turns each into one sentence and its exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shortened(value: Any) -> str:
    """Return a value's repr, shortened to be shown in a sentence."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    """Escape what a terminal would obey instead of showing it.

    Users can name anything, and programs print anything.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text
    )


class CarbonoptError(Exception):
    """The base class; `exit_code` is the exit code of the command line."""

    exit_code = 1


class BadInput(CarbonoptError):
    """An input of the user that can't be used.

    The text names the rule, the value found and what to do.

    Args:
        keys: the keys of the study file, from the top down, that lead to the value; empty: it is of
            no single key.
    """

    exit_code = 2

    def __init__(self, text: str, keys: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.keys = tuple(keys)


class MeasurementError(CarbonoptError):
    """A failure to measure energy.

    Energy that was not measured is never replaced by a zero or a guess.
    """


class StudyInterrupted(CarbonoptError):
    """The request to end the study (Ctrl-C, SIGTERM); the same command goes on with it."""

    exit_code = 130


BEFORE_A_TRIAL = (
    "interrupted before this command started a trial; run the same command again to resume."
)
