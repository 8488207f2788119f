"""Checks of a study that can be made before anything is started."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from optuna.trial import FrozenTrial

from carbonopt.carbon.intensity import reference_intensity
from carbonopt.carbon.trace import read_trace
from carbonopt.core.errors import BadInput
from carbonopt.core.extras import check_installed
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.core.values import Scalar
from carbonopt.engines.engine import Engine
from carbonopt.engines.kinds import ENGINES
from carbonopt.search.candidates import movable
from carbonopt.search.inner_samplers import distributions
from carbonopt.search.observation import observe
from carbonopt.space.auto_space import advised, choose
from carbonopt.space.search_space import SearchSpace, lowest
from carbonopt.spec.auto_facts import AutoSpace, Facts, known_facts
from carbonopt.spec.prepared_folder import PreparedFolder
from carbonopt.spec.space_settings import Space, UnchosenSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import CarbonTrace, Intensity
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.pipeline_storage import read_study
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.study_file.input_files import input_files, workload_fingerprint
from carbonopt.study_file.notify_addresses import addresses
from carbonopt.train.data.rows import check_columns, unread_columns
from carbonopt.train.tasks.task import Task, task_for


class Columns(NamedTuple):
    """The columns of a study's data set."""

    read: tuple[str, ...] = ()  # those that trials read
    unread: tuple[str, ...] = ()  # those with text in its files that no trial reads


@dataclass(frozen=True)
class CheckedStudy:
    """A valid study file, with all that can be known of the study without starting anything."""

    config: StudyConfig
    space: SearchSpace
    intensity: Intensity
    start: dict[str, Scalar] | None
    trace: CarbonTrace | None
    # intensities that the schedule goes by, or why they can't be read; None: it goes by none
    forecast_or_error: CarbonTrace | BadInput | None
    engine: Engine  # can be used for one run
    earlier: tuple[list[FrozenTrial], ...] = ()  # trials of the prior studies in search.learn_from
    # The chosen space with `space: auto`, as far as it is known before the preparation.
    auto: AutoSpace | None = None
    # Facts about the training that the study file has; None: it describes no training.
    facts: Facts | None = None
    notes: tuple[str, ...] = ()  # notes on settings that may not be what was meant
    tells_steps: bool = True  # False: a script that has none of carbonopt's lines

    @property
    def is_settled(self) -> bool:
        """True if the search space is known, False if it is still to be chosen."""
        return not isinstance(self.config.search.space, UnchosenSpace)

    def emissions_kg_co2e(self, energy_kwh: float) -> float:
        """Return the emissions of an energy, at the study's intensity and PUE."""
        carbon = self.config.carbon
        return emissions_kg_co2e(energy_kwh, self.intensity.g_co2e_per_kwh, carbon.pue)

    def in_slot(self, slot: int) -> "CheckedStudy":
        """Return the study with an engine of its own for the worker in another slot."""
        return replace(self, engine=ENGINES[self.config.launch.kind](self.config, slot))

    def advised(self, prepared: Prepared | None) -> dict[str, float]:
        """Return the batch size and learning rate that the literature advises (`auto_space`)."""
        if self.auto is not None:
            return advised(self.auto.facts)
        if self.facts is None or prepared is None:
            return {}
        lora_ranks = self.space.dimensions["lora_rank"]
        adapts = lora_ranks is not None and int(lowest(lora_ranks)) > 0
        known = {
            "adapts": adapts if self.facts.pretrained else None,
            "parameters": prepared.model_parameters,
            "train_tokens": prepared.train_tokens,
        }
        return advised(
            self.facts.model_copy(update={**known, "train_examples": prepared.train_examples})
        )

    def columns(self) -> Columns:
        """Return the columns of the data set; reads the first rows of its files.

        Raises:
            BadInput: If they can't be read.
        """
        workload = self.config.workload
        if workload is None or not self.config.launch.trains:
            return Columns()
        dataset = task_for(workload.model_dump(mode="json")).workload.dataset
        if dataset is None:
            return Columns()
        files = list(map(Path, dataset.train_files or ()))
        return Columns(dataset.columns, tuple(unread_columns(files, dataset.columns)))

    def earlier_placed(self) -> list[int]:
        """Count, for each prior study, the trials that can be mapped to this study's space."""
        # Imported here, because it takes half a second.
        from carbonopt.search.models.features import comparable

        searched, quality = movable(distributions(self.space)), self.config.quality
        observed = (
            [observation for trial in trials if (observation := observe(trial, quality))]
            for trials in self.earlier
        )
        return [sum(comparable(trial.params, searched) for trial in trials) for trials in observed]

    def settled(self, prepared: Prepared) -> "CheckedStudy":
        """Return the study with the space that its preparation chose, as if its file had named it.

        The first trial has the cheapest settings that fit, if the model's memory is known.
        """
        auto = prepared.auto
        assert auto is not None
        space = replace(self.space, dimensions=auto.space)
        if prepared.memory is not None and auto.facts.gpu_memory_gib is not None:
            from carbonopt.search.first_settings import cheapest_that_fits  # imports SciPy

            start = cheapest_that_fits(
                space, auto.start, prepared.memory, auto.facts.gpu_memory_gib
            )
            auto = auto.model_copy(update={"start": start})
        search = self.config.search.model_copy(update={"space": auto.space, "start": auto.start})
        config = self.config.model_copy(update={"search": search})
        return replace(
            self, config=config, space=space, start=space.start_values(auto.start), auto=auto
        )


def as_prepared(checked: CheckedStudy, folder: Path) -> CheckedStudy:
    """Return the study with the space that its preparation chose, if `folder` has been prepared."""
    if checked.is_settled:
        return checked
    fingerprint = workload_fingerprint(checked.config, input_files(checked.config), auto=True)
    prepared = PreparedFolder(folder).made_for(fingerprint)
    return checked if prepared is None or prepared.auto is None else checked.settled(prepared)


def as_resumed(
    checked: CheckedStudy, stored: StudyStorage, folder: Path, where: str, *, joins: bool
) -> CheckedStudy:
    """Return the study as it goes on from its storage.

    It has the search space that an earlier call has chosen, and the carbon intensity that the study
    began with: the bundled data of another CodeCarbon may have another figure for the same country,
    and a study has one for all its trials, whose emissions are compared.

    Args:
        checked: The study as this call's study file has it.
        stored: The study in its storage.
        folder: The folder of the prepared data.
        where: The place of the storage in the user's words, for errors.
        joins: Whether this worker joins the study. It then has the leading call's budget and
            confirmation.

    Raises:
        BadInput: If the storage holds another study.
    """
    if not checked.is_settled:
        prepared = stored.read().prepared
        if prepared is None:  # the earlier call was killed as soon as it had created the study
            checked = as_prepared(checked, folder)
        elif prepared.auto is not None:
            checked = checked.settled(prepared)
    stored.check_same_settings(checked.config, where, joins=joins)
    before, config = stored.read(), checked.config
    if joins:
        led = {"budget": before.config.budget, "confirm": before.config.confirm}
        config = config.model_copy(update=led)
    return replace(checked, config=config, intensity=before.provenance.intensity)


def check(config: StudyConfig, *, gets_weights: bool = False) -> CheckedStudy:
    """Make all checks of a study that start nothing and write nothing.

    Args:
        gets_weights: Whether the study is a step of a pipeline that continues another step's
            training, whatever its own file says of the model.

    Raises:
        BadInput: If something in the study file is wrong.
    """
    task = None if config.workload is None else task_for(config.workload.model_dump(mode="json"))
    own_dimensions = task is not None and task.own_dimensions
    ranks, on_gpu = config.launch.world_size, bool(config.launch.gpus)
    facts = None if config.workload is None else known_facts(config.workload, ranks, on_gpu)
    if facts is not None and gets_weights:
        facts = facts.model_copy(update={"pretrained": True})
    dimensions, auto = config.search.space, None
    if isinstance(dimensions, UnchosenSpace):
        assert facts is not None
        auto = choose(facts)
        dimensions = auto.space
    space = SearchSpace(dimensions, ranks, on_gpu, own_dimensions)
    start = None if config.search.start is None else space.start_values(config.search.start)
    if config.search.sampler == "grid" and space.combinations is None:
        raise BadInput(
            "search.sampler: a grid needs choices (or a step, or a single value) in every dimension"
            " of search.space."
        )
    for package in ("tensorboard", "mlflow", "trackio"):
        if getattr(config.track, package):
            check_installed(package, package, f"track.{package}")
    if config.notify is not None:
        addresses(config.notify)
    engine = ENGINES[config.launch.kind](config, 0)
    engine.check(space)
    notes: tuple[str, ...] = ()
    tells_steps = True
    if task is not None and config.launch.trains:
        _check_task(task, dimensions, config)
        notes, tells_steps = task.notes(dimensions, config.quality), task.tells_steps
    trace = None if config.carbon.trace is None else read_trace(Path(config.carbon.trace))
    earlier = _prior_trials(config)
    return CheckedStudy(
        config=config,
        space=space,
        intensity=reference_intensity(config.carbon),
        start=start,
        trace=trace,
        forecast_or_error=_forecast_or_error(config, trace),
        engine=engine,
        earlier=earlier,
        auto=auto,
        facts=facts,
        notes=notes,
        tells_steps=tells_steps,
    )


def _check_task(task: Task, dimensions: Space, config: StudyConfig) -> None:
    task.check(dimensions, config.launch)
    if (source := getattr(task.workload, "quality_from", None)) is not None:
        source.check_quality(config.quality)
    if task.workload.dataset is not None:
        check_columns(task.workload.dataset)
    if config.confirm is not None and not task.takes_seed:
        must = (
            "confirm runs a configuration again with other seeds: workload.command must have {seed}"
        )
        raise BadInput(f"{must}, but hasn't; put it in, or leave confirm out.")


def _forecast_or_error(
    config: StudyConfig, trace: CarbonTrace | None
) -> CarbonTrace | BadInput | None:
    """Return the intensities that the schedule goes by.

    Where the file can't be read, this is the error: a study that has begun goes on without it.
    """
    if config.schedule is None:
        return None
    if config.schedule.forecast is None:
        return trace
    try:
        return read_trace(Path(config.schedule.forecast), "schedule.forecast")
    except BadInput as error:
        return error


def _prior_trials(config: StudyConfig) -> tuple[list[FrozenTrial], ...]:
    """Return the trials of each prior study that the study file names."""
    folders = config.search.learn_from
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise BadInput(
            f"search.learn_from must name each study once, but got {', '.join(folders)}."
        )
    return tuple(earlier_trials(folder, config) for folder in folders)


def earlier_trials(folder: str, config: StudyConfig) -> list[FrozenTrial]:
    """Return the trials of a prior study that this one can learn from.

    Raises:
        BadInput: If the folder has no study that can be read, or the study has no trials or another
            quality.
    """
    paths = StudyPaths(Path(folder))
    if not paths.storage.exists() and not paths.storage_pointer.exists():
        raise BadInput(
            f"search.learn_from: {folder} must be the folder of a study, but has no"
            f" {paths.storage.name}."
        )
    try:
        storage = read_study(paths)
        quality = storage.read().config.quality
    except BadInput as error:
        raise BadInput(f"search.learn_from: {folder} can't be read: {error}") from error
    if (quality.name, quality.direction) != (config.quality.name, config.quality.direction):
        must = (
            f"must be judged by {config.quality.name}, to {config.quality.direction}, as this"
            " study is"
        )
        raise BadInput(
            f"search.learn_from: {folder} {must}, but is by {quality.name}, to {quality.direction};"
            " leave it out."
        )
    trials = storage.study.get_trials(deepcopy=False)
    if not trials:
        raise BadInput(
            f"search.learn_from: {folder} must have trials, but has none; run it first, or leave it"
            " out."
        )
    return trials
