"""Data files as bytes and as text, which may be compressed."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from carbonopt.core.errors import BadInput

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # the first bytes of text in UTF-16
# The beginning of the small file that stands in a Git repository for one that Git LFS keeps.
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_POINTER = 1024  # bytes


def check_no_pointer(path: Path) -> None:
    """Check that a file is not what Git leaves in the place of one that Git LFS hasn't fetched.

    Raises:
        BadInput: if it is.
        OSError: if it can't be read.
    """
    if not path.is_file() or path.stat().st_size > _LONGEST_POINTER:
        return
    if path.read_bytes().startswith(_POINTER):
        raise BadInput(
            f"the data file {path} must hold data, but is a Git LFS pointer to them; fetch them"
            " with git lfs pull."
        )


def data_suffix(path: Path) -> str:
    """Return a data file's suffix in lower case, without the .gz of a compressed one."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def file_bytes(path: Path) -> bytes:
    """Return all bytes of a data file, decompressed where its name ends in .gz."""
    return gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a data file as UTF-8 text, decompressed where its name ends in .gz."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of reading a data file into BadInput.

    Raises:
        BadInput: if the file can't be read, can't be decompressed or is not UTF-8, or is a pointer
            of Git LFS.
    """
    try:
        check_no_pointer(path)
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadInput(
            f"the data file {path} must be gzip, as its name says, but isn't: {error}."
        ) from error
    except OSError as error:
        raise BadInput(f"can't read the data file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:  # its position counts from the start of a chunk
        encoding = "UTF-16" if file_bytes(path).startswith(_UTF_16) else "its encoding"
        raise BadInput(
            f"the data file {path} must be UTF-8 text, but isn't in line {_undecodable(path)};"
            f" convert it from {encoding}."
        ) from error


def _undecodable(path: Path) -> int:
    """Return the number, from 1, of the first line that is not UTF-8."""
    lines = file_bytes(path).split(b"\n")
    return next(number for number, line in enumerate(lines, start=1) if not _is_utf8(line))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
