"""The base class of everything that a user gives, and the types that several parts share."""

import re
from typing import Annotated, ClassVar, Self

from pydantic import (
    AfterValidator,
    StringConstraints,
    model_validator,
)

from carbonopt.core import values
from carbonopt.core.errors import as_servers_read, shown


def _one_line(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        raise ValueError(
            f"must hold no line break and no other control character, but got {shown(text)}"
        )
    return text


Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=200, strip_whitespace=True),
    AfterValidator(_one_line),
]


def _no_address(name: str) -> str:
    """Return a name as it is; refuse an address with a user, which the storage would keep."""
    read = as_servers_read(name)
    if "://" in read and "@" in read:
        raise ValueError(
            "must be a name and no address with a user or a password, because reports print the"
            " study file; give a name"
        )
    return name


# A name that reports print, and that could be given as an address.
PublicName = Annotated[Name, AfterValidator(_no_address)]


class Settings(values.Frozen, allow_inf_nan=False):
    """The base class of what a user gives; its numbers are finite."""

    one_of: ClassVar[tuple[str, ...]] = ()  # exactly one of these fields must be given

    def violations(self) -> dict[str, bool]:
        """Return the rules of this model, in words, and whether each one is broken.

        The text of the first broken rule becomes the error message.
        """
        return {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in self.one_of if getattr(self, name) is not None]
        if self.one_of and len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise ValueError(f"must have exactly one of {', '.join(self.one_of)}, but has {names}")
        if problem := next((text for text, is_so in self.violations().items() if is_so), None):
            raise ValueError(problem)
        return self
