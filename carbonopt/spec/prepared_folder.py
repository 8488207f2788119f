"""The folder of the data that all trials share."""

from dataclasses import dataclass
from pathlib import Path

from carbonopt.core.errors import BadInput
from carbonopt.core.files import parsed_json, read_text
from carbonopt.spec.trial_spec import Prepared


@dataclass
class PreparedFolder:
    """The folder that the preparation writes once and every trial reads."""

    root: Path

    def __post_init__(self) -> None:
        self.train, self.evaluation = self.root / "train.npy", self.root / "eval.npy"
        self.tokenizer, self.model_config = self.root / "tokenizer", self.root / "model"
        self.image_processor = self.root / "image_processor"
        # the task's settings, for which the folder was made
        self.workload = self.root / "workload.json"
        self.summary = self.root / "prepared.json"

    def read_summary(self) -> Prepared:
        return Prepared(**parsed_json(read_text(self.summary, "the prepared data's summary", 64)))

    def made_for(self, fingerprint: str) -> Prepared | None:
        """Return the summary if this folder was made for a workload; None if not.

        A damaged folder counts as made for none.
        """
        try:
            summary = self.read_summary()
            whole = all(
                (self.root / name).stat().st_size == size for name, size in summary.files.items()
            )
        except (BadInput, OSError, ValueError, TypeError):
            return None
        return summary if summary.fingerprint == fingerprint and whole else None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file in the folder, by names relative to it."""
        files = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}
