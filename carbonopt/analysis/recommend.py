"""The study's answer: the cheapest configuration that reaches the target, and what it is compared with."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from carbonopt.analysis.confidence import Confidence, Configuration, Evidence, Standing, by_means
from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.front import is_finite, objectives, pareto_front
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

    def as_json(self) -> dict[str, Any]:
        return {**self.model_dump(exclude={"is_start", "meets_target"}), "params": self.params.as_record()}


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

    def as_json(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "params": self.params.as_record()}


class Rejected(Frozen):
    """A cheaper configuration whose first run met the target, but which doesn't hold it by its repeats."""

    trial: int
    seeds: int  # that completed
    value: float  # mean over them
    failed_replicate: bool  # with another seed it diverged or did not fit in memory


class Recommendation(Frozen):
    """Which trial to take. `trial` to `energy_kwh` and `saving_fraction` are None when no trial met the target.

    Of a configuration that was repeated with other seeds, all figures are means over them (of the quality as
    `Configuration.value`).
    """

    target: Target
    trial: int | None
    params: TrialParams | None
    value: float | None  # of the quality
    emissions_kg_co2e: float | None  # of the training window, PUE in
    energy_kwh: float | None  # of the training window, PUE not in
    baseline: Baseline | None  # None: no trial completed
    saving_fraction: float | None  # 1 − emissions ÷ baseline's; negative when the baseline is cheaper
    # Of saving_fraction, at LEVEL. None: nothing was repeated, it is its own baseline, or one of them emitted nothing.
    saving_interval: tuple[float, float] | None
    closest: Closest | None  # only when no trial met the target
    shortfall: Shortfall | None  # of the closest trial; None: there is none, or it did not complete
    pareto_front: tuple[int, ...]  # trial numbers, by emissions; of repeated configurations the means count
    trials_by_state: dict[TrialState, int]  # every state, 0 where none
    study_energy_kwh: float
    study_emissions_kg_co2e: float
    repeats: int  # of the trials, those that repeat another one's configuration with another seed
    repeats_energy_kwh: float  # of the study's, what these used
    repeats_emissions_kg_co2e: float
    break_even_runs: int | None  # None: a run saves nothing, so the study never pays back
    break_even_interval: tuple[int, int | None] | None  # by the saving's; see there
    confidence: Confidence | None  # None: nothing was recommended, or nothing repeated
    ties: tuple[int, ...]  # trials that hold the target, too, at emissions that can't be told from the winner's
    rejected: tuple[Rejected, ...]  # by the emissions of their first runs
    failed_replicates: tuple[int, ...]  # trials: repeats of the recommended configuration that ended without a result

    @property
    def met(self) -> bool:
        return self.trial is not None

    def as_json(self) -> dict[str, Any]:
        """What `carbonopt recommend --json` prints, but for the `caveats`, which are sentences."""
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
            "baseline": self._with_perplexity(self.baseline),
            "saving_fraction": self.saving_fraction,
            "pareto_front": list(self.pareto_front),
            "study": {
                "trials": {state.value: count for state, count in self.trials_by_state.items()},
                "energy_kwh": self.study_energy_kwh,
                "emissions_kg_co2e": self.study_emissions_kg_co2e,
                "break_even_runs": self.break_even_runs,
            },
            "confidence": self.confidence.model_dump(mode="json") if self.confidence else None,
            "ties": list(self.ties),
            "failed_replicates": list(self.failed_replicates),
            "rejected": [one.model_dump(mode="json") for one in self.rejected],
        }
        if not self.met:
            answer["closest"] = self._with_perplexity(self.closest)
            answer["shortfall"] = self.shortfall.model_dump(mode="json") if self.shortfall else None
        return answer

    def _with_perplexity(self, trial: Baseline | Closest | None) -> dict[str, Any] | None:
        return None if trial is None else {**trial.as_json(), PERPLEXITY.name: self._if_perplexity(trial.value)}

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
    if target.quality.beyond(target.value) or not math.isfinite(target.value):
        raise BadInput(
            f"the target must be a finite {target.quality.name}, {target.quality.bounds_text}, "
            f"but got {target.value:g}."
        )
    evidence = Evidence.of(data, target)
    best = Best()
    for one in evidence.configurations:
        best.take(one, evidence.standing(one))
    winner = best.answer(confirmed_for_it=target == data.config.target.at())
    baseline = find_baseline(data, evidence.configurations, target)
    spent = footprint(data)
    interval = saving_interval(evidence, winner, baseline)
    closest = None if winner else _closest(data.records, evidence.configurations)
    return Recommendation(
        target=target,
        trial=winner.first.trial if winner else None,
        params=winner.first.params if winner else None,
        value=winner.value if winner else None,
        emissions_kg_co2e=winner.emissions_kg_co2e if winner else None,
        energy_kwh=winner.energy_kwh if winner else None,
        baseline=baseline,
        saving_fraction=saving_fraction(winner, baseline),
        saving_interval=interval,
        closest=closest,
        shortfall=shortfall(data, closest.trial, closest.value, target) if closest else None,
        pareto_front=pareto_front(by_means(data.records)),
        trials_by_state={state: sum(record.state is state for record in data.records) for state in TrialState},
        study_energy_kwh=spent.energy_kwh,
        study_emissions_kg_co2e=spent.emissions_kg_co2e,
        repeats=sum(record.repeat_of is not None for record in data.records),
        repeats_energy_kwh=spent.repeats_kwh,
        repeats_emissions_kg_co2e=spent.repeats_emissions_kg_co2e,
        break_even_runs=break_even_runs(spent.emissions_kg_co2e, winner, baseline),
        break_even_interval=break_even_interval(spent.emissions_kg_co2e, interval, baseline),
        confidence=evidence.confidence(winner) if winner and evidence.has_repeats else None,
        ties=evidence.ties(winner) if winner else (),
        rejected=tuple(_rejected(evidence, winner, target)) if winner else (),
        failed_replicates=tuple(_failed_replicates(data.records, winner.first.trial)) if winner else (),
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

    def take(self, one: Configuration, standing: Standing) -> None:
        """As targets rise, a configuration may come again with the next of its standings: one that was once in doubt
        doesn't count any more once one holds."""
        if standing is Standing.CONFIRMED:
            self._holding = _cheaper(self._holding, one, _BY_MEANS)
            self._holding_by_first = _cheaper(self._holding_by_first, one, _BY_FIRST_RUN)
        if standing is not Standing.REJECTED:
            self._met = _cheaper(self._met, one, _BY_FIRST_RUN)
        if standing is Standing.INCONCLUSIVE:
            self._doubtful = _cheaper(self._doubtful, one, _BY_MEANS)

    def answer(self, *, confirmed_for_it: bool) -> Configuration | None:
        if confirmed_for_it:
            return self._holding or self._doubtful or self._met
        return self._holding if self._met is self._holding_by_first else self._met


def _cheaper(best: Configuration | None, one: Configuration, rank: Callable[[Configuration], Any]) -> Configuration:
    return one if best is None or rank(one) < rank(best) else best


def _rejected(evidence: Evidence, winner: Configuration, target: Target) -> Iterator[Rejected]:
    for one in sorted(evidence.configurations, key=_BY_FIRST_RUN):
        met_at_first = one.first.meets(target) and one.rank < winner.rank
        if met_at_first and evidence.standing(one) is Standing.REJECTED:
            yield Rejected(trial=one.first.trial, seeds=one.n, value=one.value, failed_replicate=one.failed_replicate)


def _failed_replicates(records: Iterable[TrialRecord], trial: int) -> Iterator[int]:
    for record in records:
        ended = record.state is not TrialState.RUNNING and record.stop_reason is not StopReason.INTERRUPTED
        if record.repeat_of == trial and ended and objectives(record) is None:
            yield record.trial


def _most_accurate(found: Iterable[Configuration]) -> Configuration:
    return min(found, key=lambda one: (one.quality.rank(one.value), one.emissions_kg_co2e, one.first.trial))


def find_baseline(data: StudyData, found: Sequence[Configuration], target: Target) -> Baseline | None:
    """The start configuration (always trial 0) if it completed, else the most accurate trial."""
    if not found:
        return None
    start = next((one for one in found if one.first.trial == 0), None) if data.config.search.start else None
    chosen = start or _most_accurate(found)
    why = START if start else MOST_ACCURATE
    if data.config.search.start and not start:
        why += "; the start configuration did not complete"
    if not target.is_met_by(chosen.value):
        why += "; it misses the target"
    return Baseline(
        trial=chosen.first.trial,
        why=why,
        params=chosen.first.params,
        value=chosen.value,
        emissions_kg_co2e=chosen.emissions_kg_co2e,
        is_start=start is not None,
        meets_target=target.is_met_by(chosen.value),
    )


def saving_fraction(winner: Configuration | None, baseline: Baseline | None) -> float | None:
    if winner is None or baseline is None or not baseline.emissions_kg_co2e:
        return None  # without a winner there is nothing to compare, and no share of zero
    return 1 - winner.emissions_kg_co2e / baseline.emissions_kg_co2e


def break_even_runs(study_emissions_kg: float, winner: Configuration | None, baseline: Baseline | None) -> int | None:
    if winner is None or baseline is None:
        return None
    saved_kg = baseline.emissions_kg_co2e - winner.emissions_kg_co2e
    return math.ceil(study_emissions_kg / saved_kg) if saved_kg > 0 else None


def saving_interval(
    evidence: Evidence, winner: Configuration | None, baseline: Baseline | None
) -> tuple[float, float] | None:
    if winner is None or baseline is None:
        return None
    against = next(one for one in evidence.configurations if one.first.trial == baseline.trial)
    return evidence.saving_interval(winner, against)


def break_even_interval(
    study_emissions_kg: float, interval: tuple[float, float] | None, baseline: Baseline | None
) -> tuple[int, int | None] | None:
    """How many runs pay the study back at the ends of the saving's interval, the baseline's emissions as they are.

    Its second is None where the saving may be none: then no number is sure to be enough. None: the saving has no
    interval, or none of it is a saving.
    """
    if interval is None or baseline is None or not interval[1] > 0:
        return None
    fewest, most = (
        math.ceil(study_emissions_kg / saved_kg) if (saved_kg := share * baseline.emissions_kg_co2e) > 0 else None
        for share in reversed(interval)
    )
    assert fewest is not None
    return fewest, most


def _closest(records: tuple[TrialRecord, ...], found: Sequence[Configuration]) -> Closest | None:
    """The complete trial with the best quality, else the unfinished one with the best last evaluation."""
    if found:
        one = _most_accurate([one for one in found if not one.failed_replicate] or found)
        why = "the complete trial with the best quality"
        if one.failed_replicate:
            why += "; with another seed it did not complete"
        closest = _as_closest(one.first, one.value, one.emissions_kg_co2e, why)
        return closest.model_copy(update={"seeds": one.n})
    unfinished = [
        (value, record) for record in records if record.evals and (value := record.evals[-1].value) is not None
    ]
    if not unfinished:
        return None
    value, record = min(unfinished, key=lambda entry: (entry[1].quality.of.rank(entry[0]), entry[1].trial))
    progress = f"step {record.evals[-1].step}" + (f" of {record.total_steps}" if record.total_steps else "")
    why = f"no trial completed; the best last evaluation, at {progress}"
    if record.stop_reason is StopReason.INTERRUPTED:
        why += "; it was interrupted and will be run again when the study goes on"
    return _as_closest(record, value, record.emissions_kg_co2e, why)


def _as_closest(record: TrialRecord, value: float, emissions_kg: float | None, why: str) -> Closest:
    return Closest(
        trial=record.trial,
        state=record.state,
        why=why,
        params=record.params,
        value=value,
        emissions_kg_co2e=emissions_kg if is_finite(emissions_kg) else None,
        interrupted=record.stop_reason is StopReason.INTERRUPTED,
    )
