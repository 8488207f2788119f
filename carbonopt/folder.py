"""Folders that a command works in: a study's, locked and left as it was found when the study is refused; and one whose
files all change at once."""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from carbonopt.errors import BadInput
from carbonopt.paths import StudyPaths


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
        strange = paths.strangers()
        if strange:
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
            if empty:
                _empty(paths)
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


def _empty(paths: StudyPaths) -> None:
    for path in paths.root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def replaced(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` at the end: a reader finds all of the old files or all of
    the new. Of the old ones those called one of `names` go; all others, the user's, are in the new folder, too.

    Where two commands do this at once, the second waits for the first. After an error everything is as it was; after a
    kill the next call here makes it so.

    Raises:
        BadInput: if folders stand where files have to, or the other way round, or the folder can't be exchanged.
    """
    shown, folder = folder, Path(os.path.realpath(folder))  # a link to a folder stays one
    part, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK) or os.path.ismount(folder):
        raise BadInput(f"{shown} can't be exchanged for a new one; give a folder inside one that can be written to.")
    if folder.is_dir() and Path.cwd().is_relative_to(folder):
        raise BadInput(
            f"{shown} can't be replaced while you are in it; change to another folder first, such as {part.parent}."
        )
    lock = os.open(folder.parent, os.O_RDONLY)  # its own lock, so that no file is left for it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _settle(folder, part, old)
        part.mkdir()
        yield part
        if folder.exists():
            _check_shape(folder, part)
            _carry_over(folder, part, names)
            shutil.copymode(folder, part)
            folder.rename(old)
        part.rename(folder)
    finally:
        _settle(folder, part, old)
        os.close(lock)


def _settle(folder: Path, part: Path, old: Path) -> None:
    """One whole folder, wherever `replaced` ended: between its renames there is only the old one."""
    if old.exists() and not folder.exists():
        old.rename(folder)
    for rest in (part, old):
        shutil.rmtree(rest, ignore_errors=True)


def _check_shape(folder: Path, part: Path) -> None:
    """Refuses what a new file or folder would replace that is not of its kind; a link to a folder is not one."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is a file; give a folder.")
    for made in part.rglob("*"):
        there = folder / made.relative_to(part)
        if made.is_dir() and os.path.lexists(there) and (there.is_symlink() or not there.is_dir()):
            raise BadInput(
                f"{there} has to be a folder, but is {'a link' if there.is_symlink() else 'a file'}; move it."
            )
        if made.is_file() and there.is_dir():
            raise BadInput(f"{there} has to be a file, but is a folder; move it.")


def _carry_over(folder: Path, part: Path, names: Collection[str]) -> None:
    """Links what the user put there into the new folder, or copies it where the file system has no hard links."""
    own = {*map(Path, names)} | {parent for name in names for parent in Path(name).parents}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            relative = path.relative_to(folder)
            if relative in own:
                continue
            there = part / relative
            there.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                there.mkdir(exist_ok=True)
                continue
            try:
                os.link(path, there, follow_symlinks=False)
            except OSError:
                shutil.copy2(path, there, follow_symlinks=False)
