"""A pipeline: studies that run one after the other.

Each study trains what the one before it has recommended.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carbonopt.core import values
from carbonopt.spec.base_settings import Name, Settings
from carbonopt.spec.study_data import StudyData

_MOST_WAYS = 64  # ways through all steps; each beginning is a study of its own
# The pipeline's own file and folder, beside the folders of its steps.
LEDGER, REPORT = (
    "pipeline.json",
    "report",
)
# The configuration that each step hands on, by its rank: 1 is the recommended one.
Taken = Mapping[str, int]


class PipelineStep(Settings):
    """A step of a pipeline."""

    step: Annotated[Name, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """The name of the step and of its folder: letters, digits, `_`, `.` and `-`."""

    study: Name
    """The step's study file; a relative path starts at the pipeline file's folder."""

    needs: dict[Literal["model", "reward"], str] = Field(default_factory=dict)
    """Earlier steps: `model` replaces the study file's model and tokenizer, `reward` replaces the
    reward of the task `rlhf`."""

    carry: int = Field(default=1, ge=1, le=9)
    """The number of the step's configurations that are passed on; the next steps have a study for
    each."""


class Pipeline(Settings):
    """The file that chains studies."""

    name: Name
    """The pipeline's name and that of its folder."""

    pipeline: Annotated[tuple[PipelineStep, ...], Field(min_length=1)]
    """The steps in their order."""

    def violations(self) -> dict[str, bool]:
        names = [step.step for step in self.pipeline]
        later = {
            f"pipeline.{place}.needs.{key} must be an earlier step, but is {name!r}": (
                name not in names[:place]
            )
            for place, step in enumerate(self.pipeline)
            for key, name in step.needs.items()
        }
        unused = {
            f"pipeline.{place}.carry must be 1 where no later step needs {step.step}, but is"
            f" {step.carry}": True
            for place, step in enumerate(self.pipeline)
            if step.carry > 1 and not self.hands_on(step)
        }
        ways = math.prod(step.carry for step in self.pipeline)
        many = (
            f"pipeline: carry may make {_MOST_WAYS} ways through all steps at most, but makes"
            f" {ways}"
        )
        taken = (
            f"pipeline: no step can be called {REPORT} or {LEDGER}, which are the pipeline's own"
        )
        alike = f"pipeline: steps must differ in their names, but are {', '.join(names)}"
        return {
            alike: len({name.lower() for name in names}) < len(names),
            taken: not {REPORT, LEDGER}.isdisjoint(map(str.lower, names)),
            many: ways > _MOST_WAYS,
            **later,
            **unused,
        }

    def hands_on(self, step: PipelineStep) -> int:
        """Return the number of a step's configurations that later steps begin with."""
        return (
            step.carry if any(step.step in other.needs.values() for other in self.pipeline) else 0
        )

    def before(self, step: PipelineStep) -> tuple[PipelineStep, ...]:
        """Return the steps that a step begins with, directly or not, in their order."""
        names = set(step.needs.values())
        for other in reversed(self.pipeline):  # a step needs earlier steps only
            names |= set(other.needs.values()) if other.step in names else set()
        return tuple(other for other in self.pipeline if other.step in names)

    def folder(self, step: PipelineStep, taken: Taken) -> str:
        """Return the folder of a step's study, within the pipeline's folder.

        Its name is that of the step, and of the earlier steps from which it takes another
        configuration than the recommended one.
        """
        ranks = ((other.step, taken.get(other.step, 1)) for other in self.before(step))
        return step.step + "".join(f"@{name}-{rank}" for name, rank in ranks if rank > 1)

    def beginnings(self, step: PipelineStep) -> Iterator[dict[str, int]]:
        """Return what a step may begin with, the recommended configurations first.

        Each beginning is a study of its own.
        """
        return _choices(self.before(step))

    def folders(self) -> list[str]:
        """Return the folders of all studies that the pipeline may need, in the order of running."""
        return [
            self.folder(step, taken) for step in self.pipeline for taken in self.beginnings(step)
        ]

    def paths(self) -> Iterator[dict[str, int]]:
        """Return the ways through all steps, by the configuration that is taken of each step.

        The way of the recommended configurations comes first.
        """
        return _choices(self.pipeline)


def _choices(steps: tuple[PipelineStep, ...]) -> Iterator[dict[str, int]]:
    for ranks in product(*(range(1, step.carry + 1) for step in steps)):
        yield {step.step: rank for step, rank in zip(steps, ranks, strict=True)}


class PipelineSession(values.Frozen):
    """The energy that one call of `carbonopt run` spent on a pipeline, in kWh without PUE."""

    started_at: values.Time
    duration_s: values.Finite = 0.0  # until its end; of a killed call, until its last study began
    between_kwh: values.Finite = 0.0  # between its studies, for reports and weights
    # the GPUs' part of `between_kwh`; None: no GPU was measured
    between_gpu_kwh: values.Finite | None = None
    # energy of other work on the same cores, which is not the pipeline's
    others_between_kwh: values.Finite = 0.0
    # Energy of the whole call, by one reading at its begin and one at its end; None: it was killed,
    # and nothing was read at its end.
    outer_kwh: values.Finite | None = None
    outer_gpu_kwh: values.Finite | None = None

    @property
    def span(self) -> tuple[datetime, datetime]:
        """The call's beginning and end, as far as it has stored them."""
        begin = datetime.fromisoformat(self.started_at)
        return begin, begin + timedelta(seconds=self.duration_s)


class PipelineData(values.Frozen):
    pipeline: Pipeline
    studies: dict[str, StudyData]  # by folder; only studies that have begun
    sessions: tuple[PipelineSession, ...]
