"""The answer in one sentence with its figures, to be pasted into a paper."""

from carbonopt.analysis.recommend import cheaper_but_unsure
from carbonopt.analysis.repeated_configurations import Repeats, repeats_of
from carbonopt.core import format as fmt
from carbonopt.report.caveats import less_or_more_text
from carbonopt.report.document import Extract, Paragraph, Section
from carbonopt.report.figures.pareto_figure import pareto_of
from carbonopt.report.paper.references import measured_with
from carbonopt.report.study_text import trials_text
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import (
    baseline_text,
    possible_reversal,
    saving_confidence_text,
)


def section(study: StudyView) -> Section | None:
    if (text := sentence(study)) is None:
        return None
    figure = pareto_of(study)
    extract = Extract(
        title="The sentence and its BibTeX",
        text=f"{text}\n\n{measured_with(study.data)}",
        picture_name="figure-pareto.svg",
        svg=figure.svg if figure else "",
    )
    quote = Paragraph(text=text, style="quote", extract=extract)
    return Section(key="citation", title="For a paper", blocks=(quote,))


def sentence(study: StudyView) -> str | None:
    """Return the answer in one sentence, or None without a recommendation."""
    rec, quality, provenance = study.recommendation, study.quality, study.data.provenance
    if rec.params is None:
        return None
    saved = ""
    if (
        rec.baseline is not None
        and rec.saving_fraction is not None
        and rec.trial != rec.baseline.trial
    ):
        misses = "" if rec.baseline.meets_target else ", which misses that target"
        saved = (
            f", {fmt.less_text(rec.saving_fraction)} than {baseline_text(rec.baseline)}{misses}"
            f" ({saving_confidence_text(study)})"
        )
        if equal := possible_reversal(study.comparison):
            saving = less_or_more_text((equal.lowest, equal.highest))
            saved += f", and {saving} than that stopped when it first met the target"
    settings = fmt.params_text(rec.params, study.varied)
    is_unconfirmed = rec.confidence is not None and not rec.confidence.confirmed
    doubt = ", not confirmed for other seeds," if is_unconfirmed else ""
    is_replay = study.data.provenance.is_replay
    spent = "all replayed runs, as far as recorded," if is_replay else "the study itself"
    return (
        f"Of {trials_text(study.data.records)} with carbonopt {_where(study)}, the"
        f" {_configuration(study)} at {quality.with_article} of {quality.bound_word}"
        f" {quality.target_text(rec.target.value)} ({settings}) reached"
        f" {quality.text(rec.value)}{doubt} with {fmt.energy_text(rec.energy_kwh)} of training"
        f" energy, or {fmt.emissions_text(rec.emissions_kg_co2e)} at"
        f" {fmt.intensity_text(provenance.intensity.g_co2e_per_kwh)} g CO2e/kWh and a PUE of"
        f" {study.data.config.carbon.pue:.3g}{saved} ({_runs(study)}); {spent} used"
        f" {fmt.energy_text(rec.study_energy_kwh)}, or"
        f" {fmt.emissions_text(rec.study_emissions_kg_co2e)}."
    )


def _configuration(study: StudyView) -> str:
    """Name the recommended configuration by what it is among those that met the target."""
    rec = study.recommendation
    if not cheaper_but_unsure(study.data, rec):
        return "configuration with the least emissions"
    is_confirmed = rec.confidence is not None and rec.confidence.confirmed
    of_repeats = "configuration with the least emissions that repeats bore out"
    return of_repeats if is_confirmed else "recommended configuration"


def _where(study: StudyView) -> str:
    if study.data.provenance.is_replay:
        return "that replay recorded runs"
    if (hardware := study.data.provenance.hardware) is None:
        return "on hardware that was not recorded"
    gpus = fmt.counted_names(hardware.gpus)
    machines = f" of {hardware.nodes} machines" if hardware.nodes > 1 else ""
    return f"on {' and '.join(gpus) or f'{hardware.cpu} (no GPU)'}{machines}"


def _runs(study: StudyView) -> str:
    """Say how many complete runs there are, and how far they spread.

    The text is about the recommended and the baseline's configuration.
    """
    rec = study.recommendation
    said = _spread(repeats_of(rec.params, study.repeated))
    if rec.baseline is None or rec.baseline.trial == rec.trial:
        return said
    return f"{said}; the baseline: {_spread(repeats_of(rec.baseline.params, study.repeated))}"


def _spread(runs: Repeats | None) -> str:
    if runs is None:
        return "n = 1"
    scale = fmt.emissions_scale([runs.emissions_kg_co2e.highest])
    emissions, reached = fmt.spread_text(runs.emissions_kg_co2e, scale), fmt.spread_text(runs.value)
    means = f"{emissions} {scale.unit} and {reached}"
    return f"n = {runs.n}, {means}, mean ± standard deviation of these runs"
