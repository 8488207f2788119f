"""The machine's hardware, and its GPUs as NVML sees them."""

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import psutil

from carbonopt.core.errors import BadInput, MeasurementError
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.spec.study_data import Hardware

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_INSTEAD = "to run on the CPU, set launch.gpus: []"
# The older package pynvml replaces nvidia-ml-py's module by one of the same name that answers in
# bytes.
REINSTALL_NVML = "pip uninstall -y pynvml; pip install --force-reinstall nvidia-ml-py"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Gpu:
    """A GPU that can be asked while NVML is open."""

    nvml: ModuleType
    index: int
    handle: Any

    def ask(self, kind: type[Answer], question: str, words: str) -> Answer:
        """Return the answer to nvmlDeviceGet{question}.

        Raises NVMLError, and MeasurementError for an answer of another kind.
        """
        answer = getattr(self.nvml, f"nvmlDeviceGet{question}")(self.handle)
        return _expect(kind, answer, f"the {words} of GPU {self.index}")

    def energy_mj(self) -> int:
        return self.ask(int, "TotalEnergyConsumption", "energy")

    def power_samples(self, since_s: float) -> list[tuple[float, float]]:
        """Return the driver's own samples of the power since a moment of `time.time`.

        Each is a time, in seconds since 1970, and watts, in the order of time. Raises NVMLError if
        the driver has none.
        """
        nvml = self.nvml
        kind, samples = nvml.nvmlDeviceGetSamples(
            self.handle, nvml.NVML_TOTAL_POWER_SAMPLES, max(0, round(since_s * 1e6))
        )
        if kind != nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            return []
        return sorted(
            (sample.timeStamp / 1e6, sample.sampleValue.uiVal / 1000) for sample in samples
        )

    def memory_gib(self, part: Literal["total", "used"]) -> float | None:
        """Return the total or used memory; None for a GPU that shares the host's memory.

        Used memory is without the driver's reserve. Raises what `ask` raises.
        """
        try:
            # The first version of this call, the only one in old drivers, counts the driver's
            # reserve as used.
            version = (self.nvml.nvmlMemory_v2,) if part == "used" else ()
            memory = self.nvml.nvmlDeviceGetMemoryInfo(self.handle, *version)
        except self.nvml.NVMLError_NotSupported:
            return None
        return (
            _expect(int, getattr(memory, part), f"the memory ({part}) of GPU {self.index}")
            / BYTES_PER_GIB
        )


def describe_hardware(gpu_indices: Sequence[int]) -> Hardware:
    """Describe this machine with the GPUs of these NVML indices (none: a study on the CPU).

    Raises what `check_gpus` raises.
    """
    with open_gpus(gpu_indices) as gpus:
        version = gpus[0].nvml.nvmlSystemGetDriverVersion() if gpus else None
        memory_gib = [gib for gpu in gpus if (gib := gpu.memory_gib("total")) is not None]
        return Hardware(
            cpu=cpu_model() or platform.processor() or platform.machine(),
            # Some virtual machines don't tell how many physical cores they have.
            cpu_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
            ram_gib=round(psutil.virtual_memory().total / BYTES_PER_GIB, 1),
            gpus=tuple(gpu.ask(str, "Name", "name") for gpu in gpus),
            driver=_expect(str, version, "the driver's version") if gpus else None,
            gpu_memory_gib=min(memory_gib, default=None),
        )


def check_gpus(indices: Sequence[int]) -> None:
    """Raise BadInput if the driver, one of the GPUs or a GPU's energy counter is missing.

    Without indices, nothing is checked.
    """
    with open_gpus(indices):
        pass


def gpu_uuids(indices: Sequence[int]) -> tuple[str, ...]:
    """Return the UUIDs of these GPUs, in the given order; CUDA uses the same ones.

    Raises what `check_gpus` raises.
    """
    with open_gpus(indices) as gpus:
        return tuple(gpu.ask(str, "UUID", "UUID") for gpu in gpus)


def permitted_gpus(visible: str | None) -> tuple[int, ...]:
    """Return the NVML indices of the GPUs that this process may use.

    They are the GPUs that `visible`, the value of CUDA_VISIBLE_DEVICES, names by index or UUID, or
    those that a cgroup lets this process open, where CUDA counts from 0 again. Raises what
    `open_gpus` raises.
    """
    with _nvml() as (nvml, count):
        permitted = {}
        for index in range(count):
            with suppress(nvml.NVMLError_NoPermission):
                permitted[index] = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
    named = [name.strip() for name in visible.split(",") if name.strip()] if visible else []
    if not named or len(permitted) <= len(named):
        return tuple(permitted)
    by_name = {
        **{str(index): index for index in permitted},
        **{uuid: index for index, uuid in permitted.items()},
    }
    return tuple(by_name[name] for name in named if name in by_name)


@contextmanager
def open_gpus(indices: Sequence[int] | None) -> Iterator[tuple[Gpu, ...]]:
    """Open the GPUs of these NVML indices, in that order, for as long as the context lasts.

    Without indices, NVML isn't used. With None, all GPUs are opened, and their counters aren't
    checked. Raises what `check_gpus` and `answering` raise.
    """
    if indices is not None and not indices:
        yield ()
        return
    with _nvml() as (nvml, count):
        seen = range(count)
        wanted = seen if indices is None else indices
        if absent := [index for index in wanted if index not in seen]:
            among = ", ".join(map(str, seen)) or "none"
            raise BadInput(f"GPU {absent[0]} not found: NVML sees {among}; {_CPU_INSTEAD}.")
        gpus = tuple(Gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in wanted)
        for gpu in gpus if indices else ():
            _check_counter(gpu)
        yield gpus


@contextmanager
def _nvml() -> Iterator[tuple[ModuleType, int]]:
    """Open NVML, and yield it with the number of GPUs that it counts.

    Raises BadInput if NVIDIA's driver can't be reached.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        why = f"NVIDIA's driver can't be reached ({error}). Install it; {_CPU_INSTEAD}"
        raise BadInput(f"the study asks for GPUs, but {why}.") from error
    try:
        with answering():
            yield pynvml, _expect(int, pynvml.nvmlDeviceGetCount(), "the number of GPUs")
    finally:
        with suppress(pynvml.NVMLError):  # everything has been asked
            pynvml.nvmlShutdown()


@contextmanager
def answering() -> Iterator[None]:
    """Turn NVML's errors within the context into MeasurementError.

    They come from a driver that has answered before and doesn't any more.
    """
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        says = f"but says: {error}. See what `nvidia-smi` says."
        raise MeasurementError(f"NVIDIA's driver must answer for the GPUs, {says}") from error


def _check_counter(gpu: Gpu) -> None:
    try:
        gpu.energy_mj()
    except gpu.nvml.NVMLError as error:
        # CodeCarbon would integrate polled power instead, which samples a quarter of the time on
        # A100 and H100 (arXiv 2312.02741).
        must = (
            f"GPU {gpu.index} ({gpu.ask(str, 'Name', 'name')}) must have an energy counter, but"
            f" NVML says: {error}"
        )
        have = "NVIDIA GPUs since Volta have one, MIG slices don't"
        raise BadInput(f"{must}; {have}. Take another GPU; {_CPU_INSTEAD}.") from error


def _expect(kind: type[Answer], answer: object, what: str) -> Answer:
    """Return an answer of NVML if it is of the promised type; else raise MeasurementError."""
    if not isinstance(answer, kind):
        why = f"another package may lie over nvidia-ml-py. Type: {REINSTALL_NVML}"
        raise MeasurementError(
            f"NVML must give {what} as {kind.__name__}, but gave {answer!r}: {why}"
        )
    return answer


def cpu_model() -> str | None:
    """Return Linux's name of the CPU; None where it has none, as on ARM."""
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    model = re.search(r"^model name[ \t]*:[ \t]*(\S.*)", text, re.MULTILINE)
    return model[1].strip() if model else None
