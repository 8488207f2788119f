"""Reads study files and pipeline files.

YAML goes in; a checked `StudyConfig` comes out, or one sentence that says which key is wrong.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from carbonopt.core.dimensions import DIMENSION_NAMES, DIMENSIONS, REQUIRED
from carbonopt.core.errors import BadInput, is_address, shortened, shown
from carbonopt.core.files import expanded, read_text
from carbonopt.core.refusals import first_refusal, hint
from carbonopt.spec.hostfile_format import parse_hostfile
from carbonopt.spec.launch_settings import LAUNCHES, LocalLaunch
from carbonopt.spec.pipeline_file import Pipeline, PipelineStep
from carbonopt.spec.space_settings import AUTO, Choices, Range, Space, UnchosenSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import Workload
from carbonopt.study_file.yaml_file import MAX_MIB, YamlFile, read_yaml, yaml_text
from carbonopt.train.tasks.task import task_class

# Keys whose value may be the path of a file with the content, so that several studies can share it.
PIECES = (("search", "space"), ("carbon",), ("workload", "deepspeed"))


def load_study(path: Path, models: Mapping[str, Path] = MappingProxyType({})) -> StudyConfig:
    """Read and check a study file.

    Relative paths in it are resolved from the file's own folder.

    Args:
        models: Folders that replace the study file's `model` or `reward`.

    Raises:
        BadInput: With the key's path, the value found and what is allowed.
    """
    file = read_yaml(path, "the study file")
    raw = file.values
    if isinstance(workload := raw.get("workload"), dict):
        for key, model in models.items():
            workload[key] = {"name_or_path" if key == "model" else "model": str(model)}
            if key == "model":
                workload.pop("tokenizer", None)  # the model's folder has its tokenizer
    return _checked(file, Path(os.path.realpath(path)).parent)


def study_of(values: Mapping[str, Any], folder: Path) -> tuple[StudyConfig, str]:
    """Check a study that is given as the mapping that a study file holds.

    Args:
        values: Plain values; tuples may stand for lists, mappings of any type for dictionaries,
            and path objects for paths.
        folder: The folder from which relative paths are resolved.

    Returns:
        The study, and the content of its study file.

    Raises:
        BadInput: As `load_study`, or if a value is not plain.
    """
    try:
        plain = json.loads(json.dumps(values, default=_plain))
        text = yaml_text(plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"config must hold plain text, numbers, lists and mappings: {error}."
        ) from error
    if not isinstance(plain, dict):
        raise BadInput(f"config must hold keys and their values, but is {shown(values)}.")
    return _checked(YamlFile(Path("config"), plain, {}), folder), text


def _plain(value: Any) -> str | dict[Any, Any]:
    """Return the text of a path object, or a mapping of any type as a dictionary.

    Raises:
        TypeError: If the value is neither.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{shown(value)} is of type {type(value).__name__}")


def _checked(file: YamlFile, folder: Path) -> StudyConfig:
    """Check what a study file holds; relative paths are resolved from `folder`."""
    raw = file.values
    if isinstance(raw.get("launch"), dict):
        raw["launch"].setdefault("kind", "local")
    if (
        isinstance(workload := raw.get("workload"), dict)
        and "folder" in _settings(workload).model_fields
    ):
        workload.setdefault("folder", ".")
    try:
        for piece in PIECES:
            raw = _changed(raw, piece, partial(_piece, file=file, folder=folder, keys=piece))
        for keys, absolute in PATHS.items():
            raw = _changed(raw, keys, partial(_resolved, absolute, folder, keys))
        raw = _changed(raw, ("launch",), _with_hosts)
    except BadInput as error:
        # A file that is named has its own name in the text already.
        raise BadInput(f"{file.place(error.keys)}: {error}") if error.keys else error from error
    # An unknown user's home, or a name that no system accepts.
    except (RuntimeError, OSError, ValueError) as error:
        raise BadInput(f"{file.path}: a path in it can't be used: {error}.") from error
    return parse_study(raw, file.place)


@dataclass(frozen=True)
class PipelineFile:
    path: Path
    pipeline: Pipeline

    @classmethod
    def load(cls, path: Path) -> "PipelineFile | None":
        """Read and check a pipeline file, but not the files of its studies.

        Returns:
            The pipeline. None: it is the file of one study.

        Raises:
            BadInput: If something in it is wrong.
        """
        file = read_yaml(path, "the study file")
        if "pipeline" not in file.values:
            return None
        try:
            return cls(path, Pipeline.model_validate(file.values))
        except ValidationError as error:
            refusal = first_refusal(error, partial(_known_keys, raw={}, top=Pipeline))
            raise BadInput(f"{file.place(refusal.keys)}: {refusal.text}") from error

    def study(self, step: PipelineStep) -> Path:
        """Return the path of a step's study file.

        Raises:
            BadInput: If its path begins with an unknown user's home.
        """
        try:
            return Path(os.path.realpath(self.path)).parent / expanded(step.study)
        except RuntimeError as error:
            raise BadInput(f"{self.path}: {step.step}: a path can't be used: {error}") from error

    def config(self, step: PipelineStep, models: dict[str, Path]) -> StudyConfig:
        """Read and check the study of a step.

        Args:
            models: The folders of the models of the steps that it needs, by the steps' names.

        Raises:
            BadInput: As `load_study`.
        """
        return load_study(self.study(step), {key: models[name] for key, name in step.needs.items()})


def _piece(value: Any, file: YamlFile, folder: Path, keys: tuple[str, ...]) -> Any:
    """Return a part of a study file, read from the file that it names if it names one."""
    name = ".".join(keys)
    if (
        name == "search.space"
        and isinstance(value, str)
        and value != AUTO
        and value.strip().lower() == AUTO
    ):
        raise BadInput(
            f"search.space must be {AUTO}, a file or the dimensions, but got {value!r}.", keys=keys
        )
    if not isinstance(value, str) or (name, value) == ("search.space", AUTO):
        return value
    _check_no_address(value, keys)
    piece = read_yaml(folder / expanded(value), name)
    file.add_piece(keys, piece)
    return piece.values


def _check_no_address(value: Any, keys: tuple[str, ...]) -> None:
    """Check that no path is an address, which an error would show with its password.

    Raises:
        BadInput: If one is.
    """
    for path in value if isinstance(value, list) else [value]:
        if isinstance(path, str) and is_address(path):
            raise BadInput(
                f"{'.'.join(keys)} must be a path on this machine, but is an address; what was"
                " found isn't shown, because it may hold a password. If it is a file's name, write"
                " ./ before it.",
                keys=keys,
            )


def _with_hosts(launch: Any) -> Any:
    """Return the launch section with the hosts of its hostfile."""
    if not isinstance(launch, dict) or launch.get("kind") != "hostfile":
        return launch
    if "hosts" in launch:
        rule = "launch.hosts is what launch.hostfile says; leave it out."
        raise BadInput(rule, keys=("launch", "hosts"))
    path = launch.get("hostfile")
    if not isinstance(path, str) or not path:
        said = "but is missing" if path is None else f"but is {shortened(path)}"
        rule = f"launch.hostfile must be the path of a hostfile, {said}."
        raise BadInput(rule, keys=("launch", "hostfile"))
    hosts = parse_hostfile(read_text(Path(path), "launch.hostfile", MAX_MIB), path)
    return {**launch, "hosts": [host.model_dump() for host in hosts]}


def parse_study(raw: dict[str, Any], origin: str | Callable[[Sequence[Any]], str]) -> StudyConfig:
    """Check a study given as plain data.

    Args:
        origin: The name of the study file in errors, or a function that returns the file and the
            line of a key.

    Raises:
        BadInput: As `load_study`.
    """
    place = origin if callable(origin) else lambda keys: origin
    try:
        workload = _checked_workload(raw)
        raw = _with_space(raw)
        # Validated as JSON in strict mode: a text is no number and true is not 1, but a list may
        # still stand for a tuple.
        config = StudyConfig.model_validate_json(json.dumps(raw | workload), strict=True)
        _check_auto(config)
        return _with_pruning(_with_quality(config))
    except (TypeError, RecursionError) as error:
        raise BadInput(
            f"{place(())} must hold plain text, numbers, lists and mappings: {error}."
        ) from error
    except BadInput as error:
        raise BadInput(f"{place(error.keys)}: {error}") from error
    except ValidationError as error:
        unnamed = (*LAUNCHES, "Choices", "Range", "Fixed")
        refusal = first_refusal(error, partial(_known_keys, raw=raw), unnamed)
        text, misplaced = refusal.text, refusal.keys and refusal.keys[-1] in DIMENSION_NAMES
        if misplaced and text.startswith("unknown key"):
            where = ".".join(map(str, refusal.keys))
            text = f"unknown key {where}; it is a dimension: give it in search.space."
        raise BadInput(f"{place(refusal.keys)}: {text}") from error


def _checked_workload(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the validated workload, with the defaults of its task's own keys.

    Returns:
        A mapping with the key `workload`; an empty one if there is no workload to check.

    Raises:
        ValidationError: With locations that begin at the top of the study file.
    """
    if not isinstance(given := raw.get("workload"), dict):
        return {}
    study = create_model("study", workload=(_settings(given), ...))
    return study.model_validate_json(json.dumps({"workload": given}), strict=True).model_dump(
        mode="json"
    )


def _with_space(raw: dict[str, Any]) -> dict[str, Any]:
    """Check the search space, and return the study; a script's space is completed with None.

    A script may have any dimensions. Its space gets None for each dimension that it leaves out and
    for which carbonopt's own trainings have a default: that default is not the script's. Other
    tasks' spaces are checked and returned as they are.

    Raises:
        BadInput: If the search space lacks a dimension that the task needs, or has one that is not
            in the table of dimensions or goes with another task.
    """
    workload, search = raw.get("workload"), raw.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    if not isinstance(space, dict):
        return raw
    task = str(workload.get("task", "causal_lm")) if isinstance(workload, dict) else None
    if task is not None and task_class(task).own_dimensions:
        left_out: dict[Any, Any] = dict.fromkeys(
            name for name in DIMENSION_NAMES if DIMENSIONS[name].default is not None
        )
        return {**raw, "search": {**raw["search"], "space": left_out | space}}
    for name in space:
        if name not in DIMENSION_NAMES:
            is_of_workload = isinstance(workload, dict) and name in _settings(workload).model_fields
            advice = "give it in workload." if is_of_workload else hint(str(name), DIMENSION_NAMES)
            unknown = f"unknown key search.space.{name}; {advice}"
            raise BadInput(unknown, keys=("search", "space", str(name)))
        tasks = DIMENSIONS[name].tasks
        if task is not None and tasks and task not in tasks and space[name] is not None:
            raise BadInput(
                f"search.space.{name} goes with the task {' or '.join(tasks)}, but the task is"
                f" {task}.",
                keys=("search", "space", str(name)),
            )
    for name in REQUIRED:
        if space.get(name) is None:
            raise BadInput(
                f"search.space.{name} is missing; a space must have {', '.join(REQUIRED)}.",
                keys=("search", "space"),
            )
    return raw


def _check_auto(config: StudyConfig) -> None:
    """Raise BadInput if `search.space: auto` can't be chosen, or other keys need a given space."""
    search, task = config.search, None if config.workload is None else config.workload.task
    if not isinstance(search.space, UnchosenSpace):
        return
    name_them = "name the dimensions"
    refusals = (
        (
            not config.launch.trains,
            "launch.kind is replay, whose table has dimensions of its own",
            name_them,
        ),
        (
            task == "script",
            "the task is script, whose model and data only the script knows",
            name_them,
        ),
        (
            task == "rlhf",
            "the task is rlhf, for which no rule is known that holds for any reward",
            name_them,
        ),
        (
            search.sampler == "grid",
            "the sampler grid needs listed values, but auto gives learning_rate a range",
            "use carbon",
        ),
        (
            search.start is not None,
            "search.start is of a space that is not known yet",
            "leave start out",
        ),
    )
    for is_so, why, instead in refusals:
        if is_so:
            raise BadInput(f"search.space can't be auto: {why}; {instead}.")


def _with_quality(config: StudyConfig) -> StudyConfig:
    """Return the study with the target's quality in its workload, if it is not its task's default.

    Raises:
        BadInput: If the task can't be judged by that quality.
    """
    workload, target = config.workload, config.quality.name
    if workload is None or not config.launch.trains:
        return config
    names = [quality.name for quality in task_class(workload.task).qualities]
    if names and target not in names:
        judged = f"target must be {' or '.join(names)}, by which the task {workload.task} is judged"
        raise BadInput(f"{judged}, but is {target}.")
    if workload.quality not in (None, target):
        raise BadInput(
            f"workload.quality must be the target's, {target}, but got {workload.quality}; leave it"
            " out."
        )
    quality = None if target in names[:1] else target
    return config.model_copy(update={"workload": workload.model_copy(update={"quality": quality})})


def _with_pruning(config: StudyConfig) -> StudyConfig:
    """Return the study with `search.pruning.target` set, if the study file leaves it out."""
    if config.search.pruning.target is not None:
        return config
    pruning = config.search.pruning.model_copy(update={"target": config.quality.stops_for_target})
    return config.model_copy(
        update={"search": config.search.model_copy(update={"pruning": pruning})}
    )


def _settings(workload: Any) -> type[Workload]:
    """Return the settings of a workload's task, or what all tasks share where it names none."""
    if not isinstance(workload, dict):
        return Workload
    task = workload.get("task", Workload.model_fields["task"].default)
    return task_class(task).settings if isinstance(task, str) else Workload


def _resolved(
    absolute: Callable[[Path, Any], Any], folder: Path, keys: tuple[str, ...], value: Any
) -> Any:
    """Return what `absolute` makes of a path or a list of paths; refuse addresses.

    Raises:
        BadInput: If a path is an address. A hub's name and `notify.config` are left to their
            settings, which refuse it with what to do instead.
    """
    if absolute not in (_hub_name_or_folder, _unless_address):
        _check_no_address(value, keys)
    return absolute(folder, value)


def _absolute(folder: Path, value: Any) -> Any:
    """Return paths that no longer depend on the working directory; other values stay."""
    if isinstance(value, list):
        return [_absolute(folder, item) for item in value]
    return os.path.normpath(folder / expanded(value)) if isinstance(value, str) else value


def _files(folder: Path, value: Any) -> Any:
    return _absolute(folder, [value] if isinstance(value, str) else value)


def _hub_name_or_folder(folder: Path, value: Any) -> Any:
    """Return a hub name as it is, and a folder beside the study file as an absolute path."""
    is_folder = isinstance(value, str) and (
        value.startswith((".", "/", "~")) or (folder / value).is_dir()
    )
    return _absolute(folder, value) if is_folder else value


def _unless_address(folder: Path, value: Any) -> Any:
    """Return an address as it is, and a path as an absolute one."""
    return value if isinstance(value, str) and is_address(value) else _absolute(folder, value)


def _with_text(folder: Path, value: Any) -> Any:
    """Return a file's name and text, so that a report does not need the file any more.

    Raises:
        BadInput: If the file can't be read.
    """
    if not isinstance(value, str):
        return value
    path = Path(_absolute(folder, value))
    return {"name": path.name, "text": read_text(path, "workload.config_template", MAX_MIB)}


def _reward_file(folder: Path, value: Any) -> Any:
    """Return FILE.py:FUNCTION with the file's absolute path."""
    path, colon, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{_absolute(folder, path)}{colon}{function}" if colon else value


PATHS: dict[tuple[str, ...], Callable[[Path, Any], Any]] = {
    **{
        ("workload", part, "name_or_path"): _hub_name_or_folder
        for part in ("model", "tokenizer", "dataset")
    },
    **{("workload", key, "model"): _hub_name_or_folder for key in ("reward", "gold_reward")},
    **{("workload", key, "python"): _reward_file for key in ("reward", "gold_reward")},
    **{("workload", "dataset", key): _files for key in ("train_files", "eval_files")},
    ("workload", "files"): _files,
    ("search", "learn_from"): _files,
    **dict.fromkeys((("workload", "dataset", "database"), ("workload", "folder")), _absolute),
    ("workload", "config_template"): _with_text,
    ("notify", "config"): _unless_address,
    **dict.fromkeys((("launch", "table"), ("launch", "hostfile")), _absolute),
    **dict.fromkeys((("carbon", "trace"), ("schedule", "forecast")), _absolute),
}

# Keys that take a single path in the place of a list, and keys whose value is a file that is read
# with the study file.
PATH_LISTS = tuple(keys for keys, absolute in PATHS.items() if absolute is _files)
READ_FILES = tuple(keys for keys, absolute in PATHS.items() if absolute is _with_text)


def _changed(part: Any, keys: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """Return a copy of a part of a study file with the value at these keys, if any, changed."""
    if not keys:
        return change(part)
    if not isinstance(part, dict) or not part.get(keys[0]):
        return part
    return {**part, keys[0]: _changed(part[keys[0]], keys[1:], change)}


def _known_keys(
    loc: list[Any], raw: dict[str, Any], top: type[BaseModel] = StudyConfig
) -> list[str]:
    model: Any = top
    for part in loc:
        if isinstance(part, int):
            continue
        if model is StudyConfig and part == "launch":
            model = LAUNCHES.get(raw["launch"].get("kind"), LocalLaunch)
        elif model is StudyConfig and part == "workload":
            model = _settings(raw["workload"])
        elif model is Space:
            return sorted({*Choices.model_fields, *Range.model_fields})
        else:
            model = _models_in(model.model_fields[part].annotation)[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [
        model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)
    ]
