"""Observations of trials: the form in which the models see a finished, stopped or running trial.

The trials are those of carbonopt's studies, or of any Optuna study.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import Field, ValidationError

from carbonopt.core.dimensions import LR_SCHEDULERS, TrainingParams
from carbonopt.core.evaluations import EvalPoint, breakdown
from carbonopt.core.quality import Quality
from carbonopt.core.trial import Kernels, Stage, StopReason, TrialRecord, TrialState
from carbonopt.core.values import Finite, Frozen

AnyValues = Mapping[str, Any]  # a configuration's values, by its dimensions' names

# Names of user attributes, see `_UserAttributes`.
CURVE = "curve"
TOTAL_STEPS = "total_steps"
COST_PER_STEP = "cost_per_step"

UNTOLD_EXAMPLES = 1000
_MOST_POINTS = 128  # points kept of one curve; the recorded searches have at most 102

# The dimensions whose meaning the models need, to compute learning rates and numbers of steps, each
# with the value that stands in where a configuration lacks it.
NEEDED = {
    **{
        "global_batch_size": 1,
        "learning_rate": 1.0,
        "epochs": 1,
        "lr_scheduler": None,
        "warmup_ratio": None,
        "decay_ratio": None,
    },
    **{"world_size": 1, "learning_rate_scaling": None},
}


class _UserAttributes(Frozen):
    """The user attributes from which a trial that is not carbonopt's is observed.

    Only `values` of complete trials are needed. With these attributes, stopped and running trials
    are observed as well.
    """

    # (optimizer step, sum ÷ count of the quality): mean NLL in nats, accuracy; NaN if it diverged
    curve: tuple[tuple[Finite, float], ...] = ()
    total_steps: int | None = Field(default=None, gt=0, le=10**18)
    # in the unit of the first objective
    cost_per_step: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    peak_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    out_of_memory: bool = False

    @classmethod
    def of(cls, trial: FrozenTrial) -> "_UserAttributes":
        attributes = {
            name: value for name, value in trial.user_attrs.items() if name in cls.model_fields
        }
        try:
            return cls.model_validate(attributes)
        except ValidationError as error:
            name, why = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"]
            which = f"trial {trial.number}: carbonopt's sampler can't use the user attribute {name}"
            refused = (
                f"{which}, {str(attributes[name])[:80]!r}: {why}; set another value, or rename it."
            )
            raise ValueError(refused) from error


@dataclass(frozen=True)
class Observation:
    """The observation of one trial.

    Costs are in the study's own unit: kWh of training in carbonopt's studies, else that of the
    first objective.
    """

    number: int
    params: AnyValues
    # share of all steps, loss (see `Quality`); shares rise
    curve: tuple[tuple[float, float], ...]
    total_steps: int | None
    cost_per_step: float | None = None
    cost: float | None = None  # cost of the training of a complete trial
    overhead_cost: float | None = None  # cost beside the training: set-up, evaluations
    complete: bool = False
    out_of_memory: bool = False
    diverged: bool = False  # its loss stopped being a finite number
    # cost of the first step beyond that of a mean one; None: `cost_per_step` includes it
    first_cost: float | None = None
    kernels: Kernels | None = None  # kernels of the first step
    probe: bool = False
    broken: bool = False  # a probe that failed, as a trial with these settings would
    peak_memory_gib: float | None = None
    # share of the time in which other work used its cores, which makes its costs less certain
    wait_fraction: float = 0.0
    # examples of an evaluation, if the loss is a share of errors (`Quality.is_share`)
    examples: float = math.inf
    stopped_for_target: bool = False  # stopped because it was going to miss the target
    # a script's training whose steps were not announced, or other ones: it may have stopped by
    # itself, so that what affects the quality alone may affect its cost, too
    may_stop_itself: bool = False

    @cached_property
    def broke_down_at(self) -> int | None:
        """The place in `curve` from which on its training has broken down; None: it has not."""
        return breakdown([loss for _, loss in self.curve])

    @property
    def final_loss(self) -> float | None:
        return self.curve[-1][1] if self.complete and self.curve and not self.diverged else None

    def meets(self, target_loss: float) -> bool | None:
        """Return whether its quality reached the target, or None if it ended before that was known.

        A training that diverged, or was stopped because it was going to miss the target, did not.
        """
        if self.diverged or self.stopped_for_target:
            return False
        end = self.final_loss
        return None if end is None else end <= target_loss


def observe(
    trial: FrozenTrial, quality: Quality, with_fixed: Callable[[dict[str, Any]], AnyValues] = dict
) -> Observation | None:
    """Return the observation of a trial; None for one that has not begun.

    Args:
        with_fixed: adds what is fixed to the values of a trial that is not carbonopt's.

    Raises:
        ValueError: if the trial's values or user attributes are impossible.
    """
    record = trial.user_attrs.get("record")
    if isinstance(record, dict) and record.keys() >= {"trial", "state", "params", "evals"}:
        return of_record(TrialRecord.from_json(record))
    if trial.state == OptunaState.WAITING:
        return None
    attributes = _UserAttributes.of(trial)
    total = attributes.total_steps
    _check_steps(trial.number, [step for step, _ in attributes.curve], total)
    curve = [(step / total, quality.loss(mean)) for step, mean in attributes.curve] if total else []
    if problem := next(
        filter(None, (quality.beyond(quality.value(mean, 1)) for _, mean in attributes.curve)), None
    ):
        raise ValueError(
            f"trial {trial.number}: {quality.name} in its user attribute {CURVE} {problem}."
        )
    complete = trial.state == OptunaState.COMPLETE
    cost, per_step = None, attributes.cost_per_step
    end = attributes.curve[-1][1] if attributes.curve else 0.0
    if complete:
        cost, value = _checked_values(trial, quality)
        cost = cost if math.isfinite(cost) else None
        # The trial's value is its end, whatever the curve says.
        end = quality.loss_of(value)
        curve = [*(point for point in curve if point[0] < 1), (1.0, end)]
    if per_step is None and cost is not None and total:
        per_step = cost / total
    return Observation(
        trial.number,
        {**trial.params, **with_fixed(dict(trial.params))},
        _finite(curve),
        total,
        cost_per_step=per_step,
        cost=cost,
        complete=complete,
        out_of_memory=attributes.out_of_memory,
        diverged=not math.isfinite(end),
        peak_memory_gib=attributes.peak_memory_gib,
    )


def _checked_values(trial: FrozenTrial, quality: Quality) -> tuple[float, float]:
    """Return the cost and the quality of a complete trial.

    Raises:
        ValueError: if it lacks one of them, or they are impossible.
    """
    if len(trial.values) != 2:
        raise ValueError(
            f"trial {trial.number} must have a cost and a {quality.name}, but has {trial.values}."
        )
    cost, value = trial.values
    if not cost > 0 or quality.beyond(value) or math.isnan(value):
        raise ValueError(
            f"cost must be above 0 and {quality.name} {quality.bounds_text}, but trial"
            f" {trial.number} has {cost:g} and {value:g}; tell a trial that has none as failed."
        )
    return cost, value


def _check_steps(number: int, steps: Sequence[float], total: int | None) -> None:
    which = f"trial {number}: the steps of its user attribute {CURVE} must"
    for before, step in itertools.pairwise(steps):
        if step <= before:
            raise ValueError(f"{which} rise, but {before:g} is followed by {step:g}.")
    if total is not None and steps and steps[-1] > total:
        raise ValueError(
            f"{which} be at most its {TOTAL_STEPS}, {total}, but the last is {steps[-1]:g}."
        )


def of_record(record: TrialRecord) -> Observation:
    """Return the observation of a trial of carbonopt's."""
    quality, total, energy = record.quality.of, record.total_steps, record.energy_kwh
    measured = [
        (point.train_energy_kwh, point.step)
        for point in record.evals
        if point.train_energy_kwh and point.step
    ]
    training = record.reported_training
    if not measured and training and training.energy_kwh and record.steps_done:
        measured = [(training.energy_kwh, record.steps_done)]
    complete = record.state == TrialState.COMPLETE
    ended = record.state != TrialState.RUNNING
    per_step = measured[-1][0] / measured[-1][1] if measured else None
    return Observation(
        record.trial,
        record.params.model_dump(exclude_none=True),
        _finite([(point.step / total, point.loss(quality)) for point in record.evals if total]),
        total,
        cost_per_step=record.step_kwh or per_step,
        wait_fraction=record.cpu_wait_fraction or 0.0,
        first_cost=record.first_step_excess_kwh if record.step_kwh else None,
        kernels=record.kernels,
        cost=energy.train if complete and energy else None,
        overhead_cost=energy.total - energy.train if ended and energy else None,
        complete=complete,
        out_of_memory=record.state == TrialState.INFEASIBLE,
        diverged=record.state == TrialState.DIVERGED,
        peak_memory_gib=record.peak_memory_gib,
        examples=examples(record.evals[-1], quality) if record.evals else math.inf,
        stopped_for_target=record.stop_reason is StopReason.TARGET,
        # A script without carbonopt's lines has the stage of its steps alone.
        may_stop_itself=complete
        and (record.planned_steps is not None or set(record.stages or ()) == {Stage.STEPS}),
    )


def of_evaluations(
    number: int, params: AnyValues, evals: Sequence[EvalPoint], total_steps: int, quality: Quality
) -> Observation:
    """Return the observation of a running trial.

    A step costs the mean of those between its first evaluation and its last: what the first step
    took beyond that, to compile and to warm up, the remaining ones won't take.
    """
    measured = [
        (point.step, point.train_energy_kwh)
        for point in evals
        if point.step and point.train_energy_kwh
    ]
    per_step, first_cost = None, None
    if measured:
        (first_step, before_kwh), (step, energy_kwh) = measured[0], measured[-1]
        per_step = energy_kwh / step
        if step > first_step:
            per_step = (energy_kwh - before_kwh) / (step - first_step)
            first_cost = energy_kwh - per_step * step
    return Observation(
        number,
        params,
        _finite([(point.step / total_steps, point.loss(quality)) for point in evals]),
        total_steps,
        cost_per_step=per_step,
        first_cost=first_cost,
        examples=examples(evals[-1], quality),
    )


def of_probe(record: TrialRecord) -> Observation | None:
    """Return the observation of a probe, which has no curve and no cost of a whole training.

    The result is None for a probe that runs, or that was ended before it had measured: such a probe
    says nothing, and is made again.
    """
    if record.state is TrialState.RUNNING or record.stop_reason not in (StopReason.PROBE, None):
        return None
    failed = record.state is not TrialState.INFEASIBLE and record.stop_reason is None
    return dataclasses.replace(
        of_record(record),
        cost_per_step=record.step_kwh,
        first_cost=record.first_step_excess_kwh,
        overhead_cost=None,
        probe=True,
        broken=failed,
    )


def examples(point: EvalPoint, quality: Quality) -> float:
    """Return the number of examples that a share of errors refers to; infinite for other losses.

    UNTOLD_EXAMPLES stands for an unknown number: that of a script that reports only a share, or of
    a mean over classes.
    """
    if not quality.is_share:
        return math.inf
    is_known = quality.is_share_of_examples and point.count > 1
    return point.count if is_known else UNTOLD_EXAMPLES


def trial_params(values: AnyValues) -> TrainingParams:
    """Return the part of a configuration whose meaning the models need (`NEEDED`)."""
    known = {name: values.get(name, default) for name, default in NEEDED.items()}
    # A scheduler of another library is taken for one that falls linearly.
    if known["lr_scheduler"] not in LR_SCHEDULERS:
        known["lr_scheduler"] = None
    return _trial_params(
        *known.values(), values.get("micro_batch_size_per_gpu", known["global_batch_size"])
    )


@lru_cache(maxsize=8192)
def _trial_params(*values: Any) -> TrainingParams:
    return TrainingParams(**dict(zip((*NEEDED, "micro_batch_size_per_gpu"), values, strict=True)))


def _finite(curve: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the finite losses of a curve, thinned to a limited number.

    The models' time grows with the cube of that number. The last loss is kept. A loss before the
    first step is left out, since it says nothing about the steps.
    """
    finite = [(share, loss) for share, loss in curve if math.isfinite(loss) and share > 0]
    kept = min(len(finite), _MOST_POINTS)
    return tuple(finite[len(finite) * (place + 1) // kept - 1] for place in range(kept))
