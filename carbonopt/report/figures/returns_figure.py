"""The figure of where a run stops paying: its quality over its own emissions."""

from collections.abc import Sequence
from typing import Any

from carbonopt.analysis.comparison import ENOUGH, DiminishingReturns, Milestone
from carbonopt.core.format import emissions_scale, percent_text
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures import style

MILESTONES: dict[str, dict[str, Any]] = {  # each has a shape of its own
    "first at the target": {"marker": "s", "color": style.ORANGE, "markersize": 6.5},
    f"within {percent_text(ENOUGH)} of the best": {
        "marker": "D",
        "color": style.VERMILION,
        "markersize": 5,
    },
    "best": {"marker": "*", "color": style.GREEN, "markersize": 9},
}
_DENSE = 40  # evaluations; from here on, their marks would merge into a thick line


def returns(
    diminishing: DiminishingReturns, target: float, quality: Quality
) -> document.Figure | None:
    """Draw the quality of a run over its emissions so far.

    Return None where the run has no two evaluations of known energy.
    """
    if len(diminishing.points) < 2:
        return None
    scale = emissions_scale([diminishing.points[-1].emissions_kg_co2e])

    def draw(figure: "style.Figure") -> None:
        axes = figure.add_subplot(
            xlabel=scale.label("Emissions of the run so far"), ylabel=quality.label
        )
        across, up = _places(diminishing.points, scale.per_base)
        framed = style.with_target(up, target)
        if style.wants_log(framed):
            style.log_scale(axes.yaxis, framed)
        dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(up) < _DENSE else {}
        axes.plot(
            across,
            up,
            color=style.BLUE,
            linewidth=1,
            label=f"evaluations of trial {diminishing.trial}",
            **dots,
        )
        for milestone, names in _milestones(diminishing):
            looks = {**MILESTONES[names[0]], **style.MILESTONE}
            axes.plot(
                *_places([milestone], scale.per_base), **looks, label=", ".join(names), zorder=4
            )
        style.draw_target(axes, target, up)
        axes.set_xlim(left=0)
        style.plain_ticks(axes.xaxis, axes.yaxis)
        style.legend(figure, axes)

    alt = (
        f"{quality.label} of trial {diminishing.trial} over its emissions so far. The table has the"
        " figures."
    )
    caption = "Diminishing returns inside one run."
    caption += style.far_target_text(target, [point.value for point in diminishing.points], quality)
    return style.drawn(draw, height_in=2.3, name="returns", caption=caption, alt=alt)


def _milestones(diminishing: DiminishingReturns) -> list[tuple[Milestone, list[str]]]:
    """Return each milestone with its names.

    One evaluation may have several names: marks on one another would hide all but one.
    """
    named: dict[int, tuple[Milestone, list[str]]] = {}
    enough = diminishing.enough if diminishing.enough.step < diminishing.best.step else None
    for name, milestone in zip(
        MILESTONES, (diminishing.first_meeting, enough, diminishing.best), strict=True
    ):
        if milestone is not None:
            named.setdefault(milestone.step, (milestone, []))[1].append(name)
    return list(named.values())


def _places(points: Sequence[Milestone], per_kg: float) -> tuple[list[float], list[float]]:
    return [point.emissions_kg_co2e * per_kg for point in points], [point.value for point in points]
