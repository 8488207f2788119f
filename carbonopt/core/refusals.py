"""Says in one sentence what pydantic has refused, with the nearest name for a misspelt key."""

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from carbonopt.core.errors import shown

_NAMED = 40  # the most names that an error lists
_UNSHOWN = ("track", "notify")  # parts of a study file whose addresses may hold a password


def hint(unknown: object, known: Sequence[str]) -> str:
    """Return a hint for a misspelt name: 'did you mean X?'.

    Where no name is near, or what was given is no text, it lists the known names.
    """
    near = difflib.get_close_matches(unknown, known, n=1) if isinstance(unknown, str) else []
    if near:
        return f"did you mean {near[0]}?"
    if not known:
        return "no key is known here."
    more = f", … ({len(known)} in all)" if len(known) > _NAMED else ""
    return f"known here: {', '.join(known[:_NAMED])}{more}."


_KnownKeys = Callable[[list[Any]], Sequence[str]]  # returns the known keys at a place


@dataclass(frozen=True)
class Refusal:
    """A rule that a value breaks, and the value's place."""

    text: str  # one sentence: key, value found, what is allowed
    keys: tuple[Any, ...]  # the keys that lead to the value, from the top down


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong, in one sentence: key, value found, what is allowed."""
    return first_refusal(error).text


def first_refusal(
    error: ValidationError, known: _KnownKeys | None = None, unnamed: Collection[str] = ()
) -> Refusal:
    """Return the first thing that is wrong.

    Args:
        error: the error of pydantic.
        known: returns the known keys at a place; None: they are not named.
        unnamed: parts of places that are pydantic's and no key.
    """
    # A misspelt required key has two errors, missing and unknown; only the latter helps the user.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    loc = [part for part in first["loc"] if part not in unnamed]
    sentence = _sentence_without_value if loc[:1] and loc[0] in _UNSHOWN else _sentence
    return Refusal(sentence(first, loc, known), tuple(loc))


def _sentence_without_value(first: Any, loc: list[Any], known: _KnownKeys | None) -> str:
    """Say what is wrong with a value that may hold a password, and show none of it."""
    where, key = ".".join(map(str, loc)), str(loc[-1])
    if first["type"] == "extra_forbidden" and not re.fullmatch("[A-Za-z0-9_]{1,40}", key):
        above = ".".join(map(str, loc[:-1]))
        named = "" if known is None else f"; {hint('', known(loc[:-1]))}"
        return f"{above} has an unknown key, which may hold a password{named}"
    if first["type"] in ("extra_forbidden", "missing") or first["input"] is None:
        return _sentence(first, loc, known)
    said, _, _ = _sentence(first, loc, known).partition(", but got")
    keys = known(loc) if known is not None and first["type"].startswith("model") else ()
    if keys:
        said = f"{where}: must have the keys {', '.join(keys)}"
    said = said.removesuffix(".")
    return f"{said}; what was found isn't shown, because it may hold a password."


def _sentence(first: Any, loc: list[Any], known: _KnownKeys | None) -> str:
    where, message = (
        ".".join(map(str, loc)) or "the whole",
        first["msg"].removeprefix("Value error, "),
    )
    match first["type"]:
        case "extra_forbidden" if _is_number(loc[-1]) and first["input"] is None:
            list_ = f"a list is written in brackets, such as [1, {loc[-1]}]"
            return f"unknown key {where}; {list_}."
        case "extra_forbidden":
            advice = "." if known is None else f"; {hint(str(loc[-1]), known(loc[:-1]))}"
            return f"unknown key {where}{advice}"
        case _ if first["input"] is None and first["type"].endswith("_type"):
            return f"{where} is empty; give its value."
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
            cpu = " such as [0], where [] stands for the CPU" if loc[-1:] == ["gpus"] else ""
            return f"{where}: must be a list{cpu}, but got {shown(first['input'])}."
        case "too_short":
            counts = first["ctx"]
            return (
                f"{where}: must have {counts['min_length']} or more entries, but has"
                f" {counts['actual_length']}."
            )
        case "model_type":
            keys = known(loc) if known is not None else ()
            such = f", {', '.join(keys[:_NAMED])}" if keys else ""
            return f"{where}: must have keys of its own{such}, but got {shown(first['input'])}."
        case "bool_type":
            return f"{where}: must be true or false, but got {shown(first['input'])}."
        case "json_invalid":
            return f"its text can't be read: {first['ctx']['error']}."
    got, how = shown(first["input"]), _fraction(first) or _point(first)
    return f"{where}: {message[0].lower()}{message[1:]}, but got {got}{how}."


def _is_number(key: Any) -> bool:
    return str(key).replace(".", "", 1).isdigit()


def _fraction(first: Any) -> str:
    """Return how a percentage is written, where a value looks like one of a share; else nothing."""
    text = str(first["input"]).strip()
    of_share = first["type"] == "less_than_equal" and first["ctx"]["le"] == 1
    if not (text.endswith("%") or of_share) or not _is_number(text.removesuffix("%").strip()):
        return ""
    return f"; write a percentage as a fraction, {float(text.removesuffix('%')) / 100:.12g}"


def _point(first: Any) -> str:
    """Return how a number is written, where a text has a decimal comma; else nothing."""
    text = str(first["input"]).strip()
    if not first["type"].startswith(("float", "int")) or not re.fullmatch(
        "[-+]?[0-9]+,[0-9]+", text
    ):
        return ""
    return f"; a number has a decimal point, {text.replace(',', '.')}"
