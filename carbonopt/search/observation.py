"""What a trial has taught so far, whether it ended, was stopped or still runs; from a study of carbonopt's, or from
anybody's Optuna study."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import Field, ValidationError

from carbonopt.core.dimensions import LR_SCHEDULERS, TrialParams
from carbonopt.core.quality import Quality
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.core.values import Frozen

# User attributes of a trial in a study that is not carbonopt's. Only `values` of complete trials are needed; with
# these, stopped and running trials teach as well.
CURVE = "curve"  # [[optimizer step, sum ÷ count of the quality], ...]: mean NLL in nats, accuracy; NaN: it diverged
TOTAL_STEPS = "total_steps"
COST_PER_STEP = "cost_per_step"  # in the unit of the first objective
PEAK_MEMORY_GIB = "peak_memory_gib"
OUT_OF_MEMORY = "out_of_memory"

_MODELLED = (
    "global_batch_size",
    "micro_batch_size_per_gpu",
    "learning_rate",
    "epochs",
    "lr_scheduler",
    "warmup_ratio",
)


class _Told(Frozen):
    """These attributes of a trial."""

    curve: tuple[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], float], ...] = ()
    total_steps: int | None = Field(default=None, gt=0)
    cost_per_step: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    peak_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    out_of_memory: bool = False

    @classmethod
    def of(cls, trial: FrozenTrial) -> "_Told":
        """
        Raises:
            ValueError: if an attribute is not what its name says.
        """
        found = {name: trial.user_attrs[name] for name in cls.model_fields if name in trial.user_attrs}
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ValueError(
                f"trial {trial.number}: carbonopt's sampler can't use the user attribute {name}, "
                f"{str(found[name])[:80]!r}: {first['msg']}; set another value, or rename it."
            ) from error


@dataclass(frozen=True)
class Observation:
    """One trial. Costs are in the study's own unit: kWh of training in carbonopt's, else the first objective's."""

    number: int
    params: Mapping[str, Any]
    curve: tuple[tuple[float, float], ...]  # share of all steps, loss (see `Quality`); rising shares
    total_steps: int | None
    cost_per_step: float | None = None
    cost: float | None = None  # of the training of a complete trial
    overhead_cost: float | None = None  # spent beside the training: set-up, evaluations
    complete: bool = False
    out_of_memory: bool = False
    peak_memory_gib: float | None = None
    examples: float = math.inf  # in an evaluation, where the loss is a share of errors (`Quality.is_share`)

    @property
    def final_loss(self) -> float | None:
        return self.curve[-1][1] if self.complete and self.curve else None


def observe(trial: FrozenTrial, quality: Quality) -> Observation | None:
    """What a trial has taught; None for one that has not begun.

    Raises:
        ValueError: if what it was told can't be.
    """
    record = trial.user_attrs.get("record")
    if isinstance(record, dict) and record.keys() >= {"trial", "state", "params"}:
        return of_record(TrialRecord.from_json(record))
    if trial.state == OptunaState.WAITING:
        return None
    told = _Told.of(trial)
    total = told.total_steps
    curve = tuple((step / total, quality.loss(mean)) for step, mean in told.curve) if total else ()
    complete = trial.state == OptunaState.COMPLETE
    cost = None
    if complete:
        cost, value = trial.values
        if not cost > 0 or quality.beyond(value) or math.isnan(value):
            raise ValueError(
                f"cost must be above 0 and {quality.name} {quality.bounds_text}, but trial {trial.number} has {cost:g} "
                f"and {value:g}; tell a trial that has none as failed."
            )
        cost = cost if math.isfinite(cost) else None
        # What was told as the trial's value is its end, whatever stands in the curve.
        curve = (*(point for point in curve if point[0] < 1), (1.0, quality.loss_of(value)))
    per_step = told.cost_per_step
    if per_step is None and cost is not None and total:
        per_step = cost / total
    return Observation(
        number=trial.number,
        params=dict(trial.params),
        curve=_finite(curve),
        total_steps=total,
        cost_per_step=per_step,
        cost=cost,
        complete=complete,
        out_of_memory=told.out_of_memory,
        peak_memory_gib=told.peak_memory_gib,
    )


def of_record(record: TrialRecord) -> Observation:
    """What a trial of carbonopt's has taught."""
    quality = record.quality.of
    total, energy = record.total_steps, record.energy_kwh
    measured = [(point.train_energy_kwh, point.step) for point in record.evals if point.train_energy_kwh]
    per_step = None
    if measured:
        per_step = measured[-1][0] / measured[-1][1]
    elif energy is not None and energy.train and record.steps_done:
        per_step = energy.train / record.steps_done
    curve = [(point.step / total, point.loss(quality)) for point in record.evals if total]
    complete = record.state == TrialState.COMPLETE
    ended = record.state != TrialState.RUNNING
    return Observation(
        number=record.trial,
        params=record.params.model_dump(exclude_none=True),
        curve=_finite(curve),
        total_steps=total,
        cost_per_step=per_step,
        cost=energy.train if complete and energy else None,
        overhead_cost=energy.total - energy.train if ended and energy else None,
        complete=complete,
        out_of_memory=record.state == TrialState.INFEASIBLE,
        peak_memory_gib=record.peak_memory_gib,
        examples=record.evals[-1].count if record.evals and quality.is_share else math.inf,
    )


def trial_params(values: Mapping[str, Any]) -> TrialParams:
    """The configuration as far as the models look into it."""
    known = {name: values[name] for name in _MODELLED if name in values}
    if known.get("lr_scheduler") not in LR_SCHEDULERS:  # of another library: taken for one that falls linearly
        known.pop("lr_scheduler", None)
    batch = known.setdefault("global_batch_size", 1)
    known.setdefault("micro_batch_size_per_gpu", batch)
    known.setdefault("learning_rate", 1.0)
    known.setdefault("epochs", 1)
    return TrialParams(**known)


def _finite(curve: Any) -> tuple[tuple[float, float], ...]:
    """Its finite losses; what was before the first step tells nothing about the steps."""
    return tuple((share, loss) for share, loss in curve if math.isfinite(loss) and share > 0)
