"""Prune running trials that will miss the target.

`cap` stops those that became too expensive. Optuna's own pruning refuses multi-objective studies
(`trial.report` and `should_prune` raise NotImplementedError), so that the rules are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from carbonopt.core.trial import Forecast
from carbonopt.search.knowledge import Knowledge
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.line import STRETCH, Curve, straight_line_loss
from carbonopt.search.observation import Observation

# Standard deviations by which the expected end must lie above the target. The largest error of
# earlier forecasts that were too pessimistic is added. The model's tails are heavier than normal,
# so that the curves themselves have to say the same.
LIKELY = 2.0
# The loss would have to fall further than that of any other trial did, by more than the factor
# 1 + FURTHER ÷ √trials. In searches of AlexNet's table, the loss of the ninth trial fell 1.4 and
# 1.55 times as far as that of all before, and a 13th trial's 1.85 times.
FURTHER = 2.5
CHECKED_AT = (1 / 3, 1 / 2, 2 / 3)  # shares of a complete trial from which its end was forecast
SAME_SHARE = 0.01  # shares closer than this are the same, since evaluations are at whole steps
MOST_SDS = 1e9  # the most standard deviations that are reported; more say no more


@one_blas_thread()
def forecast_of_miss(
    knowledge: Knowledge, own: Observation, target_loss: float | None
) -> Forecast | None:
    """Return the forecast by which a running trial will miss the target; None while it may meet it.

    It is judged by its own curve so far and by the observations of the other trials. Where its loss
    has risen, the curve before that must say the same: a spike of the loss may pass.

    Args:
        knowledge: knowledge of the other trials, whose models were fitted before this one began.
        own: the observation of the trial so far.
        target_loss: the loss at the target (`Quality.loss_of`). None: the trial matters as long as
            it can be on the Pareto front.
    """
    forecast = _forecast(knowledge, own, target_loss)
    if forecast is None or not (before := before_rise(own.curve)):
        return forecast
    earlier = replace(own, curve=before)
    return None if _forecast(knowledge, earlier, target_loss) is None else forecast


def before_rise(curve: Curve) -> tuple[tuple[float, float], ...]:
    """Return the curve without its last stretch, at least without its last evaluation.

    It is empty if the loss has not risen over that stretch.
    """
    until = curve[-1][0] - STRETCH + SAME_SHARE if curve else 0.0
    before = tuple(point for point in curve[:-1] if point[0] <= until) or tuple(curve[:-1])
    return before if before and curve[-1][1] > before[-1][1] else ()


def _forecast(knowledge: Knowledge, own: Observation, target_loss: float | None) -> Forecast | None:
    """Return the forecast that this very curve makes; see `forecast_of_miss`."""
    if target_loss is None and own.cost_per_step and own.total_steps:
        expected_cost = own.cost_per_step * own.total_steps + (own.first_cost or 0.0)
        target_loss = min(
            (loss for _, loss, cost in knowledge.ends if cost <= expected_cost), default=None
        )
    if target_loss is None or not own.curve or not own.total_steps:
        return None
    line = straight_line_loss(own.curve)  # None before a third of the steps
    if line is None or line <= target_loss:
        return None
    now, loss = own.curve[-1]
    complete = [trial for trial in knowledge.observations if trial.final_loss is not None]
    # A trial whose loss never fell as low as this one's says nothing about what lies below it.
    errors = lowest_errors(knowledge, [trial for trial in complete if trial.curve[-1][1] <= loss])
    if not errors:
        return None
    to_fall = float(knowledge.link.linked(loss) - knowledge.link.linked(target_loss))
    if to_fall <= (1 + FURTHER / math.sqrt(len(errors))) * largest_fall(knowledge, complete, now):
        return None
    model = knowledge.curves.given(knowledge.encoder.points([knowledge.as_modelled(own)]))
    mean, spread = model.predict(knowledge.encoder.curve_rows([own.params]), [own.number])
    sds_short = (mean[0] - knowledge.limit(target_loss, by_mean=False)) / spread[0]
    # Forecasts of trials that ended lower than expected were too pessimistic.
    sds_needed = LIKELY + max(0.0, -min(errors))
    if sds_short <= sds_needed:
        return None
    return Forecast(
        step=round(own.curve[-1][0] * own.total_steps),
        value=knowledge.quality.value_of_loss(knowledge.link.loss(float(mean[0]))),
        sds_short=min(float(sds_short), MOST_SDS),
        sds_needed=sds_needed,
        checked_trials=len(errors),
    )


def largest_fall(knowledge: Knowledge, trials: Sequence[Observation], share: float) -> float:
    """Return the largest fall of the linked loss that one of these complete trials still made.

    The fall is measured from a trial's last evaluation up to this share of its steps to its end. It
    is infinite if no trial was evaluated by then.
    """
    befores = [
        [loss for place, loss in trial.curve if place <= share + SAME_SHARE] for trial in trials
    ]
    falls = [
        knowledge.link.linked(before[-1]) - knowledge.link.linked(trial.curve[-1][1])
        for trial, before in zip(trials, befores, strict=True)
        if before
    ]
    return float(max(falls, default=math.inf))


def lowest_errors(knowledge: Knowledge, trials: Sequence[Observation]) -> list[float]:
    """Return how far complete trials ended above their forecasts (below: negative), in deviations.

    There is one value for each trial that learned and was evaluated on its way. The forecasts are
    those that the models make without the trial's evaluations after each share of CHECKED_AT; the
    lowest value counts.
    """
    curves, lowest = knowledge.curves, []
    for trial in trials:
        if knowledge.collapsed(trial):
            continue
        errors = [curves.surprise(mask) for mask in curves.points.after(trial.number, CHECKED_AT)]
        if errors:
            lowest.append(min(errors))
    return lowest
