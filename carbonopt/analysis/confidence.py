"""How sure an answer is: configurations that were repeated with other seeds, and what their spread allows to say.

Values are compared on the scale of their quality (`Quality.scaled`), where seeds move all configurations alike:
perplexities by their logarithms, so that a mean over seeds is a geometric mean. One standard deviation is pooled over
all repeated configurations: three seeds alone say little. Where a configuration's own is larger, that is taken: of 8
configurations of a small GPT, recorded on an H200 with three seeds each, it went from 0.5 to 5.7 %.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from carbonopt.analysis.front import objectives
from carbonopt.core.quality import Quality, Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen

LEVEL = 0.95
LARGEST_MARGIN = 500.0  # of a logarithm: beyond it nothing is known, and its exponential is still a number
NEARLY_AS_CHEAP = 0.05  # of the recommended one's emissions


class Standing(StrEnum):
    """What is known of a configuration against the target."""

    CONFIRMED = "confirmed"  # repeated, and its mean is below the target by more than the error
    UNREPLICATED = "unreplicated"  # below the target so far, but it has not run with all its seeds
    INCONCLUSIVE = "inconclusive"  # it has, and its mean is below the target by less than the error
    REJECTED = "rejected"  # its mean is above the target, or it did not fit or diverged with another seed


@dataclass(frozen=True)
class Configuration:
    """A complete trial of the search, and its complete repeats with other seeds."""

    runs: tuple[TrialRecord, ...]  # the search's trial first
    failed_replicate: bool = False  # a repeat diverged or did not fit in memory

    @property
    def first(self) -> TrialRecord:
        return self.runs[0]

    @property
    def n(self) -> int:
        return len(self.runs)

    @cached_property
    def _points(self) -> tuple[tuple[float, float], ...]:
        return tuple(point for run in self.runs if (point := objectives(run)))

    @property
    def emissions_of_runs(self) -> tuple[float, ...]:
        return tuple(emissions_kg for emissions_kg, _ in self._points)

    @property
    def quality(self) -> Quality:
        return self.first.quality.of

    @cached_property
    def scaled_values(self) -> tuple[float, ...]:
        return tuple(self.quality.scaled(value) for _, value in self._points)

    @property
    def emissions_kg_co2e(self) -> float:
        return statistics.fmean(self.emissions_of_runs)

    @property
    def value(self) -> float:
        """Mean of the quality, taken on its scale: of perplexities the geometric one."""
        if self.n == 1:
            assert self.first.value is not None
            return self.first.value  # to the last digit, which a logarithm would change
        return self.quality.unscaled(statistics.fmean(self.scaled_values))

    @property
    def energy_kwh(self) -> float | None:
        """Of the training window; None where it is not known of every run."""
        known = [run.energy_kwh.train for run in self.runs if run.energy_kwh is not None]
        return statistics.fmean(known) if len(known) == self.n else None

    @cached_property
    def rank(self) -> tuple[float, float, int]:
        """By the search's trial alone: least emissions, then the best quality, then the earliest."""
        emissions_kg, value = self._points[0]
        return (emissions_kg, self.quality.rank(value), self.first.trial)

    @cached_property
    def mean_rank(self) -> tuple[float, float, int]:
        """The same by the means."""
        return (self.emissions_kg_co2e, self.quality.rank(self.value), self.first.trial)


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
        # Student's t without the second that importing scipy.stats takes, and here: every command imports this file.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.deviation * math.sqrt(sum(1 / n for n in runs))

    def at_least(self, values: Sequence[float]) -> "Pooled":
        """With one configuration's own deviation where that is larger.

        With deviations drawn from the recorded ones, 7.1 % pass by the pooled deviation and 4.4 % by this one; with
        equal ones 3.9 %. What it does not make up for is one that spreads ten times as much as the others: 13 % pass.
        """
        return replace(self, deviation=max(self.deviation, statistics.stdev(values)))


class SaferAlternative(Frozen):
    """A configuration that costs hardly more than the recommended one and is surer to meet the target."""

    trial: int
    seeds: int  # complete runs
    value_mean: float
    value_bound: float  # at the level of the recommended one's
    emissions_kg_co2e: float  # mean
    emissions_difference: float  # ÷ the recommended one's − 1


class Confidence(Frozen):
    """How sure it is that the recommended configuration meets the target whatever the seed."""

    level: float
    seeds: int  # complete runs of the configuration, each with its own seed
    trials: tuple[int, ...]  # their numbers
    value_mean: float  # as `Configuration.value`
    value_deviation: float | None  # standard deviation of one run: pooled or its own; None: it ran once
    # At that level, the mean over all seeds is no worse; None: it ran once, or its runs differ beyond all bounds.
    value_bound: float | None
    emissions_deviation_kg_co2e: float | None  # likewise
    confirmed: bool  # the bound meets the target
    safer_alternative: SaferAlternative | None  # None: it holds, it has no bound, or no other is as cheap and surer


class Evidence:
    """What a study's records say of its configurations against one target."""

    def __init__(self, found: Iterable[Configuration], target: Target | None, seeds: int) -> None:
        """`target`: None where only bounds are asked for. `seeds`: with how many a configuration is to be run before it
        is judged."""
        self.configurations = tuple(found)
        self._target = target
        self._seeds = seeds
        self.scaled_value = pooled(one.scaled_values for one in self.configurations)
        self.emissions = pooled(one.emissions_of_runs for one in self.configurations)

    @classmethod
    def of(cls, data: StudyData, target: Target) -> "Evidence":
        seeds = 1 if data.config.confirm is None else data.config.confirm.seeds
        return cls(configurations(data.records), target, seeds)

    @cached_property
    def _log_emissions(self) -> Pooled | None:
        """What emitted nothing has no logarithm, and says nothing of how runs differ."""
        return pooled(
            [math.log(emissions_kg) for emissions_kg in one.emissions_of_runs]
            for one in self.configurations
            if min(one.emissions_of_runs) > 0
        )

    @property
    def has_repeats(self) -> bool:
        return any(one.n > 1 or one.failed_replicate for one in self.configurations)

    def standing(self, one: Configuration) -> Standing:
        assert self._target is not None
        reached = [standing for value, standing in self.standings(one) if self._target.is_met_by(value)]
        return reached[-1] if reached else Standing.REJECTED

    def standings(self, one: Configuration) -> tuple[tuple[float, Standing], ...]:
        """From which target on it has which standing; before the first it misses. Whatever this evidence's own target
        is."""
        if one.failed_replicate:
            return ()
        before = Standing.UNREPLICATED if one.n == 1 or one.n < self._seeds else Standing.INCONCLUSIVE
        bound = self.bound(one)
        reached = (one.value, before)
        return (reached,) if bound is None else (reached, (bound, Standing.CONFIRMED))

    def bound(self, one: Configuration) -> float | None:
        """At LEVEL, the mean over all seeds is no worse; None: it ran once, or its runs differ too much."""
        noise = self._noise(one)
        if noise is None:
            return None
        bound = one.quality.unscaled(statistics.fmean(one.scaled_values) + noise.margin(one.n))
        return bound if math.isfinite(bound) and not one.quality.beyond(bound) else None

    def confidence(self, one: Configuration) -> Confidence:
        noise = self._noise(one)
        return Confidence(
            level=LEVEL,
            seeds=one.n,
            trials=tuple(run.trial for run in one.runs),
            value_mean=one.value,
            value_deviation=None if noise is None else one.quality.unscaled_deviation(one.value, noise.deviation),
            value_bound=self.bound(one),
            emissions_deviation_kg_co2e=self._emissions_deviation(one),
            confirmed=self.standing(one) is Standing.CONFIRMED,
            safer_alternative=self._safer_alternative(one),
        )

    def saving_interval(self, one: Configuration, baseline: Configuration) -> tuple[float, float] | None:
        """Of the share of the baseline's emissions that a run saves, from the logarithm of the ratio of the two means.

        Runs differ by shares, the more emissions the more grams, so that one relative standard deviation serves all
        configurations: that of the logarithms, pooled. The log of a ratio of means has the variance deviation² × (1 ÷
        n + 1 ÷ n') (Hedges, Gurevitch and Curtis, The meta-analysis of response ratios, Ecology 80, 1999), and
        Student's t the pooled degrees of freedom. For deviations of some percent, as energy has, Fieller's theorem
        gives the same. Where the winner was taken for its low emissions out of 25 configurations, all with the same,
        with three seeds for it and two rivals, 93 % of these intervals hold the truth in simulations; where they differ
        by 30 %, 95 %.

        None: nothing was repeated, it is the baseline itself, or one of the two emitted nothing.
        """
        if self._log_emissions is None or one.first.trial == baseline.first.trial:
            return None
        if not (one.emissions_kg_co2e > 0 and baseline.emissions_kg_co2e > 0):
            return None
        margin = min(self._log_emissions.margin(one.n, baseline.n), LARGEST_MARGIN)
        ratio = one.emissions_kg_co2e / baseline.emissions_kg_co2e
        return 1 - ratio * math.exp(margin), 1 - ratio * math.exp(-margin)

    def _safer_alternative(self, winner: Configuration) -> SaferAlternative | None:
        """Of a winner in doubt: the one with the lowest bound among those that cost the same but for the error, or but
        for NEARLY_AS_CHEAP."""
        bound = self.bound(winner)
        if bound is None or self.emissions is None or self.standing(winner) is Standing.CONFIRMED:
            return None
        found = [
            SaferAlternative(
                trial=one.first.trial,
                seeds=one.n,
                value_mean=one.value,
                value_bound=surer,
                emissions_kg_co2e=one.emissions_kg_co2e,
                emissions_difference=one.emissions_kg_co2e / winner.emissions_kg_co2e - 1,
            )
            for one in self.configurations
            if winner.emissions_kg_co2e > 0
            and not one.failed_replicate
            and (surer := self.bound(one)) is not None
            and one.quality.rank(surer) < one.quality.rank(bound)
            and one.emissions_kg_co2e - winner.emissions_kg_co2e
            <= max(NEARLY_AS_CHEAP * winner.emissions_kg_co2e, self.emissions.margin(one.n, winner.n))
        ]
        rank = winner.quality.rank
        return min(found, key=lambda one: (rank(one.value_bound), one.trial), default=None)

    def ties(self, winner: Configuration) -> tuple[int, ...]:
        """Trials whose configurations hold, too, and whose mean emissions differ from the winner's by no more than the
        error."""
        if self.emissions is None or self.standing(winner) is not Standing.CONFIRMED:
            return ()
        return tuple(
            one.first.trial
            for one in self.configurations
            if one is not winner
            and self.standing(one) is Standing.CONFIRMED
            and abs(one.emissions_kg_co2e - winner.emissions_kg_co2e) <= self.emissions.margin(one.n, winner.n)
        )

    def _emissions_deviation(self, one: Configuration) -> float | None:
        if self.emissions is None:
            return None
        return (self.emissions if one.n == 1 else self.emissions.at_least(one.emissions_of_runs)).deviation

    def _noise(self, one: Configuration) -> Pooled | None:
        if one.n == 1 or self.scaled_value is None:
            return None
        return self.scaled_value.at_least(one.scaled_values)


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
            failed_replicate=any(
                again.state in (TrialState.DIVERGED, TrialState.INFEASIBLE)
                for again in repeats_of.get(record.trial, ())
            ),
        )
        for record in records
        if record.repeat_of is None and objectives(record)
    )


def by_means(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The search's trials; those whose configuration was repeated with other seeds have its means."""
    records = tuple(records)
    repeated = {one.first.trial: one for one in configurations(records) if one.n > 1}
    return tuple(
        record
        if (one := repeated.get(record.trial)) is None
        else record.model_copy(
            update={
                "emissions_kg_co2e": one.emissions_kg_co2e,
                "quality": record.quality.model_copy(update={"value": one.value}),
            }
        )
        for record in records
        if record.repeat_of is None
    )


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """The standard deviation about the groups' own means; None where no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = math.fsum((value - statistics.fmean(group)) ** 2 for group in repeated for value in group)
    return Pooled(math.sqrt(squares / freedom), freedom)
