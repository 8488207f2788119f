"""The folder where torch compiles DeepSpeed's operators, and the locks in it that make everyone wait."""

import importlib.util
import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from carbonopt.core.config import Launch, Space, may_be_other_than
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.units import human_duration
from carbonopt.core.values import Frozen
from carbonopt.engines.process import guard

# Of a lock that no process here holds: one on another machine or in another container may, and takes half a minute,
# several times that on a busy machine.
_FRESH_S = 180.0
_TICK_S = 1.0
_OF_THIS_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


class OperatorLock(Frozen):
    """A lock as it is now: torch holds it open while it compiles, and takes it away unless it is killed."""

    operator: str
    path: Path
    age_s: float
    holder: int | None  # a process; None: none that can be seen from here

    @property
    def is_dead(self) -> bool:
        return self.holder is None and self.age_s > _FRESH_S

    @property
    def found(self) -> str:
        age = human_duration(self.age_s)
        if self.holder is not None:
            return f"{self.operator} is being compiled now by process {self.holder}, since {age}"
        dead = "nothing compiles it: what did was killed, and every trial would wait for ever"
        why = dead if self.is_dead else "perhaps being compiled by what can't be seen from here"
        return f"{self.operator} is locked since {age} and {why}"

    @property
    def advice(self) -> str:
        """What to type: to mend it, or to see who works."""
        path = shlex.quote(str(self.path))
        if self.is_dead:
            return f"rm {path}"
        return f"ls -l {path}" if self.holder is None else f"ps -fp {self.holder}"


def extensions_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where torch compiles operators; the parent of the folder for its version."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen) if chosen else cache_folder(environment) / "torch_extensions"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's, as torch finds it: without a home a folder named ~ in the working folder, where Path would raise."""
    return Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111


def needed_operators(launch: Launch, space: Space) -> tuple[str, ...]:
    """The names of those that trials load, as `carbonopt.train.deepspeed_ops` has their builders."""
    if not launch.gpus:
        return ("deepspeed_shm_comm",)
    return ("cpu_adam",) if may_be_other_than(space["offload"], "none") else ()


def missing_operators(operators: Sequence[str]) -> list[str]:
    """Those that aren't compiled, by the files that are there: without importing torch or DeepSpeed."""
    folder = extensions_folder()
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        folder /= f"{_OF_THIS_PYTHON}_{_accelerator()}"
    installed = _package("deepspeed") / "ops"  # with DeepSpeed itself, if it was told to when it was installed

    missing = [operator for operator in operators if not (folder / operator / f"{operator}.so").exists()]
    return [operator for operator in missing if not any(installed.glob(f"*/{operator}_op*.so"))]


def _accelerator() -> str:
    """What this torch was built for, as torch has it in its folder's name."""
    built = runpy.run_path(str(_package("torch") / "version.py"))
    if built.get("hip") is not None:
        return f"rocm{built['hip'].replace('.', '')}"
    return "cpu" if built["cuda"] is None else f"cu{built['cuda'].replace('.', '')}"


def _package(name: str) -> Path:
    """The folder of a package that isn't imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise CarbonoptError(f"{name} is not installed; pip install {name}.")
    return Path(spec.origin).parent


def locks_of(operators: Sequence[str]) -> list[OperatorLock]:
    """Those of the operators that are locked, without importing torch."""
    folder = extensions_folder()
    roots = (folder, *folder.glob(f"{_OF_THIS_PYTHON}_*"))
    locks = (lock_at(operator, root / operator / guard.LOCK) for operator in operators for root in roots)
    return [lock for lock in locks if lock is not None]


def lock_at(operator: str, path: Path) -> OperatorLock | None:
    """None where there is none, or no longer."""
    try:
        real, age_s = path.resolve(), max(0.0, time.time() - path.stat().st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return None
    holder = next((pid for pid in guard.all_processes() if real in guard.open_locks(pid)), None)
    return OperatorLock(operator=operator, path=path, age_s=age_s, holder=holder)


def wait_for(operators: Sequence[str], interrupted: Callable[[], bool]) -> None:
    """Until none of them is locked. Not left to torch: that waits for ever, also for what was killed, and then loads an
    operator that isn't there.

    Raises:
        BadInput: for a lock that nobody is going to take away, with what to type.
        StudyInterrupted: soon after `interrupted` says so.
    """
    while locks := locks_of(operators):
        if dead := next((lock for lock in locks if lock.is_dead), None):
            raise BadInput(f"{dead.found} → {dead.advice}")
        if interrupted():
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)
        time.sleep(_TICK_S)
