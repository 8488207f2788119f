"""A study's search: who proposes its trials, when a running one can't matter any more, when another one doesn't pay."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from carbonopt.analysis.confirmation import refuted
from carbonopt.core.config import StudyConfig
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import EvalPoint, TrialRecord
from carbonopt.core.units import human_energy
from carbonopt.search.optuna_samplers import distributions, exhausted, make_sampler
from carbonopt.search.pruning import Forecast
from carbonopt.search.sampler import CarbonSampler, NextTrial

_AUDIT = 1  # keeps the audits' draws apart from the proposals'


class Strategy:
    """Of one study.

    Args:
        memory_gib: of a device; None: not known.
    """

    def __init__(self, config: StudyConfig, space: SearchSpace, memory_gib: float | None) -> None:
        self._config = config
        self._space = space
        self.distributions = distributions(space)
        self._movable = {name: one for name, one in self.distributions.items() if not one.single()}
        self._single = {name: _only_value(one) for name, one in self.distributions.items() if one.single()}
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
        budget, proposal = self._config.budget, plan.proposal
        if budget.until is None or proposal is None:
            return None
        if proposal.reachable == 0 and math.isinf(proposal.expected_gain):
            return "converged: no configuration is expected to meet the target"
        if proposal.reachable == 0:
            return "converged: no other configuration is expected to meet the target with less energy"
        if math.isfinite(proposal.expected_gain) and proposal.expected_gain * budget.reuses < proposal.expected_cost:
            runs = "one run" if budget.reuses == 1 else f"{budget.reuses} runs"
            return (
                f"converged: another trial is expected to cost {human_energy(proposal.expected_cost)} and to save "
                f"{human_energy(proposal.expected_gain * budget.reuses)} in {runs} of what is recommended"
            )
        return None

    def sampler(self, study: Study, number: int) -> BaseSampler:
        """For the proposal of trial `number`."""
        search = self._config.search
        if search.sampler != "carbon" or not self._movable:
            name = "random" if search.sampler == "carbon" else search.sampler
            return make_sampler(name, self._space, search.seed, number)
        values = self._plan(study, number).values
        return _Planned({} if values is None else {**self._single, **values}, self.distributions)

    def should_prune(
        self, study: Study, number: int, params: TrialParams
    ) -> Callable[[Sequence[EvalPoint], int], bool]:
        """Whether trial `number` can't matter any more, given its evaluations and its total steps."""
        forecast = Forecast(
            self._plan(study, number).knowledge,
            number,
            params.model_dump(exclude_none=True),
            self._config.target.quality.loss_of(self._config.target.value),
            front=self._config.search.goal == "front",
        )
        return forecast.should_prune

    def meeting(self, study: Study, number: int) -> frozenset[int]:
        """The trials that meet the target as far as is known before trial `number`: the cheapest one is its cap.

        Where the answer is to be confirmed, a lucky run is none of them: as a cap it would stop what can be confirmed.
        """
        return self._plan(study, number).meeting

    def audits(self, number: int) -> bool:
        """Whether trial `number` is run to its end even if it should be stopped for its target."""
        draw = np.random.default_rng([self._config.search.seed, number, _AUDIT]).random()
        return bool(draw < self._config.search.pruning.audit)

    def _plan(self, study: Study, number: int) -> NextTrial:
        if self._planned is None or self._planned[0] != number:
            trials = [one for one in study.get_trials(deepcopy=False) if one.number != number]
            refuted = self._refuted(trials)
            if self._config.search.sampler == "carbon" and self._movable:
                plan = self._carbon.plan(trials, self._movable, number, refuted)
            else:
                knowledge = self._carbon.knowledge(trials, self._movable)
                plan = NextTrial(None, None, knowledge, 0, frozenset(self._carbon.meeting(knowledge, refuted)))
            self._planned = (number, plan)
        return self._planned[1]

    def _refuted(self, trials: Sequence[FrozenTrial]) -> frozenset[int]:
        if self._config.confirm is None:
            return frozenset()
        records = [TrialRecord.from_json(one.user_attrs["record"]) for one in trials if "record" in one.user_attrs]
        return refuted(records, self._config)


class _Planned(BaseSampler):
    """Proposes what was planned."""

    def __init__(self, values: dict[str, Any], distributions: dict[str, BaseDistribution]) -> None:
        self._values = values
        self._distributions = distributions

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, object]:
        return dict(self._values)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> object:
        raise AssertionError(f"{param_name} was not planned")


def _only_value(distribution: BaseDistribution) -> Any:
    """Of a dimension with a single value."""
    return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low  # type: ignore[attr-defined]
