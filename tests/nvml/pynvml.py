"""A stand-in for NVML on a machine without GPUs; put this folder on PYTHONPATH.

STAND_IN_GPUS is a JSON list, one entry a GPU: a steady power in watts (0: a dead counter), or the
name of a recording in tests/recorded/, whose counter is played back from the moment this module is
imported: it ticks as the real one did.

STAND_IN_MEMORY names a file with a line "GPU GiB process" for each process that holds memory. As
with a real driver, it is free when the process is gone.
"""

import bisect
import csv
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

RECORDED = Path(__file__).parent.parent / "recorded"


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


NVML_TEMPERATURE_GPU = 0
NVML_TOTAL_POWER_SAMPLES = 0
NVML_VALUE_TYPE_UNSIGNED_INT = 1
nvmlMemory_v2 = 2
_began = time.monotonic()


def elapsed_s() -> float:
    """Seconds since the playback began."""
    return time.monotonic() - _began


class Recording:
    """One GPU's counter: each time it changed, and what it was from then on."""

    def __init__(self, name: str, gpu: int = 0) -> None:
        with (RECORDED / name).open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["gpu"]) == gpu]
        self.seconds = [float(row["seconds"]) for row in rows]
        self.millijoules = [int(row["energy_mj"]) for row in rows]

    def energy_mj(self, at_s: float) -> int:
        """From its end on it stands still."""
        return self.millijoules[bisect.bisect_right(self.seconds, at_s) - 1]

    def power_mw(self, at_s: float) -> int:
        """From the ticks around that moment."""
        end = min(bisect.bisect_right(self.seconds, at_s), len(self.seconds) - 1)
        took_s = self.seconds[end] - self.seconds[end - 1]
        return int((self.millijoules[end] - self.millijoules[end - 1]) / took_s)


class Steady:
    def __init__(self, power_w: float) -> None:
        self.power_w = power_w

    def energy_mj(self, at_s: float) -> int:
        return int(at_s * self.power_w * 1000)

    def power_mw(self, at_s: float) -> int:
        return int(self.power_w * 1000)


_gpus = [
    Recording(*gpu.split(":")[:1], int(gpu.split(":")[1])) if isinstance(gpu, str) else Steady(gpu)
    for gpu in json.loads(os.environ.get("STAND_IN_GPUS", "[]"))
]
celsius: list = [40 + handle for handle in range(len(_gpus))]  # for a test to set
busy_percent: list = [50 for _ in _gpus]  # for a test to set; None: the GPU doesn't tell


def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...
def nvmlDeviceGetCount() -> int:
    return len(_gpus)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if index not in range(len(_gpus)):
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    return _gpus[handle].energy_mj(elapsed_s())


def nvmlDeviceGetSamples(handle: int, kind: int, since_us: int) -> tuple[int, list]:
    """Samples of the last two seconds, one every 20 ms; none of a dead counter's GPU."""
    assert kind == NVML_TOTAL_POWER_SAMPLES
    if isinstance(_gpus[handle], Steady) and not _gpus[handle].power_w:
        raise NVMLError("Not Found")
    epoch_s = time.time() - elapsed_s()
    first = max(0, int(50 * max(since_us / 1e6 - epoch_s, elapsed_s() - 2)) + 1)
    return NVML_VALUE_TYPE_UNSIGNED_INT, [
        SimpleNamespace(
            timeStamp=int((epoch_s + place / 50) * 1e6),
            sampleValue=SimpleNamespace(uiVal=_gpus[handle].power_mw(place / 50 - 0.01)),
        )
        for place in range(first, int(50 * elapsed_s()) + 1)
    ]


def nvmlDeviceGetName(handle: int) -> str:
    return f"stand-in {handle}"


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle:08d}-0000-0000-0000-000000000000"


def nvmlSystemGetDriverVersion() -> str:
    return "0.0"


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> SimpleNamespace:
    used = sum(
        int(float(gib) * 2**30)
        for gpu, gib, process in _holders()
        if int(gpu) == handle and _lives(process)
    )
    return SimpleNamespace(total=2**37, free=2**37 - used, used=used)


def _holders() -> list[list[str]]:
    name = os.environ.get("STAND_IN_MEMORY")
    return [line.split() for line in Path(name).read_text().splitlines()] if name else []


def _lives(process: str) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", process, "status").read_text()
    except OSError:
        return False


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return 700_000


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 100_000


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    assert sensor == 0
    return celsius[handle]


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    if busy_percent[handle] is None:
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(gpu=busy_percent[handle])


def nvmlDeviceGetComputeMode(handle: int) -> int:
    return 0


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list:
    return []


nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses
