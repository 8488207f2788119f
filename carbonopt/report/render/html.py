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
from carbonopt.report.figures.style import standalone

PAGE_ROWS = 100  # rows of a long table that are shown at once


def _shown(value: Any) -> Any:
    """Return a value as a template prints it, with signs of text direction made visible.

    What is markup already stays markup.
    """
    return type(value)(shown_directions(value)) if isinstance(value, str) else value


def environment(package: str) -> Environment:
    """Return a package's templates, which escape every value and show signs of text direction."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


_ENVIRONMENT = environment("carbonopt.report.render")
# JSON is not escaped to ASCII, so that `_shown` finds signs of text direction in it, too.
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": True}
# Keeps a number and its unit on one line.
_ENVIRONMENT.filters["unbroken"] = lambda text: re.sub(
    r"(?<=\d) (?=(%|kWh|k?J|[km]?g)(?!\w))|(?<=g) (?=CO2e)|(?<=±) (?=\d)|(?<=\d) (?=±)",
    "\N{NO-BREAK SPACE}",
    text,
)
_ENVIRONMENT.filters["base64"] = lambda content: base64.b64encode(content).decode("ascii")
_ENVIRONMENT.filters["svg_file"] = lambda svg: standalone(svg).encode()
# Shows a number as a reader would type it.
_ENVIRONMENT.filters["typed"] = lambda number: repr(number).removesuffix(".0")
# The SVG is drawn by carbonopt, and matplotlib has escaped the texts in it.
_ENVIRONMENT.filters["inline"] = lambda svg: Markup(svg)  # noqa: S704


def render(document: Document) -> str:
    tables = {table.key: by_column(table) for table in document.tables() if table.long}
    figure, steps = interactive_figure(document), steps_of(document)
    return _ENVIRONMENT.get_template("index.html").render(
        **_context(steps, PAGE_ROWS, live=False),
        document=document,
        content={
            "figure": figure,
            "steps": steps and steps.model_dump(mode="json"),
            "tables": tables,
        },
        plotly_js=plotly_script() if figure else "",
    )


def live_parts(document: Document) -> dict[str, str]:
    """Return the document's top and each of its sections as HTML, for a page that scripts fill.

    The top's key is "header", a section's is its own. Long tables have no rows there, and the
    interactive figure has no static one.
    """
    macros = _macros(steps_of(document), live=True)
    return {
        "header": str(macros.header(document)),
        **{section.key: str(macros.part(section)) for section in document.sections},
    }


def live_scripts() -> str:
    """Return the functions of long tables, the interactive figure, the steps and what is copied."""
    names = ("tables.js", "figure.js", "steps.js", "copy.js")
    templates = map(_ENVIRONMENT.get_template, names)
    return "\n".join(template.render(page_rows=PAGE_ROWS) for template in templates)


def plotly_script() -> str:
    """Return Plotly's own script, which draws the interactive figure."""
    return str(get_plotlyjs())


def style_sheet() -> str:
    return _ENVIRONMENT.get_template("style.css").render()


def steps_of(document: Document) -> Steps | None:
    return next((block for block in document.blocks() if isinstance(block, Steps)), None)


def interactive_figure(document: Document) -> dict[str, Any] | None:
    """Return what the page's script draws as the document's interactive figure."""
    figures = (block for block in document.blocks() if isinstance(block, InteractiveFigure))
    if (figure := next(figures, None)) is None:
        return None
    names = type(figure).model_fields.keys() - {"kind", "figure"}
    return {name: getattr(figure, name) for name in names}


def _macros(steps: Steps | None, *, live: bool) -> Any:
    page_rows = 0 if live else PAGE_ROWS
    return _ENVIRONMENT.get_template("parts.html").make_module(
        _context(steps, page_rows, live=live)
    )


def _context(steps: Steps | None, page_rows: int, *, live: bool) -> dict[str, Any]:
    return {"most_caveats": MOST_CAVEATS, "page_rows": page_rows, "steps": steps, "live": live}


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
