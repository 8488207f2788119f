"""Every error that carbonopt raises on purpose.

The command line turns each into one sentence and its exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_NAMED = 40  # the most names that an error lists


def hint(unknown: str, known: Sequence[str]) -> str:
    """Return a hint for a misspelt name: 'did you mean X?'.

    Where no name is near, it lists the known names.
    """
    near = difflib.get_close_matches(unknown, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if not known:
        return "no key is known here."
    more = f", … ({len(known)} in all)" if len(known) > _NAMED else ""
    return f"known here: {', '.join(known[:_NAMED])}{more}."


_KnownKeys = Callable[[list[Any]], Sequence[str]]  # returns the known keys at a place


def first_error(
    error: ValidationError, known: _KnownKeys = lambda place: (), unnamed: Collection[str] = ()
) -> str:
    """Return the first thing that is wrong, in one sentence: key, value found, what is allowed.

    Args:
        error: the error of pydantic.
        known: returns the known keys at a place.
        unnamed: parts of places that are pydantic's and no key.
    """
    # A misspelt required key has two errors, missing and unknown; only the latter helps the user.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    loc = [part for part in first["loc"] if part not in unnamed]
    where, message = (
        ".".join(map(str, loc)) or "the whole",
        first["msg"].removeprefix("Value error, "),
    )
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key {where}; {hint(str(loc[-1]), known(loc[:-1]))}"
        case "missing":
            return f"{where} is missing."
        case "value_error":
            return f"{where}: {message}." if loc else f"{message}."
        case "union_tag_invalid":
            return (
                f"{where}: kind must be one of {first['ctx']['expected_tags']}, but got"
                f" {first['ctx']['tag']!r}."
            )
        case "tuple_type":
            return f"{where}: must be a list, but got {shortened(first['input'])}."
        case "too_short":
            counts = first["ctx"]
            return (
                f"{where}: must have {counts['min_length']} or more entries, but has"
                f" {counts['actual_length']}."
            )
        case "bool_type":
            return f"{where}: must be true or false, but got {shortened(first['input'])}."
        case "json_invalid":
            return f"its text can't be read: {first['ctx']['error']}."
    return f"{where}: {message[0].lower()}{message[1:]}, but got {shortened(first['input'])}."


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
    """

    exit_code = 2


class MeasurementError(CarbonoptError):
    """A failure to measure energy.

    Energy that was not measured is never replaced by a zero or a guess.
    """


class StudyInterrupted(CarbonoptError):
    """The request to end the study (Ctrl-C, SIGTERM); the same command goes on with it."""

    exit_code = 130


BEFORE_A_TRIAL = "interrupted before this command started a trial; the same command goes on."
