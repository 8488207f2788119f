"""A study's folder: the only place that knows the names of its files, and its lock, for one command at a time."""

import fcntl
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from carbonopt.core.errors import BadInput
from carbonopt.core.pipeline import LEDGER, REPORT

DEEPSPEED_SETTINGS = "ds_config.json"  # in a trial's folder
_MAX_NAME_BYTES = 200  # file systems take 255, of which a new folder's temporary name needs a few


def turn_file(database: Path) -> Path:
    """Whose lock says which worker has its turn (see `storage.workers`)."""
    return database.with_name(f"{database.name}-turn")


class StudyPaths:
    """The folder of one study. Everything but the storage is a log or can be made again. `worker`: one that joins; its
    own logs are aside."""

    def __init__(self, root: Path, worker: str | None = None) -> None:
        self.root = root
        self.workers = root / "workers"
        self.own = own = root if worker is None else self.workers / worker
        self.storage = root / "study.db"
        self.storage_pointer = root / "storage.json"  # where it is when it is not that file; never holds a password
        self.lock = own / ".lock"
        self.prepared = root / "prepared"
        self.prepare_spec = own / "prepare.json"
        self.prepare_log = own / "prepare-log.txt"
        self.template_log = own / "template-log.txt"
        self.worker_log = own / "log.txt"  # what a worker without a terminal prints
        self.slurm = root / "slurm"  # what its jobs print, and what submitit keeps
        self.slurm_jobs = root / "slurm.json"
        self.trials = root / "trials"
        self.probes = root / "probes"
        self.trackers = own / "track"
        self.report = root / "report"

    @classmethod
    def default(cls, study_name: str) -> "StudyPaths":
        """`runs/NAME`, with everything in the name that could leave that folder or upset a shell replaced. Letters
        and digits of any alphabet stay."""
        signs = unicodedata.normalize("NFC", study_name)
        kept = (sign if sign in "_.-" or unicodedata.category(sign)[0] in "LMN" else " " for sign in signs)
        safe = re.sub(r"[ -]+", "-", "".join(kept)).strip(".-")[:80]
        return cls(Path("runs") / (safe.encode()[:_MAX_NAME_BYTES].decode(errors="ignore") or "study"))

    def trial(self, number: int) -> Path:
        return self.trials / f"{number:04d}"

    def trial_model(self, number: int) -> Path:
        """Of a trial that saves it."""
        return self.trial(number) / "model"

    def trial_log(self, number: int, attempt: int) -> Path:
        return self.trial(number) / f"log-{attempt}.txt"

    def probe(self, number: int) -> Path:
        return self.probes / f"{number:04d}"

    def probe_log(self, number: int) -> Path:
        return self.probe(number) / "log.txt"

    def waiting_log(self, number: int) -> Path:
        """Of processes that don't know yet which trial they are."""
        return self.own / f".next-{number}-log.txt"

    def check_kinds(self) -> None:
        """Raises BadInput where a folder has to be and something else is, or the other way round: else that would be
        found when it is written, after a trial or after all of them."""
        logs = (self.prepare_log, self.template_log)
        settings = self.trials.glob(f"*/{DEEPSPEED_SETTINGS}") if self.trials.is_dir() else ()
        _check_kinds(
            (self.prepared, self.trials, self.probes, self.trackers, self.report),
            (self.storage, self.storage_pointer, self.prepare_spec, *logs, *settings),
        )

    def foreign_files(self) -> list[str]:
        """Names of what stands in the folder but belongs to no study; nothing once it is a study's folder."""
        if self.storage.exists() or self.storage_pointer.exists():
            return []
        own = (self.lock, self.prepared, self.prepare_log, self.template_log, self.prepare_spec, self.trackers)
        shared = (self.workers, self.slurm, self.slurm_jobs, turn_file(self.storage))
        made = {path.name for path in (*own, *shared)} | {f"{self.storage.name}-journal"}
        names = {path.name for path in self.root.iterdir() if path.suffix not in (".part", ".old")}  # half made
        return sorted(names - made)


class PipelinePaths:
    """The folder of a pipeline: its studies' folders, and what is of them all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ledger = root / LEDGER
        self.lock = root / ".lock"
        self.report = root / REPORT

    def study(self, folder: str) -> StudyPaths:
        return StudyPaths(self.root / folder)

    def check_kinds(self) -> None:
        """As of a study's folder."""
        _check_kinds((self.report,), (self.ledger,))

    def foreign_files(self) -> list[str]:
        """As of a study's folder."""
        if self.ledger.exists():
            return []
        return sorted(path.name for path in self.root.iterdir() if path != self.lock)


def _check_kinds(folders: Iterable[Path], files: Iterable[Path]) -> None:
    for path in folders:
        if path.exists() and not path.is_dir():
            raise BadInput(f"{path} has to be a folder, but is a file; move it.")
    for path in files:
        if path.is_dir():
            raise BadInput(f"{path} has to be a file, but is a folder; move it.")


@contextmanager
def own_folder(paths: StudyPaths | PipelinePaths) -> Iterator[None]:
    """The folder of a study or a pipeline, for one command at a time. Raises BadInput if it can't be made, holds other
    files, or another command works in it. After a BadInput inside, what this made is gone again, but for studies."""
    root, own, what = paths.root, paths.lock.parent, "study" if isinstance(paths, StudyPaths) else "pipeline"
    try:
        if root.exists() and not root.is_dir():
            raise BadInput(f"--out {root} is a file; give a folder.")
        missing = [folder for folder in (own, *own.absolute().parents) if not folder.exists()]
        own.mkdir(parents=True, exist_ok=True)
        if strange := paths.foreign_files():
            raise BadInput(f"--out {root} holds other files ({strange[0]}) and no {what}; give a new folder.")
        paths.check_kinds()
        empty = not any(own.iterdir())
        if paths.lock.is_fifo():
            raise BadInput(f"--out {root} can't be written to: {paths.lock} is a pipe; remove it.")
        lock = paths.lock.open("w")
    except OSError as error:
        raise BadInput(f"--out {root} can't be written to: {error.strerror}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            join = ", join it (--worker)" if isinstance(paths, StudyPaths) else ""
            raise BadInput(f"another carbonopt run is working in {root}; wait for it{join}, or give --out.") from error
        try:
            yield
        except BadInput:
            made = [] if not empty or (isinstance(paths, PipelinePaths) and paths.ledger.exists()) else own.iterdir()
            for path in made:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for folder in missing:  # the innermost first
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            raise


def is_locked(paths: StudyPaths | PipelinePaths) -> bool:
    """Whether a run is working in the folder right now."""
    if not paths.lock.is_file():
        return False
    with paths.lock.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
