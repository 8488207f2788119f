"""A report as frozen values that know nothing of what is reported: renderers show them, sections make them."""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Literal, TypeVar

from pydantic import Field

from carbonopt.core.values import Frozen

MISSING = "–"
MOST_CAVEATS = 3  # shown before the others are asked for
Row = TypeVar("Row")


class Cell(Frozen):
    """`sort` orders the column (None goes last), `share` (0 to 1) draws a bar beside the text, `span` its interval."""

    text: str
    sort: float | str | None = None
    share: float | None = None
    span: tuple[float, float] | None = None
    strong: bool = False


class Column(Frozen):
    label: str
    numeric: bool = False


class RowFilter(Frozen):
    """How a reader picks rows of a long table: by group, and by whether a row's value reaches the chosen step."""

    label: str  # of the groups
    groups: tuple[str, ...]  # of each row
    values_label: str
    values: tuple[float | None, ...]  # of each row; None: never picked


class Table(Frozen):
    """Not shown where it has no rows."""

    kind: Literal["table"] = "table"
    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # how to read it
    folded: bool = False  # shown when asked for
    long: bool = False  # sorted, filtered and a page at a time, where the format can
    filter: RowFilter | None = None
    paper: str = ""  # its name among the paper's files; empty: not one of them


class Paragraph(Frozen):
    kind: Literal["paragraph"] = "paragraph"
    text: str
    style: Literal["plain", "note", "quote"] = "plain"


class Code(Frozen):
    kind: Literal["code"] = "code"
    title: str
    text: str
    language: str = ""


class Figure(Frozen):
    """Drawn once for every format."""

    kind: Literal["figure"] = "figure"
    name: str
    caption: str
    alt: str  # what it shows, for who can't see it
    paper: bool = True  # one of the paper's files
    svg: str = Field(exclude=True, repr=False)
    pdf: bytes = Field(exclude=True, repr=False)
    png: bytes = Field(exclude=True, repr=False)


class InteractiveFigure(Frozen):
    """A Plotly figure, and the one that stands in for it where no script runs. Of each mark `customdata` is its row in
    the table `rows_in`; the trace whose `meta` is `moved` follows the chosen step, and so does the first shape."""

    kind: Literal["interactive"] = "interactive"
    figure: Figure
    data: tuple[dict[str, Any], ...] = Field(exclude=True, repr=False)
    layout: dict[str, Any] = Field(exclude=True, repr=False)
    rows_in: str
    moved: str
    shape_label: str  # before the chosen value, beside the moved shape
    row_note: str = ""  # beneath a row that is shown


class Step(Frozen):
    """What holds from `begins` on, in the direction of the steps, until the next step's."""

    begins: float
    alone: bool  # it holds at `begins` alone; beyond, the step before goes on
    number: str  # a value in its range, as a reader would type it
    label: str  # the range
    text: str
    row: int | None = None  # in the figure's table
    place: tuple[float, float] | None = None  # in the figure


class Steps(Frozen):
    """A step function of one number: a slider where the format can, else a list."""

    kind: Literal["steps"] = "steps"
    label: str  # of the number, such as "Target: at most"
    steps: tuple[Step, ...]
    own: float  # where it begins to be shown
    chosen: int  # the step at `own`
    lowest: float | None = None  # of the number
    highest: float | None = None
    rising: bool = True  # the steps' beginnings rise, else fall
    refusal: str  # of a number beyond its bounds


Block = Table | Paragraph | Code | Figure | InteractiveFigure | Steps


class Section(Frozen):
    key: str
    title: str
    blocks: tuple[Block, ...]
    level: Literal[2, 3] = 2


class Tile(Frozen):
    """One figure of the answer: what it is, the figure, what to compare it with."""

    label: str
    text: str
    note: str


class Level(IntEnum):
    """How much a caveat weighs: an answer that may be wrong, one that may be less sure than it looks, a note on "
    "method."""

    CRITICAL = 0
    WARNING = 1
    NOTE = 2


class Caveat(Frozen):
    """The same text wherever it is shown; `key` is its identity, `numbers` are what the text is made of."""

    key: str
    level: Level
    text: str
    numbers: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "level": self.level.name.lower(), "text": self.text, "numbers": self.numbers}


class Document(Frozen):
    """From top to bottom. `details` stand below the headline, a line each."""

    name: str
    headline: str
    details: tuple[str, ...]
    tiles: tuple[Tile, ...]
    caveats: tuple[Caveat, ...]  # the most serious first
    sections: tuple[Section, ...] = ()

    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]

    def figures(self) -> list[Figure]:
        """Those of interactive figures, too."""
        found = (block.figure if isinstance(block, InteractiveFigure) else block for block in self.blocks())
        return [block for block in found if isinstance(block, Figure)]

    def tables(self) -> list[Table]:
        return [block for block in self.blocks() if isinstance(block, Table) and block.rows]


# ------------------------------------------------------------------------------------------------------ making tables


class Maker(Frozen):
    """A column of a table: its head, and how a row becomes a cell."""

    label: str
    cell: Callable[[Any], Cell]
    numeric: bool


def num(
    label: str,
    value: Callable[[Any], float | None],
    text: Callable[[Any], str] = str,
    *,
    shown: Callable[[Any], str] | None = None,
    strong: Callable[[Any], bool] = lambda row: False,
    share: Callable[[Any], bool] = lambda row: False,
    span: Callable[[Any], tuple[float, float]] | None = None,
) -> Maker:
    """A column of figures, sorted by `value` of a row and shown by `text` of it, or by `shown` of the row."""

    def cell(row: Any) -> Cell:
        figure = value(row)
        known = figure is not None and math.isfinite(figure)
        said = shown(row) if shown else text(figure) if known else MISSING
        bar = figure if known and share(row) else None
        interval = span(row) if span else None
        return Cell(text=said, sort=figure if known else None, share=bar, span=interval, strong=strong(row))

    return Maker(label=label, cell=cell, numeric=True)


def word(label: str, text: Callable[[Any], str], *, strong: Callable[[Any], bool] = lambda row: False) -> Maker:
    """A column of words, sorted by them."""
    return Maker(label=label, cell=lambda row: _of_words(text(row), strong(row)), numeric=False)


def _of_words(text: str, strong: bool) -> Cell:
    return Cell(text=text, sort=text, strong=strong)


def table(key: str, caption: str, rows: Iterable[Row], makers: Sequence[Maker | None], **more: Any) -> Table:
    """A row of the table for each of `rows`; columns that are None are left out."""
    kept = [maker for maker in makers if maker is not None]
    return Table(
        key=key,
        caption=caption,
        columns=tuple(Column(label=maker.label, numeric=maker.numeric) for maker in kept),
        rows=tuple(tuple(maker.cell(row) for maker in kept) for row in rows),
        **more,
    )
