"""What a report shows, as texts: made once, then rendered as HTML and as Markdown, and written to report.json."""

import math

from carbonopt.trial import Frozen


class Cell(Frozen):
    """`sort` orders the column (None goes last), `share` (0 to 1) draws a bar beside the text."""

    text: str
    sort: float | str | None = None
    share: float | None = None
    strong: bool = False


class Column(Frozen):
    label: str
    numeric: bool = False


class Table(Frozen):
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Tile(Frozen):
    """One figure of the answer: what it is, the figure, what to compare it with."""

    label: str
    text: str
    note: str


class View(Frozen):
    """The report from top to bottom."""

    name: str
    headline: str
    met: bool
    answer: tuple[str, ...]
    tiles: tuple[Tile, ...]
    sentence: str | None  # for a paper
    figure_note: str
    trade_offs: Table
    configuration: Table | None  # None: no trial to show
    constant_settings: str  # what all trials share, left out of the table of trials
    trials: Table
    by_phase: Table
    by_state: Table
    by_component: Table
    closure: str
    provenance: Table
    limits: tuple[str, ...]
    study_file: str


def number(text: str, value: float | None, *, share: float | None = None, strong: bool = False) -> Cell:
    """A cell that sorts by its value."""
    sortable = value if value is not None and math.isfinite(value) else None
    return Cell(text=text, sort=sortable, share=share, strong=strong)


def word(text: str, *, strong: bool = False) -> Cell:
    """A cell that sorts by its text."""
    return Cell(text=text, sort=text, strong=strong)


def columns(*labels: str, numeric_from: int = 1) -> tuple[Column, ...]:
    """Columns, from index `numeric_from` on aligned as numbers."""
    return tuple(Column(label=label, numeric=index >= numeric_from) for index, label in enumerate(labels))
