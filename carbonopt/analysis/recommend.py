"""The study's answer: the cheapest configuration that reaches the target, and what it is compared with."""

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from carbonopt.analysis.confidence import Confidence, Configuration, Evidence, Standing, by_means
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import objectives, pareto_front
from carbonopt.analysis.shortfall import Shortfall, shortfall
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import PERPLEXITY, Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.core.values import Frozen

START = "the study's start configuration"
MOST_ACCURATE = "the most accurate complete trial, which choosing by quality alone would take"


class Baseline(Frozen):
    """The trial that the recommendation is compared with, and why that one."""

    trial: int
    why: str
    params: TrialParams
    value: float  # of the quality
    emissions_kg_co2e: float
    is_start: bool  # the configuration that the study file starts from
    meets_target: bool


class Closest(Frozen):
    """What came closest when no trial met the target."""

    trial: int
    state: TrialState
    why: str
    params: TrialParams
    value: float  # of the quality
    emissions_kg_co2e: float | None  # of an unfinished trial: as far as it got
    interrupted: bool  # it will be run again when the study goes on
    seeds: int = 1  # over how many its quality and emissions are means

    @property
    def status(self) -> str:
        return "interrupted, to be run again" if self.interrupted else self.state.value


class Rejected(Frozen):
    """A cheaper configuration whose first run met the target, but which doesn't hold it by its repeats."""

    trial: int
    seeds: int  # that completed
    value: float  # mean over them
    failed_replicate: bool  # with another seed it diverged or did not fit in memory


class Answer(Frozen):
    """What is recommended for a target, and what a run of it saves; all None when no trial met the target.

    Of a configuration that was repeated with other seeds, all figures are means over them (of the quality as
    `Configuration.value`).
    """

    trial: int | None = None
    value: float | None = None  # of the quality
    emissions_kg_co2e: float | None = None  # of the training window, PUE in
    energy_kwh: float | None = None  # of the training window, PUE not in
    saving_fraction: float | None = None  # 1 − emissions ÷ baseline's; negative when the baseline is cheaper
    # Of saving_fraction, at LEVEL. None: nothing was repeated, it is its own baseline, or one of them emitted nothing.
    saving_interval: tuple[float, float] | None = None
    break_even_runs: int | None = None  # that pay the study back; None: a run saves nothing
    # At the ends of the saving's interval, the baseline's emissions as they are. Its second is None where the saving
    # may be none: then no number is sure to be enough. None: the saving has no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None = None


class Recommendation(Answer):
    """Which trial to take."""

    target: Target
    params: TrialParams | None  # None: no trial met the target
    baseline: Baseline | None  # None: no trial completed
    closest: Closest | None  # only when no trial met the target
    shortfall: Shortfall | None  # of the closest trial; None: there is none, or it did not complete
    pareto_front: tuple[int, ...]  # trial numbers, by emissions; of repeated configurations the means count
    trials_by_state: dict[TrialState, int]  # every state, 0 where none
    study_energy_kwh: float
    study_emissions_kg_co2e: float
    repeats: int  # of the trials, those that repeat another one's configuration with another seed
    repeats_energy_kwh: float  # of the study's, what these used
    repeats_emissions_kg_co2e: float
    confidence: Confidence | None  # None: nothing was recommended, or nothing repeated
    ties: tuple[int, ...]  # trials that hold the target, too, at emissions that can't be told from the winner's
    rejected: tuple[Rejected, ...]  # by the emissions of their first runs
    failed_replicates: tuple[int, ...]  # trials: repeats of the recommended configuration that ended without a result

    @property
    def met(self) -> bool:
        return self.trial is not None

    def as_json(self) -> dict[str, Any]:
        """What `carbonopt recommend --json` prints, but for the `caveats`, which are sentences."""
        dumped = self.model_dump(mode="json")
        answer: dict[str, Any] = {
            "target": self.target.as_json(),
            "target_perplexity": self._if_perplexity(self.target.value),
            "met": self.met,
            "trial": self.trial,
            "params": self.params.as_record() if self.params else None,
            "quality": {"name": self.target.quality.name, "value": self.value},
            PERPLEXITY.name: self._if_perplexity(self.value),
            "emissions_kg_co2e": self.emissions_kg_co2e,
            "energy_kwh": self.energy_kwh,
            "baseline": self._trial_as_json(self.baseline),
            "saving_fraction": self.saving_fraction,
            "pareto_front": dumped["pareto_front"],
            "study": {
                "trials": dumped["trials_by_state"],
                "energy_kwh": self.study_energy_kwh,
                "emissions_kg_co2e": self.study_emissions_kg_co2e,
                "break_even_runs": self.break_even_runs,
            },
            **{name: dumped[name] for name in ("confidence", "ties", "failed_replicates", "rejected")},
        }
        if not self.met:
            answer |= {"closest": self._trial_as_json(self.closest), "shortfall": dumped["shortfall"]}
        return answer

    def _trial_as_json(self, trial: Baseline | Closest | None) -> dict[str, Any] | None:
        if trial is None:
            return None
        dumped = trial.model_dump(mode="json", exclude={"is_start", "meets_target"})
        return {**dumped, "params": trial.params.as_record(), PERPLEXITY.name: self._if_perplexity(trial.value)}

    def _if_perplexity(self, value: float | None) -> float | None:
        """For those who read answers from before there were other qualities."""
        return value if self.target.quality is PERPLEXITY else None


def recommend(data: StudyData, target_value: float | None = None) -> Recommendation:
    """The configuration with the least emissions among those that meet the target.

    Ties go to the better quality, then to the lower trial number. Without `target_value` the study's own target counts;
    another one needs no new trial. Where configurations were repeated with other seeds, see `Best`.

    Raises:
        BadInput: if `target_value` is no finite value of the quality.
    """
    target = data.config.target.at(target_value)
    quality = target.quality
    if quality.beyond(target.value) or not math.isfinite(target.value):
        raise BadInput(f"the target must be a finite {quality.name}, {quality.bounds_text}, but got {target.value:g}.")
    evidence = Evidence.of(data, target)
    best = Best()
    for config in evidence.configurations:
        best.take(config, evidence.standing(config))
    winner = best.answer(confirmed_for_it=target == data.config.target.at())
    baseline = find_baseline(data, evidence.configurations)
    spent = footprint(data)
    closest = None if winner else _closest(data.records, evidence.configurations)
    return Recommendation(
        **dict(answer(evidence, winner, baseline, spent.emissions_kg_co2e)),
        target=target,
        params=winner.first.params if winner else None,
        baseline=_described(data, baseline, target) if baseline else None,
        closest=closest,
        shortfall=shortfall(data, closest.trial, closest.value, target) if closest else None,
        pareto_front=pareto_front(by_means(data.records)),
        trials_by_state={state: sum(record.state is state for record in data.records) for state in TrialState},
        study_energy_kwh=spent.energy_kwh,
        study_emissions_kg_co2e=spent.emissions_kg_co2e,
        repeats=sum(record.repeat_of is not None for record in data.records),
        repeats_energy_kwh=spent.repeats_kwh,
        repeats_emissions_kg_co2e=spent.repeats_emissions_kg_co2e,
        confidence=evidence.confidence(winner) if winner and evidence.has_repeats else None,
        ties=evidence.ties(winner) if winner else (),
        rejected=tuple(_rejected(evidence, winner, target)) if winner else (),
        failed_replicates=tuple(run.trial for run in data.records if winner and _failed_replicate(run, winner)),
    )


_BY_MEANS, _BY_FIRST_RUN = attrgetter("mean_rank"), attrgetter("rank")


class Best:
    """Of configurations whose standing against a target is known, those that may be its answer.

    The answer is the cheapest configuration that holds the target, by its means; else the cheapest whose repeats are
    below it on average, though by less than the error; else the cheapest that ran once, which says less. For a target
    that the repeats were not made for, it is the cheapest of all these: one that was repeated is no better there than
    a cheaper one that ran once.
    """

    def __init__(self) -> None:
        self._holding: Configuration | None = None  # the cheapest that holds, by its means
        self._holding_by_first: Configuration | None = None  # likewise, by its first run
        self._met: Configuration | None = None  # the cheapest that doesn't miss, by its first run
        self._doubtful: Configuration | None = None

    def take(self, config: Configuration, standing: Standing) -> None:
        """As targets rise, a configuration may come again with the next of its standings: one that was once in doubt
        doesn't count any more once one holds."""
        if standing is Standing.CONFIRMED:
            self._holding = min(self._holding or config, config, key=_BY_MEANS)
            self._holding_by_first = min(self._holding_by_first or config, config, key=_BY_FIRST_RUN)
        if standing is not Standing.REJECTED:
            self._met = min(self._met or config, config, key=_BY_FIRST_RUN)
        if standing is Standing.INCONCLUSIVE:
            self._doubtful = min(self._doubtful or config, config, key=_BY_MEANS)

    def answer(self, *, confirmed_for_it: bool) -> Configuration | None:
        if confirmed_for_it:
            return self._holding or self._doubtful or self._met
        return self._holding if self._met is self._holding_by_first else self._met


def _rejected(evidence: Evidence, winner: Configuration, target: Target) -> Iterator[Rejected]:
    for config in sorted(evidence.configurations, key=_BY_FIRST_RUN):
        met_at_first = config.first.meets(target) and config.rank < winner.rank
        if met_at_first and evidence.standing(config) is Standing.REJECTED:
            yield Rejected(
                trial=config.first.trial, seeds=config.n, value=config.value, failed_replicate=config.failed_replicate
            )


def _failed_replicate(record: TrialRecord, winner: Configuration) -> bool:
    ended = record.state is not TrialState.RUNNING and record.stop_reason is not StopReason.INTERRUPTED
    return record.repeat_of == winner.first.trial and ended and objectives(record) is None


def _most_accurate(tried: Iterable[Configuration]) -> Configuration:
    return min(tried, key=lambda config: (config.quality.rank(config.value), *config.mean_rank))


def find_baseline(data: StudyData, tried: Sequence[Configuration]) -> Configuration | None:
    """The start configuration (always trial 0) if it completed, else the most accurate one; None: none completed."""
    if data.config.search.start and tried and tried[0].first.trial == 0:
        return tried[0]
    return _most_accurate(tried) if tried else None


def _described(data: StudyData, baseline: Configuration, target: Target) -> Baseline:
    is_start = bool(data.config.search.start) and baseline.first.trial == 0
    why = START if is_start else MOST_ACCURATE
    if data.config.search.start and not is_start:
        why += "; the start configuration did not complete"
    if not target.is_met_by(baseline.value):
        why += "; it misses the target"
    return Baseline(
        trial=baseline.first.trial,
        why=why,
        params=baseline.first.params,
        value=baseline.value,
        emissions_kg_co2e=baseline.emissions_kg_co2e,
        is_start=is_start,
        meets_target=target.is_met_by(baseline.value),
    )


def answer(
    evidence: Evidence, winner: Configuration | None, baseline: Configuration | None, study_emissions_kg: float
) -> Answer:
    if winner is None or baseline is None:
        return Answer()

    def break_even(saved_kg: float) -> int | None:
        return math.ceil(study_emissions_kg / saved_kg) if saved_kg > 0 else None

    winner_kg, baseline_kg = winner.emissions_kg_co2e, baseline.emissions_kg_co2e
    interval = evidence.saving_interval(winner, baseline)
    fewest, most = (break_even(share * baseline_kg) for share in reversed(interval)) if interval else (None, None)
    return Answer(
        trial=winner.first.trial,
        value=winner.value,
        emissions_kg_co2e=winner_kg,
        energy_kwh=winner.energy_kwh,
        saving_fraction=1 - winner_kg / baseline_kg if baseline_kg else None,
        saving_interval=interval,
        break_even_runs=break_even(baseline_kg - winner_kg),
        break_even_interval=None if fewest is None else (fewest, most),
    )


def _closest(records: Iterable[TrialRecord], tried: Sequence[Configuration]) -> Closest | None:
    """The complete trial with the best quality, else the unfinished one with the best last evaluation."""
    emissions_kg: float | None
    if tried:
        config = _most_accurate([config for config in tried if not config.failed_replicate] or tried)
        record, value, emissions_kg, seeds = config.first, config.value, config.emissions_kg_co2e, config.n
        why = "the complete trial with the best quality"
        if config.failed_replicate:
            why += "; with another seed it did not complete"
    else:
        unfinished = [(run.evals[-1].value, run) for run in records if run.evals]
        reached = [(value, run) for value, run in unfinished if value is not None]
        if not reached:
            return None
        value, record = min(reached, key=lambda entry: (entry[1].quality.of.rank(entry[0]), entry[1].trial))
        emissions_kg, seeds = record.emissions_kg_co2e, 1
        progress = f"step {record.evals[-1].step}" + (f" of {record.total_steps}" if record.total_steps else "")
        why = f"no trial completed; the best last evaluation, at {progress}"
        if record.stop_reason is StopReason.INTERRUPTED:
            why += "; it was interrupted and will be run again when the study goes on"
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
