"""The samplers of a study beside carbonopt's own: Optuna's, the grid's, and one of given values."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from carbonopt.search.candidates import (
    Candidates,
    Distributions,
    Key,
    Values,
    key_of,
    movable,
    typed,
)
from carbonopt.space.search_space import SearchSpace, is_integer
from carbonopt.spec.space_settings import Choices

Trials = Sequence[FrozenTrial]
FIXED = "fixed_params"  # Optuna's system attribute of a trial whose values were chosen beforehand
# How often the inner sampler is asked before a random valid configuration is taken. A sampler that
# has settled on a region where nothing new can exist could otherwise loop for ever, and a Gaussian
# process is fitted anew each time.
ATTEMPTS, RANDOM_ATTEMPTS = 8, 50
INNER: dict[str, Callable[..., BaseSampler]] = {
    "tpe": partial(TPESampler, multivariate=True),
    "nsga2": partial(NSGAIISampler, population_size=10),
    "gp": partial(GPSampler, n_startup_trials=10),
    "random": RandomSampler,
}


def distributions(space: SearchSpace) -> Distributions:
    """Return the free dimensions as Optuna distributions."""
    by_name: Distributions = {}
    for name, domain in space.dimensions.free().items():
        if isinstance(domain, Choices):
            by_name[name] = CategoricalDistribution(domain.choices)
        elif is_integer(name, domain):
            by_name[name] = IntDistribution(
                int(domain.low), int(domain.last), domain.log, int(domain.step or 1)
            )
        else:
            by_name[name] = FloatDistribution(domain.low, domain.last, domain.log, domain.step)
    return by_name


def all_run(trials: Trials, space: SearchSpace) -> bool:
    """Return whether every configuration of a finite space has been run or is running."""
    names = list(space.dimensions.free())
    run = {key_of(trial.params, names) for trial in trials if trial.params or not names}
    return space.combinations is not None and all(
        key_of(values, names) in run for values in space.combinations
    )


def next_of_grid(
    trials: Trials, space: SearchSpace, seed: int, trial_number: int
) -> dict[str, Any]:
    """Return the next combination of the grid that has not been run.

    The grid has every combination that can exist once, in an order drawn from the seed, since a GPU
    drifts as it warms up. The result is empty only when an interrupted trial resumes, which keeps
    its values.
    """
    run = [trial.params for trial in trials if trial.number != trial_number]
    combinations = space.combinations or []
    order = np.random.default_rng(seed).permutation(len(combinations)).tolist()
    return next(
        (dict(combinations[index]) for index in order if combinations[index] not in run), {}
    )


class GivenValuesSampler(BaseSampler):
    """A sampler that proposes the values that it is given.

    Optuna itself adds the values of dimensions that have a single one. It stores a trial's values
    one by one. So that a worker who takes the trial over in between goes on with the same values,
    all are first stored together, as those of a queued trial are.
    """

    def __init__(self, values: Values, distributions: Distributions) -> None:
        self._values, self._distributions = values, distributions

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        values = self._proposed(study, trial, search_space)
        if values and FIXED not in trial.system_attrs:
            study._storage.set_trial_system_attr(trial._trial_id, FIXED, values)
        return values

    def _proposed(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        return self._values

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, _: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} was not given")


class ValidSampler(GivenValuesSampler):
    """A sampler that asks one of Optuna's samplers until its proposal can exist and is new.

    Optuna's samplers know no constraint that joins dimensions, and TPE proposes failed and known
    configurations again. Training here is deterministic, so that a repeat would cost its energy for
    nothing. The sampler is seeded by the study's seed and the trial's number, so that an
    interrupted study proposes what the uninterrupted one would have.
    """

    def __init__(
        self, name: str, space: SearchSpace, seed: int, trial_number: int, trials: Trials
    ) -> None:
        super().__init__({}, distributions(space))
        self._space, self._trials, self._seed = (
            space,
            trials,
            int(np.random.default_rng([seed, trial_number]).integers(2**31)),
        )
        self._inner = INNER[name](seed=self._seed)

    def _proposed(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        names = list(search_space)
        known = {
            key_of(other.params, names) for other in self._trials if other.number != trial.number
        }
        # Single-valued distributions hold nothing to learn from, and some samplers refuse them.
        searched = movable(search_space)
        for sampler in [self._inner] * ATTEMPTS + [
            RandomSampler(seed=self._seed)
        ] * RANDOM_ATTEMPTS:
            values = sampler.sample_relative(study, trial, searched)
            for name, distribution in search_space.items():
                if name not in values:
                    values[name] = sampler.sample_independent(study, trial, name, distribution)
            values = {name: typed(search_space[name], value) for name, value in values.items()}
            values = self._space.canonical(values)
            if self._space.rule_broken(values) is None and key_of(values, names) not in known:
                return values
        rng = np.random.default_rng(self._seed)
        left = self._left(known, search_space, rng)
        # Nothing new is left only if an interrupted trial is asked for again: its values are set.
        return left[int(rng.integers(len(left)))] if left else {}

    def _left(
        self, known: set[Key], search_space: Distributions, rng: np.random.Generator
    ) -> list[dict[str, Any]]:
        """Return new configurations that can exist: all, or some of an infinite space."""
        combinations = self._space.combinations
        if combinations is not None:
            names = list(search_space)
            return [values for values in combinations if key_of(values, names) not in known]
        candidates = Candidates(
            search_space,
            lambda values: self._space.rule_broken(values) is None,
            canonical=self._space.canonical,
        )
        return candidates.untried(known, (), rng)
