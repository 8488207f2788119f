"""Remembers answers about models in the user's cache folder.

An answer is kept by everything that it follows from: the question, the models' folders,
carbonopt's own code and the libraries' versions. A damaged file is as good as none, and a cache
that can't be written is left alone.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import carbonopt
from carbonopt.core.errors import BadInput
from carbonopt.core.files import is_folder, read_text, write_bytes
from carbonopt.engines.process.extensions import cache_folder
from carbonopt.study_file.model_questions import About

Answer = TypeVar("Answer")

_LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "torchao")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_ANSWER_MIB = 16  # largest answer that is read


class CachedAnswer:
    """The place of one answer in the cache.

    Args:
        about: The kind of the question.
        question: The question.
        places: The folders of the models that it is about. A name of a hub among them is not
            remembered, because what it stands for can change.
    """

    def __init__(self, about: About, question: str, places: Sequence[str]) -> None:
        self._file: Path | None = None
        folder = cache_folder()  # relative for a user without a home
        if folder.is_absolute() and all(is_folder(Path(place)) for place in places):
            digest = _digest(question, places, weights=about == "weights")
            self._file = folder / "carbonopt" / about / f"{digest}.json"

    def read(self, parse: Callable[[str], Answer]) -> Answer | None:
        """Return the answer, or None if there is none that can be read.

        Args:
            parse: Makes the answer of its text, and raises ValueError if it can't be one.
        """
        if self._file is None:
            return None
        try:
            return parse(read_text(self._file, "the cache", _ANSWER_MIB))
        except (BadInput, ValueError):
            return None

    def keep(self, answer: str) -> None:
        """Write the answer, if the cache can be written."""
        if self._file is None:
            return
        try:
            write_bytes(self._file, answer.encode())
        except OSError:
            return


def _digest(question: str, folders: Sequence[str], *, weights: bool) -> str:
    """Return the digest of everything that an answer follows from.

    Args:
        weights: Whether the files of weights count, by their size and their times.
    """
    digest = hashlib.sha256(question.encode())
    digest.update(_programs_digest())
    for file in _model_files(folders):
        if file.suffix not in _WEIGHTS:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        elif weights:
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            digest.update(repr((str(file), status.st_size, times)).encode())
    return digest.hexdigest()


@cache
def _programs_digest() -> bytes:
    """Return the digest of carbonopt's own code and the libraries' versions."""
    digest = hashlib.sha256()
    for library in _LIBRARIES:
        digest.update(f"{library} {_version(library)}".encode())
    for file in sorted(Path(carbonopt.__file__).parent.rglob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _model_files(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(file for file in Path(folder).iterdir() if file.is_file())
