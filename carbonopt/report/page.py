"""The report as one HTML page that loads nothing: plotly's JavaScript, figures, style and data are inside."""

import base64
import math
import re
from sys import float_info
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from carbonopt.analysis.by_target import LOWEST_PERPLEXITY, target_range_for
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.format import plus_minus_text, quality_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialState
from carbonopt.report import charts
from carbonopt.report.facts import Facts
from carbonopt.report.markdown import NO_TRIAL, NOTHING_TO_DRAW
from carbonopt.report.points import CELLS, COLOURS, LABELS, Axis, Point, Scatter, layers
from carbonopt.report.stages import LONGER_RUNS
from carbonopt.report.view import Cell, Table, View, shown_directions

PAGE_ROWS = 100  # of a long table shown at once


def _shown(value: Any) -> Any:
    """Whatever a template prints. What is markup already stays that."""
    return type(value)(shown_directions(value)) if isinstance(value, str) else value


_ENVIRONMENT = Environment(
    loader=PackageLoader("carbonopt.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_shown,
)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": True}  # so that it is shown, too
# A figure and its unit stay on one line.
_ENVIRONMENT.filters["unbroken"] = lambda text: re.sub(
    r"(?<=\d) (?=(%|kWh|k?J|[km]?g)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)", "\N{NO-BREAK SPACE}", text
)

MARKERS: dict[str, dict[str, Any]] = {
    "stopped": {"symbol": "x-thin", "size": 8, "line": {"width": 1.5, "color": COLOURS["stopped"]}},
    "failed": {"symbol": "cross-thin", "size": 10, "line": {"width": 2, "color": COLOURS["failed"]}},
    "complete": {"symbol": "circle-open", "size": 9, "color": COLOURS["complete"], "line": {"width": 2}},
    "front": {"symbol": "circle", "size": 9, "color": COLOURS["front"]},
    "knee": {"symbol": "square-open", "size": 17, "color": COLOURS["knee"], "line": {"width": 2}},
    "baseline": {"symbol": "diamond", "size": 14, "color": COLOURS["baseline"]},
    "recommended": {"symbol": "star", "size": 19, "color": COLOURS["recommended"]},
}


def render(view: View, data: StudyData, plot: Scatter, facts: Facts, png: bytes | None) -> str:
    """The page. The PNG stands in for the interactive figure on paper and without JavaScript."""
    rec = facts.recommendation
    return _ENVIRONMENT.get_template("index.html").render(
        view=view,
        has_figure=bool(plot.points),
        content=content(view, data, plot, facts),
        states=states(data),
        step=_step_of_target(facts),
        target_number=repr(rec.target_perplexity).removesuffix(".0"),  # as a reader would type it
        effects=charts.influence(facts.influence),
        batch_charts=charts.batch(facts.batch),
        returns_charts=charts.returns(facts.diminishing_returns, rec.target_perplexity),
        page_rows=PAGE_ROWS,
        nothing_to_draw=NOTHING_TO_DRAW,
        no_trial=NO_TRIAL,
        longer_runs=LONGER_RUNS,
        png=base64.b64encode(png or b"").decode("ascii"),
        plotly_js=get_plotlyjs(),
    )


def content(view: View, data: StudyData, plot: Scatter, facts: Facts) -> dict[str, Any]:
    """What the page's scripts read: the figure, the answers by target and the long tables, by column."""
    rec = facts.recommendation
    listed = states(data)
    rows: dict[int | None, int] = {record.trial: row for row, record in enumerate(data.records)}
    return {
        "figure": figure(data, plot, facts) if plot.points else None,
        "study_target": rec.target_perplexity,
        "answers": [
            {
                "from": answer.from_perplexity,
                "alone": answer.study_target_only,
                "place": None
                if answer.emissions_kg_co2e is None
                else [answer.emissions_kg_co2e * plot.per_kg, answer.perplexity],
                "row": rows.get(answer.trial),
                **step.model_dump(),
            }
            for answer, step in zip(facts.recommendation_by_target, view.targets, strict=True)
        ],
        "tables": {
            "all-trials": by_column(view.trials),
            "components": by_column(view.components),
            "speeds": by_column(view.speeds),
        },
        "constant": view.constant_settings,
        "states": [listed.index(record.state.value) for record in data.records],
        "reached": [  # what a target is compared with
            record.perplexity
            if record.state is TrialState.COMPLETE
            and record.perplexity is not None
            and math.isfinite(record.perplexity)
            else None
            for record in data.records
        ],
    }


def states(data: StudyData) -> list[str]:
    """Those that occur, in the states' own order."""
    found = {record.state for record in data.records}
    return [state.value for state in TrialState if state in found]


def by_column(table: Table) -> dict[str, Any]:
    """A table for sorting: each column's different cells in order, and which of them each row has.

    From `known` on they have nothing to sort by, and stay last.
    """
    return {
        "labels": [column.label for column in table.columns],
        "numeric": [column.numeric for column in table.columns],
        "columns": [_coded([row[index] for row in table.rows]) for index in range(len(table.columns))],
    }


def _coded(cells: list[Cell]) -> dict[str, Any]:
    keys = [(_order(cell), cell.text, cell.strong) for cell in cells]
    different = sorted(set(keys))
    code = {key: number for number, key in enumerate(different)}
    return {
        "texts": [text for _, text, _ in different],
        "codes": [code[key] for key in keys],
        "known": sum(order[0] < 2 for order, _, _ in different),
        "strong": [number for number, key in enumerate(different) if key[2]],
    }


def _order(cell: Cell) -> tuple[int, float, str]:
    """Numbers, then words, then what has neither."""
    if cell.sort is None:
        return (2, 0.0, "")
    return (1, 0.0, cell.sort.casefold()) if isinstance(cell.sort, str) else (0, cell.sort, "")


def _step_of_target(facts: Facts) -> int:
    answer = target_range_for(
        facts.recommendation_by_target, max(facts.recommendation.target_perplexity, LOWEST_PERPLEXITY)
    )
    return facts.recommendation_by_target.index(answer)


def figure(data: StudyData, plot: Scatter, facts: Facts) -> dict[str, Any]:
    """The interactive figure as plotly's own `data` and `layout`. The page adds the colours of its light or dark, and
    what to say of a trial, by `customdata`: its row in the table of all trials."""
    rec = facts.recommendation
    rows = {record.trial: row for row, record in enumerate(data.records)}
    traces = [
        _trace(name, points, rows)
        for name, points in layers(plot, rec, facts.knee).items()
        if points or name == "recommended"  # which another target may have
    ]
    traces[-1:-1] = [*_without_perplexity(plot, rows), *_means(plot)]
    return {"data": traces, "layout": _layout(plot, rec)}


def _trace(name: str, points: list[Point], rows: dict[int, int]) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": LABELS[name],
        "meta": name,
        "x": [point.emissions for point in points],
        "y": [point.perplexity for point in points],
        "customdata": [rows[point.trial] for point in points],
        "marker": MARKERS[name],
    }
    if name == "front":  # as stairs: what lies above and to the right is dominated
        trace |= {"mode": "lines+markers", "line": {"shape": "hv", "width": 1.5, "color": COLOURS["front"]}}
    return trace


def _without_perplexity(plot: Scatter, rows: dict[int, int]) -> list[dict[str, Any]]:
    """At the figure's upper edge, by their emissions alone; one where many would lie on one another."""
    if not plot.no_perplexity:
        return []
    inside = 1e-6 * (plot.x.high - plot.x.low)  # what is at the very end of an axis plotly may take for outside
    low, high = plot.x.low + inside, plot.x.high - inside
    cells = {
        math.floor(plot.x.share(emissions) * CELLS[0]): (trial, emissions) for trial, emissions in plot.no_perplexity
    }
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "ended before an evaluation (at the edge)",
            "x": [min(max(emissions, low), high) for _, emissions in cells.values()],
            "y": [1.0 for _ in cells],
            "yaxis": "y2",
            "customdata": [rows[trial] for trial, _ in cells.values()],
            "cliponaxis": False,
            "marker": {"symbol": "triangle-down-open", "size": 9, "color": COLOURS["failed"], "line": {"width": 1.5}},
        }
    ]


def _means(plot: Scatter) -> list[dict[str, Any]]:
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
            "y": [one.perplexity for one in plot.means],
            "error_x": bars([one.emissions_deviation for one in plot.means]),
            "error_y": bars([one.perplexity_deviation for one in plot.means]),
            "text": [
                f"Trials {', '.join(map(str, one.trials))}<br>"
                f"perplexity: {plus_minus_text(one.perplexity, one.perplexity_deviation)}<br>"
                f"emissions: {plus_minus_text(one.emissions, one.emissions_deviation)} {plot.unit}"
                for one in plot.means
            ],
            "marker": {"symbol": "line-ew", "size": 9, "line": {"width": 2, "color": COLOURS["baseline"]}},
        }
    ]


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
            "text": f"target {quality_text(rec.target_perplexity)}",
            "textposition": "end",
            "yanchor": "bottom",
        },
    }
    return {
        "xaxis": _axis(f"Emissions of a run ({plot.unit})", plot.x),
        "yaxis": _axis("Perplexity", plot.y),
        "yaxis2": {"overlaying": "y", "range": [0, 1 + 1e-6], "visible": False, "fixedrange": True},
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
