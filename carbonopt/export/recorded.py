"""What a study reads from files of its maker's machine: under names that mean something elsewhere, size and sha256.

A path tells of that machine and leads nowhere on any other: in winner/ each file or folder is `data/NAME`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

from carbonopt.core.config import REWARDS
from carbonopt.core.study import InputFile
from carbonopt.export import inputs

# Where a dumped study has them: always paths, or the name of something on the hub unless absolute.
_FILES = (
    *("workload.dataset.train_files", "workload.dataset.eval_files", "workload.dataset.database"),
    *("launch.table", "carbon.trace"),
)
_FOLDERS = (
    *("workload.model.name_or_path", "workload.tokenizer.name_or_path", "workload.dataset.name_or_path"),
    *(f"workload.{key}.model" for key in REWARDS),
)
_FUNCTIONS = tuple(f"workload.{key}.python" for key in REWARDS)  # FILE.py:FUNCTION


# By their input's name: of each file `path` below the input ("": it is that file itself), `bytes`, `sha256` and, of a
# large one of a model, over how many `pieces` of it that is.
Files = dict[str, list[dict[str, Any]]]


def recorded(study: dict[str, Any], noted: Iterable[InputFile]) -> Files:
    """Gives a dumped study the names of its files and folders in place of their paths, and returns their files by name,
    as the first trial found them (`noted`); none for an input that isn't noted."""
    if (folder := _value(study, "workload.folder")) is not None:
        return _of_script(study["workload"], folder, noted)
    names: dict[str, str] = {}  # by path
    for place in (*_FILES, *_FOLDERS):
        if given := _value(study, place):
            paths = [given] if isinstance(given, str) else given
            new = [_named(path, names, folder=place in _FOLDERS) for path in paths]
            part, _, key = place.rpartition(".")
            _value(study, part)[key] = new[0] if isinstance(given, str) else new
    for place in _FUNCTIONS:
        if given := _value(study, place):
            path, _, function = given.rpartition(":")
            _value(study, place.rpartition(".")[0])["python"] = f"{_named(path, names, folder=False)}:{function}"
    return {name: list(_files(PurePath(path), noted)) for path, name in names.items()}


def _of_script(workload: dict[str, Any], folder: str, noted: Iterable[InputFile]) -> Files:
    """Of a script: what lies in its folder keeps its place there, anything else lies directly in data/."""
    roots = [PurePath(folder), *(PurePath(file).parent for file in workload.get("files", ()))]

    def below(path: str) -> str:
        root = next((root for root in roots if PurePath(path).is_relative_to(root)), PurePath(path).parent)
        return PurePath(path).relative_to(root).as_posix()

    workload["folder"] = f"./{inputs.DATA}"
    if "files" in workload:
        workload["files"] = [f"{inputs.DATA}/{below(file)}" for file in workload["files"]]
    return {
        f"{inputs.DATA}/{below(file.path)}": [{"path": "", "bytes": file.bytes, "sha256": file.sha256}]
        for file in noted
    }


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


def of_workload(study: dict[str, Any], files: Files) -> set[str]:
    """The names that the workload of a study with names has for files and folders, and for what is on the hub; of a
    script all of `files`."""
    names = set(files) if _value(study, "workload.folder") else set[str]()
    for place in (*_FILES, *_FOLDERS):
        value = _value(study, place) if place.startswith("workload.") else None
        names |= {value} if isinstance(value, str) else set(value or ())
    names |= {value.rpartition(":")[0] for place in _FUNCTIONS if (value := _value(study, place))}
    return {name.removeprefix("./") for name in names}


def comment(recorded: Files) -> str:
    """As lines of a YAML comment; none without files."""
    lines = ["# What it reads has to be put beside this file, under these names:\n"] if recorded else []
    for name, files in recorded.items():
        lines.append(f"#   {name if name.isprintable() else ascii(name)}: {inputs.described(files)}\n")
    return "".join(lines)


def _files(path: PurePath, noted: Iterable[InputFile]) -> Iterator[dict[str, Any]]:
    for file in noted:
        if (place := PurePath(file.path)).is_relative_to(path):
            below = "" if place == path else place.relative_to(path).as_posix()
            pieces = {"pieces": file.pieces} if file.pieces else {}
            yield {"path": below, "bytes": file.bytes, "sha256": file.sha256, **pieces}


def _value(study: dict[str, Any], place: str) -> Any:
    value: Any = study
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
