"""What the trials teach of batch, steps, grids and the baseline: sentences and tables, or why it can't be said."""

from collections.abc import Callable, Sequence

from carbonopt.analysis.batch import AtBatch, BatchEffect, Spanned
from carbonopt.analysis.comparison import AtEqualQuality, Comparison
from carbonopt.analysis.diminishing_returns import ENOUGH, DiminishingReturns, Milestone
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.regions import InRegion
from carbonopt.core.format import (
    MISSING,
    count_text,
    difference_text,
    emissions_scale,
    emissions_text,
    energy_scale,
    energy_text,
    intensity_text,
    interval_text,
    memory_text,
    percent_text,
    quality_text,
    rate_text,
    seconds_text,
)
from carbonopt.report.savings import (
    WITHIN_NOISE,
    at_equal_quality,
    from_to,
    is_within_noise,
    of_it_repeats,
    pays_back_from_to,
)
from carbonopt.report.view import Cell, Part, Table, columns, number, word
from carbonopt.report.words import mean_of

WELL_KNOWN = (
    "Norway",
    "Sweden",
    "France",
    "Canada",
    "Brazil",
    "United Kingdom",
    "Germany",
    "United States",
    "Japan",
    "China",
    "Australia",
    "India",
    "Poland",
    "South Africa",
)


def lead(rec: Recommendation, found: Comparison | None) -> str:
    """What follows the headline: what a run and the search emitted, whether that pays back, and against what not."""
    search = f"the study itself emitted {emissions_text(rec.study_emissions_kg_co2e)}{of_it_repeats(rec)}"
    if not rec.met:
        return f"{search[0].upper()}{search[1:]} ({energy_text(rec.study_energy_kwh)})."
    run = f"A run of it emits {emissions_text(rec.emissions_kg_co2e)} and reaches perplexity "
    run += f"{quality_text(rec.perplexity)}{mean_of(rec)}; {search}"
    if rec.break_even_runs is None:
        return f"{run}, which a run that saves nothing can't pay back."
    known = pays_back_from_to(rec.break_even_interval)
    paid = (
        f"The study is paid back after {count_text(rec.break_even_runs, 'run')} in place of the baseline"
        f"{f' ({known})' if known else ''}."
    )
    return " ".join(part for part in (f"{run}.", paid, at_equal_quality(found)) if part)


def batch(found: BatchEffect | None) -> Part:
    """Time, memory, energy and emissions of an epoch over the batch."""
    if found is None:
        return Part(sentences=("Fewer than two batch sizes took steps, so what the batch does can't be said.",))
    energy = energy_scale(one.energy_kwh.highest for one in found.batches)
    emissions = emissions_scale(one.emissions_kg_co2e.highest for one in found.batches)

    def cell(span: Spanned | None, text: Callable[[float], str], least: bool) -> Cell:
        if span is None:
            return number(MISSING, None)
        return number(spanned_text(span, text), span.lowest, strong=least)

    def row(one: AtBatch) -> tuple[Cell, ...]:
        size = one.global_batch_size
        return (
            number(str(size), size),
            number(str(len(one.trials)), len(one.trials)),
            cell(one.duration_s, seconds_text, size == found.least_duration),
            cell(one.peak_memory_gib, memory_text, size == found.least_memory),
            cell(one.energy_kwh, energy.text, size == found.least_energy),
            cell(one.emissions_kg_co2e, emissions.text, size == found.least_energy),
        )

    return Part(
        sentences=_of_the_batch(found),
        tables=(
            Table(
                caption="An epoch's training by global batch size: the lowest of its trials (their median to their "
                "highest), the minimum in bold",
                columns=columns(
                    "Global batch",
                    "Trials",
                    "Time (s)",
                    "Memory (GiB)",
                    energy.label("Energy"),
                    emissions.label("Emissions"),
                    numeric_from=0,
                ),
                rows=tuple(map(row, found.batches)),
                note="Of each batch size the complete trials, or where none completed the stopped ones; they differ "
                "in their other settings, and what else the machine did can only add to them: batch sizes are compared "
                "by the lowest. Less energy an epoch is not less energy to the target: a larger batch takes "
                "fewer steps an epoch.",
            ),
        ),
    )


def spanned_text(span: Spanned, text: Callable[[float], str]) -> str:
    if text(span.lowest) == text(span.highest):
        return text(span.lowest)
    return f"{text(span.lowest)} ({interval_text(span.median, span.highest, text)})"


def _least_by_median(batches: Sequence[AtBatch], figure: Callable[[AtBatch], Spanned]) -> int:
    return min(batches, key=lambda one: figure(one).median).global_batch_size


def _by_medians(found: BatchEffect) -> tuple[str, ...]:
    """Where the usual trial of a batch size says something else than its best one."""
    energy = _least_by_median(found.batches, lambda one: one.energy_kwh)
    duration = _least_by_median(found.batches, lambda one: one.duration_s)
    others = [
        f"the {what} at {size}"
        for what, size, least in (
            ("least energy", energy, found.least_energy),
            ("least time", duration, found.least_duration),
        )
        if size != least
    ]
    return (f"By the medians, in which slow runs count, too, it would be {' and '.join(others)}.",) if others else ()


def _of_the_batch(found: BatchEffect) -> tuple[str, ...]:
    memory = "" if found.least_memory is None else f", the least memory at {found.least_memory}"
    least = (
        f"By the lowest of each batch size's trials, an epoch uses the least energy, and so emits the least, at batch "
        f"{found.least_energy}; it takes the least time at {found.least_duration}{memory}."
    )
    stopped = [one.global_batch_size for one in found.batches if one.only_stopped]
    doubt: tuple[str, ...] = ()
    if stopped:
        doubt = (
            f"With batch {', '.join(map(str, stopped))} no trial completed: these figures are of stopped trials, and "
            "rather too high.",
        )
    small, large = found.batches[0], found.batches[-1]
    changes = [
        f"{what} {difference_text(after.lowest / before.lowest - 1)}"
        for what, before, after in (
            ("memory", small.peak_memory_gib, large.peak_memory_gib),
            ("time", small.duration_s, large.duration_s),
            ("energy and emissions", small.energy_kwh, large.energy_kwh),
        )
        if before is not None and after is not None and before.lowest
    ]
    if not changes:
        return (least, *_by_medians(found), *doubt)
    return (
        least,
        *_by_medians(found),
        *doubt,
        f"From batch {small.global_batch_size} to {large.global_batch_size}, by the lowest of each: "
        f"{', '.join(changes)}.",
    )


def returns(found: DiminishingReturns | None) -> Part:
    """Diminishing returns inside one run, and where to stop."""
    if found is None:
        return Part(
            sentences=("No complete trial has evaluations of known energy, so where to stop a run can't be said.",)
        )
    scale = emissions_scale([found.points[-1].emissions_kg_co2e])
    energy = energy_scale([found.points[-1].energy_kwh])
    special = {found.lowest.step, found.enough.step, *([found.first_meeting.step] if found.first_meeting else [])}

    def row(point: Milestone) -> tuple[Cell, ...]:
        gained = point.gained_per_kg_co2e
        return (
            number(str(point.step), point.step, strong=point.step in special),
            number(percent_text(point.share), point.share),
            number(energy.text(point.energy_kwh), point.energy_kwh),
            number(scale.text(point.emissions_kg_co2e), point.emissions_kg_co2e),
            number(quality_text(point.perplexity), point.perplexity, strong=point.step in special),
            number(rate_text(None if gained is None else gained / scale.per_base), gained),
        )

    return Part(
        sentences=_where_to_stop(found),
        folded=(
            Table(
                caption=f"Evaluations of trial {found.trial}: what each further step bought",
                columns=columns(
                    "Step",
                    "Share of the run",
                    energy.label("Energy"),
                    scale.label("Emissions"),
                    "Perplexity",
                    f"Perplexity gained per {scale.unit}",
                    numeric_from=0,
                ),
                rows=tuple(map(row, found.points)),
            ),
        ),
    )


def _where_to_stop(found: DiminishingReturns) -> tuple[str, ...]:
    def at(point: Milestone) -> str:
        return (
            f"step {point.step} of {found.total_steps} ({emissions_text(point.emissions_kg_co2e)}, perplexity "
            f"{quality_text(point.perplexity)})"
        )

    said = [f"Trial {found.trial} had its lowest perplexity at {at(found.lowest)}."]
    if found.enough.step == found.lowest.step:
        said.append(f"No evaluation before was within {percent_text(ENOUGH)} of it: stopping earlier would have cost.")
        if found.saved_fraction > 0:
            said.append(f"Stopped there, the run would have emitted {percent_text(found.saved_fraction)} less.")
    else:
        said.append(
            f"It was within {percent_text(ENOUGH)} of it from {at(found.enough)} on: stopped there, the run would have "
            f"emitted {percent_text(found.saved_fraction)} less."
        )
    if found.first_meeting is not None:
        said.append(f"It first met the target at {at(found.first_meeting)}.")
    if found.rate_decays:
        said.append(
            "Its learning rate falls over the run, so a run planned to be that short would probably end at a lower "
            "perplexity than this one had there."
        )
    return tuple(said)


def regions(found: tuple[InRegion, ...]) -> Part:
    """The same joules on other grids: the study's own, the lowest, the highest and some that many know."""
    if not found:
        return Part(sentences=("Nothing is recommended, so there is no run to price on other grids.",))
    shown = [one for one in found if one.is_studys_own or one.place in WELL_KNOWN or one in (found[0], found[-1])]
    run = emissions_scale(one.run_kg_co2e for one in shown)
    study = emissions_scale(one.study_kg_co2e for one in shown)
    rows = tuple(
        (
            word(f"{one.place} (this study)" if one.is_studys_own else one.place, strong=one.is_studys_own),
            number(intensity_text(one.g_co2e_per_kwh), one.g_co2e_per_kwh, strong=one.is_studys_own),
            number(run.text(one.run_kg_co2e), one.run_kg_co2e, strong=one.is_studys_own),
            number(study.text(one.study_kg_co2e), one.study_kg_co2e, strong=one.is_studys_own),
            word(one.source),
        )
        for one in shown
    )
    return Part(
        sentences=(
            "The same energy at the mean intensities of other grids. Shares, ranks and the recommendation stay as they "
            "are: one factor applies to all.",
        ),
        tables=(
            Table(
                caption="The same joules on other grids",
                columns=(
                    *columns("Grid", "g CO2e/kWh", run.label("Recommended run"), study.label("Whole study")),
                    *columns("Source"),
                ),
                rows=rows,
                note=f"Of {count_text(len(found), 'grid')}, from the lowest to the highest; data/report.json has all.",
            ),
        ),
    )


def comparison(rec: Recommendation, found: Comparison | None) -> Part:
    """The recommendation against the baseline, at equal quality too."""
    if found is None or rec.baseline is None:
        return Part(sentences=(_no_comparison(rec),))
    saving = found.saving
    if saving.lowest is None or saving.highest is None:
        sure = "One run each: how far other runs of both would differ was not measured, so the saving has no interval."
    else:
        noise = f" That is {WITHIN_NOISE}." if is_within_noise((saving.lowest, saving.highest)) else ""
        sure = (
            f"The saving is {percent_text(saving.fraction)} "
            f"({interval_text(saving.lowest, saving.highest, percent_text)} with {percent_text(saving.level)} "
            f"confidence; {count_text(saving.seeds, 'run')} of the recommendation, {saving.baseline_seeds} of the "
            f"baseline).{noise}"
        )
    equal = found.equal_quality
    return Part(
        sentences=(sure, _equal_quality(rec, equal), *_both_stopped(rec, equal)),
        tables=(_against_baseline(rec, found),),
    )


def _no_comparison(rec: Recommendation) -> str:
    if rec.baseline is None:
        return "No trial completed, so there is neither a recommendation nor a baseline to compare it with."
    if not rec.met:
        return "Nothing is recommended, so there is nothing to compare with the baseline."
    if rec.trial == rec.baseline.trial:
        return f"The recommendation is its own baseline (trial {rec.trial}: {rec.baseline.why}): it saves nothing."
    return f"The baseline (trial {rec.baseline.trial}) has no emissions to compare with."


def _equal_quality(rec: Recommendation, equal: AtEqualQuality | None) -> str:
    assert rec.baseline is not None
    if equal is None and not rec.baseline.meets_target:
        return "At equal quality there is no figure: the baseline never met the target."
    if equal is None:
        return "At equal quality there is no figure: the baseline's energy by step is not known."
    return (
        f"At equal quality: the baseline's first evaluation at or below the target was at step {equal.baseline_step}. "
        f"Stopped as soon as it met the target, it would have emitted between "
        f"{emissions_text(equal.baseline_emissions_before_kg_co2e)} (its evaluation before) and "
        f"{emissions_text(equal.baseline_emissions_kg_co2e)}; against that the recommendation emits "
        f"{from_to(equal.saving_fraction_before, equal.saving_fraction)}."
    )


def _both_stopped(rec: Recommendation, equal: AtEqualQuality | None) -> tuple[str, ...]:
    """Like against like: the sentence before sets a whole run against one that was stopped."""
    both = None if equal is None else equal.both_stopped
    if equal is None or both is None:
        return ()
    saved = both.saving_fraction
    emits = f"{percent_text(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else "as much"
    return (
        f"With both stopped there: the recommendation's first run (trial {rec.trial}) first met the target at step "
        f"{both.step}, after {emissions_text(both.emissions_kg_co2e)}, and so emits {emits} than the baseline's "
        f"{emissions_text(equal.baseline_emissions_kg_co2e)}. Each met it at some step after its evaluation "
        f"before that, so that the truth is {from_to(both.lowest, both.highest)}. One run each, and neither was "
        "planned to be that short.",
    )


def _against_baseline(rec: Recommendation, found: Comparison) -> Table:
    base, equal = rec.baseline, found.equal_quality
    assert base is not None
    both = None if equal is None else equal.both_stopped
    parts: list[tuple[str, float | None, float | None, float | None]] = [
        (f"recommended (trial {rec.trial})", rec.perplexity, rec.emissions_kg_co2e, None),
        (f"baseline (trial {base.trial})", base.perplexity, base.emissions_kg_co2e, found.saving.fraction),
    ]
    if equal is not None:
        parts += [
            ("baseline, up to where it met the target", None, equal.baseline_emissions_kg_co2e, equal.saving_fraction),
            (
                "baseline, up to the evaluation before",
                None,
                equal.baseline_emissions_before_kg_co2e,
                equal.saving_fraction_before,
            ),
        ]
    if both is not None:
        stopped = "recommended, up to where it met the target: against the baseline up to there"
        parts.append((stopped, None, both.emissions_kg_co2e, both.saving_fraction))
    scale = emissions_scale(emissions_kg for _, _, emissions_kg, _ in parts)
    return Table(
        caption="The recommendation against the baseline",
        columns=columns("Run", "Perplexity", scale.label("Emissions"), "The recommendation saves"),
        rows=tuple(
            (
                word(what),
                number(quality_text(perplexity), perplexity),
                number(scale.text(emissions_kg), emissions_kg),
                number(percent_text(saved), saved),
            )
            for what, perplexity, emissions_kg, saved in parts
        ),
    )
