"""What every rank needs and no rank changes, imported in one place.

Importing it takes seconds to tens of seconds. A process that imports it once and is then forked for each trial spares
them that (see `forked_rank`); a trial that is a program of its own imports it itself.
"""

import importlib
import importlib.util

import torch

from carbonopt.train.deepspeed_ops import import_muon_uncompiled

# What the Trainer, DeepSpeed and torch import while they set a trial up or make its first step.
_MODULES = (
    "carbonopt.train.arguments",
    "carbonopt.train.deepspeed_config",
    "carbonopt.train.evaluation",
    "carbonopt.train.loop",
    "carbonopt.train.versions",
    "deepspeed",
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


def import_all() -> None:
    """Imports all of it; what is imported already costs nothing. Touches no GPU."""
    for module in (*_MODULES, *(_GPU_MODULES if torch.version.cuda else ())):
        # DeepSpeed's own modules come and go with its versions; what is missing here, a trial imports itself.
        if not module.startswith("deepspeed.") or importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    import_muon_uncompiled()
