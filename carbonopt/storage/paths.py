"""The paths in the folders of studies and pipelines; no other module knows the files' names."""

import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from carbonopt.core.errors import BadInput
from carbonopt.core.files import REPORT_JSON, check_regular, kind_of
from carbonopt.spec.pipeline_file import LEDGER, REPORT

DEEPSPEED_SETTINGS = "ds_config.json"  # file in a trial's folder
CHECKPOINTS = "checkpoints"  # folder in a trial's folder
# File systems allow 255 bytes, of which a new folder's temporary name needs a few.
_MAX_NAME_BYTES = 200


def workers_lock_path(database: Path) -> Path:
    """Return the file whose lock workers hold one after the other (see `storage.workers`)."""
    return database.with_name(f"{database.name}-turn")


def is_study(folder: Path) -> bool:
    """Return whether a folder is a study's, and not one with an Optuna database called study.db."""
    study = StudyPaths(folder)
    is_here = study.storage.exists() and (study.lock.exists() or study.trials.exists())
    return is_here or study.storage_pointer.exists()


class StudyPaths:
    """The paths in the folder of one study.

    Everything but the storage is a log or can be made again.

    Args:
        root: the study's folder.
        worker: the name of a worker that joins the study, which has a folder for its own logs.
    """

    def __init__(self, root: Path, worker: str | None = None) -> None:
        self.root = root
        self.workers = root / "workers"
        self.own = own = root if worker is None else self.workers / worker
        self.storage = root / "study.db"
        # Notes where the storage is when it is not that file; never holds a password.
        self.storage_pointer = root / "storage.json"
        self.early_sessions = root / "early-sessions"  # see `study.account`
        self.lock = own / ".lock"
        self.prepared = root / "prepared"
        self.prepare_spec = own / "prepare.json"
        self.prepare_log = own / "prepare-log.txt"
        self.template_log = own / "template-log.txt"
        self.worker_log = own / "log.txt"  # output of a worker without a terminal
        self.slurm = root / "slurm"  # output of Slurm jobs, and submitit's files
        self.slurm_jobs = root / "slurm.json"
        self.trials = root / "trials"
        self.probes = root / "probes"
        self.trackers = own / "track"
        self.report = root / "report"
        self.exports = root / "export"

    @classmethod
    def default(cls, study_name: str) -> "StudyPaths":
        """Return the default paths, in the folder `runs/NAME`.

        Characters of the name that could leave that folder or upset a shell are replaced. Letters
        and digits of any alphabet stay.
        """
        signs = unicodedata.normalize("NFC", study_name)
        kept = (
            sign if sign in "_.-" or unicodedata.category(sign)[0] in "LMN" else " "
            for sign in signs
        )
        safe = re.sub(r"[ -]+", "-", "".join(kept)).strip(".-")[:80]
        return cls(
            Path("runs") / (safe.encode()[:_MAX_NAME_BYTES].decode(errors="ignore") or "study")
        )

    def trial(self, number: int) -> Path:
        return self.trials / f"{number:04d}"

    def trial_model(self, number: int) -> Path:
        """Return the folder of a trial's model, if the trial saves it."""
        return self.trial(number) / "model"

    def trial_outputs(self, number: int) -> list[Path]:
        """Return the folders that a script was given to write into, one for each attempt."""
        return sorted(self.trial(number).glob("output*"))

    def trial_checkpoints(self, number: int) -> Path:
        """Return the folder of a trial's checkpoints (`TrialSpec.checkpoint_dir`)."""
        return self.trial(number) / CHECKPOINTS

    def trial_log(self, number: int, attempt: int) -> Path:
        return self.trial(number) / f"log-{attempt}.txt"

    def probe(self, number: int) -> Path:
        return self.probes / f"{number:04d}"

    def probe_log(self, number: int) -> Path:
        return self.probe(number) / "log.txt"

    def waiting_log(self, number: int) -> Path:
        """Return the log of processes that wait for their trial."""
        return self.own / f".next-{number}-log.txt"

    def check_kinds(self) -> None:
        """Raise BadInput where something else is in the place of a folder or a file.

        Otherwise it would be found only when it is written, after a trial or after all trials.
        """
        logs = (self.prepare_log, self.template_log, self.worker_log)
        notes = (self.storage_pointer, self.prepare_spec, self.slurm_jobs)
        trials = self.trials if self.trials.is_dir() else None
        settings = () if trials is None else trials.glob(f"*/{DEEPSPEED_SETTINGS}")
        trial_logs = () if trials is None else trials.glob("*/log-*.txt")
        _check_folders(
            (
                self.prepared,
                self.trials,
                self.probes,
                self.trackers,
                self.report,
                self.slurm,
                self.workers,
                self.early_sessions,
            )
        )
        for path in chain(logs, notes, settings, trial_logs):
            check_regular(path)
        check_regular(self.storage, link=True)

    def is_own(self, path: Path) -> bool:
        """Return whether commands make a file or folder of this name before the first trial."""
        name = path.name
        if path.suffix in (".part", ".old") or name.startswith((".next-", f"{self.storage.name}-")):
            return True
        own = (
            self.lock,
            self.prepared,
            self.prepare_log,
            self.template_log,
            self.prepare_spec,
            self.worker_log,
        )
        shared = (
            self.trackers,
            self.workers,
            self.slurm,
            self.slurm_jobs,
            self.storage,
            self.storage_pointer,
            self.early_sessions,
        )
        return name in {path.name for path in (*own, *shared)}

    def check_not_lost(self) -> None:
        """Raise BadInput where a study has left files, but nothing says where its storage is.

        The lock tells them from a user's own files of those names.
        """
        if self.storage.exists() or self.storage_pointer.exists():
            return
        marks = (self.trials, self.probes, self.report / REPORT_JSON)
        left = [path for path in marks if path.exists()]
        if left and (self.root / self.lock.name).exists():
            raise BadInput(
                f"{self.root} holds {left[0].relative_to(self.root)} of a study, but its storage"
                f" {self.storage.name} (or {self.storage_pointer.name}, which names one elsewhere)"
                " is missing; restore it from a copy, or give another folder."
            )

    def foreign_files(self) -> list[str]:
        """List the names in the folder that belong to no study; none once it has a study."""
        if self.storage.exists() or self.storage_pointer.exists():
            return []
        return sorted(path.name for path in self.root.iterdir() if not self.is_own(path))


class PipelinePaths:
    """The paths in the folder of a pipeline: its studies' folders, and the files for them all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ledger = root / LEDGER
        self.lock = root / ".lock"
        self.report = root / REPORT

    def study(self, folder: str) -> StudyPaths:
        return StudyPaths(self.root / folder)

    def check_kinds(self) -> None:
        """Raise BadInput where something else is in the place of a folder or a file."""
        _check_folders((self.report,))
        check_regular(self.ledger)

    def is_own(self, path: Path) -> bool:
        """Return whether commands make a file of this name before the pipeline's first study."""
        return path.name == self.lock.name or path.suffix == ".part"

    def check_not_lost(self) -> None:
        """Raise BadInput where studies of a pipeline are left, but not the list of them."""
        if self.ledger.exists() or not self.lock.exists() or is_study(self.root):
            return
        if studies := sorted(path.name for path in self.root.iterdir() if is_study(path)):
            raise BadInput(
                f"{self.root} holds {studies[0]} of a pipeline, but its list of studies"
                f" {self.ledger.name} is missing; restore it from a copy, or give another folder."
            )

    def foreign_files(self) -> list[str]:
        """List the names in the folder that belong to no pipeline; none once it has a pipeline."""
        if self.ledger.exists():
            return []
        return sorted(path.name for path in self.root.iterdir() if not self.is_own(path))


def _check_folders(folders: Iterable[Path]) -> None:
    for path in folders:
        if not path.is_dir() and (kind := kind_of(path)) is not None:
            raise BadInput(f"{path} has to be a folder, but is {kind}; move it.")
