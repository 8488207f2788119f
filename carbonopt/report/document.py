"""A report as frozen values that know nothing of what is reported: renderers show them, sections make them."""

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import attrgetter, itemgetter
from typing import Any, Literal

from pydantic import Field

from carbonopt.core.format import Scale
from carbonopt.core.values import Frozen

MISSING = "–"
MOST_CAVEATS = 3  # shown before the others are asked for


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

    begins: float | None  # None: the numbers have no end there
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
    CRITICAL = 0  # the answer may be wrong
    WARNING = 1  # it may be less sure than it looks
    NOTE = 2  # on method


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

    def paper_figures(self) -> list[Figure]:
        """Those of interactive figures, too."""
        static = (block.figure if isinstance(block, InteractiveFigure) else block for block in self.blocks())
        return [block for block in static if isinstance(block, Figure) and block.paper]

    def tables(self) -> list[Table]:
        return [block for block in self.blocks() if isinstance(block, Table) and block.rows]

    def as_json(self) -> dict[str, Any]:
        """What is shown, without pictures. Fields at their defaults are left out."""
        shown = self.model_dump(mode="json", exclude_defaults=True, exclude={"caveats"})
        for section, section_fields in zip(self.sections, shown.get("sections", ()), strict=True):
            for block, fields in zip(section.blocks, section_fields.get("blocks", ()), strict=True):
                fields["kind"] = block.kind
        return {**shown, "caveats": [caveat.as_json() for caveat in self.caveats]}


# ------------------------------------------------------------------------------------------------------ making tables

# Of a row: the path of an attribute, such as "params.epochs", its place where rows are tuples, or what makes it.
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
    """A column of figures, sorted by `value` of a row and shown by `text` of it, or by `shown` of the row."""
    value_of, is_strong, has_bar = map(_getter, (value, strong, share))

    def cell(row: Any) -> Cell:
        figure = value_of(row)
        known = figure is not None and math.isfinite(figure)
        said = shown(row) if shown else text(figure) if known else MISSING
        bar = figure if known and has_bar(row) else None
        interval = span(row) if span else None
        return Cell(text=said, sort=figure if known else None, share=bar, span=interval, strong=is_strong(row))

    return Column(label=label, numeric=True), cell


def scaled(
    label: str, value: Of, scale_of: Callable[[Iterable[Any]], Scale], rows: Iterable[Any], **more: Any
) -> Maker:
    """A column of figures in the one unit that the largest of them asks for."""
    scale = scale_of(map(_getter(value), rows))
    return num(scale.label(label), value, scale.text, **more)


def word(label: str, text: Of, *, strong: Of = lambda row: False) -> Maker:
    """A column of words, sorted by them."""
    text_of, is_strong = _getter(text), _getter(strong)
    return Column(label=label), lambda row: Cell(text=text_of(row), sort=text_of(row), strong=is_strong(row))


def _getter(of: Of) -> Callable[[Any], Any]:
    return of if callable(of) else attrgetter(of) if isinstance(of, str) else itemgetter(of)


def table(key: str, caption: str, rows: Iterable[Any], makers: Iterable[Maker | None], **more: Any) -> Table:
    """A row of the table for each of `rows`; columns that are None are left out."""
    kept = [maker for maker in makers if maker is not None]
    cells = tuple(tuple(cell(row) for _, cell in kept) for row in rows)
    return Table(key=key, caption=caption, columns=tuple(column for column, _ in kept), rows=cells, **more)
