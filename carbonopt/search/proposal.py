"""Which configuration to try next: pure functions of what the trials have taught.

Where one question matters, which configuration is the cheapest that meets the target, the models are asked for joint
draws of every candidate's loss and cost; in each draw some are the answer. How often it is an answer, for each unit of
energy that trying it is expected to take, is a candidate's worth: the order in which a search for one hidden thing
finds it at the least expected cost (Stone 1975, Theory of Optimal Search, on disjoint events).

Where the whole trade-off is searched, the next trial is the one that is expected to add most to the hypervolume of the
front, the area that it dominates up to a reference point (Emmerich, Giannakoglou and Naujoks 2006, Single- and
Multiobjective Evolutionary Optimization Assisted by Gaussian Random Field Metamodels). Logarithms of cost and loss are
normal and independent, so that it has a closed form. Divided by the cost once more, the search found 88 instead of 84 %
of the front for 2 % of a grid's energy (means of three recorded tables), but less of its dear end.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.random import Generator
from optuna.distributions import BaseDistribution
from scipy.special import log_ndtr, ndtr

from carbonopt.core.arrays import Array, Indices, Mask
from carbonopt.core.dimensions import ToldAffects, affecting
from carbonopt.core.quality import Quality
from carbonopt.core.trial import Kernels
from carbonopt.search.models.collapse import chance_to_learn, highest_end
from carbonopt.search.models.costs import SettingModel, chance_to_fit, distinct
from carbonopt.search.models.curves import CurveModel, Link, Points
from carbonopt.search.models.features import Configurations, Encoder, comparable, steps_law
from carbonopt.search.models.line import straight_line_loss
from carbonopt.search.observation import Observation, Values

DRAWS = 256
MEMORY_POINTS = 120  # evaluations of all earlier studies that the model of the loss is fitted to
# Candidates whose costs differ by less are the same answer. With 0.02 searches of AlexNet's and DeBERTa's tables cost
# 1.1 times as much, others the same: a candidate that is a little cheaper was tried before far likelier ones.
TIE = 0.05
# Of a trial that misses the target, this share counts as spent before it is stopped. On recorded runs it was 0.6; with
# 0.25, 0.4 and 0.55 here, searches cost the same to 2 %.
SPENT_ON_A_MISS = 0.4
SPENT_ON_A_STOP = 0.05  # likewise, of a trial that turns out too dear, found after its first steps
ROWS = 400  # different learning curves that are drawn jointly; of more, the most promising
SPARE = 1.0  # standard deviations of one run by which a configuration's mean has to meet the target, where it has to
# The reference point lies beyond the front's ends by this share of its range, so that the ends count, too (Ishibuchi
# et al. 2018, How to Specify a Reference Point in Hypervolume Calculation).
FRONT_MARGIN = 0.1
LEAST_GAIN = 1e-4  # of the area between the ends; of candidates that are expected to add less the cheapest is next
# Above the highest end that has not collapsed, on the link: where one that has is taken to end; how far curves count.
_COLLAPSED, _BEGINNING = 0.2, 0.7
_LEARNS = 0.1  # by so much the linked loss of a training falls that has not collapsed
_LEAST_CHANCE = 1e-9  # that has a logarithm
EXPECTED_FROM = 15  # complete trials, against which the model's own word for its errors counts as much
LOWER = 4.0  # times: the rate that follows those that diverged, while no trial has taught more
_OF_KERNELS = affecting("kernels")
LIKELY_TO_FIT = 0.9  # a candidate that is less likely to fit in memory is not tried while another one is left


@dataclass(frozen=True)
class Knowledge:
    """What a study's trials have taught, by models of two things: the loss, and the cost of a step."""

    quality: Quality
    distributions: Mapping[str, BaseDistribution]
    observations: Sequence[Observation]  # of every trial that has begun
    memory_gib: float | None = None  # of a device
    effort: int = 40  # iterations of the curve model's fit
    affects: Mapping[str, ToldAffects] = field(default_factory=dict)  # see `affecting`
    earlier: Sequence[Sequence[Observation]] = ()  # of studies of the same or a similar task
    advised: Mapping[str, float] = field(default_factory=dict)  # the literature's batch and learning rate, by name

    @cached_property
    def memories(self) -> list["Knowledge"]:
        """What each earlier study has taught, in the terms of this one's space: of the trials whose values it can
        compare as many as there are points for, complete ones first."""
        told = ([trial for trial in trials if comparable(trial.params, self.distributions)] for trials in self.earlier)
        kept = (sorted(trials, key=lambda trial: not trial.complete)[: self._memory_points] for trials in told)
        return [replace(self, observations=observations, earlier=()) for observations in kept]

    @property
    def _memory_points(self) -> int:
        """Of each earlier study."""
        return max(1, MEMORY_POINTS // max(1, len(self.earlier)))

    def _encoded_memories(self) -> Iterator[tuple["Knowledge", Encoder]]:
        """Each with what makes its trials rows beside this study's."""
        for study, memory in enumerate(self.memories):
            yield memory, replace(memory.encoder, earlier=len(self.earlier), study=study)

    @cached_property
    def encoder(self) -> Encoder:
        # Before a trial of its own an epoch is taken to be as long as in an earlier study.
        every = (self.observations, *(memory.observations for memory in self.memories))
        told = next((trials for trials in every if any(trial.total_steps for trial in trials)), ())
        return Encoder(self.distributions, *steps_law(told), self.affects, len(self.earlier), advised=self.advised)

    @cached_property
    def _own_points(self) -> Points:
        return self.encoder.points([self.as_modelled(trial) for trial in self.observations])

    @cached_property
    def _shared_points(self) -> Points:
        """With those of earlier studies."""
        points = self._own_points
        for memory, encoder in self._encoded_memories():
            modelled = [memory.as_modelled(trial) for trial in memory.observations]
            points = points.joined(encoder.points(modelled, self._memory_points))
        return points

    def as_modelled(self, trial: Observation) -> Observation:
        """With the curve that the model of the loss is given: what lies far above where trainings end is taken for the
        same, whether it diverged or has only begun; and before a loss came below that, nothing counts."""
        if math.isinf(self._highest_end):
            return replace(trial, curve=() if trial.diverged else trial.curve)
        if self.collapsed(trial):
            return replace(trial, curve=((1.0, self.link.loss(self._highest_end + _COLLAPSED)),))
        ceiling = self._highest_end + _BEGINNING
        low = [share for share, loss in trial.curve if self._linked(loss) <= ceiling]
        counted = (point for point in trial.curve if not low or point[0] >= low[0])
        return replace(trial, curve=tuple((share, min(loss, self.link.loss(ceiling))) for share, loss in counted))

    def collapsed(self, trial: Observation) -> bool:
        """Whether a training has come to nothing, or goes there as far as its own curve tells: it diverged, or lies
        beyond a gap, its loss has hardly fallen, and others had learned by then."""
        if trial.diverged or not trial.curve:
            return trial.diverged
        end = trial.final_loss if trial.complete else straight_line_loss(trial.curve)
        if end is None or self._linked(end) <= self._before_gap:
            return False
        (_, first), (share, last) = trial.curve[0], trial.curve[-1]
        if len(trial.curve) == 1 and not self._most_before_gap:
            return False  # told by its end alone: what most have come to is no exception
        fell = len(trial.curve) > 1 and self._linked(first) - self._linked(last) > _LEARNS
        return not fell and self._examples(trial, share) >= self._learned_after

    def _examples(self, trial: Observation, share: float) -> float:
        return share * self.encoder.steps(trial.params) * float(trial.params.get("global_batch_size", 1))

    @cached_property
    def _learned_after(self) -> float:
        """The fewest examples after which a trial's loss was on this side of the gap."""
        points = (
            (trial, share)
            for trial in self.observations
            for share, loss in trial.curve
            if self._linked(loss) <= self._before_gap
        )
        return min((self._examples(trial, share) for trial, share in points), default=math.inf)

    @cached_property
    def _before_gap(self) -> float:
        """Linked, of the complete trials; of running and stopped ones while none is complete."""
        return highest_end([end for _, end in self._linked_ends])

    @cached_property
    def _most_before_gap(self) -> bool:
        ends = [end <= self._before_gap for _, end in self._linked_ends]
        return 2 * sum(ends) >= len(ends)

    @cached_property
    def _highest_end(self) -> float:
        """Likewise, of those that have not collapsed."""
        return max((end for trial, end in self._linked_ends if not self.collapsed(trial)), default=math.inf)

    @cached_property
    def _linked_ends(self) -> list[tuple[Observation, float]]:
        told = [trial for trial in self.observations if trial.curve and not trial.diverged]
        ended = [trial for trial in told if trial.complete] or told
        return [(trial, self._linked(trial.curve[-1][1])) for trial in ended]

    def chances_to_learn(self, rows: Array) -> Array:
        """Of the curves' ends, (n, columns), to be those of trainings that have not collapsed."""
        told = [trial for trial in self.observations if trial.diverged or trial.curve]
        known = [self.encoder.curve_rows([trial.params for trial in told])] if told else []
        learned = [not self.collapsed(trial) for trial in told]
        for memory, encoder in self._encoded_memories():
            told = [trial for trial in memory.observations if trial.diverged or trial.curve]
            if told:
                known.append(encoder.curve_rows([trial.params for trial in told]))
                learned += [not memory.collapsed(trial) for trial in told]
        if not known:
            return np.ones(len(rows))
        return chance_to_learn(rows, np.concatenate(known), np.array(learned, dtype=bool))

    @cached_property
    def curves(self) -> CurveModel:
        fitted = partial(
            CurveModel, link=self.link, centre=self.encoder.centre(), effort=self.effort, earlier=len(self.earlier)
        )
        shared, own = fitted(self._shared_points), set(self._own_points.trial.tolist())
        if not self.earlier or not own:
            return shared
        # What misleads foretells this study's trials worse than they do each other, or than a first one does its end.
        alone = fitted(self._own_points)
        return shared if shared.foretells(own) >= alone.foretells(own) else alone

    @cached_property
    def calibration(self) -> float:
        """How many times as far off as the model of the loss expects its forecasts are: root mean square, in standard
        deviations, of how far each complete trial ended from what all others foretell, those that collapsed left out.
        Near 1 while few have told."""
        ended = [trial for trial in self.observations if trial.complete and trial.curve and not self.collapsed(trial)]
        own = [self.curves.points.trial == trial.number for trial in ended]
        squares = [self.curves.surprise(mask) ** 2 for mask in own if mask.any() and not mask.all()]
        return math.sqrt((EXPECTED_FROM + sum(squares)) / (EXPECTED_FROM + len(squares)))

    @property
    def begins_near(self) -> Mapping[str, float]:
        """What is advised for the trials before any has a loss; where some diverged, a rate below all of theirs."""
        diverged = (trial.params for trial in self.observations if trial.diverged)
        rates = [float(params["learning_rate"]) for params in diverged if "learning_rate" in params]
        if not rates:
            return self.encoder.advice
        return {**self.encoder.advice, "learning_rate": min(rates) / LOWER}

    @cached_property
    def link(self) -> Link:
        losses = [loss for trial in self.observations for _, loss in trial.curve]
        if len(set(losses)) < 2:  # by those of earlier studies, whose scale may be another
            losses = [loss for trial in itertools.chain(*self.earlier) for _, loss in trial.curve]
        return Link.of(self.quality, losses, min((trial.examples for trial in self.observations), default=math.inf))

    @cached_property
    def step_costs(self) -> SettingModel:
        costs = [(trial, cost) for trial in self.observations if (cost := self._cost_per_step(trial))]
        rows = self.encoder.system_rows([trial.params for trial, _ in costs])
        waits = np.array([trial.wait_fraction for trial, _ in costs])
        before = next((memory.step_costs for memory in reversed(self.memories) if memory.step_costs.known), None)
        return SettingModel(rows, np.array([cost for _, cost in costs]), waits, before)

    def _linked(self, loss: float) -> float:
        return float(self.link.linked(loss))

    def limit(self, target_loss: float, *, by_mean: bool) -> float:
        """What the linked loss must not pass: of one run, or of a configuration's mean over all seeds."""
        target = self._linked(target_loss)
        return target - SPARE * self.curves.noise if by_mean else target

    def meeting(self, target_loss: float, *, by_mean: bool) -> list[Observation]:
        """The complete trials of known cost that meet the target; by mean only those whose mean is expected to."""
        met = [trial for trial, loss, _ in self.ends if loss <= target_loss]
        if not by_mean or not met:
            return met
        expected, _ = self.curves.predict(self.encoder.curve_rows([trial.params for trial in met]))
        return list(itertools.compress(met, expected <= self.limit(target_loss, by_mean=True)))

    @property
    def ends(self) -> list[tuple[Observation, float, float]]:
        """The complete trials of known cost, each with its final loss and that cost."""
        known = ((trial, trial.final_loss, trial.cost) for trial in self.observations)
        return [(trial, loss, cost) for trial, loss, cost in known if loss is not None and cost is not None]

    def have_ended(self, rows: Array) -> Mask:
        """Which of the curves' ends, (n, columns), complete trials have shown."""
        ended = self.encoder.curve_rows([trial.params for trial, *_ in self.ends])
        shown = {tuple(row) for row in ended.round(9).tolist()}
        return np.array([tuple(row) in shown for row in rows.round(9).tolist()], dtype=bool)

    @property
    def overhead_cost(self) -> float:
        """What a trial costs beside its training, the mean of those that ended."""
        known = [trial.overhead_cost for trial in self.observations if trial.overhead_cost is not None]
        return sum(known) / len(known) if known else 0.0

    def run_costs(self, configurations: Configurations, step_costs: Array) -> Array:
        """Of whole trainings, by what a step of each costs, (n,) or (n, draws), in the same shape: steps, and what a
        first step takes beyond a mean one in trials whose kernels had been compiled before."""
        warm = [trial for trial in self.observations if trial.kernels is not Kernels.COMPILED]
        return np.asarray((self.steps(configurations) * step_costs.T + _first_costs(warm, configurations)).T)

    def compile_costs(self, configurations: Configurations) -> Array:
        """What is expected to be spent before a trial on compiling what no trial has compiled yet."""
        cold = [trial for trial in self.observations if trial.kernels is Kernels.COMPILED]
        there = {_kernels(trial.params) for trial in self.observations if trial.kernels is not None}
        return np.where(
            [_kernels(values) in there for values in configurations], 0.0, _first_costs(cold, configurations)
        )

    def steps(self, configurations: Configurations) -> Array:
        return np.array([self.encoder.steps(values) for values in configurations])

    def _cost_per_step(self, trial: Observation) -> float | None:
        """Of a trial that says its whole cost but not its steps, by the steps that `steps` takes it to have."""
        if trial.cost_per_step is None and trial.cost is not None:
            return float(trial.cost / self.steps([trial.params])[0])
        return trial.cost_per_step

    def likely_to_fit(self, configurations: Configurations) -> Mask:
        """Which may be tried: those that are likely to fit in memory, or the likeliest where none is."""
        chances = self.chances_to_fit(configurations)
        return chances >= min(LIKELY_TO_FIT, float(chances.max()))

    def chances_to_fit(self, configurations: Configurations) -> Array:
        """In a device's memory."""
        told = [trial for trial in self.observations if trial.out_of_memory or trial.peak_memory_gib]
        peaks = [None if trial.out_of_memory else trial.peak_memory_gib for trial in told]
        known = self.encoder.memory_rows([trial.params for trial in told])
        return chance_to_fit(self.encoder.memory_rows(configurations), known, peaks, self.memory_gib)


def _first_costs(trials: Iterable[Observation], configurations: Configurations) -> Array:
    """Of each configuration the mean of the trials that compile as it does, or don't; 0 where none has told."""
    told = defaultdict[tuple[Any, ...], list[float]](list)
    for trial in trials:
        if trial.first_cost is not None:
            told[_compiling(trial.params)].append(trial.first_cost)
    means = {kind: sum(costs) / len(costs) for kind, costs in told.items()}
    return np.array([means.get(_compiling(values), 0.0) for values in configurations])


def _compiling(values: Values) -> tuple[Any, ...]:
    """What decides whether anything is compiled, and how much."""
    return tuple(values.get(name) for name in ("torch_compile", "attention_implementation", "output_layer"))


def _kernels(values: Values) -> tuple[Any, ...]:
    """What decides which kernels are compiled."""
    return tuple(values.get(name) for name in _OF_KERNELS)


@dataclass(frozen=True)
class Proposal:
    """The next trial. Costs are in the study's unit."""

    index: int  # of the candidate
    expected_cost: float  # of trying it
    expected_gain: float  # of one later run of the final recommendation; infinite while nothing meets the target
    chance: float  # probability that it is the cheapest candidate that meets the target, those as cheap sharing it
    reachable: float  # probability that any candidate meets the target, and more cheaply than the best


def first(candidates: Configurations, rng: Generator, advised: Mapping[str, float]) -> int:
    """The trial before anything is known: as few epochs as there are, what is advised, the middle of the rest."""
    distance = 0.1 * rng.random(len(candidates))
    for name in sorted({name for values in candidates for name in values}):
        column = [values[name] for values in candidates]
        if name in advised:
            apart = np.abs(np.log(np.array(column, dtype=float) / advised[name]))
            distance += (apart / max(1e-9, apart.max())) ** 2
        else:
            ranks = _ranks(column)
            distance += 10 * ranks if name == "epochs" else (ranks - 0.5) ** 2
    return int(np.argmin(distance))


def propose(
    candidates: Configurations,
    knowledge: Knowledge,
    target_loss: float,
    best_cost: float,
    rng: Generator,
    *,
    by_mean: bool,
) -> Proposal | None:
    """The candidate most worth its energy; None if none can be cheaper than the best.

    Args:
        candidates: configurations that were not run, each naming every dimension that either model sees.
        target_loss: of the target (`Quality.loss_of`).
        best_cost: of the cheapest complete trial that meets the target; infinite while there is none.
        by_mean: the answer is a configuration whose mean over all seeds meets the target, not a lucky run; needed of an
            infinite space, where the search would go from lucky neighbour to lucky neighbour of what just misses.
    """
    limit = knowledge.limit(target_loss, by_mean=by_mean)
    rows, which = distinct(knowledge.encoder.curve_rows(candidates))
    mean, spread = knowledge.curves.predict(rows)
    learns = knowledge.chances_to_learn(rows)
    log_meets = log_ndtr((limit - mean) / (knowledge.calibration * spread)) + np.log(np.maximum(learns, _LEAST_CHANCE))
    promising = np.arange(len(candidates))
    if len(rows) > ROWS:
        kept = _promising(candidates, which, log_meets, knowledge)
        promising = np.flatnonzero(np.isin(which, kept))
        candidates = [candidates[index] for index in promising.tolist()]
        which = np.searchsorted(kept, which[promising])
        rows, mean, learns, log_meets = rows[kept], mean[kept], learns[kept], log_meets[kept]
    meets = np.exp(log_meets)[which]
    drawn = knowledge.curves.sample(rows, DRAWS, rng, means=by_mean)
    losses = mean[:, None] + knowledge.calibration * (drawn - mean[:, None])
    # One draw for all: what is less likely to learn does so only where all likelier ones do.
    losses = np.where(learns.max() * rng.random(DRAWS) < learns[:, None], losses, np.inf)
    step_costs = np.exp(knowledge.step_costs.sample(knowledge.encoder.system_rows(candidates), DRAWS, rng))
    costs = knowledge.run_costs(candidates, step_costs)
    allowed = knowledge.likely_to_fit(candidates)
    useful = (costs < best_cost * 0.999) & allowed[:, None]
    if not useful.any():
        return None
    price = np.where(useful & (losses <= limit)[which], costs, np.inf)
    cheapest = price.min(0)
    reached = np.isfinite(cheapest)
    answers = (price <= cheapest * (1 + TIE)) & reached
    # Those as cheap are answers, too. Once something meets the target, one is worth what it saves.
    often = (answers * (1 - costs / best_cost)).sum(1)
    if not reached.any():
        # No draw meets the target: what comes closest is what there is to learn from, the cheapest of those.
        often += _how_often_closest(losses, knowledge.have_ended(rows), costs, which, allowed)
    mean_cost, cheaper = costs.mean(1), (costs < best_cost).mean(1)
    trying = mean_cost * (meets + (1 - meets) * SPENT_ON_A_MISS)
    beside = knowledge.overhead_cost + knowledge.compile_costs(candidates)
    spend = cheaper * trying + (1 - cheaper) * SPENT_ON_A_STOP * mean_cost + beside
    worth = np.where(allowed & (cheaper > 0), (often / DRAWS + 1e-6 * meets * cheaper) / spend, -1.0)
    index = int(worth.argmax())
    gain = float((best_cost - cheapest[reached]).sum() / DRAWS) if math.isfinite(best_cost) else math.inf
    chance = float((answers[index] / np.maximum(1, answers.sum(0))).mean())
    reachable = float(reached.mean())
    return Proposal(int(promising[index]), float(spend[index]), gain, chance, reachable)


def _how_often_closest(losses: Array, shown: Mask, costs: Array, which: Indices, allowed: Mask) -> Array:
    """In how many draws each candidate is the cheapest one with the curve of the lowest loss, (candidates,); of curves
    whose ends were not `shown` by trials of other settings that leave the quality alone, where there are some."""
    if not shown.all():
        losses = np.where(shown[:, None], np.inf, losses)
    often = np.zeros(len(which))
    for draw, closest in enumerate(losses.argmin(0)):
        near = np.flatnonzero((which == closest) & allowed)
        if len(near):
            often[near[costs[near, draw].argmin()]] += 1.0
    return often


def _promising(candidates: Configurations, which: Indices, log_meets: Array, knowledge: Knowledge) -> Indices:
    """The ROWS curves, rising, that are likeliest to meet the target for their steps, by the one that each of the
    candidates has and the logarithm of each one's chance."""
    system, _ = knowledge.step_costs.predict(knowledge.encoder.system_rows(candidates))
    costs = np.full(len(log_meets), np.inf)
    np.minimum.at(costs, which, np.log(knowledge.run_costs(candidates, np.exp(system))))
    return np.sort(np.argsort(costs - log_meets)[:ROWS])


def _ranks(column: Sequence[Any]) -> Array:
    """Between 0 and 1, equal for equal values; words in the order of the column."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in column)
    values = sorted(set(column)) if numbers else list(dict.fromkeys(column))
    place = {value: (index + 0.5) / len(values) for index, value in enumerate(values)}
    return np.array([place[value] for value in column])


def propose_for_front(candidates: Configurations, knowledge: Knowledge) -> int:
    """Index of the candidate that is expected to add most to the front of the complete trials; see `propose`."""
    allowed = np.flatnonzero(knowledge.likely_to_fit(candidates))
    candidates = [candidates[index] for index in allowed.tolist()]
    rows = knowledge.encoder.curve_rows(candidates)
    loss, loss_spread = knowledge.curves.predict(rows)
    step_cost, cost_spread = knowledge.step_costs.predict(knowledge.encoder.system_rows(candidates))
    cost = np.log(knowledge.run_costs(candidates, np.exp(step_cost)))
    mean, spread = np.column_stack([cost, loss]), np.column_stack([cost_spread, loss_spread])
    ends = _points(knowledge)
    known = ends[front(ends)]
    expected = np.concatenate([known, mean])
    expected = expected[front(expected)]
    low, high = expected.min(0), expected.max(0)
    span = np.where(high > low, high - low, 1.0)
    gain = expected_improvement(mean / span, spread / span, known / span, high / span + FRONT_MARGIN)
    gain = gain * knowledge.chances_to_learn(rows)
    gain[gain < LEAST_GAIN] = 0.0
    return int(allowed[np.lexsort((cost, -gain))[0]])  # the cheapest of those that are equal


def on_front(knowledge: Knowledge) -> list[Observation]:
    """The complete trials of known cost that no other one dominates, by rising cost."""
    return [knowledge.ends[index][0] for index in front(_points(knowledge))]


def front(points: Array) -> Indices:
    """Indices of the points (n, 2) that none dominates, by rising first coordinate; of equal points, one."""
    order = np.lexsort((points[:, 1], points[:, 0]))
    seconds = points[order, 1]
    before = np.minimum.accumulate(np.append(np.inf, seconds))[:-1]
    return np.asarray(order[seconds < before])


def hypervolume(front: Array, reference: Array) -> float:
    """The area that a front, (k, 2) by rising first coordinate, dominates up to a reference point."""
    inside = front[(front < reference).all(1)]
    widths = np.diff(inside[:, 0], append=reference[0])
    return float(widths @ (reference[1] - inside[:, 1]))


def expected_improvement(mean: Array, spread: Array, front: Array, reference: Array) -> Array:
    """By how much normal points, (n, 2), are expected to raise a front's hypervolume, (n,).

    What a point adds lies below the front's steps, (k, 2) by rising first coordinate: of each, the part of its width
    that is dearer than the point, times the height from the point up to the step.
    """
    inside = front[(front < reference).all(1)]
    edges = np.append(inside[:, 0], reference[0])
    heights = np.append(reference[1], inside[:, 1])
    right_of = _expected_excess(edges, mean[:, 0], spread[:, 0])
    widths = np.diff(right_of, prepend=0.0, axis=1)
    return np.asarray((widths * _expected_excess(heights, mean[:, 1], spread[:, 1])).sum(1))


def _expected_excess(limits: Array, mean: Array, spread: Array) -> Array:
    """Mean of max(0, limit - X) for normal X, (points, limits)."""
    apart = limits[None, :] - mean[:, None]
    scale = np.maximum(spread, 1e-9)[:, None]
    z = apart / scale
    return np.asarray(np.maximum(0.0, scale * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) + apart * ndtr(z)))


def _points(knowledge: Knowledge) -> Array:
    """The logarithm of the cost and the linked final loss of the complete trials, (n, 2)."""
    losses, costs = np.array([end[1:] for end in knowledge.ends], dtype=float).reshape(-1, 2).T
    logarithms = np.log(np.maximum(costs, np.finfo(float).tiny))
    return np.column_stack([logarithms, knowledge.link.linked(losses)])
