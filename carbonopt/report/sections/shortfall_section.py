"""Caveats where no trial met the target: what was missing, and what could be changed."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from carbonopt.analysis.recommend import Closest
from carbonopt.analysis.shortfall import Shortfall
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import refutation_text
from carbonopt.spec.space_settings import Fixed
from carbonopt.spec.study_data import StudyData

ENDS = {  # caveats on why no trial completed, by state and what stopped it
    (TrialState.DIVERGED, None): "diverged",
    (TrialState.TIMEOUT, None): "timeout",
    (TrialState.PRUNED, StopReason.TARGET): "all_pruned",
    (TrialState.PRUNED, StopReason.BUDGET): "budget_used_up",
}


def caveats(study: StudyView) -> Iterator[Caveat]:
    rec = study.recommendation
    if rec.met:
        return
    any_failed = any(rejected.failed_replicate for rejected in rec.rejected)
    if rec.rejected:
        yield _of_the_rejected(study)
    if rec.closest is not None:
        trial, value, target = rec.closest.trial, rec.closest.value, rec.target.value
        worse = study.quality.worse_by(value, target)
        if rec.target.is_met_by(value):
            yield _of_one_that_meets(study, rec.closest)
        elif math.isfinite(worse):
            key = "target_missed_by_others" if any_failed else "target_missed"
            yield study.caveat(key, trial=trial, worse=worse)
        else:
            yield study.caveat("target_of_0_missed", trial=trial, value=value, target=target)
    if any_failed:  # what the closest trial lacks says nothing about why the repeats failed
        return
    if rec.shortfall is not None:
        yield from _of_the_closest(study, rec.shortfall)
    elif rec.closest is None or rec.closest.state is not TrialState.COMPLETE:
        yield from _of_the_states(study)


def _of_the_rejected(study: StudyView) -> Caveat:
    """Return the caveat on configurations that met the target once, and what refuted that."""
    rec = study.recommendation
    trials = sorted(rejected.trial for rejected in rec.rejected)
    numbers: dict[str, Any] = {"trials": trials, "how": refutation_text(study)}
    states = {run.state for run in study.data.records if run.trial in rec.failed_replicates}
    if not states:
        return study.caveat("met_once", **numbers)
    advice = "see the logs of the repeats"
    if TrialState.DIVERGED in states:
        advice = _steadier(study.data)
    elif TrialState.INFEASIBLE in states:
        advice = _smaller(study.data)
    return study.caveat(
        "met_once_repeats_failed", repeats=list(rec.failed_replicates), advice=advice, **numbers
    )


def _of_one_that_meets(study: StudyView, closest: Closest) -> Caveat:
    """Say whether a trial that is as good as the target is still to end, or failed to."""
    record = study.record(closest.trial)
    assert record is not None
    steps = "–" if record.steps_done is None else f"{record.steps_done:,}"
    place = f"step {steps}"
    if record.total_steps is not None:
        place += f" of {record.total_steps:,}"
    if closest.interrupted:
        config = study.data.config
        goes_on = "begins again"
        if config.checkpoint is not None or config.is_script:  # which may save itself
            goes_on = "goes on from its last checkpoint, or begins again if it has none,"
        return study.caveat("closest_interrupted", trial=record.trial, place=place, goes_on=goes_on)
    if record.state is TrialState.RUNNING:
        return study.caveat("closest_running", trial=record.trial, place=place)
    return study.caveat("closest_not_complete", trial=record.trial)


def _of_the_closest(study: StudyView, missing: Shortfall) -> Iterator[Caveat]:
    trend, loss = missing.trend, missing.missing_loss
    shows = trend is not None and (trend.rises or trend.falls or missing.most_epochs is not None)
    if trend is not None and shows:
        fell = {"fell": trend.fell_by_loss, "steps": trend.steps, "missing": loss}
        if missing.most_epochs is not None:
            yield study.caveat("more_epochs", epochs=missing.most_epochs, **fell)
        elif trend.rises:
            seen = {
                "quality": study.quality.name,
                "best": trend.best_value,
                "step": trend.best_at_step,
            }
            advice = _allow(
                study.data, epochs="fewer epochs", learning_rate="a lower learning rate"
            )
            seen["advice"] = advice or "train for fewer steps"
            yield study.caveat("loss_rose", rose=-trend.fell_by_loss, steps=trend.steps, **seen)
        else:
            has_more = "raise the budget, because the space has more epochs than these"
            advice = (
                "train for more steps"
                if study.data.config.search.space["epochs"] is None
                else has_more
            )
            yield study.caveat("loss_still_fell", **fell, advice=advice)
    for edge in missing.edges:
        yield study.caveat(
            "edge", **edge.model_dump(), wanted="higher" if edge.end == "highest" else "lower"
        )
    if not shows and not missing.edges:
        if missing.epochs_at_most is not None:
            yield study.caveat("no_more_epochs", epochs=missing.epochs_at_most, missing=loss)
        else:
            yield study.caveat("no_direction", missing=loss)


def _of_the_states(study: StudyView) -> Iterator[Caveat]:
    """Yield caveats on why no trial completed, and what to change.

    The most frequent reason comes first.
    """
    records = [
        record for record in study.data.records if record.stop_reason is not StopReason.INTERRUPTED
    ]
    for (state, reason), count in Counter(
        (row.state, row.stop_reason) for row in records
    ).most_common():
        counts: dict[str, Any] = {"count": count, "of": len(records)}
        if state is TrialState.INFEASIBLE:
            yield study.caveat("out_of_memory", **counts, advice=_smaller(study.data))
        elif state is TrialState.FAILED:
            last = next(record for record in reversed(records) if record.state is state)
            text = last.failure.sentence if last.failure else "the reason is not known"
            yield study.caveat("failed", **counts, trial=last.trial, text=text)
        elif key := ENDS.get((state, reason if state is TrialState.PRUNED else None)):
            counts |= {"advice": _steadier(study.data)} if state is TrialState.DIVERGED else {}
            yield study.caveat(key, **counts)


def _allow(data: StudyData, **changes: str) -> str:
    """Advise those changes whose dimension the space has.

    The text is empty where it has none of them.
    """
    found = [
        change for name, change in changes.items() if data.config.search.space[name] is not None
    ]
    return f"allow {' or '.join(found)}" if found else ""


def _steadier(data: StudyData) -> str:
    """Advise changes that make a training less likely to diverge."""
    if not data.config.is_script:
        return "allow lower learning rates or warmup_ratio above 0"
    lower = _allow(data, learning_rate="lower learning rates", warmup_ratio="a longer warm-up")
    return lower or "see their logs for what the script computed"


def _smaller(data: StudyData) -> str:
    """Advise changes that take less memory and that the space does not allow yet."""
    space = data.config.search.space
    if data.config.is_script:
        return "allow smaller batches, or a smaller model"
    changes = ["smaller values of micro_batch_size_per_gpu"]
    sharded = any(record.params.world_size > 1 for record in data.records)
    if sharded and isinstance(stage := space["zero_stage"], Fixed) and stage.value != 3:
        changes.append("zero_stage 3")
    if isinstance(offload := space["offload"], Fixed) and offload.value == "none":
        changes.append("offload")
    if space.gradient_checkpointing is None:
        changes.append("gradient_checkpointing")
    return (
        f"allow {' or '.join(changes)}, or take a shorter workload.sequence_length or a smaller"
        " model"
    )
