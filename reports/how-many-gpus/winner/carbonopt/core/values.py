"""What frozen values are made of."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Scalar = bool | int | float | str


def _checked(value: Any) -> Any:
    if not isinstance(value, Scalar) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"must be a finite number or a word, but got {value!r}")
    return value


Given = Annotated[Scalar, BeforeValidator(_checked)]  # by a user; pydantic would name the first of the types only


class Frozen(BaseModel):
    """A value: it can't be changed after it was made, and takes no field that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


# Anything else in a record was not written by this program.
Whole = Annotated[int, Field(ge=0, le=10**18)]
Finite = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]  # sums of them are finite, too


class Spread(Frozen):
    """Of two or more values."""

    mean: float
    standard_deviation: float  # of a sample: n − 1
    lowest: float
    highest: float
