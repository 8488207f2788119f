"""What a trial is: the values that every room passes on, frozen, with units in their names; field by field the exported
record. `None` means not measured and 0 means measured as zero."""

import itertools
import json
import math
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from carbonopt.core.auto_facts import AutoSpace
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.memory import ModelMemory
from carbonopt.core.quality import PERPLEXITY, QUALITIES, Quality, Target, quality_of
from carbonopt.core.values import Finite, Frozen, Whole


class TrialState(StrEnum):
    COMPLETE = "complete"
    PRUNED = "pruned"  # stopped because it could not matter any more; stop_reason says which rule
    INFEASIBLE = "infeasible"  # does not fit in memory
    DIVERGED = "diverged"  # the loss became NaN or infinite
    FAILED = "failed"  # the process died or was interrupted; `failure` has the last lines of its log
    TIMEOUT = "timeout"  # no sign of progress for launch.timeout_s
    RUNNING = "running"


class StopReason(StrEnum):
    TARGET = "target"  # by its curve and by what the others have taught it can't reach the target
    CAP = "cap"  # its emissions have passed, or are sure to pass, those of the best trial that meets the target
    BUDGET = "budget"  # the study's budget ended while it ran
    PROBE = "probe"  # it has measured its steps, which is all that it was for
    INTERRUPTED = "interrupted"  # the study was ended from outside


class Phase(StrEnum):
    """Where energy goes. A trial has setup, train and eval; a study also has prepare and gap."""

    PREPARE = "prepare"  # reading and tokenizing the data set, compiling DeepSpeed's ops; once per study
    GAP = "gap"  # between trials
    SETUP = "setup"
    TRAIN = "train"
    EVAL = "eval"


TRIAL_PHASES = (Phase.SETUP, Phase.TRAIN, Phase.EVAL)


class Stage(StrEnum):
    """What a trial is doing: its phases, divided further. One follows the other without a gap."""

    IMPORTS = "imports"  # starting its processes, importing what is not imported yet
    DATA = "data"  # opening the device and the tokens
    MODEL = "model"  # torch.distributed, the model and its weights
    ENGINE = "engine"  # the Trainer, DeepSpeed's engine, the optimizer
    COMPILE = "compile"  # the first optimizer step: compilation and whatever else only the first one does, and the step
    GENERATION = "generation"  # completions that are trained on, in all steps
    STEPS = "steps"  # the other steps
    EVALUATION = "evaluation"
    TEARDOWN = "teardown"  # ending its processes


class Kernels(StrEnum):
    """Where the kernels that a trial compiles came from."""

    COMPILED = "compiled"  # at least one of them
    LOADED = "from the cache"  # all: an earlier trial or study had compiled them


class Prepared(Frozen):
    """What reading the data set once, before the first trial, found out (`prepared.json`)."""

    fingerprint: str  # of the workload; a folder prepared for another one is made again
    train_examples: int  # of an epoch: what a global batch counts, such as sequences, images or pairs
    eval_examples: int
    train_tokens: int | None = None  # None: examples are no tokens
    eval_tokens: int | None = None  # that one evaluation predicts, each counted once; None: it predicts no tokens
    sequence_length: int | None = None  # of each example, in tokens; None: they differ, or are no tokens
    vocab_size: int | None = None
    model_parameters: int | None = None  # None: a script's model is not known
    notes: tuple[str, ...] = ()  # of the data, in sentences: what was left out, or cut
    versions: dict[str, str]  # of the packages that trials run on
    eval_batch_size_per_gpu: int | None = None  # by the GPU's memory; None: the study file or the micro batch says
    memory: ModelMemory | None = None  # of the model on a GPU; None: on a CPU, or it could not be told
    auto: AutoSpace | None = None  # what was chosen where the study file says `space: auto`
    files: dict[str, int] = Field(default_factory=dict)  # bytes of each, by its name in the folder, to see damage


class Program(Frozen):
    """What each rank runs in the place of carbonopt's own training: a user's script."""

    argv: tuple[str, ...]
    folder: str  # in which it runs; absolute
    environment: dict[str, str]  # beside the launch's
    starts_ranks: bool = False  # by itself, as torchrun does: it is started once
    on_each_machine: bool = True  # ... on each of several machines, and not on the first alone
    warm: bool = False  # it is a Python script, which a process that has imported what it imports can be forked for


class TrialSpec(Frozen):
    """All that a trial's process needs to know, sent to it as JSON. Paths are absolute."""

    number: int
    attempt: int
    seed: int
    params: TrialParams
    repeat_of: int | None = None  # the trial whose configuration it repeats with another seed
    workload: dict[str, Any]  # config.Workload, dumped
    prepared_dir: str  # the tokenized, memory-mapped data set and its tokenizer
    trial_dir: str  # for what the trial writes: log, DeepSpeed configuration, optionally its model
    saves_model: bool = False  # it does, into `model`
    probe_s: float | None = None  # a probe: ends after so many seconds of steps beside the first; None: a trial
    program: Program | None = None  # None: carbonopt trains


class EvalPoint(Frozen):
    step: Whole
    tokens: Whole | None  # training tokens seen so far, over all ranks; None: a replay that does not say
    value: float | None  # of the quality; None: it was NaN or infinite
    sum: float | None  # that the value is made of, over all ranks; None: it was NaN or infinite
    count: int = Field(ge=1)  # what that sum is over
    train_energy_kwh: Finite | None = None  # energy of the training window up to here
    other_qualities: dict[str, float] = Field(default_factory=dict)  # that the same evaluation found, by name

    @classmethod
    def of(
        cls, quality: Quality, total: float, count: int, *, step: int, tokens: int | None, **others: float
    ) -> "EvalPoint":
        """An evaluation by a sum over all ranks and its count; `others`: of other qualities, by name."""
        value, summed = (x if math.isfinite(x) else None for x in (quality.value(total, count), total))
        finite = {name: other for name, other in others.items() if math.isfinite(other)}
        return cls(step=step, tokens=tokens, count=count, value=value, sum=summed, other_qualities=finite)

    def loss(self, quality: Quality) -> float:
        """As `Quality.loss`; NaN where the sum was not finite."""
        return math.nan if self.sum is None else quality.loss(self.sum / self.count)


class Prediction(Frozen):
    """What a trained model made of one evaluation example: three texts, cut to a few hundred characters."""

    source: str
    expected: str
    predicted: str


class QualityResult(Frozen):
    """What a trial has reached. `value`, `sum` and `count` are None where it did not complete."""

    name: str
    value: float | None = None
    sum: float | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    direction: Literal["minimize", "maximize"] | None = None  # of a quality that carbonopt doesn't know by its name

    @model_validator(mode="after")
    def _can_be(self) -> "QualityResult":
        try:
            _ = self.of
        except ValueError as error:
            raise ValueError(f"name {error}") from error
        if problem := self.of.problem(self.value, self.sum, self.count):
            raise ValueError(problem)
        return self

    @property
    def of(self) -> Quality:
        return quality_of(self.name, self.direction)

    @classmethod
    def named(cls, quality: Quality) -> "QualityResult":
        """Of a trial that has reached nothing yet."""
        return cls(name=quality.name, direction=None if quality.name in QUALITIES else quality.direction)


# Beside a quality that is a perplexity, for those who read records from before there were others.
_OF_PERPLEXITY = {"nll_sum": "sum", "eval_tokens": "count"}
COMPONENTS = ("gpu", "cpu", "ram")  # of which energy is read


class _ByPhase(Frozen):
    train: Finite
    setup: Finite
    eval: Finite
    total: Finite


class Energy(_ByPhase):
    """Energy in kWh by phase, of the components that the objective counts; PUE is not in it. `train_*` split the
    training window by component, whether counted or not."""

    train_gpu: Finite | None = None
    train_cpu: Finite | None = None
    train_ram: Finite | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not math.isclose(parts := self.train + self.setup + self.eval, self.total, rel_tol=1e-6):
            raise ValueError(f"total is {self.total:g}, but its phases add up to {parts:g}")
        return self


class GpuEnergy(Frozen):
    """Of one phase of a trial, in kWh, over all GPUs of the launch."""

    counter: float  # by the GPUs' own energy counters: the figure that is used
    codecarbon: float  # the same windows as CodeCarbon read them, by itself, from the same counters
    idle: float  # what the same GPUs use in as much time when nothing runs, measured before the study
    uncertainty: float  # standard uncertainty of `counter` that comes from how rarely the counters tick

    @property
    def net_of_idle(self) -> float | None:
        """What the work used beyond what the GPUs would have anyway; None where that is more than they did use."""
        return self.counter - self.idle if 0 <= self.idle <= self.counter else None


class Durations(_ByPhase):
    """Seconds by phase."""


Measured = Annotated[float, Field(allow_inf_nan=False)]


class StageCost(Frozen):
    """What a stage took. One shorter than the counters' ticks (0.1 s) has the energy of the tick that fell into it."""

    duration_s: Measured = 0.0
    energy_kwh: Measured = 0.0  # of the components that the objective counts

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(duration_s=self.duration_s + other.duration_s, energy_kwh=self.energy_kwh + other.energy_kwh)


# Two readings of the same counter can differ by a tick of 0.1 s at each end: 2 % of 10 s.
COMPARED_FROM_S = 10.0
LARGEST_DISAGREEMENT = 0.02


class Failure(Frozen):
    kind: str
    text: str  # one sentence, then the log's last lines where they help
    log: str | None = None


class Node(Frozen):
    """A machine, and what a study has of it."""

    name: str  # its host name, as Slurm calls it
    devices: tuple[str, ...]  # UUIDs of its GPUs, as the driver has them; or "cpu"


class NodeReadings(Node):
    """What one node used for a trial. All nodes' add up to the trial's `energy_kwh`."""

    readings: Energy


class Forecast(Frozen):
    """Of the end of a trial that was stopped for its target, or would have been."""

    step: Whole  # after which it was made
    value: Measured  # of the quality
    sds_short: Finite  # standard deviations of the forecast between it and the target
    sds_needed: Finite  # so many were asked for
    checked_trials: Whole  # complete ones that came as far, whose forecasts said how many


class TrialRecord(Frozen):
    """One trial as exported: `carbonopt export --format jsonl` prints one a line."""

    trial: Whole
    state: TrialState
    stop_reason: StopReason | None = None
    attempt: int = Field(default=1, ge=1)
    seed: Whole
    repeat_of: Whole | None = None  # the trial whose configuration it repeats with another seed; None: the search's own
    params: TrialParams
    quality: QualityResult
    emissions_kg_co2e: Finite | None = None  # of the training window, PUE in
    energy_kwh: Energy | None = None
    duration_s: Durations | None = None
    stages: dict[Stage, StageCost] | None = None  # add up to both totals above; None: a replay, or not measured
    evals: tuple[EvalPoint, ...] = ()
    predictions: tuple[Prediction, ...] = ()  # of the last evaluation, a few; none: the task generates no text
    peak_memory_gib: Finite | None = None  # of the rank that needed most
    rank_peak_memory_gib: tuple[Finite, ...] = ()  # of each rank, by rank; none: it ended before its first evaluation
    kernels: Kernels | None = None  # of its first step, by torch's own count; None: it compiles none, or isn't known
    failure: Failure | None = None
    started_at: str | None = None  # ISO 8601, UTC
    worker: str | None = None  # the call of `carbonopt run` that ran it, as its session has it; None: not noted
    nodes: tuple[NodeReadings, ...] = ()  # where it ran; none: a replay, or not noted
    gpu_energy_kwh: dict[Phase, GpuEnergy] | None = None  # by setup, train and eval; None: no GPU was measured
    # CodeCarbon's GPU energy ÷ the counters' − 1, where they differ most: windows of COMPARED_FROM_S and more.
    gpu_disagreement: Measured | None = None
    gpu_start_temperature_c: Measured | None = None  # as the training began: mean of the GPUs; None: not told
    # Share of the training in which a kernel ran, as NVML has it: mean of the GPUs and of readings a second apart.
    gpu_utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    # Share of the training in which its threads were ready to run but had no core: of the rank that waited most.
    cpu_wait_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    earlier_attempts_energy_kwh: Finite = 0.0  # what attempts of this trial that were interrupted had used
    earlier_attempts_gpu_kwh: Finite | None = None  # the GPUs' part of it
    total_steps: Whole | None = None  # optimizer steps the whole trial would have
    steps_done: Whole | None = None  # of these, as far as it has reported
    audited_at_step: Whole | None = None  # where it would have been stopped for its target, had it not been an audit
    forecast: Forecast | None = None  # why it was stopped for its target, or would have been

    @model_validator(mode="after")
    def _can_be_measured(self) -> "TrialRecord":
        if self.gpu_energy_kwh is not None and self.gpu_energy_kwh.keys() != set(TRIAL_PHASES):
            raise ValueError(f"gpu_energy_kwh must have {', '.join(TRIAL_PHASES)}")
        for point in self.evals:
            if problem := self.quality.of.problem(point.value, point.sum, point.count):
                raise ValueError(f"evals: at step {point.step} {self.quality.name} {problem}")
        if any(earlier.step >= later.step for earlier, later in itertools.pairwise(self.evals)):
            raise ValueError(f"evals: steps must rise, but are {[point.step for point in self.evals]}")
        return self

    @property
    def spent_kwh(self) -> float:
        """Energy of all its attempts and phases, PUE not in; what was not measured counts as nothing."""
        return self.earlier_attempts_energy_kwh + (self.energy_kwh.total if self.energy_kwh else 0.0)

    @property
    def spent_gpu_kwh(self) -> float | None:
        """The GPUs' part of `spent_kwh`; None where it is not known of every attempt."""
        earlier = self.earlier_attempts_gpu_kwh if self.attempt > 1 else 0.0
        if self.gpu_energy_kwh is None or earlier is None:
            return None
        return earlier + sum(phase.counter for phase in self.gpu_energy_kwh.values())

    @property
    def value(self) -> float | None:
        return self.quality.value

    @property
    def step_kwh(self) -> float | None:
        """Mean energy of the training's steps after the first; None where it is not known."""
        others = (self.steps_done or 0) - 1
        if self.stages is None or others < 1 or Stage.STEPS not in self.stages:
            return None
        steps = self.stages[Stage.STEPS] + self.stages.get(Stage.GENERATION, StageCost())
        return steps.energy_kwh / others

    @property
    def first_step_excess_kwh(self) -> float | None:
        """What the first step took beyond a mean one: kernels that were compiled or loaded, memory, libraries. At least
        0, as short stages are no sharper than the meter's readings. Of a probe that made one step alone, all of it."""
        step_kwh = 0.0 if (self.stop_reason, self.steps_done) == (StopReason.PROBE, 1) else self.step_kwh
        if self.stages is None or Stage.COMPILE not in self.stages or step_kwh is None:
            return None
        return max(0.0, self.stages[Stage.COMPILE].energy_kwh - step_kwh)

    def meets(self, target: Target) -> bool:
        """Whether it ran to its end and reached the target."""
        return self.state == TrialState.COMPLETE and target.is_met_by(self.value)

    def as_json(self) -> dict[str, Any]:
        """The exported object. Not a number and infinity become null: JSON has neither."""
        dumped: dict[str, Any] = json.loads(self.model_dump_json())
        is_perplexity = self.quality.name == PERPLEXITY.name

        def of_perplexity(result: dict[str, Any], names: dict[str, str] = _OF_PERPLEXITY) -> dict[str, Any]:
            return {name: result[field] if is_perplexity else None for name, field in names.items()}

        evals = [{**_told(point, "other_qualities"), **of_perplexity(point)} for point in dumped["evals"]]
        dumped["quality"] = _told(dumped["quality"], "direction")
        reached = of_perplexity(dumped["quality"], {PERPLEXITY.name: "value", **_OF_PERPLEXITY})
        return {**_told(dumped, "predictions"), "params": self.params.as_record(), "evals": evals, **reached}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "TrialRecord":
        own = {key: value for key, value in record.items() if key not in (PERPLEXITY.name, *_OF_PERPLEXITY)}
        evals = [{key: value for key, value in point.items() if key not in _OF_PERPLEXITY} for point in record["evals"]]
        return cls(**{**own, "params": TrialParams.from_record(record["params"]), "evals": evals})


def _told(record: dict[str, Any], rarely: str) -> dict[str, Any]:
    """Without a key that says something in few records."""
    return record if record[rarely] else {key: value for key, value in record.items() if key != rarely}
