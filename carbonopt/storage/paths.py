"""The only place that knows the names of files in a study's folder."""

import re
import unicodedata
from pathlib import Path

_MAX_NAME_BYTES = 200  # file systems take 255, of which a new folder's temporary name needs a few


class StudyPaths:
    """The folder of one study. Everything but the storage is a log or can be made again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = root / "study.db"
        self.storage_pointer = root / "storage.json"  # where it is when it is not that file; never holds a password
        self.lock = root / ".lock"
        self.prepared = root / "prepared"
        self.prepare_spec = root / "prepare.json"
        self.prepare_log = root / "prepare-log.txt"
        self.template_log = root / "template-log.txt"
        self.trials = root / "trials"
        self.trackers = root / "track"
        self.report = root / "report"

    @classmethod
    def default(cls, study_name: str) -> "StudyPaths":
        """`runs/NAME`, with everything in the name that could leave that folder or upset a shell replaced. Letters
        and digits of any alphabet stay."""
        kept = (sign if _is_plain(sign) else " " for sign in unicodedata.normalize("NFC", study_name))
        safe = re.sub(r"[ -]+", "-", "".join(kept)).strip(".-")[:80]
        safe = safe.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        return cls(Path("runs") / (safe or "study"))

    def trial(self, number: int) -> Path:
        return self.trials / f"{number:04d}"

    def trial_log(self, number: int, attempt: int) -> Path:
        return self.trial(number) / f"log-{attempt}.txt"

    def waiting_log(self, number: int) -> Path:
        """Of processes that don't know yet which trial they are."""
        return self.root / f".next-{number}-log.txt"

    def foreign_files(self) -> list[str]:
        """Names of what stands in the folder but belongs to no study; nothing once it is a study's folder."""
        if self.storage.exists() or self.storage_pointer.exists():
            return []
        own = (self.lock, self.prepared, self.prepare_log, self.template_log, self.prepare_spec, self.trackers)
        made = {path.name for path in own} | {f"{self.storage.name}-journal"}
        names = (path.name for path in self.root.iterdir())
        return sorted(name for name in names if name not in made and not name.endswith((".part", ".old")))  # half made


def _is_plain(sign: str) -> bool:
    return sign in "_.-" or unicodedata.category(sign)[0] in "LMN"
