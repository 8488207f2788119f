"""The part `search.space` of a study file: the values of each dimension."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
)

from carbonopt.core.dimensions import DIMENSION_NAMES, DIMENSIONS, StatedAffects
from carbonopt.core.errors import shortened
from carbonopt.core.values import Given, Scalar, step_of, steps_between
from carbonopt.spec.base_settings import Settings

AUTO = "auto"  # stands in the place of a space


def same_choices(choices: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return two choices that count as the same; None: all differ.

    1, 1.0 and true are equal in Python, by which trials are compared. 1 and "1" look the same in a
    command.
    """
    by_value: dict[Any, Any] = {}
    by_text: dict[str, Any] = {}
    for choice in choices:
        for known, key in ((by_value, choice), (by_text, str(choice))):
            if key in known:
                return known[key], choice
        by_value[choice] = by_text[str(choice)] = choice
    return None


class Choices(Settings):
    """Any of the listed values."""

    choices: tuple[Given, ...]
    """A list of values."""

    affects: StatedAffects | None = None
    """`cost` or `quality`, for a [script's own](script.md) dimension that changes only one of them.
    Left out: the search learns both effects from the trials."""

    def violations(self) -> dict[str, bool]:
        pair = same_choices(self.choices)
        named = "" if pair is None else f"{pair[0]!r} and {pair[1]!r} count as the same"
        text = (
            f"choices must differ from each other, but got {shortened(list(self.choices))}, where"
            f" {named}; leave one out"
        )
        return {
            "choices must have at least one value": not self.choices,
            text: pair is not None,
        }


class Range(Settings):
    """Any value from `low` to `high`, both included."""

    low: float = Field(ge=-1e12, le=1e12)
    """A range's lowest value."""

    high: float = Field(ge=-1e12, le=1e12)
    """A range's highest value."""

    log: bool = False
    """Searches the range on a logarithmic scale."""

    step: float | None = Field(default=None, gt=0)
    """The range has only the values `low`, `low` + `step` and so on."""

    affects: StatedAffects | None = None
    """`cost` or `quality`; the same as beside `choices`."""

    def violations(self) -> dict[str, bool]:
        low, high = self.low, self.high
        return {
            f"`low <= high` must hold, but got low={low:g} and high={high:g}": low > high,
            f"`low > 0` must hold with log: true, but got low={low:g}": self.log and low <= 0,
            "step and log: true exclude each other": self.log and self.step is not None,
            f"step must be at least a billionth of high - low, but got {self.step}": (
                self.step is not None and self.step < (high - low) / 1e9
            ),
            f"step must be at most high - low, but got step={self.step}, low={low:g} and"
            f" high={high:g}; without step the range is continuous": (
                self.step is not None and low < high and (high - low) / self.step < 1 - 1e-9
            ),
        }

    @property
    def last(self) -> float:
        """The highest value: `high`, or the last step that is not above it.

        Steps are counted in decimals, as Optuna counts them.
        """
        if self.step is None:
            return self.high
        return float(step_of(self.low, self.step, steps_between(self.low, self.high, self.step)))


class Fixed(Settings):
    """A single value, in the form of a stored study."""

    value: Given


_OF_RANGES = ("log", "step")  # keys that only a range has


def _domain(raw: Any) -> Any:
    if isinstance(raw, Choices | Range | Fixed):
        return raw
    if isinstance(raw, bool | int | float | str):
        return Fixed(value=raw)
    if isinstance(raw, dict):
        if "choices" in raw and {"low", "high"} & raw.keys():
            raise ValueError("must have either choices, or low and high, but has both")
        if raw.keys() == {"value"}:  # the form in a stored study
            return Fixed(**raw)
        if {"low", "high"}.isdisjoint(raw) and (
            of_range := [key for key in _OF_RANGES if key in raw]
        ):
            how = "leave it out" if "choices" in raw else "give both"
            raise ValueError(f"{of_range[0]} needs low and high, but both are missing; {how}")
        return (
            Range.model_validate(raw, strict=True)
            if {"low", "high"} & raw.keys()
            else Choices(**raw)
        )
    raise ValueError(
        "must be a single value, {choices: [...]} or {low: .., high: .., log: true}, but got"
        f" {raw!r}"
    )


# the values that a dimension may have
Domain = Annotated[
    Choices | Range | Fixed,
    BeforeValidator(_domain, json_schema_input_type=Given | Choices | Range),
]


def values_of(domain: Domain | None) -> tuple[Scalar, ...]:
    """Return the values that a domain lists.

    The result is empty for a range and for a dimension that is left out (None).
    """
    return (domain.value,) if isinstance(domain, Fixed) else getattr(domain, "choices", ())


def ends_of(domain: Domain | None) -> tuple[Scalar, ...]:
    """Return a range's ends, whole numbers as int, or all values of another domain."""
    if not isinstance(domain, Range):
        return values_of(domain)
    return tuple(int(end) if float(end).is_integer() else end for end in (domain.low, domain.last))


def may_be(domain: Domain | None, value: float) -> bool:
    """Return whether a domain has a number among its values."""
    if isinstance(domain, Range):
        return domain.low <= value <= domain.high
    return value in values_of(domain)


def may_be_other_than(domain: Domain | None, value: Scalar) -> bool:
    """Return whether a domain lists another value than the given one."""
    return any(choice != value for choice in values_of(domain))


def _space_field(name: str) -> tuple[Any, Any]:
    default = DIMENSIONS[name].default
    return Domain | None, None if default is None else Fixed(value=default)


_SPACE_FIELDS = {name: _space_field(name) for name in DIMENSION_NAMES}


class Space(create_model("Space", __base__=Settings, **_SPACE_FIELDS)):  # type: ignore[misc]
    """The dimensions of the search.

    A dimension that is left out takes its default; a single value fixes it. Beside the dimensions
    of the table (`core.dimensions`), a script's user may have dimensions of their own. The task
    decides which dimensions are required.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Domain]

    def __getitem__(self, name: str) -> Domain | None:
        # getattr alone is not enough: a user's own dimension may have the name of a method.
        return getattr(self, name) if name in DIMENSION_NAMES else self.__pydantic_extra__.get(name)

    def violations(self) -> dict[str, bool]:
        known = [
            name for name in DIMENSION_NAMES if getattr(self[name], "affects", None) is not None
        ]
        rule = f"affects is for dimensions of your own: what {', '.join(known)} affects is known"
        return {rule: bool(known)}

    @property
    def own(self) -> tuple[str, ...]:
        """The names of the dimensions that the user has invented."""
        return tuple(self.__pydantic_extra__)

    def domains(self) -> dict[str, Domain]:
        """Return every dimension's domain: in the table's order, then the user's own dimensions."""
        return {
            name: domain
            for name in (*DIMENSION_NAMES, *self.own)
            if (domain := self[name]) is not None
        }

    def affects(self) -> dict[str, StatedAffects]:
        """Return `affects` for each of the user's own free dimensions that gives it."""
        return {
            name: domain.affects
            for name, domain in self.free().items()
            if domain.affects is not None
        }

    def free(self) -> dict[str, Choices | Range]:
        """Return the domains of the dimensions that the search may move."""
        return {
            name: domain for name, domain in self.domains().items() if not isinstance(domain, Fixed)
        }


class UnchosenSpace(Space):
    """The space of `space: auto` before it is chosen.

    `space.auto_space` chooses it once the data is prepared.
    """
