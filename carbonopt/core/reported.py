"""What a user's training script says of itself, checked."""

import contextlib
import json
import math
import operator

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.quality import Quality
from carbonopt.core.trial import EvalPoint

LARGEST_COUNT = 10**12


def whole(name: str, value: object, lowest: int) -> int:
    """A count as an int, whatever library's number it is. Raises BadInput where it is none from `lowest` on."""
    number = None
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError):
            number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)  # type: ignore[arg-type]
    if number is None or not lowest <= number <= LARGEST_COUNT:
        raise BadInput(f"{name} must be a whole number from {lowest} to {LARGEST_COUNT:g}, but is {shortened(value)}.")
    return number


def number(name: str, value: object) -> float:
    """A quality as a float, whatever library's number it is. Raises BadInput where it is none."""
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)  # type: ignore[arg-type]
    raise BadInput(f"{name} must be a number, but is {shortened(value)}.")


def evaluation(quality: Quality, qualities: dict[str, object], count: object, step: int) -> EvalPoint:
    """An evaluation: the quality by its name, others beside it, and what they are means over (None: not known). Raises
    BadInput where the quality is missing or can't have such a value."""
    if quality.name not in qualities:
        got = ", ".join(qualities) or "nothing"
        raise BadInput(f"a report must have {quality.name}, the quality of the target, but has {got}.")
    for name in qualities:
        if not name.isprintable() or not 0 < len(name.strip()) <= 100:
            raise BadInput(f"a quality's name must have 1 to 100 printable characters, but is {shortened(name)}.")
    values = {name: number(name, value) for name, value in qualities.items()}
    value, examples = values.pop(quality.name), 1 if count is None else whole("count", count, 1)
    if fault := quality.beyond(value):
        raise BadInput(f"{quality.name} {fault}.")
    mean = quality.mean_of(value) if math.isfinite(value) else math.nan
    point = EvalPoint.of(quality, mean * examples, examples, step=step, tokens=None)
    finite = {name: other for name, other in values.items() if math.isfinite(other)}
    return point.model_copy(update={"other_qualities": finite})


def printed_evaluation(said: str, quality: Quality, steps: int) -> EvalPoint | None:
    """Of the last line that is a JSON object with the quality in it, and `step` (else `steps`) and `count` where it has
    them. Raises BadInput as `evaluation`."""
    for line in reversed(said.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            printed = json.loads(line)
            if isinstance(printed, dict) and quality.name in printed:
                step = whole("step", printed.get("step", steps), 1)
                return evaluation(quality, {quality.name: printed[quality.name]}, printed.get("count"), step)
    return None
