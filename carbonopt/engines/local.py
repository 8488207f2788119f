"""Trials on this machine, each a fresh set of processes."""

import os
from collections.abc import Callable
from pathlib import Path

from carbonopt.core.config import LocalLaunch, StudyConfig, Workload
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.space import SearchSpace
from carbonopt.core.study import Hardware
from carbonopt.core.trial import Prepared, TrialSpec
from carbonopt.energy.meter import Meter
from carbonopt.engines.agent import Agent
from carbonopt.engines.base import EngineObserver
from carbonopt.engines.nodes import NodeMeters
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.storage.paths import StudyPaths

_GPU_POWER_W = 700.0  # board power of an H100 or H200 SXM, the largest that a rank of this project runs on


class LocalEngine:
    """One agent, on this machine. Implements `Engine`."""

    meter: Meter
    hardware: Hardware

    def __init__(self, config: StudyConfig) -> None:
        assert isinstance(config.launch, LocalLaunch) and config.workload is not None
        self._config, self._launch, self._workload = config, config.launch, config.workload
        gpus = self._launch.gpus
        self.description = (
            f"this machine's GPUs {', '.join(map(str, gpus))}"
            if gpus
            else f"this machine's CPU, {self._launch.cpu_ranks} rank(s)"
        )
        self.max_power_w = _GPU_POWER_W * len(gpus) if gpus else None
        self._agent: Agent | None = None

    def check(self, space: SearchSpace) -> None:
        check_files(self._workload)

    def seed(self, seed: int, params: TrialParams) -> int:
        return seed

    def begin(
        self, paths: StudyPaths, fingerprint: str, observer: EngineObserver, interrupted: Callable[[], bool]
    ) -> None:
        self._agent = Agent(self._launch, observer.warn)
        self.hardware = self._agent.hardware
        # It imports while the meter is set up, and leaves the GPUs alone, whose idle power is measured then.
        observer.preparing(self._agent.launcher.begin(self._config, paths, fingerprint))
        meter = self._agent.open_meter(self._config.carbon.objective, interrupted)
        self.meter = NodeMeters({self._agent.node: meter})

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared:
        return self._begun.launcher.prepare(interrupted)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        return self._begun.memory.await_free(interrupted)

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        return self._begun.launcher.start(spec, log)

    def prepare_next(self) -> None:
        self._begun.launcher.prepare_next()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    @property
    def _begun(self) -> Agent:
        assert self._agent is not None, "begin comes first"
        return self._agent


def check_files(workload: Workload) -> None:
    """The files that the study names are there; what is in them, the preparation looks at.

    Raises:
        BadInput: naming the key and the file.
    """
    dataset = workload.dataset
    for key in ("train_files", "eval_files"):
        for file in getattr(dataset, key) or ():
            if not os.path.isfile(file):  # noqa: PTH113, it takes any text
                raise BadInput(f"workload.dataset.{key}: no file {file}; give an existing one.")
    parts = {"model": workload.model, "tokenizer": workload.tokenizer, "dataset": dataset}
    for key, part in parts.items():
        name = part.name_or_path if part is not None else None
        if name is not None and Path(name).is_absolute() and not os.path.isdir(name):  # noqa: PTH112
            raise BadInput(f"workload.{key}.name_or_path: no folder {name}; give a local folder or a hub name.")
