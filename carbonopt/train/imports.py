"""What every rank needs and no rank changes, imported once: the module of the template that ranks are forked from.

Importing it takes seconds to tens of seconds, which trials are then spared. It touches no GPU: the forks of a process
that has opened one can't use it.
"""

import importlib
import importlib.util
import os
import select
import sys
import traceback
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from carbonopt.core.events import CRASH_EXIT, FINGERPRINT, GATE_FD, GPU_UUIDS, LIKELY_SEED, PREPARED, SPEC_FD
from carbonopt.core.files import PreparedFolder
from carbonopt.core.trial import Prepared
from carbonopt.train import prefetch as ahead
from carbonopt.train import worker
from carbonopt.train.deepspeed_ops import import_muon_uncompiled
from carbonopt.train.model import parameter_count

# Parameters of the model that a waiting trial practises with, beside another that trains: with gradients and optimizer
# 1 GB.
_MOST_WARMED_UP = 60_000_000
_LOOK_EVERY_S = 0.05

# What the Trainer, DeepSpeed and torch import while they set a trial up or make its first step.
_MODULES = (
    "carbonopt.train.arguments",
    "carbonopt.train.deepspeed_config",
    "carbonopt.train.evaluation",
    "carbonopt.train.loop",
    "carbonopt.train.versions",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "accelerate.utils.deepspeed",
    "deepspeed.runtime.engine",
)
# On a GPU the engine also loads torch's compiler, whether the trial compiles or not: two of a set-up's three seconds.
_GPU_MODULES = (
    "torch._inductor.compile_fx",
    "deepspeed.compile.backend",
    "deepspeed.compile.inductor",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.monitor.monitor",
    "deepspeed.ops.triton_ops",
)

for _module in (*_MODULES, *(_GPU_MODULES if torch.version.cuda else ())):
    # DeepSpeed's own modules come and go with its versions; what is missing here, a trial imports itself.
    if not _module.startswith("deepspeed.") or importlib.util.find_spec(_module) is not None:
        importlib.import_module(_module)
import_muon_uncompiled()


def unfit() -> str | None:
    """Why forks of this process can't train; None: they can."""
    if torch.cuda.is_initialized():
        return "importing what trials need has opened a GPU already"
    return None


def run() -> int:
    """One rank's work: what every trial begins with, and then the trial that it is told to be."""
    gate = int(os.environ[GATE_FD])
    if os.environ[GPU_UUIDS]:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        _open_gpu(device)
        folder = PreparedFolder(Path(os.environ[PREPARED]))
        if (prepared := _data(folder, gate)) is not None:
            _do_ahead(folder, prepared, device)
    os.read(gate, 1)  # nothing is ever written: it returns when the gate is opened
    spec = int(os.environ[SPEC_FD])
    text = os.pread(spec, os.fstat(spec).st_size, 0).decode()
    return worker.main(text) if text else CRASH_EXIT  # the study has ended without another trial


def _open_gpu(device: torch.device) -> None:
    """Does what only the first use of a GPU in a process costs: CUDA's context, NCCL's communicator."""
    torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    torch.distributed.all_reduce(torch.zeros(1, device=device))


def _data(folder: PreparedFolder, gate: int) -> Prepared | None:
    """Waits for the data, which the first trial's processes don't find yet; None: the gate is opened before."""
    while (prepared := folder.made_for(os.environ[FINGERPRINT])) is None:
        if select.select([gate], [], [], _LOOK_EVERY_S)[0]:
            return None
    return prepared


def _do_ahead(folder: PreparedFolder, prepared: Prepared, device: torch.device) -> None:
    """What a trial's set-up and its first step would take longer for: loads the kernels, and draws a random model."""
    try:
        _warm_up_kernels(folder, prepared, device)
        if seed := os.environ[LIKELY_SEED]:
            ahead.draw(folder, prepared, int(seed))
    except Exception:  # noqa: BLE001, not every model can be cut down; the trial itself says what is wrong with one
        traceback.print_exc()
        print("The trial's beginning will take longer: not all of it could be done ahead.", file=sys.stderr)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _warm_up_kernels(folder: PreparedFolder, prepared: Prepared, device: torch.device) -> None:
    """One step of a model of the workload's kind with a single layer. Nothing that it draws or learns is kept."""
    config = AutoConfig.from_pretrained(folder.model_config)
    config.num_hidden_layers = 1
    if hasattr(config, "auto_map") or parameter_count(config, trust_remote_code=False) > _MOST_WARMED_UP:
        return
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.zeros(2, prepared.sequence_length, dtype=torch.int64)
    master = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(master, fused=True)
    model.train()
    logits = model(input_ids=tokens).logits.float()
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    for weights, parameter in zip(master, model.parameters(), strict=True):
        weights.grad = torch.zeros_like(weights) if parameter.grad is None else parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(master, 1.0)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens)
