"""The JSON schema of study files, by which editors complete, explain and check them.

It is made from the classes of `carbonopt.spec` and the tasks' settings. It knows the keys, the type
and the range of each value, and the short forms that the reader accepts. It does not know the rules
between several keys: `carbonopt check` does. What the reader accepts in a study file, the schema
accepts; the forms that only a stored study has are left out.

The dialect is draft 7, the newest one that the usual editors support in full.
"""

import copy
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union

from pydantic import BaseModel, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from carbonopt.core.dimensions import (
    DIMENSION_NAMES,
    DIMENSIONS,
    LARGEST_INT,
    REQUIRED,
    Dimension,
    TrialParams,
)
from carbonopt.core.values import Given
from carbonopt.spec.base_settings import Settings
from carbonopt.spec.field_meanings import field_meanings
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.pipeline_file import Pipeline
from carbonopt.spec.space_settings import Choices, Range, Space
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.workload_settings import Workload
from carbonopt.study_file.reader import PATH_LISTS, PIECES, READ_FILES
from carbonopt.train.tasks.task import TASKS, task_class

Json = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"
_REFERENCE = "#/definitions/{model}"
_TASK, _KIND = "task", "kind"
# The value that a study file leaves out, by the key that says which class a mapping is of.
_LEFT_OUT = {
    _TASK: Workload.model_fields[_TASK].default,
    _KIND: LocalLaunch.model_fields[_KIND].default,
}
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
_NULL: Json = {"type": "null"}


def study_schema() -> Json:
    """Return the JSON schema of study files and pipeline files."""
    either: Any = Union[_whole_study(), Pipeline]
    adapter: TypeAdapter[Any] = TypeAdapter(either)
    generated = adapter.json_schema(
        schema_generator=_SchemaOfSettings, ref_template=_REFERENCE, mode="validation"
    )
    study, pipeline = generated["anyOf"]
    definitions = {
        name.removeprefix("_"): definition for name, definition in generated["$defs"].items()
    }
    schema: Json = {
        "$schema": DIALECT,
        "title": "A study file or a pipeline file of carbonopt",
        "type": "object",
        "if": {"required": ["pipeline"]},
        "then": pipeline,
        "else": study,
        "definitions": definitions,
    }
    _add_forms_of_files(schema)
    definitions["Study"]["allOf"] = list(_space_rules())
    whole: Json = _without_siblings(schema)
    return whole


def schema_text() -> str:
    """Return the schema as the text of a JSON file."""
    return json.dumps(study_schema(), indent=1, ensure_ascii=False) + "\n"


def _whole_study() -> type[BaseModel]:
    """Return the class of study files in which a workload has the keys of its task."""
    settings = tuple(task_class(task).settings for task in TASKS)
    workload: Any = Annotated[Union[settings], Field(discriminator=_TASK)]
    return create_model(
        "Study",
        __base__=StudyConfig,
        __doc__=StudyConfig.__doc__,
        __module__="made_here",  # it has no source whose docstrings could be read
        workload=(workload | None, None),
    )


class _SchemaOfSettings(GenerateJsonSchema):
    """Adds to pydantic's schema what is known of settings beside their types."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the key

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        cls = schema["cls"]
        if issubclass(cls, Space):
            return self._space_schema()
        generated = super().model_schema(schema)
        generated.pop("title", None)
        summary = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        generated["description"] = _plain(summary)
        meanings = field_meanings(cls)
        for name, value in generated.get("properties", {}).items():
            if meaning := meanings.get(name):
                value["description"] = _plain(meaning)
            # A default of None says only that the key may be left out. A mapping's keys have their
            # own defaults.
            if value.get("default", ...) is None or isinstance(value.get("default"), dict):
                del value["default"]
        if issubclass(cls, Settings) and cls.one_of:
            generated["oneOf"] = list(map(_given, cls.one_of))
        return generated

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Json:
        """Choose the class by the key that names it, so that each error is of that class."""
        key, choices = str(schema["discriminator"]), schema["choices"]
        absent = _LEFT_OUT[key]
        named = {tag: self.generate_inner(choice) for tag, choice in choices.items()}
        chosen = [
            {
                "if": {
                    "properties": {key: {"const": tag}},
                    **({} if tag == absent else {"required": [key]}),
                },
                "then": of_tag,
            }
            for tag, of_tag in named.items()
        ]
        value = {"enum": list(named), "default": absent}
        return {"type": "object", "properties": {key: value}, "allOf": chosen}

    def _space_schema(self) -> Json:
        """Return the schema of a space: each dimension's values, whatever the task."""
        meanings = field_meanings(TrialParams)
        forms: tuple[Any, ...] = (Choices, Range, Given)
        choices, interval, single_value = (
            self.generate_inner(TypeAdapter(form).core_schema) for form in forms
        )
        return {
            "description": "The dimensions of the search, each with its values.",
            "type": "object",
            "properties": {
                name: _dimension_schema(DIMENSIONS[name], meanings[name], choices, interval)
                for name in DIMENSION_NAMES
            },
            "additionalProperties": {"anyOf": [single_value, choices, interval, _NULL]},
        }


def _plain(docstring: str) -> str:
    """Return a docstring as one line of text, with the texts of links alone."""
    return _LINK.sub(r"\1", " ".join(docstring.split()))


def _given(name: str) -> Json:
    """Return the schema of a mapping that has this key, and not with null."""
    return {"required": [name], "properties": {name: {"not": _NULL}}}


def _dimension_schema(dimension: Dimension, meaning: str, choices: Json, interval: Json) -> Json:
    value = _value_schema(dimension)
    listed = {"allOf": [choices, {"properties": {"choices": {"items": value}}}]}
    has_range = dimension.integer or not dimension.choices
    affects = f"Affects {', '.join(dimension.affects)}."
    tasks = [f"Only with {', '.join(dimension.tasks)}."] if dimension.tasks else []
    schema: Json = {
        "description": " ".join((_plain(meaning), affects, *tasks)),
        "anyOf": [value, listed, *([interval] if has_range else []), _NULL],
    }
    if dimension.default is not None:
        schema["default"] = dimension.default
    return schema


def _value_schema(dimension: Dimension) -> Json:
    """Return the schema of a dimension's single values; see `Dimension.problem`."""
    if dimension.choices:
        return {"enum": list(dimension.choices)}
    bound = "exclusiveMinimum" if dimension.above else "minimum"
    highest = LARGEST_INT if dimension.integer else dimension.highest
    return {
        "type": "integer" if dimension.integer else "number",
        bound: dimension.lowest,
        **({"maximum": highest} if math.isfinite(highest) else {}),
    }


def _space_rules() -> Iterator[Json]:
    """Yield the rules of which dimensions a task has, and which it needs."""
    for task in TASKS:
        if task_class(task).own_dimensions:
            continue
        named: Json = {"properties": {_TASK: {"const": task}}}
        if task != _LEFT_OUT[_TASK]:
            named["required"] = [_TASK]
        foreign = [
            name
            for name in DIMENSION_NAMES
            if DIMENSIONS[name].tasks and task not in DIMENSIONS[name].tasks
        ]
        condition = {"required": ["workload"], "properties": {"workload": named}}
        yield _space_rule(condition, foreign)
    yield _space_rule({"properties": {"workload": _NULL}}, ())  # a replay, of any task


def _space_rule(condition: Json, foreign: Sequence[str]) -> Json:
    rule = {
        "required": list(REQUIRED),
        "properties": dict.fromkeys(foreign, _NULL),
        "propertyNames": {"enum": list(DIMENSION_NAMES)},
    }
    search = {"properties": {"space": rule}}
    return {"if": condition, "then": {"properties": {"search": search}}}


def _add_forms_of_files(schema: Json) -> None:
    """Add the forms in which a study file names files, and leave out what is read from them."""
    path: Json = {"type": "string", "minLength": 1}
    piece = {**path, "description": "A file that has it."}
    forms: list[tuple[Sequence[tuple[str, ...]], list[Json], bool]] = [
        (PIECES, [piece], False),
        (PATH_LISTS, [path], False),
        (READ_FILES, [path, _NULL], True),
    ]
    for places, added, instead in forms:
        for value in (value for keys in places for value in _values_at(schema, keys)):
            _become(value, added, instead=instead)
    hostfile = schema["definitions"]["HostfileLaunch"]
    del hostfile["properties"]["hosts"]
    hostfile["required"].remove("hosts")
    for unused in ("Host", "TemplateFile"):
        schema["definitions"].pop(unused, None)


def _become(value: Json, forms: Sequence[Json], *, instead: bool = False) -> None:
    """Give a value further forms, or other ones; it keeps its description and default."""
    kept: Json = {key: value.pop(key) for key in ("description", "default") if key in value}
    before = [] if instead else value.pop("anyOf", None) or [copy.deepcopy(value)]
    value.clear()
    value.update({**kept, "anyOf": [*before, *forms]})


def _values_at(schema: Json, keys: Sequence[str]) -> list[Json]:
    """Return the schemas of the values at a key of a study file: one for each class that has it."""
    definitions: Mapping[str, Json] = schema["definitions"]
    values = [schema]
    for key in keys:
        objects = (each for value in values for each in _alternatives(value, definitions))
        below = [each["properties"][key] for each in objects if key in each.get("properties", {})]
        values = list({id(value): value for value in below}.values())
    return values


def _alternatives(value: Json, definitions: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the schemas that a value may have, with references followed."""
    yield value
    if "$ref" in value:
        yield from _alternatives(definitions[value["$ref"].rpartition("/")[2]], definitions)
    inner = [value[key] for key in ("then", "else") if key in value]
    for each in (*inner, *value.get("anyOf", ()), *value.get("allOf", ())):
        yield from _alternatives(each, definitions)


def _without_siblings(value: Any) -> Any:
    """Return a schema in which nothing stands beside a `$ref`, where draft 7 would ignore it."""
    if isinstance(value, list):
        return [_without_siblings(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _without_siblings(item) for key, item in value.items()}
    if "$ref" in inner and len(inner) > 1:
        reference = {"$ref": inner.pop("$ref")}
        inner["allOf"] = [reference, *inner.get("allOf", ())]
    return inner
