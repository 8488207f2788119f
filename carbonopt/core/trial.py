"""The values that describe a trial, which all packages pass on; they make up the exported record.

They are frozen, and their names have units. `None` means not measured, and 0 means measured as
zero. States, phases and stages are imported from here, too; only the modules that a user's own
script reads take them from `core.states`, which needs no pydantic.
"""

import json
import math
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import Evaluations, KnownEnd, StoredEvaluations, check_evaluations
from carbonopt.core.quality import QUALITIES, Quality, Target, quality_of
from carbonopt.core.states import CPU_CONTENTION_FROM
from carbonopt.core.states import TRIAL_PHASES as TRIAL_PHASES
from carbonopt.core.states import Kernels as Kernels
from carbonopt.core.states import Phase as Phase
from carbonopt.core.states import Stage as Stage
from carbonopt.core.states import StopReason as StopReason
from carbonopt.core.states import TrialState as TrialState
from carbonopt.core.values import Finite, Frozen, Time, Whole

START_TRIAL = 0  # number of the trial that runs the start configuration, if a study has one


class Prediction(Frozen):
    """A trained model's output for one evaluation example.

    Its three texts are cut to a few hundred characters.
    """

    source: str
    expected: str
    predicted: str


class QualityResult(Frozen):
    """The quality that a trial has reached.

    `value`, `sum` and `count` are None where the trial did not complete.
    """

    name: str
    value: float | None = None
    sum: float | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    # only for a quality that carbonopt doesn't know by its name
    direction: Literal["minimize", "maximize"] | None = None

    @model_validator(mode="after")
    def _can_be(self) -> "QualityResult":
        try:
            _ = self.of
        except ValueError as error:
            raise ValueError(f"name {error}") from error
        if problem := self.of.problem(self.value, self.sum, self.count):
            raise ValueError(problem)
        return self

    def known_end(self, total_steps: int | None) -> KnownEnd:
        """Return what a complete trial's last evaluation must be."""
        return KnownEnd(self.value, self.sum, self.count, total_steps)

    @property
    def of(self) -> Quality:
        return quality_of(self.name, self.direction)

    @classmethod
    def named(cls, quality: Quality) -> "QualityResult":
        """Make the result of a trial that has reached nothing yet."""
        return cls(
            name=quality.name, direction=None if quality.name in QUALITIES else quality.direction
        )


COMPONENTS = ("gpu", "cpu", "ram")  # the components whose energy is read


class _ByPhase(Frozen):
    train: Finite
    setup: Finite
    eval: Finite
    total: Finite


class Energy(_ByPhase):
    """Energy in kWh by phase, of the components that the objective counts, without PUE.

    `train_*` split the training window by component, whether these count or not.
    """

    train_gpu: Finite | None = None
    train_cpu: Finite | None = None
    train_ram: Finite | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not math.isclose(parts := self.train + self.setup + self.eval, self.total, rel_tol=1e-6):
            raise ValueError(f"total is {self.total:g}, but its phases add up to {parts:g}")
        return self


class GpuEnergy(Frozen):
    """The energy of one phase of a trial, in kWh, over the GPUs that the trial uses."""

    counter: float  # from the GPUs' own energy counters: the figure that is used
    codecarbon: float  # CodeCarbon's own reading of the same counters in the same windows
    # energy of the same GPUs in as much time when nothing runs, measured when the meter began
    idle: float
    # standard uncertainty of `counter` from the time between the counters' ticks
    uncertainty: float

    @property
    def net_of_idle(self) -> float | None:
        """The energy that the work used beyond what the idle GPUs would have used.

        It is None where the idle energy is larger than the used energy.
        """
        return self.counter - self.idle if 0 <= self.idle <= self.counter else None


class Durations(_ByPhase):
    """Durations in seconds, by phase."""


Measured = Annotated[float, Field(allow_inf_nan=False)]


class StageCost(Frozen):
    """The duration and the energy of a stage.

    A stage that is too short for a reading of its own has a part of the next stage's energy, by
    their times.
    """

    duration_s: Measured = 0.0
    energy_kwh: Measured = 0.0  # energy of the components that the objective counts

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(
            duration_s=self.duration_s + other.duration_s,
            energy_kwh=self.energy_kwh + other.energy_kwh,
        )

    def __sub__(self, part: "StageCost") -> "StageCost":
        return StageCost(
            duration_s=max(0.0, self.duration_s - part.duration_s),
            energy_kwh=max(0.0, self.energy_kwh - part.energy_kwh),
        )


# Seconds between readings of the energy while a trial trains; CodeCarbon measures anew only that
# long after its last measurement.
READINGS_APART_S = 0.05

# Readings in a training; with fewer, one more or less at each end is more than 10 % of its energy.
FEWEST_READINGS = 20

# Two readings of the same counter can differ by a tick of 0.1 s at each end: 2 % of 10 s.
COMPARED_FROM_S = 10.0
LARGEST_DISAGREEMENT = 0.02


class Failure(Frozen):
    kind: str
    text: str  # one sentence, then the log's last lines where they help
    log: str | None = None

    @property
    def sentence(self) -> str:
        """The reason in one sentence, without its full stop."""
        return self.text.strip().partition("\n")[0].rstrip(".")


class Node(Frozen):
    """A machine and its devices that a study uses."""

    name: str  # its host name, as in Slurm
    devices: tuple[str, ...]  # UUIDs of its GPUs, from the driver; or "cpu"


class NodeReadings(Node):
    """The energy that one node used for a trial.

    The readings of all nodes add up to the trial's `energy_kwh`.
    """

    readings: Energy


class Attempt(Frozen):
    """An attempt of a trial that was interrupted, before a later one."""

    started_at: Time
    # Seconds from its beginning to the checkpoint that the trial went on from: work that counts as
    # the trial's own. 0: all of it was done again.
    counted_s: Finite = 0.0

    @property
    def span(self) -> tuple[datetime, datetime]:
        """The span of its work that counts."""
        begin = datetime.fromisoformat(self.started_at)
        return begin, begin + timedelta(seconds=self.counted_s)


class Forecast(Frozen):
    """The predicted end of a trial that was stopped for its target, or would have been."""

    step: Whole  # the step after which the forecast was made
    value: Measured  # the predicted value of the quality
    sds_short: Finite  # by how many of its standard deviations the forecast misses the target
    sds_needed: Finite  # so many standard deviations were required
    # complete trials whose loss fell at least as low as this trial's had by that step; the errors
    # of their own forecasts decided `sds_needed`
    checked_trials: Whole


class QualityLines(Frozen):
    """The lines that a script wrote with several values of its last evaluation."""

    count: Whole
    first: str
    last: str  # the line that counts


class TrialRecord(Frozen):
    """A trial as exported: `carbonopt export --format jsonl` prints one a line."""

    trial: Whole
    state: TrialState
    stop_reason: StopReason | None = None
    attempt: int = Field(default=1, ge=1)
    seed: Whole
    # the trial whose configuration it repeats with another seed; None: a trial of the search
    repeat_of: Whole | None = None
    # whether the confirmation tried it in place of a repeat, beyond budget.trials
    replaces_repeat: bool = False
    params: TrialParams
    quality: QualityResult
    emissions_kg_co2e: Finite | None = None  # emissions of the training window, with PUE
    energy_kwh: Energy | None = None
    duration_s: Durations | None = None
    # the stages add up to both totals above; None: a replay, or not measured
    stages: dict[Stage, StageCost] | None = None
    evals: Evaluations = ()
    # a few of the last evaluation's predictions; empty: the task generates no text
    predictions: tuple[Prediction, ...] = ()
    peak_memory_gib: Finite | None = None  # the rank that needed most
    # peak memory by rank; empty: the trial ended before its first evaluation
    rank_peak_memory_gib: tuple[Finite, ...] = ()
    # where the kernels of its first step came from, by torch's own count; None: it compiles none,
    # or that isn't known
    kernels: Kernels | None = None
    failure: Failure | None = None
    started_at: Time | None = None  # start of the last attempt
    # the attempts before it, in order; a study from before they were noted has none
    earlier_attempts: tuple[Attempt, ...] = ()
    # the worker of a call of `carbonopt run` that ran it, named as in its session; None: not noted
    worker: str | None = None
    nodes: tuple[NodeReadings, ...] = ()  # the nodes where it ran; empty: a replay, or not noted
    # by phase (setup, train and eval); None: no GPU was measured
    gpu_energy_kwh: dict[Phase, GpuEnergy] | None = None
    # CodeCarbon's GPU energy ÷ the counters' − 1, in the window of COMPARED_FROM_S or more in which
    # they differ most.
    gpu_disagreement: Measured | None = None
    # temperature as the training began: mean of the GPUs; None: not known
    gpu_start_temperature_c: Measured | None = None
    # Share of the training in which a kernel ran, by NVML: mean of the GPUs and of readings a
    # second apart.
    gpu_utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    # Share of the training in which threads were ready to run but had no core, for the rank that
    # waited most.
    cpu_wait_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    # energy that interrupted attempts of this trial had used
    earlier_attempts_energy_kwh: Finite = 0.0
    earlier_attempts_gpu_kwh: Finite | None = None  # the GPUs' part of that energy
    # steps after which it went on from a checkpoint; what was done again counts as earlier attempts
    continued_at_steps: tuple[Whole, ...] = ()
    # Steps of a script that were made, but whose energy was lost when the study was killed; None:
    # all were measured.
    unmeasured_steps: Whole | None = None
    total_steps: Whole | None = None  # optimizer steps the whole trial would have
    # files that earlier trials had changed and the script read or may have read
    inherited_files: tuple[str, ...] = ()
    # value that the last step had before a later evaluation of it gave another; None: it had none
    replaced_value: Measured | None = None
    # lines in which a script's quality was found, where they have several values; else None
    quality_lines: QualityLines | None = None
    # seconds in which it did not run, such as on a suspended laptop; no other figure has them
    standstill_s: Finite | None = None
    # steps that a script had announced; None: as many as it made
    planned_steps: Whole | None = None
    steps_done: Whole | None = None  # steps made, as far as the trial has reported
    # Training since the report of `steps_done`, if the trial was stopped before its next report:
    # steps that nobody counted are in it. None: there was none.
    after_reported: StageCost | None = None
    # the step at which an audit would have been stopped for its target
    audited_at_step: Whole | None = None
    # the reason why it was stopped for its target, or would have been
    forecast: Forecast | None = None

    @model_validator(mode="after")
    def _can_be_measured(self) -> "TrialRecord":
        if self.gpu_energy_kwh is not None and self.gpu_energy_kwh.keys() != set(TRIAL_PHASES):
            raise ValueError(f"gpu_energy_kwh must have {', '.join(TRIAL_PHASES)}")
        if not isinstance(self.evals, StoredEvaluations):  # which are checked when they are read
            check_evaluations(self.evals, self.quality.of)
        return self

    @property
    def counts_for_budget(self) -> bool:
        """True if `budget.trials` counts it: no repeat, and nothing tried in place of a repeat."""
        return self.repeat_of is None and not self.replaces_repeat

    @property
    def was_cut_off(self) -> bool:
        """True if it was interrupted, or ended by the budget: a repeat is then to be run again."""
        return self.stop_reason in (StopReason.INTERRUPTED, StopReason.BUDGET)

    @property
    def has_finished(self) -> bool:
        """True if the trial has ended for good; an interrupted one will be run again."""
        runs = self.state is TrialState.RUNNING
        return not runs and self.stop_reason is not StopReason.INTERRUPTED

    @property
    def spent_kwh(self) -> float:
        """The energy of all attempts and phases of the trial, without PUE.

        What was not measured counts as zero.
        """
        return self.earlier_attempts_energy_kwh + (
            self.energy_kwh.total if self.energy_kwh else 0.0
        )

    @property
    def spent_gpu_kwh(self) -> float | None:
        """The GPUs' part of `spent_kwh`; None where it is not known of every attempt."""
        earlier = self.earlier_attempts_gpu_kwh if self.attempt > 1 else 0.0
        if self.gpu_energy_kwh is None or earlier is None:
            return None
        return earlier + sum(phase.counter for phase in self.gpu_energy_kwh.values())

    @property
    def first_started_at(self) -> str | None:
        """The start of the first attempt, as far as known: ISO 8601, UTC."""
        return self.earlier_attempts[0].started_at if self.earlier_attempts else self.started_at

    @property
    def counted_from(self) -> str | None:
        """The start of the first attempt whose work is in `duration_s`: ISO 8601, UTC."""
        counted = (each.started_at for each in self.earlier_attempts if each.counted_s)
        return next(counted, self.started_at)

    @property
    def spans(self) -> tuple[tuple[datetime, datetime], ...] | None:
        """The spans of the work in `duration_s`, one for each attempt that has a part of it.

        The last one lasts until now if the trial runs. None where they are not known.
        """
        counted = [each.span for each in self.earlier_attempts if each.counted_s]
        is_known = self.started_at is not None and self.duration_s is not None
        if not is_known or len(counted) != len(self.continued_at_steps):
            return None
        assert self.started_at is not None
        assert self.duration_s is not None
        earlier_s = sum(each.counted_s for each in self.earlier_attempts)
        own_s = self.duration_s.total + (self.standstill_s or 0.0) - earlier_s
        begin = datetime.fromisoformat(self.started_at)
        return *counted, (begin, begin + timedelta(seconds=max(0.0, own_s)))

    @property
    def span(self) -> tuple[datetime, datetime] | None:
        """The last attempt's beginning and end, until now if it runs; None where not known."""
        return None if self.spans is None else self.spans[-1]

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """All attempts so far, of which the last one's work counts, too, where its span is known.

        They are what a later attempt that goes on from here has before it.
        """
        if self.started_at is None:
            return self.earlier_attempts
        begin, end = self.span or (None, None)
        own_s = 0.0 if begin is None or end is None else (end - begin).total_seconds()
        return *self.earlier_attempts, Attempt(started_at=self.started_at, counted_s=own_s)

    @property
    def value(self) -> float | None:
        return self.quality.value

    @property
    def is_contended(self) -> bool:
        """True if other work on the machine slowed the trial; False where that isn't known."""
        return (self.cpu_wait_fraction or 0.0) >= CPU_CONTENTION_FROM

    @property
    def step_kwh(self) -> float | None:
        """The mean energy of the training's steps after the first; None where it is not known.

        Each attempt of a trial that went on from a checkpoint has a first step.
        """
        others, steps = (self.steps_done or 0) - self.first_steps, self.later_steps
        return None if steps is None or others < 1 else steps.energy_kwh / others

    @property
    def later_steps(self) -> StageCost | None:
        """The time and energy of the reported steps but the first; None where it is not known."""
        if self.stages is None or Stage.STEPS not in self.stages:
            return None
        steps = self.stages[Stage.STEPS] + self.stages.get(Stage.GENERATION, StageCost())
        return steps - (self.after_reported or StageCost())

    @property
    def reported_training(self) -> StageCost | None:
        """The time and energy of the training up to `steps_done`; None where it is not known."""
        if self.energy_kwh is None or self.duration_s is None:
            return None
        whole = StageCost(duration_s=self.duration_s.train, energy_kwh=self.energy_kwh.train)
        return whole - (self.after_reported or StageCost())

    @property
    def first_step_excess_kwh(self) -> float | None:
        """The energy of a first step beyond that of a mean one.

        It goes into kernels that were compiled or loaded, memory and libraries. It is at least 0,
        as the energy of short stages is no more precise than the meter's readings. A probe that
        made only one step has all of that step's energy here. Of several attempts it is the mean.
        """
        step_kwh = (
            0.0 if (self.stop_reason, self.steps_done) == (StopReason.PROBE, 1) else self.step_kwh
        )
        if self.stages is None or Stage.COMPILE not in self.stages or step_kwh is None:
            return None
        return max(0.0, self.stages[Stage.COMPILE].energy_kwh / self.first_steps - step_kwh)

    @property
    def first_steps(self) -> int:
        """The number of first steps: one for each attempt that the trial is made of."""
        return 1 + len(self.continued_at_steps)

    def meets(self, target: Target) -> bool:
        """Return whether the trial ran to its end and reached the target."""
        return self.state == TrialState.COMPLETE and target.is_met_by(self.value)

    def as_json(self) -> dict[str, Any]:
        """Return the object that is stored.

        Values that are NaN or infinite become null, as JSON has neither.
        """
        dumped: dict[str, Any] = json.loads(self.model_dump_json())
        dumped["quality"] = _without_empty(dumped["quality"], "direction")
        dumped = _without_empty(dumped, "continued_at_steps")
        dumped = _without_empty(dumped, "earlier_attempts")
        return {
            **_without_empty(dumped, "predictions"),
            "params": self.params.as_record(),
            "evals": [_without_empty(point, "other_qualities") for point in dumped["evals"]],
        }

    def as_exported(self, *, is_replay: bool) -> dict[str, Any]:
        """Return the object that is exported.

        A table of recorded runs has neither energy nor time of set-up, and no time of evaluations.
        They are stored as 0, with which the totals add up, and exported as null.
        """
        exported = self.as_json()
        if is_replay and self.energy_kwh is not None:
            exported["energy_kwh"]["setup"] = None
        if is_replay and self.duration_s is not None:
            exported["duration_s"] |= {"setup": None, "eval": None}
        return exported

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "TrialRecord":
        return cls(**{**record, "params": TrialParams.from_record(record["params"])})


def _without_empty(record: dict[str, Any], rarely: str) -> dict[str, Any]:
    """Return a record without a key that few records need, where its value is empty."""
    return (
        record if record[rarely] else {key: value for key, value in record.items() if key != rarely}
    )
