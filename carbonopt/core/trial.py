"""What a trial is: the values that every room passes on, frozen, with units in their names.

The models of this page are also the exported record (`carbonopt export`), field by field; `None` means not measured
and 0 means measured as zero.
"""

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from carbonopt.core.errors import BadInput

Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["bf16", "fp16", "fp32"]
OutputLayer = Literal["standard", "fused", "fused_fp8"]


class Frozen(BaseModel):
    """A value: it can't be changed after it was made, and takes no field that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
    STEPS = "steps"  # the other steps
    EVALUATION = "evaluation"
    TEARDOWN = "teardown"  # ending its processes


class Kernels(StrEnum):
    """Where the kernels that a trial compiles came from."""

    COMPILED = "compiled"  # at least one of them
    LOADED = "from the cache"  # all: an earlier trial or study had compiled them


# Anything else in a record was not written by this program.
Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _at_least(least: float) -> AfterValidator:
    """What isn't finite passes: it is no result, and sorted out wherever results are compared."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"must be at least {least:g}, but is {value:g}")
        return value

    return AfterValidator(check)


class TrialParams(Frozen):
    """One configuration. A step is an optimizer step.

    The fields of the first block are in every record; those of the second only where the study file names them
    (None: as Hugging Face has it).
    """

    global_batch_size: int = Field(ge=1)  # sequences per step, over all ranks
    micro_batch_size_per_gpu: int = Field(ge=1)  # sequences per forward pass and rank
    learning_rate: float = Field(gt=0)
    epochs: float = Field(gt=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Offload = "none"
    world_size: int = Field(default=1, ge=1)  # ranks

    gradient_checkpointing: bool | None = None
    precision: Precision | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)  # share of the steps
    lr_scheduler: str | None = None
    torch_compile: bool | None = None
    attention_implementation: str | None = None
    output_layer: OutputLayer | None = None
    lora_rank: int | None = Field(default=None, ge=0)  # 0: no LoRA, all weights are trained

    @property
    def gradient_accumulation_steps(self) -> int:
        """Derived, never stored.

        Raises:
            BadInput: if the global batch is not a whole number of micro batches on all ranks.
        """
        per_pass = self.micro_batch_size_per_gpu * self.world_size
        if self.global_batch_size % per_pass:
            raise BadInput(
                "global_batch_size must be a multiple of micro_batch_size_per_gpu × world_size, "
                f"but got {self.global_batch_size} and {self.micro_batch_size_per_gpu} × {self.world_size}."
            )
        return self.global_batch_size // per_pass

    @property
    def has_fused_output_layer(self) -> bool:
        return self.output_layer not in (None, "standard")

    def as_record(self) -> dict[str, int | float | str | bool]:
        """The record's `params`: every set field, and the derived gradient accumulation."""
        record = self.model_dump(exclude_none=True)
        record["epochs"] = int(self.epochs) if float(self.epochs).is_integer() else self.epochs
        record["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        return record

    @classmethod
    def from_record(cls, record: dict) -> "TrialParams":
        return cls(**{key: value for key, value in record.items() if key != "gradient_accumulation_steps"})


DEFAULT_LR_SCHEDULER = "linear"  # of Hugging Face's training arguments


def rate_decays(lr_scheduler: str, warmup: float) -> bool:
    """Whether the learning rate falls along the run, however long that is, as transformers.SchedulerType has it.

    Only where it does not is a shorter run the beginning of a longer one. Without a warm-up, inverse_sqrt falls over
    10,000 steps, whatever the run.
    """
    return lr_scheduler not in ("constant", "constant_with_warmup") and (lr_scheduler != "inverse_sqrt" or warmup > 0)


class Prepared(Frozen):
    """What reading and tokenizing the data set once, before the first trial, found out (`prepared.json`)."""

    fingerprint: str  # of the workload; a folder prepared for another one is made again
    train_sequences: int  # full sequences of sequence_length target tokens
    eval_sequences: int
    train_tokens: int
    eval_tokens: int  # target tokens of one evaluation, each counted once
    sequence_length: int
    vocab_size: int
    model_parameters: int
    versions: dict[str, str]  # of the packages that trials run on
    # Sequences in a forward pass of an evaluation, by the GPU's memory; None: the study file or the micro batch says.
    eval_batch_size_per_gpu: int | None = None
    files: dict[str, int] = {}  # bytes of each file, by its name in the folder: one that is damaged is made again


class TrialSpec(Frozen):
    """All that a trial's process needs to know, sent to it as JSON. Paths are absolute."""

    number: int
    attempt: int
    seed: int
    params: TrialParams
    repeat_of: int | None = None  # the trial whose configuration it repeats with another seed
    workload: dict  # config.Workload, dumped
    prepared_dir: str  # the tokenized, memory-mapped data set and its tokenizer
    trial_dir: str  # for what the trial writes: log, DeepSpeed configuration, optionally its model


class EvalPoint(Frozen):
    """One evaluation inside a trial."""

    step: Whole
    tokens: Whole | None  # training tokens seen so far, over all ranks; None: a replay that does not say
    nll_sum: (
        Annotated[float, _at_least(0)] | None
    )  # nats, summed over all unmasked target tokens and all ranks; None: it was NaN or infinite
    eval_tokens: int = Field(ge=1)  # how many tokens that sum is over
    train_energy_kwh: Finite | None = None  # energy of the training window up to here

    @property
    def perplexity(self) -> float:
        return math.nan if self.nll_sum is None else perplexity(self.nll_sum, self.eval_tokens)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood, nats per token; NaN where it was not finite."""
        return math.nan if self.nll_sum is None else self.nll_sum / self.eval_tokens


def perplexity(nll_sum: float, eval_tokens: int) -> float:
    """exp(total negative log-likelihood in nats / total unmasked target tokens): summed first, divided once.

    Infinite where the loss is too large for a float; NaN stays NaN.
    """
    try:
        return math.exp(nll_sum / eval_tokens)
    except OverflowError:
        return math.inf


class Energy(Frozen):
    """Energy in kWh by phase, of the components that the objective counts; PUE is not in it.

    `train_*` split the training window by component, whether counted or not: with `carbon.objective: gpu`, `train`
    equals `train_gpu`.
    """

    train: Finite
    setup: Finite
    eval: Finite
    total: Finite
    train_gpu: Finite | None = None
    train_cpu: Finite | None = None
    train_ram: Finite | None = None


class GpuEnergy(Frozen):
    """What is known of the GPUs' energy in one phase of a trial, in kWh, over all GPUs of the launch."""

    counter: float  # by the GPUs' own energy counters: the figure that is used
    codecarbon: float  # the same windows as CodeCarbon read them, by itself, from the same counters
    idle: float  # what the same GPUs use in as much time when nothing runs, measured before the study
    uncertainty: float  # standard uncertainty of `counter` that comes from how rarely the counters tick

    @property
    def net_of_idle(self) -> float | None:
        """What the work itself used, beyond what the GPUs would have used anyway; None where that would be more than
        they did use."""
        return self.counter - self.idle if 0 <= self.idle <= self.counter else None


class Durations(Frozen):
    """Seconds by phase."""

    train: Finite
    setup: Finite
    eval: Finite
    total: Finite


class StageCost(Frozen):
    """What a stage took. One shorter than the counters' ticks (0.1 s) has the energy of the tick that fell into it."""

    duration_s: float = 0.0
    energy_kwh: float = 0.0  # of the components that the objective counts

    def __add__(self, other: "StageCost") -> "StageCost":
        return StageCost(duration_s=self.duration_s + other.duration_s, energy_kwh=self.energy_kwh + other.energy_kwh)


# Two readings of the same counter can differ by a tick of 0.1 s at each end: 2 % of 10 s. What differs by more differs
# for another reason.
COMPARED_FROM_S = 10.0
LARGEST_DISAGREEMENT = 0.02


class Failure(Frozen):
    """Why a trial did not end by itself."""

    kind: str
    text: str  # one sentence, then the log's last lines where they help
    log: str | None = None


class TrialRecord(Frozen):
    """One trial as exported: `carbonopt export --format jsonl` prints one a line."""

    trial: Whole
    state: TrialState
    stop_reason: StopReason | None = None
    attempt: int = Field(default=1, ge=1)
    seed: Whole
    repeat_of: Whole | None = None  # the trial whose configuration it repeats with another seed; None: the search's own
    params: TrialParams
    perplexity: Annotated[float, _at_least(1)] | None = None  # 1: each token was certain
    nll_sum: Finite | None = None
    eval_tokens: int | None = Field(default=None, ge=1)
    emissions_kg_co2e: Annotated[float, _at_least(0)] | None = (
        None  # of the training window, at the reference intensity, PUE in
    )
    energy_kwh: Energy | None = None
    duration_s: Durations | None = None
    stages: dict[Stage, StageCost] | None = None  # add up to both totals above; None: a replay, or not measured
    evals: tuple[EvalPoint, ...] = ()
    peak_memory_gib: Finite | None = None  # of the rank that needed most
    kernels: Kernels | None = None  # of its first step, by torch's own count; None: it compiles none, or isn't known
    failure: Failure | None = None
    started_at: str | None = None  # ISO 8601, UTC
    gpu_energy_kwh: dict[Phase, GpuEnergy] | None = None  # by setup, train and eval; None: no GPU was measured
    # CodeCarbon's GPU energy ÷ the counters' − 1, where they differ most: over windows of COMPARED_FROM_S and more and
    # over the whole trial. None: no GPU was measured, or nothing was that long.
    gpu_disagreement: float | None = None
    # Share of the training in which a kernel ran, as NVML has it: mean of the GPUs and of readings a second or more
    # apart, the first step's compilation included. None: not measured, or no stretch of training took a second.
    gpu_utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    # Share of the time in which its threads were ready to run but had no core, other work on the machine having it,
    # while it trained: of the rank that waited most, before the first evaluation of rank 0. None: it made no step, or
    # the kernel doesn't tell.
    cpu_wait_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    earlier_attempts_energy_kwh: Finite = 0.0  # what attempts of this trial that were interrupted had used
    earlier_attempts_gpu_kwh: Finite | None = None  # the GPUs' part of it
    total_steps: Whole | None = None  # optimizer steps the whole trial would have
    steps_done: Whole | None = None  # of these, as far as it has reported
    audited_at_step: Whole | None = None  # where it would have been stopped for its target, had it not been an audit

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
        return earlier + sum(one.counter for one in self.gpu_energy_kwh.values())

    def meets(self, target_perplexity: float) -> bool:
        """Whether it ran to its end and reached the target."""
        reached = self.perplexity is not None and self.perplexity <= target_perplexity
        return self.state == TrialState.COMPLETE and reached

    def as_json(self) -> dict:
        """The exported object. Not a number and infinity become null: JSON has neither."""
        dumped = self.model_dump(mode="json")
        dumped["params"] = self.params.as_record()
        return _finite(dumped)

    @classmethod
    def from_json(cls, record: dict) -> "TrialRecord":
        return cls(**{**record, "params": TrialParams.from_record(record["params"])})


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
