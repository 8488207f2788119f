"""The search strategy of a study: the choice of trials, when to stop one, and when to end."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from carbonopt.analysis.confirmation import refuted
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.format import count_text, energy_text
from carbonopt.core.trial import EvalPoint, Forecast, Kernels, StopReason, TrialRecord
from carbonopt.search.candidates import Distributions, draw, movable
from carbonopt.search.observation import of_evaluations, of_probe
from carbonopt.search.probe_plan import Probing
from carbonopt.search.proposal import LEAST_CHANCE, LEAST_SAVING
from carbonopt.search.pruning import forecast_of_miss
from carbonopt.search.sampler import CarbonSampler, Left, NextTrial
from carbonopt.space.search_space import SearchSpace, is_integer
from carbonopt.spec.space_settings import Choices
from carbonopt.spec.study_config import StudyConfig

optuna.logging.set_verbosity(optuna.logging.WARNING)  # its INFO lines would break the live display

Trials = Sequence[FrozenTrial]
# Called with a trial's evaluations and its number of steps.
PruningRule = Callable[[Sequence[EvalPoint], int], Forecast | None]
_AUDIT = 1  # keeps the draws of audits apart from those of proposals
# How often the inner sampler is asked before a random valid configuration is taken. One that has
# settled on a region where nothing new can exist would be asked for ever, and a Gaussian process is
# fitted anew each time.
ATTEMPTS, RANDOM_ATTEMPTS = 8, 50
INNER: dict[str, Callable[..., BaseSampler]] = {
    "tpe": partial(TPESampler, multivariate=True),
    "nsga2": partial(NSGAIISampler, population_size=10),
    "gp": partial(GPSampler, n_startup_trials=10),
    "random": RandomSampler,
}


class Strategy:
    """The search strategy of one study.

    Its methods expect `trials` to be all of the study's trials.

    Args:
        memory_gib: memory of one device; None where it is not known.
        earlier: the trials of the prior studies that this one learns from.
        advised: the literature's values, see `CarbonSampler`.
    """

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
        any_rng = np.random.default_rng(0)  # any will do, since there is a single value to draw
        self._single = {
            name: draw(dist, any_rng) for name, dist in self.distributions.items() if dist.single()
        }
        self._carbon = CarbonSampler(
            config.quality,
            config.target.value,
            goal=config.search.goal,
            valid=lambda values: space.rule_broken({**self._single, **values}) is None,
            listed=space.combinations,
            canonical=space.canonical,
            complete=lambda values: space.params({**self._single, **values}).model_dump(
                exclude_none=True
            ),
            affects=config.search.space.affects(),
            confirmed=config.confirm is not None,
            advised=advised,
            memory_gib=memory_gib,
            learn_from=earlier,
            seed=config.search.seed,
        )
        self._probes: list[TrialRecord] = []
        self._proposes = config.search.sampler == "carbon" and bool(self._movable)
        # All answers about one trial come from one plan. It takes long to make, so it is kept, with
        # the trial's number, until another number is asked for or the probes change.
        self._planned: tuple[int, NextTrial] | None = None

    def learn(self, probes: Sequence[TrialRecord]) -> None:
        """Replace the probes that proposals are based on by these, which must be all there are."""
        self._probes, self._planned = list(probes), None

    def choose_probe(self, trials: Trials, number: int) -> TrialParams | None:
        """Return what to measure by a few steps before trial `number` is proposed.

        None means that no probe is worth it.
        """
        if not self._proposes or _waits(trials):
            return None
        values = self._next_trial(trials, number).probe_values
        return None if values is None else self._space.params({**self._single, **values})

    def why_ended(self, trials: Trials, number: int) -> str | None:
        """Say why no further trial is worth it; None if trial `number` is."""
        if _waits(trials):
            return None  # a waiting trial, interrupted or the study's start, is chosen already
        if _all_run(trials, self._space):
            return "every configuration of the search space has been run"
        if not self._proposes:
            return None
        plan, budget = self._next_trial(trials, number), self._config.budget
        if plan.values is None:
            return _nothing_left(plan.left)
        if budget.until is None or plan.proposal is None:
            return None
        cost_kwh, gain_kwh = (
            plan.proposal.expected_cost,
            plan.proposal.expected_gain * budget.reuses,
        )
        if plan.proposal.reachable == 0 and math.isinf(gain_kwh):
            return "converged: no configuration is expected to meet the target"
        if plan.proposal.reachable == 0:
            return (
                "converged: no other configuration is expected to meet the target with less energy"
            )
        if gain_kwh >= cost_kwh:
            return None
        runs = "one run" if budget.reuses == 1 else f"{budget.reuses} runs"
        saves = f"to save {energy_text(gain_kwh)} in {runs} of what is recommended"
        return f"converged: another trial is expected to cost {energy_text(cost_kwh)} and {saves}"

    def sampler(self, trials: Trials, number: int) -> BaseSampler:
        """Return the sampler that proposes trial `number`."""
        name, seed = self._config.search.sampler, self._config.search.seed
        if name == "grid":
            return GivenValuesSampler(
                _next_of_grid(trials, self._space, seed, number), self.distributions
            )
        if not self._proposes:
            return ValidSampler(
                "random" if name == "carbon" else name, self._space, seed, number, trials
            )
        values = self._next_trial(trials, number).values
        return GivenValuesSampler(
            {} if values is None else {**self._single, **values}, self.distributions
        )

    def pruning_rule(self, trials: Trials, number: int, params: TrialParams) -> PruningRule:
        """Return the rule that says why trial `number` can no longer matter; None while it can."""
        target, values = self._config.target, params.model_dump(exclude_none=True)
        quality = self._config.quality
        target_loss = None if self._config.search.goal == "front" else quality.loss_of(target.value)
        knowledge = self._next_trial(trials, number).knowledge

        def rule(evals: Sequence[EvalPoint], total_steps: int) -> Forecast | None:
            return forecast_of_miss(
                knowledge, of_evaluations(number, values, evals, total_steps, quality), target_loss
            )

        return rule

    def trials_meeting_target(self, trials: Trials, number: int) -> frozenset[int]:
        """Return the numbers of the trials known to meet the target before trial `number` begins.

        The lowest emissions among them are that trial's cap. If the answer is to be confirmed, a
        lucky run does not count: as a cap it would stop trials that can be confirmed.
        """
        return self._next_trial(trials, number).meeting

    def audits(self, number: int) -> bool:
        """Return whether trial `number` runs on as an audit even if it should be pruned."""
        draw = np.random.default_rng([self._config.search.seed, number, _AUDIT]).random()
        return bool(draw < self._config.search.pruning.audit)

    def _next_trial(self, trials: Trials, number: int) -> NextTrial:
        """Plan trial `number` after these trials; it is among them if it has begun."""
        if self._planned is None or self._planned[0] != number:
            others = [trial for trial in trials if trial.number != number]
            records = (
                trial.user_attrs["record"] for trial in others if "record" in trial.user_attrs
            )
            missed = refuted(map(TrialRecord.from_json, records), self._config)
            probes = [
                observation
                for record in self._probes
                if (observation := of_probe(record)) is not None
            ]
            if self._proposes:
                plan = self._carbon.plan(
                    others, self._movable, number, missed, probes, self._probing
                )
            else:
                knowledge = self._carbon.knowledge(others, self._movable, probes)
                meeting = frozenset(
                    trial.number for trial in self._carbon.meeting(knowledge, missed)
                )
                plan = NextTrial(
                    None, None, knowledge, None, Left(untried=0, is_all=False), meeting
                )
            self._planned = (number, plan)
        return self._planned[1]

    @property
    def _probing(self) -> Probing | None:
        """The study's knowledge of its probes; None if it makes none."""
        if not self._config.probes or self._config.search.goal != "recommend":
            return None
        ended = [
            record
            for record in self._probes
            if record.stop_reason is StopReason.PROBE and record.step_kwh
        ]
        compiled = (
            record.first_step_excess_kwh or 0.0
            for record in ended
            if record.kernels is Kernels.COMPILED
        )
        without_kwh = sum(record.spent_kwh for record in ended) - sum(compiled)
        return Probing(self._config.budget.reuses, without_kwh / len(ended) if ended else None)


def distributions(space: SearchSpace) -> Distributions:
    """Return the free dimensions as Optuna distributions."""
    by_name: Distributions = {}
    for name, domain in space.space.free().items():
        if isinstance(domain, Choices):
            by_name[name] = CategoricalDistribution(domain.choices)
        elif is_integer(name, domain):
            by_name[name] = IntDistribution(
                int(domain.low), int(domain.high), domain.log, int(domain.step or 1)
            )
        else:
            by_name[name] = FloatDistribution(domain.low, domain.high, domain.log, domain.step)
    return by_name


def _waits(trials: Trials) -> bool:
    return any(trial.state == OptunaState.WAITING for trial in trials)


def _nothing_left(left: Left) -> str:
    """Say why no configuration that is left is tried.

    The text says what the model knows of the configurations, and which ones are left out.
    """
    failed = f"{count_text(left.failed, 'configuration')} with settings that failed in a probe"
    if not left.untried and left.failed:
        return f"nothing is left but {failed}"
    if not left.untried:
        return "no further configuration that can exist was found in the search space"
    which = "untried" if left.is_all else "drawn"  # drawn from a space that has more
    considered = count_text(left.untried - left.unlikely_to_fit, f"{which} configuration")
    says = (
        f"a chance of {100 * LEAST_CHANCE:g} % or more to use over {100 * LEAST_SAVING:g} % less"
        " energy than the best trial"
    )
    why = f"the model gives none of {considered} {says}"
    if left.unlikely_to_fit:
        why += f"; {left.unlikely_to_fit} more are unlikely to fit in memory"
    return f"{why}; left out: {failed}" if left.failed else why


def _all_run(trials: Trials, space: SearchSpace) -> bool:
    """Return whether every configuration of a finite space has been run or is running."""
    names = list(space.space.free())
    run = {_key(names, trial.params) for trial in trials if trial.params or not names}
    return space.combinations is not None and all(
        _key(names, values) in run for values in space.combinations
    )


def _next_of_grid(
    trials: Trials, space: SearchSpace, seed: int, trial_number: int
) -> dict[str, Any]:
    """Return the next combination of the grid that has not been run.

    The grid has every combination that can exist once, in an order drawn from the seed, since a GPU
    drifts as it warms up. The result is empty only for an interrupted trial that is asked for
    again, with its own values already set.
    """
    run = [trial.params for trial in trials if trial.number != trial_number]
    combinations = space.combinations or []
    order = np.random.default_rng(seed).permutation(len(combinations)).tolist()
    return next(
        (dict(combinations[index]) for index in order if combinations[index] not in run), {}
    )


class GivenValuesSampler(BaseSampler):
    """A sampler that proposes the values that it is given, one for each of the dimensions."""

    def __init__(self, values: Mapping[str, Any], distributions: Distributions) -> None:
        self._values, self._distributions = values, distributions

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        return dict(self._values)

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

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        names = list(search_space)
        known = {
            _key(names, other.params) for other in self._trials if other.number != trial.number
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
            values = self._space.canonical(values)
            if self._space.rule_broken(values) is None and _key(names, values) not in known:
                return values
        combinations = self._space.combinations or []
        left = [values for values in combinations if _key(names, values) not in known]
        # Nothing new is left only for an interrupted trial that is asked for again, with its own
        # values already set.
        return left[int(np.random.default_rng(self._seed).integers(len(left)))] if left else {}


def _key(names: list[str], values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in names)
