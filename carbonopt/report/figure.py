"""The Pareto figure by itself, for where there may be nothing to show in it."""

from matplotlib.figure import Figure

from carbonopt.analysis.recommend import Recommendation
from carbonopt.report.paper.pareto import HEIGHT_IN, pareto
from carbonopt.report.paper.style import pictures
from carbonopt.report.points import Scatter


def render(plot: Scatter, rec: Recommendation, format: str) -> bytes:
    """The figure as `png` or `pdf`; the same data gives the same bytes."""
    return pictures(pareto(plot, rec, None) or _nothing, HEIGHT_IN)[format]


def _nothing(figure: Figure) -> None:
    axes = figure.add_subplot()
    axes.text(0.5, 0.5, "no trial was evaluated", ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()
