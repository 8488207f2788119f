"""The recommendation against the baseline: what it saves, and with which settings.

The saving is also given at equal quality.
"""

import math
from collections.abc import Iterator
from typing import Any

from carbonopt.analysis.comparison import Comparison
from carbonopt.analysis.recommend import Baseline, Recommendation
from carbonopt.core import format as fmt
from carbonopt.core.trial import FEWEST_READINGS, READINGS_APART_S, StopReason, TrialState
from carbonopt.report.caveats import range_text
from carbonopt.report.document import (
    MISSING,
    Caveat,
    Paragraph,
    Section,
    Table,
    num,
    scaled,
    table,
    word,
)
from carbonopt.report.sections.trials_section import setting_text
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import is_within_noise, possible_reversal

# Share of energy that a GPU takes more for the same training where it is one degree warmer: 0.27 %
# on an H100, at most 0.40 % with 95 % confidence (reports/performance.md). A bias below
# _TOLERATED is not reported.
_MOST_OF_A_DEGREE = 0.004
_TOLERATED = 0.005
# Share by which a quality is called much worse than the baseline's: repeats with other seeds differ
# by far less.
_MUCH_WORSE = 0.1


def section(study: StudyView) -> Section | None:
    rec = study.recommendation
    tables = tuple(made for made in (_runs(study), _configuration(study)) if made is not None)
    if not rec.met:
        return (
            Section(key="comparison", title="What came closest", blocks=tables) if tables else None
        )
    workload = study.data.config.workload
    uses = (
        []
        if workload is None
        else [
            (
                "run.sh runs the script with it once more, with --data FOLDER for the files that"
                " inputs.json lists, if any"
                if workload.is_script
                else "run.sh trains with it once more"
            )
        ]
    )
    if not study.data.config.is_script:
        uses.append("training_args.yaml has the names of Hugging Face")
    ready = Paragraph(
        text=f"Ready to use in winner/, beside this page: {'; '.join(uses)}.", style="note"
    )
    title = "The recommended configuration" if study.comparison is None else "Against the baseline"
    return Section(key="comparison", title=title, blocks=(*tables, ready))


def _runs(study: StudyView) -> Table | None:
    comparison, rec, quality = study.comparison, study.recommendation, study.quality
    base = rec.baseline
    if comparison is None or base is None or rec.value is None:
        return None
    rows = _run_rows(comparison, rec, base)
    columns = [
        word("Run", 0),
        num(quality.label, 1, quality.text),
        scaled("Emissions", 2, fmt.emissions_scale, rows),
        num("The recommendation saves", 3, fmt.percent_text),
        (
            num(
                "Range of the saving",
                4,
                shown=lambda row: MISSING if row[5] is None else range_text(row[4:]),
            )
            if any(row[5] is not None for row in rows)
            else None
        ),
    ]
    note = f"The baseline is {base.why}. "
    worse = quality.worse_by(rec.value, base.value)
    if math.isfinite(worse):
        than = f"{fmt.percent_text(abs(worse))} {'worse' if worse > 0 else 'better'}"
        note += f"The recommendation's {quality.name} is {than}. "
    note += _note_on_ranges(comparison)
    return table(
        "comparison", "The recommendation against the baseline", rows, columns, note=note.rstrip()
    )


def _run_rows(comparison: Comparison, rec: Recommendation, base: Baseline) -> list[tuple[Any, ...]]:
    """Return a row for each run.

    A row holds the run, its quality, its kg CO2e, what the recommendation saves against it, and the
    two ends of that saving.
    """
    saving, ends = comparison.saving, (comparison.saving.lowest, comparison.saving.highest)
    rows: list[tuple[Any, ...]] = [
        (f"recommended (trial {rec.trial})", rec.value, rec.emissions_kg_co2e, None, None, None),
        (
            f"baseline (trial {base.trial})",
            base.value,
            base.emissions_kg_co2e,
            saving.fraction,
            *ends,
        ),
    ]
    if equal := comparison.equal_quality:
        stopped = f"baseline, up to where it met the target (step {equal.baseline_step})"
        met_kg, met_saving = equal.baseline_emissions_kg_co2e, equal.saving_fraction
        rows.append((stopped, None, met_kg, met_saving, equal.lowest, equal.highest))
        before = equal.baseline_emissions_before_kg_co2e, equal.saving_fraction_before
        rows.append(("baseline, up to the evaluation before", None, *before, None, None))
        if both := equal.both_stopped:
            stopped = (
                f"recommended, up to where it met the target (step {both.step}), against the"
                " baseline up to there"
            )
            rows.append(
                (
                    stopped,
                    None,
                    both.emissions_kg_co2e,
                    both.saving_fraction,
                    both.lowest,
                    both.highest,
                )
            )
    return rows


def _note_on_ranges(comparison: Comparison) -> str:
    """Explain where the ranges of the savings come from; empty if there are none."""
    saving, equal, note = comparison.saving, comparison.equal_quality, ""
    if saving.lowest is not None:
        note += (
            f"The range of whole runs is their interval at {fmt.percent_text(saving.level)}"
            " confidence, from "
        )
        note += f"{saving.seeds} and {saving.baseline_seeds} runs. "
    if saving.seeds > 1 or saving.baseline_seeds > 1:
        note += (
            "What a stopped run emits is the first run's share up to there × the mean of all runs. "
        )
    if equal is not None and equal.is_short:
        shortest_s, apart_ms = FEWEST_READINGS * READINGS_APART_S, READINGS_APART_S * 1000
        note += (
            f"Until the baseline met the target it trained for less than {shortest_s:g} s, and"
            " energy is read "
        )
        note += (
            f"every {apart_ms:g} ms: what that leaves open is added to what it emitted until then"
            " and taken off "
        )
        note += "what it emitted up to the evaluation before. "
    if equal is not None:
        note += "Stopped runs have a range because the quality is known only at evaluations"
        note += "" if saving.lowest is None else ", and because runs differ as whole runs do"
        note += "."
    if equal is not None:
        other_steps = "Another seed may meet the target at another step, which is in no range."
        note = f"{note.rstrip()} {other_steps}"
    return note


def _configuration(study: StudyView) -> Table | None:
    """Show the recommended (or closest) configuration beside the baseline's.

    Settings that differ are strong.
    """
    rec = study.recommendation
    chosen, label = (rec, "Recommended") if rec.met else (rec.closest, "Closest")
    if chosen is None or chosen.params is None:
        return None
    base = rec.baseline if rec.baseline is not None and rec.baseline.trial != chosen.trial else None
    ours = study.settings(chosen.params)
    theirs = study.settings(base.params) if base else ours
    rows = [(name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    columns = [
        word("Setting", 0),
        word(
            f"{label} (trial {chosen.trial})",
            lambda row: setting_text(row[1]),
            strong=lambda row: row[1] != row[2],
        ),
        word(f"Baseline (trial {base.trial})", lambda row: setting_text(row[2])) if base else None,
    ]
    return table("configuration", "Configuration", rows, columns, paper="configuration")


def _target_decided_nothing(study: StudyView, base: Baseline) -> Iterator[Caveat]:
    """Yield that a saving is bought by a quality that a target should have refused."""
    rec, quality = study.recommendation, study.quality
    ruled_out = any(
        record.stop_reason is StopReason.TARGET
        or (record.state is TrialState.COMPLETE and not record.meets(rec.target))
        for record in study.data.records
    )
    if rec.value is None or ruled_out:
        return
    worse = quality.worse_by(rec.value, base.value)
    if _MUCH_WORSE <= worse < math.inf:
        numbers = {"value": rec.value, "worse": worse, "base": base.value}
        yield study.caveat("target_decided_nothing", quality=quality.name, **numbers)


def caveats(study: StudyView) -> Iterator[Caveat]:
    rec, comparison = study.recommendation, study.comparison
    equal = possible_reversal(comparison)
    if not rec.met or rec.baseline is None:
        return
    if not rec.baseline.meets_target:
        yield study.caveat("baseline_misses_target", trial=rec.baseline.trial)
    yield from _target_decided_nothing(study, rec.baseline)
    if rec.saving_interval is not None and is_within_noise(rec.saving_interval):
        yield study.caveat(
            "saving_within_noise", lowest=rec.saving_interval[0], highest=rec.saving_interval[1]
        )
    if equal is not None:
        saving = (equal.lowest, equal.highest)
        has_interval = comparison is not None and comparison.saving.lowest is not None
        yield study.caveat(
            "equal_quality",
            step=equal.baseline_step,
            saving=saving,
            and_seeds=", and runs differ by their seeds" if has_interval else "",
        )
    both = None if equal is None else equal.both_stopped
    record = study.record(rec.trial)
    # Stopped at its last step, the recommendation would be the whole run, which is said above.
    if both is not None and record is not None and both.step != record.steps_done:
        yield study.caveat(
            "equal_quality_both_stopped",
            saving=both.saving_fraction,
            ends=(both.lowest, both.highest),
        )
    if (
        comparison is not None
        and rec.saving_interval is not None
        and comparison.saving.baseline_seeds == 1
    ):
        yield study.caveat("baseline_single_run")
    if comparison is not None and comparison.began_warmer_c is not None:
        degrees = abs(comparison.began_warmer_c)
        if (most := _MOST_OF_A_DEGREE * degrees) > _TOLERATED:
            key = "began_warmer" if comparison.began_warmer_c > 0 else "began_cooler"
            yield study.caveat(key, degrees=degrees, most=most)
    if rec.baseline.is_chosen and rec.trial != rec.baseline.trial:
        yield study.caveat("baseline_chosen")
    if not rec.baseline.is_start:
        yield study.caveat("baseline_not_given")
