"""A rank that is forked from a process which has imported everything: the module of the fork server, whose forks call
`run`. Importing touches no GPU: the forks of a process that has opened one can't use it."""

import json
import os
import select
import sys
import traceback
from pathlib import Path

import deepspeed
import torch

from carbonopt.core.events import CRASH_EXIT, FINGERPRINT, GATE_FD, GPU_UUIDS, LIKELY_SEED, PREPARED, SPEC_FD
from carbonopt.core.files import PreparedFolder
from carbonopt.core.trial import Prepared
from carbonopt.train import prefetch, worker
from carbonopt.train.imports import import_all
from carbonopt.train.tasks.base import task_for
from carbonopt.train.tasks.trainer_task import TrainerTask

_LOOK_EVERY_S = 0.05

import_all()


def unfit() -> str | None:
    """Why forks of this process can't train; None: they can."""
    return "importing what trials need has opened a GPU already" if torch.cuda.is_initialized() else None


def run() -> int:
    """One rank's work: what every trial begins with, and then the trial that it is told to be."""
    gate = int(os.environ[GATE_FD])
    if os.environ[GPU_UUIDS]:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # What only the first use of a GPU in a process costs: CUDA's context, NCCL's communicator.
        torch.cuda.set_device(device)
        deepspeed.init_distributed(dist_backend="nccl", verbose=False)
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        folder = PreparedFolder(Path(os.environ[PREPARED]))
        if (prepared := _prepared(folder, gate)) is not None:
            _prefetch(folder, prepared, device)
    os.read(gate, 1)  # nothing is ever written: it returns when the gate is opened
    spec = int(os.environ[SPEC_FD])
    text = os.pread(spec, os.fstat(spec).st_size, 0).decode()
    return worker.main(text) if text else CRASH_EXIT  # the study has ended without another trial


def _prepared(folder: PreparedFolder, gate: int) -> Prepared | None:
    """Waits for the data, which the first trial's processes don't find yet; None: the gate is opened before."""
    while (prepared := folder.made_for(os.environ[FINGERPRINT])) is None:
        if select.select([gate], [], [], _LOOK_EVERY_S)[0]:
            return None
    return prepared


def _prefetch(folder: PreparedFolder, prepared: Prepared, device: torch.device) -> None:
    """What a trial's set-up and its first step would take longer for: loads the kernels, and draws a random model."""
    try:
        task = task_for(json.loads(folder.workload.read_text(encoding="utf-8")))
        if isinstance(task, TrainerTask):
            prefetch.warm_up_kernels(task, folder, prepared, device)
            if seed := os.environ[LIKELY_SEED]:
                prefetch.prefetch_model(task, folder, prepared, int(seed))
    except Exception:  # noqa: BLE001, not every model can be cut down; the trial itself says what is wrong with one
        traceback.print_exc()
        print("The trial's beginning will take longer: not all of it could be done ahead.", file=sys.stderr)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
