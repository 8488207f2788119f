"""How sure an answer is: configurations that were repeated with other seeds, and what their spread allows to say.

Values are compared on the scale of their quality (`Quality.scaled`), where seeds move all configurations alike. One
standard deviation is pooled over all repeated configurations: three seeds alone say little. See docs/confirmation.md.
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


class Configuration:
    """A complete trial of the search, and its complete repeats with other seeds.

    Args:
        runs: the search's trial first.
        failed_replicate: a repeat diverged or did not fit in memory.
    """

    def __init__(self, runs: Sequence[TrialRecord], failed_replicate: bool = False) -> None:
        self.runs, self.first, self.n = tuple(runs), runs[0], len(runs)
        self.failed_replicate = failed_replicate
        self.repeated = self.n > 1 or failed_replicate
        self.quality: Quality = self.first.quality.of
        points = [point for run in runs if (point := objectives(run))]
        self.emissions_of_runs = [emissions_kg for emissions_kg, _ in points]
        self.emissions_kg_co2e = statistics.fmean(self.emissions_of_runs)
        self.values = [value for _, value in points]
        self.scaled_values = [self.quality.scaled(value) for value in self.values]
        # Mean of the quality, taken on its scale: of perplexities the geometric one. Of one to the last digit.
        self.value = self.values[0]
        if self.n > 1:
            self.value = self.quality.unscaled(statistics.fmean(self.scaled_values))
        # By the search's trial alone: least emissions, then the best quality, then the earliest; and by the means.
        self.rank = (self.emissions_of_runs[0], self.quality.rank(self.values[0]), self.first.trial)
        self.mean_rank = (self.emissions_kg_co2e, self.quality.rank(self.value), self.first.trial)

    @property
    def energy_kwh(self) -> float | None:
        """Of the training window; None where it is not known of every run."""
        known = [run.energy_kwh.train for run in self.runs if run.energy_kwh is not None]
        return statistics.fmean(known) if len(known) == self.n else None


@dataclass(frozen=True)
class Pooled:
    """Of several configurations' runs: the standard deviation of one run about its configuration's mean."""

    deviation: float
    freedom: int  # degrees of it

    def margin(self, *runs: int) -> float:
        """How far a mean of so many runs may lie from the truth; of two counts, a difference of two means.

        Student's t with a pooled standard deviation (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.2 and 7.3.1),
        at the quantile (1 + LEVEL) / 2: for a mean against the target stricter than the one-sided one, because the
        first run counts although it is what made the search take the configuration (docs/confirmation.md).
        """
        # Student's t without the second that importing scipy.stats takes, and here: every command imports this file.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.deviation * math.sqrt(sum(1 / n for n in runs))

    def at_least(self, values: Sequence[float]) -> "Pooled":
        """With one configuration's own deviation where that is larger."""
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
    """What a study's records say of its configurations against one target.

    Args:
        tried: the configurations.
        target: None where only bounds are asked for.
        seeds: with how many a configuration is to be run before it is judged.
    """

    def __init__(self, tried: Iterable[Configuration], target: Target | None, seeds: int) -> None:
        self.configurations = tuple(tried)
        self._target = target
        self._seeds = seeds
        self.scaled_value = pooled(config.scaled_values for config in self.configurations)
        self.emissions = pooled(config.emissions_of_runs for config in self.configurations)

    @classmethod
    def of(cls, data: StudyData, target: Target) -> "Evidence":
        seeds = 1 if data.config.confirm is None else data.config.confirm.seeds
        return cls(configurations(data.records), target, seeds)

    @cached_property
    def _log_emissions(self) -> Pooled | None:
        """What emitted nothing has no logarithm, and says nothing of how runs differ."""
        emissions_kg = [config.emissions_of_runs for config in self.configurations]
        return pooled([math.log(kg) for kg in of_runs] for of_runs in emissions_kg if min(of_runs) > 0)

    @property
    def has_repeats(self) -> bool:
        return any(config.repeated for config in self.configurations)

    def standing(self, config: Configuration) -> Standing:
        assert self._target is not None
        reached = [standing for value, standing in self.standings(config) if self._target.is_met_by(value)]
        return reached[-1] if reached else Standing.REJECTED

    def confirmed(self, config: Configuration) -> bool:
        return self.standing(config) is Standing.CONFIRMED

    def standings(self, config: Configuration) -> tuple[tuple[float, Standing], ...]:
        """From which target on it has which standing, whatever this evidence's own is; before the first it misses."""
        if config.failed_replicate:
            return ()
        before = Standing.UNREPLICATED if config.n == 1 or config.n < self._seeds else Standing.INCONCLUSIVE
        bound = self.bound(config)
        return ((config.value, before), *(() if bound is None else ((bound, Standing.CONFIRMED),)))

    def bound(self, config: Configuration) -> float | None:
        """At LEVEL, the mean over all seeds is no worse; None: it ran once, or its runs differ too much."""
        noise = self._noise(config)
        if noise is None:
            return None
        bound = config.quality.unscaled(statistics.fmean(config.scaled_values) + noise.margin(config.n))
        return bound if math.isfinite(bound) and not config.quality.beyond(bound) else None

    def confidence(self, config: Configuration) -> Confidence:
        noise, emissions = self._noise(config), self.emissions
        if emissions is not None and config.n > 1:
            emissions = emissions.at_least(config.emissions_of_runs)
        return Confidence(
            level=LEVEL,
            seeds=config.n,
            trials=tuple(run.trial for run in config.runs),
            value_mean=config.value,
            value_deviation=config.quality.unscaled_deviation(config.value, noise.deviation) if noise else None,
            value_bound=self.bound(config),
            emissions_deviation_kg_co2e=emissions.deviation if emissions else None,
            confirmed=self.confirmed(config),
            safer_alternative=self._safer_alternative(config),
        )

    def saving_interval(self, config: Configuration, baseline: Configuration) -> tuple[float, float] | None:
        """Of the share of the baseline's emissions that a run saves, from the logarithm of the ratio of the two means.

        Runs differ by shares, the more emissions the more grams, so that one relative standard deviation serves all
        configurations: that of the logarithms, pooled. The log of a ratio of means has the variance deviation² × (1 ÷
        n + 1 ÷ n') (Hedges, Gurevitch and Curtis, The meta-analysis of response ratios, Ecology 80, 1999).

        None: nothing was repeated, it is the baseline itself, or one of the two emitted nothing.
        """
        if self._log_emissions is None or config.first.trial == baseline.first.trial:
            return None
        if not (config.emissions_kg_co2e > 0 and baseline.emissions_kg_co2e > 0):
            return None
        margin = min(self._log_emissions.margin(config.n, baseline.n), LARGEST_MARGIN)
        ratio = config.emissions_kg_co2e / baseline.emissions_kg_co2e
        return 1 - ratio * math.exp(margin), 1 - ratio * math.exp(-margin)

    def _safer_alternative(self, winner: Configuration) -> SaferAlternative | None:
        """Of a winner in doubt: the one with the lowest bound among those that cost the same but for the error, or but
        for NEARLY_AS_CHEAP."""
        bound, rank, winner_kg = self.bound(winner), winner.quality.rank, winner.emissions_kg_co2e
        if bound is None or self.emissions is None or self.confirmed(winner) or not winner_kg > 0:
            return None
        safer = [
            SaferAlternative(
                trial=config.first.trial,
                seeds=config.n,
                value_mean=config.value,
                value_bound=surer,
                emissions_kg_co2e=config.emissions_kg_co2e,
                emissions_difference=config.emissions_kg_co2e / winner_kg - 1,
            )
            for config in self.configurations
            if not config.failed_replicate
            and (surer := self.bound(config)) is not None
            and rank(surer) < rank(bound)
            and config.emissions_kg_co2e - winner_kg
            <= max(NEARLY_AS_CHEAP * winner_kg, self.emissions.margin(config.n, winner.n))
        ]
        return min(safer, key=lambda alternative: (rank(alternative.value_bound), alternative.trial), default=None)

    def ties(self, winner: Configuration) -> tuple[int, ...]:
        """Trials that are confirmed, too, at mean emissions that differ from the winner's by no more than the error."""
        if self.emissions is None or not self.confirmed(winner):
            return ()
        return tuple(
            config.first.trial
            for config in self.configurations
            if config is not winner
            and self.confirmed(config)
            and abs(config.emissions_kg_co2e - winner.emissions_kg_co2e) <= self.emissions.margin(config.n, winner.n)
        )

    def _noise(self, config: Configuration) -> Pooled | None:
        if config.n == 1 or self.scaled_value is None:
            return None
        return self.scaled_value.at_least(config.scaled_values)


def configurations(records: Iterable[TrialRecord]) -> tuple[Configuration, ...]:
    """Every configuration that the search completed, by trial number, with its repeats."""
    records = tuple(records)
    repeats_of: dict[int, list[TrialRecord]] = {}
    for record in records:
        if record.repeat_of is not None:
            repeats_of.setdefault(record.repeat_of, []).append(record)
    failed = (TrialState.DIVERGED, TrialState.INFEASIBLE)
    return tuple(
        Configuration([record, *filter(objectives, again)], any(run.state in failed for run in again))
        for record in records
        if record.repeat_of is None and objectives(record)
        for again in [repeats_of.get(record.trial, ())]
    )


def by_means(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The search's trials; those whose configuration was repeated with other seeds have its means."""
    records = tuple(records)
    by_trial = {record.trial: record for record in records if record.repeat_of is None}
    for config in configurations(records):
        if config.n > 1:
            quality = config.first.quality.model_copy(update={"value": config.value})
            means = {"emissions_kg_co2e": config.emissions_kg_co2e, "quality": quality}
            by_trial[config.first.trial] = config.first.model_copy(update=means)
    return tuple(by_trial.values())


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """The standard deviation about the groups' own means; None where no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = math.fsum((value - statistics.fmean(group)) ** 2 for group in repeated for value in group)
    return Pooled(math.sqrt(squares / freedom), freedom)
