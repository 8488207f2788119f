"""Locks on a machine's devices.

Two studies that shared a device would measure each other's work.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.files import lock_file

_PATIENCE_S = 5.0  # time for the previous holder to let go, such as a command that was killed
_LOOK_AGAIN_S = 0.1


@contextmanager
def taken(devices: Iterable[str], interrupted: Callable[[], bool]) -> Iterator[None]:
    """Hold devices for this process alone, until the context or the process ends.

    Args:
        devices: names of the devices, unique on this machine.
        interrupted: returns whether the study is asked to end.

    Raises:
        BadInput: if another command has one of them.
        StudyInterrupted: soon after `interrupted` returns true.
    """
    with ExitStack() as held:
        for device in devices:
            lock = Path(tempfile.gettempdir()) / f"carbonopt-{device}.lock"
            # Another user may have made the file: open it for reading alone.
            descriptor = held.enter_context(lock_file(lock, os.O_RDONLY))
            deadline = time.monotonic() + _PATIENCE_S
            while not _locked(descriptor):
                if interrupted():
                    raise StudyInterrupted(BEFORE_A_TRIAL)
                if time.monotonic() > deadline:
                    rule = "a study must have its devices for itself, because it measures them"
                    raise BadInput(
                        f"{rule}, but another carbonopt command has {device}; wait for it, or give"
                        " others."
                    )
                time.sleep(_LOOK_AGAIN_S)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
