"""Engine for trials on this machine, each a fresh set of processes."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.format import count_text
from carbonopt.core.trial import Node
from carbonopt.energy.cpu_time import STUDY_PROCESSES
from carbonopt.energy.hardware import describe_hardware, gpu_uuids, permitted_gpus
from carbonopt.energy.host_attribution import HostAttribution
from carbonopt.energy.machine_meter import MachineMeter
from carbonopt.energy.meter import Meter
from carbonopt.energy.node_meters import NodeMeters
from carbonopt.energy.occupancy import GpuMemory
from carbonopt.energy.slurm_energy import StepEnergy
from carbonopt.engines.device_locks import taken
from carbonopt.engines.engine import Engine, EngineObserver, MeterProvider, own_meter
from carbonopt.engines.process.launcher import ProcessLauncher
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import Prepared, TrialSpec
from carbonopt.spec.workload_settings import REWARDS, Workload
from carbonopt.storage.paths import StudyPaths

# Board power of an H100 or H200 SXM, the largest GPUs that carbonopt was measured on.
GPU_POWER_W = 700.0


def check_files(workload: Workload) -> None:
    """Raise BadInput if a file or a folder that the study names doesn't exist.

    The preparation checks their contents.
    """
    for key in ("train_files", "eval_files", "database"):
        named = getattr(workload.dataset, key, None) or ()
        for file in [named] if isinstance(named, str) else named:
            if not os.path.isfile(file):  # noqa: PTH113 – it takes any text
                raise BadInput(f"workload.dataset.{key}: no file {file}; give an existing one.")
    for key, name in workload.names_or_paths.items():
        if Path(name).is_absolute() and not os.path.isdir(name):  # noqa: PTH112
            where = f"workload.{key}.{'model' if key in REWARDS else 'name_or_path'}"
            raise BadInput(f"{where}: no folder {name}; give a local folder or a hub name.")


class LocalEngine(Engine):
    """Engine that owns this machine's part of a study: the GPUs, their ranks, and the meter.

    Nothing else in the study meters the machine or starts ranks on it, so that nothing is counted
    twice, however many ranks run.

    Where the launch has several slots, the engine has one of them: its GPUs, and its part of the
    cores that the command may use, on which this process and all that it starts run until `close`.
    The meter divides these cores' part of the CPU and RAM energy among the trial, the study and
    other work.
    """

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        assert isinstance(config.launch, LocalLaunch) and config.workload is not None
        self._config, self._workload = config, config.workload
        self._slot, self._slots, self._launch = (
            slot,
            config.launch.slots,
            config.launch.of_slot(slot),
        )
        # Names to lock in place of GPUs, where the launch has none.
        self.shared_names: tuple[str, ...] = ()
        # World size of trials on all their machines: larger where others take part.
        self.world_size = self._launch.world_size
        gpus, slots = config.launch.gpus, config.launch.slots
        ranks = count_text(self._launch.cpu_ranks, "rank")
        devices = (
            f"GPU{'s'[: len(gpus) > 1]} {', '.join(map(str, gpus))}" if gpus else f"CPU, {ranks}"
        )
        if slots > 1:
            each = f", {count_text(self._launch.world_size, 'GPU')} each" if gpus else " each"
            devices += f"{each}; {slots} trials side by side"
        self.description = f"this machine's {devices}"
        self.max_power_w = GPU_POWER_W * len(gpus) if gpus else None
        self._to_close = ExitStack()  # what `begin` has opened

    def check(self, space: SearchSpace) -> None:
        check_files(self._workload)

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        meter_provider: MeterProvider = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        gpus, objective, hold = (
            self._launch.gpus,
            self._config.carbon.objective,
            self._to_close.enter_context,
        )
        uuids = gpu_uuids(gpus)
        hold(taken(uuids or self.shared_names, interrupted))
        host = HostAttribution(self._own_cores(), STUDY_PROCESSES, self._slots)
        self.machine_share = host.machine_share
        self.hardware = describe_hardware(gpus)
        # In a cgroup, CUDA counts only the GPUs that it may open; otherwise it counts as NVML does.
        visible = permitted_gpus(None) if gpus else ()
        by_cuda = self._launch.model_copy(update={"gpus": tuple(map(visible.index, gpus))})
        self._memory = hold(closing(GpuMemory(gpus)))
        self.launcher = hold(closing(ProcessLauncher(by_cuda, uuids, observer.warn)))
        # The launcher's processes import while the meter is set up. They leave the GPUs alone,
        # whose idle power is measured then.
        observer.preparing(
            self.launcher.begin(
                self._config, paths, fingerprint, self.world_size, prepares=prepares
            )
        )
        self.devices = uuids or ("cpu",)

        def opened() -> Meter:
            node = Node(name=socket.gethostname(), devices=self.devices)
            meter = MachineMeter(gpus, objective, interrupted, host, self._slurm())
            return NodeMeters({node: meter}, [self._launch.world_size])

        try:
            self.meter = hold(closing(meter_provider(opened)))
        except Exception as error:
            # A Ctrl-C also ends the programs that CodeCarbon asks about the CPU, and makes it fail
            # with any error.
            if interrupted():
                raise StudyInterrupted(BEFORE_A_TRIAL) from error
            raise

    def _own_cores(self) -> frozenset[int]:
        """Pin this process to the cores of its slot until `close`, and return them."""
        cores = sorted(os.sched_getaffinity(0))
        first, end = (len(cores) * slot // self._slots for slot in (self._slot, self._slot + 1))
        if first == end:
            each = f"each of {self._slots} trials side by side needs a core"
            raise BadInput(
                f"{each}, but this command may use {len(cores)}; give fewer launch.workers or GPUs."
            )
        if self._slots > 1:
            os.sched_setaffinity(0, cores[first:end])
            self._to_close.callback(os.sched_setaffinity, 0, cores)
        return frozenset(cores[first:end])

    def _slurm(self) -> StepEnergy | None:
        """Return Slurm's energy reading of this machine, where the study has it for itself."""
        return None

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        return self.launcher.prepare(interrupted)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        return self._memory.await_free(interrupted)

    def start(self, spec: TrialSpec, log: Path) -> WorkProcesses:
        trial = self.launcher.start(spec, log)
        trial.cpu_time.become_trial()
        return trial

    def prepare_next(self) -> None:
        self.launcher.prepare_next()

    def drop_next(self) -> None:
        self.launcher.drop_next()

    def close(self) -> None:
        self._to_close.close()
