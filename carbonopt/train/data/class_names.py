"""The names of classes that the datasets library writes into Parquet and Arrow files.

Such a file holds numbers, and in its schema the names that they stand for. Files that were written
one by one may number their classes differently.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carbonopt.core.errors import BadInput
from carbonopt.train.data.opened_files import data_suffix
from carbonopt.train.failures import refused

if TYPE_CHECKING:
    import pyarrow

ClassNames = dict[str, list[str]]  # by column, the names of the classes 0, 1, …
_UNLABELLED = ", which stands for no label; leave such rows out, or give a split that has labels"


def names_in(path: Path) -> ClassNames:
    """Return the names of classes in a file's schema.

    Formats other than Parquet and Arrow have none.

    Raises:
        BadInput: if the schema can't be read.
    """
    suffix = data_suffix(path)
    if suffix not in (".parquet", ".arrow"):
        return {}
    import pyarrow

    kind = suffix.removeprefix(".").capitalize()
    with refused(f"the data file {path} must be {kind}, but isn't: {{}}.", pyarrow.ArrowException):
        schema = _schema(path)
    return names_of(schema, path)


def names_of(schema: "pyarrow.Schema", path: Path) -> ClassNames:
    """Return the names of classes in the schema of a file.

    Raises:
        BadInput: if the library's part of the schema can't be read.
    """
    written = (schema.metadata or {}).get(b"huggingface", b"{}")
    unreadable = (ValueError, AttributeError, TypeError)
    with refused(f"{path} must have column kinds that can be read, but hasn't: {{}}.", *unreadable):
        features = (json.loads(written).get("info") or {}).get("features") or {}
        return {
            column: _in_order(feature["names"])
            for column, feature in features.items()
            if isinstance(feature, dict)
            and feature.get("_type") == "ClassLabel"
            and feature.get("names")
        }


def _in_order(names: list[Any] | dict[str, Any]) -> list[str]:
    """Return the names of the classes 0, 1, …, which data set cards also give by number."""
    if isinstance(names, dict):
        names = [names[number] for number in sorted(names, key=int)]
    return list(map(str, names))


def _schema(path: Path) -> "pyarrow.Schema":
    import pyarrow.parquet

    if data_suffix(path) == ".parquet":
        return pyarrow.parquet.read_schema(path)
    with path.open("rb") as file:
        try:
            return pyarrow.ipc.open_stream(file).schema
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return pyarrow.ipc.open_file(file).schema


def all_names(paths: Iterable[Path]) -> ClassNames:
    """Return the names of the classes of several files, in the order in which they first occur."""
    return merged(names_in(path) for path in paths)


def merged(parts: Iterable[ClassNames]) -> ClassNames:
    """Return the names of the classes of several parts, in the order in which they first occur."""
    names: ClassNames = {}
    for column, own in itertools.chain.from_iterable(part.items() for part in parts):
        names[column] = list(dict.fromkeys([*names.get(column, ()), *own]))
    return names


def check_same_names(paths: Iterable[Path], columns: Iterable[str], read: ClassNames) -> None:
    """Check that files are read with their own names of classes.

    Args:
        paths: the files.
        columns: the columns that matter.
        read: the names with which the datasets library has read all of them.

    Raises:
        BadInput: if a file has other names, or the same ones in another order.
    """
    columns = list(columns)
    for path in paths:
        own = names_in(path)
        for column in columns:
            names = read.get(column)
            if names is not None and own.get(column, names) != names:
                raise BadInput(
                    f"the names of the classes in column {column!r} must be the same in all files"
                    f" and in the data set's card, but {path} has {', '.join(own[column])}, and"
                    f" others have {', '.join(names)}; write texts instead of numbers."
                )


def with_names(
    values: dict[str, Any], names: Mapping[str, list[str]], where: str
) -> dict[str, Any]:
    """Return a row in which the numbers of classes are the classes' names.

    Raises:
        BadInput: if a number has no name.
    """
    return {
        column: _named(value, names[column], f"column {column!r}", where)
        if column in names
        else value
        for column, value in values.items()
    }


def _named(value: Any, names: list[str], column: str, where: str) -> Any:
    """Return the name that a number stands for; what is no number is returned as it is."""
    if not isinstance(value, int | float) or value != value:
        return value
    if not 0 <= value < len(names) or value != int(value):
        raise BadInput(
            f"{column} must hold labels from 0 to {len(names) - 1}, but {where} has {value}"
            f"{_UNLABELLED if value == -1 else ''}."
        )
    return names[int(value)]
