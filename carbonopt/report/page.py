"""The report as one HTML page that loads nothing: plotly's JavaScript, figure, style and data are inside."""

import base64
import html
import math
import re
from sys import float_info
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.report.points import COLOURS, LABELS, Axis, Point, Scatter, layers
from carbonopt.report.quantities import emissions_text, energy_text, perplexity_text, value_text
from carbonopt.report.tables import state_text
from carbonopt.report.view import View
from carbonopt.trial import TrialRecord

_ENVIRONMENT = Environment(
    loader=PackageLoader("carbonopt.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# A figure and its unit stay on one line.
_ENVIRONMENT.filters["unbroken"] = lambda text: re.sub(
    r"(?<=\d) (?=(%|kWh|k?J|[km]?g)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)", "\N{NO-BREAK SPACE}", text
)

MARKERS: dict[str, dict[str, Any]] = {
    "stopped": {"symbol": "x-thin", "size": 8, "line": {"width": 1.5, "color": COLOURS["stopped"]}},
    "complete": {"symbol": "circle-open", "size": 9, "color": COLOURS["complete"], "line": {"width": 2}},
    "front": {"symbol": "circle", "size": 9, "color": COLOURS["front"]},
    "baseline": {"symbol": "diamond", "size": 14, "color": COLOURS["baseline"]},
    "recommended": {"symbol": "star", "size": 19, "color": COLOURS["recommended"]},
}


def render(view: View, data: StudyData, plot: Scatter, rec: Recommendation, png: bytes) -> str:
    """The page. The PNG stands in for the interactive figure on paper and without JavaScript."""
    return _ENVIRONMENT.get_template("index.html").render(
        view=view,
        figure=figure(data, plot, rec) if plot.points else None,
        png=base64.b64encode(png).decode("ascii"),
        plotly_js=get_plotlyjs(),
    )


def figure(data: StudyData, plot: Scatter, rec: Recommendation) -> dict[str, Any]:
    """The interactive figure as plotly's own `data` and `layout`. The page adds the colours of its light or dark."""
    records = {record.trial: record for record in data.records}
    hover = {point.trial: hover_text(records[point.trial], rec) for point in plot.points}
    traces = [_trace(name, points, hover) for name, points in layers(plot, rec).items() if points]
    return {"data": traces, "layout": _layout(plot, rec)}


def hover_text(record: TrialRecord, rec: Recommendation) -> str:
    """Number, state, figures and the full configuration. Plotly reads simple HTML here, so every text is escaped."""
    perplexity = record.perplexity
    if perplexity is None and record.evals:
        perplexity = record.evals[-1].perplexity
    figures = {
        "perplexity": perplexity_text(perplexity),
        "emissions": emissions_text(record.emissions_kg_co2e),
        "training energy": energy_text(record.energy_kwh.train if record.energy_kwh else None),
        "seed": str(record.seed),
    }
    settings = {name: value_text(value) for name, value in record.params.as_record().items()}
    lines = [f"{name}: {html.escape(text, quote=False)}" for name, text in {**figures, **settings}.items()]
    return "<br>".join([f"<b>Trial {record.trial}</b>, {html.escape(state_text(record, rec), quote=False)}", *lines])


def _trace(name: str, points: list[Point], hover: dict[int, str]) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": LABELS[name],
        "x": [point.emissions for point in points],
        "y": [point.perplexity for point in points],
        "text": [hover[point.trial] for point in points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": MARKERS[name],
    }
    if name == "front":  # as stairs: what lies above and to the right is dominated
        trace |= {"mode": "lines+markers", "line": {"shape": "hv", "width": 1.5, "color": COLOURS["front"]}}
    return trace


def _layout(plot: Scatter, rec: Recommendation) -> dict[str, Any]:
    target = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": rec.target_perplexity,
        "y1": rec.target_perplexity,
        "line": {"dash": "dash", "width": 1.5, "color": COLOURS["target"]},
        "label": {
            "text": f"target {perplexity_text(rec.target_perplexity)}",
            "textposition": "start",
            "yanchor": "bottom",
            "font": {"color": COLOURS["target"]},
        },
    }
    return {
        "xaxis": _axis(f"Emissions of a run ({plot.unit})", plot.x),
        "yaxis": _axis("Perplexity", plot.y),
        "shapes": [target],
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
