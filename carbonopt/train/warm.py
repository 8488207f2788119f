"""What every rank needs and no rank changes, imported once: the module of the template that ranks are forked from.

Importing it takes seconds to tens of seconds, which trials are then spared. It touches no GPU: the forks of a process
that has opened one can't use it.
"""

import importlib
import importlib.util
import os

import deepspeed
import torch
import torch.nn.functional as F

from carbonopt.channel import GATE_FD, GPU_UUIDS, SPEC_FD
from carbonopt.train import worker
from carbonopt.train.exits import CRASH_EXIT
from carbonopt.train.ops import import_muon_uncompiled

# What the Trainer, DeepSpeed and torch import while they set a trial up or make its first step.
_MODULES = (
    "carbonopt.train.arguments",
    "carbonopt.train.deepspeed_config",
    "carbonopt.train.evaluation",
    "carbonopt.train.loop",
    "carbonopt.train.model",
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


def run(argv: list[str]) -> int:
    """One rank's work: what every trial begins with, and then the trial that it is told to be."""
    if os.environ[GPU_UUIDS]:
        _open_gpu()
    os.read(int(os.environ[GATE_FD]), 1)  # nothing is ever written: it returns when the gate is opened
    spec = int(os.environ[SPEC_FD])
    text = os.pread(spec, os.fstat(spec).st_size, 0).decode()
    return worker.main(text) if text else CRASH_EXIT  # the study has ended without another trial


def _open_gpu() -> None:
    """Does what only the first use of a GPU in a process costs: CUDA's context, NCCL's communicator, the libraries."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    deepspeed.init_distributed(dist_backend="nccl", verbose=False)
    torch.distributed.all_reduce(torch.zeros(1, device=device))
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        hidden = F.layer_norm(F.gelu(torch.ones(4, 64, 64, device=device, dtype=dtype) @ weight), (64,))
        heads = hidden.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        logits = (mixed @ weight).float().flatten(0, 2)
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=device)).backward()
        torch.optim.AdamW([weight], fused=True).step()
    del weight, hidden, heads, mixed, logits
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
