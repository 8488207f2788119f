"""When a running trial will not meet the target; for its cost see `cap`. Optuna's own pruning refuses multi-objective
studies (`trial.report` and `should_prune` raise NotImplementedError), so the rules are ours."""

import math
from collections.abc import Sequence

from carbonopt.core.trial import Forecast
from carbonopt.search.models.curves import one_blas_thread
from carbonopt.search.models.line import straight_line_loss
from carbonopt.search.observation import Observation
from carbonopt.search.proposal import Knowledge

# How many standard deviations above the target the expected end must lie, beyond the largest error to the wrong side of
# forecasts that were checked. The model's tails are heavier than normal, so the curves themselves have to say the same:
# the straight line through the trial's last points must miss the target, and its loss would have to fall further than
# that of any trial did, with a margin for the next one that is the smaller the more trials have been there: by a share
# of FURTHER ÷ √trials. In searches of AlexNet's table the ninth fell 1.4 and 1.55 times as far as all before, a
# 13th 1.85 times.
LIKELY = 2.0
FURTHER = 2.5
CHECKED_AT = (1 / 3, 1 / 2, 2 / 3)  # shares of a complete trial that were known to the forecasts
SAME_SHARE = 0.01  # apart; whole steps are evaluated
MOST_SDS = 1e9  # that are told; more of them say no more


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
    now, loss = own.curve[-1]
    complete = [trial for trial in knowledge.observations if trial.final_loss is not None]
    # What has not been where this one is says nothing of what lies below.
    surprises = lowest_surprises(knowledge, [trial for trial in complete if trial.curve[-1][1] <= loss])
    if not surprises:
        return None
    to_fall = float(knowledge.link.linked(loss) - knowledge.link.linked(target_loss))
    if to_fall <= (1 + FURTHER / math.sqrt(len(surprises))) * largest_fall(knowledge, complete, now):
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
        sds_short=min(float(sds_short), MOST_SDS),
        sds_needed=sds_needed,
        checked_trials=len(surprises),
    )


def largest_fall(knowledge: Knowledge, trials: Sequence[Observation], share: float) -> float:
    """The furthest that the linked loss of one of these complete trials has still fallen, from its last evaluation up
    to this share of its steps to its end; infinite where none was evaluated by then."""
    befores = [[loss for place, loss in trial.curve if place <= share + SAME_SHARE] for trial in trials]
    falls = [
        knowledge.link.linked(before[-1]) - knowledge.link.linked(trial.curve[-1][1])
        for trial, before in zip(trials, befores, strict=True)
        if before
    ]
    return float(max(falls, default=math.inf))


def lowest_surprises(knowledge: Knowledge, trials: Sequence[Observation]) -> list[float]:
    """Of each of these complete trials that learned and was evaluated on its way: by how many standard deviations it
    ended above what the models forecast of it without its later evaluations, the lowest of CHECKED_AT."""
    curves, lowest = knowledge.curves, []
    for trial in trials:
        if knowledge.collapsed(trial):
            continue
        if surprises := [curves.surprise(mask) for mask in curves.points.after(trial.number, CHECKED_AT)]:
            lowest.append(min(surprises))
    return lowest
