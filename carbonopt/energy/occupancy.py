"""The GPUs of this machine as they are now: which there are, what works on them, and whether their memory is free."""

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from carbonopt.core.errors import MeasurementError
from carbonopt.core.units import BYTES_PER_GIB, now_utc
from carbonopt.core.values import Frozen
from carbonopt.energy.hardware import GpuHandles, expect, gpu_count, gpu_name, gpu_uuid, open_nvml

# What the next trial's rank may hold while it waits (see `engines.process.launcher`), which is no leak: CUDA's context,
# the kernels and NCCL's buffers, up to 1 GiB, and about as much again while it practises a step.
WAITING_GIB = 2.0
# A driver frees the memory of a killed process some time after the process is gone.
_PATIENCE_S = 10.0
_POLL_S = 0.05


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


class GpuMemory:
    """Whether the memory of these GPUs is as free as when this was made: before the study starts anything.

    GPUs of which NVML doesn't tell it are left out.

    Args:
        patience_s: how long to wait for memory.

    Raises:
        BadInput: as `check_gpus`.
    """

    def __init__(self, indices: Sequence[int], patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._gpus = GpuHandles(indices)
        self._free_gib = self._used_gib()  # what is used on each while nothing of this study's is
        self._free_at = now_utc()

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        """Returns as soon as what the last trial held is free again. When patience ends, or when `interrupted` says so,
        it returns all the same: others may hold memory, too.

        Returns:
            In words what isn't free; None: all is, or it was told before.
        """
        deadline = time.monotonic() + self._patience_s
        while held := self._held():
            if interrupted():
                return None
            if time.monotonic() > deadline:
                return self._tell(held)
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        self._gpus.close()

    def _held(self) -> dict[int, float]:
        """GiB used, by GPU, where it is more than it should be."""
        used = self._used_gib()
        held = {index: gib for index, gib in used.items() if gib > self._free_gib.get(index, gib) + WAITING_GIB}
        if not held:
            # Who held memory as the study began may have gone: then its memory is not for a trial to keep.
            self._free_gib = {index: min(gib, used.get(index, gib)) for index, gib in self._free_gib.items()}
            self._free_at = now_utc()
        return held

    def _tell(self, held: dict[int, float]) -> str:
        gpus = " and ".join(
            f"GPU {index} holds {gib:.1f} GiB, {gib - self._free_gib[index]:.1f} GiB more"
            for index, gib in held.items()
        )
        text = (
            f"{gpus} than at {self._free_at}, still after {self._patience_s:g} s of waiting. What is left of a trial "
            "holds it, or another program (see nvidia-smi); a trial that needs this memory will not fit."
        )
        self._free_gib |= held  # said once: no later trial waits for it again
        return text

    def _used_gib(self) -> dict[int, float]:
        gpus = list(self._gpus)
        if not gpus:
            return {}
        import pynvml

        found = {index: _memory_told_gib(pynvml, handle, index) for index, handle in gpus}
        return {index: gib for index, gib in found.items() if gib is not None}


def _memory_told_gib(nvml: ModuleType, handle: Any, index: int) -> float | None:
    """As `_memory_used_gib`. What else is wrong with a GPU, the energy counters say, which can't do without it."""
    try:
        return _memory_used_gib(nvml, handle, index)
    except (nvml.NVMLError, MeasurementError):
        return None
