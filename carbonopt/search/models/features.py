"""Encode configurations as rows of numbers, for the models of the quality and of the costs.

There is one form for what decides the quality, one for what decides the cost of a step, and one for
memory. Micro batch, ZeRO stage and the like leave the quality alone: each model learns from all
trials that share the settings that it sees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from pydantic import ValidationError

from carbonopt.core.arrays import Array
from carbonopt.core.dimensions import (
    DEFAULT_DECAY_RATIO,
    DEFAULT_LR_SCHEDULER,
    DIMENSIONS,
    STEPS_FOLLOW,
    Affects,
    StatedAffects,
    TrainingParams,
    affecting,
    rate_decays,
)
from carbonopt.core.errors import shortened
from carbonopt.core.values import Scalar
from carbonopt.search.models.curves import CORE, Points
from carbonopt.search.observation import NEEDED, AnyValues, Observation, trial_params

Configurations = Sequence[AnyValues]

# Expectations before anything is measured: cost and memory grow with the batch to this power, since
# a small batch leaves a GPU idle; and ln of the factor by which a setting changes the cost of a
# step. Trials and probes know better.
_BATCH_POWER = 0.7
_PASSES_POWER = 0.2  # the power of the number of micro batches
_EXPECTED_COSTS: dict[str, dict[Any, float]] = {
    # On one GPU; the reference is stage 0 with whole steps (reports/performance.md).
    "zero_stage": {1: 0.1, 2: 0.12, 3: 0.3},
    "offload": {"optimizer": 0.7, "parameters": 1.0},
    "gradient_checkpointing": {True: math.log(4 / 3)},  # one more forward pass (arXiv 1604.06174)
    "torch_compile": {True: -0.4},  # 0.60 to 0.67 of the energy (reports/performance.md)
}
# Standard deviation of ln(cost) between the ends of a dimension of the user's own, of which nothing
# is expected (a script's `width` of 64 took a twelfth of what 1024 took), and of a choice of
# carbonopt's own of which nothing is expected.
_OWN_EFFECT, _UNEXPECTED_EFFECT = 2.0, 0.5
# Numeric choices whose largest is at least this many times the smallest are compared by their
# logarithms.
_MANIFOLD = 10
_RANGE = 4.0  # width to which the values of a numeric dimension without an own feature are scaled
# Dimensions near whose advised values the best is expected.
ADVISED = ("global_batch_size", "learning_rate")
# Dimensions that the first columns are made of.
_CURVE_CORE = (
    "global_batch_size",
    "learning_rate",
    "learning_rate_scaling",
    "epochs",
    "lr_scheduler",
)
# Numbers above this are refused, and so are numbers other than 0 below 1 ÷ this, both regardless of
# their sign: their logarithms and differences are not worth comparing.
_LARGEST = 1e30
# Largest number of evaluations that a model is fitted to: its time grows with their third power.
POINTS = 240
_LAWS: tuple[tuple[str, ...], ...] = (STEPS_FOLLOW, ("epochs",), ("global_batch_size",), ())
# For each law, the trials' numbers of steps are divided by what the law gives for them. If the
# largest of these ratios ÷ the smallest is above the first value, the law plainly fails; below the
# second, it holds. Even where the usual law holds, the ratios differ a little, since an epoch
# consists of whole global batches.
_PLAINLY, _HOLDS = (1.3, 1.02)
_PARTS = 512  # parts of a run, at whose ends the schedule is computed


@dataclass(frozen=True)
class SpaceEncoder:
    """The encoder of a space with these free dimensions.

    A dimension that carbonopt does not know counts for all forms, unless `affects` says otherwise.
    """

    distributions: Mapping[str, BaseDistribution]
    sequences: float = 1.0  # sequences in an epoch, see `steps_law`
    follows: tuple[str, ...] = STEPS_FOLLOW
    affects: Mapping[str, StatedAffects] = field(default_factory=dict)  # see `affecting`
    earlier: int = 0  # number of prior studies that are learned from beside this one
    study: int | None = None  # the prior study whose trials these are; None: this study
    advised: Mapping[str, float] = field(default_factory=dict)  # see `Knowledge`
    # whether dimensions of carbonopt's own that affect the quality alone count for costs, too
    quality_affects_cost: bool = False

    def curve_rows(self, configurations: Configurations) -> Array:
        """Return the rows of the configurations' ends, (n, CORE + others)."""
        return np.array([self._curve_row(values, 1.0) for values in configurations])

    def points(self, observations: Sequence[Observation], most: int = POINTS) -> Points:
        """Return evaluations of the trials, at most about `most`.

        If there are more, each trial keeps evenly spaced ones, the last among them.
        """
        per_trial = max(1, most // max(1, len(observations)))
        thinned = [
            (trial, *point) for trial in observations for point in _thinned(trial.curve, per_trial)
        ]
        rows = np.array([self._curve_row(trial.params, share) for trial, share, _ in thinned])
        losses, numbers = (
            np.array([loss for *_, loss in thinned]),
            np.array([trial.number for trial, *_ in thinned]),
        )
        width = CORE + len(self._others({}, "quality", *_CURVE_CORE)) + self.earlier
        shares = np.array([share for _, share, _ in thinned])
        return Points(rows.reshape(-1, width), losses, numbers, shares)

    def system_rows(self, configurations: Configurations) -> Array:
        """Return the features that a step's cost depends on, (n, columns).

        The columns are the expected logarithm, ln(global batch), and the other dimensions.
        """
        return self._rows(configurations, "cost", "global_batch_size", expected_cost)

    def memory_rows(self, configurations: Configurations) -> Array:
        """Return the features that the memory depends on, (n, columns).

        The columns are the expected logarithm, ln(micro batch), and the other dimensions.
        """
        return self._rows(configurations, "memory", "micro_batch_size_per_gpu", lambda values: 0.0)

    def _rows(
        self,
        configurations: Configurations,
        what: Affects,
        batch: str,
        more: Callable[[AnyValues], float],
    ) -> Array:
        sizes = [values.get(batch, values.get("global_batch_size", 1)) for values in configurations]
        pairs = [
            (math.log(size), values) for size, values in zip(sizes, configurations, strict=True)
        ]
        return np.array(
            [
                [_BATCH_POWER * log + more(values), log, *self._others(values, what, batch)]
                for log, values in pairs
            ]
        )

    def cost_slopes(self) -> Array:
        """Return the standard deviation of each column's linear effect on ln(cost), (columns,).

        See SettingModel. The columns are those of `system_rows` except for the expected logarithm.
        The batch's effect is part of that expectation.
        """
        slopes = [0.0]
        for name, column in self._affecting["cost"]:
            if name == "global_batch_size":
                continue
            width = len(column(None))
            if name not in DIMENSIONS or "cost" not in DIMENSIONS[name].affects:
                own_slope = (
                    _OWN_EFFECT if _by_words(self.distributions[name]) else _OWN_EFFECT / _RANGE
                )
                slopes += [own_slope] * width
            elif DIMENSIONS[name].choices and name not in _EXPECTED_COSTS:
                slopes += [_UNEXPECTED_EFFECT] * width
            else:
                slopes += [0.0] * width
        return np.array(slopes)

    def centre(self) -> tuple[float, float]:
        """Return where the best is expected in ln(batch) and ln(learning rate).

        It is the advised value or, without one, the middle of the space. For a fixed dimension it
        is 0.
        """
        batch, rate = map(self._centre_of, ADVISED)
        return batch, rate

    def _centre_of(self, name: str) -> float:
        distribution = self.distributions.get(name)
        if distribution is None:
            return 0.0
        return (
            math.log(self.advice[name])
            if name in self.advice
            else sum(map(math.log, _ends(distribution))) / 2
        )

    @cached_property
    def advice(self) -> dict[str, float]:
        """The advised values that are in the space.

        A user who leaves one out of the space has found that it doesn't suit this training.
        """
        ends = {
            name: _ends(self.distributions[name])
            for name in self.advised
            if name in self.distributions
        }
        return {
            name: self.advised[name]
            for name, (low, high) in ends.items()
            if low <= self.advised[name] <= high
        }

    def _curve_row(self, values: AnyValues, share: float) -> list[float]:
        params, steps = trial_params(values), self.steps(values)
        area, rate_share = progress(params, share)
        rate = params.optimizer_learning_rate or params.learning_rate
        core = [
            math.log(params.global_batch_size),
            math.log(rate),
            math.log(steps * area),
            rate_share,
        ]
        return [*core, *self._others(values, "quality", *_CURVE_CORE), *self._of_study]

    @cached_property
    def _of_study(self) -> list[float]:
        """The last columns of a curve's row, one for each prior study."""
        return [float(study == self.study) for study in range(self.earlier)]

    def steps(self, values: AnyValues) -> float:
        """Return the number of steps of a configuration's whole training."""
        return self.sequences * _steps_by(values, self.follows)

    def _others(self, values: AnyValues, what: Affects, *without: str) -> list[float]:
        """Return the columns of all dimensions that affect this, except for some."""
        columns = [(name, column) for name, column in self._affecting[what] if name not in without]
        return [number for name, column in columns for number in column(values.get(name))]

    @cached_property
    def _affecting(self) -> dict[Affects, list[tuple[str, Callable[[Any], list[float]]]]]:
        """The dimensions that affect each modelled quantity, with functions of their columns."""
        modelled: tuple[Affects, ...] = ("quality", "cost", "memory")
        names = {what: affecting(what, self.distributions, self.affects) for what in modelled}
        if self.quality_affects_cost:
            by_steps = (
                name
                for name in names["quality"]
                if name in DIMENSIONS and name not in (*names["cost"], *STEPS_FOLLOW)
            )
            names["cost"] += tuple(by_steps)
        return {what: [(name, self._columns[name]) for name in names[what]] for what in modelled}

    @cached_property
    def _columns(self) -> dict[str, Callable[[Any], list[float]]]:
        return {
            name: _columns(name, distribution) for name, distribution in self.distributions.items()
        }


def _columns(name: str, distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    """Return the function that turns a value of this dimension into numbers.

    It returns one number or, for a choice among words, one for each word but the first. None is
    encoded as the lowest number.
    """
    if isinstance(distribution, CategoricalDistribution):
        choices = distribution.choices
        if _by_words(distribution) or name == "zero_stage":
            return lambda value: [float(value == choice) for choice in choices[1:]]
    low, high = _ends(distribution)
    if name in DIMENSIONS and (feature := DIMENSIONS[name].feature) is not None:
        return lambda value: [feature(low if value is None else value)]
    scale: Callable[[float], float] = float
    if _is_logarithmic(distribution):
        scale = math.log
    first, width = scale(low), scale(high) - scale(low)
    return lambda value: [
        _RANGE * (scale(low if value is None else value) - first) / width if width > 0 else 0.0
    ]


def _is_logarithmic(distribution: BaseDistribution) -> bool:
    """Return whether numbers are compared by their logarithms.

    They are if the range says so, or if the choices span a decade.
    """
    if isinstance(distribution, CategoricalDistribution):
        low, high = _ends(distribution)
        return low > 0 and high >= _MANIFOLD * low
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return distribution.log


def _by_words(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, CategoricalDistribution) and not _is_numeric(distribution)


def comparable(values: AnyValues, distributions: Mapping[str, BaseDistribution]) -> bool:
    """Return whether a configuration of another space has a place in this one.

    It does if its values are ones that its dimensions can have, numbers where this space has
    numbers, and above 0 where numbers are compared by their logarithms.
    """
    for name, value in values.items():
        if not (_can_be(name, value) if value is not None else NEEDED.get(name) is None):
            return False
    for name, distribution in distributions.items():
        value = values.get(name)
        if value is None or _by_words(distribution) or name == "zero_stage":
            continue
        if isinstance(value, str | bool) or (_is_logarithmic(distribution) and value <= 0):
            return False
    return True


def _is_numeric(distribution: CategoricalDistribution) -> bool:
    return all(
        isinstance(choice, int | float) and not isinstance(choice, bool)
        for choice in distribution.choices
    )


def check_values(values: AnyValues) -> None:
    """Raise ValueError for a value that a dimension of its name can't have."""
    for name, value in values.items():
        if not isinstance(value, Scalar | None) or not _can_be(name, value):
            raise ValueError(f"{name} can't be {shortened(value)}, but complete has given it.")


def check_dimensions(distributions: Mapping[str, BaseDistribution]) -> None:
    """Raise ValueError for a value that a dimension can't have, or numbers too large to compare."""
    for name, distribution in distributions.items():
        if not isinstance(
            distribution, CategoricalDistribution | IntDistribution | FloatDistribution
        ):
            raise ValueError(
                f"{name} must be one of Optuna's distributions, but is {shortened(distribution)}."
            )
        values = list(
            distribution.choices
            if isinstance(distribution, CategoricalDistribution)
            else _ends(distribution)
        )
        if len(set(values)) < len(values) and isinstance(distribution, CategoricalDistribution):
            raise ValueError(
                f"{name} must have choices that differ, but has {shortened(values)}, of which some"
                " are equal in Python, as 1, 1.0 and True are: leave all but one of them out."
            )
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            low, high = _ends(distribution)
            # A value that is not whole is checked, too, since some dimensions need whole numbers.
            values.append(low + (high - low) / math.pi)
        for value in values:
            if not _can_be(name, value):
                raise ValueError(
                    f"{name} can't be {shortened(value)}: leave it out of the search space."
                )


@lru_cache(maxsize=4096, typed=True)
def _can_be(name: str, value: Any) -> bool:
    if isinstance(value, int | float) and value != 0 and not 1 / _LARGEST <= abs(value) <= _LARGEST:
        return False
    if name == "lr_scheduler":
        return isinstance(value, str)
    dimension = DIMENSIONS.get(name)
    # The models know the meaning of the dimensions in NEEDED alone. All others are words or numbers
    # to them, whatever they mean elsewhere in carbonopt.
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
    """Return the lowest and the highest of numbers."""
    if isinstance(distribution, CategoricalDistribution):
        numbers = [float(choice) for choice in distribution.choices if choice is not None]
        return min(numbers), max(numbers)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return distribution.low, distribution.high


def expected_cost(values: AnyValues) -> float:
    """Return the expected effect on a step's ln(cost) of settings that leave the quality alone."""
    batch = values.get("global_batch_size", 1)
    passes = max(1.0, batch / values.get("micro_batch_size_per_gpu", batch))
    known = (effects.get(values.get(name), 0.0) for name, effects in _EXPECTED_COSTS.items())
    return _PASSES_POWER * math.log(passes) + sum(known)


def _steps_by(values: AnyValues, follows: tuple[str, ...]) -> float:
    epochs = values.get("epochs", 1) if "epochs" in follows else 1
    batch = values.get("global_batch_size", 1) if "global_batch_size" in follows else 1
    return float(epochs / batch)


def steps_law(observations: Sequence[Observation]) -> tuple[float, tuple[str, ...]]:
    """Return the sequences in an epoch, and the dimensions on which the number of steps depends.

    The number of sequences is the median, over the trials, of the number of steps divided by what
    these dimensions give (epochs ÷ batch, by the usual law). It is 1 while no trial has a number of
    steps: then only ratios between configurations are known. A script may make the same number of
    steps with every batch, or count no epochs. So if the usual law plainly fails and another one
    holds, that one is returned.
    """
    ratios = _ratios_by_law(observations)
    if ratios is None:
        return 1.0, STEPS_FOLLOW
    spreads = {law: max(of_law) / min(of_law) for law, of_law in ratios.items()}
    best = min(_LAWS, key=lambda law: spreads[law])
    law = best if spreads[STEPS_FOLLOW] > _PLAINLY and spreads[best] < _HOLDS else STEPS_FOLLOW
    return float(np.median(ratios[law])), law


def possible_steps_laws(observations: Sequence[Observation]) -> list[tuple[float, tuple[str, ...]]]:
    """Return every law that the trials' numbers of steps follow, in the form of `steps_law`.

    `steps_law` returns the likeliest. While batch and epochs have not changed, all laws are
    possible.
    """
    ratios = _ratios_by_law(observations)
    if ratios is None:
        return [(1.0, STEPS_FOLLOW)]
    holding = [law for law in _LAWS if max(ratios[law]) / min(ratios[law]) < _HOLDS]
    return [(float(np.median(ratios[law])), law) for law in holding]


def _ratios_by_law(
    observations: Sequence[Observation],
) -> dict[tuple[str, ...], list[float]] | None:
    """Return the trials' numbers of steps, divided by what each law has them follow.

    The result is None if no trial has a number of steps.
    """
    known = [(trial.total_steps, trial.params) for trial in observations if trial.total_steps]
    if not known:
        return None
    return {law: [steps / _steps_by(values, law) for steps, values in known] for law in _LAWS}


def _thinned(curve: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Return at most `count` evenly spaced points of a curve, the last among them."""
    if len(curve) <= count:
        return list(curve)
    places = np.linspace(len(curve) - 1, 0, count, endpoint=False).round().astype(int)
    return [curve[place] for place in sorted(set(places.tolist()))]


def progress(params: TrainingParams, fraction: float) -> tuple[float, float]:
    """Return where a trial is after a share of its steps, whatever its schedule.

    The measure is the area under the rate's curve (arXiv 2408.11029, where S1 is that area). Of two
    trials whose rate decays, the shorter one has at the same step the lower rate, and therefore a
    lower loss.

    Returns:
        The steps at the peak rate that amount to the same, as a share of all steps, and the rate
        now, as a share of the peak.
    """
    # A warm-up of whole parts: continuous ones would need as many schedules as there are
    # configurations. It has at least one part, since inverse_sqrt doesn't fall without a warm-up.
    warmup = max(round(params.warmup_ratio * _PARTS), 1) / _PARTS if params.warmup_ratio else 0.0
    scheduler = params.lr_scheduler or DEFAULT_LR_SCHEDULER
    areas, shares = _curves(scheduler, warmup, params.decay_ratio or DEFAULT_DECAY_RATIO)
    place = min(max(fraction, 0.0), 1.0) * _PARTS
    before = min(int(place), _PARTS - 1)
    beyond = place - before

    def between(values: np.ndarray) -> float:  # numpy.interp takes ten times as long for one place
        return float(values[before] + beyond * (values[before + 1] - values[before]))

    return between(areas), between(shares)


@lru_cache(maxsize=2048)
def _curves(scheduler: str, warmup: float, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the area and the height of the rate after each of _PARTS parts.

    The schedules are those of transformers.SchedulerType.
    """
    done = np.linspace(0.0, 1.0, _PARTS + 1)
    # Share of the part after the warm-up.
    after_warmup = np.clip((done - warmup) / max(1e-9, 1.0 - warmup), 0.0, 1.0)
    match scheduler:
        case name if not rate_decays(name, warmup):
            share = np.ones_like(done)
        case "cosine":
            share = (1 + np.cos(np.pi * after_warmup)) / 2
        # Its floor is set in the training arguments; a tenth is what most take.
        case "cosine_with_min_lr":
            share = 0.1 + 0.9 * (1 + np.cos(np.pi * after_warmup)) / 2
        case "inverse_sqrt":
            share = np.sqrt(warmup / np.maximum(done, warmup))
        case "warmup_stable_decay":
            share = 1 - np.sqrt(np.clip((done - (1 - decay)) / decay, 0.0, 1.0))
        case _:  # linear, and polynomial of power 1
            share = 1.0 - after_warmup
    if warmup > 0 and scheduler != "constant":
        share = np.where(done < warmup, done / warmup, share)
    heights = (share[1:] + share[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(heights) / _PARTS]), share
