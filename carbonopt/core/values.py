"""The types and the base class of frozen values."""

import math
from collections.abc import Collection
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from carbonopt.core.errors import shortened

Scalar = bool | int | float | str


def _checked(value: Any) -> Any:
    if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"must be a finite number or a word, but got {shortened(value)}")
    return value


# A scalar that a user gives. Without the validator, pydantic's message would name only the first
# type.
Given = Annotated[Scalar, BeforeValidator(_checked)]


class Frozen(BaseModel):
    """A value that can't be changed after it was made, and takes no field that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _timed(text: str) -> str:
    try:
        has_offset = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        has_offset = False
    if not has_offset:
        raise ValueError(f"must be a time as ISO 8601 with its offset, but got {shortened(text)}")
    return text


# A time of a record: ISO 8601, in UTC.
Time = Annotated[str, AfterValidator(_timed)]

# Bounds of numbers in records: this program writes no other numbers.
Whole = Annotated[int, Field(ge=0, le=10**18)]
# sums of such numbers are finite, too
Finite = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


class Spread(Frozen):
    """The mean, the deviation and the range of two or more values."""

    mean: float
    standard_deviation: float  # sample standard deviation, with n − 1
    lowest: float
    highest: float


# The relative difference by which sums and means of equal figures may differ.
SAME_TO_ROUNDING = 1e-9

_LARGEST = 1e307  # the difference of two floats may exceed what a float holds


def as_typed(value: float, low: float, high: float, *, log: bool = False) -> float:
    """Return a number of a continuous range as somebody would type it, such as 0.0298.

    It is rounded to a thousandth of the range's width or finer. On a logarithmic range it has 3
    significant digits, unless these are coarser than a hundredth of the width.

    Args:
        value: the number, from `low` to `high`.
        log: whether the range is logarithmic.
    """
    width = min(high - low, _LARGEST)
    decimals = 4 + _decimals(width)
    if log and value > 0 and 10.0 ** -(3 + _decimals(value)) <= 1e-2 * width:
        decimals = 3 + _decimals(value)
    return float(min(high, max(low, round(value, decimals))))


def _decimals(number: float) -> int:
    """Return the decimals of a positive number's first digit, less one: 0.03 has 1, 300 has -3."""
    # The addition is for widths such as 0.0031 - 0.003, which is a little below 0.0001.
    return -math.floor(math.log10(number) + 1e-9) - 1 if number > 0 else 0


def is_less(one: float, other: float) -> bool:
    """Return whether a figure is smaller than another one by more than the rounding of sums."""
    return one < other and not math.isclose(one, other, rel_tol=SAME_TO_ROUNDING)


def to_rounding(figure: float) -> float:
    """Return a figure with nine significant digits: sums of equal figures are then equal."""
    return float(f"{figure:.9g}")


def within(values: Collection[float], mean: float) -> float:
    """Return the mean of these values, rounded so that it is none beyond the least or largest.

    A mean of equal values is that value to its last digit.
    """
    return min(max(mean, min(values)), max(values))


def stepped(low: float, high: float, step: float) -> list[Any]:
    """Return the numbers from `low` to `high` that are so far apart, all of the type of `low`."""
    return [step_of(low, step, index) for index in range(steps_between(low, high, step) + 1)]


def steps_between(low: float, high: float, step: float) -> int:
    """Return the number of whole steps from `low` to `high`, in decimals as they are typed."""
    return int((Decimal(str(high)) - Decimal(str(low))) // Decimal(str(step)))


def step_of(low: float, step: float, index: int) -> Any:
    """Return low + index × step as it is typed: 0.3 for 0.1 and two steps of 0.1."""
    return type(low)(Decimal(str(low)) + index * Decimal(str(step)))
