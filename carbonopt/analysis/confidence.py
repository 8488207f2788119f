"""How sure an answer is: what repeats with other seeds allow to say, and how often the pruning was wrong.

Values are compared on the scale of their quality (`Quality.scaled`), where seeds move all configurations alike. One
standard deviation is pooled over all that were repeated: three seeds alone say little (docs/confirmation.md)."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from carbonopt.analysis.front import objectives, pareto_front
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen, Spread

LEVEL = 0.95
LARGEST_MARGIN = 500.0  # of a logarithm: beyond it nothing is known, and its exponential is still a number
NEARLY_AS_CHEAP = 0.05  # of the recommended one's emissions
# A trial that ended otherwise (by the budget, a crash) doesn't tell whether it would have mattered.
_TELLING = (TrialState.COMPLETE, TrialState.DIVERGED)


class Standing(StrEnum):
    """What is known of a configuration against the target."""

    CONFIRMED = "confirmed"  # repeated, and its mean is below the target by more than the error
    UNREPLICATED = "unreplicated"  # below the target so far, but it has not run with all its seeds
    INCONCLUSIVE = "inconclusive"  # it has, and its mean is below the target by less than the error
    REJECTED = "rejected"  # its mean is above the target, or it did not fit or diverged with another seed


class Configuration:
    """A complete trial of the search, the first of `runs`, and its complete repeats with other seeds;
    `failed_replicate`: another repeat diverged or did not fit in memory."""

    def __init__(self, runs: Sequence[TrialRecord], failed_replicate: bool = False) -> None:
        self.runs, self.first, self.n = tuple(runs), runs[0], len(runs)
        self.failed_replicate = failed_replicate
        self.repeated = self.n > 1 or failed_replicate
        self.trial, self.quality = self.first.trial, self.first.quality.of
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
        self.rank = (self.emissions_of_runs[0], self.quality.rank(self.values[0]), self.trial)
        self.mean_rank = (self.emissions_kg_co2e, self.quality.rank(self.value), self.trial)

    @property
    def energy_kwh(self) -> float | None:
        """Of the training window; None where it is not known of every run."""
        return self._mean(run.energy_kwh.train for run in self.runs if run.energy_kwh is not None)

    @property
    def gpu_start_temperature_c(self) -> float | None:
        """As the trainings began; None likewise."""
        began_c = (run.gpu_start_temperature_c for run in self.runs)
        return self._mean(degrees for degrees in began_c if degrees is not None)

    def _mean(self, known: Iterable[float]) -> float | None:
        of_runs = list(known)
        return statistics.fmean(of_runs) if len(of_runs) == self.n else None


@dataclass(frozen=True)
class Pooled:
    """Of several configurations' runs: the standard deviation of one run about its configuration's mean."""

    deviation: float
    freedom: int  # degrees of it

    def margin(self, *runs: int) -> float:
        """How far a mean of so many runs may lie from the truth; of two counts, a difference of two means.

        Student's t with a pooled standard deviation (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.2 and 7.3.1),
        two-sided against the target, too, because the search chose by the first run (docs/confirmation.md)."""
        # Student's t without the second that importing scipy.stats takes, and here: every command imports this file.
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.deviation * math.sqrt(sum(1 / n for n in runs))

    def at_least(self, values: Sequence[float]) -> "Pooled":
        """With one configuration's own deviation where that is known and larger."""
        return replace(self, deviation=max(self.deviation, statistics.stdev(values))) if len(values) > 1 else self


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

    level: float = LEVEL
    seeds: int  # complete runs of the configuration, each with its own seed
    trials: tuple[int, ...]  # their numbers
    value_mean: float  # as `Configuration.value`
    value_deviation: float | None  # standard deviation of one run: pooled or its own; None: it ran once
    # At that level, the mean over all seeds is no worse; None: it ran once, or its runs differ beyond all bounds.
    value_bound: float | None
    emissions_deviation_kg_co2e: float | None  # likewise
    confirmed: bool  # the bound meets the target
    safer_alternative: SaferAlternative | None  # None: it holds, it has no bound, or no other is as cheap and surer


class Repeats(Frozen):
    """One configuration that completed at least twice."""

    params: TrialParams
    trials: tuple[int, ...]  # their numbers
    seeds: tuple[int, ...]  # different ones; a single seed leaves the quality no reason to differ
    value: Spread  # of the quality
    emissions_kg_co2e: Spread  # of the training window, PUE in
    # What its repeats with other seeds say, by the same means and bounds as the recommendation's confidence:
    value_mean: float  # as `Configuration.value`
    value_bound: float | None  # of that mean over all seeds, at `level`; None: no repeats, or beyond all bounds
    level: float = LEVEL
    failed_replicate: bool  # with another seed it diverged or did not fit in memory

    def standing(self, target: Target) -> Standing | None:
        """None: it completed more than once within the search alone, which was not made to judge it."""
        if self.failed_replicate or (self.value_bound is not None and not target.is_met_by(self.value_mean)):
            return Standing.REJECTED
        if self.value_bound is None:
            return None
        return Standing.CONFIRMED if target.is_met_by(self.value_bound) else Standing.INCONCLUSIVE

    @property
    def n(self) -> int:
        return len(self.trials)


class Audit(Frozen):
    """Of the trials that were to be stopped for their target and ran on. The interval is Clopper and Pearson's, which
    holds for any number of trials."""

    ended: int  # ran to their end
    mattered: int  # of these, met the target after all; with search.goal: front, ended on the front
    cut_short: int  # did not reach their end, for another reason, or still run
    lowest_rate: float | None  # of `mattered` among `ended`; None: none ended
    highest_rate: float | None
    level: float = LEVEL  # of that interval


class Evidence:
    """What is known of configurations against one target (None: only bounds are asked for); `seeds`: with how many one
    is to be run before it is judged."""

    def __init__(self, tried: Iterable[Configuration], target: Target | None, seeds: int) -> None:
        self.configurations, self._target, self._seeds = tuple(tried), target, seeds
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

    def chance(self, config: Configuration) -> float:
        """That it is confirmed once it has run with all its seeds, of one that hasn't. Until then nothing else is known
        of its true mean: given that of n runs, the mean of k more is normal with variance deviation² × (1 ÷ n + 1 ÷ k).
        1 where nothing was repeated, and no deviation is known."""
        from scipy.special import ndtr  # as in `Pooled.margin`

        if self.scaled_value is None or self._target is None:
            return 1.0
        more = self._seeds - config.n
        noise = self.scaled_value.at_least(config.scaled_values)
        needed = replace(noise, freedom=noise.freedom + more).margin(self._seeds)
        slack = -self._target.shortfall(config.value) - needed
        deviation = noise.deviation * more / self._seeds * math.sqrt(1 / config.n + 1 / more)
        return float(ndtr(slack / deviation)) if deviation > 0 else float(slack >= 0)

    def confidence(self, config: Configuration) -> Confidence:
        noise, emissions = self._noise(config), self.emissions and self.emissions.at_least(config.emissions_of_runs)
        return Confidence(
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

        Runs differ by shares, so that one standard deviation of the logarithms, pooled, serves all configurations. The
        log of a ratio of means has the variance deviation² × (1 ÷ n + 1 ÷ n') (Hedges, Gurevitch and Curtis, The
        meta-analysis of response ratios, Ecology 80, 1999).

        None: nothing was repeated, it is the baseline itself, or one of the two emitted nothing."""
        if self._log_emissions is None or config.trial == baseline.trial:
            return None
        if not (config.emissions_kg_co2e > 0 and baseline.emissions_kg_co2e > 0):
            return None
        margin = min(self._log_emissions.margin(config.n, baseline.n), LARGEST_MARGIN)
        ratio = config.emissions_kg_co2e / baseline.emissions_kg_co2e
        return 1 - ratio * math.exp(margin), 1 - ratio * math.exp(-margin)

    def _safer_alternative(self, winner: Configuration) -> SaferAlternative | None:
        """Of a winner in doubt: the lowest bound of those that cost the same but for the error or NEARLY_AS_CHEAP."""
        bound, rank, winner_kg = self.bound(winner), winner.quality.rank, winner.emissions_kg_co2e
        if bound is None or self.emissions is None or self.confirmed(winner) or not winner_kg > 0:
            return None
        safer = [
            SaferAlternative(
                trial=config.trial,
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
        margin, winner_kg = self.emissions.margin, winner.emissions_kg_co2e
        rest = [config for config in self.configurations if config is not winner and self.confirmed(config)]
        return tuple(near.trial for near in rest if abs(near.emissions_kg_co2e - winner_kg) <= margin(near.n, winner.n))

    def _noise(self, config: Configuration) -> Pooled | None:
        return self.scaled_value.at_least(config.scaled_values) if self.scaled_value and config.n > 1 else None


def configurations(records: Iterable[TrialRecord]) -> tuple[Configuration, ...]:
    """Every configuration that the search completed, by trial number, with its repeats."""
    repeats_of: defaultdict[int | None, list[TrialRecord]] = defaultdict(list)  # None: the search's own
    for record in records:
        repeats_of[record.repeat_of].append(record)
    failed = (TrialState.DIVERGED, TrialState.INFEASIBLE)
    return tuple(
        Configuration([record, *filter(objectives, again)], any(run.state in failed for run in again))
        for record in filter(objectives, repeats_of[None])
        for again in [repeats_of[record.trial]]
    )


def by_means(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """The search's trials; those whose configuration was repeated with other seeds have its means."""
    records = tuple(records)
    by_trial = {record.trial: record for record in records if record.repeat_of is None}
    for config in configurations(records):
        if config.n > 1:
            quality = config.first.quality.model_copy(update={"value": config.value})
            means = {"emissions_kg_co2e": config.emissions_kg_co2e, "quality": quality}
            by_trial[config.trial] = config.first.model_copy(update=means)
    return tuple(by_trial.values())


def pooled(groups: Iterable[Sequence[float]]) -> Pooled | None:
    """The standard deviation about the groups' own means; None where no group has two values."""
    repeated = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return None
    squares = math.fsum((value - statistics.fmean(group)) ** 2 for group in repeated for value in group)
    return Pooled(math.sqrt(squares / freedom), freedom)


def repeats(records: Iterable[TrialRecord]) -> tuple[Repeats, ...]:
    """All configurations that completed at least twice, by their first trial; what is not finite doesn't count."""
    records = tuple(records)
    evidence = Evidence(configurations(records), None, seeds=1)  # of its bounds alone, which know no target
    judged = {again.first.params: again for again in evidence.configurations if again.repeated}
    by_params: dict[TrialParams, list[TrialRecord]] = {}
    for record in sorted(records, key=lambda record: record.trial):
        if objectives(record):
            by_params.setdefault(record.params, []).append(record)
    return tuple(_repeats(runs, judged.get(params), evidence) for params, runs in by_params.items() if len(runs) >= 2)


def _repeats(runs: Sequence[TrialRecord], judged: Configuration | None, evidence: Evidence) -> Repeats:
    every_run = Configuration(runs)
    return Repeats(
        params=runs[0].params,
        trials=tuple(run.trial for run in runs),
        seeds=tuple(sorted({run.seed for run in runs})),
        value=_spread(every_run.values),
        emissions_kg_co2e=_spread(every_run.emissions_of_runs),
        value_mean=(judged or every_run).value,
        value_bound=None if judged is None else evidence.bound(judged),
        failed_replicate=judged is not None and judged.failed_replicate,
    )


def repeats_of(params: TrialParams | None, every: Iterable[Repeats]) -> Repeats | None:
    return next((repeated for repeated in every if repeated.params == params), None)


def _spread(values: Sequence[float]) -> Spread:
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return Spread(mean=mean, standard_deviation=deviation, lowest=min(values), highest=max(values))


def audit(data: StudyData) -> Audit | None:
    """How often the rule was wrong where it was checked; None where no audit was asked for."""
    search, target = data.config.search, data.config.target.at()
    if not search.pruning.audit:
        return None
    audited = [record for record in data.records if record.audited_at_step is not None]
    ended = [record for record in audited if record.state in _TELLING]
    front = pareto_front(record for record in data.records if record.repeat_of is None)
    mattered = sum(record.trial in front if search.goal == "front" else record.meets(target) for record in ended)
    lowest, highest = _rate_interval(mattered, len(ended)) if ended else (None, None)
    cut_short = len(audited) - len(ended)
    return Audit(ended=len(ended), mattered=mattered, cut_short=cut_short, lowest_rate=lowest, highest_rate=highest)


def _rate_interval(hits: int, n: int) -> tuple[float, float]:
    from scipy.special import betaincinv  # as in `Pooled.margin`

    tail = (1 - LEVEL) / 2
    lowest = float(betaincinv(hits, n - hits + 1, tail)) if hits else 0.0
    return lowest, float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
