"""What can be known of a study before anything is started."""

import os
from dataclasses import dataclass
from pathlib import Path

from carbonopt.core.config import LocalLaunch, ReplayLaunch, StudyConfig
from carbonopt.core.errors import BadInput
from carbonopt.core.space import SearchSpace
from carbonopt.core.study import CarbonTrace, Intensity
from carbonopt.core.values import Scalar
from carbonopt.energy.intensity import reference_intensity
from carbonopt.energy.meter import ReplayMeter
from carbonopt.energy.trace import read_trace
from carbonopt.engines.replay import ReplayLauncher


@dataclass(frozen=True)
class Checked:
    """A study file of which everything that can be known without starting anything is known to be right."""

    config: StudyConfig
    space: SearchSpace
    intensity: Intensity
    start: dict[str, Scalar] | None
    trace: CarbonTrace | None


def check(config: StudyConfig) -> Checked:
    """All checks that start nothing and write nothing.

    Raises:
        BadInput
    """
    on_gpu = isinstance(config.launch, LocalLaunch) and bool(config.launch.gpus)
    space = SearchSpace(config.search.space, config.launch.world_size, on_gpu)
    start = None if config.search.start is None else space.start_values(config.search.start)
    if config.search.sampler == "grid" and space.combinations is None:
        raise BadInput("search.sampler: a grid needs choices (or a step) in every dimension of search.space.")
    if isinstance(config.launch, ReplayLaunch):
        launcher = ReplayLauncher(
            Path(config.launch.table), config.search.space, config.target.quality, ReplayMeter().advance
        )
        launcher.check_covers(space.combinations, space.params)
    else:
        _check_files(config)
    trace = None if config.carbon.trace is None else read_trace(Path(config.carbon.trace))
    return Checked(config, space, reference_intensity(config.carbon), start, trace)


def _check_files(config: StudyConfig) -> None:
    """The files that the study names are there; what is in them, the preparation looks at."""
    assert config.workload is not None
    dataset = config.workload.dataset
    for key in ("train_files", "eval_files"):
        for file in getattr(dataset, key) or ():
            if not os.path.isfile(file):  # noqa: PTH113, it takes any text
                raise BadInput(f"workload.dataset.{key}: no file {file}; give an existing one.")
    parts = {"model": config.workload.model, "tokenizer": config.workload.tokenizer, "dataset": dataset}
    for key, part in parts.items():
        name = part.name_or_path if part is not None else None
        if name is not None and Path(name).is_absolute() and not os.path.isdir(name):  # noqa: PTH112
            raise BadInput(f"workload.{key}.name_or_path: no folder {name}; give a local folder or a hub name.")
