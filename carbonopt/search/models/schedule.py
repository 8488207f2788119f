"""How a learning rate runs over a trial: what of it an evaluation in the middle can tell about the end.

With a rate that stays constant, a shorter trial is the beginning of a longer one, and its evaluations are the longer
one's. With one that decays it is not: at the same step the shorter trial has the lower rate, and a lower loss for it.
Two numbers say how far a trial is, whatever its schedule (after arXiv 2408.11029, whose S1 is the area under the
rate): the steps it would have taken at its peak rate, and the share of the peak that it has now.
"""

from functools import lru_cache

import numpy as np

from carbonopt.core.dimensions import DEFAULT_LR_SCHEDULER, TrialParams, rate_decays

_POINTS = 512


def progress(params: TrialParams, fraction: float) -> tuple[float, float]:
    """Where a trial is after a share of its steps.

    Returns:
        Steps at the peak rate that amount to the same, as a share of all steps; and the rate now, as a share of the
        peak.
    """
    areas, shares = _curves(params.lr_scheduler or DEFAULT_LR_SCHEDULER, params.warmup_ratio or 0.0)
    place = min(max(fraction, 0.0), 1.0) * _POINTS
    before = min(int(place), _POINTS - 1)
    rest = place - before

    def between(values: np.ndarray) -> float:  # numpy.interp takes ten times as long for one place
        return float(values[before] + rest * (values[before + 1] - values[before]))

    return between(areas), between(shares)


@lru_cache(maxsize=64)
def _curves(scheduler: str, warmup: float) -> tuple[np.ndarray, np.ndarray]:
    """Area and height of the rate after each of _POINTS parts, as transformers.SchedulerType has them."""
    done = np.linspace(0.0, 1.0, _POINTS + 1)
    rest = np.clip((done - warmup) / max(1e-9, 1.0 - warmup), 0.0, 1.0)  # of the part after the warm-up
    match scheduler:
        case name if not rate_decays(name, warmup):
            share = np.ones_like(done)
        case "cosine":
            share = (1 + np.cos(np.pi * rest)) / 2
        case "cosine_with_min_lr":  # its floor stands in the training arguments; a tenth is what most take
            share = 0.1 + 0.9 * (1 + np.cos(np.pi * rest)) / 2
        case "inverse_sqrt":
            share = np.sqrt(warmup / np.maximum(done, warmup))
        case "warmup_stable_decay":  # so do its decay's steps; a tenth of all, too, along a cosine
            share = (1 + np.cos(np.pi * np.clip((done - 0.9) / 0.1, 0.0, 1.0))) / 2
        case _:  # linear, and polynomial of power 1
            share = 1.0 - rest
    if warmup > 0 and scheduler != "constant":
        share = np.where(done < warmup, done / warmup, share)
    heights = (share[1:] + share[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(heights) / _POINTS]), share
