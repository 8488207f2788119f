"""Is this machine ready for a study, and if not, what to type."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from carbonopt.core.config import Launch, StudyConfig
from carbonopt.core.errors import CarbonoptError
from carbonopt.doctor import build, gpu, host, services
from carbonopt.doctor.check import Finding, failure
from carbonopt.doctor.machine import Machine
from carbonopt.doctor.slurm import slurm
from carbonopt.energy.hardware import check_gpus
from carbonopt.energy.occupancy import GpuNow, gpus_now
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import extensions_folder, needed_operators

__all__ = ["before_run", "examine"]

Find = Callable[[], Finding | None]  # None: nothing to look at here


def examine(compile_ops: bool) -> Iterator[Finding]:
    """Every check, in turn, in about 15 seconds; `compile_ops` compiles DeepSpeed's operators where they aren't."""
    machine = Machine(compile_ops)
    has_gpus = bool(machine.gpus)
    return _checks(
        {
            "Slurm": lambda: slurm(len(machine.gpus)),
            "GPUs": lambda: gpu.seen(machine),
            **_of_both(machine, machine.launch, machine.gpus, Path("runs")),
            "energy counters": lambda: gpu.counters_alive(machine),
            "RAPL": lambda: host.rapl(has_gpus),
            # CodeCarbon hangs with nvidia-smi.
            "CPU power": lambda: host.cpu_power(has_gpus) if machine.smi_code is not None else None,
            "netrc": services.netrc,
            "compilers": lambda: build.compilers(needed=not has_gpus),
            "ninja": lambda: build.ninja(needed=not has_gpus),
            "versions": lambda: build.stack_starts(machine),
            "GPUs in torch": lambda: gpu.torch_sees(machine),
            "nvcc": lambda: build.nvcc(machine),
            "DeepSpeed operators": lambda: build.ops(machine),
            "memory": host.memory,
            "shared memory": host.shared_memory,
            "environment": host.environment,
            "hub": services.hub,
            "wandb": services.wandb,
        }
    )


def before_run(config: StudyConfig, folder: Path) -> list[Finding]:
    """Those checks that cost next to nothing, of what this study, in this folder, will use. Raises BadInput if a GPU of
    the launch doesn't exist or has no energy counter, MeasurementError if the driver doesn't answer for them."""
    launch, space = config.launch, config.search.space
    if not launch.is_local:  # a table's; or agents on other machines see to these
        return list(_checks(_disk(folder)))
    check_gpus(launch.gpus)
    operators = needed_operators(launch, space)
    checks = {
        **_of_both(Machine(), launch, gpus_now() if launch.gpus else (), folder),
        "energy counters": lambda: gpu.counters_tick(launch.gpus),
        "netrc": services.netrc if config.track.wandb else None,
        "compilers": partial(build.compilers, needed=True) if operators or config.may_compile else None,
        "ninja": partial(build.ninja, needed=True) if operators else None,
        "DeepSpeed operators": lambda: build.locked(operators),
        "shared memory": host.shared_memory if launch.world_size > 1 else None,
    }
    return list(_checks({name: find for name, find in checks.items() if find is not None}))


def _of_both(machine: Machine, launch: Launch, seen: Sequence[GpuNow], folder: Path) -> dict[str, Find]:
    """Checks of `examine` and of `before_run`."""
    ours = [device for device in seen if device.index in launch.gpus]
    extensions = "export TORCH_EXTENSIONS_DIR=/another/disk/torch_extensions"
    return {
        "CPU load": host.cpu_load,
        "GPUs given": lambda: gpu.hidden(seen, launch.gpus),
        "other processes": lambda: gpu.others(seen, launch.gpus),
        "nvidia-smi": lambda: gpu.nvidia_smi(machine, ours),
        "CodeCarbon settings": services.codecarbon_config,
        "CUDA architectures": lambda: build.arch_list(ours, work_environment(launch, [device.uuid for device in ours])),
        "temporary files": host.temporary_files,
        **_disk(folder),
        "disk for operators": lambda: host.disk(extensions_folder(), extensions),
        "disk for models": services.hub_disk,
    }


def _disk(folder: Path) -> dict[str, Find]:
    return {"disk for runs": lambda: host.disk(folder, "carbonopt run STUDY.yaml --out /another/disk/NAME")}


def _checks(finds: dict[str, Find]) -> Iterator[Finding]:
    for name, find in finds.items():
        try:
            finding = find()
        except CarbonoptError as error:
            finding = failure(str(error), "nvidia-smi")
        except Exception as error:  # noqa: BLE001, a doctor that falls ill itself shall say so and go on
            what = " ".join(str(error).split())
            finding = failure(f"the check itself broke: {type(error).__name__}: {what}", "carbonopt doctor --json")
        if finding is not None:
            yield finding.model_copy(update={"name": name})
