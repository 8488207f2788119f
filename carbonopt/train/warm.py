"""What every rank needs and no rank changes, imported once: the module of the template that ranks are forked from.

Importing it takes seconds to tens of seconds, which trials are then spared. It touches no GPU: the forks of a process
that has opened one can't use it.
"""

import importlib

import torch

from carbonopt.train import worker
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

for _module in _MODULES:
    importlib.import_module(_module)
import_muon_uncompiled()


def unfit() -> str | None:
    """Why forks of this process can't train; None: they can."""
    if torch.cuda.is_initialized():
        return "importing what trials need has opened a GPU already"
    return None


def run(argv: list[str]) -> int:
    """One rank's work, as `python -m carbonopt.train.worker SPEC.json` does it: argv is that command."""
    return worker.main(argv[-1])
