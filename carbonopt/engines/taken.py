"""Which devices of a machine a study has for itself: two that shared them would measure each other's work."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, StudyInterrupted

_PATIENCE_S = 5.0  # with who had them before: a command that was killed, say
_LOOK_AGAIN_S = 0.1


@contextmanager
def taken(devices: Iterable[str], interrupted: Callable[[], bool]) -> Iterator[None]:
    """These devices, by names that no others of this machine have; given back also when this process dies. Raises
    BadInput if another command has one, StudyInterrupted soon after `interrupted` says so."""
    with ExitStack() as held:
        for device in devices:
            descriptor = _opened(Path(tempfile.gettempdir()) / f"carbonopt-{device}.lock")
            held.callback(os.close, descriptor)
            deadline = time.monotonic() + _PATIENCE_S
            while not _locked(descriptor):
                if interrupted():
                    raise StudyInterrupted(BEFORE_FIRST_TRIAL)
                if time.monotonic() > deadline:
                    rule = "a study must have its devices for itself, because it measures them"
                    raise BadInput(f"{rule}, but another carbonopt command has {device}; wait for it, or give others.")
                time.sleep(_LOOK_AGAIN_S)
        yield


def _opened(lock: Path) -> int:
    """Another user may have made it: it is only read."""
    try:
        return os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
