"""Makes a report from a study's records and writes all of its files."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_json  # many times as fast as Python's own where lines are indented

from carbonopt.core.errors import BadInput
from carbonopt.core.files import COMPARISON_JSON, PIPELINE_JSON, REPORT_JSON, replaced, write_bytes
from carbonopt.core.study import StudyData
from carbonopt.export import winner
from carbonopt.report.assemble import whole
from carbonopt.report.data import NAMES as DATA_NAMES
from carbonopt.report.data import data_files
from carbonopt.report.document import Document, Level
from carbonopt.report.paper.files import NAMES as PAPER_NAMES
from carbonopt.report.paper.files import paper_files
from carbonopt.report.pipeline import PipelineView
from carbonopt.report.render import html, markdown
from carbonopt.report.studies import StudiesView
from carbonopt.report.study_view import StudyView

INDEX, MARKDOWN, COMPARISON = "index.html", "report.md", "comparison.md"
DATA_FOLDER, PAPER_FOLDER, WINNER_FOLDER = str(REPORT_JSON.parent), "paper", "winner"
FOLDERS = {DATA_FOLDER: DATA_NAMES, PAPER_FOLDER: PAPER_NAMES, WINNER_FOLDER: winner.NAMES}
# Of all that a report may have; whatever else lies in its folder is not ours.
NAMES = frozenset({INDEX, MARKDOWN, str(REPORT_JSON)} | {f"{at}/{name}" for at in FOLDERS for name in FOLDERS[at]})
COMPARISON_NAMES = frozenset({INDEX, COMPARISON, str(COMPARISON_JSON), "figure-fronts.png", "figure-fronts.pdf"})
PIPELINE_NAMES = frozenset({INDEX, MARKDOWN, str(PIPELINE_JSON), "figure-steps.png", "figure-steps.pdf"})


def write_report(data: StudyData, folder: Path, *, winner_files: dict[str, str] | None = None) -> Path:
    """Writes the report into `folder` and returns its index.html; it takes the place of an older report there, whole,
    and files that are not a report's stay.

    `winner_files` are texts by file name to stand beside the generated ones in winner/: the recommended trial's
    ds_config.json. The same data gives the same bytes.

    Raises:
        BadInput: if the folder can't be replaced, or holds another study's report.
    """
    refuse_folder(folder, data)
    study = StudyView(data)
    document = whole(study)
    serious = [caveat.text for caveat in document.caveats if caveat.level is Level.CRITICAL]
    winner_texts = winner.winner_files(data, study.recommendation, winner_files, serious)
    folders = {
        DATA_FOLDER: data_files(data.records),
        PAPER_FOLDER: paper_files(study, document),
        WINNER_FOLDER: {name: text.encode() for name, text in winner_texts.items()},
    }
    pictures = {figure.name: f"{PAPER_FOLDER}/figure-{figure.name}.png" for figure in document.paper_figures()}
    results = {"study": _identity(data), **study.results(), "document": document.as_json()}
    files = {
        INDEX: html.render(document).encode(),
        MARKDOWN: markdown.render(document, pictures).encode(),
        str(REPORT_JSON): to_json(results, indent=2) + b"\n",
        **{f"{at}/{name}": content for at, contents in folders.items() for name, content in contents.items()},
    }
    with replaced(folder, NAMES) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
        if winner.SCRIPT in winner_texts:
            (new / WINNER_FOLDER / winner.SCRIPT).chmod(0o755)
    return folder / INDEX


def write_comparison(view: StudiesView, document: Document, folder: Path) -> Path:
    """Writes the page of several studies into `folder`, with the figure and the data beside it, and returns its
    index.html; it takes the place of an older one there. `document`: as `studies.compared` makes it. Raises BadInput if
    the folder can't be replaced."""
    return _write_page(document, view.results(), folder, COMPARISON, COMPARISON_JSON, COMPARISON_NAMES)


def write_pipeline(view: PipelineView, document: Document, folder: Path) -> Path:
    """As `write_comparison`, of a pipeline; `document`: as `pipeline.page` makes it."""
    return _write_page(document, view.summary.as_json(), folder, MARKDOWN, PIPELINE_JSON, PIPELINE_NAMES)


def _write_page(
    document: Document, results: dict[str, Any], folder: Path, text: str, data: Path, names: frozenset[str]
) -> Path:
    pictures = {figure.name: f"figure-{figure.name}.png" for figure in document.paper_figures()}
    files = {
        INDEX: html.render(document).encode(),
        text: markdown.render(document, pictures).encode(),
        str(data): to_json({**results, "document": document.as_json()}, indent=2, inf_nan_mode="null") + b"\n",
        **{pictures[figure.name]: figure.png for figure in document.paper_figures()},
        **{f"figure-{figure.name}.pdf": figure.pdf for figure in document.paper_figures()},
    }
    with replaced(folder, names) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
    return folder / INDEX


def _identity(data: StudyData) -> dict[str, Any]:
    """What tells a study from others in report.json: two of one name began at different times."""
    began = min((datetime.fromisoformat(session.started_at) for session in data.sessions), default=None)
    return {"name": data.config.name, "began": began and began.isoformat(timespec="seconds")}


def refuse_folder(folder: Path, data: StudyData) -> None:
    """Before anything is computed.

    Raises:
        BadInput: if the folder can't be written, or holds another study's report: its files would be lost, and what the
            user put beside them, such as that study's trained model, would seem to be this one's.
    """
    # The folder is made aside and renamed, so that it is the folder around it that counts.
    parent = next(parent for parent in Path(os.path.realpath(folder)).parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        why = "read-only file system" if os.statvfs(parent).f_flag & os.ST_RDONLY else "permission denied"
        raise BadInput(f"the report can't be written to {folder}: {why}; give another --out.")
    name, began = _name_and_begin(folder)
    own_name, own_began = _identity(data).values()
    if name is None or (name == own_name and (None in (began, own_began) or began == own_began)):
        return
    since = f", begun {ascii(began)[1:-1]}" if began is not None else ""
    namesake = f"; this one, of the same name, began {own_began}" if name == own_name else ""
    raise BadInput(f"{folder} holds the report of another study ({name!r}{since}{namesake}); give another --out.")


def _name_and_begin(folder: Path) -> tuple[str | None, str | None]:
    """Of the study whose report lies there; None: there is none, or nothing to tell it by."""
    try:
        content = json.loads((folder / REPORT_JSON).read_bytes())
        study = content.get("study") or {"name": content["shown"]["name"]}  # older reports have the name alone
        return str(study["name"]), None if study.get("began") is None else str(study["began"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, None
