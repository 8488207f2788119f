"""The search space: the values of each dimension, and the combinations that can exist."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from carbonopt.core.dimensions import (
    DEFAULT_DECAY_RATIO,
    DEFAULT_LR_SCHEDULER,
    DIMENSION_NAMES,
    DIMENSIONS,
    LARGEST_INT,
    LR_SCHEDULERS,
    STABLE_DECAY,
    TrialParams,
)
from carbonopt.core.errors import BadInput
from carbonopt.core.format import visible_text
from carbonopt.core.refusals import first_error
from carbonopt.core.values import Scalar, step_of, stepped, steps_between
from carbonopt.spec.space_settings import Choices, Domain, Fixed, Range, Space, values_of

# Share of a step by which a number may differ from a value that it stands for, as 0.1 + 0.2 does.
_SAME_STEP = 1e-9
ENUMERATION_LIMIT = 100_000  # values or combinations; a space with more counts as infinite
# Dimensions that some rule is about.
_EXISTENCE = (
    "global_batch_size",
    "micro_batch_size_per_gpu",
    "zero_stage",
    "offload",
    "precision",
    "output_layer",
    "torch_compile",
    "float8",
    "num_generations",
    "optimizer",
    "weight_averaging",
    "world_size",
)

# Dimensions of `_EXISTENCE` of which each choice has to be in some combination that can exist;
# otherwise the space is refused. Batch sizes are not among them: a large one often goes with few
# values of other dimensions, or with none, which is no mistake.
_PARTNERED = (
    "zero_stage",
    "offload",
    "precision",
    "output_layer",
    "torch_compile",
    "float8",
    "optimizer",
    "weight_averaging",
    "world_size",
)


@dataclass(frozen=True)
class SearchSpace:
    """A checked search space.

    Raises:
        BadInput: for a value that a dimension can't have, or where no combination can exist.
    """

    dimensions: Space
    world_size: int  # ranks that the launch has for a trial
    on_gpu: bool  # training on CPUs lacks fp16 and float8
    # True if users name dimensions of their own, as for a script: carbonopt then adds none that the
    # space leaves out. The task decides.
    own_dimensions: bool = False

    def __post_init__(self) -> None:
        for name, domain in self.dimensions.domains().items():
            _check_values(name, domain, self.own_dimensions)
        ranks = self.dimensions["world_size"]
        if ranks is not None and highest(ranks) > self.world_size:
            most = f"at most {self.world_size}, the ranks that launch has for a trial"
            raise BadInput(
                f"search.space.world_size must be {most}, but can be {highest(ranks):g}."
            )
        self._check_batches()
        if not self.own_dimensions:
            schedulers = tuple(map(str, values_of(self.dimensions["lr_scheduler"])))
            check_lr_schedule(
                self.dimensions,
                schedulers or (DEFAULT_LR_SCHEDULER,),
                describe(self.dimensions["lr_scheduler"]),
            )
        self._check_existence()

    def params(self, values: dict[str, Scalar]) -> TrialParams:
        """Return the configuration for values of the free dimensions.

        Args:
            values: may leave out the dimensions that have a single value.

        Raises:
            BadInput: if they break a rule, with that rule.
        """
        try:
            params = TrialParams(**self._filled(values))
        except ValidationError as error:
            raise BadInput(first_error(error)) from error
        _ = params.gradient_accumulation_steps  # raises BadInput if it is no whole number
        if broken := self._broken_by(params):
            raise BadInput(broken)
        return params

    def canonical(self, values: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the same values of the free dimensions for all configurations that train alike.

        A dimension that has no effect beside the others gets its lowest value.
        """
        fixed = values_of(self.dimensions["lr_scheduler"])[:1]
        scheduler = str(values.get("lr_scheduler", *fixed or (DEFAULT_LR_SCHEDULER,)))
        idle = [
            name
            for name in values
            if name in DIMENSIONS and not DIMENSIONS[name].acts_with(scheduler)
        ]
        alike = {name: lowest(self.dimensions[name]) for name in idle}
        if "learning_rate_scaling" in values and self._filled(values)["world_size"] == 1:
            alike["learning_rate_scaling"] = values_of(self.dimensions["learning_rate_scaling"])[0]
        return values if self.own_dimensions else {**values, **alike}

    def rule_broken(self, values: dict[str, Scalar]) -> str | None:
        """Return the rule that keeps this combination from existing, with the values found.

        The result is None if the combination can exist.
        """
        try:
            self.params(values)
        except BadInput as error:
            return str(error)
        return None

    def _broken_by(self, params: TrialParams) -> str | None:
        """Return the rule that a configuration breaks, its gradient accumulation aside."""
        if params.num_generations and (params.global_batch_size or 0) % params.num_generations:
            got = f"{params.global_batch_size} and {params.num_generations}"
            return (
                "global_batch_size, in completions, must be a multiple of num_generations, but got"
                f" {got}."
            )
        return None if self.own_dimensions else self._rule_of_trainings(params)

    def _rule_of_trainings(self, params: TrialParams) -> str | None:
        """Return the broken rule of a trial that carbonopt trains itself, as `rule_broken` does.

        In a user's script, only its user knows which settings go together.
        """
        if params.offload == "parameters" and params.zero_stage != 3:
            return f"offload: parameters needs zero_stage 3, but got {params.zero_stage}."
        if params.offload == "optimizer" and params.zero_stage == 0:
            return "offload: optimizer needs zero_stage 1, 2 or 3, but got 0."
        if params.optimizer == "muon" and params.zero_stage != 0:
            return (
                "optimizer: muon needs zero_stage 0, whose matrices are whole, but got"
                f" {params.zero_stage}."
            )
        if params.weight_averaging and params.zero_stage == 3:
            return (
                "weight_averaging needs zero_stage 0, 1 or 2, where each rank has all weights, but"
                " got 3."
            )
        if params.precision == "fp16" and not self.on_gpu:
            return "precision: fp16 needs a GPU, but launch.gpus is empty."
        if params.output_layer == "fused_fp8" and not self.on_gpu:
            return "output_layer: fused_fp8 needs a GPU, but launch.gpus is empty; use fused."
        return self._rule_of_float8(params) if params.trains_in_float8 else None

    def _rule_of_float8(self, params: TrialParams) -> str | None:
        if not self.on_gpu:
            return f"float8: {params.float8} needs a GPU, but launch.gpus is empty; use none."
        if params.precision != "bf16":
            got = params.precision or "none"
            return f"float8: {params.float8} needs precision: bf16, but got {got}."
        if not params.torch_compile:
            return (
                f"float8: {params.float8} needs torch_compile: true, without which rounding takes"
                f" longer than float8 saves, but got {params.torch_compile or False}."
            )
        if params.zero_stage == 3:
            return (
                f"float8: {params.float8} needs zero_stage 0, 1 or 2, since its layers would keep"
                " all weights that stage 3 gathers, but got 3."
            )
        return None

    def start_values(self, start: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the values of the free dimensions in the user's own first configuration.

        They are the space's own: 1 for 1.0 among choices 1 and 2. A dimension that has a single
        value need not be named.

        Raises:
            BadInput: if the configuration names an unknown dimension, leaves one of several values
                out, lies outside the space or can't exist.
        """
        given = {name: self._start_value(name, value) for name, value in start.items()}
        free = self.dimensions.free()
        values = self._single | given
        if missing := _listed(name for name in free if name not in values):
            raise BadInput(
                "search.start must name every dimension that the search varies; missing:"
                f" {missing}."
            )
        values = self.canonical({name: values[name] for name in free})
        if broken := self.rule_broken(values):
            raise BadInput(f"search.start: {broken}")
        return values

    def _start_value(self, name: str, value: Scalar) -> Scalar:
        known = self.dimensions.domains() if self.own_dimensions else DIMENSION_NAMES
        if name not in known:
            names = f"known: {_listed(known)}" if known else "search.space has no dimensions"
            raise BadInput(f"search.start: unknown dimension {name}; {names}.")
        domain = self.dimensions[name]
        own = None if domain is None else own_value(name, domain, value)
        if own is None:
            place = f"search.space.{name} ({describe(domain)}{_nearest_text(name, domain, value)})"
            raise BadInput(
                f"search.start.{name}: {value!r} is not in {place}; add it there, or change the"
                " start."
            )
        return own

    def check_fits(self, train_examples: int) -> None:
        """Check that the space fits the number of training examples.

        Raises:
            BadInput: if a global batch needs more examples than the training data has, or a trial
                would have more than LARGEST_INT steps.
        """
        if (generations := self.dimensions["num_generations"]) is not None:
            train_examples *= int(lowest(generations))
        domain = self.dimensions["global_batch_size"]
        largest = highest(domain)
        if largest > train_examples:
            most = f"at most the training data's {train_examples} examples, but got {largest:g}"
            raise BadInput(f"search.space.global_batch_size must be {most}; make it smaller.")
        steps = highest(self.dimensions["epochs"]) * (train_examples // int(float(lowest(domain))))
        if steps > LARGEST_INT:
            most = (
                f"at most {LARGEST_INT:,} steps, but {highest(self.dimensions['epochs']):g} make"
                f" {steps:.3g}"
            )
            raise BadInput(f"search.space.epochs must make {most}; lower its highest value.")

    @cached_property
    def combinations(self) -> list[dict[str, Scalar]] | None:
        """Every combination of free values that can exist, with those that train alike once.

        It is None where the space is infinite.
        """
        free = self.dimensions.free()
        values = {
            name: listed
            for name, domain in free.items()
            if (listed := all_values(name, domain)) is not None
        }
        if values.keys() < free.keys() or math.prod(map(len, values.values())) > ENUMERATION_LIMIT:
            return None
        different = (
            combination
            for combination in _products(values)
            if combination == self.canonical(combination)
        )
        return [combination for combination in different if self.rule_broken(combination) is None]

    @cached_property
    def _single(self) -> dict[str, Scalar]:
        """The values of the dimensions that have a single one, fixed or not."""
        values = {
            name: single_value(name, domain) for name, domain in self.dimensions.domains().items()
        }
        return {name: value for name, value in values.items() if value is not None}

    def _filled(self, values: dict[str, Scalar]) -> dict[str, Any]:
        """Return these values with those of all other dimensions: single ones and defaults."""
        filled: dict[str, Any] = {"world_size": self.world_size, **self._single, **values}
        if self.own_dimensions:
            return {"zero_stage": None, "offload": None, **filled}
        # Rounded down here; a remainder then breaks the rule of gradient accumulation, which names
        # the values.
        filled.setdefault(
            "micro_batch_size_per_gpu",
            max(1, int(filled["global_batch_size"]) // int(filled["world_size"])),
        )
        return filled

    def _check_existence(self) -> None:
        """Refuse a space in which nothing can exist, or some choice can't.

        Such a choice would silently never be tried. A dimension that no rule is about is checked
        with one value.
        """
        lists = {
            name: (
                all_values(name, domain)
                or [domain.last if isinstance(domain, Range) else domain.choices[0]]
            )
            for name, domain in self.dimensions.free().items()
        }
        some = {name: values[0] for name, values in lists.items() if name not in _EXISTENCE}
        candidates = _products(
            {name: values for name, values in lists.items() if name in _EXISTENCE}
        )
        # the choices that no combination so far could exist with, and the rule that they broke
        alone = {(name, value): "" for name in _PARTNERED if name in lists for value in lists[name]}
        broken, any_exists = None, False
        for combination in itertools.islice(candidates, ENUMERATION_LIMIT):
            if (broken := self.rule_broken({**combination, **some})) is None:
                any_exists = True
                alone = {
                    choice: rule
                    for choice, rule in alone.items()
                    if combination[choice[0]] != choice[1]
                }
                if not alone:
                    return
            else:
                alone |= {choice: broken for choice in alone if combination[choice[0]] == choice[1]}
        if next(candidates, None) is not None:
            return
        if not any_exists:
            raise BadInput(f"search.space holds no configuration that can exist: {broken}")
        for (name, value), rule in alone.items():
            raise BadInput(
                f"search.space.{name}: {value} goes with nothing else in search.space: {rule}"
            )

    def _check_batches(self) -> None:
        """Check that some micro batch × world size divides every global batch that is named."""
        micro, ranks = self.dimensions["micro_batch_size_per_gpu"], self.dimensions["world_size"]
        if self.own_dimensions and micro is None:
            return
        micros = None if micro is None else all_values("micro_batch_size_per_gpu", micro)
        numbers = (
            [self.world_size]
            if ranks is None
            else all_values("world_size", ranks) or [self.world_size]
        )
        given = _listed(numbers)
        product = (
            ("micro_batch_size_per_gpu × world_size", f"{_listed(micros)} × {given}")
            if micros
            else None
        )
        factor, given = product or ("the world size", given)
        for size in map(int, values_of(self.dimensions["global_batch_size"])):
            pairs = itertools.product(micros or [1], numbers)
            if all(size % (int(micro_batch) * int(number)) for micro_batch, number in pairs):
                must = f"search.space.global_batch_size must be a multiple of {factor}"
                raise BadInput(f"{must}, but got {size} and {given}.")


def check_lr_schedule(space: Space, schedulers: Sequence[str], in_words: str) -> None:
    """Check the dimensions that depend on the scheduler of the learning rate.

    Args:
        schedulers: the schedulers that a trial may have.
        in_words: the schedulers as the study file gives them.

    Raises:
        BadInput: for a dimension that has no effect with any of the schedulers, or if warm-up and
            decay can take more than a whole run.
    """
    for name in DIMENSION_NAMES:
        acts_with = DIMENSIONS[name].acts_with
        if space[name] is not None and not any(map(acts_with, schedulers)):
            needed = f"lr_scheduler {' or '.join(filter(acts_with, LR_SCHEDULERS))}"
            raise BadInput(
                f"search.space.{name} acts only with {needed}, but lr_scheduler is {in_words};"
                f" set it so, or leave {name} out."
            )
    if STABLE_DECAY in schedulers and space["warmup_ratio"] is not None:
        warmup = highest(space["warmup_ratio"])
        decay = (
            DEFAULT_DECAY_RATIO if space["decay_ratio"] is None else highest(space["decay_ratio"])
        )
        if warmup + decay > 1 + 1e-9:  # the tolerance is for decimal fractions
            rule = f"warmup_ratio + decay_ratio must be at most 1, a whole run of {STABLE_DECAY}"
            raise BadInput(
                f"search.space: {rule}, but can be {warmup:g} + {decay:g}; lower the highest value"
                " of one of the two."
            )


def describe(domain: Domain | None) -> str:
    """Return a domain in the words of the study file."""
    if domain is None:
        return "not in the space"
    if isinstance(domain, Fixed):
        return f"fixed at {visible_text(domain.value)}"
    if isinstance(domain, Choices):
        return f"choices {', '.join(map(visible_text, domain.choices))}"
    step = "" if domain.step is None else f", step {domain.step:g}"
    return f"{domain.low:g} to {domain.high:g}{', log' if domain.log else ''}{step}"


def _check_values(name: str, domain: Domain, own_dimensions: bool) -> None:
    """Check that a dimension can have the values of a domain.

    Args:
        own_dimensions: whether the user may give the dimension another name.
    """
    if name not in DIMENSIONS:
        return  # a user's own dimension can have any value
    renamed = (
        f"; under another name, such as own_{name}, it can be anything" if own_dimensions else ""
    )
    where, dimension, values = f"search.space.{name}", DIMENSIONS[name], values_of(domain)
    if isinstance(domain, Range):
        if dimension.choices and not dimension.integer:
            allowed = _listed(dimension.choices)
            raise BadInput(
                f"{where} takes choices or a single value, not a range; allowed: {allowed}."
            )
        if dimension.integer and (domain.low % 1 or domain.high % 1 or (domain.step or 1) % 1):
            raise BadInput(f"{where} takes whole numbers, but got {describe(domain)}.")
        values = tuple(map(int if dimension.integer else float, (domain.low, domain.high)))
    for value in values:
        if problem := dimension.problem(value):
            raise BadInput(f"{where}: {problem}, but got {value!r}{renamed}.")


def is_integer(name: str, domain: Range) -> bool:
    """Return whether a range has whole numbers only.

    A range of a user's own dimension does if its step and its lowest value are whole numbers.
    """
    if name in DIMENSIONS:
        return DIMENSIONS[name].integer
    return domain.step is not None and not domain.step % 1 and not domain.low % 1


def all_values(name: str, domain: Domain) -> list[Scalar] | None:
    """Return the values that a domain can have; None if there are too many."""
    if (single := single_value(name, domain)) is not None:
        return [single]
    if not isinstance(domain, Range):
        return list(values_of(domain))
    low, high, integer = domain.low, domain.high, is_integer(name, domain)
    step = domain.step or (1 if integer else None)
    if step is None or (high - low) / step >= ENUMERATION_LIMIT:
        return None
    return stepped(int(low), int(high), int(step)) if integer else stepped(low, high, step)


def single_value(name: str, domain: Domain) -> Scalar | None:
    """Return the value of a domain that has a single one; None: it has several."""
    if not isinstance(domain, Range):
        values = values_of(domain)
        return values[0] if len(values) == 1 else None
    if domain.low < domain.last:
        return None
    return int(domain.low) if is_integer(name, domain) else domain.low


def lowest(domain: Any) -> Scalar:
    """Return the lowest value of a domain of numbers."""
    number: Scalar = domain.low if isinstance(domain, Range) else min(values_of(domain))
    return number


def highest(domain: Any) -> float:
    """Return the highest value of a domain of numbers."""
    return float(domain.last if isinstance(domain, Range) else max(values_of(domain)))


def own_value(name: str, domain: Domain, value: Scalar) -> Scalar | None:
    """Return a value as a domain has it: 1 for 1.0 among choices 1 and 2; None: it hasn't."""
    if not isinstance(domain, Range):
        is_bool = isinstance(value, bool)
        same = (each for each in values_of(domain) if isinstance(each, bool) == is_bool)
        return next((each for each in same if each == value), None)
    if isinstance(value, bool | str) or not domain.low <= value <= domain.high:
        return None
    if (step := _step(name, domain)) is None:
        return float(value)
    below, above = _neighbours(name, domain, step, value)
    near = below if value - below < above - value else above
    return near if abs(value - near) <= _SAME_STEP * step else None


def _step(name: str, domain: Range) -> float | None:
    """Return the distance of a range's values; None: it is continuous."""
    return domain.step or (1.0 if is_integer(name, domain) else None)


def _neighbours(name: str, domain: Range, step: float, value: float) -> tuple[Any, Any]:
    """Return the values below and above (or at) a number that lies in a range with steps."""
    low, last, kind = domain.low, domain.last, int if is_integer(name, domain) else float
    index = steps_between(low, min(value, last), step)
    below = step_of(low, step, index)
    above = min(last, step_of(low, step, index + 1))
    return kind(below), kind(above)


def _nearest_text(name: str, domain: Domain | None, value: Scalar) -> str:
    """Name the values of a range with steps that are next to a number between its ends."""
    if not isinstance(domain, Range) or isinstance(value, bool | str):
        return ""
    step = _step(name, domain)
    if step is None or not domain.low <= value <= domain.high:
        return ""
    near = dict.fromkeys(_neighbours(name, domain, step, value))
    return f"; near it: {_listed(near)}"


def _products(values: dict[str, list[Scalar]]) -> Iterator[dict[str, Scalar]]:
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _listed(values: Iterable[Scalar]) -> str:
    return ", ".join(map(str, values))
