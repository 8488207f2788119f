"""When a running trial will not meet the target; for its cost see `cap`. Optuna's own pruning refuses multi-objective
studies (`trial.report` and `should_prune` raise NotImplementedError), so the rules are ours."""

import itertools
import math
from collections.abc import Sequence

from carbonopt.core.quality import Quality
from carbonopt.core.trial import EvalPoint
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.observation import Observation, Values, examples
from carbonopt.search.proposal import Knowledge

Evals = Sequence[EvalPoint]  # of one trial, in order

# How many standard deviations above the target the expected end must lie. The model's tails are heavier than normal, so
# the curve itself has to say the same: the straight line through its last points must miss the target. It says nothing
# before a third of its way: on recorded runs the early rank matches the final one only from there.
LIKELY = 2.0
LINE_FROM = 1 / 3
HALF_WAY = 0.49  # an evaluation in the middle is a step early where the number of steps is odd
STRETCH = 1 / 8  # share of the steps between the points of the line


def straight_line_loss(evals: Evals, total_steps: int, quality: Quality) -> float | None:
    """The loss where the curve would end on the steeper of its last two stretches; None: too early to say.

    Loss curves flatten: such a line runs below a convex curve. From half the way on it is drawn over the logarithm of
    the steps, over which they flatten, too: drawn at half the way, 61 of 485 recorded curves ended below it, and 20
    below the plain line.
    """
    now = evals[-1].step
    if now < total_steps * LINE_FROM:
        return None
    last: list[tuple[int, float]] = []
    for point in reversed(evals):
        if not last or last[0][0] - point.step >= 0.9 * STRETCH * total_steps:
            last.insert(0, (point.step, point.loss(quality)))
        if len(last) == 3:
            break
    else:
        return None
    place = math.log if now >= total_steps * HALF_WAY else float
    slopes = [(b[1] - a[1]) / (place(b[0]) - place(a[0])) for a, b in itertools.pairwise(last)]
    return last[-1][1] + min(0.0, *slopes) * (place(total_steps) - place(now))


@one_blas_thread()
def should_prune(
    knowledge: Knowledge, number: int, params: Values, target_loss: float | None, evals: Evals, total_steps: int
) -> bool:
    """Whether a running trial can't matter any more, by its own curve so far and by what the other trials have taught.

    Args:
        knowledge: of the other trials; its models were fitted before this one began.
        target_loss: of the target (`Quality.loss_of`); None: it matters as long as it can be on the Pareto front.
    """
    quality, now = knowledge.quality, evals[-1]
    if target_loss is None and now.train_energy_kwh:
        expected_cost = now.train_energy_kwh / now.step * total_steps
        target_loss = min((loss for _, loss, cost in knowledge.ends if cost <= expected_cost), default=None)
    if target_loss is None or not all(math.isfinite(point.loss(quality)) for point in evals):
        return False
    line = straight_line_loss(evals, total_steps, quality)
    if line is None or line <= target_loss:
        return False
    curve = tuple((point.step / total_steps, point.loss(quality)) for point in evals)
    own = Observation(number, params, curve, total_steps, examples=examples(now, quality))
    model = knowledge.curves.given(knowledge.encoder.points([own]))
    mean, spread = model.predict(knowledge.encoder.curve_rows([params]), [number])
    return bool((mean[0] - model.linked(target_loss)) / spread[0] > LIKELY)
