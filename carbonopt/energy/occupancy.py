"""The GPUs of this machine as they are now: which there are, and what works on them."""

from types import ModuleType
from typing import Any

from carbonopt.energy.hardware import expect, gpu_count, gpu_name, gpu_uuid, open_nvml
from carbonopt.trial import Frozen
from carbonopt.units import BYTES_PER_GIB


class GpuNow(Frozen):
    index: int  # NVML's
    name: str
    uuid: str
    compute_capability: str  # such as 9.0
    memory_used_gib: float | None  # beside what the driver reserves; None where NVML doesn't tell
    processes: tuple[int, ...]  # ids of those that compute; in a container they can be foreign, or none can be seen


def gpus_now() -> tuple[GpuNow, ...]:
    """All GPUs that NVML sees.

    Raises:
        BadInput: if there is no NVIDIA driver, or none that answers.
        MeasurementError: if it answers, but not for every GPU.
    """
    with open_nvml() as nvml:
        return tuple(_gpu_now(nvml, index) for index in range(gpu_count(nvml)))


def _gpu_now(nvml: ModuleType, index: int) -> GpuNow:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = expect(
        tuple, nvml.nvmlDeviceGetCudaComputeCapability(handle), f"the compute capability of GPU {index}"
    )
    return GpuNow(
        index=index,
        name=gpu_name(nvml, handle, index),
        uuid=gpu_uuid(nvml, handle, index),
        compute_capability=f"{major}.{minor}",
        memory_used_gib=_memory_used_gib(nvml, handle, index),
        processes=_processes(nvml, handle, index),
    )


def _processes(nvml: ModuleType, handle: Any, index: int) -> tuple[int, ...]:
    try:
        found = expect(list, nvml.nvmlDeviceGetComputeRunningProcesses(handle), f"the processes on GPU {index}")
        return tuple(process.pid for process in found)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):  # virtual GPUs; the memory tells there
        return ()


def _memory_used_gib(nvml: ModuleType, handle: Any, index: int) -> float | None:
    try:
        # The first version of this call counts what the driver reserves as used.
        used_bytes = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used
        return expect(int, used_bytes, f"the memory used on GPU {index}") / BYTES_PER_GIB
    except nvml.NVMLError_NotSupported:  # GPUs that share the host's memory
        return None
