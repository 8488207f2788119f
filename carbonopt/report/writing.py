"""The report of a study, of several studies or of a pipeline, written as files."""

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_json  # for indented output, many times as fast as `json`

from carbonopt.core.errors import BadInput
from carbonopt.core.files import (
    COMPARISON_JSON,
    PIPELINE_JSON,
    REPORT_JSON,
    existing_parent,
    parsed_json,
    read_text,
    replaced,
    write_bytes,
)
from carbonopt.export import winner
from carbonopt.report.assemble import whole
from carbonopt.report.comparison_report import StudiesView
from carbonopt.report.data_files import NAMES as DATA_NAMES
from carbonopt.report.data_files import data_files
from carbonopt.report.document import Document, Level
from carbonopt.report.paper.paper_files import NAMES as PAPER_NAMES
from carbonopt.report.paper.paper_files import paper_files
from carbonopt.report.pipeline_report import PipelineView
from carbonopt.report.render import html, markdown
from carbonopt.report.standards import FILES as STANDARD_NAMES
from carbonopt.report.standards import standard_files
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

_MAX_MIB = 1024  # of a report's data, which grow with the study's trials
INDEX, MARKDOWN, COMPARISON = "index.html", "report.md", "comparison.md"
DATA_FOLDER, PAPER_FOLDER, WINNER_FOLDER = str(REPORT_JSON.parent), "paper", "winner"
STANDARDS_FOLDER = f"{DATA_FOLDER}/standards"
FOLDERS = {
    DATA_FOLDER: DATA_NAMES,
    STANDARDS_FOLDER: STANDARD_NAMES,
    PAPER_FOLDER: PAPER_NAMES,
    WINNER_FOLDER: winner.NAMES,
}
# Every file name that a report may have; other files in its folder belong to the user.
NAMES = frozenset(
    {INDEX, MARKDOWN, str(REPORT_JSON)} | {f"{at}/{name}" for at in FOLDERS for name in FOLDERS[at]}
)
COMPARISON_NAMES = frozenset(
    {INDEX, COMPARISON, str(COMPARISON_JSON), "figure-fronts.png", "figure-fronts.pdf"}
)
PIPELINE_NAMES = frozenset(
    {INDEX, MARKDOWN, str(PIPELINE_JSON), "figure-steps.png", "figure-steps.pdf"}
)


def write_report(
    data: StudyData, folder: Path, *, winner_files: dict[str, str] | None = None
) -> Path:
    """Write the report into a folder and return the path of its index.html.

    The new report replaces an older one there as a whole; files that are not part of a report stay.
    The same data gives the same bytes.

    Args:
        data: The study.
        folder: The folder of the report.
        winner_files: Texts by file name to write beside the generated files in winner/: the
            recommended trial's ds_config.json.

    Raises:
        BadInput: If the folder can't be replaced, or holds another study's report.
    """
    refuse_folder(folder, data)
    study = StudyView(data)
    document = whole(study)
    serious = [caveat.text for caveat in document.caveats if caveat.level is Level.CRITICAL]
    winner_texts = winner.winner_files(data, study.recommendation, winner_files, serious)
    folders = {
        DATA_FOLDER: data_files(data.records, is_replay=data.provenance.is_replay),
        STANDARDS_FOLDER: standard_files(study),
        PAPER_FOLDER: paper_files(study, document),
        WINNER_FOLDER: {name: text.encode() for name, text in winner_texts.items()},
    }
    pictures = {
        figure.name: f"{PAPER_FOLDER}/figure-{figure.name}.png"
        for figure in document.paper_figures()
    }
    results = {"study": _identity(data), **study.results(), "document": document.as_json()}
    files = {
        INDEX: html.render(document).encode(),
        MARKDOWN: markdown.render(document, pictures).encode(),
        str(REPORT_JSON): to_json(results, indent=2) + b"\n",
        **{
            f"{at}/{name}": content
            for at, contents in folders.items()
            for name, content in contents.items()
        },
    }
    with replaced(folder, NAMES) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
        if winner.SCRIPT in winner_texts:
            (new / WINNER_FOLDER / winner.SCRIPT).chmod(0o755)
    return folder / INDEX


def write_comparison(view: StudiesView, document: Document, folder: Path) -> Path:
    """Write the page of several studies into a folder and return the path of its index.html.

    The figure and the data lie beside the page. The page replaces an older one in the folder.

    Args:
        view: The studies.
        document: The document that `comparison_report` makes of them.
        folder: The folder of the page.

    Raises:
        BadInput: If the folder can't be replaced.
    """
    return _write_page(
        document, view.results(), folder, COMPARISON, COMPARISON_JSON, COMPARISON_NAMES
    )


def write_pipeline(view: PipelineView, document: Document, folder: Path) -> Path:
    """Write the page of a pipeline into a folder and return the path of its index.html.

    It works as `write_comparison` does; `document` is the one that `pipeline_report` makes.
    """
    return _write_page(
        document, view.summary.as_json(), folder, MARKDOWN, PIPELINE_JSON, PIPELINE_NAMES
    )


def _write_page(
    document: Document,
    results: dict[str, Any],
    folder: Path,
    text: str,
    data: Path,
    names: frozenset[str],
) -> Path:
    pictures = {figure.name: f"figure-{figure.name}.png" for figure in document.paper_figures()}
    files = {
        INDEX: html.render(document).encode(),
        text: markdown.render(document, pictures).encode(),
        str(data): (
            to_json({**results, "document": document.as_json()}, indent=2, inf_nan_mode="null")
            + b"\n"
        ),
        **{pictures[figure.name]: figure.png for figure in document.paper_figures()},
        **{f"figure-{figure.name}.pdf": figure.pdf for figure in document.paper_figures()},
    }
    with replaced(folder, names) as new:
        for name, content in files.items():
            write_bytes(new / name, content)
    return folder / INDEX


def _identity(data: StudyData) -> dict[str, Any]:
    """Return what identifies a study in report.json: its name and when it began.

    Two studies of the same name began at different times.
    """
    began = min(
        (datetime.fromisoformat(session.started_at) for session in data.sessions), default=None
    )
    return {"name": data.config.name, "began": began and began.isoformat(timespec="seconds")}


def refuse_folder(folder: Path, data: StudyData) -> None:
    """Refuse a folder that can't take this study's report, before anything is computed.

    Raises:
        BadInput: If the folder can't be written, or holds another study's report: its files would
            be lost, and files that the user put beside them, such as that study's trained model,
            would seem to be this study's.
    """
    # The new folder is made beside the old one and renamed, so its parent must be writable.
    parent = existing_parent(Path(os.path.realpath(folder)), "the report's folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        why = (
            "read-only file system"
            if os.statvfs(parent).f_flag & os.ST_RDONLY
            else "permission denied"
        )
        raise BadInput(f"the report can't be written to {folder}: {why}; give another folder.")
    name, began = _name_and_begin(folder)
    own_name, own_began = _identity(data).values()
    if name is None or (name == own_name and (None in (began, own_began) or began == own_began)):
        return
    since = f", begun {ascii(began)[1:-1]}" if began is not None else ""
    namesake = f"; this one, of the same name, began {own_began}" if name == own_name else ""
    raise BadInput(
        f"{folder} holds the report of another study ({name!r}{since}{namesake}); give another"
        " folder."
    )


def _name_and_begin(folder: Path) -> tuple[str | None, str | None]:
    """Return the name of the study whose report lies in a folder, and when it began.

    Both are None where there is no report, or where it names no study. Older reports give the name
    alone.
    """
    try:
        content = parsed_json(read_text(folder / REPORT_JSON, "the report", _MAX_MIB))
        # Older reports hold the name alone.
        study = content.get("study") or {"name": content["shown"]["name"]}
        return str(study["name"]), None if study.get("began") is None else str(study["began"])
    except (BadInput, ValueError, LookupError, TypeError, AttributeError):
        return None, None
