"""A study's search: who proposes its trials, when a running one can't matter any more, when another one doesn't pay."""

import math
from collections.abc import Callable, Sequence
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
from carbonopt.core.trial import EvalPoint, TrialRecord
from carbonopt.core.units import human_energy
from carbonopt.search.optuna_samplers import Planned, ValidSampler, distributions, exhausted, next_of_grid
from carbonopt.search.pruning import should_prune
from carbonopt.search.sampler import CarbonSampler, NextTrial

PruningRule = Callable[[Sequence[EvalPoint], int], bool]  # by a trial's evaluations and its number of steps
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
        self._planned: tuple[int, NextTrial] | None = None

    def why_ended(self, study: Study, number: int) -> str | None:
        """Why no further trial is worth it, in words; None if trial `number` is."""
        if study.get_trials(deepcopy=False, states=(OptunaState.WAITING,)):
            return None  # one was interrupted, or is the study's start: it has been chosen already
        if exhausted(study, self._space):
            return "every configuration of the search space has been run"
        if self._config.search.sampler != "carbon" or not self._movable:
            return None
        plan = self._plan(study, number)
        if plan.values is None and not plan.untried:
            return "no further configuration that can exist was found in the search space"
        if plan.values is None:
            return "no configuration is left that could meet the target with less energy"
        proposal, reuses = plan.proposal, self._config.budget.reuses
        if self._config.budget.until is None or proposal is None:
            return None
        cost_kwh, gain_kwh = proposal.expected_cost, proposal.expected_gain * reuses
        if proposal.reachable == 0 and math.isinf(gain_kwh):
            return "converged: no configuration is expected to meet the target"
        if proposal.reachable == 0:
            return "converged: no other configuration is expected to meet the target with less energy"
        if gain_kwh < cost_kwh:
            runs = "one run" if reuses == 1 else f"{reuses} runs"
            costs = f"converged: another trial is expected to cost {human_energy(cost_kwh)} and to save "
            return f"{costs}{human_energy(gain_kwh)} in {runs} of what is recommended"
        return None

    def sampler(self, study: Study, number: int) -> BaseSampler:
        """For the proposal of trial `number`."""
        name, seed = self._config.search.sampler, self._config.search.seed
        if name == "grid":
            return Planned(next_of_grid(study, self._space, seed, number), self.distributions)
        if name != "carbon" or not self._movable:
            return ValidSampler("random" if name == "carbon" else name, self._space, seed, number)
        values = self._plan(study, number).values
        return Planned({} if values is None else {**self._single, **values}, self.distributions)

    def should_prune(self, study: Study, number: int, params: TrialParams) -> PruningRule:
        """Whether trial `number` can't matter any more."""
        target, front = self._config.target, self._config.search.goal == "front"
        target_loss = None if front else target.quality.loss_of(target.value)
        knowledge = self._plan(study, number).knowledge
        return partial(should_prune, knowledge, number, params.model_dump(exclude_none=True), target_loss)

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
            if self._config.search.sampler == "carbon" and self._movable:
                plan = self._carbon.plan(trials, self._movable, number, missed)
            else:
                knowledge = self._carbon.knowledge(trials, self._movable)
                plan = NextTrial(None, None, knowledge, 0, frozenset(self._carbon.meeting(knowledge, missed)))
            self._planned = (number, plan)
        return self._planned[1]


def _only_value(distribution: BaseDistribution) -> Any:
    """Of a dimension with a single value."""
    return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low  # type: ignore[attr-defined]
