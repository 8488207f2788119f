"""Runs a pipeline: each study begins with the models that the steps before have recommended."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carbonopt.analysis.pipeline_summary import handed_on
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import parsed_json
from carbonopt.core.units import now_utc
from carbonopt.energy.meter import Meter
from carbonopt.energy.meter_reading import Reading
from carbonopt.energy.pipeline_meter import PipelineMeter
from carbonopt.spec.pipeline_file import Pipeline, PipelineSession, PipelineStep, Taken
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.workload_settings import Model, Workload
from carbonopt.storage.paths import PipelinePaths
from carbonopt.storage.pipeline_storage import Ledger
from carbonopt.study.session import AsStep
from carbonopt.study_file.model_questions import Answers
from carbonopt.study_file.reader import PipelineFile, load_study
from carbonopt.study_file.study_checks import CheckedStudy, check
from carbonopt.study_file.weight_files import check_weights
from carbonopt.study_file.workload_keys import check_library_keys
from carbonopt.train.models.model_kind import CAUSAL_LM
from carbonopt.train.tasks.task import task_for
from carbonopt.train.tasks.trainer_task import TrainerTask

# Names of the number of positions in models' configurations.
_POSITIONS = ("max_position_embeddings", "n_positions")


def check_pipeline(file: PipelineFile) -> dict[str, CheckedStudy]:
    """Check the studies of a pipeline and their order, before anything is started.

    Returns:
        The checked study of each step's own file, by step.

    Raises:
        BadInput: If something is wrong with a study or with the order of the steps.
    """
    studies = {
        step.step: check(load_study(file.study(step)), gets_weights="model" in step.needs)
        for step in file.pipeline.pipeline
    }
    first = file.pipeline.pipeline[0].step
    for place, step in enumerate(file.pipeline.pipeline):
        config, where = studies[step.step].config, f"{file.path}: pipeline.{place}"
        if not config.launch.trains or config.workload is None or config.workload.is_script:
            kind = (
                "a script, whose model carbonopt does not know"
                if config.launch.trains
                else "a replay"
            )
            raise BadInput(
                f"{where}.study must train a model that can be handed on, but {step.study} is"
                f" {kind}."
            )
        if not config.launch.is_local or config.launch.slots > 1:
            rule = (
                "the steps of a pipeline run on one machine, one trial at a time (launch.kind:"
                " local, also in a Slurm job that runs this command)"
            )
            raise BadInput(f"{where}.study: {rule}, but {step.study} asks for more.")
        for key, name in step.needs.items():
            if problem := _unfit(key, config.workload, studies[name].config.workload):
                raise BadInput(f"{where}.needs.{key}: {name!r} {problem}.")
        if problem := _too_long(config.workload, _first_model(file.pipeline, step, studies)):
            raise BadInput(f"{where}.study: {problem}.")
        for shared, value in _shared(config).items():
            if value != (expected := _shared(studies[first].config)[shared]):
                rule = "must be the same in all steps, which share one meter and one sum"
                raise BadInput(
                    f"{where}.study: {shared} {rule}, but is {value!r} there and {expected!r} in"
                    f" {first}."
                )
    with Answers() as answers:
        steps = file.pipeline.pipeline
        for step in steps:
            check_library_keys(studies[step.step].config, answers)
        check_weights(((studies[step.step].config, step.needs) for step in steps), answers)
    return studies


def _shared(config: StudyConfig) -> dict[str, Any]:
    """Return the settings that must be equal in all steps, which share one meter, by key."""
    carbon = config.carbon.model_dump(exclude={"trace", "embodied"})
    return {
        "launch.gpus": list(config.launch.gpus),
        **{f"carbon.{key}": value for key, value in carbon.items()},
    }


def _unfit(key: str, workload: Workload, before: Workload | None) -> str | None:
    """Return why a step can't use another step's model, in words; None if it can."""
    task, task_before = getattr(workload, "task", None), getattr(before, "task", None)
    if key == "reward":
        if task != "rlhf":
            return f"can give a reward to the task rlhf alone, but this one is {task}"
        return (
            None if task_before == "reward" else f"must be of the task reward, but is {task_before}"
        )
    trained = [
        task_for(each.model_dump(mode="json")) for each in (workload, before) if each is not None
    ]
    kind, kind_before = (each.model_kind for each in trained if isinstance(each, TrainerTask))
    # A classifier can be made from a language model, with a new head; no other kind of head can be
    # replaced.
    from_language = (kind_before, kind.auto_class) == (
        CAUSAL_LM,
        "AutoModelForSequenceClassification",
    )
    if kind.auto_class == kind_before.auto_class or from_language:
        return None
    return f"hands on a {kind_before.name}, but the task {task} trains a {kind.name}"


def _first_model(
    pipeline: Pipeline, step: PipelineStep, studies: Mapping[str, CheckedStudy]
) -> Model | None:
    """Return the model whose weights a step trains on, through all steps in between."""
    while "model" in step.needs:
        step = next(other for other in pipeline.pipeline if other.step == step.needs["model"])
    workload = studies[step.step].config.workload
    return None if workload is None else workload.model


def _too_long(workload: Workload, model: Model | None) -> str | None:
    """Return why a model has too few positions for a step, in words, as far as can be read.

    Otherwise the step's own preparation would find it, after the steps before have run.
    """
    settings = {} if model is None else model.from_config or _configuration(model)
    positions = next((settings[key] for key in _POSITIONS if isinstance(settings.get(key), int)), 0)
    lengths = [workload.sequence_length, (workload.model_extra or {}).get("max_completion_length")]
    tokens = sum(length for length in lengths if length is not None)
    if not 0 < positions < tokens:
        return None
    return (
        f"examples have up to {tokens} tokens, but the model that it gets has {positions} positions"
    )


def _configuration(model: Model) -> dict[str, Any]:
    path = Path(str(model.name_or_path)) / "config.json"
    if not path.is_file():  # it is a name on a hub
        return {}
    try:
        return dict(parsed_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"workload.model.name_or_path: {path} can't be read: {error}.") from error


@dataclass
class PipelineCall:
    """One call of the command on a pipeline, and the energy that it uses between the studies.

    It is a context manager, which closes the meter on exit.
    """

    pipeline: Pipeline
    paths: PipelinePaths
    # Folders of the models that are handed on, by the study's folder and the configuration's rank.
    models: dict[tuple[str, int], Path] = field(default_factory=dict)
    _meters: PipelineMeter = field(default_factory=PipelineMeter)

    def __post_init__(self) -> None:
        stored = Ledger.load(self.paths)
        if stored is not None and stored.pipeline.name != self.pipeline.name:
            other = f"holds another pipeline, {stored.pipeline.name!r}"
            raise BadInput(f"{self.paths.root} {other}; give another --out, or restore its name.")
        self._before = stored.sessions if stored is not None else ()
        self._started_at, self._began_s = now_utc("milliseconds"), time.monotonic()

    def __enter__(self) -> "PipelineCall":
        return self

    def __exit__(self, *_: object) -> None:
        if self._meters.runs:
            self._meters.close()
            self._save(self._meters.between(), self._meters.others_between(), self._meters.outer())

    def begins_with(self, step: PipelineStep, taken: Taken) -> dict[str, Path] | None:
        """Return the models of the steps that a step needs, by their names.

        None if one of these steps has no model of the rank that `taken` names.
        """
        by_name = {other.step: other for other in self.pipeline.pipeline}
        keys = {
            name: (self.pipeline.folder(by_name[name], taken), taken[name])
            for name in step.needs.values()
        }
        return (
            {name: self.models[key] for name, key in keys.items()}
            if set(keys.values()) <= self.models.keys()
            else None
        )

    def as_step(self, step: PipelineStep) -> AsStep:
        return AsStep(hands_on=self.pipeline.hands_on(step), meter_provider=self._step_meter)

    def _step_meter(self, opened: Callable[[], Meter]) -> Meter:
        meter = self._meters.for_step(opened)
        self._save(
            self._meters.between(in_use=True), self._meters.others_between(in_use=True), None
        )
        return meter

    def ended(self, step: PipelineStep, folder: str, data: StudyData) -> None:
        """Keep the weights that the next steps begin with, and remove all others.

        Raises:
            CarbonoptError: If the recommended configuration has none, though they are needed.
        """
        study, kept = self.paths.study(folder), []
        for rank, trial in enumerate(handed_on(data, self.pipeline.hands_on(step)), start=1):
            repeats = [record.trial for record in data.records if record.repeat_of == trial]
            weights = next(
                (path for number in repeats if (path := study.trial_model(number)).is_dir()), None
            )
            if weights is not None:
                self.models[folder, rank] = weights.resolve()
                kept.append(weights)
            elif rank == 1:
                why = (
                    f"its trial {trial} was to be run once more, for its weights, but was not:"
                    f" {data.ended}"
                )
                raise CarbonoptError(f"{study.root} has no model for the next step: {why}.")
        for record in data.records:
            if (other := study.trial_model(record.trial)).is_dir() and other not in kept:
                shutil.rmtree(other)

    def _save(self, between: Reading, others: Reading, outer: Reading | None) -> None:
        session = PipelineSession(
            started_at=self._started_at,
            duration_s=time.monotonic() - self._began_s,
            between_kwh=max(0.0, between.total_kwh),
            between_gpu_kwh=between.gpu_kwh,
            others_between_kwh=others.total_kwh,
            outer_kwh=None if outer is None else outer.total_kwh,
            outer_gpu_kwh=None if outer is None else outer.gpu_kwh,
        )
        Ledger(pipeline=self.pipeline, sessions=(*self._before, session)).save(self.paths)
