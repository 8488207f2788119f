"""What an answer lacks: where no trial met the target what was missing, and what the trials say could be changed; where
one did, a saving that doesn't last at equal quality."""

from collections import Counter

from carbonopt.analysis.comparison import comparison
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.shortfall import Edge, Shortfall, Trend
from carbonopt.core.config import Fixed, LocalLaunch
from carbonopt.core.format import count_text, percent_text, quality_text, value_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.report.savings import at_equal_quality


def what_is_missing(data: StudyData, rec: Recommendation) -> tuple[str, ...]:
    """A sentence each. Where the target was met, one at most: that the saving doesn't last at equal quality."""
    if rec.met:
        return tuple(filter(None, [at_equal_quality(comparison(data, rec))]))
    found = []
    if rec.closest is not None and rec.closest.perplexity > rec.target_perplexity:
        excess = percent_text(rec.closest.perplexity / rec.target_perplexity - 1)
        when = "" if rec.closest.state is TrialState.COMPLETE else ", as far as it got"
        found.append(f"Trial {rec.closest.trial} is {excess} above the target{when}.")
    elif rec.closest is not None:
        seeds = " with every seed" if rec.closest.state is TrialState.COMPLETE else ""
        found.append(f"Trial {rec.closest.trial} was below the target, but it did not complete{seeds}.")
    if rec.shortfall is not None:
        found += _of_the_closest(rec.shortfall, rec.target_perplexity)
    elif rec.closest is None or rec.closest.state is not TrialState.COMPLETE:
        found += _of_the_states(data)
    return tuple(found)


def _of_the_closest(missing: Shortfall, target_perplexity: float) -> list[str]:
    found = [f"Its loss would have to be {_nll(missing.missing_nll)} lower."]
    trend = missing.trend
    if missing.most_epochs is not None and trend is not None:
        found.append(
            f"It had the most epochs that the space allows ({value_text(missing.most_epochs)}), and its loss still "
            f"fell, by {_nll(trend.fell_by_nll)} over the last {count_text(trend.steps, 'step')}: allow more epochs."
        )
    elif trend is not None and trend.rises:
        found.append(_risen(trend, target_perplexity))
    elif trend is not None and trend.falls:
        found.append(
            f"Its loss still fell, by {_nll(trend.fell_by_nll)} over the last {count_text(trend.steps, 'step')}, and "
            "the space allows more epochs: a larger budget may find what meets the target."
        )
    found += map(_beyond, missing.edges)
    if len(found) == 1:
        found.append(
            "Its values lie inside the space, and its loss did not change at its end in a way that shows a direction: "
            "other dimensions, another model or more data may be needed."
        )
    return found


def _risen(trend: Trend, target_perplexity: float) -> str:
    reached = ", which meets the target" if trend.lowest_perplexity <= target_perplexity else ""
    return (
        f"Its loss rose by {_nll(-trend.fell_by_nll)} over the last {count_text(trend.steps, 'step')}, and its lowest "
        f"perplexity was {quality_text(trend.lowest_perplexity)} at step {trend.lowest_at_step}{reached}: allow "
        "fewer epochs or a lower learning rate."
    )


def _beyond(edge: Edge) -> str:
    wanted = "higher" if edge.end == "highest" else "lower"
    return (
        f"Its {edge.dimension} was the {edge.end} of the space ({value_text(edge.value)}), and trials with others came "
        f"no closer: allow {wanted} ones."
    )


def _of_the_states(data: StudyData) -> list[str]:
    """Why no trial came to its end, and what to change, the most frequent reason first."""
    records = [record for record in data.records if record.stop_reason is not StopReason.INTERRUPTED]
    reasons = Counter((record.state, record.stop_reason) for record in records)
    found = []
    for (state, stop_reason), count in reasons.most_common():
        which = f"{count} of {count_text(len(records), 'trial')}"
        if count == len(records):
            which = "The only trial" if count == 1 else f"All {count_text(count, 'trial')}"
        match state, stop_reason:
            case TrialState.INFEASIBLE, _:
                found.append(f"{which} did not fit in memory: {_smaller(data)}.")
            case TrialState.DIVERGED, _:
                found.append(f"{which} diverged: allow lower learning rates or warmup_ratio above 0.")
            case TrialState.TIMEOUT, _:
                found.append(f"{which} showed no progress within launch.timeout_s: raise it.")
            case TrialState.FAILED, _:
                last = next(record for record in reversed(records) if record.state is state)
                text = last.failure.text.strip().partition("\n")[0] if last.failure else "the reason is not known"
                found.append(f"{which} failed. Trial {last.trial}: {text.rstrip('.')}; its log says more.")
            case TrialState.PRUNED, StopReason.TARGET:
                they = "it" if count == 1 else "they"
                found.append(
                    f"{which} ended early, the target out of reach. How close {they} would have come is not known: "
                    "search.pruning.audit runs a share of such trials to their end."
                )
            case TrialState.PRUNED, StopReason.BUDGET:
                found.append(f"{which} ended early because the budget was used up: raise it.")
    return found


def _smaller(data: StudyData) -> str:
    """What takes less memory and that the space does not allow yet."""
    space = data.config.search.space
    ranks = data.config.launch.world_size if isinstance(data.config.launch, LocalLaunch) else 1
    wanted = ["smaller values of micro_batch_size_per_gpu"]
    if ranks > 1 and isinstance(space.zero_stage, Fixed) and space.zero_stage.value != 3:
        wanted.append("zero_stage 3")
    if isinstance(space.offload, Fixed) and space.offload.value == "none":
        wanted.append("offload")
    if space.gradient_checkpointing is None:
        wanted.append("gradient_checkpointing")
    return f"allow {' or '.join(wanted)}, or take a shorter workload.sequence_length or a smaller model"


def _nll(nats: float) -> str:
    """Three significant digits."""
    return f"{nats:.3g} nats a token"
