"""Configurations as rows of numbers: one form for what decides the quality, one for what decides the cost of a
step. Micro batch, ZeRO stage, offload and the like leave the quality alone, so that each model learns from all
trials that share its own settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import ValidationError

from carbonopt.core.arrays import Array
from carbonopt.core.dimensions import DIMENSIONS, Affects, TrialParams, affecting
from carbonopt.search.models.curves import CORE, Points
from carbonopt.search.models.schedule import progress
from carbonopt.search.observation import Observation, trial_params

Values = Mapping[str, Any]

_CURVE_CORE = ("global_batch_size", "learning_rate", "epochs", "lr_scheduler")  # in a row's first columns
_LARGEST = 1e100  # logarithms and differences of larger numbers are not worth comparing
POINTS = 240  # evaluations that a model is fitted to at most: its time goes with their third power


@dataclass(frozen=True)
class Encoder:
    """Of a space with these free dimensions; dimensions that carbonopt does not know count for both forms."""

    distributions: Mapping[str, BaseDistribution]
    sequences: float = 1.0  # in an epoch, see `sequences_per_epoch`

    def curve_rows(self, configurations: Sequence[Values]) -> Array:
        """Rows of the configurations' ends, (n, CORE + others)."""
        return np.array([self._curve_row(values, 1.0) for values in configurations])

    def points(self, observations: Sequence[Observation]) -> Points:
        """Evaluations of the trials, the last of each trial first when there are too many."""
        per_trial = max(1, POINTS // max(1, len(observations)))
        thinned = [(trial, *point) for trial in observations for point in _thinned(trial.curve, per_trial)]
        rows = np.array([self._curve_row(trial.params, share) for trial, share, _ in thinned])
        losses, numbers = np.array([loss for *_, loss in thinned]), np.array([trial.number for trial, *_ in thinned])
        examples = min((trial.examples for trial in observations), default=math.inf)
        width = CORE + len(self._others({}, "quality", *_CURVE_CORE))
        return Points(rows.reshape(-1, width), losses, numbers, examples)

    def system_rows(self, configurations: Sequence[Values]) -> Array:
        """What a step costs by, (n, columns): the logarithm of the global batch, then the others."""
        batches = ((math.log(values.get("global_batch_size", 1)), values) for values in configurations)
        return np.array([[batch, *self._others(values, "cost", "global_batch_size")] for batch, values in batches])

    def memory_rows(self, configurations: Sequence[Values]) -> Array:
        """What the memory goes by, (n, columns): the logarithm of the micro batch, then the others."""
        first = "micro_batch_size_per_gpu"
        micros = ((math.log(getattr(trial_params(values), first)), values) for values in configurations)
        return np.array([[micro, *self._others(values, "memory", first)] for micro, values in micros])

    def centre(self) -> tuple[float, float]:
        """The middle of the space in ln(batch) and ln(learning rate); of what is fixed, nothing is off the middle."""
        batch, rate = (self.distributions.get(name) for name in ("global_batch_size", "learning_rate"))
        return (_middle(batch) if batch else 0.0), (_middle(rate) if rate else 0.0)

    def _curve_row(self, values: Values, share: float) -> list[float]:
        params = trial_params(values)
        steps = params.epochs * self.sequences / params.global_batch_size
        area, rate_share = progress(params, share)
        core = [math.log(params.global_batch_size), math.log(params.learning_rate), math.log(steps * area), rate_share]
        return [*core, *self._others(values, "quality", *_CURVE_CORE)]

    def _others(self, values: Values, what: Affects, *without: str) -> list[float]:
        """All dimensions that affect this, but for these."""
        names = [name for name in affecting(what, self.distributions) if name not in without]
        return [number for name in names for number in self._numbers(name, values)]

    def _numbers(self, name: str, values: Values) -> list[float]:
        """One number, or for a choice among words one column for each but the first."""
        distribution = self.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            choices = distribution.choices
            numeric = all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices)
            if not numeric or name == "zero_stage":
                return [float(values.get(name) == choice) for choice in choices[1:]]
        low, high = _ends(distribution)
        value = values.get(name, low)
        if name in DIMENSIONS and (feature := DIMENSIONS[name].feature) is not None:
            return [feature(value)]
        if isinstance(distribution, IntDistribution | FloatDistribution) and distribution.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return [4 * (value - low) / (high - low) if high > low else 0.0]


def check_dimensions(distributions: Mapping[str, BaseDistribution]) -> None:
    """Raises ValueError if a dimension with one of carbonopt's names has a value that it can't have, or another one has
    numbers too large to compare."""
    for name, distribution in distributions.items():
        if isinstance(distribution, CategoricalDistribution):
            values = list(distribution.choices)
        else:
            low, high = _ends(distribution)
            values = [low, high]
            if isinstance(distribution, FloatDistribution) and distribution.step is None:
                values.append(low + (high - low) / math.pi)  # no whole number, which some dimensions need
        for value in values:
            if not _can_be(name, value):
                raise ValueError(f"{name} can't be {value!r}: leave it out of the search space.")


def _can_be(name: str, value: Any) -> bool:
    if isinstance(value, float) and abs(value) > _LARGEST:
        return False
    if name == "lr_scheduler":
        return isinstance(value, str)
    if name not in DIMENSIONS or DIMENSIONS[name].choices:
        return True
    needed = {"global_batch_size": 1, "micro_batch_size_per_gpu": 1, "learning_rate": 1.0, "epochs": 1}
    try:
        TrialParams.model_validate({**needed, name: value})
    except ValidationError:
        return False
    return True


def _ends(distribution: BaseDistribution) -> tuple[float, float]:
    """The lowest and the highest of numbers."""
    if isinstance(distribution, CategoricalDistribution):
        numbers = [float(choice) for choice in distribution.choices if choice is not None]
        return min(numbers), max(numbers)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return distribution.low, distribution.high


def _middle(distribution: BaseDistribution) -> float:
    return sum(map(math.log, _ends(distribution))) / 2


def sequences_per_epoch(observations: Sequence[Observation]) -> float:
    """How many sequences an epoch has, as the trials' numbers of steps tell; 1 before any has told: then only ratios
    between configurations are known."""
    known = [(trial.total_steps, trial_params(trial.params)) for trial in observations if trial.total_steps]
    told = [steps * params.global_batch_size / params.epochs for steps, params in known]
    return float(np.median(told)) if told else 1.0


def _thinned(curve: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most `count` points, evenly, the last among them."""
    if len(curve) <= count:
        return list(curve)
    places = np.linspace(len(curve) - 1, 0, count, endpoint=False).round().astype(int)
    return [curve[place] for place in sorted(set(places.tolist()))]
