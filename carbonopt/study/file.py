"""Reads a study file: YAML in, a checked `StudyConfig` out, or one sentence that says which key is wrong."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, create_model

from carbonopt.core.config import Choices, Fixed, LocalLaunch, Range, ReplayLaunch, StudyConfig, Workload
from carbonopt.core.errors import BadInput, hint
from carbonopt.core.files import read_text
from carbonopt.train.tasks.base import task_class


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads 1e-3 as a number and refuses a key given twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of them can stand for gigabytes
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) can't be used", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 wants a dot in a float, so PyYAML reads 1e-3 as text; everybody who writes learning rates means the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _decimal(construct: Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]) -> Callable[[Any, yaml.ScalarNode], Any]:
    def construct_decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        # YAML 1.1 reads 1:30 as 90 and 010 as 8.
        if ":" in node.value or re.match(r"[-+]?0[0-9_]+$", node.value):
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value} is no decimal number; write one, or text in quotes", node.start_mark
            )
        return construct(loader, node)

    return construct_decimal


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal(yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _decimal(yaml.SafeLoader.construct_yaml_float))


# What may stand in a file of its own, for several studies to share: its path instead of its content.
PIECES = (("search", "space"), ("carbon",), ("workload", "deepspeed"))
MAX_MIB = 1  # of a study file and of each piece


def load_study(path: Path) -> StudyConfig:
    """Reads and checks a study file. Relative paths in it are taken from the file's own folder.

    Raises:
        BadInput: with the key's path, the value found and what is allowed.
    """
    raw = _read_mapping(path, "the study file")
    folder = path.resolve().parent
    if isinstance(raw.get("launch"), dict):
        raw["launch"].setdefault("kind", "local")
    try:
        for *parents, key in PIECES:
            place: Any = raw
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if isinstance(place, dict) and isinstance(place.get(key), str) and place[key]:
                place[key] = _read_mapping(folder / Path(place[key]).expanduser(), ".".join((*parents, key)))
        raw = _with_absolute_paths(raw, folder)
    except (RuntimeError, OSError, ValueError) as error:  # an unknown user's home, a name that no system takes
        raise BadInput(f"{path}: a path in it can't be used: {error}.") from error
    return parse_study(raw, str(path))


def _read_mapping(path: Path, what: str) -> dict[Any, Any]:
    text = read_text(path, what, MAX_MIB)
    try:
        raw = yaml.load(text, Loader=_Loader)  # noqa: S506, the loader is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise BadInput(f"{path} must hold keys and their values, but holds {_shown(raw)}.")
    return raw


def parse_study(raw: dict[str, Any], origin: str) -> StudyConfig:
    """Checks a study given as plain data; `origin` names it in errors.

    Raises:
        BadInput: as `load_study`.
    """
    try:
        workload = _checked_workload(raw)
        # As JSON: strictly, a text is no number and true is not 1, while a list may still stand for a tuple.
        return StudyConfig.model_validate_json(json.dumps(raw | workload, allow_nan=True), strict=True)
    except (TypeError, RecursionError) as error:
        raise BadInput(f"{origin} must hold plain text, numbers, lists and mappings: {error}.") from error
    except BadInput as error:
        raise BadInput(f"{origin}: {error}") from error
    except ValidationError as error:
        raise BadInput(f"{origin}: {_sentence(error, raw)}") from error


def _checked_workload(raw: dict[str, Any]) -> dict[str, Any]:
    """The workload as its task has it, with the defaults of the task's own keys; nothing where there is none to check.

    Raises:
        ValidationError: with places that begin at the study file's top.
    """
    given = raw.get("workload")
    if not isinstance(given, dict):
        return {}
    study = create_model("study", workload=(_settings(given), ...))
    checked = study.model_validate_json(json.dumps({"workload": given}, allow_nan=True), strict=True)
    return checked.model_dump(mode="json")


def _settings(workload: dict[str, Any]) -> type[Workload]:
    task = workload.get("task", Workload.model_fields["task"].default)
    return task_class(task).settings if isinstance(task, str) else Workload


def _with_absolute_paths(raw: dict[str, Any], folder: Path) -> dict[Any, Any]:
    """A copy in which the paths that the study file names no longer depend on the working directory. What is no text
    stays."""

    def absolute(text: str) -> str:
        return os.path.normpath(folder / Path(text).expanduser())

    def local_folder(text: str) -> str:  # a hub name stays; what stands beside the study file becomes its path
        return absolute(text) if text.startswith((".", "/", "~")) or (folder / text).is_dir() else text

    def changed(part: Any, key: str, change: Callable[[str], str]) -> Any:
        if not isinstance(part, dict) or not part.get(key):
            return part
        value = [part[key]] if key.endswith("_files") and isinstance(part[key], str) else part[key]
        if isinstance(value, list):
            return {**part, key: [change(one) if isinstance(one, str) else one for one in value]}
        return {**part, key: change(value)} if isinstance(value, str) else part

    raw = dict(raw)
    if isinstance(raw.get("workload"), dict):
        workload = raw["workload"] = dict(raw["workload"])
        for part in ("model", "tokenizer", "dataset"):
            if part in workload:
                workload[part] = changed(workload[part], "name_or_path", local_folder)
        for key in ("train_files", "eval_files"):
            if "dataset" in workload:
                workload["dataset"] = changed(workload["dataset"], key, absolute)
    if "launch" in raw:
        raw["launch"] = changed(raw["launch"], "table", absolute)
    if "carbon" in raw:
        raw["carbon"] = changed(raw["carbon"], "trace", absolute)
    return raw


def _sentence(error: ValidationError, raw: dict[str, Any]) -> str:
    """The first thing that is wrong, in one sentence: key, value found, what is allowed."""
    # A misspelt key that is required shows twice, as missing and as unknown; only the latter tells the user.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    loc = [part for part in first["loc"] if part not in ("local", "replay", "Choices", "Range", "Fixed")]
    where = ".".join(str(part) for part in loc) or "the study"
    kind = first["type"]
    if kind == "extra_forbidden":
        unknown = str(loc[-1])
        return f"unknown key {where}; {hint(unknown, _known_keys(loc[:-1], raw))}"
    if kind == "missing":
        return f"{where} is missing."
    message = first["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {message}."
    return f"{where}: {message[0].lower()}{message[1:]}, but got {_shown(first['input'])}."


def _known_keys(loc: list[Any], raw: dict[str, Any]) -> list[str]:
    """The keys that the model at `loc` has."""
    model: Any = StudyConfig
    for part in loc:
        if isinstance(part, int):
            continue
        if model is StudyConfig and part == "launch":
            replay = isinstance(raw.get("launch"), dict) and raw["launch"].get("kind") == "replay"
            model = ReplayLaunch if replay else LocalLaunch
            continue
        if model is StudyConfig and part == "workload":
            model = _settings(raw["workload"])
            continue
        candidates = _models_in(model.model_fields[part].annotation)
        if candidates == [Choices, Range, Fixed]:
            return ["choices", "low", "high", "log", "step"]
        model = candidates[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
