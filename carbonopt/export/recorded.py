"""What a study reads from files of its maker's machine: under names that mean something elsewhere, size and sha256.

A path tells of that machine and leads nowhere on any other: in winner/ each file or folder is `data/NAME`.
"""

import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from carbonopt.export import inputs

HASHED_BYTES = 8 * 2**30  # in all: more would keep a report waiting for a minute; what is beyond has its size only

# Where a dumped study has them: always paths, or the name of something on the hub unless absolute.
_FILES = ("workload.dataset.train_files", "workload.dataset.eval_files", "launch.table", "carbon.trace")
_FOLDERS = ("workload.model.name_or_path", "workload.tokenizer.name_or_path", "workload.dataset.name_or_path")


class Recorded(NamedTuple):
    """A file of an input, as it was when the report was written."""

    path: str  # below the input, "" for an input that is one file itself
    bytes: int
    sha256: str | None


Files = dict[str, list[Recorded]]  # by their input's name


def recorded(study: dict[str, Any], older: Files) -> Files:
    """Gives a dumped study the names of its files and folders in place of their paths, and returns their files by name;
    none for an input that can't be read, and wasn't for the `older` report either."""
    names: dict[str, str] = {}  # by path
    flat = {_value(study, place) for place in _FOLDERS[:2]}  # a model's folder is read, not those in it
    for place in (*_FILES, *_FOLDERS):
        if given := _value(study, place):
            paths = [given] if isinstance(given, str) else given
            new = [_named(path, names, folder=place in _FOLDERS) for path in paths]
            part, _, key = place.rpartition(".")
            _value(study, part)[key] = new[0] if isinstance(given, str) else new
    left, by_name = HASHED_BYTES, {}
    for path, name in names.items():
        try:
            files = list(_files(Path(path), deep=path not in flat, hashed_bytes=left))
        except OSError:
            files = []
        left -= sum(file.bytes for file in files if file.sha256)
        by_name[name] = files or older.get(name, [])
    return by_name


def _named(path: str, names: dict[str, str], *, folder: bool) -> str:
    if folder and not Path(path).is_absolute():
        return path  # on the hub
    if path not in names:
        whole = PurePath(path)
        name, number = f"{inputs.DATA}/{whole.name}", 1
        while name in names.values():
            number += 1
            name = f"{inputs.DATA}/{whole.stem}-{number}{whole.suffix}"
        names[path] = name
    # With ./ a study file means a folder, whether it is there yet or not, and nothing on the hub.
    return f"./{names[path]}" if folder else names[path]


def of_workload(study: dict[str, Any]) -> set[str]:
    """The names that the workload of a study with names has for files and folders, and for what is on the hub."""
    names: set[str] = set()
    for place in (*_FILES, *_FOLDERS):
        value = _value(study, place) if place.startswith("workload.") else None
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
        size = inputs.described([file._asdict() for file in files])
        lines.append(f"#   {name if name.isprintable() else ascii(name)}: {size}\n")
    return "".join(lines)


def _files(path: Path, deep: bool, hashed_bytes: int) -> Iterator[Recorded]:
    is_single_file = path.is_file()
    below = [path] if is_single_file else sorted(path.rglob("*") if deep else path.iterdir())
    for file in below:
        relative = "" if is_single_file else file.relative_to(path).as_posix()
        if not file.is_file() or any(part.startswith(".") for part in relative.split("/")):
            continue
        size = file.stat().st_size
        hashed_bytes -= size
        yield Recorded(relative, size, inputs.sha256_of(file) if hashed_bytes >= 0 else None)


def _value(study: dict[str, Any], place: str) -> Any:
    value: Any = study
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
