"""Checks whether this machine is ready for a study, and says what to type if it is not."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from carbonopt.core.errors import CarbonoptError
from carbonopt.doctor import compiler_checks, gpu_checks, host_checks, service_checks
from carbonopt.doctor.check_result import Finding, failure
from carbonopt.doctor.machine_facts import Machine
from carbonopt.doctor.slurm_check import slurm
from carbonopt.energy.hardware import check_gpus
from carbonopt.energy.occupancy import GpuNow, gpus_now
from carbonopt.engines.process.environment import work_environment
from carbonopt.engines.process.extensions import extensions_folder, needed_operators
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import Workload
from carbonopt.storage.paths import is_study

__all__ = ["before_run", "examine"]

Find = Callable[[], Finding | None]  # returns None if the check doesn't apply here


def examine(compile_ops: bool) -> Iterator[Finding]:
    """Make all checks one after the other, which takes about 15 seconds.

    Args:
        compile_ops: Whether to compile DeepSpeed's operators that are not compiled yet.
    """
    machine = Machine(compile_ops)
    has_gpus = bool(machine.gpus)
    return _checks(
        {
            "Slurm": lambda: slurm(len(machine.gpus)),
            "GPUs": lambda: gpu_checks.seen(machine),
            **_of_both(machine, machine.launch, machine.gpus, Path("runs")),
            "energy counters": lambda: gpu_checks.counters_alive(machine),
            "RAPL": lambda: host_checks.rapl(has_gpus),
            # If nvidia-smi hangs, CodeCarbon would hang, too.
            "CPU power": lambda: (
                host_checks.cpu_power(has_gpus) if machine.smi_code is not None else None
            ),
            "netrc": service_checks.netrc,
            "compilers": lambda: compiler_checks.compilers(needed=not has_gpus),
            "ninja": lambda: compiler_checks.ninja(needed=not has_gpus),
            "versions": lambda: compiler_checks.stack_starts(machine),
            "GPUs in torch": lambda: gpu_checks.torch_sees(machine),
            "nvcc": lambda: compiler_checks.nvcc(machine),
            "DeepSpeed operators": lambda: compiler_checks.ops(machine),
            "memory": host_checks.memory,
            "shared memory": host_checks.shared_memory,
            "environment": host_checks.environment,
            "hub": service_checks.hub,
            "wandb": service_checks.wandb,
        }
    )


def before_run(config: StudyConfig, folder: Path) -> list[Finding]:
    """Make the cheap checks of what a study will use.

    Args:
        folder: The study's folder.

    Raises:
        BadInput: If a GPU of the launch doesn't exist or has no energy counter.
        MeasurementError: If the driver doesn't answer for a GPU.
    """
    launch, space = config.launch, config.search.space
    if not launch.is_local:  # a replay needs nothing, and agents check their own machines
        return list(_checks(_disk(folder)))
    check_gpus(launch.gpus)
    operators = needed_operators(launch, space, is_script=config.is_script)
    checks = {
        **_of_both(Machine(), launch, gpus_now() if launch.gpus else (), folder),
        "energy counters": lambda: gpu_checks.counters_tick(launch.gpus),
        "netrc": service_checks.netrc if config.track.wandb else None,
        "compilers": partial(compiler_checks.compilers, needed=True)
        if operators or config.may_compile
        else None,
        "ninja": partial(compiler_checks.ninja, needed=True) if operators else None,
        "DeepSpeed operators": lambda: compiler_checks.locked(operators),
        "shared memory": host_checks.shared_memory if launch.world_size > 1 else None,
    }
    if not operators:
        del checks["disk for operators"]
    if not _reads_hub_cache(config.workload):
        del checks["disk for models"]
    return list(_checks({name: find for name, find in checks.items() if find is not None}))


def _reads_hub_cache(workload: Workload | None) -> bool:
    """Return whether the preparation may write to Hugging Face's cache folder.

    The cache has downloads, tables that `datasets` makes of a folder, and models' own code. Not
    every container has a place for it.
    """
    if workload is None or workload.is_script:
        return False
    names = workload.names_or_paths
    has_code = workload.model is not None and workload.model.trust_remote_code
    return "dataset" in names or has_code or any(not Path(name).is_dir() for name in names.values())


def _of_both(
    machine: Machine, launch: Launch, seen: Sequence[GpuNow], folder: Path
) -> dict[str, Find]:
    """Return the checks that both `examine` and `before_run` make."""
    ours = [device for device in seen if device.index in launch.gpus]
    extensions = "export TORCH_EXTENSIONS_DIR=/another/disk/torch_extensions"
    return {
        "CPU load": host_checks.cpu_load,
        "GPUs given": lambda: gpu_checks.hidden(seen, launch.gpus),
        "other processes": lambda: gpu_checks.others(seen, launch.gpus, begun=is_study(folder)),
        "nvidia-smi": lambda: gpu_checks.nvidia_smi(machine, ours),
        "CodeCarbon settings": service_checks.codecarbon_config,
        "CUDA architectures": lambda: compiler_checks.arch_list(
            ours, work_environment(launch, [device.uuid for device in ours])
        ),
        "temporary files": host_checks.temporary_files,
        **_disk(folder),
        "disk for operators": lambda: host_checks.disk(extensions_folder(), extensions),
        "disk for models": service_checks.hub_disk,
    }


def _disk(folder: Path) -> dict[str, Find]:
    # in another folder a begun study would begin anew
    elsewhere = None if is_study(folder) else "carbonopt run STUDY.yaml --out /another/disk/NAME"
    return {"disk for runs": lambda: host_checks.disk(folder, elsewhere)}


def _checks(finds: dict[str, Find]) -> Iterator[Finding]:
    for name, find in finds.items():
        try:
            finding = find()
        except CarbonoptError as error:
            finding = failure(str(error), "nvidia-smi")
        except Exception as error:  # noqa: BLE001
            # A doctor that falls ill itself shall say so and go on.
            what = " ".join(str(error).split())
            finding = failure(
                f"the check itself broke: {type(error).__name__}: {what}", "carbonopt doctor --json"
            )
        if finding is not None:
            yield finding.model_copy(update={"name": name})
