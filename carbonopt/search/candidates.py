"""Configurations that could be tried next.

These are all that are left or, if there are many, random ones and neighbours of good ones.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from carbonopt.core.dimensions import StatedAffects, affecting
from carbonopt.core.values import as_typed, step_of, stepped

Values = dict[str, Any]
Key = tuple[Any, ...]  # a configuration's values, in the dimensions' order
Distributions = dict[str, BaseDistribution]  # the distribution of each dimension, by its name

ENUMERATED = 4096  # largest space that is enumerated; from a larger one, configurations are drawn
DRAWN = 1024
NEAR = 0.15  # share of a dimension's range by which neighbours typically differ
ENOUGH = 64  # new configurations that can exist; drawing goes on while fewer were found
ROUNDS = 32  # the most rounds of draws


class Candidates:
    """The configurations of a space with these dimensions.

    Args:
        valid: returns whether a combination of values can exist.
        listed: all combinations that can exist, if they are known; they may have further, constant
            dimensions. The attribute `listed` is without these, and None where there are too many.
        canonical: maps combinations that train alike to the one of them that is tried.
        affects: what dimensions that carbonopt doesn't know affect.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        valid: Callable[[Values], bool],
        listed: Sequence[Mapping[str, Any]] | None = None,
        canonical: Callable[[Values], Values] = dict,
        affects: Mapping[str, StatedAffects] | None = None,
    ) -> None:
        self._distributions, self._valid, self._canonical = distributions, valid, canonical
        self._affects = affects
        self.listed = (
            self._product()
            if listed is None
            else [self._named(values, "listed") for values in listed]
        )

    def untried(
        self, tried: Collection[Key], centres: Sequence[Values], rng: Generator
    ) -> list[Values]:
        """Return configurations that can exist and are not among `tried`.

        Of a large space, not all are returned, but random ones and more near `centres`, which are
        good configurations.
        """
        left = None
        if self.listed is not None:
            left = [values for values in self.listed if self._key(values) not in tried]
            if len(left) <= ENUMERATED:
                return left
        new: dict[Key, Values] = {}
        for _ in range(ROUNDS):
            for drawn in (*self._drawn(left, rng), *self._neighbours(centres, rng)):
                values = self._named(self._canonical(drawn), "canonical")
                key = self._key(values)
                if key not in tried and self._valid(values):
                    new[key] = values
            if len(new) >= ENOUGH:
                break
        return list(new.values())

    def alike(self, values: Values, tried: Collection[Key]) -> list[Values]:
        """Return this configuration, and the untried ones that train alike in other settings."""
        of_quality = affecting("quality", self._distributions, self._affects)
        lists = {
            name: [values[name]] if name in of_quality else _values(distribution) or [values[name]]
            for name, distribution in self._distributions.items()
        }
        if math.prod(map(len, lists.values())) > ENUMERATED:
            return [values]
        combinations = (
            dict(zip(lists, combined, strict=True))
            for combined in itertools.product(*lists.values())
        )
        others = (
            other for other in combinations if other != values and self._key(other) not in tried
        )
        return [values, *filter(self._valid, others)]

    def any(self, tried: Collection[Key], rng: Generator) -> Values:
        """Return a random configuration that can exist, which is not among `tried` if one is left.

        Raises:
            ValueError: if none was found.
        """
        if left := self.untried(tried, (), rng) or self.untried((), (), rng):
            return left[int(rng.integers(len(left)))]
        raise ValueError(
            "valid must allow some combination of the search space, but it refused all that were"
            " drawn."
        )

    def _key(self, values: Values) -> Key:
        return key_of(values, self._distributions)

    def _named(self, values: Any, what: str) -> Values:
        """Return these dimensions' values alone, in their order."""
        if not isinstance(values, Mapping) or not values.keys() >= self._distributions.keys():
            raise ValueError(
                f"{what} must give a value for each of {', '.join(self._distributions)}, but got"
                f" {values!r}."
            )
        return {name: values[name] for name in self._distributions}

    def _product(self) -> list[Values] | None:
        lists = {name: _values(distribution) for name, distribution in self._distributions.items()}
        if not all(lists.values()) or math.prod(map(len, lists.values())) > ENUMERATED:
            return None
        combinations = (
            dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
        )
        return [values for values in combinations if self._valid(values)]

    def _drawn(self, left: Sequence[Values] | None, rng: Generator) -> list[Values]:
        if left is not None:
            return [left[index] for index in rng.choice(len(left), DRAWN, replace=False)]
        return [
            {name: draw(dist, rng) for name, dist in self._distributions.items()}
            for _ in range(DRAWN)
        ]

    def _neighbours(self, centres: Sequence[Values], rng: Generator) -> Iterator[Values]:
        names = list(self._distributions)
        for trial in centres:
            # Its values may be those of another sampler, or an earlier version's.
            centre = {name: typed(self._distributions[name], trial[name]) for name in names}
            for _ in range(DRAWN // 8):
                name = names[int(rng.integers(len(names)))]
                yield {**centre, name: _near(self._distributions[name], centre[name], rng)}


def key_of(values: Mapping[str, Any], names: Iterable[str]) -> Key:
    """Return the values of these dimensions, by which configurations are compared."""
    return tuple(values.get(name) for name in names)


def movable(distributions: Mapping[str, BaseDistribution]) -> Distributions:
    """Return the dimensions of more than one value, which are the ones that are searched."""
    return {
        name: distribution
        for name, distribution in distributions.items()
        if not distribution.single()
    }


def draw(distribution: BaseDistribution, rng: Generator) -> Any:
    """Draw a random value of one dimension."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(rng.integers(len(distribution.choices)))]
    return _at(distribution, float(rng.random()))


def _values(distribution: BaseDistribution) -> list[Any]:
    """Return all values of a dimension, or none if they are too many or not countable."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, step = distribution.low, distribution.step
    if step is None or (distribution.high - low) / step > ENUMERATED:
        return []
    return stepped(low, distribution.high, step)


def _near(distribution: BaseDistribution, value: Any, rng: Generator) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return draw(distribution, rng)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    ends = (distribution.low, distribution.high, value)
    low, high, here = map(math.log, ends) if distribution.log else ends
    share = (here - low) / (high - low) if high > low else 0.0
    return _at(distribution, float(np.clip(share + NEAR * rng.standard_normal(), 0.0, 1.0)))


def _at(distribution: BaseDistribution, share: float) -> Any:
    """Return the value at a share of the range, on the scale on which the range is searched."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high = distribution.low, distribution.high
    if distribution.log:  # not by high / low, which may exceed what a float holds
        value = math.exp((1 - share) * math.log(low) + share * math.log(high))
    else:
        value = (1 - share) * low + share * high
    return typed(distribution, value)


def typed(distribution: BaseDistribution, value: Any) -> Any:
    """Return a value of a dimension, or the nearest one that somebody would type."""
    if isinstance(distribution, CategoricalDistribution):
        return value
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if step is not None:
        value = step_of(low, step, round((value - low) / step))
    elif isinstance(distribution, FloatDistribution):
        return as_typed(value, low, high, log=distribution.log)
    return type(low)(min(high, max(low, value)))
