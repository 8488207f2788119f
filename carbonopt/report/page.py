"""The report as one HTML page that loads nothing: plotly's JavaScript, figure, style and data are inside."""

import base64
import html
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.report.points import COLOURS, LABELS, Point, Scatter
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
    baseline = plot.trial(rec.baseline.trial) if rec.baseline else []
    groups = {
        "stopped": plot.of("stopped"),
        "complete": plot.of("complete"),
        "front": plot.of("front"),
        "baseline": baseline,
        "recommended": plot.trial(rec.trial),
    }
    traces = [_trace(name, points, hover) for name, points in groups.items() if points]
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
    lines = [f"{html.escape(name)}: {html.escape(text)}" for name, text in {**figures, **settings}.items()]
    return "<br>".join([f"<b>Trial {record.trial}</b>, {html.escape(state_text(record, rec))}", *lines])


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
            "textposition": "end",
            "yanchor": "bottom",
            "font": {"color": COLOURS["target"]},
        },
    }
    return {
        "xaxis": _axis(f"Emissions of a run ({plot.unit})", plot.log_x),
        "yaxis": _axis("Perplexity", plot.log_y),
        "shapes": [target],
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"l": 60, "r": 12, "t": 12, "b": 48},
        "hoverlabel": {"align": "left"},
        "showlegend": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def _axis(title: str, log: bool) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "type": "log" if log else "linear",
        "dtick": "D2" if log else None,
        "zeroline": False,
        "automargin": True,
    }
