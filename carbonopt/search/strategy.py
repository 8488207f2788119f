"""The search strategy of a study: the choice of trials, when to stop one, and when to end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from carbonopt.analysis.confirmation import refuted
from carbonopt.analysis.gpu_memory import EstimatedNeeds
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import count_text, energy_text
from carbonopt.core.trial import START_TRIAL, Forecast, Kernels, StopReason, TrialRecord
from carbonopt.search.candidates import movable
from carbonopt.search.inner_samplers import (
    GivenValuesSampler,
    Trials,
    ValidSampler,
    all_run,
    distributions,
    next_of_grid,
)
from carbonopt.search.observation import of_evaluations, of_probe
from carbonopt.search.planner import Left, NextTrial, Planner
from carbonopt.search.probe_plan import Probing
from carbonopt.search.proposal import LEAST_CHANCE, LEAST_SAVING
from carbonopt.search.pruning import forecast_of_miss
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.model_memory import ModelMemory
from carbonopt.spec.study_config import StudyConfig

optuna.logging.set_verbosity(optuna.logging.WARNING)  # its INFO lines would break the live display

# Called with a trial's evaluations and its number of steps.
PruningRule = Callable[[Sequence[EvalPoint], int], Forecast | None]
# While a target seems out of reach, the search goes on as long as one of so many last trials came
# closer to it than all before. Otherwise it would end too early, because after few trials the
# models are too sure of what they have not seen. This was measured in 24 searches of made-up tables
# of accuracies, each with a configuration that meets its target: without this rule 16 would have
# ended before they found it, with 3 here 2, and with 5 none.
PATIENCE = 5
_AUDIT = 1  # keeps the draws of audits apart from those of proposals


class Strategy:
    """The search strategy of one study; `plan` has its answers about one trial.

    Args:
        memory_gib: memory of one device; None where it is not known.
        earlier: the trials of the prior studies that this one learns from.
        advised: the literature's values, see `Planner`.
        memory: the memory that the model needs; None where it is not known.
    """

    def __init__(
        self,
        config: StudyConfig,
        space: SearchSpace,
        memory_gib: float | None,
        earlier: Sequence[Sequence[FrozenTrial]] = (),
        advised: Mapping[str, float] | None = None,
        memory: ModelMemory | None = None,
    ) -> None:
        self.config, self.space = config, space
        self.distributions = distributions(space)
        self.movable = movable(self.distributions)
        self.planner = Planner(
            config.quality,
            config.target.value,
            goal=config.search.goal,
            valid=lambda values: space.rule_broken(values) is None,
            listed=space.combinations,
            canonical=space.canonical,
            complete=lambda values: space.params(values).model_dump(exclude_none=True),
            affects=config.search.space.affects(),
            settings_decide_cost=config.settings_decide_cost,
            confirmed=config.confirm is not None,
            advised=advised or {},
            memory_gib=memory_gib,
            estimated_gib=None if memory is None else EstimatedNeeds(memory),
            learn_from=earlier,
            seed=config.search.seed,
        )
        self.proposes = config.search.sampler == "carbon" and bool(self.movable)

    def plan(
        self,
        trials: Trials,
        number: int,
        probes: Sequence[TrialRecord] = (),
        *,
        replaces_repeat: bool = False,
    ) -> "TrialPlan":
        """Plan trial `number`.

        Args:
            trials: All of the study's trials; trial `number` is among them if it has begun.
            probes: The records of all of the study's probes.
            replaces_repeat: Whether the confirmation tries it in place of a repeat.
        """
        return TrialPlan(self, trials, number, probes, replaces_repeat)


@dataclass(frozen=True)
class TrialPlan:
    """The search's decisions on one trial, before the trial begins and while it runs.

    All answers come from one proposal. With hundreds of trials it takes seconds, so it is made only
    when an answer first needs it.
    """

    strategy: Strategy
    trials: Trials
    number: int
    probes: Sequence[TrialRecord]
    replaces_repeat: bool

    @cached_property
    def why_ended(self) -> str | None:
        """The reason, in words, why no further trial is worth it; None if this one is."""
        strategy, budget = self.strategy, self.strategy.config.budget
        if self._waits:
            return None  # a waiting trial, interrupted or the study's start, is chosen already
        if all_run(self.trials, strategy.space):
            return "every configuration of the search space has been run"
        if not strategy.proposes:
            return None
        if self._next_trial.values is None:
            return _nothing_left(self._next_trial.left)
        proposal = self._next_trial.proposal
        if budget.until is None or proposal is None:
            return None
        cost_kwh, gain_kwh = proposal.expected_cost, proposal.expected_gain * budget.reuses
        if proposal.chance_of_any == 0 and math.isinf(gain_kwh):
            why = "converged: no configuration is expected to meet the target"
            return None if self._came_closer else why
        if proposal.chance_of_any == 0:
            return (
                "converged: no other configuration is expected to meet the target with less energy"
            )
        if gain_kwh >= cost_kwh:
            return None
        runs = "one run" if budget.reuses == 1 else f"{budget.reuses} runs"
        saves = f"to save {energy_text(gain_kwh)} in {runs} of what is recommended"
        return f"converged: another trial is expected to cost {energy_text(cost_kwh)} and {saves}"

    @property
    def probe(self) -> TrialParams | None:
        """The settings to measure by a few steps before the trial is proposed; None: nothing."""
        if not self.strategy.proposes or self._waits or self._next_trial.probe_values is None:
            return None
        return self.strategy.space.params(self._next_trial.probe_values)

    @property
    def sampler(self) -> BaseSampler:
        """The sampler that proposes the trial."""
        strategy = self.strategy
        name, seed = strategy.config.search.sampler, strategy.config.search.seed
        if name == "grid":
            return GivenValuesSampler(
                next_of_grid(self.trials, strategy.space, seed, self.number), strategy.distributions
            )
        if not strategy.proposes:
            return ValidSampler(
                "random" if name == "carbon" else name,
                strategy.space,
                seed,
                self.number,
                self.trials,
            )
        return GivenValuesSampler(self._next_trial.values or {}, strategy.distributions)

    @property
    def meeting(self) -> frozenset[int]:
        """The numbers of the trials known to meet the target before this one begins.

        The lowest emissions among them are the trial's cap. If the answer is to be confirmed, a
        lucky run does not count: as a cap it would stop trials that can be confirmed.
        """
        return self._next_trial.meeting

    @property
    def audits(self) -> bool:
        """True if the trial runs on as an audit even if it should be pruned."""
        search = self.strategy.config.search
        draw = np.random.default_rng([search.seed, self.number, _AUDIT]).random()
        return bool(draw < search.pruning.audit)

    def pruning_rule(self, params: TrialParams) -> PruningRule:
        """Return a function that says why a trial with these parameters can no longer matter.

        It returns the forecast of a miss, or None while the trial can still matter.
        """
        config, values = self.strategy.config, params.model_dump(exclude_none=True)
        target_loss = (
            None if config.search.goal == "front" else config.quality.loss_of(config.target.value)
        )
        knowledge, number = self._next_trial.knowledge, self.number

        def rule(evals: Sequence[EvalPoint], total_steps: int) -> Forecast | None:
            observation = of_evaluations(number, values, evals, total_steps, config.quality)
            return forecast_of_miss(knowledge, observation, target_loss)

        return rule

    @property
    def _came_closer(self) -> bool:
        """True if one of the last trials has come closer to the target than all before it."""
        losses = {
            trial.number: trial.curve[-1][1]
            for trial in self._next_trial.knowledge.observations
            if trial.curve and not trial.diverged and not trial.probe
        }
        ended = [trial.number for trial in self.trials if trial.state.is_finished()]
        closest = min(ended, key=lambda number: losses.get(number, math.inf), default=None)
        return not ended or closest in ended[-PATIENCE:]

    @property
    def _waits(self) -> bool:
        return any(trial.state == OptunaState.WAITING for trial in self.trials)

    @cached_property
    def _next_trial(self) -> NextTrial:
        planner, movable = self.strategy.planner, self.strategy.movable
        others = [trial for trial in self.trials if trial.number != self.number]
        stored = (trial.user_attrs["record"] for trial in others if "record" in trial.user_attrs)
        # Without a confirmation nobody asks for them, and thousands take seconds to read.
        confirms = self.strategy.config.confirm is not None
        records = tuple(map(TrialRecord.from_json, stored)) if confirms else ()
        missed = refuted(records, self.strategy.config)
        if self.replaces_repeat:
            # Trials that met the target may have been lucky, so that a dearer one may be the
            # answer: only the start counts as meeting it.
            start = {START_TRIAL} if self.strategy.config.search.start else set[int]()
            missed |= frozenset(record.trial for record in records) - start
        probes = [
            observation for record in self.probes if (observation := of_probe(record)) is not None
        ]
        if self.strategy.proposes:
            return planner.plan(
                others,
                movable,
                self.number,
                missed,
                probes,
                self._probing,
                replaces_repeat=self.replaces_repeat,
            )
        knowledge = planner.knowledge(others, movable, probes)
        meeting = frozenset(trial.number for trial in planner.meeting(knowledge, missed))
        return NextTrial(None, None, knowledge, None, Left(untried=0, is_all=False), meeting)

    @property
    def _probing(self) -> Probing | None:
        """The study's knowledge of its probes; None if it makes none."""
        config = self.strategy.config
        if not config.probes or config.search.goal != "recommend":
            return None
        ended = [
            record
            for record in self.probes
            if record.stop_reason is StopReason.PROBE and record.step_kwh
        ]
        compiled = (
            record.first_step_excess_kwh or 0.0
            for record in ended
            if record.kernels is Kernels.COMPILED
        )
        without_kwh = sum(record.spent_kwh for record in ended) - sum(compiled)
        return Probing(config.budget.reuses, without_kwh / len(ended) if ended else None)


def _nothing_left(left: Left) -> str:
    """Say why the search tries none of the configurations that are left.

    The text says what the model knows of the configurations, and which ones are left out.
    """
    # drawn from a space that has more
    which = "untried" if left.is_all else "drawn"
    left_out = [
        f"{count_text(number, f'{kind}configuration')} {why}"
        for number, kind, why in (
            (left.failed, "", "with settings that failed in a probe"),
            (
                left.missing,
                f"{which} ",
                f"that would miss the target, because {_alike(left.missing, 'missed', 'quality')}",
            ),
            (
                left.no_cheaper,
                f"{which} ",
                f"that can save nothing, because {_alike(left.no_cheaper, 'met', 'cost')}",
            ),
        )
        if number
    ]
    if not left.untried and left_out:
        return f"nothing is left but {', and '.join(left_out)}"
    if not left.untried:
        return "no further configuration that can exist was found in the search space"
    considered = count_text(left.untried - left.unlikely_to_fit, f"{which} configuration")
    says = (
        f"a chance of {100 * LEAST_CHANCE:g} % or more to use over {100 * LEAST_SAVING:g} % less"
        " energy than the best trial"
    )
    why = f"the model gives none of {considered} {says}"
    if left.unlikely_to_fit:
        more = f"{left.unlikely_to_fit} more {'is' if left.unlikely_to_fit == 1 else 'are'}"
        why += f"; {more} unlikely to fit in memory"
    return f"{why}. Left out: {', and '.join(left_out)}" if left_out else why


def _alike(number: int, did: str, unchanged: str) -> str:
    differ = "it differs" if number == 1 else "they differ"
    return (
        f"{differ} from a trial that {did} the target only in settings that don't change the"
        f" {unchanged}"
    )
