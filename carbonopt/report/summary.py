"""The top of the report: what to do, what it saves, and how sure that is."""

from collections.abc import Collection

from carbonopt.analysis.comparison import AtEqualQuality, Comparison
from carbonopt.analysis.confidence import LEVEL, is_failed_replicate
from carbonopt.analysis.recommend import Baseline, Recommendation, cheaper_but_unsure
from carbonopt.core import format as fmt
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import Quality
from carbonopt.core.trial import TrialState
from carbonopt.report.document import Tile
from carbonopt.report.study_text import trials_text
from carbonopt.report.study_view import StudyView

SPREAD_UNKNOWN = "run-to-run spread not known"
AT_LEVEL = f"with {fmt.percent_text(LEVEL)} confidence"

# Dimensions that `short_params` names in a way of its own.
_HEADLINE = ("global_batch_size", "learning_rate", "epochs", "zero_stage", "optimizer")
_OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def headline(study: StudyView) -> str:
    """Return the headline: one number, and at most one qualification."""
    rec, quality = study.recommendation, study.quality
    if not study.data.records:
        return "No trial has begun yet" if study.data.ended is None else "No trial was begun"
    if rec.params is None:
        closest, target = rec.closest, rec.target.value
        if rec.rejected:
            held = f"No configuration holds the target, {quality.name} {_target(study)}"
            once = f"{held}: {len(rec.rejected)} met it in the search, but {refutation_text(study)}"
            if closest is None or any(rejected.failed_replicate for rejected in rec.rejected):
                return once
            return f"{once}; the closest had {quality.text_beside(closest.value, target)}"
        if closest is not None and rec.target.is_met_by(closest.value):
            had = f"one had {quality.name} {quality.text(closest.value)} when it ended"
            return f"No trial met the target and completed; {had} (target: {_target(study)})"
        best = None if closest else _best_evaluation(study)
        if best is not None and rec.target.is_met_by(best):
            had = f"one had {quality.name} {quality.text(best)} before its last evaluation"
            return f"No trial met the target and completed; {had} (target: {_target(study)})"
        if closest is not None:
            had = f"the closest had {quality.text_beside(closest.value, target)}"
        elif best is not None:
            had = f"the best evaluation had {quality.text(best)}, and the last ones are not finite"
        elif any(record.evals for record in study.data.records):
            had = "no evaluation is finite"
        else:
            had = "none was evaluated"
        return f"No trial reached the target, {quality.name} {_target(study)}; {had}"
    at_quality = (
        f"at the target quality{_qualification(study)}: {short_params(rec.params, study.varied)}"
    )
    if rec.baseline is None or rec.saving_fraction is None:
        return f"The least CO2e {at_quality}"
    if _is_without_baseline(rec):
        missing = (
            "the start configuration did not complete"
            if study.data.config.search.start
            else "no search.start given"
        )
        return f"The least CO2e {at_quality}; nothing to compare it with, {missing}"
    if rec.trial != rec.baseline.trial:
        return f"{fmt.less_text(rec.saving_fraction)} CO2e {at_quality}"
    if cheaper_but_unsure(study.data, rec):
        nothing = "No configuration that emits less CO2e than the baseline"
        return (
            f"{nothing} was confirmed to meet the target: {short_params(rec.params, study.varied)}"
        )
    chosen = ", a start that carbonopt chose," if rec.baseline.is_chosen else ""
    return f"No trial emitted less CO2e than the baseline{chosen} {at_quality}"


def _best_evaluation(study: StudyView) -> float | None:
    """Return the best value that any trial was evaluated with; None if none is finite."""
    points = [point for record in study.data.records for point in record.evals]
    values = [point.value for point in points if point.value is not None]
    return min(values, key=study.quality.rank, default=None)


def refutation_text(study: StudyView) -> str:
    """Say how repeats refuted the configurations that met the target with the search's seed."""
    tried = {rejected.trial for rejected in study.recommendation.rejected}
    repeats = [run for run in study.data.records if run.repeat_of in tried]
    repeats = [run for run in repeats if run.has_finished and not run.was_cut_off]
    lost = [run for run in repeats if is_failed_replicate(run)]
    count, ended = len(repeats), _lost_text({run.state for run in lost})
    if len(lost) == count:
        all_of_them = {1: "the one repeat", 2: "both repeats"}.get(count, f"all {count} repeats")
        return f"{all_of_them} {ended}"
    missed = "the mean over several seeds misses it"
    if not lost:
        return missed
    some = f"{len(lost)} of {count} repeats {ended}"
    has_means = any(not rejected.failed_replicate for rejected in study.recommendation.rejected)
    return f"{some}, and otherwise {missed}" if has_means else some


def _lost_text(states: set[TrialState]) -> str:
    """Say how runs without a result ended."""
    if states == {TrialState.DIVERGED}:
        return "diverged"
    if states == {TrialState.INFEASIBLE}:
        return "did not fit in memory"
    return "ended without a result"


def _is_without_baseline(rec: Recommendation) -> bool:
    """Return whether the recommendation would be compared with itself.

    This is so where no start configuration completed.
    """
    return (
        rec.baseline is not None and rec.trial == rec.baseline.trial and not rec.baseline.is_start
    )


def _qualification(study: StudyView) -> str:
    rec = study.recommendation
    if any(record.inherited_files for record in study.data.records):
        return ", but trials did not begin clean"
    reversal = ""
    if (equal := possible_reversal(study.comparison)) is not None:
        saving = "no saving" if equal.highest < 0 else "perhaps no saving"
        reversal = (
            f" (against the baseline's whole run; against its run up to the target, {saving})"
        )
    if rec.confidence is not None and not rec.confidence.confirmed:
        return f", not confirmed{reversal}"
    if is_within_noise(rec.saving_interval):
        return ", within the noise"
    if reversal:
        return reversal
    if rec.baseline is None:
        return ""
    if not rec.baseline.meets_target:
        return " (the baseline misses the target)"
    is_chosen = rec.baseline.is_chosen and rec.trial != rec.baseline.trial
    return ", against a start that carbonopt chose" if is_chosen else ""


def details(study: StudyView) -> tuple[str, ...]:
    """Return what came closest, where no trial met the target; the tiles say the rest."""
    if (closest := study.recommendation.closest) is None:
        return ()
    came_closest = (
        f"Trial {closest.trial} ({fmt.params_text(closest.params, study.varied)}) came closest"
    )
    return (f"{came_closest}: {closest.why}{fmt.mean_of_text(study.recommendation.seeds)}.",)


def _reached_text(study: StudyView) -> str:
    """Say what the target is, and how sure it is that the recommendation meets it."""
    sure = study.recommendation.confidence
    if sure is None:
        runs = "one run"
    elif sure.seeds_alike:
        runs = f"{fmt.count_text(sure.seeds, 'seed')}, which change nothing"
    else:
        runs = runs_of_value(study.quality, sure.seeds, sure.value_bound)
        if sure.value_bound is not None:
            runs += f": {'confirmed' if sure.confirmed else 'not confirmed'}"
    return f"target: {_target(study)}; {runs}"


def _saved_text(study: StudyView) -> str:
    """Say against what the recommendation saves, and how sure the saving is."""
    baseline = study.recommendation.baseline
    if study.comparison is None or baseline is None:
        return "the recommendation is the baseline"
    sure = saving_confidence_text(study)
    return f"against {baseline_text(baseline)}: {sure}{_against_stopped(study)}"


def _against_stopped(study: StudyView) -> str:
    """Say what is saved against the baseline stopped at the target.

    The text is empty where this is not known, and where it may turn the saving into an excess: then
    a caveat says it.
    """
    equal = None if study.comparison is None else study.comparison.equal_quality
    if equal is None or possible_reversal(study.comparison) is not None:
        return ""
    saved = f"at most {fmt.percent_text(equal.highest)}"
    if equal.lowest is not None:
        saved = fmt.interval_text(equal.lowest, equal.highest, fmt.percent_text)
    return f"; {saved} against the baseline stopped at the target"


def runs_of_value(quality: Quality, seeds: int, bound: float | None) -> str:
    """Say of how many runs a value is the mean, and that mean's bound over all seeds."""
    runs = "one run" if seeds == 1 else f"mean of {seeds} seeds"
    return (
        runs if bound is None else f"{runs}, {quality.bound_word} {quality.text(bound)} {AT_LEVEL}"
    )


def saving_confidence_text(study: StudyView) -> str:
    """Say in which interval the saving is, and from how many runs."""
    saving = study.comparison.saving if study.comparison else None
    if saving is None or saving.lowest is None or saving.highest is None:
        return SPREAD_UNKNOWN
    ours, theirs = saving.seeds, saving.baseline_seeds
    runs = (
        f"{fmt.count_text(ours, 'seed')} each"
        if ours == theirs
        else f"{fmt.count_text(ours, 'run')} of it, {theirs} of the baseline"
    )
    return f"{confidence_text((saving.lowest, saving.highest))}, {runs}"


def confidence_text(interval: tuple[float, float] | None) -> str:
    return (
        f"{fmt.interval_text(*interval, fmt.percent_text)} {AT_LEVEL}"
        if interval
        else SPREAD_UNKNOWN
    )


def runs_text(interval: tuple[int, int | None] | None) -> str:
    """Say how many runs it may take to pay the study back.

    The text is empty where the saving has no interval.
    """
    if interval is None:
        return ""
    fewest, most = interval
    to_most = " or more" if most is None else f" to {most:,}" if most > fewest else ""
    return f"{fewest:,}{to_most} {AT_LEVEL}"


def is_within_noise(interval: tuple[float, float] | None) -> bool:
    return interval is not None and interval[0] <= 0 <= interval[1]


def possible_reversal(comparison: Comparison | None) -> AtEqualQuality | None:
    """Return the comparison at equal quality where it may turn the saving into an excess.

    A headline without it would be half the truth: the baseline's whole run goes on after it has met
    the target, to a better quality than was asked for.
    """
    equal = None if comparison is None else comparison.equal_quality
    if comparison is None or equal is None or comparison.saving.fraction <= 0:
        return None
    lowest = equal.highest if equal.lowest is None else equal.lowest
    return equal if lowest < 0 else None


def baseline_text(baseline: Baseline) -> str:
    start = "the start that carbonopt chose" if baseline.is_chosen else "the start configuration"
    return f"trial {baseline.trial}, {start if baseline.is_start else 'the most accurate trial'}"


def short_params(params: TrialParams, varied: Collection[str] = ()) -> str:
    """Return the settings that decide most, such as `batch 64, lr 1.3e-3, 25 epochs, ZeRO 0`.

    The learning rate has two digits. The optimizer is added where the study chooses it, and so are
    dimensions that the user has defined.

    Args:
        params: the settings of a trial.
        varied: other dimensions that the study varies, which are added, too.
    """
    batch, rate, epochs, stage = (
        params.global_batch_size,
        params.learning_rate,
        params.epochs,
        params.zero_stage,
    )
    parts = [] if batch is None else [f"batch {fmt.value_text(batch)}"]
    if rate is not None:
        mantissa, _, exponent = f"{rate:.1e}".partition("e")
        power = f"e{int(exponent)}"
        parts.append(f"lr {mantissa.removesuffix('.0')}{'' if power == 'e0' else power}")
    if epochs is not None:
        parts.append(f"{fmt.value_text(epochs)} epoch{'' if epochs == 1 else 's'}")
    parts += [] if stage is None else [f"ZeRO {stage}"]
    parts += [] if params.optimizer is None else [_OPTIMIZERS[params.optimizer]]
    others = fmt.other_settings(params, varied, _HEADLINE) | params.own
    parts += [f"{name} {fmt.value_text(value)}" for name, value in others.items()]
    return ", ".join(parts)


def tiles(study: StudyView) -> tuple[Tile, ...]:
    rec, quality = study.recommendation, study.quality
    mean_of = fmt.mean_of_text(rec.seeds)
    again = (
        f"; the repeats: {fmt.emissions_text(rec.repeats_emissions_kg_co2e)} of it"
        if rec.repeats
        else ""
    )
    spent = f"{fmt.energy_text(rec.study_energy_kwh)}, {trials_text(study.data.records)}{again}"
    own = Tile(
        label="The study itself", text=fmt.emissions_text(rec.study_emissions_kg_co2e), note=spent
    )
    chosen, label = (rec, "Recommended") if rec.met else (rec.closest, "Closest")
    if chosen is None or chosen.params is None:
        return (own,)
    reached = _reached_text(study) if rec.met else f"target: {_target(study)}{mean_of}"
    shown = (
        Tile(
            label=label,
            text=f"Trial {chosen.trial}",
            note=fmt.params_text(chosen.params, study.varied),
        ),
        Tile(
            label=quality.label,
            text=quality.text_beside(chosen.value, rec.target.value),
            note=reached,
        ),
    )
    if not rec.met:
        return (*shown, own)
    used = f"{fmt.energy_text(rec.energy_kwh)} in training{mean_of}"
    emissions = Tile(
        label="Emissions of a run", text=fmt.emissions_text(rec.emissions_kg_co2e), note=used
    )
    if _is_without_baseline(rec):
        return (*shown, emissions, own)
    paid, pays_back_note = _pays_back(rec)
    return (
        *shown,
        emissions,
        Tile(
            label="Saving on a run",
            text=fmt.percent_text(rec.saving_fraction),
            note=_saved_text(study),
        ),
        own,
        Tile(label="Pays back after", text=paid, note=pays_back_note),
    )


def _pays_back(rec: Recommendation) -> tuple[str, str]:
    """Say after how many runs the study is paid back, and how sure that is."""
    runs, interval = rec.break_even_runs, runs_text(rec.break_even_interval)
    if runs is None:
        return ("not known", interval) if interval else ("never", "a run saves nothing")
    note = "of the recommendation in place of the baseline"
    return fmt.count_text(runs, "run"), f"{note}; {interval}" if interval else note


def _target(study: StudyView) -> str:
    return (
        f"{study.quality.bound_word} {study.quality.target_text(study.recommendation.target.value)}"
    )
