"""The recommendation against the baseline: what it saves, at equal quality too, and with which settings."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from carbonopt.core import format as fmt
from carbonopt.report import quality_text
from carbonopt.report.caveats import range_text
from carbonopt.report.document import MISSING, Block, Caveat, Paragraph, Section, Table, num, table, word
from carbonopt.report.sections.trials import setting_text
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import is_within_noise, turned


class _Run(NamedTuple):
    what: str
    quality: float | None
    emissions_kg_co2e: float
    saving: float | None = None
    interval: tuple[float | None, float | None] = (None, None)


def section(study: StudyView) -> Section | None:
    rec = study.recommendation
    blocks: list[Block] = [made for made in (_runs(study), configuration(study)) if made is not None]
    if not blocks:
        return None
    if rec.met:
        again = "run.sh trains with it once more; " if study.data.config.workload is not None else ""
        text = f"Ready to use in winner/, beside this page: {again}training_args.yaml has the names of Hugging Face."
        blocks.append(Paragraph(text=text, style="note"))
    title = "Against the baseline" if rec.met else "What came closest"
    return Section(key="comparison", title=title, blocks=tuple(blocks))


def _runs(study: StudyView) -> Table | None:
    found, rec, quality = study.comparison, study.recommendation, study.quality
    base = rec.baseline
    if found is None or base is None or rec.emissions_kg_co2e is None:
        return None
    saving, interval = found.saving, (found.saving.lowest, found.saving.highest)
    rows = [
        _Run(f"recommended (trial {rec.trial})", rec.value, rec.emissions_kg_co2e),
        _Run(f"baseline (trial {base.trial})", base.value, base.emissions_kg_co2e, saving.fraction, interval),
    ]
    if equal := found.equal_quality:
        stopped = f"baseline, up to where it met the target (step {equal.baseline_step})"
        rows.append(_Run(stopped, None, equal.baseline_emissions_kg_co2e, equal.saving_fraction))
        before_kg = equal.baseline_emissions_before_kg_co2e
        rows.append(_Run("baseline, up to the evaluation before", None, before_kg, equal.saving_fraction_before))
        if both := equal.both_stopped:
            stopped = f"recommended, up to where it met the target (step {both.step}), against the baseline up to there"
            rows.append(_Run(stopped, None, both.emissions_kg_co2e, both.saving_fraction, (both.lowest, both.highest)))
    scale = fmt.emissions_scale(row.emissions_kg_co2e for row in rows)
    columns = [
        word("Run", "what"),
        num(quality.label, "quality", quality.text),
        num(scale.label("Emissions"), "emissions_kg_co2e", scale.text),
        num("The recommendation saves", "saving", fmt.percent_text),
        num("Range of the saving", lambda row: row.interval[0], shown=_interval),
    ]
    note = f"The baseline is {base.why}. "
    worse = quality.worse_by(quality_text.known(rec), quality_text.known(base))
    if math.isfinite(worse):
        note += f"The recommendation's {quality.name} is {fmt.percent_text(worse)} worse (negative: better). "
    note += f"The range is the interval of the whole runs at {fmt.percent_text(saving.level)} confidence, from "
    note += f"{saving.seeds} and {saving.baseline_seeds} runs; of stopped ones, what the evaluations before leave open."
    return table("comparison", "The recommendation against the baseline", rows, columns, note=note)


def _interval(row: _Run) -> str:
    return MISSING if row.interval[1] is None else range_text(row.interval)


def configuration(study: StudyView) -> Table | None:
    """The recommended (or closest) configuration beside the baseline's; what differs is strong."""
    rec = study.recommendation
    chosen, label = (rec, "Recommended") if rec.met else (rec.closest, "Closest")
    if chosen is None or chosen.params is None:
        return None
    base = rec.baseline if rec.baseline is not None and rec.baseline.trial != chosen.trial else None
    ours = chosen.params.as_record()
    theirs = base.params.as_record() if base else ours
    rows = [(name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    columns = [
        word("Setting", lambda row: row[0]),
        word(f"{label} (trial {chosen.trial})", lambda row: setting_text(row[1]), strong=lambda row: row[1] != row[2]),
        word(f"Baseline (trial {base.trial})", lambda row: setting_text(row[2])) if base else None,
    ]
    return table("configuration", "Configuration", rows, columns, paper="configuration")


def caveats(study: StudyView) -> Iterator[Caveat]:
    rec, found, equal = study.recommendation, study.comparison, turned(study.comparison)
    if not rec.met or rec.baseline is None:
        return
    if not rec.baseline.meets_target:
        yield study.caveat("baseline_misses_target", trial=rec.baseline.trial)
    if rec.saving_interval is not None and is_within_noise(rec.saving_interval):
        yield study.caveat("saving_within_noise", lowest=rec.saving_interval[0], highest=rec.saving_interval[1])
    if equal is not None:
        saving = (equal.saving_fraction_before, equal.saving_fraction)
        yield study.caveat("equal_quality", step=equal.baseline_step, saving=saving)
    if equal is not None and equal.both_stopped is not None:
        yield study.caveat("equal_quality_both_stopped", saving=equal.both_stopped.saving_fraction)
    if found is not None and rec.saving_interval is not None and found.saving.baseline_seeds == 1:
        yield study.caveat("baseline_single_run")
    if not rec.baseline.is_start:
        yield study.caveat("baseline_not_given")
