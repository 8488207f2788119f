"""The part `target` of a study file: the quality that a trial has to reach."""

import difflib
import math
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    create_model,
    model_validator,
)

from carbonopt.core.errors import shortened
from carbonopt.core.quality import QUALITIES, Quality, Target, quality_of
from carbonopt.spec.base_settings import Name, Settings

_LARGEST = 1e9  # target of a known quality
_LARGEST_OWN = 1e12  # target of a quality that a script reports, in either direction


def _name_of_a_report(text: str) -> str:
    if not re.fullmatch(r"[^\W\d][\w/.@-]{0,99}", text) or text in ("count", "step"):
        must = (
            "must be a word of letters, digits and _ / . @ -, and neither count nor step, which"
            " reports have too"
        )
        raise ValueError(f"{must}, but got {shortened(text)}")
    return text


def _target_field(quality: Quality) -> tuple[Any, Any]:
    values = ""
    if math.isfinite(quality.highest):
        values = f", from {quality.lowest:g} to {quality.highest:g}"
    elif math.isfinite(quality.lowest):
        values = f", which is {quality.lowest:g} or more"
    return float | None, Field(
        default=None,
        ge=quality.lowest,
        le=min(quality.highest, _LARGEST),
        description=f"{quality.bound_word.capitalize()} this value{values}.",
    )


_TARGET_FIELDS: dict[str, Any] = {
    name: _target_field(quality) for name, quality in QUALITIES.items()
}


_QualitySettings: Any = create_model("TargetSettings", __base__=Settings, **_TARGET_FIELDS)


class TargetSettings(_QualitySettings):  # type: ignore[misc]
    """The quality that a trial has to reach.

    It is one of the known qualities, with a value that is an upper or a lower bound by that
    quality's direction; or a quality that a script reports under a name of its own, with `at_least`
    or `at_most`, which says which direction is better.
    """

    quality: Annotated[Name, AfterValidator(_name_of_a_report)] | None = None
    """The name of a quality that a script reports itself; give `at_least` or `at_most` with it."""

    at_least: float | None = Field(default=None, ge=-_LARGEST_OWN, le=_LARGEST_OWN)
    """The bound for `target.quality`, if more is better."""

    at_most: float | None = Field(default=None, ge=-_LARGEST_OWN, le=_LARGEST_OWN)
    """The bound for `target.quality`, if less is better."""

    one_of = (*QUALITIES, "quality")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Explain how a quality of the user's own is written.

        The explanation is given only where the name looks like such a quality and not like a typing
        error.
        """
        if not isinstance(given, dict) or len(given) != 1:
            return given
        ((name, value),) = given.items()
        slip = difflib.get_close_matches(str(name).lower(), cls.model_fields)
        if name not in cls.model_fields and not slip and isinstance(value, int | float):
            must = (
                f"{{quality: {name}, at_least: {value:g}}} or {{quality: {name}, at_most:"
                f" {value:g}}}"
            )
            known = ", ".join(QUALITIES)
            raise ValueError(
                f"{shortened(name)} is none of {known}; a quality that a script reports is {must}"
            )
        return given

    def violations(self) -> dict[str, bool]:
        bounds = sum(bound is not None for bound in (self.at_least, self.at_most))
        named = self.quality is not None
        return {
            f"quality: {self.quality} must be written as {{{self.quality}: VALUE}}": (
                self.quality in QUALITIES
            ),
            f"quality: {self.quality} needs at_least or at_most beside it, one of them": (
                named and bounds != 1
            ),
            "at_least and at_most go with quality, the name of what a script reports": (
                not named and bounds > 0
            ),
        }

    @property
    def value(self) -> float:
        given = (self.at_least, self.at_most, *(getattr(self, name) for name in QUALITIES))
        return float(next(value for value in given if value is not None))

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value that a target of this quality may have."""
        if self.quality is not None:
            return -_LARGEST_OWN, _LARGEST_OWN
        quality = self.at().quality
        return quality.lowest, min(quality.highest, _LARGEST)

    def at(self, value: float | None = None) -> Target:
        """Return a target for the same quality with another value; None keeps this one's value."""
        name = self.quality or next(name for name in QUALITIES if getattr(self, name) is not None)
        quality = quality_of(name, "minimize" if self.at_least is None else "maximize")
        return Target(quality, self.value if value is None else value)
