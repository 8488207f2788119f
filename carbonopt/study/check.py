"""What can be known of a study before anything is started."""

from dataclasses import dataclass, replace
from pathlib import Path

from optuna.trial import FrozenTrial

from carbonopt.core.auto_facts import AutoSpace, Facts, known_facts
from carbonopt.core.auto_space import advised, choose
from carbonopt.core.config import StudyConfig, UnchosenSpace
from carbonopt.core.errors import BadInput
from carbonopt.core.files import PreparedFolder
from carbonopt.core.space import SearchSpace, lowest
from carbonopt.core.study import CarbonTrace, Intensity
from carbonopt.core.trial import Prepared
from carbonopt.core.values import Scalar
from carbonopt.energy.intensity import reference_intensity
from carbonopt.energy.trace import read_trace
from carbonopt.engines.base import Engine
from carbonopt.engines.kinds import ENGINES
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.pipeline import read_study
from carbonopt.study.inputs import input_files, workload_fingerprint
from carbonopt.train.tasks.base import task_for


@dataclass(frozen=True)
class Checked:
    """A study file that is right as far as that can be known without starting anything."""

    config: StudyConfig
    space: SearchSpace
    intensity: Intensity
    start: dict[str, Scalar] | None
    trace: CarbonTrace | None
    engine: Engine  # for one run
    earlier: tuple[list[FrozenTrial], ...] = ()  # trials of the studies that the search learns from
    auto: AutoSpace | None = None  # what is chosen, with `space: auto`: as far as is known before the preparation
    facts: Facts | None = None  # what the study file says of what is trained; None: no training is described

    @property
    def is_settled(self) -> bool:
        """Whether the space is the study's: not one that is still to be chosen."""
        return not isinstance(self.config.search.space, UnchosenSpace)

    def in_slot(self, slot: int) -> "Checked":
        """For a worker beside the one that was checked."""
        return replace(self, engine=ENGINES[self.config.launch.kind](self.config, slot))

    def advised(self, prepared: Prepared | None) -> dict[str, float]:
        """What the literature advises, as `CarbonSampler` has it."""
        if self.auto is not None:
            return advised(self.auto.facts)
        if self.facts is None or prepared is None:
            return {}
        lora_ranks = self.space.space["lora_rank"]
        adapts = lora_ranks is not None and int(lowest(lora_ranks)) > 0
        known = {
            "adapts": adapts if self.facts.pretrained else None,
            "parameters": prepared.model_parameters,
            "train_tokens": prepared.train_tokens,
        }
        return advised(self.facts.model_copy(update={**known, "train_examples": prepared.train_examples}))

    def earlier_placed(self) -> list[int]:
        """How many trials of each earlier study have a place in this one's space."""
        # Only here: these take half a second.
        from carbonopt.search.candidates import movable
        from carbonopt.search.models.features import comparable
        from carbonopt.search.observation import observe
        from carbonopt.search.strategy import distributions

        searched, quality = movable(distributions(self.space)), self.config.quality
        told = ([taught for trial in trials if (taught := observe(trial, quality))] for trials in self.earlier)
        return [sum(comparable(trial.params, searched) for trial in trials) for trials in told]

    def settled(self, auto: AutoSpace) -> "Checked":
        """With the space that the preparation has chosen, as if the study file had named it."""
        search = self.config.search.model_copy(update={"space": auto.space, "start": auto.start})
        space = replace(self.space, space=auto.space)
        config = self.config.model_copy(update={"search": search})
        return replace(self, config=config, space=space, start=space.start_values(auto.start), auto=auto)


def as_prepared(checked: Checked, folder: Path) -> Checked:
    """With the space that was chosen in the preparation, where the folder is prepared for this study."""
    if checked.is_settled:
        return checked
    fingerprint = workload_fingerprint(checked.config, input_files(checked.config), auto=True)
    prepared = PreparedFolder(folder).made_for(fingerprint)
    return checked if prepared is None or prepared.auto is None else checked.settled(prepared.auto)


def check(config: StudyConfig, *, gets_weights: bool = False) -> Checked:
    """All checks that start nothing and write nothing. Raises BadInput. `gets_weights`: of a pipeline's step that
    trains on, whatever its own file says of the model."""
    task = None if config.workload is None else task_for(config.workload.model_dump(mode="json"))
    own = task is not None and task.own_dimensions
    dimensions, ranks, on_gpu, auto = config.search.space, config.launch.world_size, bool(config.launch.gpus), None
    facts = None if config.workload is None else known_facts(config.workload, ranks, on_gpu)
    if facts is not None and gets_weights:
        facts = facts.model_copy(update={"pretrained": True})
    if isinstance(dimensions, UnchosenSpace):
        assert facts is not None
        auto = choose(facts)
        dimensions = auto.space
    space = SearchSpace(dimensions, ranks, on_gpu, own)
    start = None if config.search.start is None else space.start_values(config.search.start)
    if config.search.sampler == "grid" and space.combinations is None:
        raise BadInput("search.sampler: a grid needs choices (or a step) in every dimension of search.space.")
    engine = ENGINES[config.launch.kind](config, 0)
    engine.check(space)
    if task is not None and config.launch.trains:
        task.check(dimensions)
        if config.confirm is not None and not task.takes_seed:
            must = "confirm runs a configuration again with other seeds: workload.command must have {seed}"
            raise BadInput(f"{must}, but hasn't; put it in, or leave confirm out.")
    trace = None if config.carbon.trace is None else read_trace(Path(config.carbon.trace))
    folders = config.search.learn_from
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise BadInput(f"search.learn_from must name each study once, but got {', '.join(folders)}.")
    earlier = tuple(earlier_trials(folder, config) for folder in folders)
    return Checked(config, space, reference_intensity(config.carbon), start, trace, engine, earlier, auto, facts)


def earlier_trials(folder: str, config: StudyConfig) -> list[FrozenTrial]:
    """Of a study that has been run, for one of the same quality to learn from. Raises BadInput."""
    paths = StudyPaths(Path(folder))
    if not paths.storage.exists() and not paths.storage_pointer.exists():
        raise BadInput(f"search.learn_from: {folder} must be the folder of a study, but has no {paths.storage.name}.")
    try:
        storage = read_study(paths)
        quality = storage.read().config.quality
    except BadInput as error:
        raise BadInput(f"search.learn_from: {folder} can't be read: {error}") from error
    if (quality.name, quality.direction) != (config.quality.name, config.quality.direction):
        must = f"must be judged by {config.quality.name}, to {config.quality.direction}, as this study is"
        raise BadInput(
            f"search.learn_from: {folder} {must}, but is by {quality.name}, to {quality.direction}; leave it out."
        )
    trials = storage.study.get_trials(deepcopy=False)
    if not trials:
        raise BadInput(f"search.learn_from: {folder} must have trials, but has none; run it first, or leave it out.")
    return trials
