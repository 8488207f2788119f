"""What the machine is made of, and whether the GPUs that a study asks for are there."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from carbonopt.core.errors import BadInput, MeasurementError
from carbonopt.core.study import Hardware
from carbonopt.core.units import BYTES_PER_GIB

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_INSTEAD = "to run on the CPU, set launch.gpus: []"
# The older package pynvml puts a module of the same name, which answers in bytes, over nvidia-ml-py's.
REINSTALL_NVML = "pip uninstall -y pynvml; pip install --force-reinstall nvidia-ml-py"

Answer = TypeVar("Answer")


def describe_hardware(gpu_indices: Sequence[int]) -> Hardware:
    """This machine, with the GPUs of these NVML indices (none: a study on the CPU).

    Raises:
        BadInput: as `check_gpus`.
    """
    check_gpus(gpu_indices)
    names: tuple[str, ...] = ()
    driver = memory_gib = None
    if gpu_indices:
        with open_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in gpu_indices]
            names = tuple(gpu_name(nvml, handle, index) for handle, index in zip(handles, gpu_indices, strict=True))
            memory_gib = _smallest_memory_gib(nvml, handles)
            driver = expect(str, nvml.nvmlSystemGetDriverVersion(), "the driver's version")
    return Hardware(
        cpu=_cpu_model(),
        # Some virtual machines don't tell how many physical cores they have.
        cpu_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        ram_gib=round(psutil.virtual_memory().total / BYTES_PER_GIB, 1),
        gpus=names,
        driver=driver,
        gpu_memory_gib=memory_gib,
    )


def _smallest_memory_gib(nvml: ModuleType, handles: Sequence[Any]) -> float | None:
    try:
        totals = [nvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles]
    except nvml.NVMLError_NotSupported:  # GPUs that share the host's memory
        return None
    return min(expect(int, total, "a GPU's memory") for total in totals) / BYTES_PER_GIB


def check_gpus(indices: Sequence[int]) -> None:
    """Makes sure that each of these GPUs exists and counts its own energy. Asking for none is fine anywhere.

    Raises:
        BadInput: if there is no NVIDIA driver, an index is unknown, or a GPU has no energy counter.
    """
    if not indices:
        return
    with open_nvml() as nvml:
        count = gpu_count(nvml)
        for index in indices:
            if index not in range(count):
                seen = ", ".join(map(str, range(count))) or "none"
                raise BadInput(f"GPU {index} not found: NVML sees {seen}; {_CPU_INSTEAD}.")
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            try:
                energy_mj(nvml, handle, index)
            except nvml.NVMLError as error:
                # CodeCarbon would integrate polled power instead, which samples a quarter of the time on A100 and
                # H100 (arXiv 2312.02741).
                name = gpu_name(nvml, handle, index)
                raise BadInput(
                    f"GPU {index} ({name}) must have an energy counter, but NVML says: {error}; NVIDIA GPUs since "
                    f"Volta have one, MIG slices don't. Take another GPU; {_CPU_INSTEAD}."
                ) from error


def gpu_uuids(indices: Sequence[int]) -> tuple[str, ...]:
    """The UUIDs of these GPUs, in the order given: what names a GPU the same way to NVML and to CUDA.

    Raises:
        BadInput: as `check_gpus`.
    """
    check_gpus(indices)
    if not indices:
        return ()
    with open_nvml() as nvml:
        return tuple(gpu_uuid(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index) for index in indices)


@contextmanager
def open_nvml() -> Iterator[ModuleType]:
    """NVML, for as long as the block lasts.

    Raises:
        BadInput: if there is no NVIDIA driver, or none that answers.
        MeasurementError: if it fails later, inside the block.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise BadInput(
            f"the study asks for GPUs, but NVIDIA's driver can't be reached ({error}). Install it; {_CPU_INSTEAD}."
        ) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise lost_gpus(error) from error
    finally:
        with suppress(pynvml.NVMLError):  # everything has been asked
            pynvml.nvmlShutdown()


class GpuHandles:
    """NVML's handles of the GPUs of these indices, in that order, for many readings: NVML stays open until `close`,
    since opening it takes longer than a reading.

    Raises:
        BadInput: as `check_gpus`.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        check_gpus(indices)
        self.indices = tuple(indices)
        self._handles: list[Any] = []
        if indices:
            import pynvml

            try:
                pynvml.nvmlInit()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
            except pynvml.NVMLError as error:
                raise lost_gpus(error) from error

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Each index with its handle; nothing once it is closed."""
        return zip(self.indices, self._handles, strict=False)

    def close(self) -> None:
        if self._handles:
            import pynvml

            self._handles = []
            with suppress(pynvml.NVMLError):  # everything has been read
                pynvml.nvmlShutdown()


def lost_gpus(error: Exception) -> MeasurementError:
    """What to say of a driver that answered once and doesn't any more."""
    return MeasurementError(f"NVIDIA's driver must answer for the GPUs, but says: {error}. See what `nvidia-smi` says.")


def expect(kind: type[Answer], found: object, what: str) -> Answer:
    """An answer of NVML's that is what NVML promises, and no None, NaN or bytes.

    Raises:
        MeasurementError: else.
    """
    if not isinstance(found, kind):
        raise MeasurementError(
            f"NVML must give {what} as {kind.__name__}, but gave {found!r}: another package may lie over nvidia-ml-py. "
            f"Type: {REINSTALL_NVML}"
        )
    return found


def gpu_count(nvml: ModuleType) -> int:
    """How many GPUs NVML sees."""
    return expect(int, nvml.nvmlDeviceGetCount(), "the number of GPUs")


def gpu_name(nvml: ModuleType, handle: Any, index: int) -> str:
    """The product's name of a GPU."""
    return expect(str, nvml.nvmlDeviceGetName(handle), f"the name of GPU {index}")


def gpu_uuid(nvml: ModuleType, handle: Any, index: int) -> str:
    """The UUID of a GPU, as NVML writes it."""
    return expect(str, nvml.nvmlDeviceGetUUID(handle), f"the UUID of GPU {index}")


def energy_mj(nvml: ModuleType, handle: Any, index: int) -> int:
    """The GPU's energy counter."""
    return expect(int, nvml.nvmlDeviceGetTotalEnergyConsumption(handle), f"the energy of GPU {index}")


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
