"""The types and the base class of frozen values."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Scalar = bool | int | float | str


def _checked(value: Any) -> Any:
    if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"must be a finite number or a word, but got {value!r}")
    return value


# A scalar that a user gives. Without the validator, pydantic's message would name only the first
# type.
Given = Annotated[Scalar, BeforeValidator(_checked)]


class Frozen(BaseModel):
    """A value that can't be changed after it was made, and takes no field that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
