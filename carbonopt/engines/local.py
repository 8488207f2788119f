"""Trials on this machine, each a fresh set of processes."""

import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from carbonopt.core.config import REWARDS, LocalLaunch, StudyConfig, Workload
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.format import count_text
from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import Node, Prepared, TrialSpec
from carbonopt.energy.hardware import describe_hardware, gpu_uuids, permitted_gpus
from carbonopt.energy.machine import MachineMeter
from carbonopt.energy.meter import Meter, NodeMeters
from carbonopt.energy.occupancy import GpuMemory
from carbonopt.energy.share import CoreShare
from carbonopt.energy.slurm import StepEnergy
from carbonopt.engines.base import Engine, EngineObserver, LendMeter, own_meter
from carbonopt.engines.process.launcher import ProcessLauncher
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.engines.taken import taken
from carbonopt.storage.paths import StudyPaths

GPU_POWER_W = 700.0  # board power of an H100 or H200 SXM, the largest that a rank of this project runs on


def check_files(workload: Workload) -> None:
    """Raises BadInput if a file or a folder that the study names isn't there; what is in them, the preparation looks
    at."""
    for key in ("train_files", "eval_files", "database"):
        named = getattr(workload.dataset, key, None) or ()
        for file in [named] if isinstance(named, str) else named:
            if not os.path.isfile(file):  # noqa: PTH113, it takes any text
                raise BadInput(f"workload.dataset.{key}: no file {file}; give an existing one.")
    for key, name in workload.names_or_paths.items():
        if Path(name).is_absolute() and not os.path.isdir(name):  # noqa: PTH112
            where = f"workload.{key}.{'model' if key in REWARDS else 'name_or_path'}"
            raise BadInput(f"{where}: no folder {name}; give a local folder or a hub name.")


class LocalEngine(Engine):
    """Owns this machine's part of a study: its GPUs, the ranks on them, and the meter of what they take. Nobody else
    meters the machine or starts ranks on it, so that nothing is counted twice, however many ranks run.

    Where the launch has several slots, the engine has one of them: its GPUs, and its part of the cores that the command
    may use, on which this process and all that it starts run until `close`. Of the CPU's and the RAM's energy its meter
    counts these cores' share."""

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        assert isinstance(config.launch, LocalLaunch) and config.workload is not None
        self._config, self._workload = config, config.workload
        self._slot, self._slots, self._launch = slot, config.launch.slots, config.launch.of_slot(slot)
        self.shared_names: tuple[str, ...] = ()  # of what nobody else may have, where there are no GPUs
        self.world_size = self._launch.world_size  # of trials, on all their machines: more where others take part
        gpus, slots = config.launch.gpus, config.launch.slots
        ranks = count_text(self._launch.cpu_ranks, "rank")
        devices = f"GPU{'s'[: len(gpus) > 1]} {', '.join(map(str, gpus))}" if gpus else f"CPU, {ranks}"
        if slots > 1:
            each = f", {count_text(self._launch.world_size, 'GPU')} each" if gpus else " each"
            devices += f"{each}; {slots} trials side by side"
        self.description = f"this machine's {devices}"
        self.max_power_w = GPU_POWER_W * len(gpus) if gpus else None
        self._begun = ExitStack()

    def check(self, space: SearchSpace) -> None:
        check_files(self._workload)

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        lend: LendMeter = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        gpus, objective, hold = self._launch.gpus, self._config.carbon.objective, self._begun.enter_context
        uuids = gpu_uuids(gpus)
        hold(taken(uuids or self.shared_names, interrupted))
        share = self._own_share()
        self.hardware = describe_hardware(gpus)
        # In a cgroup CUDA counts only those that it may open; without one, as NVML does.
        visible = permitted_gpus(None) if gpus else ()
        by_cuda = self._launch.model_copy(update={"gpus": tuple(map(visible.index, gpus))})
        self._memory = hold(closing(GpuMemory(gpus)))
        self.launcher = hold(closing(ProcessLauncher(by_cuda, uuids, observer.warn)))
        # It imports while the meter is set up, and leaves the GPUs alone, whose idle power is measured then.
        observer.preparing(self.launcher.begin(self._config, paths, fingerprint, self.world_size, prepares=prepares))
        self.devices = uuids or ("cpu",)

        def opened() -> Meter:
            node = Node(name=socket.gethostname(), devices=self.devices)
            meter = MachineMeter(gpus, objective, interrupted, share, self._slurm())
            return NodeMeters({node: meter}, [self._launch.world_size])

        try:
            self.meter = hold(closing(lend(opened)))
        except Exception as error:
            if interrupted():  # a Ctrl-C also ends the programs that CodeCarbon asks for the CPU, and it fails somehow
                raise StudyInterrupted(BEFORE_FIRST_TRIAL) from error
            raise

    def _own_share(self) -> CoreShare | None:
        """Goes to the cores of this slot, for as long as it has begun. None: all of the machine's energy counts."""
        cores = sorted(os.sched_getaffinity(0))
        first, end = (len(cores) * slot // self._slots for slot in (self._slot, self._slot + 1))
        if first == end:
            each = f"each of {self._slots} trials side by side needs a core"
            raise BadInput(f"{each}, but this command may use {len(cores)}; give fewer launch.workers or GPUs.")
        if self._slots > 1:
            os.sched_setaffinity(0, cores[first:end])
            self._begun.callback(os.sched_setaffinity, 0, cores)
        among = self._sharing(cores)
        self.machine_share = (end - first) / len(set(among))
        return CoreShare(cores[first:end], among) if set(cores[first:end]) != set(among) else None

    def _slurm(self) -> StepEnergy | None:
        """What Slurm reads of this machine, where that is the study's alone."""
        return None

    def _sharing(self, cores: Sequence[int]) -> Collection[int]:
        """The cores that the machine's energy is shared by: those that the command may use."""
        return cores

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        return self.launcher.prepare(interrupted)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        return self._memory.await_free(interrupted)

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        return self.launcher.start(spec, log)

    def prepare_next(self) -> None:
        self.launcher.prepare_next()

    def close(self) -> None:
        self._begun.close()
