"""A rank on the CPU whose trained weights are recorded, as a module of the fork server: rank 0
writes those after each step, before any average is applied, as one row of float32 a step into the
file that WEIGHTS_FILE names.
"""

import os
from itertools import chain
from pathlib import Path

import numpy as np

from carbonopt.train import forked_rank, training_loop
from carbonopt.train.forked_rank import unfit

__all__ = ["run", "unfit"]

own_step_end = training_loop.TrialCallback.on_step_end
rows: list[np.ndarray] = []


def step_end(evaluations, *arguments, **options):
    """Of an optimizer's own float32 weights, where it has them whole."""
    engine = evaluations._trainer.model_wrapped
    masters = getattr(engine.optimizer, "fp32_groups", None)
    names = {id(weight): name for name, weight in engine.module.named_parameters()}
    if masters is None:
        weights = {
            name: weight
            for name, weight in engine.module.named_parameters()
            if weight.requires_grad
        }
    else:
        pairs = zip(chain(*engine.optimizer.fp16_groups), chain(*masters), strict=True)
        weights = {names[id(weight)]: master for weight, master in pairs}
    rows.append(
        np.concatenate([weights[name].detach().float().numpy().ravel() for name in sorted(weights)])
    )
    return own_step_end(evaluations, *arguments, **options)


training_loop.TrialCallback.on_step_end = step_end


def run() -> int:
    exit_code = forked_rank.run()
    if os.environ["RANK"] == "0":
        np.save(Path(os.environ["WEIGHTS_FILE"]), np.array(rows), allow_pickle=False)
    return exit_code
