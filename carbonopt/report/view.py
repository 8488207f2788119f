"""What a report shows, as texts: made once, then rendered as HTML and as Markdown, and written to report.json."""

import math
import re

from carbonopt.core.values import Frozen

_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")  # embeddings, overrides and isolates of Unicode


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


class Table(Frozen):
    """Not shown where it has no rows."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # how to read it


class Tile(Frozen):
    """One figure of the answer: what it is, the figure, what to compare it with."""

    label: str
    text: str
    note: str


class Part(Frozen):
    """A section. Where the study can't say something, the sentences say why, and there are no tables."""

    sentences: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()  # the details, shown when asked for


class TargetStep(Frozen):
    """What is recommended over a range of targets."""

    number: str  # a target in this range, as a reader would type it
    label: str  # the range
    text: str  # the answer


class View(Frozen):
    """The report from top to bottom."""

    name: str
    headline: str
    lead: str  # the sentence after it
    met: bool
    answer: tuple[str, ...]
    tiles: tuple[Tile, ...]
    sentence: str | None  # for a paper
    figure_note: str
    targets: tuple[TargetStep, ...]  # one for each of the facts' answers
    trade_offs: Table
    influence: Part
    batch: Part
    returns: Part
    regions: Part
    comparison: Part
    configuration: Table | None  # None: no trial to show
    ready_to_use: str  # where its files are; empty without a recommendation
    constant_settings: str  # what all trials share, left out of the table of trials
    trials: Table
    audit: str  # of the pruning; empty: none was asked for
    repeats: Table  # configurations that were run more than once
    by_phase: Table
    by_state: Table
    closure: str
    by_stage: Table  # of the trials
    longer_runs: Part  # what they would change; empty where first steps were not measured
    speeds: Table  # of each trial
    stopped_early: tuple[str, ...]  # of trials that hardly came beyond their first step
    by_component: Table
    readings: Table  # of the GPUs by the counters and by CodeCarbon
    components: Table  # of each trial's training window
    repricing: Table | None
    no_repricing: str  # why there is none; empty where there is
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


def shown_directions(text: str) -> str:
    """Characters that turn the text behind them round, such as [U+202E], as people see them: in a user's name they
    would turn round what the report says of it. Letters of any script keep their own direction."""
    return _DIRECTIONS.sub(lambda match: f"[U+{ord(match.group()):04X}]", text)
