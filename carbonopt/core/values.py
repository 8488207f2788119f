"""What frozen values are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Scalar = bool | int | float | str


class Frozen(BaseModel):
    """A value: it can't be changed after it was made, and takes no field that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


# Anything else in a record was not written by this program.
Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Spread(Frozen):
    """Of two or more values."""

    mean: float
    standard_deviation: float  # of a sample: n − 1
    lowest: float
    highest: float
