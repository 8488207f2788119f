"""Statistics of how certain an answer is, from repeats with other seeds.

Values are compared on the scale of their quality (`Quality.scaled`), where seeds move all
configurations alike. One standard deviation is pooled over all configurations that were repeated:
three seeds alone say little (docs/confirmation.md).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from carbonopt.analysis.front import objectives
from carbonopt.core.quality import Target
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen, to_rounding, within
from carbonopt.spec.study_data import StudyData

LEVEL = 0.95

# Cap on the margin of a logarithm, so that its exponential stays finite.
LARGEST_MARGIN = 500.0
NEARLY_AS_CHEAP = 0.05  # share of the recommended one's emissions


# Equal evaluations that are no chance: of accuracies over 500 examples, one pair in 20 is equal.
NOT_BY_CHANCE = 3


class Standing(StrEnum):
    """The standing of a configuration against the target."""

    # It was repeated, and its mean is better than the target by more than the error.
    CONFIRMED = "confirmed"
    # It meets the target so far, but has not run with all its seeds.
    INCOMPLETE = "incomplete"
    # It has run with all its seeds, and its mean is better than the target, by less than the error.
    INCONCLUSIVE = "inconclusive"
    # Its mean misses the target, or it did not fit or diverged with another seed.
    REJECTED = "rejected"


class Configuration:
    """A complete trial of the search and its complete repeats with other seeds.

    Args:
        runs: the search's trial, then its repeats.
        failed_replicate: whether another repeat diverged or did not fit in memory.
    """

    def __init__(self, runs: Sequence[TrialRecord], failed_replicate: bool = False) -> None:
        self.runs, self.first, self.n = tuple(runs), runs[0], len(runs)
        self.failed_replicate = failed_replicate
        self.repeated = self.n > 1 or failed_replicate
        self.trial, self.quality = self.first.trial, self.first.quality.of
        points = [point for run in runs if (point := objectives(run))]
        self.emissions_of_runs = [emissions_kg for emissions_kg, _ in points]
        self.emissions_kg_co2e = _mean(self.emissions_of_runs)
        self.values = [value for _, value in points]
        self.scaled_values = [self.quality.scaled(value) for value in self.values]
        # The mean of the quality is taken on its scale, and is geometric for perplexities. The
        # value of a single run is kept to the last digit.
        self.value = self.values[0]
        if self.n > 1:
            mean = self.quality.unscaled(statistics.fmean(self.scaled_values))
            self.value = within(self.values, mean)
        # By the search's trial alone: least emissions, then the best quality, then the earliest.
        # `mean_rank` uses means instead. The last digits of a sum are no difference.
        first_kg, mean_kg = map(to_rounding, (self.emissions_of_runs[0], self.emissions_kg_co2e))
        self.rank = (first_kg, self.quality.rank(self.values[0]), self.trial)
        self.mean_rank = (mean_kg, self.quality.rank(self.value), self.trial)

    @property
    def energy_kwh(self) -> float | None:
        """The mean energy of the training window; None where it is not known for every run."""
        return self._mean(run.energy_kwh.train for run in self.runs if run.energy_kwh is not None)

    @property
    def duration_s(self) -> float | None:
        """The mean duration of the training window; None where it is not known for every run."""
        return self._mean(run.duration_s.train for run in self.runs if run.duration_s is not None)

    @property
    def gpu_start_temperature_c(self) -> float | None:
        """The GPUs' mean temperature as the trainings began; None where a run does not know it."""
        began_c = (run.gpu_start_temperature_c for run in self.runs)
        return self._mean(degrees for degrees in began_c if degrees is not None)

    def _mean(self, known: Iterable[float]) -> float | None:
        of_runs = list(known)
        return _mean(of_runs) if len(of_runs) == self.n else None


def _mean(values: Sequence[float]) -> float:
    return within(values, statistics.fmean(values))


@dataclass(frozen=True)
class Pooled:
    """The pooled standard deviation of one run about its configuration's mean."""

    deviation: float
    freedom: int  # degrees of freedom of the deviation

    def margin(self, *runs: int, level: float = LEVEL) -> float:
        """Return how far a mean of so many runs may lie from the truth, at a level of confidence.

        Given two counts, it is the margin of a difference of two means. It is Student's t with a
        pooled standard deviation (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.2 and
        7.3.1). It is two-sided also where only one side is compared with the target: the search
        chose the configuration by its first run, which is luckier than others
        (docs/confirmation.md).
        """
        # This gives Student's t without the second that importing scipy.stats takes. It is imported
        # here, since every command imports this file.
        from scipy.special import stdtrit

        return (
            float(stdtrit(self.freedom, (1 + level) / 2))
            * self.deviation
            * math.sqrt(sum(1 / n for n in runs))
        )

    def or_own_if_larger(self, values: Sequence[float]) -> "Pooled":
        """Return this with one configuration's own deviation, where that is known and larger."""
        return self.or_larger(statistics.stdev(values)) if len(values) > 1 else self

    def or_larger(self, deviation: float) -> "Pooled":
        """Return this with another deviation, where that is larger."""
        return replace(self, deviation=max(self.deviation, deviation))


class SaferAlternative(Frozen):
    """A configuration surer to meet the target that costs hardly more than the recommended one."""

    trial: int
    seeds: int  # number of complete runs
    value_mean: float
    value_bound: float  # bound at the level of the recommended one's
    emissions_kg_co2e: float  # mean over its runs
    emissions_difference: float  # its emissions ÷ the recommended one's − 1


class Confidence(Frozen):
    """The confidence that the recommended configuration meets the target whatever the seed."""

    level: float = LEVEL
    seeds: int  # number of complete runs of the configuration, each with its own seed
    trials: tuple[int, ...]  # numbers of these runs
    value_mean: float  # mean of the quality, as `Configuration.value`
    # standard deviation of one run, pooled or its own; None: it ran once, or `seeds_alike`
    value_deviation: float | None
    # At `level`, the mean over all seeds is no worse. None: it ran once, its runs differ beyond all
    # bounds, or `seeds_alike`.
    value_bound: float | None
    emissions_deviation_kg_co2e: float | None  # standard deviation of one run, in the same way
    # chance that one more run, with another seed, misses the target; None: it ran once, or
    # `seeds_alike`
    miss_chance: float | None
    confirmed: bool  # whether the bound meets the target
    seeds_alike: bool = False  # whether its runs were equal although each had another seed
    # None: it is confirmed, it has no bound, or no other one is as cheap and surer
    safer_alternative: SaferAlternative | None


class Evidence:
    """The evidence on configurations against one target.

    Args:
        tried: the configurations.
        target: the target; None: only bounds are asked for.
        seeds: number of seeds that a configuration is to run with before it is judged.
    """

    def __init__(self, tried: Iterable[Configuration], target: Target | None, seeds: int) -> None:
        self.configurations, self._target, self._seeds = tuple(tried), target, seeds
        spread = pooled(candidate.scaled_values for candidate in self.configurations)
        self.value_spread = spread and spread.or_larger(_deviation_of_rounding(self.configurations))

    @classmethod
    def of(cls, data: StudyData, target: Target) -> "Evidence":
        seeds = 1 if data.config.confirm is None else data.config.confirm.seeds
        return cls(configurations(data.records), target, seeds)

    @cached_property
    def emissions_spread(self) -> Pooled | None:
        """The spread of the logarithm of emissions between runs; None: nothing was repeated."""
        return log_spread(self.configurations)

    @cached_property
    def _luck_of_first_runs(self) -> float:
        """How much better first runs are than repeats, on the quality's scale, as far as known.

        All first runs have the search's seed, which may suit all configurations, and lucky runs are
        chosen. It is the posterior mean of a normal model in which half of a run's variance is its
        seed's, and half its own: given the luck, the difference between a first run and the mean of
        m repeats with other seeds has the variance deviation² × (1 ÷ 2 + 1 ÷ m).
        """
        assert self._target is not None
        precision, weighted = 1.0, 0.0
        for tried in self.configurations:
            if tried.n > 1:
                repeats = tried.quality.unscaled(statistics.fmean(tried.scaled_values[1:]))
                better = self._target.shortfall(repeats) - self._target.shortfall(tried.values[0])
                weight = 1 / (1 + 2 / (tried.n - 1))
                precision, weighted = precision + weight, weighted + weight * better
        return weighted / precision

    def standing(self, candidate: Configuration) -> Standing:
        assert self._target is not None
        reached = [
            standing
            for value, standing in self.standings(candidate)
            if self._target.is_met_by(value)
        ]
        return reached[-1] if reached else Standing.REJECTED

    def confirmed(self, candidate: Configuration) -> bool:
        return self.standing(candidate) is Standing.CONFIRMED

    def clearly_confirmed(self, candidate: Configuration) -> bool:
        """Return whether a configuration is confirmed so clearly that further seeds can be spared.

        There are up to seeds − 1 repeats after which that is asked. The bound therefore has 1 ÷
        (seeds − 1) of the error that LEVEL allows (Bonferroni's inequality), so that asking often
        doesn't end the repeats of more configurations that truly miss the target. `confirmed`
        itself has the whole error, however often it is asked.
        """
        assert self._target is not None
        level = 1 - (1 - LEVEL) / max(1, self._seeds - 1)
        bound = self.bound(candidate, level)
        return self.confirmed(candidate) and bound is not None and self._target.is_met_by(bound)

    def standings(self, candidate: Configuration) -> tuple[tuple[float, Standing], ...]:
        """Return the standings that a configuration has for all targets, from hard to easy ones.

        Each pair has a target and a standing: the configuration has the standing for this target
        and for easier ones, up to the next pair's target. For targets that are harder than the
        first pair's it is rejected. The target of this evidence is not used.
        """
        if candidate.failed_replicate:
            return ()
        before = (
            Standing.INCOMPLETE
            if candidate.n == 1 or candidate.n < self._seeds
            else Standing.INCONCLUSIVE
        )
        bound = self.bound(candidate)
        return (
            (candidate.value, before),
            *(() if bound is None else ((bound, Standing.CONFIRMED),)),
        )

    def bound(self, candidate: Configuration, level: float = LEVEL) -> float | None:
        """Return the bound that the mean over all seeds is no worse than, at a level of confidence.

        None: the configuration ran once, its runs differ too much, or its seeds change nothing.
        """
        noise = self._noise(candidate)
        if noise is None:
            return None
        bound = candidate.quality.unscaled(
            statistics.fmean(candidate.scaled_values) + noise.margin(candidate.n, level=level)
        )
        return bound if math.isfinite(bound) and not candidate.quality.beyond(bound) else None

    def chance_to_meet(self, candidate: Configuration) -> float:
        """Return the chance that a configuration's mean over all seeds meets the target.

        Given its n runs, this mean is normal with the variance deviation² ÷ n, about the runs' mean
        less the luck of the first one. The chance is 1 where nothing was repeated, and no deviation
        is known.
        """
        from scipy.special import ndtr  # imported here as in `Pooled.margin`

        if self.value_spread is None or self._target is None:
            return 1.0
        noise = self.value_spread.or_own_if_larger(candidate.scaled_values)
        slack = -self._target.shortfall(candidate.value) - self._luck_of_first_runs / candidate.n
        deviation = noise.deviation / math.sqrt(candidate.n)
        return float(ndtr(slack / deviation)) if deviation > 0 else float(slack >= 0)

    def chance(self, candidate: Configuration) -> float:
        """Return the chance that a configuration is confirmed once it has run with all its seeds.

        Only for a configuration with runs still to come. Its mean is known from its n runs alone:
        given the mean of n runs, that of k more is normal with variance deviation² × (1 ÷ n + 1 ÷
        k). The chance is 1 where nothing was repeated, and no deviation is known.
        """
        from scipy.special import ndtr  # imported here as in `Pooled.margin`

        if self.value_spread is None or self._target is None:
            return 1.0
        more = self._seeds - candidate.n
        noise = self.value_spread.or_own_if_larger(candidate.scaled_values)
        needed = replace(noise, freedom=noise.freedom + more).margin(self._seeds)
        luck = self._luck_of_first_runs / candidate.n * more / self._seeds
        slack = -self._target.shortfall(candidate.value) - luck - needed
        deviation = noise.deviation * more / self._seeds * math.sqrt(1 / candidate.n + 1 / more)
        return float(ndtr(slack / deviation)) if deviation > 0 else float(slack >= 0)

    def confidence(self, candidate: Configuration) -> Confidence:
        noise = self._noise(candidate)
        return Confidence(
            seeds=candidate.n,
            trials=tuple(run.trial for run in candidate.runs),
            value_mean=candidate.value,
            value_deviation=(
                candidate.quality.unscaled_deviation(candidate.value, noise.deviation)
                if noise
                else None
            ),
            value_bound=self.bound(candidate),
            emissions_deviation_kg_co2e=self._emissions_deviation_kg_co2e(candidate),
            miss_chance=self._miss_chance(candidate),
            confirmed=self.confirmed(candidate),
            seeds_alike=self._seeds_alike(candidate),
            safer_alternative=self._safer_alternative(candidate),
        )

    def _seeds_alike(self, candidate: Configuration) -> bool:
        """Return whether a configuration's runs are equal and that is not by chance.

        Equal shares of few examples may be, and so may the best value there is. Such runs show
        nothing of what another seed reaches.
        """
        is_best = candidate.value == candidate.quality.best
        if self.value_spread is None or is_best or len({run.seed for run in candidate.runs}) == 1:
            return False
        spread = self.value_spread.or_own_if_larger(candidate.scaled_values)
        return spread.deviation == 0 or self._curves_alike

    @cached_property
    def _curves_alike(self) -> bool:
        """Whether all repeats have their first run's evaluations, and that at several places."""
        repeated = [tried for tried in self.configurations if tried.n > 1]
        compared = sum((tried.n - 1) * len(tried.first.evals) for tried in repeated)
        return compared >= NOT_BY_CHANCE and all(
            curve(run) == curve(tried.first) for tried in repeated for run in tried.runs
        )

    def _miss_chance(self, candidate: Configuration) -> float | None:
        """Return the chance that one more run misses the target; None: the configuration ran once.

        The difference of a new run and the mean of n has the variance deviation² × (1 + 1 ÷ n), and
        is Student's t in units of its estimate (the prediction interval of Hahn and Meeker,
        Statistical Intervals, 1991, 4.8).
        """
        from scipy.special import stdtr  # imported here as in `Pooled.margin`

        noise = self._noise(candidate)
        if noise is None or self._target is None:
            return None
        slack = -self._target.shortfall(candidate.value)
        deviation = noise.deviation * math.sqrt(1 + 1 / candidate.n)
        if not deviation > 0:
            return float(slack < 0)
        return float(stdtr(noise.freedom, -slack / deviation))

    def _emissions_deviation_kg_co2e(self, candidate: Configuration) -> float | None:
        """Return the standard deviation of one run, from the pooled share or its own if larger."""
        if self.emissions_spread is None or not min(candidate.emissions_of_runs) > 0:
            return None
        logs = [math.log(kg) for kg in candidate.emissions_of_runs]
        share = self.emissions_spread.or_own_if_larger(logs).deviation
        return share * candidate.emissions_kg_co2e

    def log_emissions_margin(self, *runs: int) -> float | None:
        """Return how far the logarithm of mean emissions may lie from the truth.

        Given two numbers of runs, it is the margin of the ratio of two means. None: nothing was
        repeated.

        Args:
            runs: number of runs of each mean.
        """
        if self.emissions_spread is None:
            return None
        return min(self.emissions_spread.margin(*runs), LARGEST_MARGIN)

    def saving_interval(
        self, candidate: Configuration, baseline: Configuration
    ) -> tuple[float, float] | None:
        """Return the interval of the share of the baseline's emissions that a run saves.

        It comes from the logarithm of the ratio of the two means. Runs differ by shares, so that
        one standard deviation of the logarithms, pooled, serves all configurations. The log of a
        ratio of means has the variance deviation² × (1 ÷ n + 1 ÷ n') (Hedges, Gurevitch and Curtis,
        The meta-analysis of response ratios, Ecology 80, 1999).

        None: nothing was repeated, the candidate is the baseline, or one of them emitted nothing.
        """
        margin = self.log_emissions_margin(candidate.n, baseline.n)
        if margin is None or candidate.trial == baseline.trial:
            return None
        if not (candidate.emissions_kg_co2e > 0 and baseline.emissions_kg_co2e > 0):
            return None
        return less_interval(candidate.emissions_kg_co2e / baseline.emissions_kg_co2e, margin)

    def saved_interval_kg_co2e(
        self, candidate: Configuration, baseline: Configuration
    ) -> tuple[float, float] | None:
        """Return the interval of the emissions that a run saves against the baseline.

        Unlike the saving's share, it also has the error of the baseline's own emissions. It is made
        of the intervals of both means (Zou and Donner, Construction of confidence limits about
        effect measures, Statistics in Medicine 27, 2008). Its lower end is 0 or less where there
        may be no saving.

        None: `saving_interval` is None.
        """
        share = self.saving_interval(candidate, baseline)
        margins = self.log_emissions_margin(candidate.n), self.log_emissions_margin(baseline.n)
        if share is None or margins[0] is None or margins[1] is None:
            return None
        means_kg = candidate.emissions_kg_co2e, baseline.emissions_kg_co2e
        return saved_interval_kg_co2e([(*means_kg, margins[0], margins[1])], share)

    def _safer_alternative(self, winner: Configuration) -> SaferAlternative | None:
        """Return the configuration with the best bound that costs about as much as the winner.

        Its cost exceeds the winner's by no more than the error or NEARLY_AS_CHEAP, and its bound is
        better. None: there is none, or the winner is confirmed or has no bound.
        """
        bound, rank, winner_kg = self.bound(winner), winner.quality.rank, winner.emissions_kg_co2e
        spread = self.emissions_spread
        if bound is None or spread is None or self.confirmed(winner) or not winner_kg > 0:
            return None
        safer = [
            SaferAlternative(
                trial=candidate.trial,
                seeds=candidate.n,
                value_mean=candidate.value,
                value_bound=surer,
                emissions_kg_co2e=candidate.emissions_kg_co2e,
                emissions_difference=candidate.emissions_kg_co2e / winner_kg - 1,
            )
            for candidate in self.configurations
            if not candidate.failed_replicate
            and (surer := self.bound(candidate)) is not None
            and rank(surer) < rank(bound)
            and candidate.emissions_kg_co2e > 0
            and math.log(candidate.emissions_kg_co2e / winner_kg)
            <= max(math.log1p(NEARLY_AS_CHEAP), spread.margin(candidate.n, winner.n))
        ]
        return min(
            safer,
            key=lambda alternative: (rank(alternative.value_bound), alternative.trial),
            default=None,
        )

    def ties(self, winner: Configuration) -> tuple[int, ...]:
        """Return other confirmed trials whose emissions equal the winner's within the error."""
        spread, winner_kg = self.emissions_spread, winner.emissions_kg_co2e
        if spread is None or not winner_kg > 0 or not self.confirmed(winner):
            return ()
        rest = [
            candidate
            for candidate in self.configurations
            if candidate is not winner and self.confirmed(candidate)
        ]
        return tuple(
            near.trial
            for near in rest
            if near.emissions_kg_co2e > 0
            and abs(math.log(near.emissions_kg_co2e / winner_kg)) <= spread.margin(near.n, winner.n)
        )

    def _noise(self, candidate: Configuration) -> Pooled | None:
        """Return the spread of a configuration's runs; None: one run, or seeds change nothing."""
        if self.value_spread is None or candidate.n == 1 or self._seeds_alike(candidate):
            return None
        return self.value_spread.or_own_if_larger(candidate.scaled_values)


def configurations(records: Iterable[TrialRecord]) -> tuple[Configuration, ...]:
    """Return every configuration that the search completed, by trial number, with its repeats."""
    # The key None stands for the search's own trials.
    repeats_of: defaultdict[int | None, list[TrialRecord]] = defaultdict(list)
    for record in records:
        repeats_of[record.repeat_of].append(record)
    failed = (TrialState.DIVERGED, TrialState.INFEASIBLE)
    return tuple(
        Configuration(
            [record, *filter(objectives, again)], any(run.state in failed for run in again)
        )
        for record in filter(objectives, repeats_of[None])
        for again in [repeats_of[record.trial]]
    )


def curve(record: TrialRecord) -> list[tuple[object, ...]]:
    """Return the steps and values of a trial's evaluations, to their last digit."""
    return [
        (point.step, point.value, point.sum, point.count, point.other_qualities)
        for point in record.evals
    ]


def is_failed_replicate(record: TrialRecord) -> bool:
    """Return whether a run repeated a configuration and ended by itself without a result."""
    ended = record.has_finished and not record.was_cut_off
    return record.repeat_of is not None and ended and objectives(record) is None


def by_means(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the search's trials, with the means of those repeated with other seeds."""
    records = tuple(records)
    by_trial = {record.trial: record for record in records if record.repeat_of is None}
    for candidate in configurations(records):
        if candidate.n > 1:
            quality = candidate.first.quality.model_copy(update={"value": candidate.value})
            means = {"emissions_kg_co2e": candidate.emissions_kg_co2e, "quality": quality}
            by_trial[candidate.trial] = candidate.first.model_copy(update=means)
    return tuple(by_trial.values())


def log_spread(candidates: Iterable[Configuration]) -> Pooled | None:
    """Return the spread of the logarithm of emissions between runs; None: nothing was repeated.

    A configuration that emitted nothing has no logarithm, and does not count.
    """
    emissions_kg = [candidate.emissions_of_runs for candidate in candidates]
    return pooled([math.log(kg) for kg in of_runs] for of_runs in emissions_kg if min(of_runs) > 0)


def _deviation_of_rounding(candidates: Iterable[Configuration]) -> float:
    """Return the least deviation that the values of repeated runs can tell from none.

    A share of n examples is a multiple of 1 ÷ n, so that equal shares show no more than that the
    runs differ by less than an example. What is rounded to multiples of q has an error with the
    deviation q ÷ √12 (JCGM 100:2008, F.2.2.1). 0: the quality is no share of examples, or their
    number is not known, for which scripts have 1.
    """
    counts = [
        run.quality.count
        for candidate in candidates
        if candidate.n > 1 and candidate.quality.is_share_of_examples
        for run in candidate.runs
        if run.quality.count is not None and run.quality.count > 1
    ]
    return 1 / (min(counts) * math.sqrt(12)) if counts else 0.0


def lowest_share(share: float, count: int) -> float:
    """Return the lower end of the interval, at LEVEL, of the share that `count` draws had.

    It is Wilson's (Probable inference, the law of succession, and statistical inference, Journal of
    the American Statistical Association 22, 1927), which also holds for shares of 0 and 1.
    """
    from scipy.special import ndtri  # imported here as in `Pooled.margin`

    squared = float(ndtri((1 + LEVEL) / 2)) ** 2 / count
    middle = share + squared / 2
    margin = math.sqrt(squared * share * (1 - share) + squared**2 / 4)
    return (middle - margin) / (1 + squared)


def welch_margin(means: Iterable[tuple[Pooled, int]]) -> float:
    """Return how far a difference of two means, whose runs spread differently, may lie off.

    It is Welch's, with Satterthwaite's degrees of freedom (NIST/SEMATECH e-Handbook of Statistical
    Methods, 7.3.1).

    Args:
        means: the spread of each mean's runs, and their number.
    """
    from scipy.special import stdtrit  # imported here as in `Pooled.margin`

    parts = [(spread.deviation**2 / n, spread.freedom) for spread, n in means]
    variance = sum(part for part, _ in parts)
    if not variance > 0:
        return 0.0
    freedom = variance**2 / sum(part**2 / of_spread for part, of_spread in parts)
    return float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(variance)


def saved_interval_kg_co2e(
    parts: Iterable[tuple[float, float, float, float]], share: tuple[float, float]
) -> tuple[float, float]:
    """Return the interval of the emissions that a run saves in all of its parts together.

    See `Evidence.saved_interval_kg_co2e`.

    Args:
        parts: of each part the emissions of the taken configuration and of the baseline, and the
            margins of their logarithms.
        share: the interval of the saved share, with which this one agrees on whether there may be
            no saving.
    """
    saved_kg, below_kg, above_kg = 0.0, [], []
    for ours_kg, theirs_kg, *margins in parts:
        ours, theirs = map(math.exp, margins)
        saved_kg += theirs_kg - ours_kg
        below_kg += [theirs_kg - theirs_kg / theirs, ours_kg * ours - ours_kg]
        above_kg += [theirs_kg * theirs - theirs_kg, ours_kg - ours_kg / ours]
    lowest_kg = saved_kg - math.hypot(*below_kg)
    return lowest_kg if share[0] > 0 else min(0.0, lowest_kg), saved_kg + math.hypot(*above_kg)


def less_interval(ratio: float, margin: float) -> tuple[float, float]:
    """Return the interval of 1 − a ratio of emissions whose logarithm has this margin."""
    margin = min(margin, LARGEST_MARGIN)
    return 1 - ratio * math.exp(margin), 1 - ratio * math.exp(-margin)


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """Return the standard deviation about groups' own means; None if no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = math.fsum(
        (value - statistics.fmean(group)) ** 2 for group in repeated for value in group
    )
    return Pooled(math.sqrt(squares / freedom), freedom)
