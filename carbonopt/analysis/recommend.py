"""Answer a study: find the cheapest configuration that reaches the target, and compare it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from carbonopt.analysis.confidence import (
    Confidence,
    Configuration,
    Evidence,
    Standing,
    by_means,
    is_failed_replicate,
)
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import pareto_front
from carbonopt.analysis.shortfall import Shortfall, shortfall
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import Target
from carbonopt.core.trial import START_TRIAL, StopReason, TrialRecord, TrialState
from carbonopt.core.values import Frozen, is_less
from carbonopt.spec.study_data import StudyData

START = "the study's start configuration"
CHOSEN = "the start configuration, which carbonopt chose"
MOST_ACCURATE = "the most accurate complete trial, which choosing by quality alone would take"


class Baseline(Frozen):
    """The trial that the recommendation is compared with, and the reason for the choice."""

    trial: int
    why: str
    params: TrialParams
    value: float  # value of the quality
    emissions_kg_co2e: float
    is_start: bool  # whether it is the configuration that the study file starts from
    is_chosen: bool = False  # whether carbonopt chose it, with the space
    meets_target: bool


class Closest(Frozen):
    """The trial that came closest when no configuration is recommended."""

    trial: int
    state: TrialState
    why: str
    params: TrialParams
    value: float  # value of the quality
    emissions_kg_co2e: float | None  # for an unfinished trial, as far as it got
    interrupted: bool  # whether it will be run again when the study goes on
    seeds: int = 1  # number of seeds over which its quality and emissions are means


class Rejected(Frozen):
    """A configuration whose first run met the target, but whose repeats refute that.

    Beside a recommendation these are the cheaper ones.
    """

    trial: int
    seeds: int  # number of seeds that completed
    value: float  # mean of the quality over them
    failed_replicate: bool  # whether it diverged or did not fit in memory with another seed


class Answer(Frozen):
    """The recommendation for a target, and the saving of a run.

    All is None when no configuration is recommended. The figures of a repeated configuration are
    means over its seeds (of the quality as `Configuration.value`).
    """

    trial: int | None = None
    value: float | None = None  # value of the quality
    emissions_kg_co2e: float | None = None  # emissions of the training window, PUE included
    energy_kwh: float | None = None  # energy of the training window, without PUE
    # 1 − emissions ÷ the baseline's; negative when the baseline is cheaper
    saving_fraction: float | None = None
    # Interval of saving_fraction, at LEVEL. None: nothing was repeated, the trial is the baseline,
    # or one of the two emitted nothing.
    saving_interval: tuple[float, float] | None = None
    break_even_runs: int | None = None  # runs that pay the study back; None: a run saves nothing
    # Fewest and most of these runs, at the ends of the interval of what a run saves; most is None
    # if a run may save nothing. None: there is no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None = None


class Recommendation(Answer):
    """The trial to take, and what speaks for it."""

    target: Target
    params: TrialParams | None  # None: no configuration is recommended
    baseline: Baseline | None  # None: no trial completed
    closest: Closest | None  # only when no configuration is recommended
    shortfall: Shortfall | None  # the closest trial's; None: there is none, or it did not complete
    # trial numbers, by emissions; repeated configurations count with their means
    pareto_front: tuple[int, ...]
    trials_by_state: dict[TrialState, int]  # has every state, 0 where there are none
    study_energy_kwh: float
    study_emissions_kg_co2e: float
    repeats: int  # number of trials that repeat another one's configuration with another seed
    repeats_energy_kwh: float  # part of the study's energy that these used
    repeats_emissions_kg_co2e: float
    confidence: Confidence | None  # None: nothing was recommended, or nothing repeated
    # other confirmed trials, whose emissions can't be distinguished from the winner's
    ties: tuple[int, ...]
    rejected: tuple[Rejected, ...]  # sorted by the emissions of their first runs
    # trials that repeated the recommended configuration and ended without a result; where nothing
    # is recommended, those that repeated a rejected one
    failed_replicates: tuple[int, ...]

    @property
    def seeds(self) -> int:
        """The number of complete runs of the recommended, or else the closest, configuration."""
        if self.confidence is not None:
            return self.confidence.seeds
        return 1 if self.closest is None else self.closest.seeds

    @property
    def met(self) -> bool:
        return self.trial is not None

    def as_json(self) -> dict[str, Any]:
        """Return what `carbonopt recommend --json` prints, but for the `caveats`' sentences."""
        dumped = self.model_dump(mode="json")
        answer: dict[str, Any] = {
            "target": self.target.as_json(),
            "met": self.met,
            "trial": self.trial,
            "params": self.params.as_record() if self.params else None,
            "quality": {"name": self.target.quality.name, "value": self.value},
            "emissions_kg_co2e": self.emissions_kg_co2e,
            "energy_kwh": self.energy_kwh,
            "baseline": self._trial_as_json(self.baseline),
            "saving_fraction": self.saving_fraction,
            "saving_interval": dumped["saving_interval"],
            "pareto_front": dumped["pareto_front"],
            "study": {
                "trials": dumped["trials_by_state"],
                "energy_kwh": self.study_energy_kwh,
                "emissions_kg_co2e": self.study_emissions_kg_co2e,
                "break_even_runs": self.break_even_runs,
                "break_even_interval": dumped["break_even_interval"],
            },
            **{
                name: dumped[name]
                for name in ("confidence", "ties", "failed_replicates", "rejected")
            },
        }
        if not self.met:
            answer |= {
                "closest": self._trial_as_json(self.closest),
                "shortfall": dumped["shortfall"],
            }
        return answer

    def _trial_as_json(self, trial: Baseline | Closest | None) -> dict[str, Any] | None:
        if trial is None:
            return None
        dumped = trial.model_dump(mode="json", exclude={"is_start", "is_chosen", "meets_target"})
        return {
            **dumped,
            "params": trial.params.as_record(),
        }


class TargetRange(Answer):
    """The recommendation for all targets in a range.

    The range begins at `from_value` and goes on to easier targets. It ends before the `from_value`
    of the next range, which it does not include.
    """

    from_value: float  # for the first range, the best value that there can be
    # Whether the range is the study's own target alone. Its repeats were made for that target, so
    # that a configuration confirmed for it comes before a cheaper one that ran once. For targets
    # just beyond it, the answer of the range before holds again.
    study_target_only: bool
    seeds: int  # number of complete runs of its configuration; 0: there is none
    # bound of its mean over all seeds, at LEVEL; None: it ran once, or no bound is known
    value_bound: float | None
    baseline_trial: int | None


def recommend(data: StudyData, target_value: float | None = None) -> Recommendation:
    """Recommend the configuration with the least emissions among those that meet the target.

    For configurations that were repeated, see `_Best`. Ties go to the better quality, then to the
    lower trial number.

    Args:
        target_value: None: the study's own target. Another one needs no new trial.

    Raises:
        BadInput: if a study file could not have the target.
    """
    target = data.config.target.at(target_value)
    quality = target.quality
    lowest, highest = data.config.target.bounds
    if not lowest <= target.value <= highest or not math.isfinite(target.value):
        raise BadInput(
            f"the target must be {quality.with_article} from {lowest:g} to {highest:g}, but is"
            f" {target.value}."
        )
    evidence = Evidence.of(data, target)
    standings = {config: evidence.standing(config) for config in evidence.configurations}
    winner = cheapest(standings, evidence if target == data.config.target.at() else None)
    repeated = any(config.repeated for config in standings)
    baseline = _baseline(data, evidence.configurations)
    spent = footprint(data)
    closest = None if winner else _closest(data.records, evidence.configurations)
    rejected = tuple(_rejected(standings, winner, target))
    repeated_trials = {winner.trial} if winner else {each.trial for each in rejected}
    return Recommendation(
        **(
            dict(_answer(evidence, winner, baseline, spent.emissions_kg_co2e))
            if winner and baseline
            else {}
        ),
        target=target,
        params=winner.first.params if winner else None,
        baseline=_described(data, baseline, target) if baseline else None,
        closest=closest,
        shortfall=shortfall(data, closest.trial, closest.value, target) if closest else None,
        pareto_front=pareto_front(by_means(data.records)),
        trials_by_state={
            state: sum(record.state is state for record in data.records) for state in TrialState
        },
        study_energy_kwh=spent.energy_kwh,
        study_emissions_kg_co2e=spent.emissions_kg_co2e,
        repeats=sum(record.repeat_of is not None for record in data.records),
        repeats_energy_kwh=spent.repeats_kwh,
        repeats_emissions_kg_co2e=spent.repeats_emissions_kg_co2e,
        confidence=evidence.confidence(winner) if winner and repeated else None,
        ties=evidence.ties(winner) if winner else (),
        rejected=rejected,
        failed_replicates=tuple(
            run.trial
            for run in data.records
            if run.repeat_of in repeated_trials and is_failed_replicate(run)
        ),
    )


def cheaper_but_unsure(data: StudyData, rec: Recommendation) -> tuple[int, ...]:
    """Return cheaper trials that met the target, but that repeats have not shown to meet it.

    They were passed over for a configuration whose repeats say more. Without repeats there are
    none: the recommendation is then the cheapest trial that met the target.
    """
    if rec.confidence is None or rec.emissions_kg_co2e is None:
        return ()
    settled = {rec.trial, *rec.ties, *(rejected.trial for rejected in rec.rejected)}
    return tuple(
        record.trial
        for record in data.records
        if record.repeat_of is None
        and record.trial not in settled
        and record.meets(rec.target)
        and record.emissions_kg_co2e is not None
        and is_less(record.emissions_kg_co2e, rec.emissions_kg_co2e)
    )


def recommendation_by_target(data: StudyData) -> tuple[TargetRange, ...]:
    """Return the recommendation as a step function of the target, from the best value on.

    No two neighbours recommend the same. `target_range_for` finds in it what `recommend` would say.
    """
    own_target = data.config.target.at()
    evidence = Evidence.of(data, own_target)
    baseline = _baseline(data, evidence.configurations)
    study_kg = footprint(data).emissions_kg_co2e
    return tuple(
        TargetRange(
            **(dict(_answer(evidence, winner, baseline, study_kg)) if winner and baseline else {}),
            from_value=from_value,
            study_target_only=only,
            seeds=winner.n if winner else 0,
            value_bound=evidence.bound(winner) if winner else None,
            baseline_trial=baseline.trial if baseline else None,
        )
        for from_value, only, winner in _steps(evidence, own_target)
    )


def target_range_for(ranges: Sequence[TargetRange], target: Target) -> TargetRange:
    """Return the range that a target lies in."""
    rank, own_rank = target.quality.rank, target.quality.rank(target.value)
    return next(
        answer
        for answer in reversed(ranges)
        if answer.from_value == target.value
        or (rank(answer.from_value) < own_rank and not answer.study_target_only)
    )


_BY_MEANS, _BY_FIRST_RUN = attrgetter("mean_rank"), attrgetter("rank")


class _Best:
    """Collects configurations, and chooses among them.

    For the target that the repeats were made for, the choice is the first of these that exists:

    1. the cheapest confirmed configuration, by its means;
    2. the cheapest that has run with all its seeds and meets the target on average, though by less
       than the error;
    3. of the cheapest that was repeated with some of its seeds and meets it on average, and the
       cheapest that ran once and meets it, the one whose mean is likelier to meet it
       (`Evidence.chance_to_meet`), which counts how lucky first runs are;
    4. the cheapest that ran once.

    For another target it is the cheapest of all of them: a configuration that was repeated is no
    better there than a cheaper one that ran once. A configuration may be added several times while
    targets get easier, each time with its next standing.
    """

    def __init__(self) -> None:
        # The cheapest of each standing: of those that were repeated, and of all.
        self._by_means: dict[Standing, Configuration] = {}
        self._by_first_run: dict[Standing, Configuration] = {}

    def take(self, config: Configuration, standing: Standing) -> None:
        ranked = [(self._by_first_run, _BY_FIRST_RUN)]
        if config.n > 1:
            ranked.append((self._by_means, _BY_MEANS))
        for cheapest, rank in ranked:
            cheapest[standing] = min(cheapest.get(standing, config), config, key=rank)

    def answer(self, evidence: Evidence | None) -> Configuration | None:
        """Return the choice.

        Args:
            evidence: the evidence for the target that the repeats were made for, if it is asked
                for; None: another one is.
        """
        by_means, by_first_run = self._by_means, self._by_first_run
        holding = by_means.get(Standing.CONFIRMED)
        meeting = (
            config for standing, config in by_first_run.items() if standing is not Standing.REJECTED
        )
        met = min(meeting, key=_BY_FIRST_RUN, default=None)
        if evidence is None:
            return holding if met is by_first_run.get(Standing.CONFIRMED) else met
        settled = holding or by_means.get(Standing.INCONCLUSIVE)
        repeated = by_means.get(Standing.INCOMPLETE)
        if settled is None and repeated is not None and met is not None:
            return max(repeated, met, key=evidence.chance_to_meet)
        return settled or met


def cheapest(
    standings: Mapping[Configuration, Standing], evidence: Evidence | None
) -> Configuration | None:
    """Return the configuration to take, by `_Best`; None: none meets the target.

    Args:
        standings: the configurations' standings for the target.
        evidence: see `_Best.answer`.
    """
    best = _Best()
    for config, standing in standings.items():
        best.take(config, standing)
    return best.answer(evidence)


def _rejected(
    standings: Mapping[Configuration, Standing], winner: Configuration | None, target: Target
) -> Iterator[Rejected]:
    for config in sorted(standings, key=_BY_FIRST_RUN):
        if (
            standings[config] is Standing.REJECTED
            and config.first.meets(target)
            and (winner is None or config.rank < winner.rank)
        ):
            failed = config.failed_replicate
            yield Rejected(
                trial=config.trial, seeds=config.n, value=config.value, failed_replicate=failed
            )


def _most_accurate(tried: Iterable[Configuration]) -> Configuration:
    return min(
        tried, key=lambda config: (config.quality.rank_to_rounding(config.value), *config.mean_rank)
    )


def _baseline(data: StudyData, tried: Sequence[Configuration]) -> Configuration | None:
    """Return the start configuration if it completed, else the most accurate one.

    None: none completed.
    """
    if data.config.search.start and tried and tried[0].trial == START_TRIAL:
        return tried[0]
    return _most_accurate(tried) if tried else None


def _described(data: StudyData, baseline: Configuration, target: Target) -> Baseline:
    is_start, meets_target = (
        bool(data.config.search.start) and baseline.trial == START_TRIAL,
        target.is_met_by(baseline.value),
    )
    is_chosen = is_start and data.prepared is not None and data.prepared.auto is not None
    why = CHOSEN if is_chosen else START if is_start else MOST_ACCURATE
    if data.config.search.start and not is_start:
        why += "; the start configuration did not complete"
    why += "" if meets_target else "; it misses the target"
    return Baseline(
        trial=baseline.trial,
        why=why,
        params=baseline.first.params,
        value=baseline.value,
        emissions_kg_co2e=baseline.emissions_kg_co2e,
        is_start=is_start,
        is_chosen=is_chosen,
        meets_target=meets_target,
    )


def _answer(
    evidence: Evidence, winner: Configuration, baseline: Configuration, study_kg: float
) -> Answer:
    winner_kg, baseline_kg = winner.emissions_kg_co2e, baseline.emissions_kg_co2e
    return Answer(
        trial=winner.trial,
        value=winner.value,
        emissions_kg_co2e=winner_kg,
        energy_kwh=winner.energy_kwh,
        saving_fraction=1 - winner_kg / baseline_kg if baseline_kg else None,
        saving_interval=evidence.saving_interval(winner, baseline),
        break_even_runs=(
            break_even(study_kg, baseline_kg - winner_kg)
            if is_less(winner_kg, baseline_kg)
            else None
        ),
        break_even_interval=break_even_interval(
            study_kg, evidence.saved_interval_kg_co2e(winner, baseline)
        ),
    )


def break_even(spent_kg: float, saved_kg: float) -> int | None:
    """Return the runs after which what was spent is saved; None: a run saves nothing."""
    return math.ceil(spent_kg / saved_kg) if saved_kg > 0 else None


def break_even_interval(
    spent_kg: float, saved_kg: tuple[float, float] | None
) -> tuple[int, int | None] | None:
    """Return the fewest and most such runs, from the interval of what a run saves.

    Most is None if a run may save nothing. None: there is no interval, or none of it is a saving.
    """
    lowest_kg, highest_kg = saved_kg or (0.0, 0.0)
    fewest = break_even(spent_kg, highest_kg)
    return None if fewest is None else (fewest, break_even(spent_kg, lowest_kg))


def _not_failed(tried: Iterable[Configuration]) -> list[Configuration]:
    return [config for config in tried if not config.failed_replicate]


def _why_closest(closest: Configuration, tried: Sequence[Configuration]) -> str:
    """Say by what a complete trial is the closest, and among which."""
    why = "the complete trial with the best quality"
    if any(config.n > 1 for config in tried):
        why += ", by the mean where it was repeated"
    if closest.failed_replicate:
        why += "; with another seed it did not complete"
    elif len(_not_failed(tried)) < len(tried):
        why += ", among those of which no repeat failed"
    return why


def _closest(records: Iterable[TrialRecord], tried: Sequence[Configuration]) -> Closest | None:
    """Return the complete trial with the best quality, or an unfinished one that is better.

    An unfinished one is judged by its last evaluation. Complete ones whose repeats failed count
    only where there are no others.
    """
    emissions_kg: float | None
    unfinished = [
        (run.evals[-1].value, run)
        for run in records
        if run.evals and run.state is not TrialState.COMPLETE
    ]
    reached = [(value, run) for value, run in unfinished if value is not None]
    config = _most_accurate(_not_failed(tried) or tried) if tried else None
    last = min(
        reached,
        key=lambda entry: (entry[1].quality.of.rank(entry[0]), entry[1].trial),
        default=None,
    )
    rank = None if last is None else last[1].quality.of.rank(last[0])
    if config is not None and (rank is None or config.quality.rank(config.value) <= rank):
        record, value, emissions_kg, seeds = (
            config.first,
            config.value,
            config.emissions_kg_co2e,
            config.n,
        )
        why = _why_closest(config, tried)
    elif last is None:
        return None
    else:
        value, record = last
        emissions_kg, seeds = record.emissions_kg_co2e, 1
        progress = f"step {record.evals[-1].step}" + (
            f" of {record.total_steps}" if record.total_steps else ""
        )
        none = "no trial completed; " if config is None else ""
        why = f"{none}the best last evaluation, at {progress}"
        if record.stop_reason is StopReason.INTERRUPTED:
            why += "; it was interrupted, and the study goes on with it"
    return Closest(
        trial=record.trial,
        state=record.state,
        why=why,
        params=record.params,
        value=value,
        emissions_kg_co2e=emissions_kg,
        interrupted=record.stop_reason is StopReason.INTERRUPTED,
        seeds=seeds,
    )


def _steps(
    evidence: Evidence, own_target: Target
) -> Iterator[tuple[float, bool, Configuration | None]]:
    """Yield each range's beginning, whether it is the own target's alone, and the answer there."""
    quality = own_target.quality
    best_rank, own_rank = quality.rank(quality.best), quality.rank(own_target.value)
    changes = [
        (max(quality.rank(value), best_rank), config, standing)
        for config in evidence.configurations
        for value, standing in evidence.standings(config)
    ]
    changes.sort(key=itemgetter(0))  # stable: a configuration's standings stay in their order
    best, last = _Best(), None
    at = {rank: list(group) for rank, group in itertools.groupby(changes, key=itemgetter(0))}
    for rank in sorted({best_rank, own_rank, *at}):
        for _, config, standing in at.get(rank, ()):
            best.take(config, standing)
        winner = best.answer(None)
        if winner is not last or rank == best_rank:
            yield quality.rank(rank), False, winner
        last = winner
        if rank == own_rank and (confirmed := best.answer(evidence)) is not winner:
            yield quality.rank(rank), True, confirmed
