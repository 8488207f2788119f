"""The section that prices the study's energy on other grids and at other hours."""

from carbonopt.analysis.repricing import Repricing
from carbonopt.core import format as fmt
from carbonopt.report.document import MISSING, Paragraph, Section, Table, num, scaled, table, word
from carbonopt.report.study_view import StudyView

WELL_KNOWN = {
    *(
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
    ),
    *("Australia", "India", "Poland", "South Africa"),
}
HOURS_NOTE = (
    "Power is taken as even over a run. The trace may count otherwise (direct or life-cycle"
    " emissions) than the fixed intensity does: compare its hours with each other."
)


def section(study: StudyView) -> Section | None:
    if not study.regions:
        return None
    nothing = "Hourly figures need an hourly trace of the grid (carbon.trace)."
    hours = _hours(study, study.priced) if study.priced else Paragraph(text=nothing, style="note")
    title = "The same joules elsewhere and at other hours"
    return Section(key="elsewhere", title=title, blocks=(_grids(study), hours))


def _grids(study: StudyView) -> Table:
    """Show the study's own grid, the lowest, the highest and some well-known ones."""
    regions = study.regions
    shown = [
        row
        for row in regions
        if row.is_studys_own or row.place in WELL_KNOWN or row in (regions[0], regions[-1])
    ]
    is_own = "is_studys_own"
    columns = [
        word(
            "Grid",
            lambda row: f"{row.place} (this study)" if row.is_studys_own else row.place,
            strong=is_own,
        ),
        num("g CO2e/kWh", "g_co2e_per_kwh", fmt.intensity_text, strong=is_own),
        scaled("Recommended run", "run_kg_co2e", fmt.emissions_scale, shown, strong=is_own),
        scaled("Whole study", "study_kg_co2e", fmt.emissions_scale, shown, strong=is_own),
        word("Source", "source"),
    ]
    note = (
        f"Of {fmt.count_text(len(regions), 'grid')}, by their mean intensity; data/report.json has"
        " all. Shares, "
    )
    note += "ranks and the recommendation stay as they are: one factor applies to all."
    return table("grids", "The same joules on other grids", shown, columns, note=note)


def _hours(study: StudyView, repricing: Repricing) -> Table:
    rec, starts, fixed_g = (
        study.recommendation,
        repricing.starts,
        study.data.provenance.intensity.g_co2e_per_kwh,
    )
    run, whole = "the recommended run", "the whole study"
    rows: list[tuple[object, ...]] = [
        (f"{run}, at the study's fixed intensity", MISSING, fixed_g, rec.emissions_kg_co2e)
    ]
    notes = [
        f"The trace has the hours from {_minute(repricing.first_hour)} to"
        f" {_minute(repricing.last_hour)} (UTC)."
    ]
    if starts is None:
        notes.append("It has nowhere as many hours in a row as the recommended run takes.")
    else:
        mean = f"{run}, mean of {fmt.count_text(starts.hours, 'hour')} to start at"
        rows.append((mean, MISSING, starts.mean_g_co2e_per_kwh, starts.mean_kg_co2e))
        for which, hour in (("lowest", starts.lowest), ("highest", starts.highest)):
            rows.append(
                (
                    f"{run}, {which}",
                    _minute(hour.start),
                    hour.g_co2e_per_kwh,
                    hour.emissions_kg_co2e,
                )
            )
        if starts.lowest.emissions_kg_co2e:
            notes.append(
                "Highest ÷ lowest:"
                f" {starts.highest.emissions_kg_co2e / starts.lowest.emissions_kg_co2e:.3g}."
            )
        notes.append(
            f"Left out as a start, for want of a value: {fmt.count_text(starts.left_out, 'hour')}."
        )
    rows.append(
        (f"{whole}, at the study's fixed intensity", MISSING, fixed_g, rec.study_emissions_kg_co2e)
    )
    own_g, own_kg = repricing.study_g_co2e_per_kwh, repricing.study_emissions_kg_co2e
    rows.append((f"{whole}, in the hours that it ran in", MISSING, own_g, own_kg))
    if repricing.study_unknown is not None:
        notes.append(f"The study in its own hours: not known, because {repricing.study_unknown}.")
    notes.append(HOURS_NOTE)
    columns = [
        word("What", 0),
        word("Start (UTC)", 1),
        num("g CO2e/kWh", 2, fmt.intensity_text),
        scaled("Emissions", 3, fmt.emissions_scale, rows),
    ]
    return table(
        "hours",
        f"The same joules at other hours, by {repricing.source}",
        rows,
        columns,
        note=" ".join(notes),
    )


def _minute(iso: str) -> str:
    """Return an instant without its seconds and its offset, which the column's head says."""
    return iso[:16].replace("T", " ")
