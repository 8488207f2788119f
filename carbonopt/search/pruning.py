"""When a running trial can't matter any more. Pure functions of what is known; Optuna's own pruning refuses
multi-objective studies (`trial.report` and `should_prune` raise NotImplementedError)."""

import itertools
import math
from collections.abc import Sequence

from carbonopt.trial import EvalPoint

# A curve says nothing before a third of its way: on recorded runs the early rank matches the final one only from there.
EARLIEST_FRACTION = 1 / 3
# How much steeper than the steepest of its last stretches the rest of a curve may be. Above 1 because a decaying
# learning rate lets the loss drop faster towards the end than the curve's middle promises.
OPTIMISM = 1.5


def passes_cap(emissions_kg_co2e: float, cap_kg_co2e: float | None) -> bool:
    """Energy only grows: a trial above the best feasible one's emissions can't become the recommendation."""
    return cap_kg_co2e is not None and emissions_kg_co2e > cap_kg_co2e


def optimistic_final_nll(evals: Sequence[EvalPoint], total_steps: int) -> float | None:
    """The lowest mean NLL (nats per token) that the curve can still be believed to end at; None: too early to say.

    Loss curves flatten: the straight line through the last two evaluations runs below a convex curve. The steeper of
    the last two stretches is taken, times OPTIMISM, so that noise in one evaluation does not condemn a trial.
    """
    if len(evals) < 3 or evals[-1].step < total_steps * EARLIEST_FRACTION:
        return None
    last = [(point.step, _mean_nll(point)) for point in evals[-3:]]
    if not all(math.isfinite(nll) for _, nll in last):
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(last)]
    steepest = min(0.0, *slopes)
    return last[-1][1] + OPTIMISM * steepest * (total_steps - evals[-1].step)


def cannot_reach(evals: Sequence[EvalPoint], total_steps: int, target_perplexity: float) -> bool:
    """Whether even the optimistic reading of the curve ends above the target."""
    forecast = optimistic_final_nll(evals, total_steps)
    return forecast is not None and forecast > math.log(target_perplexity)


def _mean_nll(point: EvalPoint) -> float:
    return math.nan if point.nll_sum is None else point.nll_sum / point.eval_tokens
