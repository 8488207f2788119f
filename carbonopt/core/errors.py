"""Every error carbonopt raises on purpose. The command line turns each into one sentence and its exit code."""

import difflib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import ValidationError

# Keys of study files and records that were called otherwise before 0.1.0.
RENAMED_KEYS = {"rivals": "runners_up", "core_wait": "cpu_wait_fraction", "doubts": "caveats", "known": "energy_source"}

_NAMED = 40  # known names that an error lists


def hint(unknown: str, known: Sequence[str]) -> str:
    """For a misspelt name: 'did you mean X?', or the known names where none is near."""
    if RENAMED_KEYS.get(unknown) in known:
        return f"it is called {RENAMED_KEYS[unknown]} now."
    near = difflib.get_close_matches(unknown, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    more = f", … ({len(known)} in all)" if len(known) > _NAMED else ""
    return f"known here: {', '.join(known[:_NAMED])}{more}."


_KnownKeys = Callable[[list[Any]], Sequence[str]]  # of what stands at a place


def first_fault(error: ValidationError, known: _KnownKeys = lambda place: (), unnamed: Collection[str] = ()) -> str:
    """The first thing that is wrong, in one sentence: key, value found, what is allowed. `unnamed`: parts
    of places that are pydantic's and no key."""
    # A misspelt key that is required shows twice, as missing and as unknown; only the latter tells the user.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    loc = [part for part in first["loc"] if part not in unnamed]
    where, message = ".".join(map(str, loc)) or "the whole", first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            return f"unknown key {where}; {hint(str(loc[-1]), known(loc[:-1]))}"
        case "missing":
            return f"{where} is missing."
        case "value_error":
            return f"{where}: {message}." if loc else f"{message}."
        case "union_tag_invalid":
            return f"{where}: kind must be one of {first['ctx']['expected_tags']}, but got {first['ctx']['tag']!r}."
        case "tuple_type":
            return f"{where}: must be a list, but got {shortened(first['input'])}."
        case "too_short":
            counts = first["ctx"]
            return f"{where}: must have {counts['min_length']} or more entries, but has {counts['actual_length']}."
        case "json_invalid":
            return f"its text can't be read: {first['ctx']['error']}."
    return f"{where}: {message[0].lower()}{message[1:]}, but got {shortened(first['input'])}."


def shortened(value: Any) -> str:
    """Its repr, to be shown in a sentence."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class CarbonoptError(Exception):
    """Base class. `exit_code` is what the command line ends with."""

    exit_code = 1


class BadInput(CarbonoptError):
    """What the user gave can't be used. The text names the rule, the value found and what to do."""

    exit_code = 2


class MeasurementError(CarbonoptError):
    """Energy could not be measured. Never replaced by a zero or a guess."""


class StudyInterrupted(CarbonoptError):
    """The study was asked to end (Ctrl-C, SIGTERM); the same command goes on with it."""

    exit_code = 130


BEFORE_FIRST_TRIAL = "interrupted before the first trial; the same command begins again."
