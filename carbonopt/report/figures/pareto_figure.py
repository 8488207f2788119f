"""The Pareto front: what each trial emitted, and how good it became.

It is drawn once for paper, and once as Plotly's own `data` and `layout`. The page adds the colours
of its light or dark theme, and the text about a trial, which it finds by `customdata`.
"""

import math
from sys import float_info
from typing import Any

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core import format as fmt
from carbonopt.core.format import plus_minus_text, spread_text
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures import style
from carbonopt.report.figures.points import CELLS, Axis, Point, Scatter, layers
from carbonopt.report.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION
from carbonopt.report.study_view import StudyView

# Each of the `layers` has a shape of its own, so that grey print loses nothing.
MARKERS: dict[str, dict[str, Any]] = {
    "stopped (last evaluation)": {"marker": "x", "s": 14, "color": GREY, "linewidths": 0.8},
    "failed or diverged (last evaluation)": {
        "marker": "v",
        "s": 14,
        "facecolors": "none",
        "edgecolors": ORANGE,
    },
    "complete": {"marker": "o", "s": 16, "facecolors": "none", "edgecolors": SKY_BLUE},
    "Pareto front": {"marker": "o", "s": 18, "color": BLUE},
    "knee of the front": {"marker": "s", "s": 44, "facecolors": "none", "edgecolors": "black"},
    "baseline": {"marker": "D", "s": 26, "color": VERMILION, "edgecolors": "black"},
    "recommended": {"marker": "*", "s": 80, "color": GREEN, "edgecolors": "black"},
}
PLOTLY_MARKERS: dict[str, dict[str, Any]] = {
    "stopped (last evaluation)": {
        "symbol": "x-thin",
        "size": 8,
        "line": {"width": 1.5, "color": GREY},
    },
    "failed or diverged (last evaluation)": {
        "symbol": "cross-thin",
        "size": 10,
        "line": {"width": 2, "color": ORANGE},
    },
    "complete": {"symbol": "circle-open", "size": 9, "color": SKY_BLUE, "line": {"width": 2}},
    "Pareto front": {"symbol": "circle", "size": 9, "color": BLUE},
    "knee of the front": {"symbol": "square-open", "size": 17, "color": BLUE, "line": {"width": 2}},
    "baseline": {"symbol": "diamond", "size": 14, "color": VERMILION},
    "recommended": {"symbol": "star", "size": 19, "color": GREEN},
}
# The front is drawn as stairs, which bound what it dominates.
STAIRS: dict[str, Any] = {
    "mode": "lines+markers",
    "line": {"shape": "hv", "width": 1.5, "color": BLUE},
}


def pareto_of(study: StudyView) -> document.Figure | None:
    """Return a study's figure for paper, which is drawn once."""
    if "pareto" not in study.figures:
        study.figures["pareto"] = pareto(
            study.plot, study.recommendation, study.knee, study.quality
        )
    return study.figures["pareto"]


def pareto(
    plot: Scatter, rec: Recommendation, knee: int | None, quality: Quality
) -> document.Figure | None:
    """Draw the figure for paper, or return None where no trial has both coordinates."""
    if not plot.points:
        return None

    def draw(figure: "style.Figure") -> None:
        axes = figure.add_subplot(xlabel=f"Emissions of a run ({plot.unit})", ylabel=quality.label)
        # Set first: matplotlib's own scaling leaves no room around values at the ends of the range
        # of floats.
        axes.set(xscale="log" if plot.x.log else "linear", yscale="log" if plot.y.log else "linear")
        axes.set(xlim=(plot.x.low, plot.x.high), ylim=(plot.y.low, plot.y.high))
        style.plain_ticks(axes.xaxis, axes.yaxis)
        axes.step(*_xy(plot.of("front")), where="post", color=BLUE, linewidth=0.8, zorder=1)
        for zorder, (label, points) in enumerate(layers(plot, rec, knee).items(), start=2):
            if framed := list(filter(plot.holds, points)):
                axes.scatter(
                    *_xy(framed),
                    label=label,
                    zorder=zorder,
                    **{"linewidths": 0.6, **MARKERS[label]},
                )
        _error_bars(axes, plot)
        style.draw_target(axes, rec.target.value, plot.framed)
        style.legend(figure, axes)

    caption = f"{quality.label} over emissions of each trial, and the Pareto front."
    caption += style.far_target_text(rec.target.value, plot.framed, quality)
    # A set, because a repeated trial on the front has two points.
    trials = len({point.trial for point in plot.points})
    alt = (
        f"{fmt.count_text(trials, 'trial')}, {len(plot.of('front'))} of them on the Pareto front."
        " The tables have the figures."
    )
    return style.drawn(draw, height_in=2.8, name="pareto", caption=caption, alt=alt)


def _error_bars(axes: "style.Axes", plot: Scatter) -> None:
    """Draw the spread of repeated configurations around their means.

    The bars lie below the marks of the front and of the answer, since they would hide a small mark
    in their middle.
    """
    for i, runs in enumerate(plot.repeated):
        emissions, spread = runs.emissions_kg_co2e, runs.value
        looks: dict[str, Any] = {
            **style.ERROR_BARS,
            "ecolor": "black",
            "capthick": 0.6,
            "zorder": 4.5,
        }
        looks |= {
            "xerr": emissions.standard_deviation * plot.per_kg,
            "yerr": spread.standard_deviation,
        }
        looks["label"] = "mean ± SD, repeated" if i == 0 else None
        axes.errorbar(emissions.mean * plot.per_kg, spread.mean, **looks)


def _xy(points: list[Point]) -> tuple[list[float], list[float]]:
    return [point.emissions for point in points], [point.quality for point in points]


def interactive_pareto(
    study: StudyView, printed: document.Figure, *, rows_in: str, row_note: str
) -> document.InteractiveFigure:
    """Return the interactive figure of all trials.

    Args:
        study: The study.
        printed: The static figure that stands in for the interactive one.
        rows_in: The key of the table of all trials.
        row_note: The settings that all trials share, in words.
    """
    plot, rec = study.plot, study.recommendation
    rows = {record.trial: row for row, record in enumerate(study.data.records)}
    traces = []
    for label, points in layers(plot, rec, study.knee).items():
        if points or label == "recommended":  # another target may have one
            line = STAIRS if label == "Pareto front" else {}
            at = [rows[point.trial] for point in points]
            traces.append(
                _trace(
                    label, *_xy(points), PLOTLY_MARKERS[label], meta=label, customdata=at, **line
                )
            )
    traces[-1:-1] = [*_unevaluated(plot, rows, study.quality), *_means(plot, study.quality)]
    return document.InteractiveFigure(
        figure=printed,
        data=tuple(traces),
        layout=_layout(plot, rec.target.value, study.quality),
        rows_in=rows_in,
        moved="recommended",
        shape_label="target",
        row_note=row_note,
    )


def _trace(
    name: str, x: list[float], y: list[float], marker: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "marker": marker,
        **more,
    }


def _unevaluated(plot: Scatter, rows: dict[int, int], quality: Quality) -> list[dict[str, Any]]:
    """Place trials without an evaluation at the figure's worse edge, by their emissions alone.

    Where many would lie on one another, one of them is drawn.
    """
    if not plot.unevaluated:
        return []
    # Plotly may take a mark at the very end of an axis for one outside it.
    inside = 1e-6 * (plot.x.high - plot.x.low)
    low, high = plot.x.low + inside, plot.x.high - inside
    cells = {math.floor(plot.x.share(at) * CELLS[0]): (trial, at) for trial, at in plot.unevaluated}
    x = [min(max(emissions, low), high) for _, emissions in cells.values()]
    y = [1.0 if quality.direction == "minimize" else 0.0 for _ in cells]
    marker = {"symbol": "triangle-down-open", "size": 9, "color": ORANGE, "line": {"width": 1.5}}
    more = {
        "yaxis": "y2",
        "customdata": [rows[trial] for trial, _ in cells.values()],
        "cliponaxis": False,
    }
    return [_trace("ended before an evaluation (at the edge)", x, y, marker, **more)]


def _means(plot: Scatter, quality: Quality) -> list[dict[str, Any]]:
    """Return bars of one standard deviation around the means of repeated configurations."""
    if not plot.repeated:
        return []
    spreads = [runs.value for runs in plot.repeated]
    x = [runs.emissions_kg_co2e.mean * plot.per_kg for runs in plot.repeated]
    deviations = [runs.emissions_kg_co2e.standard_deviation * plot.per_kg for runs in plot.repeated]
    texts = [
        f"Trials {', '.join(map(str, runs.trials))}<br>{quality.name}:"
        f" {spread_text(runs.value)}<br>emissions: {plus_minus_text(mean, deviation)} {plot.unit}"
        for runs, mean, deviation in zip(plot.repeated, x, deviations, strict=True)
    ]
    bars = {"type": "data", "thickness": 1.5, "width": 5, "color": VERMILION}
    up = [spread.standard_deviation for spread in spreads]
    errors = {"error_x": bars | {"array": deviations}, "error_y": bars | {"array": up}}
    marker = {"symbol": "line-ew", "size": 9, "line": {"width": 2, "color": VERMILION}}
    name = "repeated: mean ± standard deviation"
    return [_trace(name, x, [spread.mean for spread in spreads], marker, text=texts, **errors)]


def _layout(plot: Scatter, target: float, quality: Quality) -> dict[str, Any]:
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
    line = {"dash": "dash", "width": 1.5, "color": PURPLE}
    label = {
        "text": f"target {quality.target_text(target)}",
        "textposition": "end",
        "yanchor": "bottom",
    }
    # Shown where the line is outside the frame; the page's script looks again for each target.
    edge = {
        "text": f"{label['text']}, outside the frame",
        "visible": not plot.y.holds(target),
        "showarrow": False,
        "xref": "paper",
        "yref": "paper",
        "x": 1,
        "y": 1 if target > plot.y.high else 0,
        "xanchor": "right",
        "yanchor": "auto",  # inside the frame: above it are the buttons
    }
    return {
        "xaxis": _axis(f"Emissions of a run ({plot.unit})", plot.x),
        "yaxis": _axis(quality.label, plot.y),
        "yaxis2": {"overlaying": "y", "range": [0, 1 + 1e-6], "visible": False, "fixedrange": True},
        "shapes": [{**shape, "line": line, "label": label}],
        "annotations": [edge],
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "margin": {"l": 60, "r": 12, "t": 36, "b": 90},
        "hoverlabel": {"align": "left"},
        "showlegend": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def _axis(title: str, frame: Axis) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": title}, "zeroline": False, "automargin": True}
    if not frame.log:
        return axis | {"type": "linear", "range": [frame.low, frame.high]}
    # Plotly's own labels between powers of ten are bare digits ("2" for 200), so all ticks are
    # given here, also those that are seen after zooming out.
    first, last = math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high))
    stride = max(1, (last - first) // 6)
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    decades = range(first - 3 * stride, last + 4 * stride, stride)
    known = [
        decade for decade in decades if float_info.min_10_exp <= decade < float_info.max_10_exp
    ]
    ticks = [digit * 10.0**decade for decade in known for digit in digits]
    ends = [math.log10(frame.low), math.log10(frame.high)]
    return axis | {
        "type": "log",
        "range": ends,
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }
