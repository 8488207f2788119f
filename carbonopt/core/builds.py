"""Builds of shared libraries in folders that many processes share.

A note in the folder says who compiles. By it a later process tells a build that goes on from one
that was killed. The module also checks whether a built library is whole.
"""

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from carbonopt.core.files import lock_file
from carbonopt.core.values import Frozen

_NOTE = "carbonopt-build.json"
# errors of a file system that has no locks
_NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
)


class Builder(Frozen):
    """A process that compiles, and the machine that it runs on."""

    pid: int
    host: str
    machine: str  # the machine's identity over restarts; empty where it has none
    boot: str  # the identity of its last start, which containers of one machine share

    @classmethod
    def here(cls) -> Self:
        """Describe this process."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=_line_of("/etc/machine-id"),
            boot=_line_of("/proc/sys/kernel/random/boot_id"),
        )

    @property
    def has_lost_its_lock(self) -> bool:
        """True if a free lock means that the process is gone.

        That is so if it ran on this machine, now or before a restart. A network file system may
        keep the locks of each machine to itself.
        """
        here = self.here()
        same_machine = (self.machine, self.host) == (here.machine, here.host) and bool(here.machine)
        return bool(here.boot) and (self.boot == here.boot or same_machine)


class UnfinishedBuild(Frozen):
    """A build that has not ended, or never will."""

    builder: Builder
    is_running: bool | None  # None: it is on a machine where this can't be seen


@contextmanager
def noted_build(folder: Path) -> Iterator[None]:
    """Note that this process compiles in a folder, as long as the block lasts.

    The function first waits for the process that has noted this before.
    """
    with lock_file(folder / _NOTE) as note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield
            return
        os.ftruncate(note, 0)
        os.pwrite(note, Builder.here().model_dump_json().encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(note, 0)


def unfinished_build(folder: Path) -> UnfinishedBuild | None:
    """Return the build that a folder's note tells of; None where all have ended."""
    if not (folder / _NOTE).is_file():
        return None
    with lock_file(folder / _NOTE) as note:
        is_free = _locked(note, fcntl.LOCK_SH)
        try:
            builder = Builder.model_validate_json(os.pread(note, 4096, 0))
        except ValidationError:  # empty, or being written
            return None
    if not is_free:
        return UnfinishedBuild(builder=builder, is_running=True)
    return UnfinishedBuild(builder=builder, is_running=False if builder.has_lost_its_lock else None)


@contextmanager
def nobody_builds(folder: Path) -> Iterator[bool]:
    """Keep others from compiling in a folder during the block; give False if one does now.

    The note of a build that was killed is removed afterwards.
    """
    with lock_file(folder / _NOTE) as note:
        is_free = _locked(note, fcntl.LOCK_EX)
        yield is_free
        if is_free:
            os.ftruncate(note, 0)


def _locked(note: int, how: int) -> bool:
    """Lock a note until it is closed; return False where another process has locked it."""
    try:
        fcntl.flock(note, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_whole(library: Path) -> bool:
    """Return whether a shared library is complete to its last byte.

    The table of sections is the last thing that a linker writes. A full disk or a killed linker
    leaves less, which torch takes for compiled and can't load.
    """
    if not library.is_file():
        return False
    header = library.read_bytes()[:64]
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", header, 40)  # elf(5): e_shoff, e_shentsize and e_shnum
    entry_bytes, entries = struct.unpack_from("<HH", header, 58)
    return bool(library.stat().st_size >= table + entry_bytes * entries > 0)


def _line_of(path: str) -> str:
    """Return the line in a file of the system; empty where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
