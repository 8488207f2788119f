"""Files as every room reads and writes them: whole, or not at all."""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Prepared

REPORT_JSON = Path("data") / "report.json"  # in a report's folder: what tells it from any other
COMPARISON_JSON = Path("data") / "comparison.json"  # likewise, of several studies beside each other
PIPELINE_JSON = Path("data") / "pipeline.json"  # likewise, of a pipeline


@dataclass
class PreparedFolder:
    """What the preparation writes once and every trial reads."""

    root: Path

    def __post_init__(self) -> None:
        self.train, self.evaluation = self.root / "train.npy", self.root / "eval.npy"
        self.tokenizer, self.model_config = self.root / "tokenizer", self.root / "model"
        self.image_processor = self.root / "image_processor"
        self.workload = self.root / "workload.json"  # what it was made for: the task's settings
        self.summary = self.root / "prepared.json"

    def read_summary(self) -> Prepared:
        return Prepared(**json.loads(self.summary.read_text(encoding="utf-8")))

    def made_for(self, fingerprint: str) -> Prepared | None:
        """The summary, if this folder was made for that workload; what is damaged was made for none."""
        try:
            summary = self.read_summary()
            whole = all((self.root / name).stat().st_size == size for name, size in summary.files.items())
        except (OSError, ValueError, TypeError):
            return None
        return summary if summary.fingerprint == fingerprint and whole else None

    def sizes(self) -> dict[str, int]:
        """Bytes of what is in it, by names relative to it."""
        files = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}


def read_text(path: Path, what: str, max_mib: int) -> str:
    """The text of a regular file in UTF-8: a pipe or a device may have no end. Raises a BadInput that says why it can't
    be read."""
    try:
        status = path.stat()
        size_mib = status.st_size / 2**20
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"can't read {what} {path}: it must be a regular file, but is none.")
        if size_mib > max_mib:
            raise BadInput(f"can't read {what} {path}: it must have {max_mib} MiB at most, but has {size_mib:.1f}.")
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name or its text is not valid UTF-8"
        raise BadInput(f"can't read {what} {path}: {reason}.") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Writes aside, then renames: a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """As `write_bytes`, indented; refuses what JSON has no number for."""
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


@contextmanager
def replaced(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` at the end: a reader finds all of the old files or all of
    the new. Of the old ones those called one of `names` go, and all in folders that are called one, with a slash at its
    end; all others, the user's, are in the new folder, too.

    Where two commands do this at once, the second waits for the first. After an error everything is as it was; after a
    kill the next call here makes it so. Raises BadInput if folders stand where files have to, or the other way round,
    or the folder can't be exchanged.
    """
    shown, folder = folder, Path(os.path.realpath(folder))  # a link to a folder stays one
    part, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK) or os.path.ismount(folder):
        raise BadInput(f"{shown} can't be exchanged for a new one; give a folder inside one that can be written to.")
    if folder.is_dir() and Path.cwd().is_relative_to(folder):
        where = f"change to another folder first, such as {part.parent}"
        raise BadInput(f"{shown} can't be replaced while you are in it; {where}.")
    lock = os.open(folder.parent, os.O_RDONLY)  # its own lock, so that no file is left for it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _settle(folder, part, old)
        part.mkdir()
        yield part
        if folder.exists():
            check_kinds(folder, [path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()])
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


def check_kinds(folder: Path, names: Collection[str]) -> None:
    """Raises BadInput for what new files of these names, or their folders, would replace that is not of their kind; a
    link to a folder is not one. A name with a slash at its end is a folder's."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give a folder.")
    folders = {parent for name in names for parent in Path(name).parents if parent != Path()}
    for made in sorted(folders | {Path(name) for name in names if name.endswith("/")}):
        there = folder / made
        if os.path.lexists(there) and (there.is_symlink() or not there.is_dir()):
            kind = "a link" if there.is_symlink() else "a file"
            raise BadInput(f"{there} has to be a folder, but is {kind}; move it.")
    for name in sorted(names):
        if not name.endswith("/") and (folder / name).is_dir():
            raise BadInput(f"{folder / name} has to be a file, but is a folder; move it.")


def _carry_over(folder: Path, part: Path, names: Collection[str]) -> None:
    """Links what the user put there into the new folder, or copies it where the file system has no hard links."""
    own = {*map(Path, names)} | {parent for name in names for parent in Path(name).parents}
    own_folders = {Path(name) for name in names if name.endswith("/")}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            relative = path.relative_to(folder)
            if relative in own or any(parent in own_folders for parent in relative.parents):
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
