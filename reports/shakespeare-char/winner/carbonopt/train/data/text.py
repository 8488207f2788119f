"""The data set's text: where it comes from, and which of it is for training and which for evaluation."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.config import Dataset
from carbonopt.core.errors import BadInput
from carbonopt.train.failures import refused


class Text(NamedTuple):
    """Documents, none of them empty."""

    train: list[str]
    evaluation: list[str]


class TextDataset(Dataset, extra="forbid"):
    text_column: str = "text"


def read_text(dataset: TextDataset) -> Text:
    """Reads the whole data set; what is not split already is split by `eval_fraction`, always at the end: a single
    document by its characters, several by whole documents. Empty rows are left out: they have no token to learn or to
    predict. Raises BadInput if a source can't be read, has no such split or column, or has no text."""
    from pydoc_data.topics import topics

    if dataset.builtin is not None:
        # The reference topics that every Python carries for its help(), in the order of their names.
        return _split([topics[name] for name in sorted(topics)], dataset.eval_fraction)
    if dataset.name_or_path is not None:
        return _hub(dataset)
    train = _files(dataset.train_files or (), dataset.text_column)
    if dataset.eval_files is None:
        return _split(train, dataset.eval_fraction)
    return Text(train, _files(dataset.eval_files, dataset.text_column))


def _split(documents: list[str], eval_fraction: float) -> Text:
    if len(documents) == 1:
        (document,) = documents
        whole, unit, cut = len(document), "characters", int(len(document) * (1 - eval_fraction))
        parts = Text([document[:cut]], [document[cut:]])
    else:
        whole, unit = len(documents), "documents"
        cut = whole - max(1, round(whole * eval_fraction))
        parts = Text(documents[:cut], documents[cut:])
    if not 0 < cut < whole:
        aside = f"to set eval_fraction={eval_fraction:g} of it aside for evaluation, but has {whole} {unit}"
        raise BadInput(f"the training text must be long enough {aside}; give more text or eval_files.")
    return parts


def _files(paths: tuple[str, ...], column: str) -> list[str]:
    sources = [_texts(_documents(path, column), column, f"the data file {path}") for path in map(Path, paths)]
    return [text for texts in sources for text in texts]


def _texts(rows: Iterable[tuple[Any, str]], column: str, source: str) -> list[str]:
    """The texts of a source's rows, each a value and where it stands; a missing value counts as an empty text."""
    texts = []
    for value, where in rows:
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise BadInput(f"column {column!r} must hold text, but {where} has the {kind} {value!r:.40}.")
        if value:
            texts.append(value)
    if not texts:
        raise BadInput(f"{source} must have text in it, but is empty.")
    return texts


def _documents(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    try:
        yield from _READERS.get(path.suffix.lower(), _plain)(path, column)
    except OSError as error:
        raise BadInput(f"can't read the data file {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"the data file {path} must be UTF-8 text, but isn't at byte {error.start}.") from error


def _plain(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    # Bytes, not text mode, so that no line ending changes and every character counts.
    yield path.read_bytes().decode("utf-8"), str(path)


def _jsonl(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadInput(f"{where}, must be one JSON object, but isn't: {error.msg}.") from error
            if not isinstance(row, dict):
                raise BadInput(f"{where}, must be one JSON object, but is a {type(row).__name__}.")
            _require_column(column, list(row), f"{where},")
            yield row[column], where


def _csv(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(2**31 - 1)  # characters; the module's own 131,072 is shorter than many documents
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        _require_column(column, list(rows.fieldnames or ()), str(path))
        for number, row in enumerate(rows, start=1):
            yield row[column], f"{path}, row {number}"


def _parquet(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    import pyarrow.parquet

    with refused(f"the data file {path} must be Parquet, but isn't: {{}}.", pyarrow.ArrowInvalid):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        _require_column(column, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(columns=[column]):
            yield from ((value, str(path)) for value in batch.column(0).to_pylist())


_READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".parquet": _parquet}


def _require_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        raise BadInput(f"{where} has no column {column!r}; its columns are {', '.join(columns) or 'none'}.")


def _hub(dataset: TextDataset) -> Text:
    import datasets

    name, column = dataset.name_or_path, dataset.text_column
    unreachable = f"can't reach the Hugging Face hub for the data set {name!r}, and it is not in the local cache"
    with (
        refused(f"can't load the data set {name!r}: {{}}.", datasets.exceptions.DatasetsError, OSError, ValueError),
        refused(f"{unreachable}; give a local folder or train_files.", ConnectionError),
    ):
        loaded = datasets.load_dataset(name, dataset.config)
    splits = (dataset.train_split, dataset.eval_split)
    if missing := [split for split in splits if split not in loaded]:
        raise BadInput(f"the data set {name!r} has no split {missing[0]!r}; its splits are {', '.join(loaded)}.")
    parts = []
    for split in splits:
        where = f"the data set {name!r}, split {split},"
        _require_column(column, loaded[split].column_names, where)
        rows = ((value, where) for value in loaded[split][column])
        parts.append(_texts(rows, column, f"column {column!r} of {where}"))
    return Text(*parts)
