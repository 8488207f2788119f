"""Proposals: Optuna's samplers, kept to configurations that can exist and were not run before."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from carbonopt.core.config import Choices
from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.space import SearchSpace

# How often the inner sampler is asked before a random valid configuration is taken: one that has settled on a region
# where nothing new can exist would be asked for ever, and a Gaussian process is fitted anew each time.
ATTEMPTS = 8
RANDOM_ATTEMPTS = 50


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """Optuna's form of the free dimensions."""
    found: dict[str, BaseDistribution] = {}
    for name, dimension in space.space.free().items():
        if isinstance(dimension, Choices):
            found[name] = CategoricalDistribution(dimension.choices)
        elif DIMENSIONS[name].integer:
            found[name] = IntDistribution(
                int(dimension.low), int(dimension.high), log=dimension.log, step=int(dimension.step or 1)
            )
        else:
            found[name] = FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
    return found


def exhausted(study: Study, space: SearchSpace) -> bool:
    """Whether every configuration of a finite space has been run or is running."""
    combinations = space.combinations
    if combinations is None:
        return False
    names = list(space.space.free())
    run = {_key(names, trial.params) for trial in study.get_trials(deepcopy=False) if trial.params or not names}
    return all(_key(names, values) in run for values in combinations)


def make_sampler(name: str, space: SearchSpace, seed: int, trial_number: int) -> "ValidSampler":
    """One of Optuna's samplers, for one proposal.

    It is seeded by the study's seed and the trial's number, so that an interrupted study proposes what the
    uninterrupted one would have.
    """
    one_seed = int(np.random.default_rng([seed, trial_number]).integers(2**31))
    inner: BaseSampler
    match name:
        case "tpe":
            inner = TPESampler(seed=one_seed, multivariate=True)
        case "nsga2":
            inner = NSGAIISampler(seed=one_seed, population_size=10)
        case "gp":
            inner = GPSampler(seed=one_seed, n_startup_trials=10)
        case "random":
            inner = RandomSampler(seed=one_seed)
        case "grid":
            inner = _ShuffledGrid(space, seed)
        case _:
            raise ValueError(f"unknown sampler {name}")
    return ValidSampler(inner, space, one_seed)


class ValidSampler(BaseSampler):
    """Asks the inner sampler again until its proposal can exist and is new.

    Optuna's samplers know no constraint between dimensions (a micro batch must divide its global batch), and TPE
    proposes failed and known configurations again. Training here is deterministic, so a repeat would cost its energy
    for nothing.
    """

    def __init__(self, inner: BaseSampler, space: SearchSpace, seed: int) -> None:
        self._inner = inner
        self._space = space
        self._distributions = distributions(space)
        self._fallback = RandomSampler(seed=seed)
        self._rng = np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        names = list(self._distributions)
        others = (one for one in study.get_trials(deepcopy=False) if one.number != trial.number)
        known = {_key(names, one.params) for one in others}
        # Single-valued distributions carry nothing to learn from, and some samplers refuse them.
        movable = {name: dist for name, dist in search_space.items() if not dist.single()}
        for sampler in [self._inner] * ATTEMPTS + [self._fallback] * RANDOM_ATTEMPTS:
            values = sampler.sample_relative(study, trial, movable)
            for name, distribution in search_space.items():
                if name not in values:
                    values[name] = sampler.sample_independent(study, trial, name, distribution)
            if self._space.rule_broken(values) is None and _key(names, values) not in known:
                return values
        combinations = self._space.combinations or []
        left = [values for values in combinations if _key(names, values) not in known]
        # Nothing new is left only for an interrupted trial that is asked for again, with its own values already set.
        return left[int(self._rng.integers(len(left)))] if left else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self._inner.after_trial(study, trial, state, values)


class _ShuffledGrid(BaseSampler):
    """Every combination that can exist, once, in an order drawn from the seed: a GPU drifts as it warms up."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._combinations = space.combinations or []
        self._order = np.random.default_rng(seed).permutation(len(self._combinations)).tolist()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        run = [one.params for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        for index in self._order:
            if self._combinations[index] not in run:
                return dict(self._combinations[index])
        return {}  # only for an interrupted trial that is asked for again, with its own values already set

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError("a grid proposes all dimensions at once")


def _key(names: list[str], values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in names)


optuna.logging.set_verbosity(optuna.logging.WARNING)  # its INFO lines would break the live display
