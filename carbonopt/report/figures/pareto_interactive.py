"""The Pareto figure as Plotly's own `data` and `layout`. The page adds the colours of its light or dark, and what to
say of a trial, by `customdata`: its row in the table of all trials."""

import math
from sys import float_info
from typing import Any

from carbonopt.core.format import plus_minus_text
from carbonopt.core.quality import Quality
from carbonopt.report import document
from carbonopt.report.figures.points import CELLS, COLOURS, LABELS, Axis, Point, Scatter, layers
from carbonopt.report.study_view import StudyView

MARKERS: dict[str, dict[str, Any]] = {
    "stopped": {"symbol": "x-thin", "size": 8, "line": {"width": 1.5, "color": COLOURS["stopped"]}},
    "failed": {"symbol": "cross-thin", "size": 10, "line": {"width": 2, "color": COLOURS["failed"]}},
    "complete": {"symbol": "circle-open", "size": 9, "color": COLOURS["complete"], "line": {"width": 2}},
    "front": {"symbol": "circle", "size": 9, "color": COLOURS["front"]},
    "knee": {"symbol": "square-open", "size": 17, "color": COLOURS["knee"], "line": {"width": 2}},
    "baseline": {"symbol": "diamond", "size": 14, "color": COLOURS["baseline"]},
    "recommended": {"symbol": "star", "size": 19, "color": COLOURS["recommended"]},
}


def interactive_pareto(
    study: StudyView, printed: document.Figure, *, rows_in: str, row_note: str
) -> document.InteractiveFigure:
    """`printed` stands in for it; `rows_in`: the key of the table of all trials; `row_note`: what these share."""
    plot, rec = study.plot, study.recommendation
    rows = {record.trial: row for row, record in enumerate(study.data.records)}
    traces = [
        _trace(name, points, rows)
        for name, points in layers(plot, rec, study.knee).items()
        if points or name == "recommended"  # which another target may have
    ]
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


def _trace(name: str, points: list[Point], rows: dict[int, int]) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": LABELS[name],
        "meta": name,
        "x": [point.emissions for point in points],
        "y": [point.quality for point in points],
        "customdata": [rows[point.trial] for point in points],
        "marker": MARKERS[name],
    }
    if name == "front":  # as stairs: what lies above and to the right is dominated
        trace |= {"mode": "lines+markers", "line": {"shape": "hv", "width": 1.5, "color": COLOURS["front"]}}
    return trace


def _unevaluated(plot: Scatter, rows: dict[int, int], quality: Quality) -> list[dict[str, Any]]:
    """At the figure's worse edge, by their emissions alone; one where many would lie on one another."""
    if not plot.unevaluated:
        return []
    inside = 1e-6 * (plot.x.high - plot.x.low)  # what is at the very end of an axis plotly may take for outside
    low, high = plot.x.low + inside, plot.x.high - inside
    cells = {
        math.floor(plot.x.share(emissions) * CELLS[0]): (trial, emissions) for trial, emissions in plot.unevaluated
    }
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "ended before an evaluation (at the edge)",
            "x": [min(max(emissions, low), high) for _, emissions in cells.values()],
            "y": [1.0 if quality.direction == "minimize" else 0.0 for _ in cells],
            "yaxis": "y2",
            "customdata": [rows[trial] for trial, _ in cells.values()],
            "cliponaxis": False,
            "marker": {"symbol": "triangle-down-open", "size": 9, "color": COLOURS["failed"], "line": {"width": 1.5}},
        }
    ]


def _means(plot: Scatter, quality: Quality) -> list[dict[str, Any]]:
    """Bars of one standard deviation where a configuration was repeated."""
    if not plot.means:
        return []

    def bars(deviations: list[float]) -> dict[str, Any]:
        return {"type": "data", "array": deviations, "thickness": 1.5, "width": 5, "color": COLOURS["baseline"]}

    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "repeated: mean ± standard deviation",
            "x": [one.emissions for one in plot.means],
            "y": [one.quality for one in plot.means],
            "error_x": bars([one.emissions_deviation for one in plot.means]),
            "error_y": bars([one.quality_deviation for one in plot.means]),
            "text": [
                f"Trials {', '.join(map(str, one.trials))}<br>"
                f"{quality.name}: {plus_minus_text(one.quality, one.quality_deviation)}<br>"
                f"emissions: {plus_minus_text(one.emissions, one.emissions_deviation)} {plot.unit}"
                for one in plot.means
            ],
            "marker": {"symbol": "line-ew", "size": 9, "line": {"width": 2, "color": COLOURS["baseline"]}},
        }
    ]


def _layout(plot: Scatter, value: float, quality: Quality) -> dict[str, Any]:
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"dash": "dash", "width": 1.5, "color": COLOURS["target"]},
        "label": {"text": f"target {quality.text(value)}", "textposition": "end", "yanchor": "bottom"},
    }
    return {
        "xaxis": _axis(f"Emissions of a run ({plot.unit})", plot.x),
        "yaxis": _axis(quality.label, plot.y),
        "yaxis2": {"overlaying": "y", "range": [0, 1 + 1e-6], "visible": False, "fixedrange": True},
        "shapes": [line],
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
    # Plotly's own labels between powers of ten are bare digits ("2" for 200), so ours are given, for zooming out too.
    first, last = math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high))
    stride = max(1, (last - first) // 6)
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [
        digit * 10.0**decade
        for decade in range(first - 3 * stride, last + 4 * stride, stride)
        if float_info.min_10_exp <= decade < float_info.max_10_exp
        for digit in digits
    ]
    return axis | {
        "type": "log",
        "range": [math.log10(frame.low), math.log10(frame.high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }
