"""The files of a prepared folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from carbonopt.trial import Prepared


@dataclass(frozen=True)
class PreparedFolder:
    """What `prepare` writes once and every trial reads."""

    root: Path

    @property
    def train(self) -> Path:
        return self.root / "train.npy"

    @property
    def evaluation(self) -> Path:
        return self.root / "eval.npy"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def model_config(self) -> Path:
        return self.root / "model"

    @property
    def summary(self) -> Path:
        return self.root / "prepared.json"

    def read_summary(self) -> Prepared:
        return Prepared(**json.loads(self.summary.read_text(encoding="utf-8")))
