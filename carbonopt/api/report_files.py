"""Reports, written into their folders, and the errors for those that can't be written."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.api.study_folder import pipeline_view
from carbonopt.core.errors import FAILING, FULL, BadInput, CarbonoptError, system_reason

if TYPE_CHECKING:
    from carbonopt.report.comparison_report import StudiesView
    from carbonopt.report.document import Document
    from carbonopt.report.pipeline_report import PipelineView
    from carbonopt.spec.study_data import StudyData
    from carbonopt.storage.paths import PipelinePaths, StudyPaths


class ReportNotWritten(CarbonoptError):
    """The failure to write the report of a study that has ended; `data` is the study."""

    def __init__(self, text: str, data: "StudyData") -> None:
        super().__init__(text)
        self.data = data


def write_study_report(data: "StudyData", paths: "StudyPaths", folder: Path) -> Path:
    """Write a study's report into a folder and return the path of its page."""
    from carbonopt.analysis.recommend import recommend as recommend_for
    from carbonopt.core.files import read_text
    from carbonopt.report.writing import write_report
    from carbonopt.storage.paths import DEEPSPEED_SETTINGS

    winner = recommend_for(data).trial
    settings = paths.trial(winner) / DEEPSPEED_SETTINGS if winner is not None else None
    own = (
        {settings.name: read_text(settings, "DeepSpeed's settings", 1)}
        if settings and settings.exists()
        else {}
    )
    with as_unwritable("report", folder):
        return write_report(data, folder, winner_files=own)


def write_own_report(data: "StudyData", paths: "StudyPaths") -> Path:
    """Write a finished study's report into its folder.

    Raises:
        ReportNotWritten: If it can't be written; the study is kept.
    """
    try:
        with kept(paths.root):
            return write_study_report(data, paths, paths.report)
    except CarbonoptError as error:
        raise ReportNotWritten(str(error), data) from error


def write_pipeline_report(paths: "PipelinePaths", folder: Path) -> "tuple[PipelineView, Path]":
    """Write a pipeline's report; return the pipeline and the path of its page."""
    from carbonopt.report.pipeline_report import page
    from carbonopt.report.writing import write_pipeline

    view = pipeline_view(paths)
    with as_unwritable("report", folder):
        return view, write_pipeline(view, page(view), folder)


def write_comparison_page(view: "StudiesView", document: "Document", folder: Path) -> Path:
    """Write the page of several studies and return its path."""
    from carbonopt.report.writing import write_comparison

    with as_unwritable("comparison", folder):
        return write_comparison(view, document, folder)


def refuse_other_files(folder: Path, own: Path, what: str) -> None:
    """Raise BadInput if a folder has files, but lacks `own`, the mark of carbonopt's output."""
    try:
        strange = folder.is_dir() and any(folder.iterdir()) and not (folder / own).exists()
    except OSError as error:
        raise BadInput(
            f"--out {folder} can't be looked into: {error.strerror}; give another folder."
        ) from error
    if strange:
        raise BadInput(f"--out {folder} holds other files and no {what}; give a new folder.")


@contextmanager
def kept(root: Path) -> Iterator[None]:
    """Turn a failure to write a finished study's report into a CarbonoptError with advice.

    The error says how to write the report later.

    Args:
        root: The folder of the study or the pipeline.
    """
    try:
        yield
    except (OSError, BadInput) as error:
        reason = (
            str(error)
            if isinstance(error, BadInput)
            else f"the report can't be written: {system_reason(error)}."
        )
        again = f"carbonopt report {shlex.quote(str(root))} --out DIR2"
        raise CarbonoptError(
            f"{reason} The study is kept: `{again}` writes its report into a new folder."
        ) from error


@contextmanager
def as_unwritable(what: str, folder: Path) -> Iterator[None]:
    """Raise BadInput if the folder can't be written; errors of a full or failing disk stay."""
    try:
        yield
    except OSError as error:
        if error.errno in (*FULL, *FAILING):
            raise
        raise BadInput(
            f"the {what} can't be written to {folder}: {error.strerror}; give another folder."
        ) from error
