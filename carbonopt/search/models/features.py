"""Configurations as rows of numbers: one form for what decides the quality, one for what decides the cost of a step.
Micro batch, ZeRO stage and the like leave the quality alone: each model learns from all that share its settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic import ValidationError

from carbonopt.core.arrays import Array
from carbonopt.core.dimensions import (
    DEFAULT_DECAY_RATIO,
    DEFAULT_LR_SCHEDULER,
    DIMENSIONS,
    Affects,
    ToldAffects,
    TrainingParams,
    affecting,
    rate_decays,
)
from carbonopt.core.errors import shortened
from carbonopt.core.values import Scalar
from carbonopt.search.models.curves import CORE, Points
from carbonopt.search.observation import NEEDED, Observation, Values, trial_params

Configurations = Sequence[Values]

# What is expected before anything is measured: cost and memory go with the batch to this power, since a small one
# leaves a GPU idle; and ln of how many times as much a step costs with a setting. Trials and probes tell better.
_BATCH_POWER = 0.7
_PASSES_POWER = 0.2  # of the number of micro batches
_EXPECTED_COSTS: dict[str, dict[Any, float]] = {
    "zero_stage": {1: 0.1, 2: 0.12, 3: 0.3},  # on one GPU; stage 0 has whole steps (reports/performance.md)
    "offload": {"optimizer": 0.7, "parameters": 1.0},
    "gradient_checkpointing": {True: math.log(4 / 3)},  # one forward pass more (arXiv 1604.06174)
    "torch_compile": {True: -0.4},  # 0.60 to 0.67 of the energy (reports/performance.md)
}
ADVISED = ("global_batch_size", "learning_rate")  # of what the best may be known to be near some value
_CURVE_CORE = ("global_batch_size", "learning_rate", "learning_rate_scaling", "epochs", "lr_scheduler")  # first columns
_LARGEST = 1e30  # logarithms and differences of larger numbers, or of smaller than 1 ÷ it, are not worth comparing
POINTS = 240  # evaluations that a model is fitted to at most: its time goes with their third power
# What a training's steps follow where carbonopt trains: epochs × sequences ÷ batch.
STEPS_FOLLOW: tuple[str, ...] = ("epochs", "global_batch_size")
_LAWS: tuple[tuple[str, ...], ...] = (STEPS_FOLLOW, ("epochs",), ("global_batch_size",), ())
_PLAINLY, _HOLDS = 1.3, 1.02  # largest ÷ smallest; whole global batches make the usual law differ by little
_PARTS = 512  # of a run, at whose ends its schedule is known


@dataclass(frozen=True)
class Encoder:
    """Of a space with these free dimensions; dimensions that carbonopt does not know count for both forms."""

    distributions: Mapping[str, BaseDistribution]
    sequences: float = 1.0  # in an epoch, see `steps_law`
    follows: tuple[str, ...] = STEPS_FOLLOW
    affects: Mapping[str, ToldAffects] = field(default_factory=dict)  # see `affecting`
    earlier: int = 0  # studies that are learned from beside this one
    study: int | None = None  # of those, the one whose trials these are; None: this one's
    advised: Mapping[str, float] = field(default_factory=dict)  # see `Knowledge`

    def curve_rows(self, configurations: Configurations) -> Array:
        """Rows of the configurations' ends, (n, CORE + others)."""
        return np.array([self._curve_row(values, 1.0) for values in configurations])

    def points(self, observations: Sequence[Observation], most: int = POINTS) -> Points:
        """Evaluations of the trials, the last of each trial first when there are more than `most`."""
        per_trial = max(1, most // max(1, len(observations)))
        thinned = [(trial, *point) for trial in observations for point in _thinned(trial.curve, per_trial)]
        rows = np.array([self._curve_row(trial.params, share) for trial, share, _ in thinned])
        losses, numbers = np.array([loss for *_, loss in thinned]), np.array([trial.number for trial, *_ in thinned])
        width = CORE + len(self._others({}, "quality", *_CURVE_CORE)) + self.earlier
        shares = np.array([share for _, share, _ in thinned])
        return Points(rows.reshape(-1, width), losses, numbers, shares)

    def system_rows(self, configurations: Configurations) -> Array:
        """What a step costs by, (n, columns): what is expected of its logarithm, ln(global batch), the others."""
        return self._rows(configurations, "cost", "global_batch_size", _expected_cost)

    def memory_rows(self, configurations: Configurations) -> Array:
        """What the memory goes by, (n, columns): what is expected of its logarithm, ln(micro batch), the others."""
        return self._rows(configurations, "memory", "micro_batch_size_per_gpu", lambda values: 0.0)

    def _rows(
        self, configurations: Configurations, what: Affects, batch: str, more: Callable[[Values], float]
    ) -> Array:
        sizes = [values.get(batch, values.get("global_batch_size", 1)) for values in configurations]
        pairs = [(math.log(size), values) for size, values in zip(sizes, configurations, strict=True)]
        return np.array(
            [[_BATCH_POWER * log + more(values), log, *self._others(values, what, batch)] for log, values in pairs]
        )

    def centre(self) -> tuple[float, float]:
        """Where the best is expected in ln(batch) and ln(learning rate): what is advised, or the middle of the space.
        Of what is fixed, nothing is off the middle."""
        batch, rate = map(self._centre_of, ADVISED)
        return batch, rate

    def _centre_of(self, name: str) -> float:
        distribution = self.distributions.get(name)
        if distribution is None:
            return 0.0
        return math.log(self.advice[name]) if name in self.advice else sum(map(math.log, _ends(distribution))) / 2

    @cached_property
    def advice(self) -> dict[str, float]:
        """What is advised and in the space: who leaves it out has found that it isn't for this training."""
        ends = {name: _ends(self.distributions[name]) for name in self.advised if name in self.distributions}
        return {name: self.advised[name] for name, (low, high) in ends.items() if low <= self.advised[name] <= high}

    def _curve_row(self, values: Values, share: float) -> list[float]:
        params, steps = trial_params(values), self.steps(values)
        area, rate_share = progress(params, share)
        rate = params.trained_learning_rate or params.learning_rate
        core = [math.log(params.global_batch_size), math.log(rate), math.log(steps * area), rate_share]
        return [*core, *self._others(values, "quality", *_CURVE_CORE), *self._of_study]

    @cached_property
    def _of_study(self) -> list[float]:
        """Last columns of a row of a curve: one for each earlier study."""
        return [float(study == self.study) for study in range(self.earlier)]

    def steps(self, values: Values) -> float:
        """Of a configuration's whole training."""
        return self.sequences * _steps_by(values, self.follows)

    def _others(self, values: Values, what: Affects, *without: str) -> list[float]:
        """All dimensions that affect this, but for these."""
        columns = [(name, column) for name, column in self._affecting[what] if name not in without]
        return [number for name, column in columns for number in column(values.get(name))]

    @cached_property
    def _affecting(self) -> dict[Affects, list[tuple[str, Callable[[Any], list[float]]]]]:
        """Of what is modelled, the dimensions that affect it, each with what makes its columns."""
        modelled: tuple[Affects, ...] = ("quality", "cost", "memory")
        return {
            what: [(name, self._columns[name]) for name in affecting(what, self.distributions, self.affects)]
            for what in modelled
        }

    @cached_property
    def _columns(self) -> dict[str, Callable[[Any], list[float]]]:
        return {name: _columns(name, distribution) for name, distribution in self.distributions.items()}


def _columns(name: str, distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    """What makes a value of this dimension one number, or, for a choice among words, one for each but the first. None
    is the lowest number."""
    if isinstance(distribution, CategoricalDistribution):
        choices = distribution.choices
        if not _is_numeric(distribution) or name == "zero_stage":
            return lambda value: [float(value == choice) for choice in choices[1:]]
    low, high = _ends(distribution)
    if name in DIMENSIONS and (feature := DIMENSIONS[name].feature) is not None:
        return lambda value: [feature(low if value is None else value)]
    scale: Callable[[float], float] = float
    if isinstance(distribution, IntDistribution | FloatDistribution) and distribution.log:
        scale = math.log
    first, width = scale(low), scale(high) - scale(low)
    return lambda value: [4 * (scale(low if value is None else value) - first) / width if width > 0 else 0.0]


def comparable(values: Values, distributions: Mapping[str, BaseDistribution]) -> bool:
    """Whether a configuration of another space has a place in this one: values that its dimensions can have, numbers
    where it has numbers, above 0 where they are compared by their logarithms."""
    for name, value in values.items():
        if not (_can_be(name, value) if value is not None else NEEDED.get(name) is None):
            return False
    for name, distribution in distributions.items():
        value = values.get(name)
        by_words = isinstance(distribution, CategoricalDistribution) and not _is_numeric(distribution)
        if value is None or by_words or name == "zero_stage":
            continue
        by_logarithm = isinstance(distribution, IntDistribution | FloatDistribution) and distribution.log
        if isinstance(value, str | bool) or (by_logarithm and value <= 0):
            return False
    return True


def _is_numeric(distribution: CategoricalDistribution) -> bool:
    return all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in distribution.choices)


def check_values(values: Values) -> None:
    """Raises ValueError for one that a dimension of its name can't have."""
    for name, value in values.items():
        if not isinstance(value, Scalar | None) or not _can_be(name, value):
            raise ValueError(f"{name} can't be {shortened(value)}, but complete has given it.")


def check_dimensions(distributions: Mapping[str, BaseDistribution]) -> None:
    """Raises ValueError for a value that a dimension of that name can't have, or numbers too large to compare."""
    for name, distribution in distributions.items():
        if not isinstance(distribution, CategoricalDistribution | IntDistribution | FloatDistribution):
            raise ValueError(f"{name} must be one of Optuna's distributions, but is {shortened(distribution)}.")
        values = list(
            distribution.choices if isinstance(distribution, CategoricalDistribution) else _ends(distribution)
        )
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            low, high = _ends(distribution)
            values.append(low + (high - low) / math.pi)  # no whole number, which some dimensions need
        for value in values:
            if not _can_be(name, value):
                raise ValueError(f"{name} can't be {shortened(value)}: leave it out of the search space.")


@lru_cache(maxsize=4096, typed=True)
def _can_be(name: str, value: Any) -> bool:
    if isinstance(value, int | float) and value != 0 and not 1 / _LARGEST <= abs(value) <= _LARGEST:
        return False
    if name == "lr_scheduler":
        return isinstance(value, str)
    dimension = DIMENSIONS.get(name)
    # The models look into those that are needed; others are words or numbers to them, whatever carbonopt makes of them.
    if dimension is None or (dimension.choices and name not in NEEDED):
        return True
    if isinstance(value, str) and not dimension.choices:
        return False
    try:
        TrainingParams.model_validate({**NEEDED, "micro_batch_size_per_gpu": 1, name: value})
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


def _expected_cost(values: Values) -> float:
    """Of a step's logarithm, what settings that leave the quality alone add."""
    batch = values.get("global_batch_size", 1)
    passes = max(1.0, batch / values.get("micro_batch_size_per_gpu", batch))
    known = (effects.get(values.get(name), 0.0) for name, effects in _EXPECTED_COSTS.items())
    return _PASSES_POWER * math.log(passes) + sum(known)


def _steps_by(values: Values, follows: tuple[str, ...]) -> float:
    epochs = values.get("epochs", 1) if "epochs" in follows else 1
    batch = values.get("global_batch_size", 1) if "global_batch_size" in follows else 1
    return float(epochs / batch)


def steps_law(observations: Sequence[Observation]) -> tuple[float, tuple[str, ...]]:
    """What the trials' numbers of steps are, divided by what they follow: sequences in an epoch. 1 before any has told:
    then only ratios between configurations are known. A script may make as many steps whatever its batch, or count no
    epochs: what its steps follow then is the law that holds where the usual one plainly doesn't."""
    known = [(trial.total_steps, trial.params) for trial in observations if trial.total_steps]
    if not known:
        return 1.0, STEPS_FOLLOW
    by_law = {law: [steps / _steps_by(values, law) for steps, values in known] for law in _LAWS}
    spreads = {law: max(ratios) / min(ratios) for law, ratios in by_law.items()}
    best = min(_LAWS, key=lambda law: spreads[law])
    law = best if spreads[STEPS_FOLLOW] > _PLAINLY and spreads[best] < _HOLDS else STEPS_FOLLOW
    return float(np.median(by_law[law])), law


def _thinned(curve: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most `count` points, evenly, the last among them."""
    if len(curve) <= count:
        return list(curve)
    places = np.linspace(len(curve) - 1, 0, count, endpoint=False).round().astype(int)
    return [curve[place] for place in sorted(set(places.tolist()))]


def progress(params: TrainingParams, fraction: float) -> tuple[float, float]:
    """Where a trial is after a share of its steps, whatever its schedule (arXiv 2408.11029; S1 is the rate's area): of
    two whose rate decays the shorter one has, at the same step, the lower rate, and a lower loss for it.

    Returns:
        Steps at the peak rate that amount to the same, as a share of all steps; the rate now, as a share of the peak.
    """
    # A warm-up of whole parts: continuous ones would need as many schedules as there are configurations. It is one part
    # at least, since inverse_sqrt doesn't fall without one.
    warmup = max(round(params.warmup_ratio * _PARTS), 1) / _PARTS if params.warmup_ratio else 0.0
    scheduler = params.lr_scheduler or DEFAULT_LR_SCHEDULER
    areas, shares = _curves(scheduler, warmup, params.decay_ratio or DEFAULT_DECAY_RATIO)
    place = min(max(fraction, 0.0), 1.0) * _PARTS
    before = min(int(place), _PARTS - 1)
    rest = place - before

    def between(values: np.ndarray) -> float:  # numpy.interp takes ten times as long for one place
        return float(values[before] + rest * (values[before + 1] - values[before]))

    return between(areas), between(shares)


@lru_cache(maxsize=2048)
def _curves(scheduler: str, warmup: float, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Area and height of the rate after each of _PARTS parts, as transformers.SchedulerType has them."""
    done = np.linspace(0.0, 1.0, _PARTS + 1)
    rest = np.clip((done - warmup) / max(1e-9, 1.0 - warmup), 0.0, 1.0)  # of the part after the warm-up
    match scheduler:
        case name if not rate_decays(name, warmup):
            share = np.ones_like(done)
        case "cosine":
            share = (1 + np.cos(np.pi * rest)) / 2
        case "cosine_with_min_lr":  # its floor stands in the training arguments; a tenth is what most take
            share = 0.1 + 0.9 * (1 + np.cos(np.pi * rest)) / 2
        case "inverse_sqrt":
            share = np.sqrt(warmup / np.maximum(done, warmup))
        case "warmup_stable_decay":
            share = 1 - np.sqrt(np.clip((done - (1 - decay)) / decay, 0.0, 1.0))
        case _:  # linear, and polynomial of power 1
            share = 1.0 - rest
    if warmup > 0 and scheduler != "constant":
        share = np.where(done < warmup, done / warmup, share)
    heights = (share[1:] + share[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(heights) / _PARTS]), share
