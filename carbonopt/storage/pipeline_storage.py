"""A pipeline in its folder.

One file has the pipeline's steps and the energy that its calls spent between them; its studies have
folders of their own.
"""

from pydantic import ValidationError

from carbonopt.core.errors import BadInput
from carbonopt.core.files import read_text, write_bytes
from carbonopt.core.refusals import first_error
from carbonopt.core.values import Frozen
from carbonopt.spec.pipeline_file import Pipeline, PipelineData, PipelineSession
from carbonopt.storage.paths import PipelinePaths, StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

_MAX_MIB = 8


class Ledger(Frozen):
    """The content of `pipeline.json`: the pipeline and its sessions."""

    pipeline: Pipeline
    sessions: tuple[PipelineSession, ...] = ()

    @classmethod
    def load(cls, paths: PipelinePaths) -> "Ledger | None":
        """Read the ledger of a folder; return None if the folder is no pipeline's.

        Raises BadInput if the ledger can't be read.
        """
        if not paths.ledger.exists():
            return None
        try:
            return cls.model_validate_json(
                read_text(paths.ledger, "the pipeline's ledger", _MAX_MIB)
            )
        except ValidationError as error:
            raise BadInput(
                f"{paths.ledger} is damaged: {first_error(error)}; restore it from a copy."
            ) from error

    def save(self, paths: PipelinePaths) -> None:
        write_bytes(paths.ledger, self.model_dump_json(indent=2).encode() + b"\n")


def read_study(paths: StudyPaths, url: str | None = None) -> StudyStorage:
    """Open the study of a folder; raise BadInput if its storage is missing or has another study."""
    return StudyStorage.of_folder(connect(storage_url(paths, url), must_exist=True), paths)


def read_pipeline(paths: PipelinePaths, ledger: Ledger) -> PipelineData:
    """Read a pipeline with the studies that have begun; raise BadInput if one can't be read."""
    begun = {
        name: study
        for name in ledger.pipeline.folders()
        if (study := paths.study(name)).storage.exists()
    }
    studies = {folder: read_study(study).read_checked() for folder, study in begun.items()}
    return PipelineData(pipeline=ledger.pipeline, studies=studies, sessions=ledger.sessions)
