"""The Pareto figure for paper: one column wide, fonts embedded, readable in grey."""

import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from carbonopt.analysis.recommend import Recommendation
from carbonopt.report.points import COLOURS, LABELS, Point, Scatter, layers

SIZE_IN = (3.5, 2.6)  # one column of a two-column paper
DPI = 300
STYLE = {
    "pdf.fonttype": 42,  # TrueType: text stays text, and publishers' checks pass
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.fontsize": 6.5,
    "text.parse_math": False,
}
# A shape of its own for each group, so that grey print loses nothing.
MARKERS: dict[str, dict[str, Any]] = {
    "stopped": {"marker": "x", "s": 14, "color": COLOURS["stopped"], "linewidths": 0.8, "zorder": 2},
    "failed": {"marker": "+", "s": 18, "color": COLOURS["failed"], "linewidths": 0.8, "zorder": 2},
    "complete": {"marker": "o", "s": 16, "facecolors": "none", "edgecolors": COLOURS["complete"], "zorder": 3},
    "front": {"marker": "o", "s": 18, "color": COLOURS["front"], "zorder": 4},
    "knee": {"marker": "s", "s": 36, "facecolors": "none", "edgecolors": COLOURS["knee"], "zorder": 5},
    "baseline": {"marker": "D", "s": 26, "color": COLOURS["baseline"], "edgecolors": "black", "zorder": 5},
    "recommended": {"marker": "*", "s": 80, "color": COLOURS["recommended"], "edgecolors": "black", "zorder": 6},
}


def render(plot: Scatter, rec: Recommendation, format: str) -> bytes:
    """The figure as `png` or `pdf`; the same data gives the same bytes."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), plot, rec)
        if plot.points:
            figure.legend(loc="outside upper center", ncols=3, frameon=False, handletextpad=0.3, columnspacing=1.2)
        buffer = io.BytesIO()
        metadata = {"CreationDate": None} if format == "pdf" else {"Software": None}
        figure.savefig(buffer, format=format, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Axes, plot: Scatter, rec: Recommendation) -> None:
    axes.set_xlabel(f"Emissions of a run ({plot.unit})")
    axes.set_ylabel("Perplexity")
    if not plot.points:
        axes.text(0.5, 0.5, "no trial was evaluated", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    _scale(axes, plot)  # first: matplotlib's own scaling has no room around values at the end of floats
    axes.step(*_xy(plot.of("front")), where="post", color=COLOURS["front"], linewidth=0.8, zorder=1)
    beyond = plot.outside()
    for name, points in layers(plot, rec).items():
        if framed := [point for point in points if point not in beyond]:
            axes.scatter(*_xy(framed), label=LABELS[name], **{"linewidths": 0.6, **MARKERS[name]})
    axes.axhline(
        rec.target_perplexity, color=COLOURS["target"], linestyle="--", linewidth=0.8, label="target", zorder=1
    )


def _scale(axes: Axes, plot: Scatter) -> None:
    if plot.x.log:
        axes.set_xscale("log")
    if plot.y.log:
        axes.set_yscale("log")
    axes.set_xlim(plot.x.low, plot.x.high)
    axes.set_ylim(plot.y.low, plot.y.high)
    for axis, frame in ((axes.xaxis, plot.x), (axes.yaxis, plot.y)):
        if frame.log:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def _xy(points: list[Point]) -> tuple[list[float], list[float]]:
    return [point.emissions for point in points], [point.perplexity for point in points]
