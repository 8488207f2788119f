"""The only place that knows the names of files in a study's folder."""

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

_MAX_NAME_BYTES = 200  # file systems take 255, of which a new folder's temporary name needs a few


@dataclass(frozen=True)
class StudyPaths:
    """The folder of one study. Everything but the storage is a log or can be made again."""

    root: Path

    @classmethod
    def default(cls, study_name: str) -> "StudyPaths":
        """`runs/NAME`, with everything in the name that could leave that folder or upset a shell replaced. Letters
        and digits of any alphabet stay."""
        kept = (sign if _is_plain(sign) else " " for sign in unicodedata.normalize("NFC", study_name))
        safe = re.sub(r"[ -]+", "-", "".join(kept)).strip(".-")[:80]
        safe = safe.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        return cls(Path("runs") / (safe or "study"))

    @property
    def storage(self) -> Path:
        return self.root / "study.db"

    @property
    def storage_pointer(self) -> Path:
        """Where the study's storage is when it is not the file in this folder; never holds a password."""
        return self.root / "storage.json"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def prepared(self) -> Path:
        return self.root / "prepared"

    @property
    def trials(self) -> Path:
        return self.root / "trials"

    def trial(self, number: int) -> Path:
        return self.trials / f"{number:04d}"

    def trial_log(self, number: int, attempt: int) -> Path:
        return self.trial(number) / f"log-{attempt}.txt"

    @property
    def prepare_log(self) -> Path:
        return self.root / "prepare-log.txt"

    @property
    def template_log(self) -> Path:
        return self.root / "template-log.txt"

    def waiting_log(self, number: int) -> Path:
        """Of processes that don't know yet which trial they are."""
        return self.root / f".next-{number}-log.txt"

    @property
    def prepare_spec(self) -> Path:
        return self.root / "prepare.json"

    def foreign_files(self) -> list[str]:
        """Names of what stands in the folder but belongs to no study; nothing once it is a study's folder."""
        if self.storage.exists() or self.storage_pointer.exists():
            return []
        own = (self.lock, self.prepared, self.prepare_log, self.template_log, self.prepare_spec, self.trackers)
        made = {path.name for path in own} | {f"{self.storage.name}-journal"}
        half_made = (".part", ".old")
        names = (path.name for path in self.root.iterdir())
        return sorted(name for name in names if name not in made and not name.endswith(half_made))

    @property
    def trackers(self) -> Path:
        return self.root / "track"

    @property
    def report(self) -> Path:
        return self.root / "report"


def _is_plain(sign: str) -> bool:
    return sign in "_.-" or unicodedata.category(sign)[0] in "LMN"
