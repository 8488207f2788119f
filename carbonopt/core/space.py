"""The search space: what each dimension may hold, which combinations can exist, and how many there are."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from carbonopt.core.config import Choices, Dimension, Fixed, Range, Scalar, Space
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialParams

LR_SCHEDULERS = (  # transformers.SchedulerType, those that need nothing but a number of steps and of warm-up steps
    "linear",
    "cosine",
    "cosine_with_min_lr",  # its floor comes from training_arguments.lr_scheduler_kwargs
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")

# What a dimension may hold: a tuple of values, or a type and its lowest value.
_ALLOWED: dict[str, tuple] = {
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "parameters"),
    "gradient_checkpointing": (False, True),
    "torch_compile": (False, True),
    "precision": ("bf16", "fp16", "fp32"),
    "lr_scheduler": LR_SCHEDULERS,
    "attention_implementation": ATTENTION,
    "output_layer": ("standard", "fused", "fused_fp8"),
}
_LOWEST_INT = {"global_batch_size": 1, "micro_batch_size_per_gpu": 1, "lora_rank": 0}
_FLOATS = {"learning_rate": (0.0, math.inf), "epochs": (0.0, math.inf), "weight_decay": (0.0, math.inf)}
_FLOATS["warmup_ratio"] = (0.0, 1.0)
_ZERO_ALLOWED = {"weight_decay", "warmup_ratio"}

ENUMERATION_LIMIT = 100_000  # values or combinations; what has more counts as infinite
_EXISTENCE = ("global_batch_size", "micro_batch_size_per_gpu", "zero_stage", "offload", "precision")  # in some rule


@dataclass(frozen=True)
class SearchSpace:
    """A checked space on `world_size` ranks. `on_gpu` matters to fp16, which CPU training lacks.

    Raises (on making):
        BadInput: for a value that a dimension can't hold, or where no combination can exist; names the key.
    """

    space: Space
    world_size: int
    on_gpu: bool

    def __post_init__(self) -> None:
        for name, dimension in self.dimensions().items():
            _check_values(name, dimension)
        self._check_batches()
        self._check_existence()

    def dimensions(self) -> dict[str, Dimension]:
        """Every dimension that has a value, in the order of the study file's documentation."""
        named = ((name, getattr(self.space, name)) for name in type(self.space).model_fields)
        return {name: dimension for name, dimension in named if dimension is not None}

    def free(self) -> dict[str, Choices | Range]:
        """The dimensions that the search may move."""
        return {name: dim for name, dim in self.dimensions().items() if not isinstance(dim, Fixed)}

    def params(self, values: dict[str, Scalar]) -> TrialParams:
        """The configuration for values of the free dimensions: fixed ones and defaults filled in.

        Raises:
            BadInput: the rule that the combination breaks.
        """
        broken = self.rule_broken(values)
        if broken:
            raise BadInput(broken)
        return TrialParams(**self._filled(values))

    def rule_broken(self, values: dict[str, Scalar]) -> str | None:
        """The rule that keeps this combination from existing, with the values found; None if it can exist."""
        filled = self._filled(values)
        try:
            params = TrialParams(**filled)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{first['loc'][0]}: {first['msg']}, but got {first['input']!r}."
        try:
            _ = params.gradient_accumulation_steps
        except BadInput as error:
            return str(error)
        if params.offload == "parameters" and params.zero_stage != 3:
            return f"offload: parameters needs zero_stage 3, but got {params.zero_stage}."
        if params.offload == "optimizer" and params.zero_stage == 0:
            return "offload: optimizer needs zero_stage 1, 2 or 3, but got 0."
        if params.precision == "fp16" and not self.on_gpu:
            return "precision: fp16 needs a GPU, but launch.gpus is empty."
        return None

    def start_values(self, start: dict[str, Scalar]) -> dict[str, Scalar]:
        """Values of the free dimensions for the user's own first configuration.

        Raises:
            BadInput: if it names an unknown dimension, leaves a free one out, lies outside the space or can't exist.
        """
        free = self.free()
        for name, value in start.items():
            if name not in type(self.space).model_fields:
                known = ", ".join(type(self.space).model_fields)
                raise BadInput(f"search.start: unknown dimension {name}; known: {known}.")
            dimension = self.dimensions().get(name)
            if dimension is None or not _holds(dimension, value):
                raise BadInput(
                    f"search.start.{name}: {value!r} is not in search.space.{name} ({describe(dimension)}); "
                    "add it there, or change the start."
                )
        missing = [name for name in free if name not in start]
        if missing:
            raise BadInput(
                f"search.start must name every dimension that the search moves; missing: {', '.join(missing)}."
            )
        values = {name: start[name] for name in free}
        broken = self.rule_broken(values)
        if broken:
            raise BadInput(f"search.start: {broken}")
        return values

    def check_fits(self, train_sequences: int) -> None:
        """Refuses a global batch that needs more sequences than the training data has.

        Raises:
            BadInput
        """
        dimension = self.space.global_batch_size
        ends = (dimension.high,) if isinstance(dimension, Range) else _values("global_batch_size", dimension) or []
        largest = max(float(end) for end in ends)
        if largest > train_sequences:
            raise BadInput(
                f"search.space.global_batch_size must be at most the training data's {train_sequences} sequences, "
                f"but got {largest:g}; make it or workload.sequence_length smaller."
            )

    @cached_property
    def combinations(self) -> list[dict[str, Scalar]] | None:
        """Every combination of free values that can exist, or None where the space is infinite."""
        values = self._value_lists()
        if set(values) < set(self.free()) or math.prod(map(len, values.values())) > ENUMERATION_LIMIT:
            return None
        return [combination for combination in _products(values) if self.rule_broken(combination) is None]

    def _filled(self, values: dict[str, Scalar]) -> dict[str, Any]:
        fixed = {name: dim.value for name, dim in self.dimensions().items() if isinstance(dim, Fixed)}
        filled: dict[str, Any] = {**fixed, **values, "world_size": self.world_size}
        # Rounded down here; a remainder then breaks the rule of gradient accumulation, which names the values.
        filled.setdefault("micro_batch_size_per_gpu", max(1, int(filled["global_batch_size"]) // self.world_size))
        return filled

    def _value_lists(self) -> dict[str, list[Scalar]]:
        """The values of each free dimension that has countably many."""
        lists = {}
        for name, dimension in self.free().items():
            values = _values(name, dimension)
            if values is not None:
                lists[name] = values
        return lists

    def _check_existence(self) -> None:
        """Refuses a space in which nothing can exist. Only dimensions that a rule is about are gone through."""
        lists = {name: self._value_lists().get(name) or [_any_value(dim)] for name, dim in self.free().items()}
        some = {name: values[0] for name, values in lists.items() if name not in _EXISTENCE}
        candidates = _products({name: values for name, values in lists.items() if name in _EXISTENCE})
        broken = None
        for combination in itertools.islice(candidates, ENUMERATION_LIMIT):
            broken = self.rule_broken({**combination, **some})
            if broken is None:
                return
        if next(candidates, None) is None:
            raise BadInput(f"search.space holds no configuration that can exist: {broken}")

    def _check_batches(self) -> None:
        """Every global batch that is named must be divisible by some micro batch × world size."""
        batch, micro = self.space.global_batch_size, self.space.micro_batch_size_per_gpu
        if isinstance(batch, Range):
            return
        micros = None if micro is None else _values("micro_batch_size_per_gpu", micro)
        for size in batch.choices if isinstance(batch, Choices) else (batch.value,):
            size = int(size)
            if micros is None:
                if size % self.world_size:
                    raise BadInput(
                        "search.space.global_batch_size must be a multiple of the world size, "
                        f"but got {size} and {self.world_size}."
                    )
            elif all(size % (int(one) * self.world_size) for one in micros):
                raise BadInput(
                    "search.space.global_batch_size must be a multiple of micro_batch_size_per_gpu × world_size, "
                    f"but got {size} and {_listed(micros)} × {self.world_size}."
                )


def describe(dimension: Dimension | None) -> str:
    """A dimension in the words of the study file."""
    if dimension is None:
        return "not in the space"
    if isinstance(dimension, Fixed):
        return f"fixed at {dimension.value}"
    if isinstance(dimension, Choices):
        return f"choices {_listed(dimension.choices)}"
    return f"{dimension.low:g} to {dimension.high:g}{', log' if dimension.log else ''}"


def is_integer(name: str) -> bool:
    """Whether a range over this dimension takes whole numbers only."""
    return name in _LOWEST_INT or name == "zero_stage"


def _check_values(name: str, dimension: Dimension) -> None:
    where = f"search.space.{name}"
    if isinstance(dimension, Range):
        if name in _ALLOWED and name != "zero_stage":
            raise BadInput(f"{where} takes choices or a single value, not a range; allowed: {_listed(_ALLOWED[name])}.")
        ends: tuple[Scalar, ...] = (dimension.low, dimension.high)
        if is_integer(name):
            if any(not float(end).is_integer() for end in ends) or (dimension.step or 1) % 1:
                step = "" if dimension.step is None else f", step {dimension.step:g}"
                raise BadInput(f"{where} takes whole numbers, but got {describe(dimension)}{step}.")
            ends = tuple(int(end) for end in ends)
    else:
        ends = dimension.choices if isinstance(dimension, Choices) else (dimension.value,)
    for value in ends:
        problem = _value_problem(name, value)
        if problem:
            raise BadInput(f"{where}: {problem}, but got {value!r}.")


def _value_problem(name: str, value: Scalar) -> str | None:
    if name in _ALLOWED:
        # 0 == False and 1 == True in Python, but `zero_stage: true` is a slip.
        right = [allowed for allowed in _ALLOWED[name] if allowed == value and type(allowed) is type(value)]
        return None if right else f"allowed: {_listed(_ALLOWED[name])}"
    if isinstance(value, bool | str):
        return "must be a number"
    if name in _LOWEST_INT:
        lowest = _LOWEST_INT[name]
        whole = isinstance(value, int) and lowest <= value <= 10**9
        return None if whole else f"must be a whole number from {lowest} to 10^9"
    low, high = _FLOATS[name]
    if isinstance(value, int) and abs(value) > 1e12:
        return "must be below 1e12"
    if not math.isfinite(value) or value > high or value < low or (value == low and name not in _ZERO_ALLOWED):
        bound = f"must be {'at least' if name in _ZERO_ALLOWED else 'above'} {low:g}"
        return bound + (f" and at most {high:g}" if math.isfinite(high) else "")
    return None


def _values(name: str, dimension: Dimension) -> list[Scalar] | None:
    if isinstance(dimension, Fixed):
        return [dimension.value]
    if isinstance(dimension, Choices):
        return list(dimension.choices)
    step = dimension.step or (1 if is_integer(name) else None)
    if step is None or (dimension.high - dimension.low) / step >= ENUMERATION_LIMIT:
        return None
    if is_integer(name):
        return list(range(int(dimension.low), int(dimension.high) + 1, int(step)))
    count = int((dimension.high - dimension.low) / step + 1e-9) + 1
    return [dimension.low + index * step for index in range(count)]


def _any_value(dimension: Choices | Range) -> Scalar:
    return dimension.high if isinstance(dimension, Range) else dimension.choices[0]


def _holds(dimension: Dimension, value: Scalar) -> bool:
    if isinstance(dimension, Range):
        return not isinstance(value, bool | str) and dimension.low <= value <= dimension.high
    held = dimension.choices if isinstance(dimension, Choices) else (dimension.value,)
    return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in held)


def _products(values: dict[str, list[Scalar]]) -> Iterator[dict[str, Scalar]]:
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)
