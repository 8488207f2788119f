"""A pipeline in its folder: its steps and what its calls spent between them in one file, its studies in their own."""

from pydantic import ValidationError

from carbonopt.core.errors import BadInput, first_fault
from carbonopt.core.files import read_text, write_bytes
from carbonopt.core.pipeline import Pipeline, PipelineData, PipelineSession
from carbonopt.core.values import Frozen
from carbonopt.storage.paths import PipelinePaths, StudyPaths
from carbonopt.storage.study import StudyStorage
from carbonopt.storage.url import connect, storage_url

_MAX_MIB = 8


class Ledger(Frozen):
    """What `pipeline.json` holds."""

    pipeline: Pipeline
    sessions: tuple[PipelineSession, ...] = ()

    @classmethod
    def load(cls, paths: PipelinePaths) -> "Ledger | None":
        """None: the folder is no pipeline's. Raises BadInput if it can't be read."""
        if not paths.ledger.exists():
            return None
        try:
            return cls.model_validate_json(read_text(paths.ledger, "the pipeline's ledger", _MAX_MIB))
        except ValidationError as error:
            raise BadInput(f"{paths.ledger} is damaged: {first_fault(error)}; restore it from a copy.") from error

    def save(self, paths: PipelinePaths) -> None:
        write_bytes(paths.ledger, self.model_dump_json(indent=2).encode() + b"\n")


def read_study(paths: StudyPaths, url: str | None = None) -> StudyStorage:
    """Raises BadInput if its storage isn't there, or holds another one."""
    return StudyStorage.of_folder(connect(storage_url(paths, url), must_exist=True), paths)


def read_pipeline(paths: PipelinePaths, ledger: Ledger) -> PipelineData:
    """With the studies that have begun. Raises BadInput if one can't be read."""
    begun = {name: study for name in ledger.pipeline.folders() if (study := paths.study(name)).storage.exists()}
    studies = {folder: read_study(study).read() for folder, study in begun.items()}
    return PipelineData(pipeline=ledger.pipeline, studies=studies, sessions=ledger.sessions)
