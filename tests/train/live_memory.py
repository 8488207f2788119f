"""python tests/train/live_memory.py SPEC.json: one rank of one trial on the CPU, with all its tensors counted. Rank 0
prints the most bytes that were there at once from the beginning of the training on."""

import gc
import os
import sys
from pathlib import Path

import torch

from carbonopt.core.trial import TrialSpec
from carbonopt.train import loop, ranks, worker
from carbonopt.train.imports import import_all
from carbonopt.train.memory import LiveMemory


class RealMemory(LiveMemory):
    """Without what has shapes alone, of which ZeRO 1 keeps a copy of each parameter."""

    def count(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super().count(tensor)


import_all()
live = RealMemory()
own_begin = loop.Evaluations.on_train_begin


def begin(*arguments, **options):
    gc.collect()
    live.peak_bytes = live.live_bytes  # what only the set-up needed is not the estimate's
    return own_begin(*arguments, **options)


loop.Evaluations.on_train_begin = begin
with live:
    worker.run_trial(TrialSpec.model_validate_json(Path(sys.argv[1]).read_bytes()), None)
if ranks.rank() == 0:
    print(f"most {live.peak_bytes}", flush=True)
os._exit(0)  # as a worker ends: the threads that still run can die badly with the interpreter
