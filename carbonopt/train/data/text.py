"""The data set's text: where it comes from, and which of it is for training and which for evaluation."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.config import Dataset
from carbonopt.core.errors import BadInput

_CSV_FIELD_LIMIT_CHARACTERS = 2**31 - 1  # the csv module's own 131,072 is shorter than many documents


class Text(NamedTuple):
    """Documents, none of them empty."""

    train: list[str]
    evaluation: list[str]


class TextDataset(Dataset, extra="forbid"):
    """A data set of documents."""

    text_column: str = "text"


def read_text(dataset: TextDataset) -> Text:
    """Reads the whole data set; what is not split already is split by `eval_fraction`, always at the end.

    A single document is split by its characters, several by whole documents. Empty rows are left out: they have no
    token to learn or to predict.

    Raises:
        BadInput: if a source can't be read, has no such split or column, or has no text.
    """
    if dataset.builtin is not None:
        return _split(_python_docs(), dataset.eval_fraction)
    if dataset.name_or_path is not None:
        return _hub(dataset)
    train = _files(dataset.train_files or (), dataset.text_column)
    if dataset.eval_files is None:
        return _split(train, dataset.eval_fraction)
    return Text(train, _files(dataset.eval_files, dataset.text_column))


def _split(documents: list[str], eval_fraction: float) -> Text:
    if len(documents) == 1:
        (document,) = documents
        cut = int(len(document) * (1 - eval_fraction))
        parts = Text([document[:cut]], [document[cut:]])
        whole, unit = len(document), "characters"
    else:
        cut = len(documents) - max(1, round(len(documents) * eval_fraction))
        parts = Text(documents[:cut], documents[cut:])
        whole, unit = len(documents), "documents"
    if not 0 < cut < whole:
        raise BadInput(
            f"the training text must be long enough to set eval_fraction={eval_fraction:g} of it aside for evaluation, "
            f"but has {whole} {unit}; give more text or eval_files."
        )
    return parts


def _python_docs() -> list[str]:
    """The reference topics that every Python carries for its help(), in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


# ------------------------------------------------------------------------------------------------------------- files


def _files(paths: tuple[str, ...], column: str) -> list[str]:
    documents: list[str] = []
    for name in paths:
        path = Path(name)
        found = [document for document in _documents(path, column) if document]
        if not found:
            raise BadInput(f"the data file {path} must have text in it, but is empty.")
        documents += found
    return documents


def _documents(path: Path, column: str) -> Iterator[str]:
    try:
        match path.suffix.lower():
            case ".jsonl" | ".ndjson":
                yield from _jsonl(path, column)
            case ".csv":
                yield from _csv(path, column)
            case ".parquet":
                yield from _parquet(path, column)
            case _:  # bytes, not text mode, so that no line ending changes and every character counts
                yield path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadInput(f"can't read the data file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"the data file {path} must be UTF-8 text, but isn't at byte {error.start}.") from error


def _jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadInput(f"{path}, line {number}, must be one JSON object, but isn't: {error.msg}.") from error
            if not isinstance(row, dict):
                raise BadInput(f"{path}, line {number}, must be one JSON object, but is a {type(row).__name__}.")
            _require_column(column, list(row), f"{path}, line {number},")
            yield _as_text(row[column], column, f"{path}, line {number}")


def _csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(_CSV_FIELD_LIMIT_CHARACTERS)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        _require_column(column, list(rows.fieldnames or ()), str(path))
        for number, row in enumerate(rows, start=1):
            yield _as_text(row[column], column, f"{path}, row {number}")


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"the data file {path} must be Parquet, but isn't: {error}.") from error
    with file:
        _require_column(column, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                yield _as_text(value, column, str(path))


def _require_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        raise BadInput(f"{where} has no column {column!r}; its columns are {', '.join(columns) or 'none'}.")


def _as_text(value: Any, column: str, where: str) -> str:
    """A row's text; a missing value counts as an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadInput(f"column {column!r} must hold text, but {where} has the {type(value).__name__} {value!r:.40}.")
    return value


# --------------------------------------------------------------------------------------------------------------- hub


def _hub(dataset: TextDataset) -> Text:
    import datasets

    name = dataset.name_or_path
    try:
        loaded = datasets.load_dataset(name, dataset.config)
    except ConnectionError as error:
        raise BadInput(
            f"can't reach the Hugging Face hub for the data set {name!r}, and it is not in the local cache; "
            "give a local folder or train_files."
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise BadInput(f"can't load the data set {name!r}: {' '.join(str(error).split()):.300}.") from error
    for split in (dataset.train_split, dataset.eval_split):
        if split not in loaded:
            raise BadInput(f"the data set {name!r} has no split {split!r}; its splits are {', '.join(loaded)}.")
    return Text(
        *(
            _rows(loaded[split], dataset.text_column, f"the data set {name!r}, split {split},")
            for split in (dataset.train_split, dataset.eval_split)
        )
    )


def _rows(split: Any, column: str, where: str) -> list[str]:
    _require_column(column, split.column_names, where)
    documents = [text for value in split[column] if (text := _as_text(value, column, where))]
    if not documents:
        raise BadInput(f"{where} must have text in column {column!r}, but has none.")
    return documents
