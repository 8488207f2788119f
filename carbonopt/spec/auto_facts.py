"""The facts by which `space: auto` chooses a search space, and the chosen space.

`space.auto_space` has the rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from carbonopt.core.dimensions import DIMENSION_NAMES, DIMENSIONS
from carbonopt.core.values import Frozen, Given, Scalar
from carbonopt.spec.space_settings import Choices, Domain, Fixed, Range, Space
from carbonopt.spec.workload_settings import Workload

# The kind of training: of all weights from random ones, of all from pretrained ones, or of low-rank
# adapters of pretrained ones.
Kind = Literal["scratch", "full", "lora"]

_ADAPTED_FROM = 1_000_000_000  # parameters; training them all would take 16 GB


class Facts(Frozen):
    """The facts by which the space is chosen; None: not known, or there is none."""

    task: str
    pretrained: bool  # False: training begins with random weights
    on_gpu: bool
    world_size: int = 1
    gpu_memory_gib: float | None = None  # memory of each GPU
    has_bf16: bool = True  # True if the GPUs have bf16
    has_float8: bool = False
    parameters: int | None = None
    layers: int | None = None
    width: int | None = None
    vocab_size: int | None = None
    train_examples: int | None = None
    train_tokens: int | None = None
    given: tuple[str, ...] = ()  # keys of workload.training_arguments
    # dimensions that the model or the scheduler can't have, and why
    lacking: dict[str, str] = Field(default_factory=dict)
    # True if adapters are trained instead of the pretrained weights; None: the model's size decides
    adapts: bool | None = None

    @property
    def tokens_per_example(self) -> float | None:
        return (
            self.train_tokens / self.train_examples
            if self.train_tokens and self.train_examples
            else None
        )

    @property
    def kind(self) -> Kind:
        if not self.pretrained:
            return "scratch"
        if self.adapts is not None:
            return "lora" if self.adapts else "full"
        return (
            "lora"
            if (self.parameters or 0) >= _ADAPTED_FROM and "lora_rank" not in self.lacking
            else "full"
        )


class AutoSpace(Frozen):
    """The chosen space, with the facts and the reasons."""

    facts: Facts
    space: Space
    start: dict[str, Given]  # the first configuration, as the literature advises where it does
    why: dict[str, str]  # the reason for each dimension of the space
    left_out: dict[str, str]  # the dimensions that are left out, and why


def known_facts(workload: Workload, world_size: int, on_gpu: bool) -> Facts:
    """Return the facts that a study file has, before anything is prepared."""
    pretrained = workload.model is not None and workload.model.from_config is None
    given = tuple(sorted(workload.training_arguments))
    lacking = {}
    if (scheduler := workload.training_arguments.get("lr_scheduler_type")) is not None:
        idle = (
            name for name, dimension in DIMENSIONS.items() if not dimension.acts_with(scheduler)
        )
        lacking = dict.fromkeys(
            idle, f"it has no effect with workload.training_arguments.lr_scheduler_type {scheduler}"
        )
    return Facts(
        task=workload.task,
        pretrained=pretrained,
        on_gpu=on_gpu,
        world_size=world_size,
        given=given,
        lacking=lacking,
    )


class Draft:
    """A space that is being chosen."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.domains: dict[str, Domain] = {}
        self.why: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.start: dict[str, Scalar] = {}

    def take(
        self,
        name: str,
        domain: Scalar | Sequence[Scalar] | Range,
        why: str,
        start: Scalar | None = None,
    ) -> None:
        """Put a dimension into the space.

        It is left out if the study file gives it, the model lacks it or the task has no such
        dimension.

        Args:
            name: the dimension.
            domain: its value, its choices or its range.
            why: the reason for the domain.
            start: its value in the first configuration; None: its first choice.
        """
        dimension = DIMENSIONS[name]
        if dimension.tasks and self.facts.task not in dimension.tasks:
            return None
        if name in self.facts.lacking:
            return self.leave(name, self.facts.lacking[name])
        if self._given(name) is not None:
            return self.leave(name, "")
        self.why[name] = why
        if isinstance(domain, Range):
            self.domains[name] = domain
        elif isinstance(domain, Scalar):
            self.domains[name] = Fixed(value=domain)
        else:
            self.domains[name] = (
                Choices(choices=tuple(domain)) if len(domain) > 1 else Fixed(value=domain[0])
            )
        chosen = self.domains[name]
        if isinstance(chosen, Choices) and start is None:
            self.start[name] = chosen.choices[0]
        elif not isinstance(chosen, Fixed):
            assert start is not None  # a range has no first choice
            self.start[name] = start
        return None

    def leave(self, name: str, why: str) -> None:
        """Note why a dimension of the task is left out.

        If the study file gives it, that is the reason.
        """
        tasks = DIMENSIONS[name].tasks
        if not tasks or self.facts.task in tasks:
            self.left_out[name] = self._given(name) or why

    def _given(self, name: str) -> str | None:
        """Return, in words, how the study file decides a dimension; None if it doesn't."""
        given = next(
            (argument for argument in DIMENSIONS[name].arguments if argument in self.facts.given),
            None,
        )
        return None if given is None else f"workload.training_arguments gives {given}"

    def finished(self) -> AutoSpace:
        """Return the chosen space, with everything in the table's order."""

        def ordered(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: values[name] for name in DIMENSION_NAMES if name in values}

        return AutoSpace(
            facts=self.facts,
            space=Space(**ordered(self.domains)),
            start=ordered(self.start),
            why=ordered(self.why),
            left_out=ordered(self.left_out),
        )
