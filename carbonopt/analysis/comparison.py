"""The recommended configuration against the baseline: what it saves, how sure that is, and what at equal quality."""

from carbonopt.analysis.confidence import LEVEL, Configuration, configurations
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.study import StudyData
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Frozen


class Saving(Frozen):
    """Of a run's emissions, against the baseline's whole run; both means over their runs."""

    fraction: float  # negative: it emits more
    lowest: float | None  # the interval at `level`; None: nothing was repeated
    highest: float | None
    level: float
    seeds: int  # complete runs of the recommended configuration
    baseline_seeds: int
    # How many runs pay the study back, by the same interval; its second None: there may be no saving, so no number is
    # sure to. None: the saving has no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None = None


class BothStopped(Frozen):
    """The recommended run, too, stopped at its first evaluation at or below the target. One run each, the search's own;
    neither was planned to be that short."""

    step: int  # of that evaluation
    emissions_kg_co2e: float  # up to there: at most this was needed
    emissions_before_kg_co2e: float  # up to the evaluation before (0: none): more than this was needed
    saving_fraction: float  # against the baseline's up to where it met the target
    # The same of what may have been needed of either: the recommended one's most against the baseline's least, and the
    # other way round. None: the baseline met the target at its first evaluation, so its least is 0.
    lowest: float | None
    highest: float


class AtEqualQuality(Frozen):
    """Against the baseline stopped as soon as it met the target. It evaluates now and then: the truth lies between.

    Of a baseline that was repeated it is the search's own trial.
    """

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


def comparison(data: StudyData, rec: Recommendation) -> Comparison | None:
    """Sets the recommended configuration against its baseline.

    None: nothing is recommended, it is its own baseline, or the baseline emitted nothing.
    """
    if rec.trial is None or rec.baseline is None or rec.value is None or rec.saving_fraction is None:
        return None
    if rec.trial == rec.baseline.trial:
        return None
    found = {one.first.trial: one for one in configurations(data.records)}
    winner, baseline = found[rec.trial], found[rec.baseline.trial]
    lowest, highest = rec.saving_interval or (None, None)
    return Comparison(
        trial=rec.trial,
        baseline_trial=rec.baseline.trial,
        value_difference=rec.value / rec.baseline.value - 1 if rec.baseline.value else None,
        saving=Saving(
            fraction=rec.saving_fraction,
            lowest=lowest,
            highest=highest,
            level=LEVEL,
            seeds=winner.n,
            baseline_seeds=baseline.n,
            break_even_interval=rec.break_even_interval,
        ),
        equal_quality=_equal_quality(data, rec, winner, baseline),
    )


def _equal_quality(
    data: StudyData, rec: Recommendation, winner: Configuration, baseline: Configuration
) -> AtEqualQuality | None:
    stopped = _up_to_the_target(data, rec, baseline)
    if stopped is None:
        return None
    step, emissions_kg, before_kg = stopped
    return AtEqualQuality(
        baseline_step=step,
        baseline_emissions_kg_co2e=emissions_kg,
        baseline_emissions_before_kg_co2e=before_kg,
        saving_fraction=1 - winner.emissions_kg_co2e / emissions_kg,
        saving_fraction_before=1 - winner.emissions_kg_co2e / before_kg if before_kg else None,
        both_stopped=_both_stopped(_up_to_the_target(data, rec, winner), emissions_kg, before_kg),
    )


def _both_stopped(
    stopped: tuple[int, float, float] | None, baseline_kg: float, baseline_before_kg: float
) -> BothStopped | None:
    if stopped is None:
        return None
    step, emissions_kg, before_kg = stopped
    return BothStopped(
        step=step,
        emissions_kg_co2e=emissions_kg,
        emissions_before_kg_co2e=before_kg,
        saving_fraction=1 - emissions_kg / baseline_kg,
        lowest=1 - emissions_kg / baseline_before_kg if baseline_before_kg else None,
        highest=1 - before_kg / baseline_kg,
    )


def _up_to_the_target(data: StudyData, rec: Recommendation, one: Configuration) -> tuple[int, float, float] | None:
    """Of the search's own run: the step of its first evaluation at or below the target, the emissions up to there, and
    those up to the evaluation before. None: it never met the target, or these are not known."""
    evals = one.first.evals
    meets = next((at for at, point in enumerate(evals) if rec.target.is_met_by(point.value)), None)
    if meets is None:
        return None
    energy_kwh, before_kwh = evals[meets].train_energy_kwh, evals[meets - 1].train_energy_kwh if meets else 0.0
    if not energy_kwh or before_kwh is None:
        return None
    intensity, pue = data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue
    return (
        evals[meets].step,
        emissions_kg_co2e(energy_kwh, intensity, pue),
        emissions_kg_co2e(before_kwh, intensity, pue),
    )
