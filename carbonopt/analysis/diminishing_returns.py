"""Diminishing returns inside one run: what each further gram bought, and where stopping would have been enough."""

from collections.abc import Iterator

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import DEFAULT_LR_SCHEDULER, rate_decays
from carbonopt.core.quality import Target
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen

ENOUGH = 0.01  # an evaluation that is worse than the best by this share is as good for most ends


class Milestone(Frozen):
    """One evaluation of the run."""

    step: int
    share: float  # of all its steps
    energy_kwh: float  # of the training window up to here
    emissions_kg_co2e: float  # likewise, PUE in
    value: float  # of the quality
    # How much better it got since the evaluation before, per kg CO2e. None: the first one, or nothing was emitted.
    gained_per_kg_co2e: float | None


class DiminishingReturns(Frozen):
    trial: int  # the recommended one, else the closest, if it completed
    total_steps: int
    points: tuple[Milestone, ...]  # by step; only evaluations of known energy and finite value
    best: Milestone
    enough: Milestone  # the first within ENOUGH of the best
    saved_fraction: float  # of the run's emissions, had it been stopped there
    first_meeting: Milestone | None  # the first that meets the target
    rate_decays: bool  # the learning rate falls over the run: a run planned to be that short would end lower


def diminishing_returns(data: StudyData, rec: Recommendation) -> DiminishingReturns | None:
    """Looks into the recommended trial, else into the closest one if it completed. Of a configuration that was repeated
    it is the search's own trial.

    None: there is no such trial, its energy by step is not known, or no energy was used.
    """
    trial = rec.trial if rec.trial is not None else rec.closest.trial if rec.closest else None
    record = next((record for record in data.records if record.trial == trial), None)
    if record is None or record.state is not TrialState.COMPLETE or record.energy_kwh is None:
        return None
    total_steps = record.total_steps or (record.evals[-1].step if record.evals else 0)
    points = tuple(_milestones(data, record, total_steps))
    if not points or not record.energy_kwh.train > 0:
        return None
    quality = rec.target.quality
    best = min(points, key=lambda point: quality.rank(point.value))
    as_good = Target(quality, quality.relaxed(best.value, ENOUGH))
    enough = next(point for point in points if as_good.is_met_by(point.value))
    given = data.config.workload.training_arguments if data.config.workload else {}
    scheduler = record.params.lr_scheduler or given.get("lr_scheduler_type", DEFAULT_LR_SCHEDULER)
    warmup = record.params.warmup_ratio or given.get("warmup_ratio") or given.get("warmup_steps") or 0.0
    return DiminishingReturns(
        trial=record.trial,
        total_steps=total_steps,
        points=points,
        best=best,
        enough=enough,
        saved_fraction=0.0 if enough.step >= total_steps else 1 - enough.energy_kwh / record.energy_kwh.train,
        first_meeting=next((point for point in points if rec.target.is_met_by(point.value)), None),
        rate_decays=rate_decays(scheduler, warmup),
    )


def _milestones(data: StudyData, record: TrialRecord, total_steps: int) -> Iterator[Milestone]:
    rank, before = record.quality.of.rank, None
    for point in record.evals:
        if point.train_energy_kwh is None or point.value is None:
            continue
        emissions_kg = data.emissions_kg_co2e(point.train_energy_kwh)
        spent_kg = emissions_kg - before.emissions_kg_co2e if before else 0.0
        before = Milestone(
            step=point.step,
            share=point.step / total_steps,
            energy_kwh=point.train_energy_kwh,
            emissions_kg_co2e=emissions_kg,
            value=point.value,
            gained_per_kg_co2e=(rank(before.value) - rank(point.value)) / spent_kg if before and spent_kg > 0 else None,
        )
        yield before
