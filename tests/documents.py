"""A report's document, for tests: its tables by key, its caveats by identity."""

import json
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from carbonopt.report.assemble import top, whole
from carbonopt.report.document import Caveat, Section, Table
from carbonopt.report.render import markdown
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report
from carbonopt.spec.study_data import StudyData


def caveats_of(data: StudyData, target: float | None = None) -> dict[str, Caveat]:
    return {caveat.key: caveat for caveat in top(StudyView(data, target)).caveats}


def numbers_of(data: StudyData, key: str, target: float | None = None) -> dict[str, Any]:
    """What the caveat's text is made of."""
    return caveats_of(data, target)[key].numbers


def document_of(data: StudyData) -> dict[str, Any]:
    """The document as report.json has it, without the seconds that the figures of a whole report
    take.
    """
    document: dict[str, Any] = json.loads(to_json(whole(StudyView(data)).as_json()))
    return document


def markdown_of(data: StudyData) -> str:
    """report.md, without pictures."""
    return markdown.render(whole(StudyView(data)), {})


def written(data: StudyData, folder: Path) -> dict[str, Any]:
    """The document that a report has in its report.json."""
    write_report(data, folder)
    document: dict[str, Any] = json.loads((folder / "data/report.json").read_text())["document"]
    return document


def tables_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        block["key"]: block
        for section in document["sections"]
        for block in section["blocks"]
        if block["kind"] == "table" and block["rows"]
    }


def rows_of(table: dict[str, Any]) -> list[dict[str, str]]:
    """Each row's texts by column."""
    labels = [column["label"] for column in table["columns"]]
    return [dict(zip(labels, (cell["text"] for cell in row), strict=True)) for row in table["rows"]]


def texts_of(section: Section | None, key: str) -> list[list[str]]:
    """Each row's texts of one of a section's tables."""
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table) and block.key == key)
    return [[cell.text for cell in row] for row in table.rows]
