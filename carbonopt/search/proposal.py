"""Which configuration to try next: pure functions of what the trials have taught.

Only one question matters: which configuration is the cheapest that meets the target. The models are asked for joint
draws of every candidate's loss and cost; in each draw one candidate is the answer. How often it is the answer, for
each unit of energy that trying it is expected to take, is a candidate's worth: the order in which a search for one
hidden thing finds it at the least expected cost (Stone 1975, Theory of Optimal Search, on disjoint events).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from scipy.special import log_ndtr, ndtr

from carbonopt.core.arrays import Array, Indices, Mask
from carbonopt.core.quality import Quality
from carbonopt.search.models.costs import SettingModel, distinct
from carbonopt.search.models.curves import CurveModel, Points
from carbonopt.search.models.features import Encoder, sequences_per_epoch
from carbonopt.search.models.memory import chance_to_fit
from carbonopt.search.observation import Observation

DRAWS = 256
# Candidates whose costs differ by less are the same answer; the energy of identical runs differs by as much.
TIE = 0.02
# Of a trial that misses the target, this share counts as spent before it is stopped. On recorded runs it was 0.6; with
# 0.25, 0.4 and 0.55 here, searches cost the same to 2 %.
SPENT_ON_A_MISS = 0.4
# Of a trial that turns out too dear, found after its first steps.
SPENT_ON_A_PROBE = 0.05
# So many different learning curves are drawn jointly; of more, the most promising.
ROWS = 400
# Where a configuration's mean has to meet the target, by how many standard deviations of one run.
SPARE = 1.0
# A candidate that is less likely to fit in memory is not tried while another one is left.
LIKELY_TO_FIT = 0.9


@dataclass(frozen=True)
class Knowledge:
    """What a study's trials have taught, by models of two things: the loss, and the cost of a step.

    Args:
        observations: of every trial that has begun.
        effort: iterations of the curve model's fit.
    """

    quality: Quality
    distributions: Mapping[str, BaseDistribution]
    observations: Sequence[Observation]
    memory_gib: float | None = None  # of a device
    effort: int = 40

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.distributions)

    @cached_property
    def sequences(self) -> float:
        """In an epoch; before any trial has told, only ratios between configurations are known."""
        return sequences_per_epoch(self.observations) or 1.0

    @cached_property
    def points(self) -> Points:
        return self.encoder.points(self.observations, self.sequences)

    @cached_property
    def curves(self) -> CurveModel:
        return CurveModel(self.points, self.quality, self.encoder.centre(), effort=self.effort)

    @cached_property
    def step_costs(self) -> SettingModel:
        measured = [(one.params, cost) for one in self.observations if (cost := self._cost_per_step(one))]
        rows = self.encoder.system_rows([params for params, _ in measured])
        return SettingModel(rows, np.array([cost for _, cost in measured]))

    def limit(self, target_loss: float, *, by_mean: bool) -> float:
        """What the linked loss must not pass: of one run, or of a configuration's mean over all seeds."""
        target = self.curves.linked(target_loss)
        return target - SPARE * self.curves.noise if by_mean else target

    def meeting(self, target_loss: float, *, by_mean: bool) -> list[Observation]:
        """The complete trials of known cost that meet the target; by mean only those whose mean is expected to."""
        met = [
            one
            for one in self.observations
            if one.cost is not None and one.final_loss is not None and one.final_loss <= target_loss
        ]
        if not by_mean or not met:
            return met
        expected, _ = self.curves.predict(self.encoder.curve_rows([one.params for one in met], self.sequences))
        limit = self.limit(target_loss, by_mean=True)
        return [one for one, mean in zip(met, expected, strict=True) if mean <= limit]

    @property
    def overhead_cost(self) -> float:
        """What a trial costs beside its training, the mean of those that ended."""
        known = [one.overhead_cost for one in self.observations if one.overhead_cost is not None]
        return sum(known) / len(known) if known else 0.0

    def steps(self, configurations: Sequence[Mapping[str, Any]]) -> Array:
        batches = np.array([values.get("global_batch_size", 1) for values in configurations], dtype=float)
        epochs = np.array([values.get("epochs", 1) for values in configurations], dtype=float)
        steps: Array = epochs * self.sequences / batches
        return steps

    def _cost_per_step(self, one: Observation) -> float | None:
        """Of a trial that says its whole cost but not its steps, by the steps that `steps` takes it to have."""
        if one.cost_per_step is None and one.cost is not None:
            return float(one.cost / self.steps([one.params])[0])
        return one.cost_per_step

    def chance_to_fit(self, configurations: Sequence[Mapping[str, Any]]) -> Array:
        told = [one for one in self.observations if one.out_of_memory or one.peak_memory_gib]
        peaks = [None if one.out_of_memory else one.peak_memory_gib for one in told]
        known = self.encoder.memory_rows([one.params for one in told])
        return chance_to_fit(self.encoder.memory_rows(configurations), known, peaks, self.memory_gib)

    def likely_to_fit(self, configurations: Sequence[Mapping[str, Any]]) -> Mask:
        """Which may be tried: those that are likely to fit in memory, or the likeliest where none is."""
        chances = self.chance_to_fit(configurations)
        return chances >= min(LIKELY_TO_FIT, float(chances.max()))


@dataclass(frozen=True)
class Proposal:
    """The next trial. Costs are in the study's unit."""

    index: int  # of the candidate
    expected_cost: float  # of trying it
    expected_gain: float  # of one later run of the final recommendation; infinite while nothing meets the target
    reachable: float  # probability that any candidate meets the target, and more cheaply than the best


def first(candidates: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> int:
    """The trial before anything is known: as few epochs as there are, the middle of everything else."""
    names = sorted({name for values in candidates for name in values})
    distance = 0.1 * rng.random(len(candidates))
    for name in names:
        column = [values[name] for values in candidates]
        ranks = _ranks(column)
        distance += 10 * ranks if name == "epochs" else (ranks - 0.5) ** 2
    return int(np.argmin(distance))


def propose(
    candidates: Sequence[Mapping[str, Any]],
    knowledge: Knowledge,
    target_loss: float,
    best_cost: float,
    rng: np.random.Generator,
    *,
    by_mean: bool,
) -> Proposal | None:
    """The candidate most worth its energy.

    Args:
        candidates: configurations that were not run, each naming every dimension that either model sees.
        target_loss: of the target (`Quality.loss_of`).
        best_cost: of the cheapest complete trial that meets the target; infinite while there is none.
        by_mean: the answer is a configuration whose mean over all seeds meets the target, not a lucky run. Of an
            infinite space, too: it has lucky runs without end, and the search would go from neighbour to neighbour of a
            configuration that misses by less than the noise.

    Returns:
        None if no candidate can be cheaper than the best.
    """
    limit = knowledge.limit(target_loss, by_mean=by_mean)
    promising = _promising(candidates, knowledge, limit)
    candidates = [candidates[index] for index in promising]
    rows, which = distinct(knowledge.encoder.curve_rows(candidates, knowledge.sequences))
    mean, spread = knowledge.curves.predict(rows)
    meets = ndtr((limit - mean) / spread)[which]
    losses = knowledge.curves.sample(rows, DRAWS, rng, means=by_mean)
    system = knowledge.encoder.system_rows(candidates)
    steps = knowledge.steps(candidates)
    costs = steps[:, None] * np.exp(knowledge.step_costs.sample(system, DRAWS, rng))
    allowed = knowledge.likely_to_fit(candidates)
    useful = (costs < best_cost * 0.999) & allowed[:, None]
    if not useful.any():
        return None
    price = np.where(useful & (losses <= limit)[which], costs, np.inf)
    cheapest = price.min(0)
    found = np.isfinite(cheapest)
    answers = (price <= cheapest * (1 + TIE)) & found
    # Once something meets the target, an answer is worth what it saves.
    value = np.where(found, 1 - np.where(found, cheapest, 0.0) / best_cost, 0.0)
    often = (answers / np.maximum(1, answers.sum(0)) * value).sum(1)
    if not found.any():
        # No draw meets the target: what comes closest is what there is to learn from, the cheapest of those.
        closest = losses.argmin(0)
        for draw in range(DRAWS):
            near = np.flatnonzero((which == closest[draw]) & allowed)
            if len(near):
                often[near[costs[near, draw].argmin()]] += 1.0
    mean_cost = costs.mean(1)
    cheaper = (costs < best_cost).mean(1)
    trying = mean_cost * (meets + (1 - meets) * SPENT_ON_A_MISS)
    spend = cheaper * trying + (1 - cheaper) * SPENT_ON_A_PROBE * mean_cost + knowledge.overhead_cost
    worth = np.where(allowed & (cheaper > 0), (often / DRAWS + 1e-6 * meets * cheaper) / spend, -1.0)
    index = int(worth.argmax())
    saved = best_cost * value if math.isfinite(best_cost) else np.array(math.inf)
    gain = float(saved.mean())
    return Proposal(int(promising[index]), float(spend[index]), gain, float(found.mean()))


def _promising(candidates: Sequence[Mapping[str, Any]], knowledge: Knowledge, limit: float) -> Indices:
    """Indices of the candidates with one of the ROWS curves that are likeliest to meet the target for their steps."""
    rows, which = distinct(knowledge.encoder.curve_rows(candidates, knowledge.sequences))
    if len(rows) <= ROWS:
        return np.arange(len(candidates))
    mean, spread = knowledge.curves.predict(rows)
    system, _ = knowledge.step_costs.predict(knowledge.encoder.system_rows(candidates))
    costs = np.full(len(rows), np.inf)
    np.minimum.at(costs, which, np.log(knowledge.steps(candidates)) + system)
    kept = np.argsort(costs - log_ndtr((limit - mean) / spread))[:ROWS]
    return np.flatnonzero(np.isin(which, kept))


def _ranks(column: Sequence[Any]) -> Array:
    """Between 0 and 1, equal for equal values; words in the order of the column."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in column)
    values = sorted(set(column)) if numbers else list(dict.fromkeys(column))
    place = {value: (index + 0.5) / len(values) for index, value in enumerate(values)}
    return np.array([place[value] for value in column])
