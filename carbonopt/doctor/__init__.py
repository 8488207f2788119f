"""Is this machine ready for a study, and if not, what to type."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from carbonopt.core.config import StudyConfig, may_be_other_than
from carbonopt.core.errors import CarbonoptError
from carbonopt.doctor import build, gpu, host, services
from carbonopt.doctor.check import Finding, failure
from carbonopt.doctor.machine import Machine
from carbonopt.energy.hardware import check_gpus
from carbonopt.energy.occupancy import gpus_now
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import extensions_folder, needed_operators

__all__ = ["before_run", "examine"]

_OTHER_DISK = "carbonopt run STUDY.yaml --out /another/disk/NAME"
_OTHER_EXTENSIONS = "export TORCH_EXTENSIONS_DIR=/another/disk/torch_extensions"

Find = Callable[[], Finding | None]  # None: nothing to look at here


def examine(compile_ops: bool) -> Iterator[Finding]:
    """Every check, in turn, in about 15 seconds; `compile_ops` compiles DeepSpeed's operators where they aren't."""
    machine = Machine(compile_ops)
    gpus = [device.index for device in machine.gpus]
    return _checks(
        {
            "GPUs": lambda: gpu.seen(machine),
            "GPUs given": lambda: gpu.hidden(machine.gpus, gpus),
            "other processes": lambda: gpu.others(machine.gpus, gpus),
            "nvidia-smi": lambda: gpu.nvidia_smi(machine, machine.gpus),
            "energy counters": lambda: gpu.counters_alive(machine),
            "CPU load": host.cpu_load,
            "RAPL": lambda: host.rapl(bool(gpus)),
            # CodeCarbon hangs with nvidia-smi.
            "CPU power": lambda: host.cpu_power(bool(gpus)) if machine.smi_code is not None else None,
            "CodeCarbon settings": services.codecarbon_config,
            "netrc": services.netrc,
            "compilers": lambda: build.compilers(needed=not gpus),
            "ninja": lambda: build.ninja(needed=not gpus),
            "CUDA architectures": lambda: build.arch_list(machine.gpus, machine.environment),
            "versions": lambda: build.stack_starts(machine),
            "GPUs in torch": lambda: gpu.torch_sees(machine),
            "nvcc": lambda: build.nvcc(machine),
            "DeepSpeed operators": lambda: build.ops(machine),
            "memory": host.memory,
            "shared memory": host.shared_memory,
            "environment": host.environment,
            "temporary files": host.temporary_files,
            "disk for runs": partial(host.disk, Path("runs"), _OTHER_DISK),
            "disk for operators": lambda: host.disk(extensions_folder(), _OTHER_EXTENSIONS),
            "disk for models": services.hub_disk,
            "hub": services.hub,
            "wandb": services.wandb,
        }
    )


def before_run(config: StudyConfig, folder: Path) -> list[Finding]:
    """Those checks that cost next to nothing, of what this study, in this folder, will use.

    Raises:
        BadInput: if a GPU of the launch doesn't exist or has no energy counter.
        MeasurementError: if the driver doesn't answer for them.
    """
    checks: dict[str, Find] = {"disk for runs": partial(host.disk, folder, _OTHER_DISK)}
    launch = config.launch
    if launch.trains:
        check_gpus(launch.gpus)
        space = config.search.space
        operators = needed_operators(launch, space)
        compiles = bool(operators) or may_be_other_than(space.torch_compile, False)
        if launch.gpus:  # fused output layers are compiled there
            compiles |= may_be_other_than(space["output_layer"], "standard")
        machine = Machine()
        seen = gpus_now() if launch.gpus else ()
        ours = [device for device in seen if device.index in launch.gpus]
        uuids = [device.uuid for device in ours]
        checks |= {
            "CPU load": host.cpu_load,
            "GPUs given": lambda: gpu.hidden(seen, launch.gpus),
            "other processes": lambda: gpu.others(seen, launch.gpus),
            "nvidia-smi": lambda: gpu.nvidia_smi(machine, ours),
            "energy counters": lambda: gpu.counters_tick(launch.gpus),
            "CodeCarbon settings": services.codecarbon_config,
            "CUDA architectures": lambda: build.arch_list(ours, work_environment(launch, uuids)),
            "temporary files": host.temporary_files,
            "disk for operators": lambda: host.disk(extensions_folder(), _OTHER_EXTENSIONS),
            "disk for models": services.hub_disk,
        }
        if config.track.wandb:
            checks["netrc"] = services.netrc
        if compiles:
            checks["compilers"] = lambda: build.compilers(needed=True)
        if operators:
            checks["ninja"] = lambda: build.ninja(needed=True)
            checks["DeepSpeed operators"] = lambda: build.locked(operators)
        if launch.world_size > 1:
            checks["shared memory"] = host.shared_memory
    return list(_checks(checks))


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
