"""Studies one after the other: the next trains what the one before has recommended."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from carbonopt.core.config import Frozen, Name, StudyConfig
from carbonopt.core.errors import BadInput, CarbonoptError, first_fault
from carbonopt.core.study import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.file import load_study, read_mapping


class Step(Frozen):
    step: Annotated[Name, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # a folder is called by it
    study: Name  # its study file; relative to the pipeline's
    needs: dict[Literal["model", "reward"], str] = Field(default_factory=dict)  # of which earlier steps


class Pipeline(Frozen):
    """One file that chains studies."""

    name: Name
    pipeline: Annotated[tuple[Step, ...], Field(min_length=1)]

    def faults(self) -> dict[str, bool]:
        names = [step.step for step in self.pipeline]
        twice = f"pipeline: steps must differ in their names, but are {', '.join(names)}"
        later = {
            f"pipeline.{place}.needs.{key} must be an earlier step, but is {name!r}": name not in names[:place]
            for place, step in enumerate(self.pipeline)
            for key, name in step.needs.items()
        }
        return {twice: len({*names}) < len(names), **later}


@dataclass(frozen=True)
class PipelineFile:
    path: Path
    pipeline: Pipeline

    @classmethod
    def load(cls, path: Path) -> "PipelineFile | None":
        """None: it is a study file. Raises BadInput for what is wrong in it, the studies left out."""
        raw = read_mapping(path, "the study file")
        if "pipeline" not in raw:
            return None
        try:
            return cls(path, Pipeline.model_validate(raw))
        except ValidationError as error:
            raise BadInput(f"{path}: {first_fault(error)}") from error

    def study(self, step: Step) -> Path:
        """Its file."""
        return self.path.resolve().parent / Path(step.study).expanduser()

    def config(self, step: Step, models: dict[str, Path]) -> StudyConfig:
        """The study of a step; `models`: the folders of the steps before. Raises BadInput as `load_study`."""
        return load_study(self.study(step), {key: models[name] for key, name in step.needs.items()})


def winner_model(data: StudyData, paths: StudyPaths, winner: int | None) -> Path:
    """The folder of the weights that the next step begins with: of the first of the winner's repeats; those of other
    configurations are removed. Raises CarbonoptError where there are none."""
    repeats = [record.trial for record in data.records if record.repeat_of == winner]
    kept = next((paths.trial_model(trial) for trial in repeats if paths.trial_model(trial).is_dir()), None)
    if winner is None or kept is None:
        why = "no trial met its target" if winner is None else "its winner was not run again, for its weights"
        raise CarbonoptError(f"the pipeline ends here: {data.config.name} has no model for the next step, since {why}.")
    for record in data.records:
        if (other := paths.trial_model(record.trial)) != kept and other.is_dir():
            shutil.rmtree(other)
    return kept.resolve()
