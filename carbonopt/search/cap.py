"""The cap, and the rule that stops a running trial which passes it, or is projected to.

`study.trial_runner` gives a trial its cap when it begins. The start configuration and repeats have
none, nor has any trial of a study that searches the whole front or has `search.pruning.cap: false`.
`study.trial_watch` asks the rule while the trial runs, until its last step or the step at which it
becomes an audit.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from carbonopt.core.trial import TrialRecord, TrialState

# Before this share of its steps, a trial's cost per step says little about the whole.
PROJECTED_FROM = 0.05
# Nor do steps that took less time than this. The meter's readings are 0.05 s apart, and the first
# seven steps of a trial on two CPU cores, 0.75 s, have once projected 1.7 times or more of what the
# same configuration took elsewhere.
PROJECTED_AFTER_S = 2.0
# Share by which the remaining steps may turn out cheaper than those so far. On an H200 host the
# same configuration's first steps differed by a tenth from run to run; the margin is 2.5 times
# that, because little is known so early.
CHEAPER_REST = 0.25


def cap(records: Iterable[TrialRecord], meeting: Collection[int]) -> float | None:
    """Return the lowest emissions of a trial that meets the target, in kg CO2e; None: none does.

    Args:
        records: all trials so far.
        meeting: numbers of the trials that meet the target, see `TrialPlan.meeting`.
    """
    return min(
        (
            record.emissions_kg_co2e
            for record in records
            if record.trial in meeting and record.emissions_kg_co2e is not None
        ),
        default=None,
    )


def may_stop_early(records: Iterable[TrialRecord]) -> bool:
    """Return whether a complete trial of a script made fewer steps than it had announced.

    Others may stop early, too, so that the steps that they announce say nothing of their cost.
    """
    return any(
        record.state is TrialState.COMPLETE
        and record.planned_steps is not None
        and (record.steps_done or 0) < record.planned_steps
        for record in records
    )


@dataclass
class CostProjection:
    """The energy that a trial's whole training is projected to take.

    It is projected from the steps since the trial's first report: what came before may include
    compilation.
    """

    share: float = 0.0  # these steps ÷ all steps of the trial
    measured_s: float = 0.0  # their duration
    energy_kwh: float = 0.0  # of the whole training
    # step, energy in kWh and seconds at the first report
    _first: tuple[int, float, float] | None = None

    def update(self, step: int, total_steps: int, spent_kwh: float, train_s: float) -> None:
        """Project anew from what the training has used up to a step, and how long it took."""
        self._first = self._first or (step, spent_kwh, train_s)
        first_step, first_kwh, first_s = self._first
        if step > first_step:
            per_step_kwh = (spent_kwh - first_kwh) / (step - first_step)
            self.share = (step - first_step) / total_steps
            self.measured_s = train_s - first_s
            self.energy_kwh = spent_kwh + per_step_kwh * (total_steps - step)


def exceeds_cap(
    cap_kg_co2e: float | None,
    spent_kg_co2e: float,
    share: float = 0.0,
    projected_kg_co2e: float = 0.0,
    *,
    measured_s: float = math.inf,
    contended: bool = False,
) -> bool:
    """Return whether a trial costs too much to become the recommendation, and so is stopped.

    Energy only grows. A trial costs too much if its emissions are above those of the best trial
    that meets the target, or are likely to get there.

    Args:
        cap_kg_co2e: emissions of the best trial that meets the target; None: there is none yet.
        spent_kg_co2e: emissions of its training so far.
        share: the share of the trial's steps that `projected_kg_co2e` is computed from: steps made
            since its first report ÷ all of its steps.
        projected_kg_co2e: emissions at the trial's end, if every step costs what those since its
            first report have cost.
        measured_s: duration of the steps that `projected_kg_co2e` is computed from.
        contended: whether other work uses its cores, too. Nothing is projected then: the first
            steps of one and the same configuration have differed by 60 %, as OpenMP's threads look
            for work until they know of it.
    """
    likely_kg_co2e = (
        projected_kg_co2e * (1 - CHEAPER_REST * (1 - share))
        if share >= PROJECTED_FROM and measured_s >= PROJECTED_AFTER_S and not contended
        else 0.0
    )
    return cap_kg_co2e is not None and max(spent_kg_co2e, likely_kg_co2e) > cap_kg_co2e
