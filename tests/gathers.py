"""A rank on the CPU, as a module of the fork server, that counts how often ZeRO-3 gathers a module's
weights while the model generates. Rank 0 writes the number, and that of generated batches, into the
file that GATHERS_FILE names.
"""

import json
import os
from pathlib import Path

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from transformers import GenerationMixin

from carbonopt.train import forked_rank
from carbonopt.train.forked_rank import unfit

__all__ = ["run", "unfit"]

counts = {"gathers": 0, "batches": 0}
generating = False
own_fetch, own_generate = PartitionedParameterCoordinator.fetch_sub_module, GenerationMixin.generate


def fetch(*arguments, **options):
    counts["gathers"] += generating
    return own_fetch(*arguments, **options)


def generate(*arguments, **options):
    global generating
    counts["batches"] += 1
    generating = True
    try:
        return own_generate(*arguments, **options)
    finally:
        generating = False


PartitionedParameterCoordinator.fetch_sub_module = fetch
GenerationMixin.generate = generate


def run() -> int:
    exit_code = forked_rank.run()
    if os.environ["RANK"] == "0":
        Path(os.environ["GATHERS_FILE"]).write_text(json.dumps(counts))
    return exit_code
