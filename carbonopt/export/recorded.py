"""The files of its maker's machine that a study reads, under names that work elsewhere.

A path reveals that machine and leads nowhere on any other, so in winner/ each file or folder is
`data/NAME`, with size and sha256.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

from carbonopt.export import inputs
from carbonopt.export.script_places import ScriptPlaces
from carbonopt.spec.study_data import InputFile
from carbonopt.spec.workload_settings import REWARDS

# Places in a dumped study of files, which are always paths, and of folders, which are names on the
# hub unless absolute.
_FILES = (
    *("workload.dataset.train_files", "workload.dataset.eval_files", "workload.dataset.database"),
    *("launch.table", "carbon.trace"),
)
_FOLDERS = (
    *(
        "workload.model.name_or_path",
        "workload.tokenizer.name_or_path",
        "workload.dataset.name_or_path",
    ),
    *(f"workload.{key}.model" for key in REWARDS),
)
_FUNCTIONS = tuple(f"workload.{key}.python" for key in REWARDS)  # FILE.py:FUNCTION


# Files by the name of their input. Each file has its `path` below the input ("": it is the input
# itself), `bytes`, `sha256` and, for a large file of a model, the number of `pieces` that the
# sha256 is over.
Files = dict[str, list[dict[str, Any]]]


def recorded(study: dict[str, Any], noted: Iterable[InputFile]) -> Files:
    """Replace the paths in a dumped study by names, and return the files by name.

    Args:
        study: the dumped study, which is changed.
        noted: the files as the first trial found them. An input that isn't noted has no files.
    """
    if _value(study, "workload.folder") is not None:
        return _of_script(study["workload"], noted)
    names: dict[str, str] = {}  # names by path
    for place in (*_FILES, *_FOLDERS):
        if given := _value(study, place):
            paths = [given] if isinstance(given, str) else given
            new = [_named(path, names, folder=place in _FOLDERS) for path in paths]
            part, _, key = place.rpartition(".")
            _value(study, part)[key] = new[0] if isinstance(given, str) else new
    for place in _FUNCTIONS:
        if given := _value(study, place):
            path, _, function = given.rpartition(":")
            _value(study, place.rpartition(".")[0])["python"] = (
                f"{_named(path, names, folder=False)}:{function}"
            )
    return {name: list(_files(PurePath(path), noted)) for path, name in names.items()}


def script_places(workload: dict[str, Any], noted: Iterable[InputFile]) -> ScriptPlaces:
    """Return where the inputs of a dumped script's workload lie below data/."""
    return ScriptPlaces(
        PurePath(workload["folder"]), workload["command"], workload.get("files", ()), noted
    )


def _of_script(workload: dict[str, Any], noted: Iterable[InputFile]) -> Files:
    """Replace the paths in a dumped script's workload by the files' places below data/.

    These are its folder, its files and the paths that its command names.
    """
    places = script_places(workload, noted)
    workload["command"] = places.placed_command()
    workload["folder"] = f"./{PurePath(inputs.DATA, places.inside).as_posix()}"
    if "files" in workload:
        named = (places.place(PurePath(file)) for file in workload["files"])
        workload["files"] = [f"{inputs.DATA}/{place}" for place in named]
    return {f"{inputs.DATA}/{place}": [_whole(file)] for place, file in places.listed.items()}


def _whole(file: InputFile) -> dict[str, Any]:
    return {"path": "", "bytes": file.bytes, "sha256": file.sha256}


def elsewhere(workload: dict[str, Any], noted: Iterable[InputFile]) -> str:
    """Return, as lines of a comment, the files that a script reads by paths in its own code."""
    files = script_places(workload, noted).elsewhere
    lines = (
        [
            "# It also reads, by paths in its own code or from its environment's, which have to"
            " lead there:\n"
        ]
        if files
        else []
    )
    for file in files:
        name = PurePath(file.path).name
        lines.append(
            f"#   {name if name.isprintable() else ascii(name)}:"
            f" {inputs.described([_whole(file)])}\n"
        )
    return "".join(lines)


def _named(path: str, names: dict[str, str], *, folder: bool) -> str:
    if folder and not Path(path).is_absolute():
        return path  # a name on the hub
    if path not in names:
        whole = PurePath(path)
        name, number = f"{inputs.DATA}/{whole.name}", 1
        while name in names.values():
            number += 1
            name = f"{inputs.DATA}/{whole.stem}-{number}{whole.suffix}"
        names[path] = name
    # In a study file a path with ./ is a folder, whether it exists yet or not, and never a name on
    # the hub.
    return f"./{names[path]}" if folder else names[path]


def of_workload(study: dict[str, Any], files: Files) -> set[str]:
    """Return the names in a study's workload of files, folders and things on the hub.

    For a script they are all names of `files`.
    """
    names = set(files) if _value(study, "workload.folder") else set[str]()
    for place in (*_FILES, *_FOLDERS):
        value = _value(study, place) if place.startswith("workload.") else None
        names |= {value} if isinstance(value, str) else set(value or ())
    names |= {value.rpartition(":")[0] for place in _FUNCTIONS if (value := _value(study, place))}
    return {name.removeprefix("./") for name in names}


def comment(recorded: Files) -> str:
    """Return the files as lines of a YAML comment; empty without files."""
    lines = (
        ["# What it reads has to be put beside this file, under these names:\n"] if recorded else []
    )
    for name, files in recorded.items():
        lines.append(
            f"#   {name if name.isprintable() else ascii(name)}: {inputs.described(files)}\n"
        )
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
