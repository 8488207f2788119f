"""Rows of a data set, of which a task names the columns: from files (jsonl, json, csv, parquet), a folder or a hub."""

import csv
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.config import Dataset
from carbonopt.core.errors import BadInput
from carbonopt.train.failures import refused

_SURROGATES = re.compile("[\ud800-\udfff]")


class Row(NamedTuple):
    values: dict[str, Any]  # by column; None: the row has no value there
    where: str  # it stands, for errors

    def text(self, column: str) -> str:
        """A missing value is an empty text. Raises BadInput for what is no text."""
        value = self.values[column]
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise BadInput(f"column {column!r} must hold text, but {self.where} has the {kind} {value!r:.40}.")
        return value or ""


class SplitRows(NamedTuple):
    train: list[Row]
    evaluation: list[Row]


class SourceRows(NamedTuple):
    """Rows as their source has them."""

    train: list[Row]
    evaluation: list[Row] | None  # None: it has none of its own
    names: dict[str, list[str]]  # of what a column's numbers stand for, where the hub's data set says it


def read_rows(dataset: Dataset, columns: Sequence[str]) -> SplitRows:
    """Those for training and those for evaluation; what is not split already is split by `eval_fraction`, always at the
    end. Raises BadInput if a source can't be read, has no such split or column, or is too short to be split."""
    train, evaluation, _ = source_rows(dataset, columns)
    return split_rows(train, dataset.eval_fraction) if evaluation is None else SplitRows(train, evaluation)


def split_rows(rows: list[Row], eval_fraction: float) -> SplitRows:
    """The last ones are for evaluation. Raises BadInput if there are too few."""
    cut = len(rows) - max(1, round(len(rows) * eval_fraction))
    if cut < 1:
        aside = f"to set eval_fraction={eval_fraction:g} of them aside for evaluation, but are {len(rows)}"
        raise BadInput(f"the training rows must be enough {aside}; give more, or rows for evaluation.")
    return SplitRows(rows[:cut], rows[cut:])


def source_rows(dataset: Dataset, columns: Sequence[str]) -> SourceRows:
    """Of files, a folder or a hub, not split yet. Raises BadInput as `read_rows`."""
    if dataset.name_or_path is not None:
        return hub_rows(dataset, columns)
    train = _of_files(dataset.train_files or (), columns)
    return SourceRows(train, None if dataset.eval_files is None else _of_files(dataset.eval_files, columns), {})


def _of_files(paths: Sequence[str], columns: Sequence[str]) -> list[Row]:
    rows = []
    for path in map(Path, paths):
        if path.suffix.lower() not in READERS:
            raise BadInput(f"the data file {path} must be one of {', '.join(READERS)}, since it has to have columns.")
        rows += list(file_rows(path, columns))
        if not rows:
            raise BadInput(f"the data file {path} must have rows in it, but is empty.")
    return rows


def file_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Of a file whose suffix is one of READERS'. Raises BadInput if it can't be read or lacks a column."""
    with readable(path):
        yield from READERS[path.suffix.lower()](path, columns)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises BadInput where the file can't be read or is no UTF-8."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"can't read the data file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"the data file {path} must be UTF-8 text, but isn't at byte {error.start}.") from error


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadInput(f"{where}, must be one JSON object, but isn't: {error.msg}.") from error
            yield _of_json(row, columns, where)


def _json(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    must = f"the data file {path} must be a JSON list of objects, but"
    with refused(f"{must} isn't JSON: {{}}.", json.JSONDecodeError, RecursionError):
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise BadInput(f"{must} is a {type(rows).__name__}.")
    for number, row in enumerate(rows, start=1):
        yield _of_json(row, columns, f"{path}, item {number}")


def _of_json(row: Any, columns: Sequence[str], where: str) -> Row:
    if not isinstance(row, dict):
        raise BadInput(f"{where}, must be one JSON object, but is a {type(row).__name__}.")
    require_columns(columns, list(row), f"{where},")
    values = {column: row[column] for column in columns}
    if column := next((column for column in columns if _has_half_character(values[column])), None):
        raise BadInput(f"{where}, must hold text, but column {column!r} has half a surrogate pair; mend or remove it.")
    return Row(values, where)


def _has_half_character(value: Any) -> bool:
    r"""Whether a text anywhere in it can't be written as UTF-8: what JSON escapes as \ud800 to \udfff has two parts."""
    if isinstance(value, str):
        return not value.isascii() and _SURROGATES.search(value) is not None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_half_character, parts))


def _csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # characters; the module's own 131,072 is shorter than many documents
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        named = list(rows.fieldnames or ())
        require_columns(columns, named, str(path))
        if twice := next((column for column in columns if named.count(column) > 1), None):
            raise BadInput(f"{path} must name each column once, but has {twice!r} {named.count(twice)} times; rename.")
        for number, row in enumerate(rows, start=1):
            if None in row:  # type: ignore[comparison-overlap]
                more = f"row {number} has {len(named) + len(row[None])}"  # type: ignore[index]
                raise BadInput(f"{path} must have at most {len(named)} cells in a row, but {more}; quote commas in it.")
            yield Row({column: row[column] for column in columns}, f"{path}, row {number}")


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet

    with refused(f"the data file {path} must be Parquet, but isn't: {{}}.", pyarrow.ArrowInvalid):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        require_columns(columns, file.schema_arrow.names, str(path))
        batches = (batch.to_pylist() for batch in file.iter_batches(columns=list(columns)))
        for number, values in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield Row(values, f"{path}, row {number}")


READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def require_columns(columns: Sequence[str], present: Sequence[str], where: str) -> None:
    """Raises BadInput if one is missing."""
    for column in columns:
        if column not in present:
            raise BadInput(f"{where} has no column {column!r}; its columns are {', '.join(present) or 'none'}.")


def hub_rows(dataset: Dataset, columns: Sequence[str]) -> SourceRows:
    """Of a hub's data set, or of a local folder of one; images stay as they are stored, {"bytes": .., "path": ..}.
    Raises BadInput if there is none, or it has no such split or column."""
    import datasets

    name = dataset.name_or_path
    unreachable = f"can't reach the Hugging Face hub for the data set {name!r}, and it is not in the local cache"
    with (
        refused(f"can't load the data set {name!r}: {{}}.", datasets.exceptions.DatasetsError, OSError, ValueError),
        refused(f"{unreachable}; give a local folder or train_files.", ConnectionError),
    ):
        loaded = datasets.load_dataset(name, dataset.config)
    parts, names = [], {}
    for split in dict.fromkeys((dataset.train_split, dataset.eval_split)):
        if split not in loaded:
            has = f"the data set {name!r} has no split {split!r}; its splits are {', '.join(loaded)}"
            aside = f"; eval_split: {dataset.train_split} sets eval_fraction of that aside"
            raise BadInput(f"{has}{aside if split == dataset.eval_split and dataset.train_split in loaded else ''}.")
        where = f"the data set {name!r}, split {split},"
        require_columns(columns, loaded[split].column_names, where)
        rows = loaded[split].select_columns(list(columns))
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
            elif isinstance(feature, datasets.ClassLabel):
                names[column] = list(feature.names)
        parts.append([Row(values, f"{where} row {number}") for number, values in enumerate(rows, start=1)])
    return SourceRows(parts[0], parts[1] if len(parts) > 1 else None, names)
