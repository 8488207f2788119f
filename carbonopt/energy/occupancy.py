"""The GPUs of this machine as they are now: which there are, what works on them, and whether their memory is free."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from carbonopt.core.errors import MeasurementError
from carbonopt.core.units import now_utc
from carbonopt.core.values import Frozen
from carbonopt.energy.hardware import Gpu, answering, open_gpus

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
    """All GPUs that NVML sees. Raises BadInput if no NVIDIA driver answers, MeasurementError if not for every GPU."""
    with open_gpus(None) as gpus:
        return tuple(
            GpuNow(
                index=gpu.index,
                name=gpu.ask(str, "Name", "name"),
                uuid=gpu.ask(str, "UUID", "UUID"),
                compute_capability=".".join(map(str, gpu.ask(tuple, "CudaComputeCapability", "compute capability"))),
                memory_used_gib=gpu.memory_gib("used"),
                processes=_processes(gpu),
            )
            for gpu in gpus
        )


def _processes(gpu: Gpu) -> tuple[int, ...]:
    try:
        return tuple(process.pid for process in gpu.ask(list, "ComputeRunningProcesses", "processes"))
    except (gpu.nvml.NVMLError_NotSupported, gpu.nvml.NVMLError_NoPermission):  # virtual GPUs; the memory tells there
        return ()


class GpuMemory:
    """Whether the memory of these GPUs is as free as when this was made: before the study starts anything. GPUs of
    which NVML doesn't tell it are left out. Raises as `check_gpus`."""

    def __init__(self, indices: Sequence[int], patience_s: float = _PATIENCE_S) -> None:
        self._patience_s, self._nvml = patience_s, ExitStack()
        self._gpus = self._nvml.enter_context(open_gpus(indices))
        self._free_gib = self._used_gib()  # what is used on each while nothing of this study's is
        self._free_at = now_utc()

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        """Returns as soon as what the last trial held is free again. When patience ends, or when `interrupted` says so,
        it returns all the same: others may hold memory, too. Says in words what isn't free, once; None: all is."""
        deadline = time.monotonic() + self._patience_s
        while (held := self._held()) and not interrupted():
            if time.monotonic() > deadline:
                return self._tell(held)
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        self._nvml.close()

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
        free = self._free_gib
        each = (f"GPU {index} holds {gib:.1f} GiB, {gib - free[index]:.1f} GiB more" for index, gib in held.items())
        gpus = " and ".join(each)
        self._free_gib |= held  # said once: no later trial waits for it again
        return (
            f"{gpus} than at {self._free_at}, still after {self._patience_s:g} s of waiting. What is left of a trial "
            "holds it, or another program (see nvidia-smi); a trial that needs this memory will not fit."
        )

    def _used_gib(self) -> dict[int, float]:
        used_gib: dict[int, float] = {}
        for gpu in self._gpus:
            # The energy counters, which can't do without an answer, say what is wrong with a GPU.
            with suppress(MeasurementError), answering():
                if (gib := gpu.memory_gib("used")) is not None:
                    used_gib[gpu.index] = gib
        return used_gib
