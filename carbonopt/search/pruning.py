"""When a running trial will not meet the target; for its cost see `cap`. Optuna's own pruning refuses multi-objective
studies (`trial.report` and `should_prune` raise NotImplementedError), so the rules are ours."""

import math

from carbonopt.core.trial import Forecast
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.line import straight_line_loss
from carbonopt.search.observation import Observation
from carbonopt.search.proposal import Knowledge

# How many standard deviations above the target the expected end must lie. The model's tails are heavier than normal, so
# the curve itself has to say the same: the straight line through its last points must miss the target.
LIKELY = 2.0
# Forecasts are checked where these shares of a complete trial were known; and believed from so many such trials on, if
# they lie LIKELY beyond the largest error to the wrong side.
CHECKED_AT = (1 / 3, 1 / 2, 2 / 3)
TRUSTED_FROM = 2
SAME_SHARE = 0.01  # apart; whole steps are evaluated


@one_blas_thread()
def should_prune(knowledge: Knowledge, own: Observation, target_loss: float | None) -> Forecast | None:
    """Why a running trial can't matter any more, by its own curve so far and by what the other trials have taught;
    None: it can.

    Args:
        knowledge: of the other trials; its models were fitted before this one began.
        own: what the trial has taught so far.
        target_loss: of the target (`Quality.loss_of`); None: it matters as long as it can be on the Pareto front.
    """
    if target_loss is None and own.cost_per_step and own.total_steps:
        expected_cost = own.cost_per_step * own.total_steps
        target_loss = min((loss for _, loss, cost in knowledge.ends if cost <= expected_cost), default=None)
    if target_loss is None or not own.curve or not own.total_steps:
        return None
    line = straight_line_loss(own.curve)
    if line is None or line <= target_loss:
        return None
    surprises, (now, loss) = lowest_surprises(knowledge), own.curve[-1]
    linked = knowledge.link.linked
    if len(surprises) < TRUSTED_FROM or linked(loss) - linked(target_loss) <= largest_fall(knowledge, now):
        return None
    model = knowledge.curves.given(knowledge.encoder.points([knowledge.as_modelled(own)]))
    mean, spread = model.predict(knowledge.encoder.curve_rows([own.params]), [own.number])
    sds_short = (mean[0] - knowledge.limit(target_loss, by_mean=False)) / spread[0]
    sds_needed = LIKELY - min(0.0, *surprises, 0.0)
    if sds_short <= sds_needed:
        return None
    return Forecast(
        step=round(own.curve[-1][0] * own.total_steps),
        value=knowledge.quality.value_of_loss(knowledge.link.loss(float(mean[0]))),
        sds_short=float(sds_short),
        sds_needed=sds_needed,
        checked_trials=len(surprises),
    )


def largest_fall(knowledge: Knowledge, share: float) -> float:
    """The furthest that the linked loss of a complete trial has still fallen, from its last evaluation up to this share
    of its steps to its end; infinite where none was evaluated by then."""
    curves = [trial.curve for trial in knowledge.observations if trial.complete]
    befores = [[loss for place, loss in curve if place <= share + SAME_SHARE] for curve in curves]
    falls = [
        knowledge.link.linked(before[-1]) - knowledge.link.linked(curve[-1][1])
        for curve, before in zip(curves, befores, strict=True)
        if before
    ]
    return float(max(falls, default=math.inf))


def lowest_surprises(knowledge: Knowledge) -> list[float]:
    """Of each complete trial that learned and was evaluated on its way: by how many standard deviations it ended above
    what the models forecast of it without its later evaluations, the lowest of CHECKED_AT."""
    points, lowest = knowledge.curves.points, []
    for trial in knowledge.observations:
        if not trial.complete or knowledge.collapsed(trial):
            continue
        own = points.trial == trial.number
        hidden = [own & (points.share > share) for share in CHECKED_AT]
        surprises = [knowledge.curves.surprise(mask) for mask in hidden if mask.any() and (own & ~mask).any()]
        if surprises:
            lowest.append(min(surprises))
    return lowest
