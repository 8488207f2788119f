"""The folder of a study or a pipeline, which one command at a time holds.

Nothing that was measured is removed from it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import existing_parent, kind_of, lock_file, remove
from carbonopt.storage.paths import PipelinePaths, StudyPaths

Paths = StudyPaths | PipelinePaths


class HeldFolder:
    """A folder while one command holds it.

    Until `keep` is called, a refusal removes all that the command has made. From then on, nothing
    in the folder is removed, whatever happens.
    """

    def __init__(self, paths: Paths, missing: list[Path]) -> None:
        self._paths = paths
        self._missing = missing  # folders that the command has made, the innermost first
        self._was_empty = not any(paths.lock.parent.iterdir())
        self.is_kept = False

    def keep(self) -> None:
        """Note that something has been measured, or will be from here on."""
        self.is_kept = True

    def remove_own(self) -> None:
        """Remove the files that the command has made, if the folder was empty; keep all others."""
        made = [
            path
            for path in self._paths.lock.parent.iterdir()
            if self._was_empty and self._paths.is_own(path)
        ]
        # Files that can't be removed do no harm, and the refusal is the error to report.
        with suppress(OSError):
            for path in made:
                remove(path)
            for folder in self._missing:
                folder.rmdir()


@contextmanager
def own_folder(paths: Paths) -> Iterator[HeldFolder]:
    """Hold the folder of a study or a pipeline.

    A BadInput within the context removes all that the command has made. If the command has called
    `keep`, the error is raised again as a CarbonoptError that says what is kept.

    Raises:
        BadInput: if the folder can't be made or locked, holds other files or the rest of a study
            that lost its storage, or another command works in it.
    """
    with ExitStack() as held:
        try:
            folder = _made(paths)
            lock = held.enter_context(lock_file(paths.lock))
        except OSError as error:
            raise BadInput(f"{paths.root} can't be written to: {error.strerror}.") from error
        _lock(lock, paths)
        try:
            yield folder
        except BadInput as error:
            if folder.is_kept:
                kept = (
                    f"What was measured is kept in {paths.root}; run the same command again to"
                    " resume"
                )
                raise CarbonoptError(f"{error} {kept}.") from error
            folder.remove_own()
            raise


def _made(paths: Paths) -> HeldFolder:
    root, own = paths.root, paths.lock.parent
    existing_parent(root, "the folder")
    if not root.is_dir() and (kind := kind_of(root)) is not None:
        raise BadInput(f"{root} is {kind}; give a folder.")
    what = "study" if isinstance(paths, StudyPaths) else "pipeline"
    paths.check_not_lost()
    if root.is_dir() and (strange := paths.foreign_files()):
        raise BadInput(f"{root} holds other files ({strange[0]}) and no {what}; give a new folder.")
    missing = [folder for folder in (own, *own.absolute().parents) if not folder.exists()]
    own.mkdir(parents=True, exist_ok=True)
    paths.check_kinds()
    return HeldFolder(paths, missing)


def _lock(lock: int, paths: Paths) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        join = ", join it (--worker)" if isinstance(paths, StudyPaths) else ""
        rule = f"another carbonopt run is working in {paths.root}"
        raise BadInput(f"{rule}; wait for it{join}, or give another folder.") from error
    except OSError as error:
        rule = f"{paths.root}: its file system must have locks, but has none ({error.strerror})"
        raise BadInput(f"{rule}; give a folder on another one.") from error


def is_locked(paths: Paths) -> bool:
    """Return whether a run is working in the folder now; False also if this user can't see it."""
    try:
        lock = os.open(paths.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
