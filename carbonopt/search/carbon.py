"""The sampler that counts what its proposals cost.

It serves carbonopt's studies, and anybody's Optuna study of two objectives, cost and perplexity, both minimized, whose
parameters have carbonopt's names (`global_batch_size`, `learning_rate`, `epochs`, ...); see `observation` for the user
attributes that let it learn from unfinished trials, too.
"""

import itertools
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from carbonopt.search.curves import one_blas_thread
from carbonopt.search.observation import Observation, observe
from carbonopt.search.proposal import Knowledge, Proposal, first, propose

ENUMERATED = 4096  # configurations; larger spaces are drawn from
DRAWN = 1024
NEAR = 0.15  # of a dimension's range: how far a neighbour of a good configuration may be
SHORT_FIT_FROM = 30  # trials; from here on the models' parameters hardly change

# System attribute of a trial: the values that its worker is about to give it. Several workers see by it what the
# others have in mind; Optuna itself stores a value only when the trial asks for it.
CLAIM = "carbonopt:claim"
WITHDRAW_S = 2.0  # how long a worker waits for another one to withdraw the same claim

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
        search_space: the dimensions. None: they are those of the trials that have ended; until one has, values are
            random, and workers that begin at once may take the same.
        seed: of the draws; with the trials' numbers it decides every proposal.

    Several workers, threads or processes, can work on one study: no two run the same configuration while others are
    left.
    """

    def __init__(
        self,
        target_perplexity: float,
        *,
        goal: Literal["recommend", "front"] = "recommend",
        valid: Callable[[Values], bool] | None = None,
        complete: Callable[[Values], Mapping[str, Any]] = dict,
        memory_gib: float | None = None,
        search_space: Mapping[str, BaseDistribution] | None = None,
        seed: int = 0,
    ) -> None:
        self._target_nll = math.log(target_perplexity)
        self._goal = goal
        self._valid = valid or (lambda values: True)
        self._complete = complete
        self._memory_gib = memory_gib
        self._seed = seed
        self._given_space = search_space
        self._search_space = IntersectionSearchSpace(include_pruned=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if study.directions != [StudyDirection.MINIMIZE] * 2:
            found = ", ".join(direction.name.lower() for direction in study.directions)
            raise ValueError(
                "the study must have two objectives, cost and perplexity, both to minimize, but has "
                f"{found}; create it with directions=['minimize', 'minimize']."
            )
        space = self._search_space.calculate(study) if self._given_space is None else self._given_space
        return {name: one for name, one in space.items() if not one.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if search_space.keys() <= trial.system_attrs.get("fixed_params", {}).keys():
            return {}  # in the queue with all its values
        while True:
            trials = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            values = self.plan(trials, search_space, trial.number).values
            if values is None:  # nothing can be the answer any more, but the study goes on
                rng = np.random.default_rng([self._seed, trial.number])
                values = next(iter(self._untried(trials, search_space, [], rng)), None)
            if values is None:
                return {}
            if _claim(study, trial, values):
                return values

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        rng = np.random.default_rng([self._seed, trial.number, zlib.crc32(param_name.encode())])
        return _draw(param_distribution, rng)

    def knowledge(self, trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution]) -> Knowledge:
        """What these trials have taught."""
        observations = [found for one in trials if (found := observe(one)) is not None]
        effort = 40 if len(observations) < SHORT_FIT_FROM else 12
        return Knowledge(distributions, observations, self._memory_gib, effort)

    @one_blas_thread
    def plan(self, trials: Sequence[FrozenTrial], distributions: Mapping[str, BaseDistribution], number: int) -> Plan:
        """The next trial, after these.

        Args:
            number: that the trial will have; it decides the draws.
        """
        rng = np.random.default_rng([self._seed, number])
        knowledge = self.knowledge(trials, distributions)
        meeting = sorted((one.cost, one.number) for one in _meeting(knowledge.observations, self._target_nll))
        best = [one for one in trials if one.number in {number for _, number in meeting[:3]}]
        centres = [
            {name: one.params[name] for name in distributions}
            for one in best
            if distributions.keys() <= one.params.keys()
        ]
        candidates = self._untried(trials, distributions, centres, rng)
        if not candidates:
            return Plan(None, None, knowledge)
        completed = [{**values, **self._complete(values)} for values in candidates]
        if not any(one.curve for one in knowledge.observations):
            likely = np.flatnonzero(knowledge.likely_to_fit(completed))
            index = likely[first([completed[index] for index in likely], rng)]
            return Plan(candidates[index], None, knowledge)
        target_nll, best_cost = self._question(knowledge, completed, rng)
        proposal = propose(completed, knowledge, target_nll, best_cost, rng)
        if proposal is None and self._goal == "front":  # nothing new for that target; any point may be on the front
            return Plan(candidates[int(rng.integers(len(candidates)))], None, knowledge)
        return Plan(None if proposal is None else candidates[proposal.index], proposal, knowledge)

    def _question(
        self, knowledge: Knowledge, completed: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> tuple[float, float]:
        """The target (NLL in nats) that the next trial is for, and what the cheapest trial that meets it costs."""
        target_nll = self._target_nll
        if self._goal == "front":
            rows = knowledge.encoder.curve_rows(completed, knowledge.sequences)
            expected = np.exp(knowledge.curves.predict(rows)[0])
            target_nll = float(rng.uniform(expected.min(), np.quantile(expected, 0.75)))
        costs = (one.cost for one in _meeting(knowledge.observations, target_nll))
        return target_nll, min((cost for cost in costs if cost is not None), default=math.inf)

    def _untried(
        self,
        trials: Sequence[FrozenTrial],
        distributions: Mapping[str, BaseDistribution],
        centres: Sequence[Values],
        rng: np.random.Generator,
    ) -> list[Values]:
        """Configurations that can exist and that no trial has, or is about to have."""
        known = {tuple(_values_of(one).get(name) for name in distributions) for one in trials}
        candidates = self._candidates(distributions, centres, rng)
        return [values for values in candidates if tuple(values.values()) not in known and self._valid(values)]

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


def _meeting(observations: Sequence[Observation], target_nll: float) -> list[Observation]:
    """The complete trials of known cost that reached a target."""
    return [
        one
        for one in observations
        if one.cost is not None and one.final_nll is not None and one.final_nll <= target_nll
    ]


def _values_of(trial: FrozenTrial) -> Values:
    """Those that a trial has; of one that has not ended, those that it is going to have, too."""
    if trial.state.is_finished():
        return trial.params
    return {**trial.system_attrs.get(CLAIM, {}), **trial.system_attrs.get("fixed_params", {}), **trial.params}


def _claim(study: Study, trial: FrozenTrial, values: Values) -> bool:
    """Whether a trial may have these values, since no other one that runs has claimed them.

    Of two workers that claim the same, the one that writes last sees the other's claim. The higher number withdraws at
    once; the lower one waits for that, and withdraws itself where the higher one had been first.
    """

    def claim(values: Values) -> None:
        study._storage.set_trial_system_attr(trial._trial_id, CLAIM, values)

    claim(values)
    deadline = time.monotonic() + WITHDRAW_S
    while True:
        trials = study.get_trials(deepcopy=False)
        rivals = [one.number for one in trials if one.number != trial.number and _shares(_values_of(one), values)]
        if not rivals:
            return True
        if min(rivals) < trial.number or time.monotonic() > deadline:
            claim({})
            return False
        time.sleep(0.05)


def _shares(one: Values, other: Values) -> bool:
    return all(name in one and one[name] == value for name, value in other.items())


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
