"""The folder where torch compiles DeepSpeed's operators, and the locks in it.

Every process that loads an operator waits for its lock.
"""

import contextlib
import fcntl
import importlib.util
import os
import runpy
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from carbonopt.core.builds import is_whole, nobody_builds, unfinished_build
from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.units import human_duration
from carbonopt.core.values import Frozen
from carbonopt.engines.process import guard
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.space_settings import Space, may_be_other_than

# Time to wait for a lock whose holder is unknown. A process on another machine may hold it: a build
# takes half a minute, and several times that on a busy machine.
_FRESH_S = 180.0
_TICK_S = 1.0
# File systems of one machine.
_LOCAL = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "tmpfs",
    "overlay",
}
_PRODUCTS = ("*.so", "*.o", ".ninja_*", "build.ninja")  # files that torch makes for an operator
_OF_THIS_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"


class OperatorLock(Frozen):
    """The state of an operator's lock at one moment.

    Torch holds the lock open while it compiles, and removes it unless it is killed.
    """

    operator: str
    path: Path
    identity: tuple[int, int]
    age_s: float
    holder: str | None = None  # the process that compiles; None: none that can be seen from here
    is_dead: bool = False  # whether it is known that nobody compiles any more

    @property
    def is_waited_for(self) -> bool:
        """True if somebody may still remove the lock."""
        return not self.is_dead and (self.holder is not None or self.age_s <= _FRESH_S)

    @property
    def found(self) -> str:
        """A description of what is known about the lock."""
        age = human_duration(self.age_s)
        if self.is_dead:
            return f"{self.operator} is locked since {age} by a build that was killed"
        if self.holder is not None:
            return f"{self.operator} is being compiled now by {self.holder}, since {age}"
        if self.is_waited_for:
            return (
                f"{self.operator} is locked since {age} and perhaps being compiled by what can't be"
                " seen from here"
            )
        return (
            f"{self.operator} is locked since {age} by what can't be seen from here, and every"
            " trial would wait for it"
        )

    @property
    def advice(self) -> str:
        """A command to type: to remove the lock, or to look at it."""
        path = shlex.quote(str(self.path))
        if self.is_dead:
            return "carbonopt doctor --build"
        return f"ls -l {path}" if self.is_waited_for else f"rm {path}"


CACHE_HOME = "XDG_CACHE_HOME"


def extensions_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder where torch compiles operators, in one folder for each version of torch."""
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen) if chosen else cache_folder(environment) / "torch_extensions"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache folder, as torch finds it in `work_environment`.

    A relative XDG_CACHE_HOME is ignored, as the XDG specification says. Without a home, it is a
    folder named ~ in the working folder, where Path would raise.
    """
    chosen = Path(environment.get(CACHE_HOME, ""))
    return chosen if chosen.is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111


SHM_COMM, CPU_ADAM = "deepspeed_shm_comm", "cpu_adam"


def needed_operators(launch: Launch, space: Space, *, is_script: bool) -> tuple[str, ...]:
    """Return the names of the operators that trials load.

    `carbonopt.train.speed.deepspeed_ops` has their builders. A script needs none: operators that
    its own DeepSpeed loads are compiled by the first trial that loads them.
    """
    if is_script:
        return ()
    if not launch.gpus:
        return (SHM_COMM,)
    return (CPU_ADAM,) if may_be_other_than(space["offload"], "none") else ()


def missing_operators(operators: Sequence[str]) -> list[str]:
    """Return the operators that aren't compiled, or not completely.

    The files show it, without importing torch.
    """
    # DeepSpeed's installation can include compiled operators, if that was chosen.
    installed = _package("deepspeed") / "ops"
    folder = _folder_of_this_torch()
    missing = [
        operator for operator in operators if not is_whole(folder / operator / f"{operator}.so")
    ]
    return [operator for operator in missing if not any(installed.glob(f"*/{operator}_op*.so"))]


def _folder_of_this_torch() -> Path:
    folder = extensions_folder()
    return (
        folder
        if os.environ.get("TORCH_EXTENSIONS_DIR")
        else folder / f"{_OF_THIS_PYTHON}_{_accelerator()}"
    )


def _accelerator() -> str:
    """Return the platform that this torch was built for, as in the name of torch's folder."""
    built = runpy.run_path(str(_package("torch") / "version.py"))
    if built.get("hip") is not None:
        return f"rocm{built['hip'].replace('.', '')}"
    return "cpu" if built["cuda"] is None else f"cu{built['cuda'].replace('.', '')}"


def _package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise CarbonoptError(f"{name} is not installed; pip install {name}.")
    return Path(spec.origin).parent


def locks_of(operators: Sequence[str]) -> list[OperatorLock]:
    """Return the locks of the operators that are locked, without importing torch."""
    folder = extensions_folder()
    roots = (folder, *folder.glob(f"{_OF_THIS_PYTHON}_*"))
    locks = (
        lock_at(operator, root / operator / guard.LOCK) for operator in operators for root in roots
    )
    return [lock for lock in locks if lock is not None]


def lock_at(operator: str, path: Path) -> OperatorLock | None:
    """Return the present state of an operator's lock; None if there is no lock, or no longer."""
    identity = _identity(path)
    if identity is None:
        return None
    age_s = max(0.0, time.time() - identity[1] / 1e9)
    holder = _holder(path)
    is_dead = holder is None and _is_abandoned(path)
    return OperatorLock(
        operator=operator, path=path, identity=identity, age_s=age_s, holder=holder, is_dead=is_dead
    )


def _holder(lock: Path) -> str | None:
    """Name the process that holds a lock, or that still builds in its folder; None if unknown."""
    real = lock.resolve()
    for pid in guard.all_processes():
        if real in guard.open_locks(pid) or _builds_in(pid, real.parent):
            return f"process {pid}"
    build = unfinished_build(lock.parent)
    return (
        f"process {build.builder.pid} on {build.builder.host}"
        if build and build.is_running
        else None
    )


def _builds_in(pid: int, folder: Path) -> bool:
    """Return whether a process is torch's ninja in a folder.

    Ninja goes on when the process that started it is killed.
    """
    process = Path("/proc") / str(pid)
    try:
        return (process / "comm").read_text(errors="replace").strip() == "ninja" and (
            process / "cwd"
        ).readlink() == folder
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
        return False


def _is_abandoned(lock: Path) -> bool:
    """Return whether it is known that nobody compiles any more.

    The builder's note shows it. For files that only this machine has, the kernel shows it, too: it
    grants a write lease only on a file that no process has open, in any container.
    """
    build = unfinished_build(lock.parent)
    if build is not None and build.is_running is False:
        return True
    if _file_system_of(lock) not in _LOCAL:
        return False
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # removed meanwhile, or another user's
        return False
    try:
        # If a process opens the file now, the kernel signals the lease: SIGURG is ignored, but the
        # default, SIGIO, would kill this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False  # open somewhere, or a file system without leases
    finally:
        os.close(descriptor)
    return True


def _file_system_of(path: Path) -> str:
    """Return the kind of file system that holds a file."""
    real = path.resolve()
    mounts = [
        line.split() for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    ]
    places = [(Path(fields[1].replace("\\040", " ")), fields[2]) for fields in mounts]
    holding = [
        (len(place.parts), number, kind)
        for number, (place, kind) in enumerate(places)
        if real.is_relative_to(place)
    ]
    return max(holding)[2]  # the deepest mount point, and its last mount if it has several


def mend(operators: Sequence[str]) -> None:
    """Remove locks and files of these operators that were left by killed builds.

    Torch would wait for their locks for ever, and load half a library.
    """
    for lock in locks_of(operators):
        if lock.is_dead:
            with nobody_builds(lock.path.parent) as ours:
                # The identity differs if another build has begun meanwhile.
                if ours and _identity(lock.path) == lock.identity:
                    _remove_products(lock.path.parent)
                    lock.path.unlink(missing_ok=True)
    locked = {lock.operator for lock in locks_of(operators)}
    for operator in operators:
        folder = _folder_of_this_torch() / operator
        library = folder / f"{operator}.so"
        if operator not in locked and library.exists() and not is_whole(library):
            with nobody_builds(folder) as ours:
                if ours:
                    _remove_products(folder)


def clear_dead_locks(environment: Mapping[str, str]) -> None:
    """Remove the locks that killed builds have left, of any operator and any Python.

    For scripts: which operators one loads isn't known, and it would wait for such a lock for ever.
    Nothing else is removed, and no lock in a folder that isn't surely torch's.
    """
    folder = extensions_folder(environment)
    for path in (*folder.glob(f"*/{guard.LOCK}"), *folder.glob(f"*/*/{guard.LOCK}")):
        # What can't be looked at or changed, such as another user's, is not for this study to mend.
        with contextlib.suppress(OSError, BadInput):
            if not _is_torchs(path, folder):
                continue
            lock = lock_at(path.parent.name, path)
            if lock is not None and lock.is_dead and _identity(path) == lock.identity:
                path.unlink(missing_ok=True)


def _is_torchs(lock: Path, folder: Path) -> bool:
    """Return whether a lock is in a folder where torch builds, or that has nothing else in it."""
    status = lock.lstat()
    is_empty_file = stat.S_ISREG(status.st_mode) and status.st_size == 0
    is_below = lock.parent.resolve().is_relative_to(folder.resolve())
    builds = (lock.parent / "build.ninja").is_file()
    return is_empty_file and is_below and (builds or list(lock.parent.iterdir()) == [lock])


def _identity(path: Path) -> tuple[int, int] | None:
    """Return numbers that distinguish a file from its replacement; None if there is no file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns


def _remove_products(folder: Path) -> None:
    for pattern in _PRODUCTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def wait_for(operators: Sequence[str], interrupted: Callable[[], bool]) -> None:
    """Wait until none of the operators is locked, and remove what killed builds have left.

    Torch itself would wait for ever, also for builds that were killed, and then load an operator
    that isn't there.

    Raises:
        BadInput: for a lock that perhaps nobody will remove, with a command to type.
        StudyInterrupted: soon after `interrupted` returns true.
    """
    if operators:
        mend(operators)
    while locks := locks_of(operators):
        if left := next(
            (lock for lock in locks if not lock.is_dead and not lock.is_waited_for), None
        ):
            raise BadInput(f"{left.found} → {left.advice}")
        if interrupted():
            raise StudyInterrupted(BEFORE_A_TRIAL)
        time.sleep(_TICK_S)
        mend(operators)
