"""Checks of the host: CPU load and energy, shared memory, memory, disk, environment."""

import math
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from carbonopt.core.errors import BadInput
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.doctor.check_result import Finding, failure, ok, warning
from carbonopt.energy.codecarbon import power_models
from carbonopt.engines.process.environment import check_environment

_SHM = Path("/dev/shm")  # noqa: S108 – not a temporary file
_SMALL_SHM_GIB, _SMALL_RAM_GIB = 1.0, 4.0
# An idle desktop stays below. One busy core is more than that on a machine with up to four cores,
# and matters little on one with many.
_BUSY_CPU_PERCENT = 20.0
_BUSY_CPU_S = 0.5
_GPUS_ALONE = "carbon: {objective: gpu}"
_LARGER_SHM = "docker run --shm-size=8g"
_LOW_DISK_GIB, _NO_DISK_GIB = 10.0, 1.0
# Master weights, gradients and Adam's two moments, 4 bytes each (arXiv 1910.02054, section 3.1).
_OFFLOAD_BYTES_PER_PARAMETER = 16


def cpu_load() -> Finding:
    """Check for other work on the CPU, while nothing of carbonopt runs.

    The machine's present load is measured, as CodeCarbon does it. The load average covers minutes,
    including a study that has just ended, and counts waiting for a disk as work.
    """
    busy_percent = psutil.cpu_percent(_BUSY_CPU_S)
    text = f"{busy_percent:.0f} % busy with other work"
    off = f"{text}: timings and modelled energy will be off"
    return ok(text) if busy_percent <= _BUSY_CPU_PERCENT else warning(off, "top")


def rapl(has_gpus: bool, powercap: Path = Path("/sys/class/powercap")) -> Finding:
    """Check that the CPU's own energy counter (RAPL) can be read."""
    counters = sorted(powercap.glob("intel-rapl:*/energy_uj"))
    if not counters:
        text = "this machine has no RAPL: the CPU's energy is modelled"
        return warning(text, _GPUS_ALONE) if has_gpus else ok(text)
    if all(os.access(counter, os.R_OK) for counter in counters):
        return ok("readable: the CPU's energy is measured")
    chmod = f"sudo chmod a+r {powercap}/intel-rapl:*/energy_uj"
    return warning("not readable: the CPU's energy is modelled, not measured", chmod)


def cpu_power(has_gpus: bool) -> Finding | None:
    """Report how CodeCarbon models the CPU's power; None if it is measured."""
    model = power_models().get("cpu")
    if model is None:
        return None
    text = f"CodeCarbon takes {model}"
    return warning(text, _GPUS_ALONE) if has_gpus and "guess" in model else ok(text)


def shared_memory(folder: Path = _SHM) -> Finding:
    """Check the free space in shared memory.

    Ranks and data loaders exchange data through it; if it is used up, they die of SIGBUS (exit code
    −7).
    """
    if not folder.is_dir():
        return warning(f"no {folder}, which several ranks need", _LARGER_SHM)
    free_gib = shutil.disk_usage(folder).free / BYTES_PER_GIB
    text = f"{free_gib:.1f} GiB free in {folder}"
    return (
        warning(f"{text}: little for several ranks", _LARGER_SHM)
        if free_gib < _SMALL_SHM_GIB
        else ok(text)
    )


def memory() -> Finding:
    """Check the RAM that is left for an offloaded optimizer."""
    left_bytes = min(psutil.virtual_memory().available, _cgroup_left_bytes())
    billions, left_gib = left_bytes / _OFFLOAD_BYTES_PER_PARAMETER / 1e9, left_bytes / BYTES_PER_GIB
    text = (
        f"{left_gib:.1f} GiB left: an offloaded optimizer of {billions:.2g} billion parameters at"
        " the most"
    )
    return (
        warning(text, "search: {space: {offload: none}}") if left_gib < _SMALL_RAM_GIB else ok(text)
    )


def _cgroup_left_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the bytes of memory that our control groups leave; infinite without a limit."""
    left = math.inf
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / limit).exists() and (
                maximum := (folder / limit).read_text().strip()
            ) != "max":
                left = min(left, max(0, int(maximum) - int((folder / usage).read_text())))
            if folder == top:
                break
    return left


def disk(folder: Path, elsewhere: str | None) -> Finding:
    """Check that a folder, or the nearest one above it, can be written to and has free space.

    Args:
        elsewhere: what to type to use another folder; None: this one can't be exchanged.
    """
    there = next(
        place
        for place in (folder.absolute(), *folder.absolute().parents)
        if os.path.exists(place)  # noqa: PTH110
    )
    if not os.access(there, os.W_OK):
        ask = f"ask its owner: ls -ld {there}"
        return failure(f"{there} can't be written to", elsewhere or ask)
    advice = elsewhere or f"make room: df -h {there}"
    free_gib = shutil.disk_usage(there).free / BYTES_PER_GIB
    text = f"{free_gib:.1f} GiB free for {folder}"
    if free_gib < _NO_DISK_GIB:
        return failure(text, advice)
    return warning(text, advice) if free_gib < _LOW_DISK_GIB else ok(text)


def environment() -> Finding:
    try:
        check_environment()
    except BadInput as error:
        problem, _, advice = str(error).partition("; ")
        return failure(problem, advice)
    return ok("no environment variable that would make trials fail")


def temporary_files() -> Finding:
    try:
        return ok(tempfile.gettempdir())
    except FileNotFoundError:
        return failure(
            "no folder that temporary files can be written to", "export TMPDIR=/path/with/space"
        )
