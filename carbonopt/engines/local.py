"""Trials on this machine, each a fresh set of processes."""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from carbonopt.core.config import LocalLaunch, StudyConfig
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
    _agent: Agent  # from `begin` on

    def __init__(self, config: StudyConfig) -> None:
        assert isinstance(config.launch, LocalLaunch) and config.workload is not None
        self._config, self._launch, self._workload = config, config.launch, config.workload
        gpus = self._launch.gpus
        devices = f"GPUs {', '.join(map(str, gpus))}" if gpus else f"CPU, {self._launch.cpu_ranks} rank(s)"
        self.description = f"this machine's {devices}"
        self.max_power_w = _GPU_POWER_W * len(gpus) if gpus else None
        self._begun = ExitStack()

    def check(self, space: SearchSpace) -> None:
        """The files that the study names are there; what is in them, the preparation looks at."""
        dataset = self._workload.dataset
        for key in ("train_files", "eval_files"):
            for file in getattr(dataset, key) or ():
                if not os.path.isfile(file):  # noqa: PTH113, it takes any text
                    raise BadInput(f"workload.dataset.{key}: no file {file}; give an existing one.")
        for key in ("model", "tokenizer", "dataset"):
            name = getattr(getattr(self._workload, key), "name_or_path", None)
            if name is not None and Path(name).is_absolute() and not os.path.isdir(name):  # noqa: PTH112
                raise BadInput(f"workload.{key}.name_or_path: no folder {name}; give a local folder or a hub name.")

    def seed(self, seed: int, params: TrialParams) -> int:
        return seed

    def begin(
        self, paths: StudyPaths, fingerprint: str, observer: EngineObserver, interrupted: Callable[[], bool]
    ) -> None:
        self._agent = agent = self._begun.enter_context(closing(Agent(self._launch, observer.warn)))
        self.hardware = agent.hardware
        # It imports while the meter is set up, and leaves the GPUs alone, whose idle power is measured then.
        observer.preparing(agent.launcher.begin(self._config, paths, fingerprint))
        self.meter = NodeMeters({agent.node: agent.open_meter(self._config.carbon.objective, interrupted)})

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared:
        return self._agent.launcher.prepare(interrupted)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        return self._agent.memory.await_free(interrupted)

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        return self._agent.launcher.start(spec, log)

    def prepare_next(self) -> None:
        self._agent.launcher.prepare_next()

    def close(self) -> None:
        self._begun.close()
