"""The present state of this machine's GPUs: their names, processes and free memory."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from carbonopt.core.errors import MeasurementError
from carbonopt.core.units import now_utc
from carbonopt.core.values import Frozen
from carbonopt.energy.hardware import Gpu, answering, open_gpus

# Memory that the next trial's rank may hold while it waits (see `engines.process.launcher`) and
# that is no leak: CUDA's context, the kernels and NCCL's buffers take up to 1 GiB, and a practice
# step takes about as much again.
WAITING_GIB = 2.0
# A driver frees the memory of a killed process some time after the process is gone.
_PATIENCE_S = 10.0
_POLL_S = 0.05


class GpuNow(Frozen):
    index: int  # NVML's index
    name: str
    uuid: str
    compute_capability: str  # such as 9.0
    memory_used_gib: float | None  # without the driver's reserve; None where NVML doesn't say
    # Ids of processes that compute; in a container they can be other containers', or be hidden.
    processes: tuple[int, ...]


def gpus_now() -> tuple[GpuNow, ...]:
    """Return the present state of all GPUs that NVML sees.

    Raises BadInput if no NVIDIA driver answers, MeasurementError if it doesn't for every GPU.
    """
    with open_gpus(None) as gpus:
        return tuple(
            GpuNow(
                index=gpu.index,
                name=gpu.ask(str, "Name", "name"),
                uuid=gpu.ask(str, "UUID", "UUID"),
                compute_capability=".".join(
                    map(str, gpu.ask(tuple, "CudaComputeCapability", "compute capability"))
                ),
                memory_used_gib=gpu.memory_gib("used"),
                processes=_processes(gpu),
            )
            for gpu in gpus
        )


def _processes(gpu: Gpu) -> tuple[int, ...]:
    try:
        return tuple(
            process.pid for process in gpu.ask(list, "ComputeRunningProcesses", "processes")
        )
    except (gpu.nvml.NVMLError_NotSupported, gpu.nvml.NVMLError_NoPermission):
        # Virtual GPUs; there only the used memory shows other processes.
        return ()


class GpuMemory:
    """A check of whether the GPUs' memory is as free as when this object was made.

    It is made before the study starts anything. GPUs whose used memory NVML doesn't give are left
    out. Constructing it raises what `check_gpus` raises.
    """

    def __init__(self, indices: Sequence[int], patience_s: float = _PATIENCE_S) -> None:
        self._patience_s, self._nvml = patience_s, ExitStack()
        self._gpus = self._nvml.enter_context(open_gpus(indices))
        self._free_gib = self._used_gib()  # memory used on each GPU without this study's processes
        self._free_at = now_utc()

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        """Wait until the memory that the last trial held is free again, for at most `patience_s`.

        When that time is over, or when `interrupted` returns true, it returns all the same: others
        may hold memory, too. Returns a message, once, about memory that isn't free; else None.
        """
        deadline = time.monotonic() + self._patience_s
        while (held := self._held()) and not interrupted():
            if time.monotonic() > deadline:
                return self._tell(held)
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        self._nvml.close()

    def _held(self) -> dict[int, float]:
        """Return the used GiB of the GPUs that use more than they should."""
        used = self._used_gib()
        held = {
            index: gib
            for index, gib in used.items()
            if gib > self._free_gib.get(index, gib) + WAITING_GIB
        }
        if not held:
            # A program that held memory when the study began may have ended: a trial must not keep
            # that memory later.
            self._free_gib = {
                index: min(gib, used.get(index, gib)) for index, gib in self._free_gib.items()
            }
            self._free_at = now_utc()
        return held

    def _tell(self, held: dict[int, float]) -> str:
        free = self._free_gib
        each = (
            f"GPU {index} holds {gib:.1f} GiB, {gib - free[index]:.1f} GiB more"
            for index, gib in held.items()
        )
        gpus = " and ".join(each)
        self._free_gib |= held  # reported once: no later trial waits for it again
        return (
            f"{gpus} than at {self._free_at}, still after {self._patience_s:g} s of waiting. What"
            " is left of a trial holds it, or another program (see nvidia-smi); a trial that needs"
            " this memory will not fit."
        )

    def _used_gib(self) -> dict[int, float]:
        used_gib: dict[int, float] = {}
        for gpu in self._gpus:
            # A GPU's error is ignored here: the energy counters need an answer and report it.
            with suppress(MeasurementError), answering():
                if (gib := gpu.memory_gib("used")) is not None:
                    used_gib[gpu.index] = gib
        return used_gib
