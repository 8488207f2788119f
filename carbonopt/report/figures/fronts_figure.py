"""The figure of several studies' Pareto fronts, at one carbon intensity."""

from typing import Any

from carbonopt.analysis.study_comparison import ComparedRun, StudiesComparison
from carbonopt.core.format import intensity_text
from carbonopt.core.quality import Quality
from carbonopt.core.units import emissions_unit
from carbonopt.report import document
from carbonopt.report.figures import style
from carbonopt.report.figures.points import frame
from carbonopt.report.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION

# Each study has a colour and a shape of its own, so that grey print loses nothing. With more
# studies than these, they begin again.
_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY_BLUE, PURPLE, GREY)
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LONGEST_LABEL = 40  # characters of a study's name in the legend


def fronts(comparison: StudiesComparison, quality: Quality) -> document.Figure | None:
    """Draw the front of each study.

    Return None where no study has a front with known emissions.
    """
    drawn = {study.name: list(filter(_is_known, study.front)) for study in comparison.studies}
    runs = [run for of_study in drawn.values() for run in of_study]
    if not runs:
        return None
    unit, per_kg = emissions_unit(max(run.common_emissions_kg_co2e or 0.0 for run in runs))
    x_frame = frame([_emissions(run, per_kg) for run in runs])
    targets = {study.target.value for study in comparison.studies}
    values = [run.value for run in runs]
    y_frame = frame([*values, *(each for each in targets if not style.is_far(each, values))])

    def draw(figure: "style.Figure") -> None:
        at = f"at {intensity_text(comparison.g_co2e_per_kwh)} g CO2e/kWh"
        axes = figure.add_subplot(xlabel=f"Emissions of a run {at} ({unit})", ylabel=quality.label)
        axes.set(
            xscale="log" if x_frame.log else "linear", yscale="log" if y_frame.log else "linear"
        )
        axes.set(xlim=(x_frame.low, x_frame.high), ylim=(y_frame.low, y_frame.high))
        style.plain_ticks(axes.xaxis, axes.yaxis)
        for number, study in enumerate(comparison.studies):
            colour, shape = _COLOURS[number % len(_COLOURS)], _SHAPES[number % len(_SHAPES)]
            of_study = drawn[study.name]
            x, y = [_emissions(run, per_kg) for run in of_study], [run.value for run in of_study]
            looks: dict[str, Any] = {
                "color": colour,
                "marker": shape,
                "markersize": 3.5,
                "linewidth": 0.9,
            }
            axes.step(x, y, where="post", label=_short(study.name), **looks)
            if study.recommended is not None and _is_known(study.recommended):
                place = _emissions(study.recommended, per_kg), study.recommended.value
                axes.scatter(
                    *place, s=70, facecolors="none", edgecolors=colour, linewidths=1.2, zorder=4
                )
        for target in sorted(targets):
            style.draw_target(axes, target, values)
        axes.scatter([], [], s=40, facecolors="none", edgecolors="black", label="recommended")
        style.legend(figure, axes)

    caption = (
        f"The Pareto front of each study: {quality.name} over emissions of a run, priced at one"
        " carbon intensity."
    )
    caption += "".join(style.far_target_text(each, values, quality) for each in sorted(targets))
    alt = f"The fronts of {len(drawn)} studies. The tables have the figures."
    return style.drawn(draw, height_in=2.8, name="fronts", caption=caption, alt=alt)


def _is_known(run: ComparedRun) -> bool:
    return run.common_emissions_kg_co2e is not None


def _emissions(run: ComparedRun, per_kg: float) -> float:
    assert run.common_emissions_kg_co2e is not None
    return run.common_emissions_kg_co2e * per_kg


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…"
