"""Choose the next configuration to try where the cheapest that meets the target is searched.

The models draw the losses and costs of all candidates jointly. In each draw, the answer is the
cheapest candidate that meets the target; others that cost about the same are answers, too. A
candidate's worth is how often it is an answer, per unit of the energy that trying it is expected to
take. This is the order in which a search for one hidden thing finds it at the least
expected cost (Stone 1975, Theory of Optimal Search, on disjoint events).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from scipy.special import log_ndtr

from carbonopt.core.arrays import Array, Indices, Mask
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.costs import distinct
from carbonopt.search.models.features import Configurations
from carbonopt.search.models.subset import MOST_FITTED
from carbonopt.search.observation import Observation

DRAWS = 256

# Candidates whose costs differ by a smaller share count as the same answer. With 0.02, searches of
# AlexNet's and DeBERTa's tables cost 1.1 times as much, others the same: a candidate that is a
# little cheaper was tried before far likelier ones.
TIE = 0.05

# A search ends when no candidate that is likely to fit in memory has at least this chance to save
# more than this share of the best trial's energy. Two measurements of one configuration may differ
# by that share.
LEAST_CHANCE, LEAST_SAVING = 0.01, 0.02
DRAWS_TO_END = 1024  # draws from which the end of a search is decided

# A candidate that saves a smaller share of the best trial's energy does not count as cheaper. With
# LEAST_SAVING here, searches of DeBERTa's table passed over the candidates in between, and cost 1.4
# times as much where 3 % of its runs meet the target.
_NO_SAVING = 0.001

# Expected share of a trial's energy that is spent before it is pruned for missing the target. On
# recorded runs it was 0.6; with 0.25, 0.4 and 0.55 here, searches cost the same to 2 %.
SPENT_ON_A_MISS = 0.4

# Expected share that is spent before a trial is stopped as too expensive, after its first steps.
SPENT_ON_A_STOP = 0.05

# Further standard deviations of one run by which a configuration that takes the place of a repeat
# has to meet the target. With 0, 12 of 16 made-up studies (benchmarks/search/confirmed.py)
# confirmed one that is cheaper than the start; with 1, 15 did (no run was kept for the start).
SPARE_TO_REPLACE = 1.0
ROWS = 400  # learning curves that are drawn jointly; if there are more, the most promising ones
_LEAST_CHANCE = 1e-9  # the smallest chance whose logarithm is taken


@dataclass(frozen=True)
class Proposal:
    """The next trial. Costs are in the study's unit."""

    index: int  # position among the candidates
    # The cost and the expected saving of the candidate that saves most for what it costs to try.
    # The saving is that of one later run of the recommendation, if the search ends after this
    # trial. While nothing meets the target, it is infinite, and the candidate is the proposed one.
    expected_cost: float
    expected_gain: float
    # probability that it is the cheapest candidate that meets the target; equally cheap ones share
    # it
    chance: float
    # probability that any candidate meets the target, and more cheaply than the best trial
    chance_of_any: float


def first(candidates: Configurations, rng: Generator, advised: Mapping[str, float]) -> int:
    """Return the index of the candidate to try before anything is known.

    It has as few epochs as possible, values close to the advised ones, and otherwise values from
    the middle of each dimension.
    """
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


@dataclass(frozen=True)
class _Curves:
    """The learning curves of candidates. Those that differ only in their costs share a curve."""

    rows: Array  # of the curve model, (curves, columns)
    which: Indices  # each candidate's curve, (candidates,)
    mean: Array  # the expected final loss, (curves,)
    learns: Array  # the chance that the training learns at all, (curves,)
    log_meets: Array  # the logarithm of the chance to meet the target, (curves,)

    @classmethod
    def of(cls, candidates: Configurations, knowledge: Knowledge, limit: float) -> "_Curves":
        """Predict the curves; `limit` is the loss that meets the target (`Knowledge.limit`)."""
        rows, which = distinct(knowledge.encoder.curve_rows(candidates))
        mean, spread = knowledge.curves.predict(rows)
        learns = knowledge.chances_to_learn(rows)
        log_meets = log_ndtr((limit - mean) / (knowledge.calibration * spread)) + np.log(
            np.maximum(learns, _LEAST_CHANCE)
        )
        return cls(rows, which, mean, learns, log_meets)

    def only(self, kept: Indices, candidates: Indices) -> "_Curves":
        """Return the `kept` curves, sorted, for these of the candidates, which all have one."""
        return _Curves(
            self.rows[kept],
            np.searchsorted(kept, self.which[candidates]),
            self.mean[kept],
            self.learns[kept],
            self.log_meets[kept],
        )

    def draw_losses(self, knowledge: Knowledge, rng: Generator, *, by_mean: bool) -> Array:
        """Draw the final losses jointly, (curves, DRAWS); infinite where the training fails."""
        drawn = knowledge.curves.sample(self.rows, DRAWS, rng, means=by_mean)
        losses = self.mean[:, None] + knowledge.calibration * (drawn - self.mean[:, None])
        # All share one random number in a draw: if a candidate learns, so does each likelier one.
        learnt = self.learns.max() * rng.random(DRAWS) < self.learns[:, None]
        return np.where(learnt, losses, np.inf)


@dataclass(frozen=True)
class _Contenders:
    """The candidates that may be the answer, with what is expected of them."""

    left: Indices  # their places among all candidates, (k,)
    candidates: Configurations
    curves: _Curves
    costs: Array  # draws of the costs of whole runs, (k, DRAWS)
    best_cost: Array  # draws of the cost of the best trial, (DRAWS,); see `_may_save`

    @classmethod
    def of(
        cls,
        candidates: Configurations,
        knowledge: Knowledge,
        limit: float,
        meeting: Sequence[Observation],
        rng: Generator,
    ) -> "_Contenders | None":
        """Choose them by `_may_save`, and of more than ROWS curves the promising ones."""
        left, costs, best_cost = _may_save(candidates, knowledge, meeting, rng)
        if not len(left):
            return None
        candidates = [candidates[index] for index in left.tolist()]
        curves = _Curves.of(candidates, knowledge, limit)
        if len(curves.rows) > ROWS:
            kept = _promising(candidates, curves.which, curves.log_meets, knowledge)
            promising = np.flatnonzero(np.isin(curves.which, kept))
            left, costs = left[promising], costs[promising]
            candidates = [candidates[index] for index in promising.tolist()]
            curves = curves.only(kept, promising)
        return cls(left, candidates, curves, costs, best_cost)


def propose(
    candidates: Configurations,
    knowledge: Knowledge,
    target_loss: float,
    meeting: Sequence[Observation],
    rng: Generator,
    *,
    by_mean: bool,
    replaces_repeat: bool = False,
) -> Proposal | None:
    """Propose the candidate that is most worth its energy, or None if none is likely to be cheaper.

    None means that no candidate that is likely to fit in memory has a chance of LEAST_CHANCE to
    save LEAST_SAVING of the best trial's energy.

    Args:
        candidates: configurations that were not run, each naming every dimension that either model
            sees.
        target_loss: the loss at the target (`Quality.loss_of`).
        meeting: complete trials that meet the target, the cheapest of which is to be beaten. Its
            cost is drawn with those of the candidates, so that the model compares its estimates of
            both, not its estimate of one with a measurement of the other.
        by_mean: whether the answer is a configuration whose mean over all seeds meets the target,
            not one lucky run. An infinite space needs this: otherwise the search would go from
            lucky neighbour to lucky neighbour of a configuration that just misses.
        replaces_repeat: whether the candidate takes the place of a repeat that would confirm
            another one. Runs are then scarcer than energy: the candidate has to meet the target by
            a wider margin, and the one with the highest expected saving is proposed, whatever it
            costs to try.
    """
    limit = knowledge.limit(target_loss, by_mean=by_mean)
    if replaces_repeat:
        limit -= SPARE_TO_REPLACE * knowledge.curves.noise
    contenders = _Contenders.of(candidates, knowledge, limit, meeting, rng)
    if contenders is None:
        return None
    curves, costs, best_cost = contenders.curves, contenders.costs, contenders.best_cost
    losses = curves.draw_losses(knowledge, rng, by_mean=by_mean)
    saves = costs < best_cost * (1 - _NO_SAVING)
    price = np.where(saves & (losses <= limit)[curves.which], costs, np.inf)
    answers = _answers(price)
    meets = np.exp(curves.log_meets)[curves.which]
    cheaper = np.maximum(1 / DRAWS, saves.mean(1))
    extra = knowledge.overhead_cost + knowledge.compile_costs(contenders.candidates)
    spend = _expected_costs(costs, meets, cheaper) + extra
    # Once a trial meets the target, an answer is worth what it saves.
    saving = 1 - costs / best_cost
    often = (answers * saving).sum(1)
    if not answers.any():
        often += _how_often_closest(losses, knowledge.have_ended(curves.rows), costs, curves.which)
    worth = (often / DRAWS + 1e-6 * meets * cheaper) / spend
    if replaces_repeat and meeting:
        expected_saving = (np.isfinite(price) * saving).mean(1)
        worth = expected_saving + 1e-6 * worth / worth.max()
    index = int(worth.argmax())
    cost, gain = float(spend[index]), math.inf
    if meeting:
        cost, gain = _most_saving(np.where(np.isfinite(price), best_cost - costs, 0.0), spend)
    chance = float((answers[index] / np.maximum(1, answers.sum(0))).mean())
    return Proposal(int(contenders.left[index]), cost, gain, chance, float(answers.any(0).mean()))


def _answers(price: Array) -> Mask:
    """Return which candidates are an answer in each draw, (candidates, DRAWS).

    They are the cheapest one and those that cost about the same.

    Args:
        price: draws of the costs, infinite where a candidate can't be the answer.
    """
    cheapest = price.min(0)
    return np.asarray((price <= cheapest * (1 + TIE)) & np.isfinite(cheapest))


def _most_saving(saved: Array, spend: Array) -> tuple[float, float]:
    """Return the expected cost and saving of the candidate that saves most for its cost.

    Args:
        saved: draws of what each candidate alone would save in a later run, (candidates, DRAWS).
        spend: the expected costs of trying them, (candidates,).
    """
    gains = saved.mean(1)
    most = int((gains / spend).argmax())
    return float(spend[most]), float(gains[most])


def _expected_costs(costs: Array, meets: Array, cheaper: Array) -> Array:
    """Return the expected costs of trying candidates, (candidates,).

    Args:
        costs: draws of the costs of whole runs, (candidates, DRAWS).
        meets: the chances to meet the target.
        cheaper: the chances to be cheaper than the best trial.
    """
    # A geometric mean: the arithmetic mean of a cost that may be several times higher or lower says
    # little about what it will be.
    mean_cost = np.exp(np.log(costs).mean(1))
    trying = mean_cost * (meets + (1 - meets) * SPENT_ON_A_MISS)
    return np.asarray(cheaper * trying + (1 - cheaper) * SPENT_ON_A_STOP * mean_cost)


def _may_save(
    candidates: Configurations, knowledge: Knowledge, meeting: Sequence[Observation], rng: Generator
) -> tuple[Indices, Array, Array]:
    """Return which candidates are likely to fit in memory and to be cheaper than the best trial.

    Likely to be cheaper means a chance of LEAST_CHANCE. If no candidate has that chance to save
    LEAST_SAVING, no candidates are returned: the first two arrays are empty. If no trial meets the
    target, every candidate counts as cheaper.

    Returns:
        The candidates' indices, draws of their costs, (k, DRAWS), and draws of the cost of the
        cheapest of the trials that meet the target, (DRAWS,), infinite where none does.
    """
    allowed = np.flatnonzero(knowledge.likely_to_fit(candidates))
    candidates = [candidates[index] for index in allowed.tolist()]

    def likely(costs: Array, best_cost: Array, saving: float) -> Indices:
        return np.flatnonzero((costs < best_cost * (1 - saving)).mean(1) >= LEAST_CHANCE)

    costs, best_cost = _drawn_costs(candidates, knowledge, meeting, DRAWS, rng)
    left = likely(costs, best_cost, _NO_SAVING)
    if not len(likely(costs, best_cost, LEAST_SAVING)):  # rule out that the draws were too few
        saving = likely(
            *_drawn_costs(candidates, knowledge, meeting, DRAWS_TO_END, rng), LEAST_SAVING
        )
        left = np.union1d(left, saving) if len(saving) else saving
    return allowed[left], costs[left], best_cost


def _drawn_costs(
    candidates: Configurations,
    knowledge: Knowledge,
    meeting: Sequence[Observation],
    count: int,
    rng: Generator,
) -> tuple[Array, Array]:
    """Draw the costs of the candidates, (n, count), and of the cheapest of the trials, (count,).

    The latter are infinite if there are no trials.
    """
    # The cheapest one is hardly ever another than one of the cheapest as measured.
    cheapest = sorted(meeting, key=lambda trial: trial.cost or math.inf)[:MOST_FITTED]
    costs, known = knowledge.runs.draws(candidates, cheapest, count, rng)
    return costs, known.min(0, initial=math.inf)


def _how_often_closest(losses: Array, shown: Mask, costs: Array, which: Indices) -> Array:
    """Count the draws in which each candidate has the lowest loss, (candidates,).

    Of several with the same loss the cheapest counts.

    Where no draw meets the target, there is most to learn from these candidates.

    Curves whose ends were `shown` by trials are left out, unless all were: such trials differ only
    in settings that leave the quality alone.
    """
    if not shown.all():
        losses = np.where(shown[:, None], np.inf, losses)
    often = np.zeros(len(which))
    for draw, closest in enumerate(losses.argmin(0)):
        near = np.flatnonzero(which == closest)
        if len(near):
            often[near[costs[near, draw].argmin()]] += 1.0
    return often


def _promising(
    candidates: Configurations, which: Indices, log_meets: Array, knowledge: Knowledge
) -> Indices:
    """Return the ROWS curves that are likeliest to meet the target for their cost, in rising order.

    Args:
        which: index of each candidate's curve.
        log_meets: logarithm of each curve's chance to meet the target.
    """
    system, _ = knowledge.step_costs.predict(knowledge.encoder.system_rows(candidates))
    costs = np.full(len(log_meets), np.inf)
    np.minimum.at(costs, which, np.log(knowledge.run_costs(candidates, np.exp(system))))
    return np.sort(np.argsort(costs - log_meets)[:ROWS])


def _ranks(column: Sequence[Any]) -> Array:
    """Return the rank of each value between 0 and 1; words rank in the order of the column.

    Equal values have equal ranks.
    """
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in column
    )
    values = sorted(set(column)) if numbers else list(dict.fromkeys(column))
    place = {value: (index + 0.5) / len(values) for index, value in enumerate(values)}
    return np.array([place[value] for value in column])
