"""Reads YAML files: the rules for what a file may hold, and the line of each key."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from carbonopt.core.errors import BadInput, may_hold_password, shown
from carbonopt.core.files import read_text

MAX_MIB = 1  # largest size of a study file, a piece, a hostfile and a script's template
_LONGEST_TAG = 40  # largest number of characters shown of a tag
_LONGEST_REASON = 600  # largest number of characters shown of the parser's message
_MOST_VALUES = 10_000  # largest number of keys and values in a file; reading so many takes 0.5 s


@dataclass(frozen=True)
class YamlFile:
    """A file's keys and values, and the places where its keys stand."""

    path: Path
    values: dict[Any, Any]
    # The file and the line of each key, in words, by the keys from the top down to it.
    places: dict[tuple[str, ...], str]

    def place(self, keys: Sequence[Any]) -> str:
        """Return the file and the line of a key, or of the nearest key around it, in words."""
        above = tuple(map(str, keys))
        while above and above not in self.places:
            above = above[:-1]
        return self.places[above] if above else str(self.path)

    def add_piece(self, keys: Sequence[str], piece: "YamlFile") -> None:
        """Note that the value of a key is another file's content."""
        self.places.update({(*keys, *below): at for below, at in piece.places.items()})


def read_yaml(path: Path, what: str) -> YamlFile:
    """Read a file whose top is a mapping.

    Args:
        what: what the file is, for errors.

    Raises:
        BadInput: If it can't be read, or isn't such a file.
    """
    text = read_text(path, what, MAX_MIB)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            values = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid YAML: {_reason(error, text)}") from error
    if not isinstance(values, dict):
        holds = "is empty" if values is None else f"holds {shown(values)}"
        raise BadInput(f"{path} must hold keys and their values, but {holds}.")
    places = {keys: f"{path}, line {line}" for keys, line in _lines(node)}
    return YamlFile(path, values, places)


def yaml_text(values: dict[str, Any]) -> str:
    """Return plain values as a file that `read_yaml` reads as the same values."""
    return yaml.dump(values, Dumper=_StudyFileDumper, sort_keys=False, allow_unicode=True)


def _reason(error: Exception, text: str) -> str:
    """Return why a text is no YAML, without its line where that may hold a password."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        end = error.problem_mark
        begin = end if error.context_mark is None else error.context_mark
        if may_hold_password("\n".join(text.splitlines()[begin.line : end.line + 1])):
            rule = " ".join(filter(None, (error.context, error.problem)))
            said = f"{rule} at line {end.line + 1}, column {end.column + 1}"
    said = " ".join(said[:_LONGEST_REASON].split()).replace('in "<unicode string>",', "at")
    return said + "; indent with spaces instead of tabs" * ("'\\t'" in said)


def _lines(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the keys of a mapping and of the mappings and lists in it, each with its line."""
    if isinstance(node, yaml.MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(str(place), value, value) for place, value in enumerate(node.value)]
    else:
        return
    for name, begins, value in entries:
        yield (*above, str(name)), begins.start_mark.line + 1
        yield from _lines(value, (*above, str(name)))


_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")
}


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that also reads 1e-3 as a number and refuses a key given twice."""

    _values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise _refusal(
                f"a file can have {_MOST_VALUES:,} keys and values at most",
                self.peek_event(),  # type: ignore[no-untyped-call]
            )
        if self.check_event(yaml.AliasEvent):  # a few lines of aliases can stand for gigabytes
            raise _refusal(
                "aliases (*name) can't be used",
                self.peek_event(),  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            name = node.tag.rpartition(":")[2][:_LONGEST_TAG]
            tag = "here" if may_hold_password(node.tag) else name
            raise _refusal(f"the tag {tag} can't be used; leave it out", node)
        try:
            return super().construct_object(node, deep)
        # The errors of a tag that doesn't fit its value, such as !!int [1].
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            value = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a collection"
            raise _refusal(
                f"{value} can't be read as {node.tag.rpartition(':')[2]}", node
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _refusal(f"{shown(node.value)} can't be read as a mapping", node)
        _check_commas(node)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool):
                raise _refusal("a key must be plain text", key_node)
            if key in seen:
                raise _refusal(f"key {shown(key)} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        # YAML 1.1 reads 1:30 as 90 and 010 as 8.
        if len(node.value) > 100 or ":" in node.value or re.match(r"[-+]?0[0-9_]+$", node.value):
            number = shown(node.value).strip("'")
            raise _refusal(f"{number} is no decimal number; write one, or text in quotes", node)
        return (
            self.construct_yaml_int(node)
            if node.tag.endswith("int")
            else self.construct_yaml_float(node)
        )


def _refusal(problem: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _check_commas(node: yaml.MappingNode) -> None:
    """Refuse {loss: 2,5}, in which YAML sees a key 5 without a value."""
    for (_, before), (key, value) in itertools.pairwise(node.value):
        is_apart = before.end_mark.index + 1 != key.start_mark.index
        is_bare = (
            isinstance(value, yaml.ScalarNode) and value.start_mark.index == key.end_mark.index
        )
        if is_apart or not is_bare:
            continue
        left, right = str(before.value), str(key.value)
        if re.fullmatch(r"[-+]?[0-9]+", left) and re.fullmatch(r"[0-9][0-9.eE+-]*", right):
            joined = f"{left}{right}" if "." in right else f"{left}.{right}"
            raise _refusal(
                f"a number must have a decimal point and no comma, but is {left},{right}; write"
                f" {joined}, or [{left}, {right}] for a list",
                before,
            )


# Dates (2024-01-01), merge keys (<<) and = are read as text.
_Loader.yaml_implicit_resolvers = {
    sign: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] in ("float", "int", "null")
    ]
    for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads NO and ON, which are a country and a province, as booleans; YAML 1.2 has only true
# and false.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
# PyYAML reads 1e-3, .5e-3 and -.5 as text; whoever writes a learning rate so means the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+
                    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?)$""",
        re.VERBOSE,
    ),
    list("-+.0123456789"),
)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


class _StudyFileDumper(yaml.SafeDumper):
    """A writer of what `_Loader` reads: text that it would read as a number is in quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# What either of them reads as something else than text is in quotes.
_StudyFileDumper.yaml_implicit_resolvers = {
    sign: [
        *_Loader.yaml_implicit_resolvers.get(sign, []),
        *yaml.SafeDumper.yaml_implicit_resolvers.get(sign, []),
    ]
    for sign in _Loader.yaml_implicit_resolvers.keys() | yaml.SafeDumper.yaml_implicit_resolvers
}
