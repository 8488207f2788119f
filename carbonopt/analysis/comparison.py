"""Comparison of the recommended run with the baseline, and with itself if stopped earlier.

It is compared with the baseline at equal quality, too.
"""

from collections.abc import Iterator
from typing import NamedTuple

from carbonopt.analysis.confidence import LEVEL, Configuration, Evidence, less_interval
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import DEFAULT_LR_SCHEDULER, rate_decays
from carbonopt.core.quality import Target
from carbonopt.core.trial import FEWEST_READINGS, READINGS_APART_S, TrialRecord, TrialState
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData

ENOUGH = 0.01  # a share by which an evaluation may be worse than the best for most purposes


class Saving(Frozen):
    """The saving of a run's emissions against the baseline's whole run.

    Both are means over their runs.
    """

    fraction: float  # negative: it emits more
    lowest: float | None  # end of the interval at `level`; None: nothing was repeated
    highest: float | None
    level: float = LEVEL
    seeds: int  # number of complete runs of the recommended configuration
    baseline_seeds: int
    # Fewest and most runs that pay the study back, by the same interval; most is None if a run may
    # save nothing. None: the saving has no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None = None


class BothStopped(Frozen):
    """The comparison if the recommended run is stopped as soon as it met the target, too.

    It uses the search's own runs, scaled to the means over all runs. Neither run was planned to be
    that short.
    """

    step: int  # step of its first evaluation at or below the target
    emissions_kg_co2e: float  # up to that evaluation: upper bound of what was needed
    # up to the evaluation before (0: there is none): lower bound of what was needed
    emissions_before_kg_co2e: float
    saving_fraction: float  # against the baseline's emissions up to where it met the target
    # The saving with what each run may have needed: the recommended one's most against the
    # baseline's least, and the other way round; with the error between runs as in
    # `AtEqualQuality`. None: the baseline met the target at its first evaluation, so that its
    # least is 0.
    lowest: float | None
    highest: float


class AtEqualQuality(Frozen):
    """The comparison with the baseline stopped as soon as it met the target.

    The baseline's first run, scaled to the mean over its runs, is what is compared. It evaluates
    only now and then, so that the truth lies between two evaluations.
    """

    baseline_step: int  # step of its first evaluation at or below the target
    baseline_emissions_kg_co2e: float  # up to that evaluation: upper bound of what was needed
    # up to the evaluation before (0: there is none): lower bound of what was needed
    baseline_emissions_before_kg_co2e: float
    saving_fraction: float  # against the first of these emissions; at most this much
    # against the second: at least this much; may be negative. None: the second is 0
    saving_fraction_before: float | None
    # The ends of these two with the error between runs, that of `Saving`'s interval. Where nothing
    # was repeated, that error is not known and the ends are the two themselves.
    lowest: float | None
    highest: float
    # Whether it trained for less than 1 s until it met the target. Then the uncertainty from the
    # time between two readings is added to the first emissions and taken off the second.
    is_short: bool = False
    both_stopped: BothStopped | None = None  # None: it is not known well enough for both runs


class Comparison(Frozen):
    trial: int
    baseline_trial: int
    # (recommended − baseline) ÷ size of the baseline, of the quality; None: the baseline's is 0
    value_difference: float | None
    saving: Saving
    # None: the baseline never met the target, or its energy by step is not known
    equal_quality: AtEqualQuality | None
    # The GPUs' mean temperature as the recommended runs' trainings began, minus that of the
    # baseline's. None: not recorded.
    began_warmer_c: float | None = None


class Milestone(Frozen):
    """One evaluation of the run."""

    step: int
    share: float  # share of all its steps
    energy_kwh: float  # energy of the training window up to here
    emissions_kg_co2e: float  # emissions up to here, PUE included
    value: float  # value of the quality
    # Improvement since the evaluation before, per kg CO2e. None: it is the first one, or nothing
    # was emitted.
    gained_per_kg_co2e: float | None


class DiminishingReturns(Frozen):
    trial: int  # the recommended one, else the closest, if it completed
    total_steps: int
    points: tuple[Milestone, ...]  # those of known energy and finite value, sorted by step
    best: Milestone
    enough: Milestone  # the first evaluation within ENOUGH of the best
    saved_fraction: float  # share of the run's emissions that stopping there would have saved
    first_meeting: Milestone | None  # the first evaluation that meets the target
    # Whether the learning rate falls over the run: then a run planned to be that short would end
    # lower. False where the schedule is not known: for a script, and for a replay whose table
    # doesn't have it.
    rate_decays: bool


def comparison(data: StudyData, rec: Recommendation) -> Comparison | None:
    """Compare the recommended run with the baseline.

    None: nothing is recommended, it is its own baseline, or the baseline emitted nothing.
    """
    if (
        rec.trial is None
        or rec.baseline is None
        or rec.value is None
        or rec.saving_fraction is None
    ):
        return None
    if rec.trial == rec.baseline.trial:
        return None
    evidence = Evidence.of(data, rec.target)
    by_trial = {config.trial: config for config in evidence.configurations}
    winner, baseline = by_trial[rec.trial], by_trial[rec.baseline.trial]
    lowest, highest = rec.saving_interval or (None, None)
    return Comparison(
        trial=rec.trial,
        baseline_trial=rec.baseline.trial,
        value_difference=(
            (rec.value - rec.baseline.value) / abs(rec.baseline.value)
            if rec.baseline.value
            else None
        ),
        saving=Saving(
            fraction=rec.saving_fraction,
            lowest=lowest,
            highest=highest,
            seeds=winner.n,
            baseline_seeds=baseline.n,
            break_even_interval=rec.break_even_interval,
        ),
        equal_quality=_equal_quality(data, evidence, rec.target, winner, baseline),
        began_warmer_c=_began_warmer_c(winner, baseline),
    )


def _began_warmer_c(winner: Configuration, baseline: Configuration) -> float | None:
    ours_c, theirs_c = winner.gpu_start_temperature_c, baseline.gpu_start_temperature_c
    return None if ours_c is None or theirs_c is None else ours_c - theirs_c


def _equal_quality(
    data: StudyData,
    evidence: Evidence,
    target: Target,
    winner: Configuration,
    baseline: Configuration,
) -> AtEqualQuality | None:
    theirs, ours = (_until_target(data, target, config) for config in (baseline, winner))
    if theirs is None:
        return None
    margin = evidence.log_emissions_margin(winner.n, baseline.n) or 0.0
    lowest, highest = _range(winner.emissions_kg_co2e, winner.emissions_kg_co2e, theirs, margin)
    return AtEqualQuality(
        baseline_step=theirs.step,
        baseline_emissions_kg_co2e=theirs.most_kg,
        baseline_emissions_before_kg_co2e=theirs.least_kg,
        saving_fraction=1 - winner.emissions_kg_co2e / theirs.most_kg,
        saving_fraction_before=1 - winner.emissions_kg_co2e / theirs.least_kg
        if theirs.least_kg
        else None,
        lowest=lowest,
        highest=highest,
        is_short=theirs.is_short,
        both_stopped=None if ours is None else _both_stopped(ours, theirs, margin),
    )


class _UntilTarget(NamedTuple):
    """The emissions of a run until it met the target, in kg CO2e."""

    step: int  # step of the first evaluation that meets it
    most_kg: float  # up to that evaluation
    least_kg: float  # up to the evaluation before; 0: there is none
    is_short: bool  # see `AtEqualQuality`


def _range(
    least_kg: float, most_kg: float, theirs: _UntilTarget, margin: float
) -> tuple[float | None, float]:
    """Return the least and the most that a run saves against a stopped one.

    Args:
        least_kg: the least that the run emits.
        most_kg: the most that it emits.
        theirs: the stopped run.
        margin: how far the logarithm of the ratio of two whole runs may be off.
    """
    lowest = less_interval(most_kg / theirs.least_kg, margin)[0] if theirs.least_kg else None
    return lowest, less_interval(least_kg / theirs.most_kg, margin)[1]


def _both_stopped(ours: _UntilTarget, theirs: _UntilTarget, margin: float) -> BothStopped | None:
    if ours.is_short or theirs.is_short:
        return None
    lowest, highest = _range(ours.least_kg, ours.most_kg, theirs, margin)
    return BothStopped(
        step=ours.step,
        emissions_kg_co2e=ours.most_kg,
        emissions_before_kg_co2e=ours.least_kg,
        saving_fraction=1 - ours.most_kg / theirs.most_kg,
        lowest=lowest,
        highest=highest,
    )


def _until_target(data: StudyData, target: Target, config: Configuration) -> _UntilTarget | None:
    """Return what the search's own run emitted up to its first evaluation that meets the target.

    It is scaled to the mean over all runs, with which it is compared. None: it never met the
    target, met it before the training, or its energy by step is not known.
    """
    record = config.first
    of_run_kg, before_kwh = config.emissions_of_runs[0], 0.0
    for point in record.evals:
        energy_kwh = point.train_energy_kwh
        if energy_kwh is None or not of_run_kg:
            return None
        if point.step == 0:  # before the training, in whose energy there is only what was just read
            if target.is_met_by(point.value):
                return None
            continue
        if target.is_met_by(point.value):
            scale = config.emissions_kg_co2e / of_run_kg
            unsure_kwh = 0.0 if data.provenance.is_replay else _unsure_kwh(record, energy_kwh)
            most_kg, least_kg = (
                scale * data.emissions_kg_co2e(kwh)
                for kwh in (energy_kwh + unsure_kwh, before_kwh - unsure_kwh)
            )
            return (
                _UntilTarget(point.step, most_kg, max(0.0, least_kg), unsure_kwh > 0)
                if most_kg
                else None
            )
        before_kwh = energy_kwh
    return None


def _unsure_kwh(record: TrialRecord, energy_kwh: float) -> float:
    """Return how much the energy up to an evaluation may differ from what was read, in kWh.

    It is what the run uses in the time between two readings, at each end, and 0 where the training
    up to there is long compared with that.
    """
    if record.duration_s is None or record.energy_kwh is None or not record.duration_s.train > 0:
        return 0.0
    kwh_per_s = record.energy_kwh.train / record.duration_s.train
    is_short = energy_kwh < FEWEST_READINGS * READINGS_APART_S * kwh_per_s
    return 2 * READINGS_APART_S * kwh_per_s if is_short else 0.0


def diminishing_returns(data: StudyData, rec: Recommendation) -> DiminishingReturns | None:
    """Return what each evaluation of the recommended trial gained for its emissions.

    Where none is recommended, it is the closest trial if it completed; for a repeated configuration
    it is the search's own trial. None: there is no such trial, its energy by step is not known, or
    no energy was used.
    """
    # There is a closest trial where none is recommended.
    trial = rec.closest.trial if rec.closest else rec.trial
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
    return DiminishingReturns(
        trial=record.trial,
        total_steps=total_steps,
        points=points,
        best=best,
        enough=enough,
        saved_fraction=0.0
        if enough.step >= total_steps
        else 1 - enough.energy_kwh / record.energy_kwh.train,
        first_meeting=next((point for point in points if rec.target.is_met_by(point.value)), None),
        rate_decays=_rate_decays(data, record),
    )


def _rate_decays(data: StudyData, record: TrialRecord) -> bool:
    """Return whether the learning rate is known to fall over a run."""
    workload, scheduler = data.config.workload, record.params.lr_scheduler
    if data.config.is_script or (workload is None and scheduler is None):
        return False
    given = {} if workload is None else workload.training_arguments
    scheduler = scheduler or given.get("lr_scheduler_type", DEFAULT_LR_SCHEDULER)
    warmup = record.params.warmup_ratio or given.get("warmup_ratio") or given.get("warmup_steps")
    return rate_decays(scheduler, warmup or 0.0)


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
            gained_per_kg_co2e=(rank(before.value) - rank(point.value)) / spent_kg
            if before and spent_kg > 0
            else None,
        )
        yield before
