"""Checks of the GPUs: which there are, whether they count their energy, and who else uses them."""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from carbonopt.core.errors import BadInput
from carbonopt.doctor.check_result import Finding, failure, ok, warning
from carbonopt.doctor.machine_facts import SMI_S, Machine, ProbeError, by_hand
from carbonopt.energy.counter import EnergyCounters
from carbonopt.energy.hardware import REINSTALL_NVML
from carbonopt.energy.occupancy import GpuNow
from carbonopt.engines.process.environment import VISIBLE_DEVICES

_WINDOW_S, _POLL_S = 1.0, 0.01
_DEAD_AFTER_S = 0.5  # an H200's counter ticks every 0.1 s
_IDLE_GIB = 0.25  # less than one CUDA context takes
_SMI_FOLDERS = ("/usr/bin", "/usr/lib/wsl/lib", "/usr/local/nvidia/bin")
# A container gets the driver's tools from its host.
_IN_CONTAINER = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all"


def seen(machine: Machine) -> Finding:
    gpus, error = machine.gpus, machine.driver_error
    if error is None:
        named = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)
        return ok(named or "no NVIDIA driver: studies run on the CPU with launch.gpus: []")
    if error.__cause__ is None:
        return failure(str(error), REINSTALL_NVML)
    says = str(error.__cause__)
    advice = _IN_CONTAINER if "Not Found" in says else "sudo reboot"
    return failure(f"there are NVIDIA GPUs, but their driver says: {says}", advice)


def hidden(gpus: Sequence[GpuNow], wanted: Sequence[int]) -> Finding | None:
    """Check that CUDA_VISIBLE_DEVICES includes all wanted GPUs.

    Schedulers use it to divide a machine among users.
    """
    if not gpus:
        return None
    value = os.environ.get(VISIBLE_DEVICES)
    if value is None:
        return ok(f"{VISIBLE_DEVICES} is not set")
    named = (
        [gpu.index for gpu in gpus if _is_named(gpu, name.strip())] for name in value.split(",")
    )
    # CUDA stops at the first name that is no GPU's, such as -1.
    given = sorted(itertools.chain(*itertools.takewhile(bool, named)))
    outside = [index for index in wanted if index not in given]
    if not outside:
        return ok(f"{VISIBLE_DEVICES}={value}")
    left_out = f"{VISIBLE_DEVICES}={value!r} leaves out GPU {_listed(outside)}"
    return warning(
        f"{left_out}, but trials get the GPUs of launch.gpus whatever it says", _launch(given)
    )


def _is_named(gpu: GpuNow, name: str) -> bool:
    return name == str(gpu.index) or (len(name) > len("GPU-") and gpu.uuid.startswith(name))


def nvidia_smi(machine: Machine, gpus: Sequence[GpuNow]) -> Finding | None:
    """Check that `nvidia-smi` works, by which CodeCarbon decides whether there are GPUs.

    A program that hangs is a failure even if `gpus` is empty.
    """
    path = shutil.which("nvidia-smi")
    if path is not None and machine.smi_code is None:
        return failure(
            f"{path} does not answer within {SMI_S:g} s, and CodeCarbon would wait for it",
            "sudo reboot",
        )
    if not gpus:
        return None
    absent = "CodeCarbon takes every GPU for absent and its energy for 0"
    if path is None:
        exports = [
            f'export PATH="$PATH:{at}"' for at in _SMI_FOLDERS if Path(at, "nvidia-smi").exists()
        ]
        return failure(f"not on PATH: without it {absent}", next(iter(exports), _IN_CONTAINER))
    if machine.smi_code:
        return failure(
            f"{path} --help ends with code {machine.smi_code}, so that {absent}", f"{path} --help"
        )
    return ok(path)


def others(gpus: Sequence[GpuNow], wanted: Sequence[int], *, begun: bool = False) -> Finding | None:
    """Check for other work on the wanted GPUs, whose energy would be counted as the study's.

    Args:
        begun: whether the study has begun, so that it keeps its GPUs.
    """
    if not wanted:
        return None
    busy = {gpu.index: work for gpu in gpus if (work := _work(gpu))}
    here = "; ".join(f"GPU {index}: {busy[index]}" for index in wanted if index in busy)
    if not here:
        return ok("none")
    free = [gpu.index for gpu in gpus if gpu.index not in busy][: len(wanted)]
    advice = (
        _launch(free)
        if free and not begun
        else "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    )
    return warning(f"{here}; the energy that others use would be counted as the study's", advice)


def _work(gpu: GpuNow) -> str | None:
    if gpu.processes:
        return f"process {', '.join(map(_named, gpu.processes))}"
    if gpu.memory_used_gib is not None and gpu.memory_used_gib > _IDLE_GIB:
        return f"{gpu.memory_used_gib:.1f} GiB used by processes that can't be seen from here"
    return None


def _named(pid: int) -> str:
    try:
        return f"{pid} ({psutil.Process(pid).name()})"
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # usually a process of another container
        return str(pid)


def counters_alive(machine: Machine) -> Finding | None:
    """Check that the energy counters show more power with all GPUs under load than idle."""
    if not machine.gpus:
        return None
    indices = machine.launch.gpus
    try:
        counters = EnergyCounters(indices)
    except BadInput as error:
        return failure(str(error), _launch([]))
    with contextlib.closing(counters):
        idle_w = _power_w(counters)
        if not all(idle_w):
            return _dead(indices, idle_w, _WINDOW_S)
        idle_text = ", ".join(
            f"GPU {index} {watts:.0f} W" for index, watts in zip(indices, idle_w, strict=True)
        )
        try:
            with machine.load():
                load_w = _power_w(counters)
        except ProbeError as error:
            return warning(f"{idle_text} idle; not tried under load: {error}", by_hand("load"))
    powers_w = list(zip(indices, idle_w, load_w, strict=True))
    text = "; ".join(
        f"GPU {index} {idle:.0f} W idle, {load:.0f} W under load" for index, idle, load in powers_w
    )
    deaf = [index for index, idle, load in powers_w if load <= idle]
    if deaf:
        return failure(
            f"{text}: no more under load on GPU {_listed(deaf)}", _without(deaf, indices)
        )
    return ok(text)


def counters_tick(indices: Sequence[int]) -> Finding | None:
    """Check that the energy counters count, without load, which takes a tenth of a second."""
    if not indices:
        return None
    with contextlib.closing(EnergyCounters(indices)) as counters:
        until = time.monotonic() + _DEAD_AFTER_S
        while not all(energy_j := counters.read()):
            if time.monotonic() > until:
                return _dead(indices, energy_j, _DEAD_AFTER_S)
            time.sleep(_POLL_S)
    return ok("counting")


def _power_w(counters: EnergyCounters) -> tuple[float, ...]:
    before, began = counters.read(), time.monotonic()
    time.sleep(_WINDOW_S)
    after, ended = counters.read(), time.monotonic()
    return tuple((b - a) / (ended - began) for a, b in zip(before, after, strict=True))


def _dead(indices: Sequence[int], counted: Sequence[float], duration_s: float) -> Finding:
    dead = [index for index, energy in zip(indices, counted, strict=True) if not energy]
    still = f"the counter of GPU {_listed(dead)} stood still for {duration_s:g} s"
    return failure(f"a running GPU uses energy, but {still}", _without(dead, indices))


def _without(bad: Sequence[int], indices: Sequence[int]) -> str:
    return _launch([index for index in indices if index not in bad])


def _launch(gpus: list[int]) -> str:
    return f"launch: {{gpus: {gpus}}}"


def torch_sees(machine: Machine) -> Finding | None:
    """Check that torch, in the environment of trials, sees the GPUs that NVML sees."""
    stack = machine.stack
    if stack is None or not machine.gpus:
        return None
    if stack.torch_cuda is None:
        reinstall = "pip install --force-reinstall torch"
        return failure(f"torch {stack.versions['torch']} was built for the CPU only", reinstall)
    if stack.gpu_error is not None:
        return failure(f"torch can't use GPUs: {stack.gpu_error}", by_hand("stack"))
    seen_uuids = {gpu.uuid for gpu in stack.gpus}
    missing = [gpu.index for gpu in machine.gpus if gpu.uuid not in seen_uuids]
    if missing:
        text = (
            f"torch sees {len(stack.gpus)} of {len(machine.gpus)} GPUs, not GPU {_listed(missing)}"
        )
        return failure(text, _without(missing, [gpu.index for gpu in machine.gpus]))
    return ok(f"all {len(stack.gpus)}, by CUDA {stack.torch_cuda}")


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
