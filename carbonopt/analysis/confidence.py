"""How sure an answer is: configurations that were repeated with other seeds, and what their spread allows to say.

Perplexities are compared as logarithms, where seeds move all configurations alike; a mean over seeds is therefore a
geometric mean. One standard deviation is pooled over all repeated configurations: three seeds alone say little. Where a
configuration's own is larger, that is taken: of 8 configurations of a small GPT, recorded on an H200 with three seeds
each, it went from 0.5 to 5.7 %.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from scipy.special import stdtrit  # the quantiles of Student's t, without the second that importing scipy.stats takes

from carbonopt.analysis.front import objectives
from carbonopt.record import StudyData
from carbonopt.trial import Frozen, TrialRecord, TrialState

LEVEL = 0.95


class Standing(StrEnum):
    """What is known of a configuration against the target."""

    HOLDS = "holds"  # repeated, and its mean is below the target by more than the error
    OPEN = "open"  # below the target so far, but it has not run with all its seeds
    DOUBTFUL = "doubtful"  # it has, and its mean is below the target by less than the error
    MISSES = "misses"  # its mean is above the target, or it did not fit or diverged with another seed


@dataclass(frozen=True)
class Configuration:
    """A complete trial of the search, and its complete repeats with other seeds."""

    runs: tuple[TrialRecord, ...]  # the search's trial first
    lost: bool = False  # a repeat diverged or did not fit in memory

    @property
    def first(self) -> TrialRecord:
        return self.runs[0]

    @property
    def n(self) -> int:
        return len(self.runs)

    @cached_property
    def emissions_of_runs(self) -> tuple[float, ...]:
        return tuple(point[0] for run in self.runs if (point := objectives(run)))

    @cached_property
    def log_perplexities(self) -> tuple[float, ...]:
        return tuple(math.log(point[1]) for run in self.runs if (point := objectives(run)))

    @property
    def emissions_kg_co2e(self) -> float:
        return statistics.fmean(self.emissions_of_runs)

    @property
    def perplexity(self) -> float:
        """Geometric mean."""
        if self.n == 1:
            assert self.first.perplexity is not None
            return self.first.perplexity  # to the last digit, which a logarithm would change
        return math.exp(statistics.fmean(self.log_perplexities))

    @property
    def energy_kwh(self) -> float | None:
        """Of the training window; None where it is not known of every run."""
        known = [run.energy_kwh.train for run in self.runs if run.energy_kwh is not None]
        return statistics.fmean(known) if len(known) == self.n else None

    @property
    def rank(self) -> tuple[float, float, int]:
        """By the search's trial alone: least emissions, then least perplexity, then the earliest."""
        return Configuration(runs=(self.first,)).mean_rank

    @property
    def mean_rank(self) -> tuple[float, float, int]:
        """The same by the means."""
        return (self.emissions_kg_co2e, self.perplexity, self.first.trial)


@dataclass(frozen=True)
class Pooled:
    """Of several configurations' runs: the standard deviation of one run about its configuration's mean."""

    deviation: float
    freedom: int  # degrees of it

    def margin(self, *runs: int) -> float:
        """How far a mean of so many runs may lie from the truth; of two counts, a difference of two means.

        Student's t with a pooled standard deviation (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.2 and 7.3.1),
        at the quantile (1 + LEVEL) / 2. For a difference, whose sign is open, that is what LEVEL asks for. For a mean
        against the target it is stricter than the one-sided quantile, because the first run counts although it is what
        made the search take the configuration: one whose mean is just at the target is taken when its first run was
        lucky, half of the time, and that doubles its chance of passing. Simulated (three configurations, three seeds,
        one of them at the target and taken), 9.7 % pass at the one-sided quantile and 5.0 % at this one.
        """
        return float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.deviation * math.sqrt(sum(1 / n for n in runs))

    def at_least(self, values: Sequence[float]) -> "Pooled":
        """With one configuration's own deviation where that is larger.

        With deviations drawn from the recorded ones, 7.1 % pass by the pooled deviation and 4.4 % by this one; with
        equal ones 3.9 %. What it does not make up for is one that spreads ten times as much as the others: 13 % pass.
        """
        return replace(self, deviation=max(self.deviation, statistics.stdev(values)))


class Confidence(Frozen):
    """How sure it is that the recommended configuration meets the target whatever the seed."""

    level: float
    seeds: int  # complete runs of the configuration, each with its own seed
    trials: tuple[int, ...]  # their numbers
    perplexity_mean: float  # geometric
    perplexity_deviation: float | None  # standard deviation of one run: pooled or its own; None: it ran once
    perplexity_bound: float | None  # at that level, the mean over all seeds is below; None: it ran once
    emissions_deviation_kg_co2e: float | None  # pooled
    holds: bool  # the bound is not above the target


class Evidence:
    """What a study's records say of its configurations against one target."""

    def __init__(self, found: Iterable[Configuration], target_perplexity: float, seeds: int) -> None:
        """`seeds`: with how many a configuration is to be run before it is judged."""
        self.configurations = tuple(found)
        self._log_target = math.log(target_perplexity)
        self._target_perplexity = target_perplexity
        self._seeds = seeds
        self.log_perplexity = pooled(one.log_perplexities for one in self.configurations)
        self.emissions = pooled(one.emissions_of_runs for one in self.configurations)

    @classmethod
    def of(cls, data: StudyData, target_perplexity: float) -> "Evidence":
        seeds = 1 if data.config.confirm is None else data.config.confirm.seeds
        return cls(configurations(data.records), target_perplexity, seeds)

    @property
    def has_repeats(self) -> bool:
        return any(one.n > 1 or one.lost for one in self.configurations)

    def standing(self, one: Configuration) -> Standing:
        if one.lost or one.perplexity > self._target_perplexity:
            return Standing.MISSES
        if self._holds(one):
            return Standing.HOLDS
        return Standing.OPEN if one.n == 1 or one.n < self._seeds else Standing.DOUBTFUL

    def confidence(self, one: Configuration) -> Confidence:
        noise = self._noise(one)
        bound = self._log_bound(one)
        return Confidence(
            level=LEVEL,
            seeds=one.n,
            trials=tuple(run.trial for run in one.runs),
            perplexity_mean=one.perplexity,
            perplexity_deviation=None if noise is None else one.perplexity * noise.deviation,
            perplexity_bound=None if bound is None else math.exp(bound),
            emissions_deviation_kg_co2e=self.emissions.deviation if self.emissions else None,
            holds=self._holds(one),
        )

    def ties(self, winner: Configuration) -> tuple[int, ...]:
        """Trials whose configurations hold, too, and whose mean emissions differ from the winner's by no more than the
        error."""
        if self.emissions is None or not self._holds(winner):
            return ()
        return tuple(
            one.first.trial
            for one in self.configurations
            if one is not winner
            and self.standing(one) is Standing.HOLDS
            and abs(one.emissions_kg_co2e - winner.emissions_kg_co2e) <= self.emissions.margin(one.n, winner.n)
        )

    def _log_bound(self, one: Configuration) -> float | None:
        noise = self._noise(one)
        return None if noise is None else statistics.fmean(one.log_perplexities) + noise.margin(one.n)

    def _noise(self, one: Configuration) -> Pooled | None:
        if one.n == 1 or self.log_perplexity is None:
            return None
        return self.log_perplexity.at_least(one.log_perplexities)

    def _holds(self, one: Configuration) -> bool:
        bound = self._log_bound(one)
        return bound is not None and not one.lost and bound <= self._log_target


def configurations(records: Iterable[TrialRecord]) -> tuple[Configuration, ...]:
    """Every configuration that the search completed, by trial number, with its repeats."""
    records = tuple(records)
    repeats_of: dict[int, list[TrialRecord]] = {}
    for record in records:
        if record.repeat_of is not None:
            repeats_of.setdefault(record.repeat_of, []).append(record)
    return tuple(
        Configuration(
            runs=(record, *(again for again in repeats_of.get(record.trial, ()) if objectives(again))),
            lost=any(
                again.state in (TrialState.DIVERGED, TrialState.INFEASIBLE)
                for again in repeats_of.get(record.trial, ())
            ),
        )
        for record in records
        if record.repeat_of is None and objectives(record)
    )


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """The standard deviation about the groups' own means; None where no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = math.fsum((value - statistics.fmean(group)) ** 2 for group in repeated for value in group)
    return Pooled(math.sqrt(squares / freedom), freedom)
