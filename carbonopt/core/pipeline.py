"""A pipeline: studies one after the other, of which the next trains what the one before has recommended."""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carbonopt.core import values
from carbonopt.core.config import Frozen, Name
from carbonopt.core.study import StudyData

_MOST_WAYS = 64  # through all steps; each beginning is a study of its own
LEDGER, REPORT = "pipeline.json", "report"  # its own file and folder, beside the folders of its steps
Taken = Mapping[str, int]  # which of a step's configurations is handed on, by step: 1 is the recommended one


class Step(Frozen):
    step: Annotated[Name, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # a folder is called by it
    study: Name  # its study file; relative to the pipeline's
    needs: dict[Literal["model", "reward"], str] = Field(default_factory=dict)  # of which earlier steps
    carry: int = Field(default=1, ge=1, le=9)  # of how many of its configurations the next steps begin


class Pipeline(Frozen):
    """One file that chains studies."""

    name: Name
    pipeline: Annotated[tuple[Step, ...], Field(min_length=1)]

    def faults(self) -> dict[str, bool]:
        names = [step.step for step in self.pipeline]
        later = {
            f"pipeline.{place}.needs.{key} must be an earlier step, but is {name!r}": name not in names[:place]
            for place, step in enumerate(self.pipeline)
            for key, name in step.needs.items()
        }
        unused = {
            f"pipeline.{place}.carry must be 1 where no later step needs {step.step}, but is {step.carry}": True
            for place, step in enumerate(self.pipeline)
            if step.carry > 1 and not self.hands_on(step)
        }
        ways = math.prod(step.carry for step in self.pipeline)
        many = f"pipeline: carry may make {_MOST_WAYS} ways through all steps at most, but makes {ways}"
        taken = f"pipeline: no step can be called {REPORT} or {LEDGER}, which are the pipeline's own"
        alike = f"pipeline: steps must differ in their names, but are {', '.join(names)}"
        return {
            alike: len({name.lower() for name in names}) < len(names),
            taken: not {REPORT, LEDGER}.isdisjoint(map(str.lower, names)),
            many: ways > _MOST_WAYS,
            **later,
            **unused,
        }

    def hands_on(self, step: Step) -> int:
        """How many of its configurations later steps begin with."""
        return step.carry if any(step.step in other.needs.values() for other in self.pipeline) else 0

    def before(self, step: Step) -> tuple[Step, ...]:
        """What a step begins with, directly or not, in their order."""
        names = set(step.needs.values())
        for other in reversed(self.pipeline):  # a step needs earlier ones only
            names |= set(other.needs.values()) if other.step in names else set()
        return tuple(other for other in self.pipeline if other.step in names)

    def folder(self, step: Step, taken: Taken) -> str:
        """Of its study, within the pipeline's: called by it and by what else than the recommended it begins with."""
        ranks = ((other.step, taken.get(other.step, 1)) for other in self.before(step))
        return step.step + "".join(f"@{name}-{rank}" for name, rank in ranks if rank > 1)

    def beginnings(self, step: Step) -> Iterator[dict[str, int]]:
        """What a step may begin with, the recommended configurations first: each is a study of its own."""
        return _choices(self.before(step))

    def folders(self) -> list[str]:
        """Of all studies that the pipeline may need, in the order in which they run."""
        return [self.folder(step, taken) for step in self.pipeline for taken in self.beginnings(step)]

    def paths(self) -> Iterator[dict[str, int]]:
        """Ways through all steps, by which of each step's configurations is taken: the recommended ones first."""
        return _choices(self.pipeline)


def _choices(steps: tuple[Step, ...]) -> Iterator[dict[str, int]]:
    for ranks in product(*(range(1, step.carry + 1) for step in steps)):
        yield {step.step: rank for step, rank in zip(steps, ranks, strict=True)}


class PipelineSession(values.Frozen):
    """What one call of `carbonopt run` spent on a pipeline, in kWh without PUE."""

    started_at: str  # ISO 8601, UTC
    duration_s: values.Finite = 0.0
    between_kwh: values.Finite = 0.0  # between its studies: reports, weights
    between_gpu_kwh: values.Finite | None = None  # the GPUs' part of it; None: no GPU was measured
    # The whole call by one reading at its begin and one at its end; None: it was killed, and nobody read at its end.
    outer_kwh: values.Finite | None = None
    outer_gpu_kwh: values.Finite | None = None


class PipelineData(values.Frozen):
    pipeline: Pipeline
    studies: dict[str, StudyData]  # by their folders, as far as they have begun
    sessions: tuple[PipelineSession, ...]
