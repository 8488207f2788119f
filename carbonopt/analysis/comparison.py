"""The recommended configuration against the baseline: what it saves, how sure that is, and what at equal quality."""

from carbonopt.analysis.confidence import LEVEL, Configuration, configurations
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.study import StudyData
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
    by_trial = {config.first.trial: config for config in configurations(data.records)}
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
    if (of_baseline := _until_target(data, rec, baseline)) is None:
        return None
    step, most_kg, least_kg = of_baseline
    both = None
    if (of_winner := _until_target(data, rec, winner)) is not None:
        winner_step, winner_most_kg, winner_least_kg = of_winner
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


def _until_target(data: StudyData, rec: Recommendation, config: Configuration) -> tuple[int, float, float] | None:
    """Of the search's own run: the step of its first evaluation that meets the target, the emissions up to there, and
    those up to the evaluation before. None: it never met the target, or these are not known."""
    before_kwh: float | None = 0.0
    for point in config.first.evals:
        energy_kwh = point.train_energy_kwh
        if rec.target.is_met_by(point.value):
            if not energy_kwh or before_kwh is None:
                return None
            return point.step, data.emissions_kg_co2e(energy_kwh), data.emissions_kg_co2e(before_kwh)
        before_kwh = energy_kwh
    return None
