"""A study's search: who proposes its trials, when a running one can't matter any more, when another one doesn't pay."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import TrialState as OptunaState

from carbonopt.analysis.confirmation import refuted
from carbonopt.core.config import StudyConfig
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import TrialRecord
from carbonopt.core.units import human_energy
from carbonopt.search.optuna_samplers import Planned, ValidSampler, distributions, exhausted, next_of_grid
from carbonopt.search.pruning import Evals, should_prune
from carbonopt.search.sampler import CarbonSampler, NextTrial

PruningRule = Callable[[Evals, int], bool]  # by a trial's evaluations and its number of steps
_AUDIT = 1  # keeps the audits' draws apart from the proposals'


class Strategy:
    """Of one study; `memory_gib` of a device, None where it is not known."""

    def __init__(self, config: StudyConfig, space: SearchSpace, memory_gib: float | None) -> None:
        self._config, self._space = config, space
        self.distributions = distributions(space)
        self._movable = {name: dist for name, dist in self.distributions.items() if not dist.single()}
        self._single = {name: _only_value(dist) for name, dist in self.distributions.items() if dist.single()}
        self._carbon = CarbonSampler(
            config.target.quality.name,
            config.target.value,
            goal=config.search.goal,
            valid=lambda values: space.rule_broken({**self._single, **values}) is None,
            listed=space.combinations,
            complete=lambda values: space.params({**self._single, **values}).model_dump(exclude_none=True),
            confirmed=config.confirm is not None,
            memory_gib=memory_gib,
            seed=config.search.seed,
        )
        self._proposes = config.search.sampler == "carbon" and bool(self._movable)
        self._planned: tuple[int, NextTrial] | None = None

    def why_ended(self, study: Study, number: int) -> str | None:
        """Why no further trial is worth it, in words; None if trial `number` is."""
        if study.get_trials(deepcopy=False, states=(OptunaState.WAITING,)):
            return None  # one was interrupted, or is the study's start: it has been chosen already
        if exhausted(study, self._space):
            return "every configuration of the search space has been run"
        if not self._proposes:
            return None
        plan, budget = self._plan(study, number), self._config.budget
        if plan.values is None and not plan.untried:
            return "no further configuration that can exist was found in the search space"
        if plan.values is None:
            return "no configuration is left that could meet the target with less energy"
        if budget.until is None or plan.proposal is None:
            return None
        cost_kwh, gain_kwh = plan.proposal.expected_cost, plan.proposal.expected_gain * budget.reuses
        if plan.proposal.reachable == 0 and math.isinf(gain_kwh):
            return "converged: no configuration is expected to meet the target"
        if plan.proposal.reachable == 0:
            return "converged: no other configuration is expected to meet the target with less energy"
        if gain_kwh >= cost_kwh:
            return None
        runs = "one run" if budget.reuses == 1 else f"{budget.reuses} runs"
        saves = f"to save {human_energy(gain_kwh)} in {runs} of what is recommended"
        return f"converged: another trial is expected to cost {human_energy(cost_kwh)} and {saves}"

    def sampler(self, study: Study, number: int) -> BaseSampler:
        """For the proposal of trial `number`."""
        name, seed = self._config.search.sampler, self._config.search.seed
        if name == "grid":
            return Planned(next_of_grid(study, self._space, seed, number), self.distributions)
        if not self._proposes:
            return ValidSampler("random" if name == "carbon" else name, self._space, seed, number)
        values = self._plan(study, number).values
        return Planned({} if values is None else {**self._single, **values}, self.distributions)

    def should_prune(self, study: Study, number: int, params: TrialParams) -> PruningRule:
        """Whether trial `number` can't matter any more."""
        target, values = self._config.target, params.model_dump(exclude_none=True)
        target_loss = None if self._config.search.goal == "front" else target.quality.loss_of(target.value)
        return partial(should_prune, self._plan(study, number).knowledge, number, values, target_loss)

    def meeting(self, study: Study, number: int) -> frozenset[int]:
        """The trials that meet the target as far as is known before trial `number`: the cheapest one is its cap. Where
        the answer is to be confirmed, a lucky run is none: as a cap it would stop what can be confirmed."""
        return self._plan(study, number).meeting

    def audits(self, number: int) -> bool:
        """Whether trial `number` is run to its end even if it should be stopped for its target."""
        draw = np.random.default_rng([self._config.search.seed, number, _AUDIT]).random()
        return bool(draw < self._config.search.pruning.audit)

    def _plan(self, study: Study, number: int) -> NextTrial:
        if self._planned is None or self._planned[0] != number:
            trials = [trial for trial in study.get_trials(deepcopy=False) if trial.number != number]
            told = (trial.user_attrs["record"] for trial in trials if "record" in trial.user_attrs)
            missed = refuted(map(TrialRecord.from_json, told), self._config)
            if self._proposes:
                plan = self._carbon.plan(trials, self._movable, number, missed)
            else:
                knowledge = self._carbon.knowledge(trials, self._movable)
                plan = NextTrial(None, None, knowledge, 0, frozenset(self._carbon.meeting(knowledge, missed)))
            self._planned = (number, plan)
        return self._planned[1]


def _only_value(distribution: BaseDistribution) -> Any:
    """Of a dimension with a single value."""
    return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low  # type: ignore[attr-defined]
