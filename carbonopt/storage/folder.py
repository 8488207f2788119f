"""Folders that a command works in: a study's, locked and left as it was found when the study is refused; and one whose
files all change at once."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from carbonopt.core.errors import BadInput
from carbonopt.storage.paths import StudyPaths


@contextmanager
def study_folder(paths: StudyPaths) -> Iterator[None]:
    """The folder, for one command at a time. After a BadInput inside, what this made is gone again.

    Raises:
        BadInput: if it can't be made, holds other files, or another command works in it.
    """
    root = paths.root
    if root.exists() and not root.is_dir():
        raise BadInput(f"--out {root} is a file; give a folder.")
    missing = [folder for folder in (root, *root.absolute().parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if strange := paths.foreign_files():
            raise BadInput(f"--out {root} holds other files ({strange[0]}) and no study; give a new folder.")
        empty = not any(root.iterdir())
        lock = paths.lock.open("w")
    except OSError as error:
        raise BadInput(f"--out {root} can't be written to: {error.strerror}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"another carbonopt run is working in {root}; wait for it, or give --out.") from error
        try:
            yield
        except BadInput:
            for path in root.iterdir() if empty else ():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for folder in missing:  # the innermost first
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            raise


def is_locked(paths: StudyPaths) -> bool:
    """Whether a run is working in the folder right now."""
    if not paths.lock.exists():
        return False
    with paths.lock.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
