"""The checks of what a user's training script reports.

Nothing but Python is imported here.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import parsed_json, repeated_key
from carbonopt.core.quality import Quality

LARGEST_COUNT = 10**12
LONGEST_SHOWN = 200  # characters that a record has of a line
# A larger value counts as infinite: its sum over examples, or a square, would overflow.
LARGEST_VALUE = 1e100
# a terminal's colours, as in `spec.matches_of_lines`, which imports nothing
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# A progress bar of tqdm, whose line a print continues: 50%|## | 1/2 [00:01<00:01, 1.00it/s]
_BEFORE_JSON = re.compile(r"^[^{]*\[\d+:\d\d[^{\]]*\]\s*(?=\{)")
# What may be a value behind a name in quotes: 0.9, np.float64(0.9), "95%", null.
_VALUE = (
    r"""\s*[:=]\s*(?:[\w.]+\(\s*)?["']?"""
    r"([-+]?[\d.][-+\w.]*%?|(?i:[-+]?(?:nan|inf|infinity|none|null)\b))"
)
# How a value says in a field beside it that it is of the training data.
_TRAINING = re.compile(r"\s*(?:train(?:ing)?|fit)(?:[\s_-]*(?:set|data|split))?\s*", re.IGNORECASE)
_EVALUATING = re.compile(
    r"\s*(?:val(?:id(?:ation)?)?|dev(?:elopment)?|test|eval(?:uation)?|held[\s_-]?out)"
    r"(?:[\s_-]*(?:set|data|split))?\s*",
    re.IGNORECASE,
)
_ONE_OF_SEVERAL = (
    "Give a value of other data, such as a test's or the training's, a name of its own, or give"
    " workload.quality_from a pattern that matches the lines that count alone, such as"
    """ '"split": "val".*"accuracy": ([0-9.]+)'."""
)
_PERCENT_FROM = 1.01  # a share of up to this may be 1 with the error of a bfloat16


@dataclass(frozen=True)
class Reported:
    """An evaluation that a script reported; its fields are those of `evaluations.EvalPoint`."""

    step: int
    value: float | None  # value of the quality; None: it was NaN or infinite
    sum: float | None  # None: it was NaN or infinite
    count: int  # number of examples or tokens; 1 where it is not known
    other_qualities: dict[str, float]
    tokens: None = None


@dataclass(frozen=True)
class Lines:
    """The lines that gave one evaluation other values; its fields are those of `QualityLines`."""

    count: int
    first: str
    last: str  # the line that counts

    @classmethod
    def of(cls, count: int, first: str, last: str) -> Lines:
        """Make them of whole lines, which are cut to LONGEST_SHOWN characters."""
        texts = (
            f"{line[: LONGEST_SHOWN - 1]}…" if len(line) > LONGEST_SHOWN else line
            for line in (first, last)
        )
        return cls(count, *texts)


@dataclass(frozen=True)
class Readings:
    """The evaluations that were read in what a script wrote."""

    points: list[Reported]
    lines: Lines | None  # the lines of the last evaluation; None: one, or all with one value


def whole(name: str, value: object, lowest: int) -> int:
    """Return a count as an int, whatever library's number it is.

    Raises:
        BadInput: if it is no whole number from `lowest` on.
    """
    number = None
    if _may_be_number(value):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                real = float(value)  # type: ignore[arg-type]
                number = int(real) if real.is_integer() else None
    if number is None or not lowest <= number <= LARGEST_COUNT:
        raise BadInput(
            f"{name} must be a whole number from {lowest} to {LARGEST_COUNT:g}, but is"
            f" {shortened(value)}."
        )
    return number


def number(name: str, value: object) -> float:
    """Return a quality as a float, whatever library's number it is.

    Raises:
        BadInput: if it is no number.
    """
    if _may_be_number(value):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)  # type: ignore[arg-type]
    raise BadInput(f"{name} must be a real number, but is {shortened(value)}.")


def _may_be_number(value: object) -> bool:
    """Return False for a truth value, a text or a complex number, which float() may take, too.

    The types of an array library, which is not imported here, are told by their dtype.
    """
    if isinstance(value, bool | str | bytes | bytearray | memoryview | complex):
        return False
    dtype = getattr(value, "dtype", None)
    is_other_kind = str(getattr(dtype, "kind", "f")) not in "iuf"  # of NumPy
    if is_other_kind and "float" not in str(dtype):  # ml_dtypes's bfloat16 has the kind V
        return False
    return "bool" not in str(dtype) and "complex" not in str(dtype)


def evaluation(
    quality: Quality,
    qualities: dict[str, object],
    count: object,
    step: int,
    *,
    of_percent: str = "divide it by 100",
) -> Reported:
    """Return an evaluation that a script reported, checked.

    Args:
        quality: the quality of the target.
        qualities: the reported values by name, with that of the target among them.
        count: the number of examples or tokens that they are means over; None: not known.
        step: the step after which the evaluation was made.
        of_percent: the advice for a share that seems to be in percent.

    Raises:
        BadInput: if the quality is missing or can't have such a value.
    """
    if quality.name not in qualities:
        got = ", ".join(qualities) or "nothing"
        raise BadInput(
            f"a report must have {quality.name}, the quality of the target, but has {got}."
        )
    for name in qualities:
        if not name.isprintable() or not 0 < len(name.strip()) <= 100:
            raise BadInput(
                "a quality's name must have 1 to 100 printable characters, but is"
                f" {shortened(name)}."
            )
    values = {name: number(name, value) for name, value in qualities.items()}
    value, examples = values.pop(quality.name), 1 if count is None else whole("count", count, 1)
    if problem := quality.beyond(value):
        if quality.is_share and 1 < value <= _PERCENT_FROM:
            problem += "; if it was rounded up, report the smaller of it and 1"
        elif quality.is_share and 1 < value <= 100:
            problem += f"; is it in percent? Then {of_percent}, for {value / 100:g}"
        raise BadInput(f"{quality.name} {problem}.")
    others = {name: other for name, other in values.items() if math.isfinite(other)}
    if not abs(value) <= LARGEST_VALUE:  # NaN, too
        return Reported(step, None, None, examples, others)
    total = quality.mean_of(value) * examples
    return Reported(step, quality.value(total, examples), total, examples, others)


def check_steps(must: str, points: Sequence[Reported]) -> None:
    """Check that the steps of a script's evaluations are numbered through the whole training.

    Steps that start anew, as those of an epoch or a fold do, go back, or are the same at the end of
    each. The last of them is not the number of steps that the training made. One step may come
    again with another value, such as the last one with the best weights. If several do, they are
    of several data, such as the training's, or of several processes.

    Args:
        must: how a message begins, such as "a script must print".
        points: the evaluations, in the order in which they were made.

    Raises:
        BadInput: If steps go back to other values, or if the only step or several steps come again
            with another value.
    """
    advice = (
        "number steps through the whole training, not anew in each epoch or fold. If trials write"
        " one shared file, write it into {output_dir}. Or leave the steps out."
    )
    known: dict[int, float | None] = {}
    distinct: set[float | None] = set()
    highest, has_gone_back = 0, False
    for before, after in pairwise(points):
        known[before.step] = before.value
        distinct.add(before.value)
        highest = max(highest, before.step)
        has_gone_back |= after.step < before.step
        # A training that goes on after a cut evaluates some steps again, to the same values.
        # A quality that never changes tells nothing: it may be another epoch's.
        is_again = len(distinct) > 1 and after.step in known and known[after.step] == after.value
        if has_gone_back and after.step <= highest and not is_again:
            raise BadInput(
                f"{must} steps in the order in which they were made, but step {after.step} comes"
                f" after step {highest}; {advice}"
            )
    values: dict[int, dict[float | None, None]] = {}  # an ordered set of values for each step
    for point in points:
        values.setdefault(point.step, {})[point.value] = None
    in_training = [step for step in values if step > 0]
    again = [step for step in in_training if len(values[step]) > 1]
    if len(again) >= min(2, len(in_training)) > 0:
        step, others = again[0], len(again) - 1
        more = f"as {others} more do" if others else "and there is no other"
        first, then, *_ = values[step]
        raise BadInput(
            f"{must} one value a step, but step {step} comes with {first} and with {then}, {more};"
            f" {advice} {_ONE_OF_SEVERAL}"
        )


def without_missing(points: Sequence[Reported]) -> list[Reported]:
    """Return evaluations without those that are NaN or null at a step that has a number, too.

    Tables that are written as JSON lines have null where a row has no value, such as the rows of
    training data between those of evaluations.
    """
    steps = {point.step for point in points if point.value is not None}
    return [point for point in points if point.value is not None or point.step not in steps]


def check_data(objects: Sequence[Any]) -> None:
    """Refuse the training data's value behind one of other data, as values of one evaluation.

    Args:
        objects: the JSON objects with its values, in their order.

    Raises:
        BadInput: if the last object alone says that it is of the training data.
    """
    texts = [_texts(each) for each in objects]
    for name, value in texts[-1].items():
        if not _TRAINING.fullmatch(value):
            continue
        for other in texts[:-1]:
            earlier = other.get(name, "")
            if _EVALUATING.fullmatch(earlier):
                raise BadInput(
                    f"the last value must be the one that counts, but its {shortened(name)} is"
                    f" {shortened(value)}, behind one of {shortened(earlier)}. {_ONE_OF_SEVERAL}"
                )


def _texts(value: Any, name: str = "") -> dict[str, str]:
    """Return the texts in an object of JSON by name, also those in the objects in it.

    No data set is named in the sixth object within others.
    """
    if isinstance(value, dict) and name.count(".") < 5:
        parts = (_texts(each, f"{name}.{key}" if name else str(key)) for key, each in value.items())
        return {key: text for part in parts for key, text in part.items()}
    return {name: value} if isinstance(value, str) else {}


def lines_of_last(points: Sequence[Reported], texts: Sequence[str]) -> Lines | None:
    """Return the lines that gave the last evaluation its values; None: they gave one value.

    Args:
        points: the evaluations in their order; those of the last one come again with its step.
        texts: the line of each.
    """
    same = len(list(itertools.takewhile(lambda each: each.step == points[-1].step, points[::-1])))
    if len({point.value for point in points[-same:]}) < 2:
        return None
    return Lines.of(same, texts[-same], texts[-1])


def printed_evaluations(said: str, quality: Quality, steps: int) -> Readings:
    """Return the evaluation in the last line that is a JSON object with the quality.

    There is none if there is no such line. Colours, and a progress bar before it, are left out. The
    line may have `step` (else it is `steps`) and `count`.

    Raises:
        BadInput: as `evaluation`; if that line can't be read, or a later one has another value in
            another form, since an earlier one would be of another evaluation; and as `check_steps`
            and `check_data`.
    """

    found: list[tuple[Reported, dict[str, Any], str]] = []  # the last one first
    later: list[str] = []  # the lines behind it
    # splitlines would end a line within a text, too, at signs that JSON allows there
    for line in reversed(re.split(r"[\r\n]+", said)):
        try:
            printed = _printed_object(line, quality)
            if printed is None or (found and ("step" in printed) != ("step" in found[0][1])):
                later += [line] if not found else []
                continue
            step = whole("step", printed.get("step", steps), 1)
            value = printed[quality.name]
            # Loggers write NaN as null.
            values: dict[str, object] = {quality.name: math.nan if value is None else value}
            point = evaluation(quality, values, printed.get("count"), step)
            if not found:
                _check_later(later, quality.name, values[quality.name])
        except BadInput:
            if not found:
                raise
            continue  # only the last line counts
        found.append((point, printed, line.strip()))
    if not found:
        return Readings([], None)
    has_steps = "step" in found[0][1]
    if has_steps:
        kept = set(map(id, without_missing([point for point, *_ in found])))
        found = [each for each in found if id(each[0]) in kept]
    points, objects, texts = (list(each) for each in zip(*reversed(found), strict=True))
    if has_steps:
        check_steps("the script must print", points)
    last = points[-1]
    check_data([each for each, at in zip(objects, points, strict=True) if at.step == last.step])
    return Readings([last], lines_of_last(points, texts))


def _check_later(lines: Sequence[str], name: str, value: object) -> None:
    """Refuse a value that was printed after the last JSON line, in a form that is not read.

    Examples are a logger's or a launcher's prefix before the JSON, a dict's repr and JSON over
    several lines. The value of the JSON line may be there again.

    Raises:
        BadInput: if a line has the quality's name in quotes with another value.
    """
    named = re.compile(rf"""["']{re.escape(name)}["']{_VALUE}""")
    for line in lines:
        for found in named.finditer(line):
            with contextlib.suppress(ValueError):
                if float(found[1]) == float(str(value)):
                    continue
            raise BadInput(
                f"the last {name} that is printed must be in a line of JSON alone, such as"
                f' {{"{name}": VALUE}}, but a later line is {shortened(line.strip())}; print it'
                " so, or give workload.quality_from a pattern."
            )


def _printed_object(line: str, quality: Quality) -> dict[str, Any] | None:
    """Return the JSON object with the quality in a line of a script's output; None: it has none.

    Raises:
        BadInput: if the line has the quality's name and can't be read.
    """

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if quality.name in values and (twice := repeated_key(pairs)) is not None:
            raise BadInput(
                f"a printed line must have each key once, but has {shortened(twice)} twice; print"
                " it once."
            )
        return values

    text = _BEFORE_JSON.sub("", _COLOURS.sub("", line).removeprefix("\ufeff")).strip()
    if not text.startswith("{"):
        return None
    try:
        printed: dict[str, Any] = parsed_json(text, object_of)
    except ValueError as error:
        if f'"{quality.name}"' not in text:
            return None
        raise BadInput(
            f"the printed line {shortened(text)} can't be read as JSON: {error}."
        ) from error
    return printed if quality.name in printed else None
