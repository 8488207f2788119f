"""Studies that are read again and again while others work on them.

Nothing here writes: SQLite files are opened read-only, PostgreSQL's transactions are read-only, and
no lock of a study's folder is touched.
"""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import make_url

from carbonopt.core.errors import BadInput
from carbonopt.spec.pipeline_file import PipelineData
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.locked_storage import Patience
from carbonopt.storage.paths import PipelinePaths, StudyPaths
from carbonopt.storage.pipeline_storage import Ledger
from carbonopt.storage.study_storage import Snapshot, StudyStorage
from carbonopt.storage.url import connect, storage_url
from carbonopt.storage.workers import KnownWorker

# Longest wait for a program that holds the storage; the next look tries again.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class WatchedState:
    """A study as its storage had it at one look."""

    data: StudyData
    workers: tuple[KnownWorker, ...]  # the live ones


@dataclass(frozen=True)
class Sight:
    """The content of a watched folder at one look.

    `studies` has the studies that have begun, by the names of their folders; the folder of one
    study has the name "". `pipeline` is None in the folder of one study, and as long as no study of
    a pipeline has begun.
    """

    studies: dict[str, WatchedState]
    pipeline: PipelineData | None = None


class WatchedStudy:
    """One study's storage, which may come, change and go between two looks.

    Args:
        paths: the study's folder.
        url: the storage's URL; None: the folder says where it is.
    """

    def __init__(self, paths: StudyPaths, url: str | None = None) -> None:
        self._paths = paths
        self._url = url
        self._study: StudyStorage | None = None
        self._file: tuple[Path, int, int] | None = None  # SQLite's file, its device and its inode
        self._version: int | None = None
        self._snapshot: Snapshot | None = None
        self._state: WatchedState | None = None

    def look(self) -> WatchedState | None:
        """Read the study; return the same object as last time if nothing has changed.

        None: the storage holds no study yet.

        Raises:
            BadInput: if the storage is missing or can't be read.
            StorageHeld: if another program holds it for too long.
        """
        try:
            return self._looked()
        except BaseException:
            self._study = None  # opened anew at the next look
            raise

    def _looked(self) -> WatchedState | None:
        if self._study is None or self._file != self._file_now(self._file):
            self._open()
        if self._study is None:
            return None
        workers = self._study.living_workers()
        living = frozenset(worker.id for worker in workers)
        before, self._version = self._version, self._study.version()
        state = self._state
        # By their names: a heartbeat changes the storage, but nothing that is shown.
        are_same_workers = state is not None and living == {worker.id for worker in state.workers}
        if not are_same_workers or self._version is None or self._version != before:
            last = self._snapshot if are_same_workers else None
            self._snapshot = self._study.snapshot_after(last, living)
            data = self._snapshot.data
            if state is None or not are_same_workers or data != state.data:
                self._state = WatchedState(data, workers)
        return self._state

    def _open(self) -> None:
        self._state, self._version, self._snapshot = None, None, None
        url = storage_url(self._paths, self._url)
        self._file = None
        if (parsed := make_url(url)).get_backend_name() == "sqlite":
            self._file = self._file_now((Path(str(parsed.database)), 0, 0))
        storage = connect(url, patience=Patience(_PATIENCE_S), read_only=True)
        self._study = StudyStorage.begun_in(storage, self._paths)

    @staticmethod
    def _file_now(known: tuple[Path, int, int] | None) -> tuple[Path, int, int] | None:
        """Return which file is in the place of the known one now.

        An open connection would go on reading a file that was removed or replaced.
        """
        if known is None:
            return None
        file = known[0]
        try:
            status = file.stat()
        except OSError as error:
            raise BadInput(f"the storage {file} can't be read: {error.strerror}.") from error
        return file, status.st_dev, status.st_ino


class WatchedPipeline:
    """A pipeline's folder with the storages of its studies.

    Args:
        paths: the pipeline's folder.
    """

    def __init__(self, paths: PipelinePaths) -> None:
        self._paths = paths
        self._studies: dict[str, WatchedStudy] = {}

    def look(self) -> Sight:
        """Read the pipeline and its studies.

        Raises:
            BadInput: if the ledger or a storage is missing or can't be read.
            StorageHeld: if another program holds a storage for too long.
        """
        ledger = Ledger.load(self._paths)
        if ledger is None:
            raise BadInput(f"the pipeline's ledger {self._paths.ledger} is gone.")
        studies = {}
        for name in ledger.pipeline.folders():
            paths = self._paths.study(name)
            if name not in self._studies and paths.storage.exists():
                self._studies[name] = WatchedStudy(paths)
            if name in self._studies and (state := self._studies[name].look()) is not None:
                studies[name] = state
        read = {name: state.data for name, state in studies.items()}
        pipeline = PipelineData(pipeline=ledger.pipeline, studies=read, sessions=ledger.sessions)
        return Sight(studies, pipeline if studies else None)
