"""Where a run stops paying: its quality over its own emissions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from carbonopt.analysis.diminishing_returns import ENOUGH, DiminishingReturns, Milestone
from carbonopt.core.format import emissions_scale, percent_text
from carbonopt.core.quality import Quality
from carbonopt.report import document, quality_text
from carbonopt.report.figures.style import BLUE, GREEN, ORANGE, TARGET, VERMILION, drawn, legend, plain_ticks, wants_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT_IN = 2.3
MILESTONES: dict[str, dict[str, Any]] = {  # of a run, each with a shape of its own
    "first at the target": {"marker": "s", "color": ORANGE, "markersize": 6.5},
    f"within {percent_text(ENOUGH)} of the best": {"marker": "D", "color": VERMILION, "markersize": 5},
    "best": {"marker": "*", "color": GREEN, "markersize": 9},
}
_DENSE = 40  # evaluations; from here on their marks would be a thick line


def returns(found: DiminishingReturns, target: float, quality: Quality) -> document.Figure | None:
    """None where the run has no two evaluations of known energy."""
    if len(found.points) < 2:
        return None
    scale = emissions_scale([found.points[-1].emissions_kg_co2e])

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        axes.set_xlabel(scale.label("Emissions of the run so far"))
        axes.set_ylabel(quality.label)
        across, up = _places(found.points, scale.per_base)
        dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(up) < _DENSE else {}
        axes.plot(across, up, color=BLUE, linewidth=1, label=f"evaluations of trial {found.trial}", **dots)
        for milestone, names in _milestones(found):
            place = _places([milestone], scale.per_base)
            axes.plot(*place, **MILESTONES[names[0]], label=", ".join(names), markeredgecolor="black",
                      markeredgewidth=0.5, linestyle="none", zorder=4)  # fmt: skip
        axes.axhline(target, label="target", **TARGET)
        log = wants_log([*up, target])
        if log:
            axes.set_yscale("log")
        axes.set_xlim(left=0)
        plain_ticks(axes.xaxis, False)
        plain_ticks(axes.yaxis, log)
        legend(figure, axes)

    alt = f"{quality.label} of trial {found.trial} over its emissions at each evaluation. The table has the figures."
    return drawn(draw, HEIGHT_IN, name="returns", caption="Diminishing returns inside one run.", alt=alt)


def _milestones(found: DiminishingReturns) -> list[tuple[Milestone, list[str]]]:
    """With their names, which one evaluation may have several of: marks on one another would hide all but one."""
    named: dict[int, tuple[Milestone, list[str]]] = {}
    enough = found.enough if found.enough.step < found.best.step else None
    for name, milestone in zip(MILESTONES, (found.first_meeting, enough, found.best), strict=True):
        if milestone is not None:
            named.setdefault(milestone.step, (milestone, []))[1].append(name)
    return list(named.values())


def _places(points: Sequence[Milestone], per_kg: float) -> tuple[list[float], list[float]]:
    return [point.emissions_kg_co2e * per_kg for point in points], [quality_text.known(point) for point in points]
