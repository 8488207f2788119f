"""The top of the report: what to do, what it saves, and how sure that is."""

from carbonopt.analysis.comparison import AtEqualQuality, Comparison
from carbonopt.analysis.confidence import LEVEL
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.core import format as fmt
from carbonopt.core.dimensions import TrialParams
from carbonopt.report import quality_text
from carbonopt.report.document import Tile
from carbonopt.report.study_view import StudyView

SPREAD_UNKNOWN = "run-to-run spread not known"
Interval = tuple[float, float] | None


def headline(study: StudyView) -> str:
    """One number, and at most one qualification."""
    rec, quality, saving = study.recommendation, study.quality, study.recommendation.saving_fraction
    if rec.params is None:
        missed = f"No trial reached the target, {quality.name} {_target(study)}"
        if rec.closest is None:
            return f"{missed}; none was evaluated"
        return f"{missed}; the closest had {quality.text(quality_text.known(rec.closest))}"
    at_quality = f"at the target quality{_qualification(rec, study.comparison)}: {short_params(rec.params)}"
    if rec.baseline is None or saving is None:
        return f"The least CO2e {at_quality}"
    if rec.trial == rec.baseline.trial:
        return f"Nothing emits less CO2e than the baseline {at_quality}"
    return f"{less_text(saving)} CO2e {at_quality}"


def less_text(saving: float) -> str:
    return f"{fmt.percent_text(abs(saving))} {'less' if saving >= 0 else 'more'}"


def _qualification(rec: Recommendation, comparison: Comparison | None) -> str:
    if rec.confidence is not None and not rec.confidence.confirmed:
        return ", not confirmed"
    if is_within_noise(rec.saving_interval):
        return ", within the noise"
    if turned(comparison) is not None:
        return ", though not against a baseline stopped there"
    return "" if rec.baseline is None or rec.baseline.meets_target else ", which the baseline misses"


def details(study: StudyView) -> tuple[str, ...]:
    """How sure the headline is: the interval, the seeds, what is compared and with what."""
    rec, closest = study.recommendation, study.recommendation.closest
    if rec.params is not None:
        reached = f"{study.quality.label}: {_reached(study)}."
        if rec.baseline is None or rec.trial == rec.baseline.trial:
            return (reached,)
        return f"Saving: {sure_text(study)}; against {baseline_text(rec.baseline)}.", reached
    if closest is None:
        return ()
    config = fmt.params_text(closest.params)
    return (f"Trial {closest.trial} ({config}) came closest: {closest.why}{_mean_of(rec)}.",)


def _reached(study: StudyView) -> str:
    """The quality against its target, of how many runs, and whether that is confirmed."""
    rec, quality, sure = study.recommendation, study.quality, study.recommendation.confidence
    text = f"{quality.text(rec.value)}, target {_target(study)}"
    if sure is None or sure.seeds == 1:
        return f"{text}; one run"
    text += f"; mean of {sure.seeds} seeds"
    if sure.value_bound is None:
        return text
    at_level = f"with {fmt.percent_text(sure.level)} confidence: {'confirmed' if sure.confirmed else 'not confirmed'}"
    return f"{text}, {quality.bound_word} {quality.text(sure.value_bound)} {at_level}"


def sure_text(study: StudyView) -> str:
    saving = study.comparison.saving if study.comparison else None
    if saving is None or saving.lowest is None or saving.highest is None:
        return SPREAD_UNKNOWN
    runs = f"{saving.seeds} runs, {saving.baseline_seeds} of the baseline"
    if saving.seeds == saving.baseline_seeds:
        runs = f"{fmt.count_text(saving.seeds, 'seed')} each"
    return f"{confidence_text((saving.lowest, saving.highest))}, {runs}"


def confidence_text(interval: Interval) -> str:
    if interval is None:
        return SPREAD_UNKNOWN
    return f"{fmt.interval_text(*interval, fmt.percent_text)} with {fmt.percent_text(LEVEL)} confidence"


def runs_text(interval: tuple[int, int | None] | None) -> str:
    """How many runs it may take to pay the study back; empty where the saving has no interval."""
    if interval is None:
        return ""
    fewest, most = interval
    ends = f"{fewest:,} or more" if most is None else f"{fewest:,} to {most:,}"
    return f"{ends} with {fmt.percent_text(LEVEL)} confidence"


def is_within_noise(interval: Interval) -> bool:
    return interval is not None and interval[0] <= 0 <= interval[1]


def turned(comparison: Comparison | None) -> AtEqualQuality | None:
    """At equal quality, where that may turn the saving into an excess: a headline without it would be half the truth.

    The baseline's whole run goes on after it has met the target, to a better quality than was asked for.
    """
    equal = None if comparison is None else comparison.equal_quality
    if comparison is None or equal is None or comparison.saving.fraction <= 0:
        return None
    lowest = equal.saving_fraction if equal.saving_fraction_before is None else equal.saving_fraction_before
    return equal if lowest < 0 else None


def baseline_text(baseline: Baseline) -> str:
    return f"trial {baseline.trial}, {'the start configuration' if baseline.is_start else 'the most accurate trial'}"


def short_params(params: TrialParams) -> str:
    """What decides most, with two digits of the learning rate: `batch 64, lr 1.3e-3, 25 epochs, ZeRO 0`."""
    mantissa, _, exponent = f"{params.learning_rate:.1e}".partition("e")
    rate = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    epochs = f"{fmt.value_text(params.epochs)} epoch{'' if params.epochs == 1 else 's'}"
    return f"batch {fmt.value_text(params.global_batch_size)}, lr {rate}, {epochs}, ZeRO {params.zero_stage}"


def trials_text(rec: Recommendation) -> str:
    searched = fmt.count_text(sum(rec.trials_by_state.values()) - rec.repeats, "trial")
    return f"{searched} and {fmt.count_text(rec.repeats, 'repeat')}" if rec.repeats else searched


def tiles(study: StudyView) -> tuple[Tile, ...]:
    rec, quality = study.recommendation, study.quality
    again = f"; the repeats: {fmt.emissions_text(rec.repeats_emissions_kg_co2e)} of it" if rec.repeats else ""
    spent = f"{fmt.energy_text(rec.study_energy_kwh)}, {trials_text(rec)}{again}"
    own = Tile(label="The study itself", text=fmt.emissions_text(rec.study_emissions_kg_co2e), note=spent)
    chosen, label = (rec, "Recommended") if rec.met else (rec.closest, "Closest")
    if chosen is None or chosen.params is None:
        return (own,)
    reached = f"target: {_target(study)}{_mean_of(rec)}"
    shown = (
        Tile(label=label, text=f"Trial {chosen.trial}", note=fmt.params_text(chosen.params)),
        Tile(label=quality.label, text=quality.text(chosen.value), note=reached),
    )
    if not rec.met:
        return (*shown, own)
    used = f"{fmt.energy_text(rec.energy_kwh)} in training{_mean_of(rec)}"
    against = "its own baseline"
    if study.comparison:
        against = f"against trial {study.comparison.baseline_trial}: {sure_text(study)}"
    runs, ends = rec.break_even_runs, runs_text(rec.break_even_interval) or "in place of the baseline's whole runs"
    paid = fmt.count_text(runs, "run") if runs is not None else "not known" if ends.endswith("confidence") else "never"
    return (
        *shown,
        Tile(label="Emissions of a run", text=fmt.emissions_text(rec.emissions_kg_co2e), note=used),
        Tile(label="Saving on a run", text=fmt.percent_text(rec.saving_fraction), note=against),
        own,
        Tile(label="Pays back after", text=paid, note="a run saves nothing" if paid == "never" else ends),
    )


def _target(study: StudyView) -> str:
    return f"{study.quality.bound_word} {study.quality.text(study.recommendation.target.value)}"


def _mean_of(rec: Recommendation) -> str:
    """Of how many runs the recommended or closest configuration's figures are means; nothing where it ran once."""
    seeds = rec.confidence.seeds if rec.confidence else rec.closest.seeds if rec.closest else 1
    return f", mean of {seeds} seeds" if seeds > 1 else ""
