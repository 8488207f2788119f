"""The one table of dimensions: each setting's values, what it affects, and its other names.

The table is the fields of `TrialParams`, which all other packages read.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from carbonopt.core.errors import BadInput
from carbonopt.core.values import Frozen, Scalar

# cost: what a step costs; kernels: which kernels a compiled run compiles
Affects = Literal["quality", "cost", "memory", "kernels"]
StatedAffects = Literal["cost", "quality"]  # what a user may state; it affects only this
ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["bf16", "fp16", "fp32"]
OutputLayer = Literal["standard", "fused", "fused_fp8"]
Float8 = Literal["none", "tensorwise", "rowwise"]  # how the factors of float8 products are scaled
Optimizer = Literal["adamw", "muon"]
RateScaling = Literal["none", "sqrt", "linear"]

STABLE_DECAY = "warmup_stable_decay"
# The default share of the steps in which warmup_stable_decay's rate falls; more decay gains little
# (Hägele et al. 2024, arXiv 2405.18392).
DEFAULT_DECAY_RATIO = 0.2
DEFAULT_LR_SCHEDULER = "linear"  # the default of Hugging Face's training arguments
# Schedulers of a cosine; cosine_with_min_lr takes its floor from
# training_arguments.lr_scheduler_kwargs.
_COSINES = (
    "cosine",
    "cosine_with_min_lr",
)
_CONSTANT = ("constant", "constant_with_warmup")
# Schedulers without a warm-up; the latter two can come from training_arguments only.
_WITHOUT_WARMUP = (
    "constant",
    "reduce_lr_on_plateau",
    "greedy",
)
# The values of transformers.SchedulerType that need nothing but the numbers of steps and of warm-up
# steps.
LR_SCHEDULERS = (
    DEFAULT_LR_SCHEDULER,
    *_COSINES,
    *_CONSTANT,
    "polynomial",
    "inverse_sqrt",
    STABLE_DECAY,
)
ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "varlen",  # ours, for packed rows
)
LARGEST_INT = 10**9
# The dimensions that decide how many steps a training makes if carbonopt trains: the number is
# epochs × sequences ÷ batch.
STEPS_FOLLOW: tuple[str, ...] = ("epochs", "global_batch_size")


@dataclass(frozen=True)
class Dimension:
    """The facts about a dimension that are known before any trial has run."""

    label: str  # a short name for people, for lines with many dimensions
    # what changes with its value; without "quality" among them, the trained model stays as good
    affects: tuple[Affects, ...]
    # all values that it can have; empty: it is a number from `lowest` to `highest`
    choices: tuple[Scalar, ...] = ()
    lowest: float = 0
    highest: float = math.inf
    above: bool = False  # True if `lowest` itself is too low
    integer: bool = False  # True if it takes whole numbers only
    # a scale on which a step of 1 makes a difference; None: the scale of the space
    feature: Callable[[float], float] | None = None
    argument: str | None = None  # its name in `transformers.TrainingArguments`
    # other training arguments that decide it, too, whatever `argument` says
    decided_by: tuple[str, ...] = ()
    # makes the argument's value from the dimension's and the trial's number of steps
    to_argument: Callable[[Any, int], Any] = lambda value, steps: value
    # returns whether the dimension has an effect with a scheduler
    acts_with: Callable[[str], bool] = lambda lr_scheduler: True
    deepspeed: tuple[str, ...] = ()  # its keys in a DeepSpeed configuration
    # the value where a space leaves it out; None: the library or another dimension decides
    default: Scalar | None = None
    required: bool = False  # True if a space has to name it
    tasks: tuple[str, ...] = ()  # the tasks that have it; empty: all have

    def problem(self, value: Scalar) -> str | None:
        """Return why the dimension can't have this value, in words; None if it can."""
        if self.choices:
            # 0 == False and 1 == True in Python, but `zero_stage: true` is a slip.
            allowed = any(
                choice == value and type(choice) is type(value) for choice in self.choices
            )
            return None if allowed else f"allowed: {', '.join(map(str, self.choices))}"
        if isinstance(value, bool | str):
            return "must be a number"
        if self.integer:
            whole = isinstance(value, int) and self.lowest <= value <= LARGEST_INT
            return None if whole else f"must be a whole number from {self.lowest} to 10^9"
        if isinstance(value, int) and abs(value) > 1e12:
            return "must be below 1e12"
        low = value <= self.lowest if self.above else value < self.lowest
        if not math.isfinite(value) or low or value > self.highest:
            bound = f"must be {'above' if self.above else 'at least'} {self.lowest:g}"
            return bound + (f" and at most {self.highest:g}" if math.isfinite(self.highest) else "")
        return None

    @property
    def arguments(self) -> tuple[str, ...]:
        """All training arguments that decide this dimension."""
        return (*((self.argument,) if self.argument is not None else ()), *self.decided_by)

    def _checked(self, value: Scalar | None) -> Scalar | None:
        if value is not None and (problem := self.problem(value)):
            raise ValueError(problem)
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))


_ALL: tuple[Affects, ...] = ("quality", "cost", "memory", "kernels")
_SYSTEM: tuple[Affects, ...] = ("cost", "memory", "kernels")
_ON_OFF = (False, True)
_batch_size = partial(Dimension, lowest=1, integer=True, feature=math.log)
_MICRO_BATCH_KEYS, _ZERO_KEYS = ("train_micro_batch_size_per_gpu",), ("zero_optimization.stage",)
_OFFLOADS = ("offload_optimizer.device", "offload_param.device", "cpu_offload", "cpu_offload_param")
_OFFLOAD_KEYS = tuple(f"zero_optimization.{key}" for key in _OFFLOADS)
_DPO, _RLHF = ("dpo",), ("rlhf",)
# dpo and rlhf compare a model with its start; a script has dimensions of its own.
_TASKS_WITHOUT_REFERENCE = (
    "causal_lm",
    "sft",
    "reward",
    "seq2seq",
    "classification",
)


def warmup_steps(ratio: float, steps: int) -> int:
    """Return the warm-up steps that are a share of a run's steps.

    The learning rate of the first warm-up step is 0, so at least one step is no warm-up step.
    """
    return min(math.ceil(ratio * steps), steps - 1)


_of_steps = partial(Dimension, argument="warmup_steps", to_argument=warmup_steps)


class TrialParams(Frozen, extra="allow"):
    """The configuration of a trial.

    A step is an optimizer step. The fields up to `world_size` are in every record of a trial that
    carbonopt trains. The others are set only if the study file names them; None stands for the
    default in docs/study-file.md. A script's trial has the fields that its study file names, and
    the dimensions that its user has invented.
    """

    __pydantic_extra__: dict[str, Scalar]

    global_batch_size: Annotated[
        int | None,
        _batch_size("batch", ("quality", "cost"), required=True, deepspeed=("train_batch_size",)),
    ] = None
    """Examples per optimizer step, over all ranks."""

    micro_batch_size_per_gpu: Annotated[
        int | None,
        _batch_size(
            "micro batch",
            _SYSTEM,
            argument="per_device_train_batch_size",
            deepspeed=_MICRO_BATCH_KEYS,
        ),
    ] = None
    """Examples per forward pass and rank."""

    learning_rate: Annotated[
        float | None,
        Dimension("lr", ("quality",), above=True, required=True, argument="learning_rate"),
    ] = None
    """The learning rate at its peak, before `learning_rate_scaling`."""

    epochs: Annotated[
        float | None,
        Dimension("epochs", ("quality",), above=True, required=True, argument="num_train_epochs"),
    ] = None
    """Passes over the training examples; fractions are allowed."""

    zero_stage: Annotated[
        ZeroStage | None,
        Dimension(
            "ZeRO", _SYSTEM, get_args(ZeroStage), integer=True, default=1, deepspeed=_ZERO_KEYS
        ),
    ] = 1
    """DeepSpeed's ZeRO stage, which says what the ranks share among them."""

    offload: Annotated[
        Offload | None,
        Dimension("offload", _SYSTEM, get_args(Offload), default="none", deepspeed=_OFFLOAD_KEYS),
    ] = "none"
    """The parts of the training that ZeRO keeps in the CPU's memory."""

    world_size: Annotated[
        int, Dimension("ranks", _SYSTEM, lowest=1, integer=True, feature=math.log2)
    ] = 1
    """The number of ranks. Left out: all that the launch has for a trial."""

    gradient_checkpointing: Annotated[
        bool | None,
        Dimension(
            "gradient checkpointing",
            _SYSTEM,
            _ON_OFF,
            argument="gradient_checkpointing",
            decided_by=("activation_checkpointing",),  # its name from transformers 5 on
        ),
    ] = None
    """Computes activations again in the backward pass, to save memory."""

    precision: Annotated[
        Precision | None,
        Dimension(
            "precision", _ALL, get_args(Precision), deepspeed=("bf16.enabled", "fp16.enabled")
        ),
    ] = None
    """The number format of the training."""

    weight_decay: Annotated[
        float | None,
        Dimension(
            "weight decay",
            ("quality",),
            feature=lambda value: math.log(value + 0.01),
            argument="weight_decay",
        ),
    ] = None
    """The optimizer's weight decay."""

    warmup_ratio: Annotated[
        float | None,
        _of_steps(
            "warm-up",
            ("quality",),
            highest=1.0,
            feature=lambda value: 4 * value,
            acts_with=lambda lr_scheduler: lr_scheduler not in _WITHOUT_WARMUP,
        ),
    ] = None
    """The share of the steps in which the learning rate rises."""

    lr_scheduler: Annotated[
        str | None,
        Dimension("lr scheduler", ("quality",), LR_SCHEDULERS, argument="lr_scheduler_type"),
    ] = None
    """The course of the learning rate over the steps."""

    learning_rate_scaling: Annotated[
        RateScaling | None, Dimension("lr scaling", ("quality",), get_args(RateScaling))
    ] = None
    """The growth of the learning rate with the ranks: × 1, × √ranks or × ranks."""

    decay_ratio: Annotated[
        float | None,
        Dimension(
            "decay",
            ("quality",),
            above=True,
            highest=1.0,
            feature=lambda value: 4 * value,
            decided_by=("lr_scheduler_kwargs",),
            acts_with=lambda lr_scheduler: lr_scheduler == STABLE_DECAY,
        ),
    ] = None
    """The share of the steps in which the rate of `warmup_stable_decay` falls."""

    optimizer: Annotated[
        Optimizer | None,
        # The Trainer makes AdamW itself, so that is the name that its argument `optim` has for each
        # value. Muon is made by `chosen_optimizer` of train/optim/arguments.py.
        Dimension(
            "optimizer",
            ("quality", "cost", "memory"),
            get_args(Optimizer),
            argument="optim",
            decided_by=("optim_args", "optim_target_modules"),
            to_argument=lambda value, steps: "adamw_torch_fused",
        ),
    ] = None
    """AdamW, or Muon for the matrices of hidden layers."""

    dropout: Annotated[
        float | None,
        Dimension(
            "dropout",
            ("quality", "cost", "kernels"),
            highest=0.9,
            # With 10 instead of 3, one bad trial with dropout 0.05 at a rate of 0.0056 kept studies
            # of a character GPT from the dropout that is 0.07 better in ln(loss) than 0.2.
            feature=lambda value: 3 * value,
            tasks=_TASKS_WITHOUT_REFERENCE,
        ),
    ] = None
    """Dropout in all places where the model has it. Left out: as its configuration says."""

    weight_averaging: Annotated[
        float | None,
        Dimension(
            "averaging",
            ("quality", "cost", "memory"),
            highest=0.5,
            feature=lambda value: math.log(value + 0.01),
            tasks=_TASKS_WITHOUT_REFERENCE,
        ),
    ] = None
    """The mean age of the averaged weights that are evaluated, as a share of the steps so far; 0:
    the last weights."""

    # torch_compile_backend and torch_compile_mode switch it on, too
    torch_compile: Annotated[
        bool | None,
        Dimension(
            "torch.compile",
            _SYSTEM,
            _ON_OFF,
            argument="torch_compile",
            decided_by=("torch_compile_backend", "torch_compile_mode"),
        ),
    ] = None
    """Compiles the model with `torch.compile`."""

    attention_implementation: Annotated[str | None, Dimension("attention", _SYSTEM, ATTENTION)] = (
        None
    )
    """The kernel of the attention."""

    output_layer: Annotated[
        OutputLayer | None, Dimension("output layer", _ALL, get_args(OutputLayer))
    ] = None
    """The computation of the output layer and the loss: whole or in parts."""

    float8: Annotated[
        Float8 | None, Dimension("float8", _ALL, get_args(Float8), tasks=_TASKS_WITHOUT_REFERENCE)
    ] = None
    """The scaling to float8 of the products of the blocks' linear layers in training."""

    lora_rank: Annotated[
        int | None,
        Dimension("LoRA rank", _ALL, integer=True, feature=lambda value: math.log(value + 1)),
    ] = None
    """The rank of the trained LoRA; 0: all weights are trained."""

    beta: Annotated[
        float | None, Dimension("beta", ("quality",), above=True, feature=math.log, tasks=_DPO)
    ] = None
    """The weight of the deviation from the model that DPO begins with (arXiv 2305.18290,
    equation 7)."""

    label_smoothing: Annotated[
        float | None,
        Dimension(
            "label smoothing",
            ("quality",),
            highest=0.5,
            feature=lambda value: 10 * value,
            tasks=_DPO,
        ),
    ] = None
    """The share of the pairs that are taken to be labelled the wrong way round."""

    num_generations: Annotated[
        int | None,
        Dimension(
            "generations",
            ("quality", "cost"),
            lowest=2,
            integer=True,
            feature=math.log,
            tasks=_RLHF,
        ),
    ] = None
    """Completions of each prompt, which are compared with each other."""

    max_completion_length: Annotated[
        int | None,
        Dimension(
            "completion",
            ("quality", "cost", "memory"),
            lowest=1,
            integer=True,
            feature=math.log,
            tasks=_RLHF,
        ),
    ] = None
    """The most tokens of a completion in training."""

    kl_coefficient: Annotated[
        float | None,
        Dimension(
            "KL coefficient",
            ("quality", "cost"),
            feature=lambda value: math.log(value + 0.001),
            tasks=_RLHF,
        ),
    ] = None
    """The weight of the divergence from the model that training begins with; 0: it doesn't
    count."""

    @property
    def own(self) -> dict[str, Scalar]:
        """The values of the dimensions that the user has invented."""
        return self.__pydantic_extra__

    def value(self, name: str) -> Scalar | None:
        """Return the value of any dimension; None where it has none.

        Unlike `getattr` it never returns a method whose name a user's own dimension shares.
        """
        return getattr(self, name) if name in DIMENSIONS else self.own.get(name)

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """The number of micro batches in a step, derived and never stored.

        It is None where a script divides its batches itself.

        Raises:
            BadInput: if it is no whole number.
        """
        if self.global_batch_size is None or self.micro_batch_size_per_gpu is None:
            return None
        per_pass = self.micro_batch_size_per_gpu * self.world_size
        if self.global_batch_size % per_pass:
            product = f"{self.micro_batch_size_per_gpu} × {self.world_size}"
            must = "global_batch_size must be a multiple of micro_batch_size_per_gpu × world_size"
            raise BadInput(f"{must}, but got {self.global_batch_size} and {product}.")
        return self.global_batch_size // per_pass

    @property
    def has_fused_output_layer(self) -> bool:
        return self.output_layer not in (None, "standard")

    @property
    def trains_in_float8(self) -> bool:
        return self.float8 not in (None, "none")

    @property
    def optimizer_learning_rate(self) -> float | None:
        """The learning rate that the optimizer gets: scaled with the ranks, where asked for.

        It is scaled by √ranks (Hoffer et al. 2017, arXiv 1705.08741, section 5) or by ranks (Goyal
        et al. 2017, arXiv 1706.02677, section 2.1), for batches that grow with them.
        """
        power = {"sqrt": 0.5, "linear": 1.0}.get(self.learning_rate_scaling or "none", 0.0)
        return None if self.learning_rate is None else self.learning_rate * self.world_size**power

    def arguments(self, steps: int) -> dict[str, Any]:
        """Return the set dimensions in the names of `transformers.TrainingArguments`.

        The learning rate is the one that the optimizer gets, scaled with the ranks.

        Args:
            steps: the number of steps of the training that the arguments are for.
        """
        arguments = {}
        for name, dimension in DIMENSIONS.items():
            is_rate = name == "learning_rate"
            value = self.optimizer_learning_rate if is_rate else getattr(self, name)
            if dimension.argument is not None and value is not None:
                arguments[dimension.argument] = dimension.to_argument(value, steps)
        return arguments

    def as_record(self) -> dict[str, Scalar]:
        """Return the record's `params`: every set field and the derived gradient accumulation."""
        record = self.model_dump(exclude_none=True)
        if self.epochs is not None and float(self.epochs).is_integer():
            record["epochs"] = int(self.epochs)
        if (accumulation_steps := self.gradient_accumulation_steps) is not None:
            record["gradient_accumulation_steps"] = accumulation_steps
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "TrialParams":
        given = {
            key: value for key, value in record.items() if key != "gradient_accumulation_steps"
        }
        return cls(**{"zero_stage": None, "offload": None, **given})


DIMENSIONS: dict[str, Dimension] = {
    name: next(each for each in field.metadata if isinstance(each, Dimension))
    for name, field in TrialParams.model_fields.items()
}


class TrainingParams(TrialParams, extra="forbid"):
    """The configuration of a trial that carbonopt trains: its loop needs all of these fields."""

    global_batch_size: Annotated[int, DIMENSIONS["global_batch_size"]]
    micro_batch_size_per_gpu: Annotated[int, DIMENSIONS["micro_batch_size_per_gpu"]]
    learning_rate: Annotated[float, DIMENSIONS["learning_rate"]]
    epochs: Annotated[float, DIMENSIONS["epochs"]]
    zero_stage: ZeroStage = 1
    offload: Offload = "none"

    @classmethod
    def of(cls, params: TrialParams) -> "TrainingParams":
        return cls(**params.model_dump())

    @property
    def gradient_accumulation_steps(self) -> int:
        steps = super().gradient_accumulation_steps
        assert steps is not None
        return steps

    @property
    def allows_whole_step(self) -> bool:
        """True if a step can be one piece, as far as that depends on the configuration.

        See `train.speed.whole_step`.
        """
        return (
            self.zero_stage == 0
            and self.gradient_accumulation_steps == 1
            and self.precision != "fp16"
        )


DIMENSION_NAMES = tuple(DIMENSIONS)
REQUIRED = tuple(name for name in DIMENSION_NAMES if DIMENSIONS[name].required)


def label(name: str) -> str:
    """Return a short name for people, for lines that show many dimensions.

    A user's own dimension has its name.
    """
    return DIMENSIONS[name].label if name in DIMENSIONS else name


def affecting(
    what: Affects,
    names: Collection[str] | None = None,
    stated: Mapping[str, StatedAffects] | None = None,
) -> tuple[str, ...]:
    """Return the dimensions that affect the quality, the cost, the memory or the kernels.

    Args:
        what: the affected thing.
        names: the dimensions to choose from; None: all of the table's.
        stated: what each user's own dimension affects; one that is not in it affects everything.
    """
    names = DIMENSIONS if names is None else names

    def affects(name: str) -> bool:
        if name in DIMENSIONS:
            return what in DIMENSIONS[name].affects
        only = (stated or {}).get(name)
        return only is None or (what == "quality") == (only == "quality")

    return tuple(filter(affects, names))


def affecting_run_cost(
    names: Collection[str], stated: Mapping[str, StatedAffects] | None = None
) -> tuple[str, ...]:
    """Return the dimensions that affect what a whole training costs.

    They affect what a step costs, or the number of steps. Trainings that differ in none of them
    cost the same, up to the scatter of measurements.

    Args:
        names: the dimensions to choose from.
        stated: as for `affecting`.
    """
    of_a_step = affecting("cost", names, stated)
    return tuple(name for name in names if name in of_a_step or name in STEPS_FOLLOW)


def rate_decays(lr_scheduler: str, warmup: float) -> bool:
    """Return whether the learning rate falls along the run, however long the run is.

    If it doesn't, a shorter run is the beginning of a longer one. Without a warm-up, inverse_sqrt
    falls over 10,000 steps, however long the run is.
    """
    return lr_scheduler not in _CONSTANT and (lr_scheduler != "inverse_sqrt" or warmup > 0)


def scheduler_arguments(
    lr_scheduler: str | None, decay_ratio: float | None, steps: int
) -> dict[str, Any]:
    """Return the arguments of a transformers scheduler beside its total and warm-up steps."""
    if lr_scheduler != STABLE_DECAY:
        return {}
    # arXiv 2405.18392, equation 2
    return {
        "num_decay_steps": math.ceil(steps * (decay_ratio or DEFAULT_DECAY_RATIO)),
        "decay_type": "1-sqrt",
    }
