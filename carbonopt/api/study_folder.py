"""Studies and pipelines, read from their folders."""

from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.core.errors import BadInput

if TYPE_CHECKING:
    from carbonopt.report.pipeline_report import PipelineView
    from carbonopt.spec.study_data import StudyData
    from carbonopt.storage.paths import PipelinePaths, StudyPaths


def read_study_folder(
    study_dir: Path, url: str | None, *, for_answer: bool = False
) -> "tuple[StudyPaths, StudyData]":
    """Read a study from its folder.

    Args:
        for_answer: whether few of the trials' evaluations are needed (`read_for_answer`).

    Raises:
        BadInput: If the folder has no study, or it can't be read.
    """
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.storage.pipeline_storage import read_study

    paths = StudyPaths(study_dir)
    try:
        if url is None and not paths.storage.exists() and not paths.storage_pointer.exists():
            paths.check_not_lost()
            advice = "give the folder that `carbonopt run` wrote, such as runs/NAME"
            raise BadInput(f"{study_dir} holds no study; {advice}.")
        stored = read_study(paths, url)
        return paths, stored.read_for_answer() if for_answer else stored.read_checked()
    except OSError as error:
        advice = (
            "ask its owner for a copy"
            if isinstance(error, PermissionError)
            else "give a study's folder"
        )
        raise BadInput(f"{study_dir} can't be read: {error.strerror}; {advice}.") from error


def pipeline_in(folder: Path, storage: str | None) -> "PipelinePaths | None":
    """Return the paths of the pipeline in a folder; None if the folder holds none."""
    from carbonopt.storage.paths import PipelinePaths

    paths = PipelinePaths(folder)
    try:
        if not paths.ledger.exists():
            paths.check_not_lost()
            return None
    except OSError as error:
        raise BadInput(
            f"{folder} can't be read: {error.strerror}; give the folder of a study or a pipeline."
        ) from error
    if storage is not None:
        raise BadInput(f"a storage is of one study, but {folder} holds several; leave it out.")
    return paths


def pipeline_view(paths: "PipelinePaths") -> "PipelineView":
    """Read a pipeline; raise BadInput if none of its studies has begun."""
    from carbonopt.report.pipeline_report import PipelineView
    from carbonopt.storage.pipeline_storage import Ledger, read_pipeline

    ledger = Ledger.load(paths)
    data = read_pipeline(paths, ledger) if ledger is not None else None
    if data is None or not data.studies:
        raise BadInput(
            f"{paths.root} holds no study yet; type `carbonopt run` with its pipeline again."
        )
    return PipelineView(data)
