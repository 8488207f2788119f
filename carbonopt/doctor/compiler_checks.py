"""Checks of the compilers that DeepSpeed uses, and of its compiled operators."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import carbonopt
from carbonopt.doctor.check_result import Finding, failure, ok, warning
from carbonopt.doctor.machine_facts import Machine, by_hand
from carbonopt.energy.occupancy import GpuNow
from carbonopt.engines.process.environment import ARCH_LIST, programs_path
from carbonopt.engines.process.extensions import extensions_folder, lock_at, locks_of

_FOR_WHAT = "offload, torch_compile and fused output layers need it"
_WAIT = "sleep 60; carbonopt doctor"
_READABLE = re.compile(r"[0-9]+\.[0-9]+(\+PTX)?([; ][0-9]+\.[0-9]+(\+PTX)?)*")


def stack_starts(machine: Machine) -> Finding:
    """Check that trials can import what they need; report the versions for a bug report."""
    if machine.stack is not None:
        # These two work in the study's process.
        own = {name: version(name) for name in ("optuna", "codecarbon")}
        versions = {"carbonopt": carbonopt.__version__, **own, **machine.stack.versions}
        return ok(", ".join(f"{name} {number}" for name, number in versions.items()))
    missing = re.search(r"No module named '(\w+)", machine.stack_error or "")
    advice = f"pip install {missing[1]}" if missing else by_hand("stack")
    return failure(f"the processes of trials can't start: {machine.stack_error}", advice)


def compilers(*, needed: bool) -> Finding:
    """Check for a C++ compiler for DeepSpeed's operators and a C compiler for `torch.compile`.

    The first is looked for as torch does it, the second as Triton does it.
    """
    cxx = _which(os.environ.get("CXX") or "c++")
    cc = next(
        filter(None, map(_which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))), None
    )
    if cxx and cc:
        return ok(f"{cxx}, {cc}")
    missing, install = (
        f"no {'C compiler (gcc)' if cxx else 'C++ compiler (c++)'} on PATH",
        "sudo apt-get install g++",
    )
    if not needed:
        return warning(f"{missing}: {_FOR_WHAT}", install)
    if any(extensions_folder().rglob("*.so")):
        return warning(f"{missing}: only what is compiled already can be used", install)
    return failure(f"{missing}: DeepSpeed compiles operators with it", install)


def ninja(*, needed: bool) -> Finding:
    """Check for ninja, which torch needs even if everything is compiled already."""
    if (path := _which("ninja")) is not None:
        return ok(path)
    if needed:
        return failure(
            "not on PATH: DeepSpeed's operators can't be loaded without it", "pip install ninja"
        )
    return warning(f"not on PATH: {_FOR_WHAT}", "pip install ninja")


def _which(program: str) -> str | None:
    """Return the path at which trials find a program."""
    return shutil.which(program, path=programs_path())


def arch_list(gpus: Sequence[GpuNow], environment: Mapping[str, str]) -> Finding | None:
    """Check that DeepSpeed can read TORCH_CUDA_ARCH_LIST, as set here and as trials get it."""
    value = os.environ.get(ARCH_LIST)
    if not gpus:
        return None
    if not value:
        return ok("not set: compiled for the GPUs that are here")
    right = f'export {ARCH_LIST}="{";".join(sorted({gpu.compute_capability for gpu in gpus}))}"'
    if not _READABLE.fullmatch(environment[ARCH_LIST]):
        return failure(
            f"{ARCH_LIST}={value!r} must hold numbers such as 9.0, with ; between two", right
        )
    if not _READABLE.fullmatch(value):
        return warning(
            f"{ARCH_LIST}={value!r} makes DeepSpeed crash; trials get {environment[ARCH_LIST]!r}",
            right,
        )
    return ok(f"{ARCH_LIST}={value}")


def nvcc(machine: Machine) -> Finding | None:
    """Compare the version of CUDA's compiler with torch's CUDA.

    No operator of a trial is compiled with it, so this check can only warn.
    """
    stack = machine.stack
    if stack is None or stack.torch_cuda is None:
        return None
    if stack.nvcc_error is None:
        return ok(f"nvcc {stack.nvcc}, torch's CUDA {stack.torch_cuda}")
    home = Path(f"/usr/local/cuda-{stack.torch_cuda}")
    install = f"sudo apt-get install cuda-nvcc-{stack.torch_cuda.replace('.', '-')}"
    advice = f"export CUDA_HOME={home}" if (home / "bin" / "nvcc").exists() else install
    return warning(f"{stack.nvcc_error} (no operator of a trial needs it)", advice)


def ops(machine: Machine) -> Finding | None:
    """Check that DeepSpeed's operators are compiled.

    Otherwise the first study spends half a minute on each.
    """
    if machine.stack is None:
        return None
    for op in machine.stack.ops:
        # The lock that the trials' process saw may have been released meanwhile.
        if op.lock is not None and (lock := lock_at(op.name, Path(op.lock))) is not None:
            if lock.is_dead:
                return warning(lock.found, lock.advice)
            return (
                warning(lock.found, _WAIT)
                if lock.is_waited_for
                else failure(lock.found, lock.advice)
            )
    names = ", ".join(op.name for op in machine.stack.ops)
    missing = ", ".join(op.name for op in machine.stack.ops if not op.built)
    if missing:
        use = " (for offload)" if machine.gpus else ""
        return warning(
            f"not compiled yet, about 30 s each: {missing}{use}", "carbonopt doctor --build"
        )
    return ok(f"compiled: {names}" if names else "none to compile")


def locked(operators: Sequence[str]) -> Finding | None:
    """Check whether a study that needs these operators would have to wait, or can't begin.

    Locks that killed builds have left are ignored, because the study removes them.
    """
    locks = [lock for lock in locks_of(operators) if not lock.is_dead]
    if not locks:
        return None
    lock = min(locks, key=lambda lock: lock.is_waited_for)
    if lock.is_waited_for:
        return warning(f"{lock.found}; the study waits for that", lock.advice)
    return failure(lock.found, lock.advice)
