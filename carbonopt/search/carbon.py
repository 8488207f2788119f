"""The sampler that counts what its proposals cost.

It serves carbonopt's studies, and anybody's Optuna study of two objectives, cost and perplexity, both minimized, whose
parameters have carbonopt's names (`global_batch_size`, `learning_rate`, `epochs`, ...); see `observation` for the user
attributes that let it learn from unfinished trials, too.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study
from optuna.trial import FrozenTrial

from carbonopt.search.observation import Observation, observe
from carbonopt.search.proposal import Knowledge, Proposal, first, propose

ENUMERATED = 4096  # configurations; larger spaces are drawn from
DRAWN = 1024
NEAR = 0.15  # of a dimension's range: how far a neighbour of a good configuration may be
SHORT_FIT_FROM = 30  # trials; from here on the models' parameters hardly change

Values = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The next trial's values, what is expected of it, and what that is concluded from."""

    values: Values | None  # None: nothing is left that could be the answer
    proposal: Proposal | None  # None for the first trial, of which nothing can be expected
    knowledge: Knowledge


class CarbonSampler(BaseSampler):
    """Proposes the configuration that is most likely to be the cheapest one meeting the target, for its energy.

    Args:
        target_perplexity: what a trial has to reach.
        goal: "recommend": the cheapest configuration that meets the target. "front": the whole trade-off; each trial
            then searches for the cheapest one meeting another, random target.
        valid: whether a combination of values can exist; None: all can.
        complete: adds what is fixed to the values of the dimensions that move.
        memory_gib: of a device, to stay away from configurations that don't fit.
        seed: of the draws; with the trials' numbers it decides every proposal.
    """

    def __init__(
        self,
        target_perplexity: float,
        *,
        goal: Literal["recommend", "front"] = "recommend",
        valid: Callable[[Values], bool] | None = None,
        complete: Callable[[Values], Mapping[str, Any]] = dict,
        memory_gib: float | None = None,
        seed: int = 0,
    ) -> None:
        self._target_nll = math.log(target_perplexity)
        self._goal = goal
        self._valid = valid or (lambda values: True)
        self._complete = complete
        self._memory_gib = memory_gib
        self._seed = seed
        self._random = RandomSampler(seed=seed)
        self._search_space = IntersectionSearchSpace(include_pruned=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: one for name, one in self._search_space.calculate(study).items() if not one.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        return (search_space and self.plan(trials, search_space, trial.number).values) or {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def knowledge(self, trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution]) -> Knowledge:
        """What these trials have taught."""
        observations = [found for one in trials if (found := observe(one)) is not None]
        effort = 40 if len(observations) < SHORT_FIT_FROM else 12
        return Knowledge(distributions, observations, self._memory_gib, effort)

    def plan(self, trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution], number: int) -> Plan:
        """The next trial, after these.

        Args:
            number: that the trial will have; it decides the draws.
        """
        rng = np.random.default_rng([self._seed, number])
        knowledge = self.knowledge(trials, distributions)
        names = list(distributions)
        known = {tuple(one.params.get(name) for name in names) for one in trials}
        best = sorted((one.cost, one.number) for one in knowledge.observations if self._meets(one))
        centres = [dict(one.params) for one in trials if one.number in {number for _, number in best[:3]}]
        candidates = [
            values
            for values in self._candidates(distributions, centres, rng)
            if tuple(values[name] for name in names) not in known and self._valid(values)
        ]
        if not candidates:
            return Plan(None, None, knowledge)
        completed = [{**values, **self._complete(values)} for values in candidates]
        if not any(one.curve for one in knowledge.observations):
            fitting = knowledge.chance_to_fit(completed)
            likely = np.flatnonzero(fitting >= min(0.8, float(fitting.max())))
            index = likely[first([completed[index] for index in likely], rng)]
            return Plan(candidates[index], None, knowledge)
        target_nll, best_cost = self._question(knowledge, completed, rng)
        proposal = propose(completed, knowledge, target_nll, best_cost, rng)
        if proposal is None and self._goal == "front":  # nothing new for that target; any point may be on the front
            return Plan(candidates[int(rng.integers(len(candidates)))], None, knowledge)
        return Plan(None if proposal is None else candidates[proposal.index], proposal, knowledge)

    def _meets(self, one: Observation) -> bool:
        return one.final_nll is not None and one.cost is not None and one.final_nll <= self._target_nll

    def _question(
        self, knowledge: Knowledge, completed: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> tuple[float, float]:
        """The target (NLL in nats) that the next trial is for, and what the cheapest trial that meets it costs."""
        target_nll = self._target_nll
        if self._goal == "front":
            rows = knowledge.encoder.curve_rows(completed, knowledge.sequences)
            expected = np.exp(knowledge.curves.predict(rows)[0])
            target_nll = float(rng.uniform(expected.min(), np.quantile(expected, 0.75)))
        costs = [
            one.cost
            for one in knowledge.observations
            if one.cost is not None and one.final_nll is not None and one.final_nll <= target_nll
        ]
        return target_nll, min(costs, default=math.inf)

    def _candidates(
        self, distributions: Mapping[str, BaseDistribution], centres: Sequence[Values], rng: np.random.Generator
    ) -> list[Values]:
        """All combinations where they are few, else random ones and neighbours of the best."""
        lists = {name: _values(distribution) for name, distribution in distributions.items()}
        if all(lists.values()) and math.prod(len(values or ()) for values in lists.values()) <= ENUMERATED:
            return [dict(zip(lists, one, strict=True)) for one in itertools.product(*lists.values())]  # type: ignore[arg-type]
        drawn = [{name: _draw(one, rng) for name, one in distributions.items()} for _ in range(DRAWN)]
        for centre in centres:
            for _ in range(DRAWN // 8):
                name = list(distributions)[int(rng.integers(len(distributions)))]
                drawn.append({**centre, name: _near(distributions[name], centre[name], rng)})
        return drawn


def _values(distribution: BaseDistribution) -> list[Any] | None:
    """Those of a dimension that has countably many, few enough."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    if distribution.step is None or (distribution.high - distribution.low) / distribution.step > ENUMERATED:
        return None
    count = int((distribution.high - distribution.low) / distribution.step + 1e-9) + 1
    return [type(distribution.low)(distribution.low + index * distribution.step) for index in range(count)]


def _draw(distribution: BaseDistribution, rng: np.random.Generator) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(rng.integers(len(distribution.choices)))]
    return _at(distribution, float(rng.random()))


def _near(distribution: BaseDistribution, value: Any, rng: np.random.Generator) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return _draw(distribution, rng)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high, here = distribution.low, distribution.high, value
    if distribution.log:
        low, high, here = math.log(low), math.log(high), math.log(here)
    share = (here - low) / (high - low) if high > low else 0.0
    return _at(distribution, float(np.clip(share + NEAR * rng.standard_normal(), 0.0, 1.0)))


def _at(distribution: BaseDistribution, share: float) -> Any:
    """The value at a share of the range, on the scale that it is searched on."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high = distribution.low, distribution.high
    value = math.exp(math.log(low) + share * math.log(high / low)) if distribution.log else low + share * (high - low)
    if distribution.step is not None:
        value = low + round((value - low) / distribution.step) * distribution.step
    return type(low)(min(high, max(low, round(value) if isinstance(distribution, IntDistribution) else value)))
