"""What a study reads from files of its maker's machine: under names that mean something elsewhere, size and sha256.

A path tells of that machine and leads nowhere on any other: in winner/ each file or folder is `data/NAME`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from carbonopt.core.format import count_text
from carbonopt.export import inputs

HASHED_BYTES = 8 * 2**30  # in all: more would keep a report waiting for a minute; what is beyond has its size only

# Where a dumped study has them: always paths, or the name of something on the hub unless absolute.
_FILES = (
    *(("workload", "dataset", key) for key in ("train_files", "eval_files")),
    *(("launch", "table"), ("carbon", "trace")),
)
_FOLDERS = tuple(("workload", part, "name_or_path") for part in ("model", "tokenizer", "dataset"))


class Recorded(NamedTuple):
    """A file of an input, as it was when the report was written."""

    path: str  # below the input, "" for an input that is one file itself
    bytes: int
    sha256: str | None


Files = dict[str, list[Recorded]]  # by their input's name


class Inputs:
    """The files and folders of a study, each under its name."""

    def __init__(self, study: dict[str, Any]) -> None:
        self._names: dict[str, str] = {}  # by path
        self._flat = {_value(study, place) for place in _FOLDERS[:2]}  # a model's folder is read, not those in it
        self.study = study
        for place in (*_FILES, *_FOLDERS):
            self.study = _changed(self.study, place, self._folder if place in _FOLDERS else self._name)

    def recorded(self, older: Files) -> Files:
        """Their files by name; none for an input that can't be read, and wasn't for the `older` report either."""
        left = HASHED_BYTES
        by_name = {}
        for path, name in self._names.items():
            try:
                files = list(_files(Path(path), deep=path not in self._flat, hashed_bytes=left))
            except OSError:
                files = []
            left -= sum(file.bytes for file in files if file.sha256)
            by_name[name] = files or older.get(name, [])
        return by_name

    def _folder(self, path: str) -> str:
        # With ./ a study file means a folder, whether it is there yet or not, and nothing on the hub.
        return f"./{self._name(path)}" if Path(path).is_absolute() else path

    def _name(self, path: str) -> str:
        if path not in self._names:
            whole = PurePath(path)
            name, number = f"{inputs.DATA}/{whole.name}", 1
            while name in self._names.values():
                number += 1
                name = f"{inputs.DATA}/{whole.stem}-{number}{whole.suffix}"
            self._names[path] = name
        return self._names[path]


def of_workload(study: dict[str, Any]) -> set[str]:
    """The names that the workload of a changed study has for files and folders, and for what is on the hub."""
    names: set[str] = set()
    for place in (*_FILES, *_FOLDERS):
        value = _value(study, place) if place[0] == "workload" else None
        names |= {value} if isinstance(value, str) else set(value or ())
    return {name.removeprefix("./") for name in names}


def as_json(recorded: Files) -> str:
    plain = {name: [file._asdict() for file in files] for name, files in recorded.items()}
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def of_older_report(folder: Path) -> Files:
    """What a report in this folder recorded: another machine, to which the data wasn't copied, keeps it."""
    try:
        plain = json.loads((folder / inputs.LIST).read_text(encoding="utf-8"))
        return {name: [Recorded(**file) for file in files] for name, files in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def comment(recorded: Files) -> str:
    """As lines of a YAML comment; none without files."""
    lines = ["# What it reads has to be put beside this file, under these names:\n"] if recorded else []
    for name, files in recorded.items():
        size = f"{sum(file.bytes for file in files):,} bytes"
        if not files:
            size = "could not be read when this was written"
        elif files[0].path:
            size = f"{count_text(len(files), 'file')}, {size}"
        elif files[0].sha256:
            size = f"{size}, sha256 {files[0].sha256}"
        lines.append(f"#   {name if name.isprintable() else ascii(name)}: {size}\n")
    return "".join(lines)


def _files(path: Path, deep: bool, hashed_bytes: int) -> Iterator[Recorded]:
    one = path.is_file()
    below = [path] if one else sorted(path.rglob("*") if deep else path.iterdir())
    for file in below:
        relative = "" if one else file.relative_to(path).as_posix()
        if not file.is_file() or any(part.startswith(".") for part in relative.split("/")):
            continue
        size = file.stat().st_size
        hashed_bytes -= size
        yield Recorded(relative, size, inputs.sha256_of(file) if hashed_bytes >= 0 else None)


def _value(study: dict[str, Any], place: tuple[str, ...]) -> Any:
    value: Any = study
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _changed(part: dict[str, Any], place: tuple[str, ...], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy with the text or the list of texts at that place changed, if there is one."""
    key, *deeper = place
    match part.get(key):
        case dict(inner) if deeper:
            return {**part, key: _changed(inner, tuple(deeper), change)}
        case str(text) if not deeper:
            return {**part, key: change(text)}
        case [*texts] if not deeper:
            return {**part, key: [change(text) for text in texts]}
        case _:
            return part
