"""A document as one HTML page that loads nothing.

Plotly's JavaScript, the figures, the style and the data are inside the page.
"""

import base64
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from carbonopt.core.format import shown_directions
from carbonopt.report.document import MOST_CAVEATS, Cell, Document, InteractiveFigure, Steps, Table

PAGE_ROWS = 100  # rows of a long table that are shown at once


def _shown(value: Any) -> Any:
    """Return a value as a template prints it, with signs of text direction made visible.

    What is markup already stays markup.
    """
    return type(value)(shown_directions(value)) if isinstance(value, str) else value


_ENVIRONMENT = Environment(
    loader=PackageLoader("carbonopt.report.render"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_shown,
)
# JSON is not escaped to ASCII, so that `_shown` finds signs of text direction in it, too.
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": True}
# Keeps a number and its unit on one line.
_ENVIRONMENT.filters["unbroken"] = lambda text: re.sub(
    r"(?<=\d) (?=(%|kWh|k?J|[km]?g)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)",
    "\N{NO-BREAK SPACE}",
    text,
)
_ENVIRONMENT.filters["base64"] = lambda content: base64.b64encode(content).decode("ascii")
# Shows a number as a reader would type it.
_ENVIRONMENT.filters["typed"] = lambda number: repr(number).removesuffix(".0")
# The SVG is drawn by carbonopt, and matplotlib has escaped the texts in it.
_ENVIRONMENT.filters["inline"] = lambda svg: Markup(svg)  # noqa: S704


def render(document: Document) -> str:
    blocks = document.blocks()
    steps = next((block for block in blocks if isinstance(block, Steps)), None)
    figure = next((block for block in blocks if isinstance(block, InteractiveFigure)), None)
    tables = {table.key: by_column(table) for table in document.tables() if table.long}
    shown = figure and {
        name: getattr(figure, name)
        for name in type(figure).model_fields.keys() - {"kind", "figure"}
    }
    return _ENVIRONMENT.get_template("index.html").render(
        document=document,
        most_caveats=MOST_CAVEATS,
        page_rows=PAGE_ROWS,
        steps=steps,
        content={
            "figure": shown,
            "steps": steps and steps.model_dump(mode="json"),
            "tables": tables,
        },
        plotly_js=get_plotlyjs() if figure else "",
    )


def by_column(table: Table) -> dict[str, Any]:
    """Return a table by its columns, for sorting in the page.

    A column has its different cells in order, and for each row the number of its cell. The cells
    from `known` on have nothing to sort by, and stay last.
    """
    groups = list(dict.fromkeys(table.filter.groups)) if table.filter else []
    return {
        "labels": [column.label for column in table.columns],
        "numeric": [column.numeric for column in table.columns],
        "columns": [
            _coded([row[index] for row in table.rows]) for index in range(len(table.columns))
        ],
        "groups": [groups.index(group) for group in table.filter.groups] if table.filter else None,
        "values": table.filter.values if table.filter else None,
    }


def _coded(cells: list[Cell]) -> dict[str, Any]:
    keys = [(_order(cell), cell.text, cell.strong) for cell in cells]
    different = sorted(set(keys))
    code = {key: number for number, key in enumerate(different)}
    return {
        "texts": [text for _, text, _ in different],
        "codes": [code[key] for key in keys],
        "known": sum(order[0] < 2 for order, _, _ in different),
        "strong": [number for number, (_, _, strong) in enumerate(different) if strong],
    }


def _order(cell: Cell) -> tuple[int, float, str]:
    """Return a sort key: numbers come first, then words, then cells with neither."""
    if isinstance(cell.sort, str):
        return (1, 0.0, cell.sort.casefold())
    return (2, 0.0, "") if cell.sort is None else (0, cell.sort, "")
