"""The files into which a command's own output goes, such as a log in the script's folder."""

import contextlib
import os
import stat
from pathlib import Path

_OUTPUT_AND_ERRORS = ("1", "2")  # descriptors


def command_outputs() -> dict[tuple[int, int], str]:
    """Return the path of each file that this command writes its output to, by device and inode.

    The command includes the shell that redirected its output, and the other programs of a pipe,
    such as tee.
    """
    outputs: dict[tuple[int, int], str] = {}
    for process in _processes_of_command():
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            is_own = process == os.getpid()
            descriptors = _OUTPUT_AND_ERRORS if is_own else os.listdir(folder / "fd")  # noqa: PTH208
            for descriptor in descriptors:
                with contextlib.suppress(OSError):  # it has just been closed
                    noted = dict(
                        line.split(":", 1)
                        for line in (folder / "fdinfo" / descriptor).read_text().splitlines()
                        if line.startswith("flags:")
                    )
                    status = (folder / "fd" / descriptor).stat()
                    access = int(noted["flags"], 8) & os.O_ACCMODE
                    if stat.S_ISREG(status.st_mode) and access != os.O_RDONLY:
                        path = (folder / "fd" / descriptor).readlink()
                        outputs[status.st_dev, status.st_ino] = str(path)
    return outputs


def _processes_of_command() -> set[int]:
    """Return this process, those of its process group, and its ancestors in its session.

    A trial's processes have a session of their own.
    """
    # parent, process group and session, by process; fields of proc_pid_stat(5)
    known: dict[int, tuple[int, int, int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2]
                parent, group, session = map(int, fields.split()[1:4])
                known[int(name)] = parent, group, session
    own = os.getpid()
    found = {own} | {pid for pid, (_, group, _) in known.items() if group == os.getpgrp()}
    above = own
    while (parent := known.get(above, (0, 0, 0))[0]) in known:
        if known[parent][2] != os.getsid(0):
            break
        found.add(parent)
        above = parent
    return found
