"""What can be known of a study before anything is started."""

from dataclasses import dataclass
from pathlib import Path

from carbonopt.core.config import StudyConfig
from carbonopt.core.errors import BadInput
from carbonopt.core.space import SearchSpace
from carbonopt.core.study import CarbonTrace, Intensity
from carbonopt.core.values import Scalar
from carbonopt.energy.intensity import reference_intensity
from carbonopt.energy.trace import read_trace
from carbonopt.engines.base import Engine
from carbonopt.engines.kinds import ENGINES
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


def check(config: StudyConfig) -> Checked:
    """All checks that start nothing and write nothing. Raises BadInput."""
    task = None if config.workload is None else task_for(config.workload.model_dump(mode="json"))
    own = task is not None and task.own_dimensions
    space = SearchSpace(config.search.space, config.launch.world_size, bool(config.launch.gpus), own)
    start = None if config.search.start is None else space.start_values(config.search.start)
    if config.search.sampler == "grid" and space.combinations is None:
        raise BadInput("search.sampler: a grid needs choices (or a step) in every dimension of search.space.")
    engine = ENGINES[config.launch.kind](config)
    engine.check(space)
    if task is not None and config.launch.trains:
        task.check(config.search.space)
        if config.confirm is not None and not task.takes_seed:
            must = "confirm runs a configuration again with other seeds: workload.command must have {seed}"
            raise BadInput(f"{must}, but hasn't; put it in, or leave confirm out.")
    trace = None if config.carbon.trace is None else read_trace(Path(config.carbon.trace))
    return Checked(config, space, reference_intensity(config.carbon), start, trace, engine)
