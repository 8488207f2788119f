"""A rank that is forked from a process which has imported everything.

The fork server imports it by `fork_template`, and forks call `run`. Importing touches no GPU,
because the forks of a process that has opened one can't use it.
"""

import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from carbonopt.core.channel import (
    COMPILES,
    CRASH_EXIT,
    FINGERPRINT,
    GATE_FD,
    GPU_UUIDS,
    LIKELY_SEED,
    PREPARED,
    PREPARES,
    SPEC_FD,
    TASK,
)
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train import prepare, rank_main
from carbonopt.train.imports import import_all, load_compiler, practise_compiling
from carbonopt.train.models.model import parameter_count, prefetch_model, saved_config
from carbonopt.train.tasks.task import task_class, training_task
from carbonopt.train.tasks.trainer_task import TrainerTask

_LOOK_EVERY_S = 0.05
# parameters; with gradients and optimizer 1 GB, beside another trial that runs
_MOST_WARMED_UP = 60_000_000

import_all()
if COMPILES in os.environ:
    load_compiler()
for module in task_class(os.environ[TASK]).imported_ahead if TASK in os.environ else ():
    importlib.import_module(module)
# Loading or saving a model's weights needs these tables, whose regular expressions take a second to
# compile on two busy cores.
get_checkpoint_conversion_mapping("")


def unfit() -> str | None:
    """Return why forks of this process can't train, or None if they can."""
    if torch.cuda.is_initialized() or _is_bad_to_fork():
        return "importing what trials need has opened a GPU already"
    return None


def _is_bad_to_fork() -> bool:
    """Return whether a fork of this process could use no GPU, which only a fork can tell.

    Counting the GPUs is enough for that.
    """
    answers, answer = os.pipe()
    if os.fork() == 0:
        try:
            is_bad = torch.cuda._is_in_bad_fork()  # type: ignore[no-untyped-call]
            os.write(answer, b"bad" if is_bad else b"good")
        finally:
            os._exit(0)
    os.close(answer)
    # A pipe, because the fork server has its children waited for by nobody.
    with os.fdopen(answers, "rb") as told:
        return told.read() != b"good"


def run() -> int:
    """Do one rank's work and return the exit code.

    It does first what every trial begins with, and then runs the trial or the preparation that it
    is given.
    """
    gate = int(os.environ[GATE_FD])
    prepares = PREPARES in os.environ
    # The hub's library read this variable when it was imported, before this process was forked;
    # without this line a trial would not stay offline.
    huggingface_hub.constants.HF_HUB_OFFLINE |= "HF_HUB_OFFLINE" in os.environ
    if os.environ[GPU_UUIDS] and not prepares:
        import deepspeed

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        # These costs arise only at a process's first use of a GPU: CUDA's context, NCCL's
        # communicator.
        torch.cuda.set_device(device)
        deepspeed.init_distributed(dist_backend="nccl", verbose=False)
        torch.distributed.all_reduce(torch.zeros(1, device=device))
        if COMPILES in os.environ:
            with _may_fail():  # needs no data, which the first trial's processes still wait for
                practise_compiling(device)
        folder = PreparedFolder(Path(os.environ[PREPARED]))
        if (prepared := _prepared(folder, gate)) is not None:
            _prefetch(folder, prepared, device)
    os.read(gate, 1)  # nothing is ever written: it returns when the gate is opened
    spec = int(os.environ[SPEC_FD])
    text = os.pread(spec, os.fstat(spec).st_size, 0).decode()
    if not text:
        return CRASH_EXIT  # the study has ended without another trial
    return prepare.main(text) if prepares else rank_main.main(text)


def _prepared(folder: PreparedFolder, gate: int) -> Prepared | None:
    """Wait for the data, which the first trial's processes don't find yet.

    Returns:
        The preparation, or None if the gate is opened before.
    """
    while (prepared := folder.made_for(os.environ[FINGERPRINT])) is None:
        if select.select([gate], [], [], _LOOK_EVERY_S)[0]:
            return None
    return prepared


@contextmanager
def _may_fail() -> Iterator[None]:
    """Print an exception from what is only done ahead; the trial itself reports what is wrong."""
    try:
        yield
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        print(
            "The trial's beginning will take longer: not all of it could be done ahead.",
            file=sys.stderr,
        )


def _prefetch(folder: PreparedFolder, prepared: Prepared, device: torch.device) -> None:
    """Load the kernels, and draw the random model that the trial will most likely train."""
    with _may_fail():  # not every model can be cut down
        task = training_task(json.loads(folder.workload.read_text(encoding="utf-8")))
        if isinstance(task, TrainerTask):
            _warm_up_kernels(task, folder, device)
            if seed := os.environ[LIKELY_SEED]:
                prefetch_model(task.model_kind, folder, prepared, int(seed))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _warm_up_kernels(task: TrainerTask, folder: PreparedFolder, device: torch.device) -> None:
    """Make one step of a single-layer model of the workload's kind.

    Nothing that it draws or learns is kept.
    """
    config = saved_config(folder, task.workload.model.trust_remote_code)
    config.num_hidden_layers = 1
    kind = task.model_kind
    if (
        hasattr(config, "auto_map")
        or parameter_count(kind, config, trust_remote_code=False) > _MOST_WARMED_UP
    ):
        return
    with device:
        model = kind.auto().from_config(config, dtype=torch.bfloat16)
    master = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(master, fused=True)
    model.train()
    task.example_loss(model, folder).backward()
    for weights, parameter in zip(master, model.parameters(), strict=True):
        weights.grad = (
            torch.zeros_like(weights) if parameter.grad is None else parameter.grad.float()
        )
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        task.example_loss(model, folder)
