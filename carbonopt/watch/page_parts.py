"""The parts of the page, as lines, from what was read of the studies.

What runs now is drawn at every change. The document's top and its tables are drawn again when a
trial has ended. The sections of `SLOW` fit models or draw pictures, for seconds: they follow at
their own pace (see `watcher`), and say how many trials they are made of.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from carbonopt.core import format as fmt
from carbonopt.core.trial import TrialState
from carbonopt.report.assemble import SECTIONS, sections, top
from carbonopt.report.document import Document, Paragraph, Section, Table
from carbonopt.report.figures.style import drawn_as
from carbonopt.report.pipeline_report import PipelineView, page
from carbonopt.report.render.html import interactive_figure, live_parts, steps_of
from carbonopt.report.study_text import trials_text
from carbonopt.report.study_view import StudyView
from carbonopt.spec.pipeline_file import PipelineData
from carbonopt.spec.study_data import StudyData

SLOW = ("influence", "batch", "energy", "policy", "returns", "citation")
QUICK = tuple(name for name in SECTIONS if name not in SLOW)


def settled(data: StudyData) -> object:
    """Return a value that changes when the document's answer may: a trial ends, or the study."""
    trials = tuple(
        (record.trial, record.attempt, record.state)
        for record in data.records
        if record.state is not TrialState.RUNNING
    )
    probes = len(data.probes)
    return data.config, trials, probes, len(data.sessions), data.ended, data.planned_start


def quick_document(data: StudyData) -> tuple[Document, dict[str, Section]]:
    """Return the document's top and its quick sections by name."""
    study = StudyView(data)
    with drawn_as():  # the page draws the interactive figure itself
        return top(study), sections(study, QUICK)


def slow_sections(data: StudyData) -> dict[str, Section]:
    """Return the sections that take seconds, by name, each with what it is made of."""
    made_of = f"Made of {trials_text(data.records)}."
    with drawn_as("svg"):
        made = sections(StudyView(data), SLOW)
    note = Paragraph(text=made_of, style="note")
    return {
        name: section.model_copy(update={"blocks": (*section.blocks, note)})
        for name, section in made.items()
    }


def study_document(
    quick: tuple[Document, Mapping[str, Section]], slow: Mapping[str, Section]
) -> Document:
    """Return the whole document of a study, its sections in the report's order."""
    head, own = quick
    made = {**own, **slow}
    ordered = tuple(made[name] for name in SECTIONS if name in made)
    return head.model_copy(update={"sections": ordered})


def pipeline_document(data: PipelineData) -> Document:
    """Return the document of a pipeline."""
    with drawn_as("svg"):
        return page(PipelineView(data))


def document_parts(document: Document) -> dict[str, list[str]]:
    """Return the parts of a document.

    HTML's parts are "header" and "section KEY"; JSON's are "contents" (the name and the sections'
    order), "figure", "steps" and "table KEY". A long table has one line for each row, so that a
    changed row is one changed line.
    """
    html = live_parts(document)
    parts = {
        "header" if key == "header" else f"section {key}": text.split("\n")
        for key, text in html.items()
    }
    contents = {
        "name": fmt.shown_directions(document.name),
        "sections": [key for key in html if key != "header"],
    }
    parts["contents"] = _json_lines(contents)
    if (figure := interactive_figure(document)) is not None:
        parts["figure"] = _json_lines(figure)
    if (steps := steps_of(document)) is not None:
        parts["steps"] = _json_lines(steps.model_dump(mode="json"))
    for table in document.tables():
        if table.long:
            parts[f"table {table.key}"] = list(_table_lines(table))
    return parts


def _json_lines(value: object) -> list[str]:
    """Return a value as JSON with a line for each of its parts, which have one order."""
    # Not by `indent`, for which Python's json takes ten times as long.
    text = json.dumps(
        value, ensure_ascii=False, separators=(",\n", ":"), sort_keys=True, allow_nan=False
    )
    return fmt.shown_directions(text).split("\n")


def _table_lines(table: Table) -> Iterator[str]:
    """Yield a long table: a line with its columns and groups, then one for each row.

    A row has its cells, its group and the value to pick it by. A cell is its text, what it is
    sorted by, and whether it is strong.
    """
    groups = list(dict.fromkeys(table.filter.groups)) if table.filter else []
    head: dict[str, Any] = {
        "labels": [column.label for column in table.columns],
        "numeric": [column.numeric for column in table.columns],
        "filtered": table.filter is not None,
    }
    yield _json_line(head)
    for index, row in enumerate(table.rows):
        cells = [[cell.text, cell.sort, cell.strong] for cell in row]
        group = groups.index(table.filter.groups[index]) if table.filter else None
        value = table.filter.values[index] if table.filter else None
        yield _json_line([cells, group, value])


def _json_line(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return fmt.shown_directions(text)
