"""A study's search: who proposes its trials, when a running one can't matter any more, when another one doesn't pay."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from carbonopt.analysis.confirmation import refuted
from carbonopt.core.config import Choices, StudyConfig
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.format import energy_text
from carbonopt.core.space import SearchSpace, is_integer
from carbonopt.core.trial import EvalPoint, Forecast, Kernels, StopReason, TrialRecord
from carbonopt.search.candidates import Distributions, draw, movable
from carbonopt.search.observation import of_evaluations, of_probe
from carbonopt.search.probes import Probing
from carbonopt.search.pruning import should_prune
from carbonopt.search.sampler import CarbonSampler, NextTrial

optuna.logging.set_verbosity(optuna.logging.WARNING)  # its INFO lines would break the live display

Trials = Sequence[FrozenTrial]
PruningRule = Callable[[Sequence[EvalPoint], int], Forecast | None]  # by a trial's evaluations and number of steps
_AUDIT = 1  # keeps the audits' draws apart from the proposals'
# How often the inner sampler is asked before a random valid configuration is taken: one that has settled on a region
# where nothing new can exist would be asked for ever, and a Gaussian process is fitted anew each time.
ATTEMPTS, RANDOM_ATTEMPTS = 8, 50
INNER: dict[str, Callable[..., BaseSampler]] = {
    "tpe": partial(TPESampler, multivariate=True),
    "nsga2": partial(NSGAIISampler, population_size=10),
    "gp": partial(GPSampler, n_startup_trials=10),
    "random": RandomSampler,
}


class Strategy:
    """Of one study; `memory_gib` of a device, None where it is not known. `trials`: the study's, all that there are;
    `earlier`: those of studies that it learns from; `advised`: the literature's values, see `CarbonSampler`."""

    def __init__(
        self,
        config: StudyConfig,
        space: SearchSpace,
        memory_gib: float | None,
        earlier: Sequence[Sequence[FrozenTrial]] = (),
        advised: Mapping[str, float] | None = None,
    ) -> None:
        self._config, self._space = config, space
        self.distributions = distributions(space)
        self._movable = movable(self.distributions)
        any_rng = np.random.default_rng(0)  # of a single value there is no other
        self._single = {name: draw(dist, any_rng) for name, dist in self.distributions.items() if dist.single()}
        self._carbon = CarbonSampler(
            config.quality,
            config.target.value,
            goal=config.search.goal,
            valid=lambda values: space.rule_broken({**self._single, **values}) is None,
            listed=space.combinations,
            canonical=space.canonical,
            complete=lambda values: space.params({**self._single, **values}).model_dump(exclude_none=True),
            affects=config.search.space.affects(),
            confirmed=config.confirm is not None,
            advised=advised,
            memory_gib=memory_gib,
            learn_from=earlier,
            seed=config.search.seed,
        )
        self._probes: list[TrialRecord] = []
        self._proposes = config.search.sampler == "carbon" and bool(self._movable)
        self._planned: tuple[int, NextTrial] | None = None

    def learn(self, probes: Sequence[TrialRecord]) -> None:
        """What these probes have measured counts from now on, all that there are."""
        self._probes, self._planned = list(probes), None

    def probe(self, trials: Trials, number: int) -> TrialParams | None:
        """What to measure by a few steps before trial `number` is proposed; None: nothing is worth it."""
        if not self._proposes or _waits(trials):
            return None
        values = self._plan(trials, number).probe
        return None if values is None else self._space.params({**self._single, **values})

    def why_ended(self, trials: Trials, number: int) -> str | None:
        """Why no further trial is worth it, in words; None if trial `number` is."""
        if _waits(trials):
            return None  # one was interrupted, or is the study's start: it has been chosen already
        if _exhausted(trials, self._space):
            return "every configuration of the search space has been run"
        if not self._proposes:
            return None
        plan, budget = self._plan(trials, number), self._config.budget
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
        saves = f"to save {energy_text(gain_kwh)} in {runs} of what is recommended"
        return f"converged: another trial is expected to cost {energy_text(cost_kwh)} and {saves}"

    def sampler(self, trials: Trials, number: int) -> BaseSampler:
        """For the proposal of trial `number`."""
        name, seed = self._config.search.sampler, self._config.search.seed
        if name == "grid":
            return Planned(_next_of_grid(trials, self._space, seed, number), self.distributions)
        if not self._proposes:
            return ValidSampler("random" if name == "carbon" else name, self._space, seed, number, trials)
        values = self._plan(trials, number).values
        return Planned({} if values is None else {**self._single, **values}, self.distributions)

    def should_prune(self, trials: Trials, number: int, params: TrialParams) -> PruningRule:
        """Why trial `number` can't matter any more; None: it can."""
        target, values = self._config.target, params.model_dump(exclude_none=True)
        quality = self._config.quality
        target_loss = None if self._config.search.goal == "front" else quality.loss_of(target.value)
        knowledge = self._plan(trials, number).knowledge

        def rule(evals: Sequence[EvalPoint], total_steps: int) -> Forecast | None:
            return should_prune(knowledge, of_evaluations(number, values, evals, total_steps, quality), target_loss)

        return rule

    def meeting(self, trials: Trials, number: int) -> frozenset[int]:
        """The trials that meet the target as far as is known before trial `number`: the cheapest one is its cap. Where
        the answer is to be confirmed, a lucky run is none: as a cap it would stop what can be confirmed."""
        return self._plan(trials, number).meeting

    def audits(self, number: int) -> bool:
        """Whether trial `number` is run to its end even if it should be stopped for its target."""
        draw = np.random.default_rng([self._config.search.seed, number, _AUDIT]).random()
        return bool(draw < self._config.search.pruning.audit)

    def _plan(self, trials: Trials, number: int) -> NextTrial:
        if self._planned is None or self._planned[0] != number:
            others = [trial for trial in trials if trial.number != number]
            told = (trial.user_attrs["record"] for trial in others if "record" in trial.user_attrs)
            missed = refuted(map(TrialRecord.from_json, told), self._config)
            probes = [taught for record in self._probes if (taught := of_probe(record)) is not None]
            if self._proposes:
                plan = self._carbon.plan(others, self._movable, number, missed, probes, self._probing)
            else:
                knowledge = self._carbon.knowledge(others, self._movable, probes)
                plan = NextTrial(None, None, knowledge, None, 0, frozenset(self._carbon.meeting(knowledge, missed)))
            self._planned = (number, plan)
        return self._planned[1]

    @property
    def _probing(self) -> Probing | None:
        """None: the study makes no probes."""
        if not self._config.probes or self._config.search.goal != "recommend":
            return None
        ended = [record for record in self._probes if record.stop_reason is StopReason.PROBE and record.step_kwh]
        compiled = (record.first_step_excess_kwh or 0.0 for record in ended if record.kernels is Kernels.COMPILED)
        without_kwh = sum(record.spent_kwh for record in ended) - sum(compiled)
        return Probing(self._config.budget.reuses, without_kwh / len(ended) if ended else None)


def distributions(space: SearchSpace) -> Distributions:
    """Optuna's form of the free dimensions."""
    by_name: Distributions = {}
    for name, domain in space.space.free().items():
        if isinstance(domain, Choices):
            by_name[name] = CategoricalDistribution(domain.choices)
        elif is_integer(name, domain):
            by_name[name] = IntDistribution(int(domain.low), int(domain.high), domain.log, int(domain.step or 1))
        else:
            by_name[name] = FloatDistribution(domain.low, domain.high, domain.log, domain.step)
    return by_name


def _waits(trials: Trials) -> bool:
    return any(trial.state == OptunaState.WAITING for trial in trials)


def _exhausted(trials: Trials, space: SearchSpace) -> bool:
    """Whether every configuration of a finite space has been run or is running."""
    names = list(space.space.free())
    run = {_key(names, trial.params) for trial in trials if trial.params or not names}
    return space.combinations is not None and all(_key(names, values) in run for values in space.combinations)


def _next_of_grid(trials: Trials, space: SearchSpace, seed: int, trial_number: int) -> dict[str, Any]:
    """Every combination that can exist, once, in an order drawn from the seed: a GPU drifts as it warms up. Empty only
    for an interrupted trial that is asked for again, with its own values already set."""
    run = [trial.params for trial in trials if trial.number != trial_number]
    combinations = space.combinations or []
    order = np.random.default_rng(seed).permutation(len(combinations)).tolist()
    return next((dict(combinations[index]) for index in order if combinations[index] not in run), {})


class Planned(BaseSampler):
    """Proposes what was planned: a value for each of the dimensions."""

    def __init__(self, values: Mapping[str, Any], distributions: Distributions) -> None:
        self._values, self._distributions = values, distributions

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        return self._distributions

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        return dict(self._values)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, _: BaseDistribution) -> Any:
        raise AssertionError(f"{param_name} was not planned")


class ValidSampler(Planned):
    """Asks one of Optuna's samplers again until its proposal can exist and is new: they know no constraint that joins
    dimensions, and TPE proposes failed and known configurations again. Training here is deterministic, so a repeat
    would cost its energy for nothing. It is seeded by the study's seed and the trial's number, so that an interrupted
    study proposes what the uninterrupted one would have."""

    def __init__(self, name: str, space: SearchSpace, seed: int, trial_number: int, trials: Trials) -> None:
        super().__init__({}, distributions(space))
        self._space, self._trials, self._seed = (
            space,
            trials,
            int(np.random.default_rng([seed, trial_number]).integers(2**31)),
        )
        self._inner = INNER[name](seed=self._seed)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        names = list(search_space)
        known = {_key(names, other.params) for other in self._trials if other.number != trial.number}
        # Single-valued distributions carry nothing to learn from, and some samplers refuse them.
        searched = movable(search_space)
        for sampler in [self._inner] * ATTEMPTS + [RandomSampler(seed=self._seed)] * RANDOM_ATTEMPTS:
            values = sampler.sample_relative(study, trial, searched)
            for name, distribution in search_space.items():
                if name not in values:
                    values[name] = sampler.sample_independent(study, trial, name, distribution)
            values = self._space.canonical(values)
            if self._space.rule_broken(values) is None and _key(names, values) not in known:
                return values
        combinations = self._space.combinations or []
        left = [values for values in combinations if _key(names, values) not in known]
        # Nothing new is left only for an interrupted trial that is asked for again, with its own values already set.
        return left[int(np.random.default_rng(self._seed).integers(len(left)))] if left else {}


def _key(names: list[str], values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in names)
