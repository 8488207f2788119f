"""A rank on the CPU with all its tensors counted, as a module of the fork server. Rank 0 writes the
most bytes that were there at once from the beginning of the training on into the file that
PEAK_FILE names.
"""

import gc
import os
from pathlib import Path

import torch

from carbonopt.train import forked_rank, training_loop
from carbonopt.train.forked_rank import unfit
from carbonopt.train.models.live_memory import LiveMemory

__all__ = ["run", "unfit"]


class RealMemory(LiveMemory):
    """Without what has shapes alone, of which ZeRO 1 keeps a copy of each parameter."""

    def count(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super().count(tensor)


live = RealMemory()
own_begin = training_loop.TrialCallback.on_train_begin


def begin(*arguments, **options):
    gc.collect()
    live.peak_bytes = live.live_bytes  # what only the set-up needed is not the estimate's
    return own_begin(*arguments, **options)


training_loop.TrialCallback.on_train_begin = begin


def run() -> int:
    with live:
        exit_code = forked_rank.run()
    if os.environ["RANK"] == "0":
        Path(os.environ["PEAK_FILE"]).write_text(str(live.peak_bytes))
    return exit_code
