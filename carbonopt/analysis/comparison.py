"""The recommended run against the baseline, at equal quality too, and against itself, had it been stopped earlier."""

from collections.abc import Iterator

from carbonopt.analysis.confidence import LEVEL, Configuration, configurations
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import DEFAULT_LR_SCHEDULER, rate_decays
from carbonopt.core.quality import Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen

ENOUGH = 0.01  # an evaluation that is worse than the best by this share is as good for most ends


class Saving(Frozen):
    """Of a run's emissions, against the baseline's whole run; both means over their runs."""

    fraction: float  # negative: it emits more
    lowest: float | None  # the interval at `level`; None: nothing was repeated
    highest: float | None
    level: float = LEVEL
    seeds: int  # complete runs of the recommended configuration
    baseline_seeds: int
    # How many runs pay the study back, by the same interval; its second None: there may be no saving, so no number is
    # sure to. None: the saving has no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None = None


class BothStopped(Frozen):
    """The recommended run, too, stopped at its first evaluation at or below the target. By the search's own runs, whose
    shares are of the means over all runs; neither was planned to be that short."""

    step: int  # of that evaluation
    emissions_kg_co2e: float  # up to there: at most this was needed
    emissions_before_kg_co2e: float  # up to the evaluation before (0: none): more than this was needed
    saving_fraction: float  # against the baseline's up to where it met the target
    # The same of what may have been needed of either: the recommended one's most against the baseline's least, and the
    # other way round. None: the baseline met the target at its first evaluation, so its least is 0.
    lowest: float | None
    highest: float


class AtEqualQuality(Frozen):
    """Against the baseline (by its first run's share) stopped as soon as it met the target. It evaluates now and then:
    the truth lies between."""

    baseline_step: int  # its first evaluation at or below the target
    baseline_emissions_kg_co2e: float  # up to there: at most this was needed
    baseline_emissions_before_kg_co2e: float  # up to the evaluation before (0: none): more than this was needed
    saving_fraction: float  # by the first; at most this much
    saving_fraction_before: float | None  # by the second: at least this much; may be negative. None: that is 0
    both_stopped: BothStopped | None = None  # None: of the recommended run it is not known


class Comparison(Frozen):
    trial: int
    baseline_trial: int
    value_difference: float | None  # of the quality: recommended ÷ baseline − 1; None: the baseline's is 0
    saving: Saving
    equal_quality: AtEqualQuality | None  # None: the baseline never met the target, or its energy by step is not known
    # The GPUs' temperature as the recommended runs' trainings began, above the baseline's; means. None: not told.
    began_warmer_c: float | None = None


class Milestone(Frozen):
    """One evaluation of the run."""

    step: int
    share: float  # of all its steps
    energy_kwh: float  # of the training window up to here
    emissions_kg_co2e: float  # likewise, PUE in
    value: float  # of the quality
    # How much better it got since the evaluation before, per kg CO2e. None: the first one, or nothing was emitted.
    gained_per_kg_co2e: float | None


class DiminishingReturns(Frozen):
    trial: int  # the recommended one, else the closest, if it completed
    total_steps: int
    points: tuple[Milestone, ...]  # by step; only evaluations of known energy and finite value
    best: Milestone
    enough: Milestone  # the first within ENOUGH of the best
    saved_fraction: float  # of the run's emissions, had it been stopped there
    first_meeting: Milestone | None  # the first that meets the target
    # The learning rate falls over the run: a run planned to be that short would end lower. A script's is not known.
    rate_decays: bool


def comparison(data: StudyData, rec: Recommendation) -> Comparison | None:
    """None: nothing is recommended, it is its own baseline, or the baseline emitted nothing."""
    if rec.trial is None or rec.baseline is None or rec.value is None or rec.saving_fraction is None:
        return None
    if rec.trial == rec.baseline.trial:
        return None
    by_trial = {config.trial: config for config in configurations(data.records)}
    winner, baseline = by_trial[rec.trial], by_trial[rec.baseline.trial]
    lowest, highest = rec.saving_interval or (None, None)
    return Comparison(
        trial=rec.trial,
        baseline_trial=rec.baseline.trial,
        value_difference=rec.value / rec.baseline.value - 1 if rec.baseline.value else None,
        saving=Saving(
            fraction=rec.saving_fraction,
            lowest=lowest,
            highest=highest,
            seeds=winner.n,
            baseline_seeds=baseline.n,
            break_even_interval=rec.break_even_interval,
        ),
        equal_quality=_equal_quality(data, rec.target, winner, baseline),
        began_warmer_c=_began_warmer_c(winner, baseline),
    )


def _began_warmer_c(winner: Configuration, baseline: Configuration) -> float | None:
    ours_c, theirs_c = winner.gpu_start_temperature_c, baseline.gpu_start_temperature_c
    return None if ours_c is None or theirs_c is None else ours_c - theirs_c


def _equal_quality(
    data: StudyData, target: Target, winner: Configuration, baseline: Configuration
) -> AtEqualQuality | None:
    if (until_target := _until_target(data, target, baseline)) is None:
        return None
    step, most_kg, least_kg = until_target
    both = None
    if until_target := _until_target(data, target, winner):
        winner_step, winner_most_kg, winner_least_kg = until_target
        both = BothStopped(
            step=winner_step,
            emissions_kg_co2e=winner_most_kg,
            emissions_before_kg_co2e=winner_least_kg,
            saving_fraction=1 - winner_most_kg / most_kg,
            lowest=1 - winner_most_kg / least_kg if least_kg else None,
            highest=1 - winner_least_kg / most_kg,
        )
    return AtEqualQuality(
        baseline_step=step,
        baseline_emissions_kg_co2e=most_kg,
        baseline_emissions_before_kg_co2e=least_kg,
        saving_fraction=1 - winner.emissions_kg_co2e / most_kg,
        saving_fraction_before=1 - winner.emissions_kg_co2e / least_kg if least_kg else None,
        both_stopped=both,
    )


def _until_target(data: StudyData, target: Target, config: Configuration) -> tuple[int, float, float] | None:
    """The step of the search's own run's first evaluation that meets the target, the emissions up to there and up to
    the evaluation before: its shares of that run's, of the mean over all runs, with which it is compared. None: it
    never met the target, or these are not known."""
    of_run_kg, before_kwh = config.emissions_of_runs[0], 0.0
    for point in config.first.evals:
        energy_kwh = point.train_energy_kwh
        if energy_kwh is None or not of_run_kg:
            return None
        if target.is_met_by(point.value):
            scale = config.emissions_kg_co2e / of_run_kg
            up_to, before = (scale * data.emissions_kg_co2e(spent_kwh) for spent_kwh in (energy_kwh, before_kwh))
            return (point.step, up_to, before) if up_to else None
        before_kwh = energy_kwh
    return None


def diminishing_returns(data: StudyData, rec: Recommendation) -> DiminishingReturns | None:
    """Of the recommended trial, else of the closest one if it completed; of a repeated configuration, the search's own.
    None: there is no such trial, its energy by step is not known, or no energy was used."""
    trial = rec.closest.trial if rec.closest else rec.trial  # there is a closest one where none is recommended
    record = next((record for record in data.records if record.trial == trial), None)
    if record is None or record.state is not TrialState.COMPLETE or record.energy_kwh is None:
        return None
    total_steps = record.total_steps or (record.evals[-1].step if record.evals else 0)
    points = tuple(_milestones(data, record, total_steps))
    if not points or not record.energy_kwh.train > 0:
        return None
    quality = rec.target.quality
    best = min(points, key=lambda point: quality.rank(point.value))
    as_good = Target(quality, quality.relaxed(best.value, ENOUGH))
    enough = next(point for point in points if as_good.is_met_by(point.value))
    workload = data.config.workload
    given = workload.training_arguments if workload else {}
    scheduler = record.params.lr_scheduler or given.get("lr_scheduler_type", DEFAULT_LR_SCHEDULER)
    warmup = record.params.warmup_ratio or given.get("warmup_ratio") or given.get("warmup_steps") or 0.0
    return DiminishingReturns(
        trial=record.trial,
        total_steps=total_steps,
        points=points,
        best=best,
        enough=enough,
        saved_fraction=0.0 if enough.step >= total_steps else 1 - enough.energy_kwh / record.energy_kwh.train,
        first_meeting=next((point for point in points if rec.target.is_met_by(point.value)), None),
        rate_decays=not (workload and workload.is_script) and rate_decays(scheduler, warmup),
    )


def _milestones(data: StudyData, record: TrialRecord, total_steps: int) -> Iterator[Milestone]:
    rank, before = record.quality.of.rank, None
    for point in record.evals:
        if point.train_energy_kwh is None or point.value is None:
            continue
        emissions_kg = data.emissions_kg_co2e(point.train_energy_kwh)
        spent_kg = emissions_kg - before.emissions_kg_co2e if before else 0.0
        before = Milestone(
            step=point.step,
            share=point.step / total_steps,
            energy_kwh=point.train_energy_kwh,
            emissions_kg_co2e=emissions_kg,
            value=point.value,
            gained_per_kg_co2e=(rank(before.value) - rank(point.value)) / spent_kg if before and spent_kg > 0 else None,
        )
        yield before
