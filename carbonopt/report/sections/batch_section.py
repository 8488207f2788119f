"""The effect of the batch size on an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from carbonopt.analysis.batch import AtBatch, BatchEffect, sizes_of_least
from carbonopt.core import format as fmt
from carbonopt.core.quality import Quality
from carbonopt.report.caveats import trials_text
from carbonopt.report.document import MISSING, Maker, Section, num, table
from carbonopt.report.figures.batch_figure import batch as batch_figure
from carbonopt.report.sections.contention_section import is_charged_by_cpu_time
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    if (effect := study.batch) is None:
        return None
    energy = fmt.energy_scale(row.energy_kwh.highest for row in effect.batches)
    emissions = fmt.emissions_scale(row.emissions_kg_co2e.highest for row in effect.batches)
    columns = [
        num("Global batch", "global_batch_size"),
        num("Trials", lambda row: len(row.trials), shown=_trials),
        _spanned("Time (s)", "duration_s", fmt.seconds_text, effect.least_duration),
        _spanned("Memory (GiB)", "peak_memory_gib", fmt.memory_text, effect.least_memory),
        _spanned(energy.label("Energy"), "energy_kwh", energy.text, effect.least_energy),
        _spanned(
            emissions.label("Emissions"), "emissions_kg_co2e", emissions.text, effect.least_energy
        ),
    ]
    if effect.best_quality is not None:
        columns.append(_quality(study.quality, effect.best_quality))
    note = " ".join(_notes(study, effect))
    caption = (
        "An epoch's training by global batch size: the lowest of its trials (their median to their"
        " highest), the "
    )
    reached = (
        "; what its trials reached at their end: the best, the best of all in bold"
        if effect.best_quality
        else ""
    )
    made = table("batch", f"{caption}minimum in bold{reached}", effect.batches, columns, note=note)
    return Section(
        key="batch", title="The batch size", blocks=(batch_figure(effect, study.quality), made)
    )


def _trials(row: AtBatch) -> str:
    """Return how many trials a row is of, and whether they were stopped or slowed."""
    remarks = ["stopped"] if row.only_stopped else []
    if row.slowed:
        remarks.append(f"{len(row.slowed)} slowed")
    return f"{len(row.trials)} ({', '.join(remarks)})" if remarks else str(len(row.trials))


def _notes(study: StudyView, effect: BatchEffect) -> Iterator[str]:
    if slowed := [trial for row in effect.batches for trial in row.slowed]:
        energy = "may be" if is_charged_by_cpu_time(study.data) else "is"
        yield (
            f"Other work on the machine slowed {trials_text(slowed)}, whose time is too high, and"
            f" whose energy {energy}, too."
            " Undisturbed, a batch size with slowed trials may take less than the minimum."
        )
    small, large = effect.batches[0], effect.batches[-1]
    names = {
        "memory": "peak_memory_gib",
        "time": "duration_s",
        "energy and emissions": "energy_kwh",
    }
    changes = [
        f"{what} {fmt.difference_text(after.lowest / before.lowest - 1)}"
        for what, name in names.items()
        if (before := getattr(small, name)) and (after := getattr(large, name)) and before.lowest
    ]
    if changes:
        ends = f"From batch {small.global_batch_size} to {large.global_batch_size}"
        yield f"{ends}: {', '.join(changes)}."
    counts = [len(row.trials) for row in effect.batches]
    if min(counts) < max(counts):
        yield (
            f"The lowest of {fmt.count_text(max(counts), 'trial')} is lower by chance than that of"
            f" {min(counts)}: where runs spread, sizes with more trials look cheaper."
        )
    energy_at, time_at = _least(effect, "energy_kwh"), _least(effect, "duration_s")
    yield (
        f"By the medians, slow runs included: least energy at {energy_at}, least time at {time_at}."
        " Less energy an epoch is not less energy to the target: a larger batch takes fewer steps"
        " an epoch."
    )


def _least(effect: BatchEffect, at: str) -> str:
    """Name the batch sizes whose median is the least."""
    medians = {row.global_batch_size: getattr(row, at).median for row in effect.batches}
    sizes = list(map(str, sizes_of_least(medians)))
    return sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} and {sizes[-1]} alike"


def _spanned(label: str, at: str, text: Callable[[Any], str], least: int | None) -> Maker:
    def shown(row: AtBatch) -> str:
        span = getattr(row, at)
        if span is None or text(span.lowest) == text(span.highest):
            return MISSING if span is None else text(span.lowest)
        return f"{text(span.lowest)} ({fmt.interval_text(span.median, span.highest, text)})"

    def lowest(row: AtBatch) -> Any:
        return (span := getattr(row, at)) and span.lowest

    return num(label, lowest, shown=shown, strong=lambda row: row.global_batch_size == least)


def _quality(quality: Quality, best: int) -> Maker:
    def values(row: AtBatch) -> tuple[float, float, float] | None:
        """Return the best, the median and the worst value, or None without a value."""
        if (span := row.quality) is None:
            return None
        ordered = (span.lowest, span.median, span.highest)
        return ordered if quality.direction == "minimize" else ordered[::-1]

    def shown(row: AtBatch) -> str:
        texts = [quality.text(value) for value in values(row) or (None,)]
        return f"{texts[0]} ({texts[1]} to {texts[-1]})" if texts[0] != texts[-1] else texts[0]

    return num(
        quality.label,
        lambda row: values(row) and values(row)[0],  # type: ignore[index]
        shown=shown,
        strong=lambda row: row.global_batch_size == best,
    )
