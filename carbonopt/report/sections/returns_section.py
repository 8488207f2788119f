"""Diminishing returns inside one run, and where to stop."""

from collections.abc import Iterator

from carbonopt.analysis.comparison import ENOUGH, DiminishingReturns, Milestone
from carbonopt.core import format as fmt
from carbonopt.report.document import Section, Table, num, table, word
from carbonopt.report.figures.returns_figure import returns as returns_figure
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    if (diminishing := study.diminishing_returns) is None:
        return None
    figure = returns_figure(diminishing, study.recommendation.target.value, study.quality)
    tables = _milestones(study, diminishing), _evaluations(study, diminishing)
    return Section(
        key="returns", title="Diminishing returns", blocks=(figure, *tables) if figure else tables
    )


def _milestones(study: StudyView, diminishing: DiminishingReturns) -> Table:
    quality, scale = study.quality, fmt.emissions_scale([diminishing.points[-1].emissions_kg_co2e])
    within = f"within {fmt.percent_text(ENOUGH)} of the best"
    note = f"The run made {fmt.count_text(diminishing.total_steps, 'step')}."
    if diminishing.saved_fraction:
        saved = fmt.percent_text(diminishing.saved_fraction)
        note += f" Stopped {within}, it would have emitted {saved} less."
    else:
        note += f" Only its last evaluation was {within}."
    if diminishing.rate_decays:
        note += (
            " Its learning rate falls over the run, so a run planned to be that short would"
            " probably end better than this one stood there."
        )
    columns = [
        word("Evaluation", 0),
        num("Step", lambda row: row[1].step),
        num(quality.label, lambda row: row[1].value, quality.text),
        num(scale.label("Emissions"), lambda row: row[1].emissions_kg_co2e, scale.text),
        num("Share of the run", lambda row: row[1].share, fmt.percent_text),
    ]
    caption = f"Where trial {diminishing.trial} could have stopped"
    return table("milestones", caption, _named(diminishing, quality.name), columns, note=note)


def _named(diminishing: DiminishingReturns, quality: str) -> Iterator[tuple[str, Milestone]]:
    if diminishing.first_meeting is not None:
        yield "first at the target", diminishing.first_meeting
    yield f"within {fmt.percent_text(ENOUGH)} of the best {quality}", diminishing.enough
    yield f"best {quality}", diminishing.best


def _evaluations(study: StudyView, diminishing: DiminishingReturns) -> Table:
    last, quality = diminishing.points[-1], study.quality
    scale, energy = (
        fmt.emissions_scale([last.emissions_kg_co2e]),
        fmt.energy_scale([last.energy_kwh]),
    )
    special = {milestone.step for _, milestone in _named(diminishing, quality.name)}

    def gained(row: Milestone) -> float | None:
        return row.gained_per_kg_co2e and row.gained_per_kg_co2e / scale.per_base

    columns = [
        num("Step", "step", strong=lambda row: row.step in special),
        num("Share of the run", "share", fmt.percent_text),
        num(energy.label("Energy"), "energy_kwh", energy.text),
        num(scale.label("Emissions"), "emissions_kg_co2e", scale.text),
        num(quality.label, "value", quality.text, strong=lambda row: row.step in special),
        num(f"{quality.label} gained per {scale.unit}", gained, fmt.rate_text),
    ]
    caption = f"Evaluations of trial {diminishing.trial}: what each further step bought"
    return table("evaluations", caption, diminishing.points, columns, folded=True)
