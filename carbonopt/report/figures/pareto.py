"""The Pareto front: what each trial emitted, and how good it became."""

from typing import TYPE_CHECKING, Any

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures.points import COLOURS, LABELS, Point, Scatter, layers
from carbonopt.report.figures.style import TARGET, drawn, legend, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 2.8
# A shape of its own for each group, so that grey print loses nothing.
MARKERS: dict[str, dict[str, Any]] = {
    "stopped": {"marker": "x", "s": 14, "color": COLOURS["stopped"], "linewidths": 0.8, "zorder": 2},
    "failed": {"marker": "v", "s": 14, "facecolors": "none", "edgecolors": COLOURS["failed"], "zorder": 2},
    "complete": {"marker": "o", "s": 16, "facecolors": "none", "edgecolors": COLOURS["complete"], "zorder": 3},
    "front": {"marker": "o", "s": 18, "color": COLOURS["front"], "zorder": 4},
    "knee": {"marker": "s", "s": 44, "facecolors": "none", "edgecolors": "black", "zorder": 5},
    "baseline": {"marker": "D", "s": 26, "color": COLOURS["baseline"], "edgecolors": "black", "zorder": 5},
    "recommended": {"marker": "*", "s": 80, "color": COLOURS["recommended"], "edgecolors": "black", "zorder": 6},
}


def pareto(plot: Scatter, rec: Recommendation, knee: int | None, quality: Quality) -> document.Figure | None:
    """None where no trial has both coordinates."""
    if not plot.points:
        return None

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        axes.set_xlabel(f"Emissions of a run ({plot.unit})")
        axes.set_ylabel(quality.label)
        _scale(axes, plot)  # first: matplotlib's own scaling has no room around values at the end of floats
        axes.step(*_xy(plot.of("front")), where="post", color=COLOURS["front"], linewidth=0.8, zorder=1)
        for name, points in layers(plot, rec, knee).items():
            framed = [point for point in points if plot.x.holds(point.emissions) and plot.y.holds(point.quality)]
            if framed:
                axes.scatter(*_xy(framed), label=LABELS[name], **{"linewidths": 0.6, **MARKERS[name]})
        _error_bars(axes, plot)
        axes.axhline(rec.target.value, label="target", **TARGET)
        legend(figure, axes)

    caption = f"{quality.label} over emissions of each trial, and the Pareto front."
    alt = (
        f"{len(plot.points)} trials, {len(plot.of('front'))} of them on the Pareto front. The tables have the figures."
    )
    return drawn(draw, HEIGHT_IN, name="pareto", caption=caption, alt=alt)


def _error_bars(axes: "Axes", plot: Scatter) -> None:
    for i, mean in enumerate(plot.means):
        axes.errorbar(
            mean.emissions,
            mean.quality,
            xerr=mean.emissions_deviation,
            yerr=mean.quality_deviation,
            fmt="none",
            ecolor="black",
            elinewidth=0.8,
            capsize=1.8,
            capthick=0.6,
            zorder=3.5,  # below what is marked: it would hide a small mark in the middle
            label="mean ± SD, repeated" if i == 0 else None,
        )


def _scale(axes: "Axes", plot: Scatter) -> None:
    if plot.x.log:
        axes.set_xscale("log")
    if plot.y.log:
        axes.set_yscale("log")
    axes.set_xlim(plot.x.low, plot.x.high)
    axes.set_ylim(plot.y.low, plot.y.high)
    plain_ticks(axes.xaxis, plot.x.log)
    plain_ticks(axes.yaxis, plot.y.log)


def _xy(points: list[Point]) -> tuple[list[float], list[float]]:
    return [point.emissions for point in points], [point.quality for point in points]
