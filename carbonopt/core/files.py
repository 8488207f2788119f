"""Reading and writing of files, which are written whole or not at all."""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from carbonopt.core.errors import BadInput, shortened

REPORT_JSON = Path("data") / "report.json"  # tells a report's folder from any other

# tells the folder of a comparison of several studies
COMPARISON_JSON = Path("data") / "comparison.json"
PIPELINE_JSON = Path("data") / "pipeline.json"  # tells the folder of a pipeline's report
MOST_DIGITS = 300  # of a whole number in JSON: a float has no room for more than 308
_REGULAR = "a file"
_KINDS = {
    stat.S_IFREG: _REGULAR,
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def user_path(given: object, what: str = "the path") -> Path:
    """Return the path that a user gives, with ~ expanded.

    A shell does not expand ~ in --out=~/runs, nor does Python, and nobody dares to remove a folder
    called ~.

    Args:
        given: a text or a path object.
        what: the option or the argument in the user's words, for the error.

    Raises:
        BadInput: if it is neither, is empty, has a NUL character, or begins with the home of a user
            that this machine doesn't know.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise BadInput(f"{what} must be a path, as text, but got {shortened(given)}.")
    if not text:
        raise BadInput(f"{what} must be a path, but got an empty text; give one.")
    if "\0" in text:
        raise BadInput(
            f"{what} must be a path with no NUL character in it, but got {shortened(text)}; give"
            " another."
        )
    try:
        return expanded(text)
    except RuntimeError as error:
        raise BadInput(
            f"{what} must not begin with the home of an unknown user, but got {shortened(text)};"
            " write ./ before a name that begins with ~."
        ) from error


def expanded(text: str) -> Path:
    """Return the path of a text, with ~ expanded; in ./~a it is a part of a name.

    Raises:
        RuntimeError: if it begins with the home of an unknown user.
    """
    # pathlib drops the ./ and would expand the ~ after it
    return Path(text).expanduser() if text.startswith("~") else Path(text)


def is_file(path: Path) -> bool:
    """Return whether there is a file at a path.

    A word of a command can be longer than a name may be, where Path.is_file raises.
    """
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path; see `is_file`."""
    return os.path.isdir(path)  # noqa: PTH112


def is_there(path: Path) -> bool:
    """Return whether there is anything at a path; see `is_file`."""
    return os.path.exists(path)  # noqa: PTH110


def read_text(path: Path, what: str, max_mib: int) -> str:
    """Read the text of a regular file in UTF-8.

    Other files are refused: a pipe or a device may have no end.

    Raises:
        BadInput: if it can't be read, with the reason.
    """
    try:
        status = path.stat()
        size_mib = status.st_size / 2**20
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"can't read {what} {path}: it must be a regular file, but is none.")
        if size_mib > max_mib:
            raise BadInput(
                f"can't read {what} {path}: it must have {max_mib} MiB at most, but has"
                f" {size_mib:.1f}."
            )
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError)
            else "its name or its text is not valid UTF-8"
        )
        raise BadInput(f"can't read {what} {path}: {reason}.") from error


def opened_unnoted(path: Path) -> BinaryIO:
    """Open a file for reading; the time of its last read stays as it was, if this user may do so.

    By that time a study tells whether a trial has read what another one wrote.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # it is another user's
        return path.open("rb")
    return os.fdopen(descriptor, "rb")


def parsed_json(
    text: str | bytes, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Read a value in JSON.

    Args:
        text: the JSON.
        object_of: makes an object of its keys and values; by default it is a dict, and a key that
            an object has twice is refused.

    Raises:
        ValueError: if the text is no JSON, is nested more deeply than Python can read, or has a
            whole number that is too long for a float.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of or _object, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def repeated_key(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """Return the first key that an object in JSON has twice, or None."""
    names = [name for name, _ in pairs]
    return next((name for at, name in enumerate(names) if name in names[:at]), None)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(
            f"an object must have each key once, but has {repeated_key(pairs)!r} twice"
        )
    return values


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"a whole number must have at most {MOST_DIGITS} digits, but has {len(digits)}"
        )
    return int(digits)


def kind_of(path: Path) -> str | None:
    """Name the kind of what is at a path, without following links; None where nothing is.

    Raises:
        OSError: if the path can't be examined.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def check_regular(path: Path, *, link: bool = False) -> None:
    """Refuse anything but a regular file at a path; nothing may be there, too.

    Args:
        path: the path of one of carbonopt's own files. A pipe would block the command, and a link
            would let it write a file of somebody else's.
        link: whether a link to a regular file is allowed.

    Raises:
        BadInput: if something else is there.
    """
    kind = kind_of(path)
    if kind in (None, _REGULAR) or (link and path.is_file()):
        return
    raise BadInput(f"{path} has to be a file, but is {kind}; move it.")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds; of a link the link alone.

    Unlike `shutil.rmtree`, it doesn't wait for a writer of a named pipe.

    Raises:
        OSError: If the system refuses it.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def existing_parent(path: Path, what: str) -> Path:
    """Return the nearest folder above a path that exists already.

    Args:
        path: the path of something that is going to be made.
        what: the option or the file in the user's words, for the error.

    Raises:
        BadInput: if something that is no folder is on the way.
    """
    above = path.absolute().parents or [path]  # / has none
    nearest = next(parent for parent in above if os.path.lexists(parent))
    if not nearest.is_dir():
        raise BadInput(f"{what} {path}: {nearest} has to be a folder, but is {kind_of(nearest)}.")
    return nearest


@contextmanager
def lock_file(path: Path, access: int = os.O_RDWR) -> Iterator[int]:
    """Open a file that serves as a lock, and give its descriptor; make it if it is missing.

    The file keeps its contents. No link is followed, as it could lead to a file of somebody else's.

    Args:
        path: the path of the file.
        access: os.O_RDONLY where another user may have made the file. Locks of a network file
            system need os.O_RDWR.

    Raises:
        BadInput: if something else than a regular file is there.
        OSError: if it can't be opened.
    """
    # without O_NONBLOCK a pipe would block the command
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError:
        check_regular(path)
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadInput(f"{path} has to be a file, but is {kind_of(path)}; move it.")
        yield descriptor
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file aside, then rename it.

    A reader sees the old file or the new one, never half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.unlink(missing_ok=True)  # a killed process with the same pid may have left it
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, as `write_bytes` does.

    NaN and infinity are refused, as JSON has no number for them.
    """
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


@contextmanager
def replaced(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Give a new folder to fill, which takes the place of `folder` at the end.

    A reader finds all of the old files or all of the new ones. Old files and folders go if `names`
    has their path, or, with a slash at its end, that of a folder which they are in. All other old
    files are the user's and are put into the new folder, too.

    Where two commands do this at once, the second waits for the first. After an error everything is
    as it was; after a kill the next call makes it so.

    Raises:
        BadInput: if folders are where files have to be, or the other way round, or the folder can't
            be exchanged.
    """
    shown, folder = folder, Path(os.path.realpath(folder))  # a link to a folder stays a link
    part, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK) or os.path.ismount(folder):
        raise BadInput(
            f"{shown} can't be exchanged for a new one; give a folder inside one that can be"
            " written to."
        )
    if folder.is_dir() and Path.cwd().is_relative_to(folder):
        where = f"change to another folder first, such as {part.parent}"
        raise BadInput(f"{shown} can't be replaced while you are in it; {where}.")
    # locks the folder itself, which leaves no lock file behind
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _settle(folder, part, old)
        part.mkdir()
        yield part
        if folder.exists():
            check_kinds(
                folder,
                [path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()],
            )
            _carry_over(folder, part, names)
            shutil.copymode(folder, part)
            folder.rename(old)
        part.rename(folder)
    finally:
        _settle(folder, part, old)
        os.close(lock)


def _settle(folder: Path, part: Path, old: Path) -> None:
    """Leave one whole folder, wherever `replaced` ended.

    Between its two renames there is only the old folder.
    """
    if old.exists() and not folder.exists():
        old.rename(folder)
    for rest in (part, old):
        shutil.rmtree(rest, ignore_errors=True)


def check_kinds(folder: Path, names: Collection[str]) -> None:
    """Check that new files would replace only files, and their folders only folders.

    Args:
        folder: the folder of the new files.
        names: their names in it; a name with a slash at its end is a folder's.

    Raises:
        BadInput: if something of another kind is there; a link to a folder counts as none.
    """
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
    """Link the user's own files into the new folder.

    They are copied where the file system has no hard links.
    """
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
