"""A report as frozen values, which sections make and renderers show.

These values know nothing about what is reported.
"""

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import attrgetter, itemgetter
from typing import Any, Literal

from pydantic import Field

from carbonopt.core.format import Scale
from carbonopt.core.values import Frozen

MISSING = "–"
MOST_CAVEATS = 3  # shown at first; the others are shown on request


class Cell(Frozen):
    """A table's cell.

    `sort` orders the column (None goes last), `share` (0 to 1) draws a bar beside the text, and
    `span` draws the interval of that bar.
    """

    text: str
    sort: float | str | None = None
    share: float | None = None
    span: tuple[float, float] | None = None
    strong: bool = False


class Column(Frozen):
    label: str
    numeric: bool = False


class RowFilter(Frozen):
    """The ways to pick rows of a long table.

    A reader picks them by group, and by whether a row's value reaches the chosen step.
    """

    label: str  # what the groups are
    groups: tuple[str, ...]  # the group of each row
    values_label: str
    values: tuple[float | None, ...]  # the value of each row; None is never picked by value


class Table(Frozen):
    """A table, which is not shown where it has no rows."""

    kind: Literal["table"] = "table"
    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # how to read it
    folded: bool = False  # hidden until the reader opens it
    long: bool = False  # sortable, filterable and in pages, where the format allows it
    filter: RowFilter | None = None
    paper: str = ""  # its name among the paper's files; empty: it is not one of them


class Extract(Frozen):
    """A text and a picture that a reader of a page takes along.

    Other formats leave them out, because the files of a report lie beside them.
    """

    title: str
    text: str
    picture_name: str  # file name of the picture, with its suffix
    svg: str  # the picture, as in `Figure`; empty: there is none


class Paragraph(Frozen):
    kind: Literal["paragraph"] = "paragraph"
    text: str
    style: Literal["plain", "note", "quote"] = "plain"
    extract: Extract | None = Field(default=None, exclude=True, repr=False)


class Code(Frozen):
    kind: Literal["code"] = "code"
    title: str
    text: str
    language: str = ""


class Figure(Frozen):
    """A figure that was drawn once, in every format that was asked for."""

    kind: Literal["figure"] = "figure"
    name: str
    caption: str
    alt: str  # what it shows, for readers who can't see it
    paper: bool = True  # whether it is one of the paper's files
    svg: str = Field(exclude=True, repr=False)
    pdf: bytes = Field(exclude=True, repr=False)
    png: bytes = Field(exclude=True, repr=False)
    # matplotlib's own figure; None unless a program asked for it
    matplotlib: Any = Field(default=None, exclude=True, repr=False)


class InteractiveFigure(Frozen):
    """A Plotly figure, and the static figure that stands in for it where no script runs.

    The `customdata` of each mark is its row in the table `rows_in`. The trace whose `meta` is
    `moved` follows the chosen step, and so does the first shape. The first annotation names the
    step where that shape is outside the frame.
    """

    kind: Literal["interactive"] = "interactive"
    figure: Figure
    data: tuple[dict[str, Any], ...] = Field(exclude=True, repr=False)
    layout: dict[str, Any] = Field(exclude=True, repr=False)
    rows_in: str
    moved: str
    shape_label: str  # text before the chosen value, beside the moved shape
    row_note: str = ""  # text beneath a row that is shown


class Step(Frozen):
    """A step of a step function: what holds from `begins` on until the next step begins.

    The steps go up or down, as `Steps.rising` says.
    """

    begins: float | None  # None: the first step, which is open at that side
    alone: bool  # it holds at `begins` alone; after it the step before goes on
    number: str  # a value in its range, as a reader would type it
    label: str  # its range in words
    text: str
    row: int | None = None  # its row in the figure's table
    place: tuple[float, float] | None = None  # its position in the figure


class Steps(Frozen):
    """A step function of one number: a slider where the format can show one, else a list."""

    kind: Literal["steps"] = "steps"
    label: str  # what the number is, such as "Target: at most"
    steps: tuple[Step, ...]
    own: float  # the number that is shown at first
    chosen: int  # the index of the step at `own`
    lowest: float | None = None  # the lowest number that is allowed
    highest: float | None = None  # the highest one
    rising: bool = True  # whether the steps' beginnings rise; else they fall
    refusal: str  # the message for a number beyond its bounds


Block = Table | Paragraph | Code | Figure | InteractiveFigure | Steps


class Section(Frozen):
    key: str
    title: str
    blocks: tuple[Block, ...]
    level: Literal[2, 3] = 2

    def paper_figures(self) -> list[Figure]:
        """Return the figures for a paper, the static ones of interactive figures included."""
        static = (
            block.figure if isinstance(block, InteractiveFigure) else block for block in self.blocks
        )
        return [block for block in static if isinstance(block, Figure) and block.paper]


class Tile(Frozen):
    """One number of the answer: what it is, the number, and what to compare it with."""

    label: str
    text: str
    note: str


class Level(IntEnum):
    CRITICAL = 0  # the answer may be wrong
    WARNING = 1  # the answer may be less certain than it looks
    NOTE = 2  # a remark on the method


class Caveat(Frozen):
    """A warning about the answer, with the same text wherever it is shown.

    `key` is its identity, and `numbers` are the values that its text is made of.
    """

    key: str
    level: Level
    text: str
    advice: str = ""  # the end of the text that says what the reader can do
    numbers: dict[str, Any]

    @property
    def finding(self) -> str:
        """The text as a paper states it, without the advice."""
        return f"{self.text.removesuffix(self.advice)}." if self.advice else self.text

    def as_json(self) -> dict[str, Any]:
        """Return the exported object, in the types that JSON has."""
        return {
            "key": self.key,
            "level": self.level.name.lower(),
            "text": self.text,
            "numbers": self.model_dump(mode="json", include={"numbers"})["numbers"],
        }


class Document(Frozen):
    """A report from top to bottom.

    `details` stand below the headline, one per line.
    """

    name: str
    headline: str
    details: tuple[str, ...]
    tiles: tuple[Tile, ...]
    caveats: tuple[Caveat, ...]  # the most serious first
    sections: tuple[Section, ...] = ()

    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]

    def paper_figures(self) -> list[Figure]:
        return [figure for section in self.sections for figure in section.paper_figures()]

    def tables(self) -> list[Table]:
        return [block for block in self.blocks() if isinstance(block, Table) and block.rows]

    def as_json(self) -> dict[str, Any]:
        """Return what is shown, without pictures.

        Fields at their defaults are left out.
        """
        shown = self.model_dump(mode="json", exclude_defaults=True, exclude={"caveats"})
        for section, section_fields in zip(self.sections, shown.get("sections", ()), strict=True):
            for block, fields in zip(section.blocks, section_fields.get("blocks", ()), strict=True):
                fields["kind"] = block.kind
        return {**shown, "caveats": [caveat.as_json() for caveat in self.caveats]}


def with_caveats(answer: dict[str, Any], caveats: Iterable[Caveat]) -> dict[str, Any]:
    """Return an answer as commands print it as JSON: with its caveats."""
    return {**answer, "caveats": [caveat.as_json() for caveat in caveats]}


# --------------------------------------------------------------------------------------------------
# Making tables

# How to get a value from a row: by the path of an attribute, such as "params.epochs", by an index
# where rows are tuples, or by a function of the row.
Of = str | int | Callable[[Any], Any]
Maker = tuple[Column, Callable[[Any], Cell]]


def num(
    label: str,
    value: Of,
    text: Callable[[Any], str] = str,
    *,
    shown: Callable[[Any], str] | None = None,
    strong: Of = lambda row: False,
    share: Of = lambda row: False,
    span: Callable[[Any], tuple[float, float]] | None = None,
) -> Maker:
    """Make a column of numbers, sorted by each row's `value`.

    A cell shows `text` of the value or, where it is given, `shown` of the row.
    """
    value_of, is_strong, has_bar = map(_getter, (value, strong, share))

    def cell(row: Any) -> Cell:
        figure = value_of(row)
        known = figure is not None and math.isfinite(figure)
        said = shown(row) if shown else text(figure) if known else MISSING
        bar = figure if known and has_bar(row) else None
        interval = span(row) if span else None
        return Cell(
            text=said,
            sort=figure if known else None,
            share=bar,
            span=interval,
            strong=is_strong(row),
        )

    return Column(label=label, numeric=True), cell


def scaled(
    label: str,
    value: Of,
    scale_of: Callable[[Iterable[Any]], Scale],
    rows: Iterable[Any],
    **more: Any,
) -> Maker:
    """Make a column of numbers in one unit, which suits the largest of them."""
    scale = scale_of(map(_getter(value), rows))
    return num(scale.label(label), value, scale.text, **more)


def word(label: str, text: Of, *, strong: Of = lambda row: False) -> Maker:
    """Make a column of words, sorted by them."""
    text_of, is_strong = _getter(text), _getter(strong)
    return Column(label=label), lambda row: Cell(
        text=text_of(row), sort=text_of(row), strong=is_strong(row)
    )


def _getter(of: Of) -> Callable[[Any], Any]:
    return of if callable(of) else attrgetter(of) if isinstance(of, str) else itemgetter(of)


def table(
    key: str, caption: str, rows: Iterable[Any], makers: Iterable[Maker | None], **more: Any
) -> Table:
    """Make a table with a row for each of `rows`.

    Columns that are None are left out.
    """
    kept = [maker for maker in makers if maker is not None]
    cells = tuple(tuple(cell(row) for _, cell in kept) for row in rows)
    return Table(
        key=key, caption=caption, columns=tuple(column for column, _ in kept), rows=cells, **more
    )
