"""The models that a study's trials give of its search space: of loss, costs and memory."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution

from carbonopt.core.arrays import Array, Mask
from carbonopt.core.dimensions import StatedAffects, affecting
from carbonopt.core.quality import Quality
from carbonopt.core.trial import Kernels
from carbonopt.search.hypervolume import nearest_front
from carbonopt.search.models.collapse import chance_to_learn, highest_end
from carbonopt.search.models.costs import SettingModel, chance_by_estimate, chance_to_fit
from carbonopt.search.models.curves import FIT_ITERATIONS, CurveModel, Link, Points
from carbonopt.search.models.features import Configurations, SpaceEncoder, comparable, steps_law
from carbonopt.search.models.line import straight_line_loss
from carbonopt.search.models.run_costs import RunCosts, first_costs
from carbonopt.search.models.subset import MOST_FITTED, covering, spread_out
from carbonopt.search.observation import AnyValues, Observation

PRIOR_POINTS = 120  # evaluations of all prior studies together that the loss model is fitted to

# A candidate that is less likely to fit in memory is not tried while another one is left.
LIKELY_TO_FIT = 0.9

# If a configuration's mean has to meet the target, it has to do so by this many standard deviations
# of one run.
SPARE = 1.0

# Two distances on the scale on which losses are modelled (`Link`). Both are measured upwards from
# the highest loss with which a trial that learned has ended. A trial that failed to learn is
# modelled as if it had ended `_COLLAPSED` above that loss. Losses more than `_BEGINNING` above it
# are lowered to that level.
_COLLAPSED, _BEGINNING = 0.2, 0.7
_LEARNS = 0.1  # the linked loss of a training that learns falls by more than this

# Number of complete trials from which on observed errors count more than the model's own estimate.
EXPECTED_FROM = 15

# Until a trial has a loss, the next learning rate is the lowest that diverged, divided by this.
LOWER = 4.0
_OF_KERNELS = affecting("kernels")


@dataclass(frozen=True)
class Knowledge:
    """The observations of a study, with the models that docs/search.md describes."""

    quality: Quality
    distributions: Mapping[str, BaseDistribution]
    observations: Sequence[Observation]  # those of every trial that has begun, and of probes
    memory_gib: float | None = None  # memory of one device
    effort: int = FIT_ITERATIONS  # iterations when the curve model is fitted
    affects: Mapping[str, StatedAffects] = field(default_factory=dict)  # see `affecting`
    # whether a training may stop by itself, see `Observation.may_stop_itself`
    quality_affects_cost: bool = False
    # Observations of prior studies of the same or a similar task.
    earlier: Sequence[Sequence[Observation]] = ()
    # The literature's batch size and learning rate, by dimension name.
    advised: Mapping[str, float] = field(default_factory=dict)
    # returns a configuration's estimated memory, see `Planner`; None: nothing is estimated
    estimated_gib: Callable[[Mapping[str, Any]], float | None] | None = None

    @cached_property
    def earlier_studies(self) -> list["Knowledge"]:
        """Prior studies' observations, in this study's search space.

        Only trials whose values can be compared with this study's are kept, complete ones first,
        and at most as many as the model of the loss has points for.
        """
        usable = (
            [trial for trial in trials if comparable(trial.params, self.distributions)]
            for trials in self.earlier
        )
        kept = (
            sorted(trials, key=lambda trial: not trial.complete)[: self._prior_points]
            for trials in usable
        )
        return [replace(self, observations=observations, earlier=()) for observations in kept]

    @property
    def _prior_points(self) -> int:
        """The most evaluations of each prior study that the model of the loss is fitted to."""
        return max(1, PRIOR_POINTS // max(1, len(self.earlier)))

    def _encoded_earlier_studies(self) -> Iterator[tuple["Knowledge", SpaceEncoder]]:
        """Yield each prior study with the encoder whose rows fit beside those of this study."""
        for study, prior in enumerate(self.earlier_studies):
            yield prior, replace(prior.encoder, earlier=len(self.earlier), study=study)

    @cached_property
    def encoder(self) -> SpaceEncoder:
        # Before this study has a trial, an epoch is taken to be as long as in a prior study.
        every = (self.observations, *(prior.observations for prior in self.earlier_studies))
        with_steps = next(
            (trials for trials in every if any(trial.total_steps for trial in trials)), ()
        )
        return SpaceEncoder(
            self.distributions,
            *steps_law(with_steps),
            self.affects,
            len(self.earlier),
            advised=self.advised,
            quality_affects_cost=self.quality_affects_cost,
        )

    @cached_property
    def fitted(self) -> list[Observation]:
        """The trials whose curves the model of the loss is fitted to, at most MOST_FITTED.

        If there are more, half of them are the complete ones nearest to the front of cost and loss,
        where the answer to any target lies, and the others are spread out over the space.
        """
        if len(self.observations) <= MOST_FITTED:
            return list(self.observations)
        trained = [trial for trial in self.observations if trial.diverged or trial.curve]
        rows = self.encoder.curve_rows([trial.params for trial in trained])
        chosen = spread_out(rows, MOST_FITTED, self._near_front(trained))
        return [trained[index] for index in chosen.tolist()]

    def _near_front(self, trials: Sequence[Observation]) -> list[int]:
        """Return the places among these trials of those nearest to the front of cost and loss."""
        place = {trial.number: index for index, trial in enumerate(trials)}
        return [place[number] for number in self._nearest_front if number in place]

    @cached_property
    def _nearest_front(self) -> list[int]:
        """The numbers of the trials nearest to the front, as many as half of MOST_FITTED."""
        nearest = nearest_front(self.end_points, MOST_FITTED // 2)
        return [self.ends[index][0].number for index in nearest]

    @cached_property
    def _own_points(self) -> Points:
        return self.encoder.points(self._as_fitted(self.fitted))

    @cached_property
    def _shared_points(self) -> Points:
        """The evaluations of this study and of its prior studies."""
        points = self._own_points
        for prior, encoder in self._encoded_earlier_studies():
            modelled = prior._as_fitted(prior.observations)
            points = points.joined(encoder.points(modelled, self._prior_points))
        return points

    def _as_fitted(self, trials: Sequence[Observation]) -> list[Observation]:
        """Return the trials as the model of the loss is fitted to them.

        A training that broke down has its curve before that. Its losses since would drown the
        differences among its neighbours, which did not break down.
        """
        return [
            self.as_modelled(
                trial
                if trial.broke_down_at is None
                else replace(trial, curve=trial.curve[: trial.broke_down_at])
            )
            for trial in trials
        ]

    def as_modelled(self, trial: Observation) -> Observation:
        """Return the trial with the curve that the model of the loss is fitted to.

        A trial that failed to learn keeps one point, a fixed distance above the highest end of
        those that learned. Of other trials, losses far above that end are lowered to one ceiling,
        and points from before the loss first came below the ceiling are left out.
        """
        if math.isinf(self._highest_end):
            return replace(trial, curve=() if trial.diverged else trial.curve)
        if self.collapsed(trial):
            return replace(trial, curve=((1.0, self.link.loss(self._highest_end + _COLLAPSED)),))
        ceiling = self._highest_end + _BEGINNING
        low = [share for share, loss in trial.curve if self._linked(loss) <= ceiling]
        counted = (point for point in trial.curve if not low or point[0] >= low[0])
        return replace(
            trial,
            curve=tuple((share, min(loss, self.link.loss(ceiling))) for share, loss in counted),
        )

    def collapsed(self, trial: Observation) -> bool:
        """Return whether a training failed to learn, or will, as far as its own curve shows.

        It failed if it diverged or broke down. It also failed if its loss lies above a gap in the
        trials' losses, has hardly fallen, and other trials had learned after as many examples.
        """
        if trial.diverged or not trial.curve:
            return trial.diverged
        if trial.broke_down_at is not None:
            return True
        end = trial.final_loss if trial.complete else straight_line_loss(trial.curve)
        if end is None or self._linked(end) <= self._before_gap:
            return False
        (_, first), (share, last) = trial.curve[0], trial.curve[-1]
        if len(trial.curve) == 1 and not self._most_before_gap:
            return False  # only its end is known, and ending above the gap is no exception
        fell = len(trial.curve) > 1 and self._linked(first) - self._linked(last) > _LEARNS
        return not fell and self._examples(trial, share) >= self._learned_after

    def _examples(self, trial: Observation, share: float) -> float:
        return (
            share
            * self.encoder.steps(trial.params)
            * float(trial.params.get("global_batch_size", 1))
        )

    @cached_property
    def _learned_after(self) -> float:
        """The fewest examples after which a trial's loss was below the gap."""
        points = (
            (trial, share)
            for trial in self.observations
            for share, loss in trial.curve
            if self._linked(loss) <= self._before_gap
        )
        return min((self._examples(trial, share) for trial, share in points), default=math.inf)

    @cached_property
    def _before_gap(self) -> float:
        """The highest linked loss at which a trial ended, of those below the gap.

        `highest_end` says where the gap is. While no trial is complete, the last losses of running
        and stopped trials count as ends.
        """
        return highest_end([end for _, end in self._linked_ends])

    @cached_property
    def _most_before_gap(self) -> bool:
        ends = [end <= self._before_gap for _, end in self._linked_ends]
        return 2 * sum(ends) >= len(ends)

    @cached_property
    def _highest_end(self) -> float:
        """The highest linked loss at which a trial ended that learned; infinite if none did."""
        return max(
            (end for trial, end in self._linked_ends if not self.collapsed(trial)), default=math.inf
        )

    @cached_property
    def _linked_ends(self) -> list[tuple[Observation, float]]:
        evaluated = [trial for trial in self.observations if trial.curve and not trial.diverged]
        ended = [trial for trial in evaluated if trial.complete] or evaluated
        return [(trial, self._linked(trial.curve[-1][1])) for trial in ended]

    def chances_to_learn(self, rows: Array) -> Array:
        """Return the probability that a training learns, for rows of curves' ends, (n, columns)."""
        evaluated = [trial for trial in self.fitted if trial.diverged or trial.curve]
        known = (
            [self.encoder.curve_rows([trial.params for trial in evaluated])] if evaluated else []
        )
        learned = [not self.collapsed(trial) for trial in evaluated]
        for prior, encoder in self._encoded_earlier_studies():
            evaluated = [trial for trial in prior.observations if trial.diverged or trial.curve]
            if evaluated:
                known.append(encoder.curve_rows([trial.params for trial in evaluated]))
                learned += [not prior.collapsed(trial) for trial in evaluated]
        if not known:
            return np.ones(len(rows))
        return chance_to_learn(rows, np.concatenate(known), np.array(learned, dtype=bool))

    @cached_property
    def curves(self) -> CurveModel:
        fitted = partial(
            CurveModel,
            link=self.link,
            centre=self.encoder.centre(),
            effort=self.effort,
            earlier=len(self.earlier),
        )
        shared = fitted(self._shared_points)
        own_trials = set(self._own_points.trial.tolist())
        if not self.earlier or not own_trials:
            return shared
        # If prior studies mislead, the shared model predicts this study's trials worse than the
        # model of its own trials does: each trial from all others, or the end of a single trial
        # from its beginning.
        alone = fitted(self._own_points)
        return shared if shared.log_score(own_trials) >= alone.log_score(own_trials) else alone

    @cached_property
    def calibration(self) -> float:
        """The factor by which the loss model's forecasts are further off than it expects.

        It is the root mean square, in standard deviations, of how far each complete trial ended
        from what all other trials predict for it. Trials that failed to learn are left out. It is
        near 1 while few trials are complete.
        """
        ended = [
            trial
            for trial in self.fitted
            if trial.complete and trial.curve and not self.collapsed(trial)
        ]
        masks = [self.curves.points.trial == trial.number for trial in ended]
        squares = [
            self.curves.surprise(mask) ** 2 for mask in masks if mask.any() and not mask.all()
        ]
        return math.sqrt((EXPECTED_FROM + sum(squares)) / (EXPECTED_FROM + len(squares)))

    @property
    def begins_near(self) -> Mapping[str, float]:
        """The advised values near which trials begin, until one has a loss.

        If trials diverged, the learning rate is lower than all of theirs.
        """
        diverged = (trial.params for trial in self.observations if trial.diverged)
        rates = [float(params["learning_rate"]) for params in diverged if "learning_rate" in params]
        if not rates:
            return self.encoder.advice
        return {**self.encoder.advice, "learning_rate": min(rates) / LOWER}

    @cached_property
    def link(self) -> Link:
        losses = [loss for trial in self.observations for _, loss in trial.curve]
        if len(set(losses)) < 2:  # use prior studies' losses, whose scale may be another
            losses = [loss for trial in itertools.chain(*self.earlier) for _, loss in trial.curve]
        return Link.of(
            self.quality,
            losses,
            min((trial.examples for trial in self.observations), default=math.inf),
        )

    @cached_property
    def step_costs(self) -> SettingModel:
        costs = [
            (trial, cost) for trial in self.observations if (cost := self._cost_per_step(trial))
        ]
        rows = self.encoder.system_rows([trial.params for trial, _ in costs])
        kept = covering(rows, self._near_front([trial for trial, _ in costs]))
        costs, rows = list(itertools.compress(costs, kept)), rows[kept]
        waits = np.array([trial.wait_fraction for trial, _ in costs])
        before = next(
            (
                prior.step_costs
                for prior in reversed(self.earlier_studies)
                if prior.step_costs.known
            ),
            None,
        )
        slopes = self.encoder.cost_slopes()
        return SettingModel(rows, np.array([cost for _, cost in costs]), waits, before, slopes)

    def _linked(self, loss: float) -> float:
        return float(self.link.linked(loss))

    def limit(self, target_loss: float, *, by_mean: bool) -> float:
        """Return the highest linked loss that meets the target.

        It applies to one run or, with `by_mean`, to a configuration's mean over all seeds.
        """
        target = self._linked(target_loss)
        return target - SPARE * self.curves.noise if by_mean else target

    def meeting(self, target_loss: float, *, by_mean: bool) -> list[Observation]:
        """Return the complete trials of known cost that meet the target.

        With `by_mean`, these are only the trials whose configuration's mean is expected to meet it,
        too.
        """
        met = [trial for trial, loss, _ in self.ends if loss <= target_loss]
        if not by_mean or not met:
            return met
        expected, _ = self.curves.predict(self.encoder.curve_rows([trial.params for trial in met]))
        return list(itertools.compress(met, expected <= self.limit(target_loss, by_mean=True)))

    @cached_property
    def end_points(self) -> Array:
        """The logarithm of the cost and the linked final loss of each of `ends`, (n, 2)."""
        losses, costs = np.array([end[1:] for end in self.ends], dtype=float).reshape(-1, 2).T
        logarithms = np.log(np.maximum(costs, np.finfo(float).tiny))
        return np.column_stack([logarithms, self.link.linked(losses)])

    @cached_property
    def ends(self) -> list[tuple[Observation, float, float]]:
        """The complete trials of known cost, each with its final loss and that cost."""
        known = ((trial, trial.final_loss, trial.cost) for trial in self.observations)
        return [
            (trial, loss, cost)
            for trial, loss, cost in known
            if loss is not None and cost is not None
        ]

    def have_ended(self, rows: Array) -> Mask:
        """Return which curves' ends, (n, columns), complete trials have shown."""
        ended = self.encoder.curve_rows([trial.params for trial, *_ in self.ends])
        shown = {tuple(row) for row in ended.round(9).tolist()}
        return np.array([tuple(row) in shown for row in rows.round(9).tolist()], dtype=bool)

    @property
    def overhead_cost(self) -> float:
        """The mean cost, beside their training, of the trials that have ended."""
        known = [
            trial.overhead_cost for trial in self.observations if trial.overhead_cost is not None
        ]
        return sum(known) / len(known) if known else 0.0

    @cached_property
    def runs(self) -> RunCosts:
        """The model of the costs of whole trainings."""
        return RunCosts(self.observations, self.encoder, self.step_costs)

    def run_costs(self, configurations: Configurations, step_costs: Array) -> Array:
        """Return the costs of whole trainings, given the cost of one step of each.

        Args:
            step_costs: (n,) or (n, draws); the result has the same shape.
        """
        return self.runs.means(configurations, step_costs)

    def compile_costs(self, configurations: Configurations) -> Array:
        """Estimate what each trial would cost for compiling kernels that none has compiled yet."""
        cold = [trial for trial in self.observations if trial.kernels is Kernels.COMPILED]
        there = {_kernels(trial.params) for trial in self.observations if trial.kernels is not None}
        return np.where(
            [_kernels(values) in there for values in configurations],
            0.0,
            first_costs(cold, configurations),
        )

    def steps(self, configurations: Configurations) -> Array:
        return np.array([self.encoder.steps(values) for values in configurations])

    def _cost_per_step(self, trial: Observation) -> float | None:
        """Return what one step of a trial costs, or None if it isn't known.

        The trial counts as having the number of steps that `steps` gives it: a dimension of the
        user's own may decide how many steps it makes, and is then a dimension of the cost.
        """
        steps = self.encoder.steps(trial.params)
        if trial.cost_per_step is None:
            return None if trial.cost is None else trial.cost / steps
        return trial.cost_per_step * (trial.total_steps or steps) / steps

    def likely_to_fit(self, configurations: Configurations) -> Mask:
        """Return which configurations are likely to fit in memory, or the likeliest if none is."""
        chances = self.chances_to_fit(configurations)
        return chances >= min(LIKELY_TO_FIT, float(chances.max()))

    def chances_to_fit(self, configurations: Configurations) -> Array:
        """Return the probability that each configuration fits in a device's memory."""
        known, peaks = self._measured_memory
        rows = self.encoder.memory_rows(configurations)
        kept = covering(known)
        chances = chance_to_fit(
            rows, known[kept], list(itertools.compress(peaks, kept)), self.memory_gib
        )
        if self.estimated_gib is None or self.memory_gib is None or not len(rows):
            return chances
        estimates = _numbers(map(self.estimated_gib, configurations))
        both = np.isfinite(self._estimates_of_measured)
        by_estimate = chance_by_estimate(
            estimates,
            self._estimates_of_measured[both],
            list(itertools.compress(peaks, both)),
            self.memory_gib,
        )
        shown = set(map(tuple, known.round(9).tolist()))
        measured_so = [tuple(row) in shown for row in rows.round(9).tolist()]
        return np.where(np.isfinite(estimates) & ~np.array(measured_so), by_estimate, chances)

    @cached_property
    def _with_memory(self) -> list[Observation]:
        """The trials whose memory is known: what they needed, or that they ran out of it."""
        return [
            trial for trial in self.observations if trial.out_of_memory or trial.peak_memory_gib
        ]

    @cached_property
    def _measured_memory(self) -> tuple[Array, list[float | None]]:
        """The rows of the trials with known memory, and their peaks; None: it ran out of it."""
        peaks = [
            None if trial.out_of_memory else trial.peak_memory_gib for trial in self._with_memory
        ]
        return self.encoder.memory_rows([trial.params for trial in self._with_memory]), peaks

    @cached_property
    def _estimates_of_measured(self) -> Array:
        """The estimated memory of the trials with known memory; NaN: there is no estimate."""
        assert self.estimated_gib is not None
        return _numbers(self.estimated_gib(trial.params) for trial in self._with_memory)


def _numbers(values: Iterable[float | None]) -> Array:
    """Return the values as floats, NaN for None."""
    return np.array([math.nan if value is None else value for value in values], float)


def _kernels(values: AnyValues) -> tuple[Any, ...]:
    """Return the values that decide which kernels are compiled."""
    return tuple(values.get(name) for name in _OF_KERNELS)
