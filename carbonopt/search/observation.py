"""What a trial has taught so far, ended, stopped or running; of carbonopt's studies, or anybody's Optuna study."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import Field, ValidationError

from carbonopt.core.dimensions import LR_SCHEDULERS, TrainingParams
from carbonopt.core.quality import Quality
from carbonopt.core.trial import EvalPoint, Kernels, StopReason, TrialRecord, TrialState
from carbonopt.core.values import Finite, Frozen

Values = Mapping[str, Any]  # of a configuration, by its dimensions' names

# User attributes of a trial in a study that is not carbonopt's. Only `values` of complete trials are needed; with
# these, stopped and running trials teach as well.
CURVE = "curve"  # [[optimizer step, sum ÷ count of the quality], ...]: mean NLL in nats, accuracy; NaN: it diverged
TOTAL_STEPS = "total_steps"
COST_PER_STEP = "cost_per_step"  # in the unit of the first objective
PEAK_MEMORY_GIB = "peak_memory_gib"
OUT_OF_MEMORY = "out_of_memory"

UNTOLD_EXAMPLES = 1000

# What the models look into, and what stands in for it where it is missing.
NEEDED = {
    **{"global_batch_size": 1, "learning_rate": 1.0, "epochs": 1, "lr_scheduler": None, "warmup_ratio": None},
    **{"world_size": 1, "learning_rate_scaling": None},
}


class _Told(Frozen):
    """These attributes of a trial."""

    curve: tuple[tuple[Finite, float], ...] = ()
    total_steps: int | None = Field(default=None, gt=0, le=10**18)
    cost_per_step: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    peak_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    out_of_memory: bool = False

    @classmethod
    def of(cls, trial: FrozenTrial) -> "_Told":
        told = {name: value for name, value in trial.user_attrs.items() if name in cls.model_fields}
        try:
            return cls.model_validate(told)
        except ValidationError as error:
            name, why = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"]
            which = f"trial {trial.number}: carbonopt's sampler can't use the user attribute {name}"
            refused = f"{which}, {str(told[name])[:80]!r}: {why}; set another value, or rename it."
            raise ValueError(refused) from error


@dataclass(frozen=True)
class Observation:
    """One trial. Costs are in the study's own unit: kWh of training in carbonopt's, else the first objective's."""

    number: int
    params: Values
    curve: tuple[tuple[float, float], ...]  # share of all steps, loss (see `Quality`); rising shares
    total_steps: int | None
    cost_per_step: float | None = None
    cost: float | None = None  # of the training of a complete trial
    overhead_cost: float | None = None  # spent beside the training: set-up, evaluations
    complete: bool = False
    out_of_memory: bool = False
    diverged: bool = False  # its loss was no finite number any more
    first_cost: float | None = None  # of the first step, beyond a mean one; None: `cost_per_step` has it in it
    kernels: Kernels | None = None  # of that step
    probe: bool = False
    broken: bool = False  # a probe that failed, as a trial of these settings would
    peak_memory_gib: float | None = None
    wait_fraction: float = 0.0  # share of the time in which other work had its cores, by which its costs are less sure
    examples: float = math.inf  # in an evaluation, where the loss is a share of errors (`Quality.is_share`)

    @property
    def final_loss(self) -> float | None:
        return self.curve[-1][1] if self.complete and self.curve and not self.diverged else None


def observe(
    trial: FrozenTrial, quality: Quality, with_fixed: Callable[[dict[str, Any]], Values] = dict
) -> Observation | None:
    """What a trial has taught; None for one that has not begun. Raises ValueError if what it was told can't be.

    Args:
        with_fixed: adds what is fixed to the values of a trial that is not carbonopt's.
    """
    record = trial.user_attrs.get("record")
    if isinstance(record, dict) and record.keys() >= {"trial", "state", "params", "evals"}:
        return of_record(TrialRecord.from_json(record))
    if trial.state == OptunaState.WAITING:
        return None
    told = _Told.of(trial)
    total = told.total_steps
    _check_steps(trial.number, [step for step, _ in told.curve], total)
    curve = [(step / total, quality.loss(mean)) for step, mean in told.curve] if total else []
    if fault := next(filter(None, (quality.beyond(quality.value(mean, 1)) for _, mean in told.curve)), None):
        raise ValueError(f"trial {trial.number}: {quality.name} in its user attribute {CURVE} {fault}.")
    complete = trial.state == OptunaState.COMPLETE
    cost, per_step = None, told.cost_per_step
    end = told.curve[-1][1] if told.curve else 0.0
    if complete:
        if len(trial.values) != 2:
            raise ValueError(f"trial {trial.number} must have a cost and a {quality.name}, but has {trial.values}.")
        cost, value = trial.values
        if not cost > 0 or quality.beyond(value) or math.isnan(value):
            told_both = f"trial {trial.number} has {cost:g} and {value:g}; tell a trial that has none as failed"
            raise ValueError(f"cost must be above 0 and {quality.name} {quality.bounds_text}, but {told_both}.")
        cost = cost if math.isfinite(cost) else None
        # What was told as the trial's value is its end, whatever stands in the curve.
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
        out_of_memory=told.out_of_memory,
        diverged=not math.isfinite(end),
        peak_memory_gib=told.peak_memory_gib,
    )


def _check_steps(number: int, steps: Sequence[float], total: int | None) -> None:
    which = f"trial {number}: the steps of its user attribute {CURVE} must"
    for before, step in itertools.pairwise(steps):
        if step <= before:
            raise ValueError(f"{which} rise, but {before:g} is followed by {step:g}.")
    if total is not None and steps and steps[-1] > total:
        raise ValueError(f"{which} be at most its {TOTAL_STEPS}, {total}, but the last is {steps[-1]:g}.")


def of_record(record: TrialRecord) -> Observation:
    """What a trial of carbonopt's has taught."""
    quality, total, energy = record.quality.of, record.total_steps, record.energy_kwh
    measured = [(point.train_energy_kwh, point.step) for point in record.evals if point.train_energy_kwh]
    if not measured and energy and energy.train and record.steps_done:
        measured = [(energy.train, record.steps_done)]
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
    )


def of_evaluations(
    number: int, params: Values, evals: Sequence[EvalPoint], total_steps: int, quality: Quality
) -> Observation:
    """What a running trial has taught."""
    energy_kwh, step = evals[-1].train_energy_kwh, evals[-1].step
    return Observation(
        number,
        params,
        _finite([(point.step / total_steps, point.loss(quality)) for point in evals]),
        total_steps,
        cost_per_step=energy_kwh / step if energy_kwh else None,
        examples=examples(evals[-1], quality),
    )


def of_probe(record: TrialRecord) -> Observation | None:
    """What a probe has taught, which has no curve and no cost of a whole training; None for one that runs, or was ended
    before it had measured: that says nothing, and is made again."""
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
    """That a share of errors is of; infinite where the loss is none. A script that reports a share alone has counted
    it over some: taken for UNTOLD_EXAMPLES."""
    if not quality.is_share:
        return math.inf
    return point.count if point.count > 1 else UNTOLD_EXAMPLES


def trial_params(values: Values) -> TrainingParams:
    """The configuration as far as the models look into it."""
    known = {name: values.get(name, default) for name, default in NEEDED.items()}
    if known["lr_scheduler"] not in LR_SCHEDULERS:  # of another library: taken for one that falls linearly
        known["lr_scheduler"] = None
    return _trial_params(*known.values(), values.get("micro_batch_size_per_gpu", known["global_batch_size"]))


@lru_cache(maxsize=8192)
def _trial_params(*values: Any) -> TrainingParams:
    return TrainingParams(**dict(zip((*NEEDED, "micro_batch_size_per_gpu"), values, strict=True)))


def _finite(curve: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Its finite losses; what was before the first step tells nothing about the steps."""
    return tuple((share, loss) for share, loss in curve if math.isfinite(loss) and share > 0)
