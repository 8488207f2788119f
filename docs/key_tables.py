"""The tables of docs/study-file.md, made from the package's settings and dimensions.

`<!-- keys: budget confirm -->` in the page stands for a table of all keys of these parts of a study
file, and `<!-- dimensions -->` for the table of dimensions. What a key means is the docstring below
its field.
"""

import json
import math
import re
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from carbonopt.core.dimensions import DIMENSION_NAMES, DIMENSIONS, TrialParams
from carbonopt.spec.field_meanings import field_meanings
from carbonopt.spec.launch_settings import LAUNCHES
from carbonopt.spec.pipeline_file import PipelineStep
from carbonopt.spec.space_settings import Choices, Range, Space
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import ModelWorkload
from carbonopt.train.tasks.task import TASKS, task_class

_MARKER = re.compile(r"^<!-- (keys|dimensions)(?:: (.+))? -->$", re.MULTILINE)


class Key(NamedTuple):
    """A key of a file that users write or read."""

    field: FieldInfo
    meaning: str  # empty: users don't write the key


def with_tables(markdown: str) -> str:
    """Return a page with tables in the markers' places."""

    def table(marker: re.Match[str]) -> str:
        return _key_table(marker[2].split()) if marker[1] == "keys" else _dimension_table()

    return _MARKER.sub(table, markdown)


def keys(model: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """Return the keys that hold no further model, with dots between nested names.

    Keys of a mapping's values are below `*`, and keys of a list's items below `[]`.
    """
    found: dict[str, Key] = {}
    meanings = field_meanings(model)
    for name, field in model.model_fields.items():
        path, below = prefix + name, _models_in(field.annotation)
        if not below or below[0] in (Space, TrialParams):
            found.setdefault(path, Key(field, meanings.get(name) or field.description or ""))
            continue
        origin = str(field.annotation)
        inner = ".*." if "dict[" in origin else "[]." if "tuple[" in origin else "."
        for inner_model in below:
            for key, described in keys(inner_model, path + inner).items():
                found.setdefault(key, described)
    return found


def default_text(field: FieldInfo) -> str:
    """Return a field's default as tables show it."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "–"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _key_table(parts: list[str]) -> str:
    """Return the table of these parts.

    Raises:
        ValueError: if a part has no key, or none with a docstring.
    """
    rows: dict[str, str] = {}
    for part in parts:
        found = {path: key for path, key in _keys_of_part(part).items() if key.meaning}
        if not found:
            raise ValueError(f"a table must have keys with docstrings, but {part!r} has none.")
        for path, (field, meaning) in found.items():
            default = default_text(field)
            if part in ("choices", "range") and field.is_required():
                default = "–"  # a dimension has one of these two forms
            rows.setdefault(path, f"| `{path}` | {default} | {meaning} |")
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows.values()])


def _keys_of_part(part: str) -> dict[str, Key]:
    """Return the keys of a part of a study file.

    Args:
        part: a top-level key, a kind of launch (its own keys beside those of `local`), a task (its
            own keys beside those of `workload`), one of the forms of a dimension (`choices` or
            `range`), or `step`, a step of a pipeline.
    """
    if part in LAUNCHES:
        launch = LAUNCHES[part]
        found = keys(launch)
        own = {name: key for name, key in found.items() if name in launch.__annotations__}
        shown = {**own, **found} if part == "local" else own  # `kind` first, not the shared keys
        return {f"launch.{name}": key for name, key in shown.items()}
    if part in TASKS:
        shared = keys(ModelWorkload, "workload.")
        settings = keys(task_class(part).settings, "workload.")
        return {path: key for path, key in settings.items() if path not in shared}
    if part == "step":
        return keys(PipelineStep)
    if part in ("choices", "range"):
        return keys(Choices if part == "choices" else Range)
    return {path: key for path, key in keys(StudyConfig).items() if path.split(".")[0] == part}


def _dimension_table() -> str:
    head = [
        "dimension",
        "label",
        "values",
        "default",
        "affects",
        "name in Hugging Face or DeepSpeed",
    ]
    rows = [head, ["---"] * len(head), *map(_dimension_cells, DIMENSION_NAMES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _dimension_cells(name: str) -> list[str]:
    dimension = DIMENSIONS[name]
    if dimension.choices:
        choices = (it if isinstance(it, str) else json.dumps(it) for it in dimension.choices)
        values = ", ".join(f"`{choice}`" for choice in choices)
    else:
        values = "whole number " if dimension.integer else ""
        values += f"{'above' if dimension.above else 'from'} {dimension.lowest:g}"
        values += f" to {dimension.highest:g}" if math.isfinite(dimension.highest) else ""
    default = "–" if dimension.default is None else f"`{dimension.default}`"
    affects = [it for it in ("quality", "cost", "memory", "kernels") if it in dimension.affects]
    settings = [f"`{it}`" for it in (dimension.argument, *dimension.deepspeed) if it]
    return [
        f"`{name}`",
        dimension.label,
        values,
        "required" if dimension.required else default,
        ", ".join(affects),
        ", ".join(settings) or "–",
    ]
