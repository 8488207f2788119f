"""Rows of data sets with named columns, read from files, a folder or a hub."""

import csv
import functools
import itertools
import json
import lzma
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.class_names import ClassNames, all_names, merged, names_of, with_names
from carbonopt.train.data.opened_files import data_suffix, file_bytes, open_text, readable
from carbonopt.train.data.row_layout import RowEnds, check_no_header
from carbonopt.train.data.swallowed_rows import QUOTES_REMEDY, SwallowedRows
from carbonopt.train.failures import refused

_SURROGATES = re.compile("[\ud800-\udfff]")
# The most digits of a whole number in JSON: Python's own limit, above which int() takes quadratic
# time.
_MOST_DIGITS = 4300
_COMPRESSED = (".bz2", ".lz4", ".xz", ".zip", ".zst")  # of .gz files, the content is read
_MOST_FOR_TEXT = 1000  # rows from which it is told which columns hold text
_LETTER = re.compile(r"[^\W\d_]")
_WORDS = re.compile(r"[^\W\d_]\W*\s+\W*[^\W\d_]")


class Row(NamedTuple):
    values: dict[str, Any]  # value by column; None: the row has no value there
    where: str  # where the row stands, for errors

    def text(self, column: str) -> str:
        """Return a column's text, which is empty where the value is missing.

        Raises:
            BadInput: if the value is no text.
        """
        value = self.values[column]
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise BadInput(
                f"column {column!r} must hold text, but {self.where} has the {kind} {value!r:.40}."
            )
        return value or ""


@dataclass(frozen=True)
class _TooLong:
    """A stand-in for a whole number of JSON that has too many digits to be read."""

    digits: int


class SplitRows(NamedTuple):
    train: list[Row]
    evaluation: list[Row]


class SourceRows(NamedTuple):
    """The rows of a data set, split only where their source is split."""

    train: list[Row]
    evaluation: list[Row] | None  # None: the source has no rows for evaluation
    # By column, the names of classes that the source has for its numbers, in their order. The rows
    # hold the names.
    names: ClassNames


def read_rows(dataset: Dataset, columns: Sequence[str]) -> SplitRows:
    """Return the rows for training and those for evaluation.

    A source without a split of its own is split by `eval_fraction`; the last rows are for
    evaluation.

    Raises:
        BadInput: if a source can't be read, has no such split or column, or is too short to be
            split.
    """
    train, evaluation, _ = source_rows(dataset, columns)
    return (
        split_rows(train, dataset.eval_fraction)
        if evaluation is None
        else SplitRows(train, evaluation)
    )


def split_rows(rows: list[Row], eval_fraction: float) -> SplitRows:
    """Set the last rows aside for evaluation.

    Raises:
        BadInput: if there are too few rows.
    """
    cut = len(rows) - max(1, round(len(rows) * eval_fraction))
    if cut < 1:
        aside = (
            f"to set eval_fraction={eval_fraction:g} of them aside for evaluation, but are"
            f" {len(rows)}"
        )
        raise BadInput(
            f"the training rows must be enough {aside}; give more, or rows for evaluation."
        )
    return SplitRows(rows[:cut], rows[cut:])


def source_rows(dataset: Dataset, columns: Sequence[str]) -> SourceRows:
    """Return the rows of files, a folder or a hub, before any split by `eval_fraction`.

    Raises:
        BadInput: as `read_rows` does, except for a source that is too short.
    """
    if dataset.name_or_path is not None:
        return hub_rows(dataset, columns)
    train = _of_files(dataset.train_files or (), columns)
    evaluation = None if dataset.eval_files is None else _of_files(dataset.eval_files, columns)
    paths = map(Path, (*(dataset.train_files or ()), *(dataset.eval_files or ())))
    return SourceRows(train, evaluation, all_names(paths))


def _of_files(paths: Sequence[str], columns: Sequence[str]) -> list[Row]:
    rows = []
    for path in map(Path, paths):
        if data_suffix(path) not in READERS:
            raise BadInput(
                f"the data file {path} must be one of {', '.join(READERS)}, since it has to have"
                f" columns{'; decompress it' if path.suffix.lower() in _COMPRESSED else ''}."
            )
        rows += list(file_rows(path, columns))
        if not rows:
            raise BadInput(f"the data file {path} must have rows in it, but is empty.")
    return rows


def check_columns(dataset: Dataset) -> None:
    """Read the first row of each of the data set's files that have columns.

    Raises:
        BadInput: if a file can't be read or lacks a column.
    """
    for path in map(Path, (*(dataset.train_files or ()), *(dataset.eval_files or ()))):
        if data_suffix(path) in READERS:
            next(file_rows(path, dataset.columns), None)


def column_names(path: Path) -> tuple[str, ...]:
    """Return the names of the columns of a file whose `data_suffix` is one of READERS.

    Those of JSON are the keys of the first row.

    Raises:
        BadInput: if the file can't be read, or has no row.
    """
    suffix = data_suffix(path)
    with readable(path):
        if suffix == ".parquet":
            return _parquet_names(path)
        if suffix in (".csv", ".tsv"):
            with (
                open_text(path, newline="") as file,
                refused(
                    f"{path}, line 1, must be a row of column names, but isn't: {{}}.", csv.Error
                ),
            ):
                delimiter = "," if suffix == ".csv" else "\t"
                names = next(csv.reader(file, delimiter=delimiter, strict=True), [])
        else:
            names = _json_names(path, whole=suffix == ".json")
    if not names:
        raise BadInput(f"the data file {path} must have rows in it, but is empty.")
    return tuple(names)


def _json_names(path: Path, *, whole: bool) -> list[str]:
    text = file_bytes(path).decode("utf-8-sig") if whole else ""
    if not whole or _are_lines(text):
        with open_text(path) as lines:
            text = next((line for line in lines if line.strip()), "{}")
    with refused(f"{path} must hold JSON objects, but doesn't: {{}}.", ValueError, RecursionError):
        value = _parsed(text)
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, _JsonObject):
        raise BadInput(
            f"{path} must hold JSON objects, but its first row is a {type(first).__name__}."
        )
    return first.names


def _parquet_names(path: Path) -> tuple[str, ...]:
    import pyarrow.parquet

    with refused(f"the data file {path} must be Parquet, but isn't: {{}}.", pyarrow.ArrowException):
        return tuple(pyarrow.parquet.read_schema(path).names)


def unread_columns(paths: Sequence[Path], read: Collection[str]) -> dict[str, bool]:
    """Return the columns that hold text in the first file's first rows but are not read.

    Columns of JSON may be missing in some rows. Lists and objects count if a text is in them; a
    text without a letter, such as a number or a date, doesn't count.

    Args:
        paths: data files; none, or one without columns, has no such columns.
        read: the columns that are read.

    Returns:
        By column, whether a row has several words there, as a name or an id hasn't.

    Raises:
        BadInput: if the rows can't be read.
    """
    has_words: dict[str, bool] = {}
    if not paths or data_suffix(paths[0]) not in READERS:
        return has_words
    for values in _first_values(paths[0]):
        for name, value in values.items():
            texts = [text for text in _texts_in(value) if _LETTER.search(text)]
            if texts and name not in read:
                has_words[name] = has_words.get(name, False) or any(map(_WORDS.search, texts))
    return has_words


def _first_values(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file's first rows by column, without columns that share a name."""
    suffix = data_suffix(path)
    with readable(path):
        if suffix in (".jsonl", ".ndjson", ".json"):
            items = _json_values(path) if suffix == ".json" else _jsonl_values(path)
            return [
                row for row, _ in itertools.islice(items, _MOST_FOR_TEXT) if isinstance(row, dict)
            ]
        named = _parquet_texts(path) if suffix == ".parquet" else column_names(path)
        names = [name for name, times in Counter(named).items() if times == 1]
        if suffix == ".parquet":
            names = [name for name in names if _has_readable_rows(path, name)]
        rows = itertools.islice(READERS[suffix](path, names), _MOST_FOR_TEXT)
        return [row.values for row in rows]


def _has_readable_rows(path: Path, name: str) -> bool:
    """Return whether the first rows of a column can be read; one that nobody reads need not be."""
    try:
        list(itertools.islice(READERS[".parquet"](path, [name]), _MOST_FOR_TEXT))
    except BadInput:
        return False
    return True


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _texts_in(part)


def _parquet_texts(path: Path) -> list[str]:
    """Return the names of the columns that may hold text."""
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(path)
    return [field.name for field in schema if "string" in str(field.type)]


def file_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Read the rows of a file whose `data_suffix` is one of READERS.

    Raises:
        BadInput: if it can't be read or lacks a column; the message names the line or row.
    """
    with readable(path):
        yield from READERS[data_suffix(path)](path, columns)


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    return (_of_json(row, columns, where) for row, where in _jsonl_values(path))


def _json(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    return (_of_json(row, columns, where) for row, where in _json_values(path))


def _jsonl_values(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the value of each line that is not empty, and where it stands."""
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            with refused(
                f"{where}, must be one JSON object, but isn't: {{}}.", ValueError, RecursionError
            ):
                row = _parsed(line)
            yield row, where


def _json_values(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield each item of a JSON list, or of JSON lines, and where it stands."""
    must = f"the data file {path} must be a JSON list of objects, but"
    text = file_bytes(path).decode("utf-8-sig")
    if _are_lines(text):
        yield from _jsonl_values(path)
        return
    with refused(f"{must} isn't JSON: {{}}.", ValueError, RecursionError):
        rows = _parsed(text)
    if not isinstance(rows, list):
        kind = "an object" if isinstance(rows, dict) else f"a {type(rows).__name__}"
        raise BadInput(f"{must} is {kind}; put its rows into one list, one object each.")
    for number, row in enumerate(rows, start=1):
        yield row, f"{path}, item {number}"


def _are_lines(text: str) -> bool:
    """Return whether a text has several lines, the first of which is a whole JSON object."""
    first, _, rest = text.strip().partition("\n")
    try:
        return bool(rest) and isinstance(_parsed(first), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, with `_TooLong` for numbers that can't be read."""
    return json.loads(text, object_pairs_hook=_JsonObject, parse_int=_whole_number)


def _whole_number(digits: str) -> "int | _TooLong":
    return int(digits) if len(digits) <= _MOST_DIGITS else _TooLong(len(digits))


class _JsonObject(dict[str, Any]):
    """A JSON object that keeps all names as they were written, repeated ones included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _of_json(row: Any, columns: Sequence[str], where: str) -> Row:
    if not isinstance(row, _JsonObject):
        instead = "; a list of all rows goes into a .json file" if isinstance(row, list) else ""
        raise BadInput(f"{where}, must be one JSON object, but is a {type(row).__name__}{instead}.")
    require_columns(columns, row.names, f"{where},")
    values = {column: row[column] for column in columns}
    for column, value in values.items():
        with refused(f"{where}, column {column!r} must not be nested so deeply.", RecursionError):
            problem = _unreadable(value)
        if problem is not None:
            raise BadInput(f"{where}, column {column!r} {problem}; mend or remove it.")
    return Row(values, where)


def _unreadable(value: Any) -> str | None:
    r"""Return what is wrong with a part of a JSON value, or None.

    A text that JSON escapes as \ud800 to \udfff is half a character, which can't be written as
    UTF-8.
    """
    if isinstance(value, str):
        has_half = not value.isascii() and _SURROGATES.search(value) is not None
        return "must hold text, but has half a surrogate pair" if has_half else None
    if isinstance(value, _TooLong):
        return (
            f"must hold numbers of at most {_MOST_DIGITS:,} digits, but has one of {value.digits:,}"
        )
    if isinstance(value, _JsonObject) and len(value) < len(value.names):
        twice = next(name for name, count in Counter(value.names).items() if count > 1)
        return (
            f"must hold objects that name each key once, but has one that names {twice!r} more than"
            " once"
        )
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((problem for problem in map(_unreadable, parts) if problem is not None), None)


def _csv(path: Path, columns: Sequence[str], delimiter: str = ",") -> Iterator[Row]:
    # The limit in characters; the module's own, 131,072, is shorter than many documents.
    csv.field_size_limit(2**31 - 1)
    with open_text(path, newline="") as file:
        ends = RowEnds()
        rows = csv.reader(ends.lines(file), delimiter=delimiter, strict=True)
        with refused(f"{path}, line 1, must be a row of column names, but isn't: {{}}.", csv.Error):
            named = next(rows, [])
        _check_is_text(named, f"{path}, line 1")
        ends.check(f"{path}, line 1")
        require_columns(columns, named, str(path))
        places = {column: named.index(column) for column in columns}
        swallowed = SwallowedRows(named, delimiter)
        number = 0
        while True:
            where = f"{path}, line {rows.line_num + 1}"
            with refused(
                f"{where}: a quoted cell must end with a quote before a {delimiter!r}: {{}};"
                f" {QUOTES_REMEDY}.",
                csv.Error,
            ):
                cells = next(rows, None)
            if cells is None:
                swallowed.finish(path.name)
                return
            if not cells:
                continue  # an empty line
            number += 1
            ends.check(where)
            _check_is_text(cells, where)
            check_no_header(cells, named, where)
            _check_count(cells, named, places, where, number)
            # Also in a column that is not read, whose rows would be lost.
            swallowed.look_at(cells, where)
            yield Row(
                {column: cells[place] for column, place in places.items()}, f"{path}, row {number}"
            )


def _check_is_text(cells: Sequence[str], where: str) -> None:
    """Raise BadInput if a cell has NUL characters, as files in UTF-16 and binary ones do."""
    if any("\0" in cell for cell in cells):
        raise BadInput(f"{where}: cells must be text, but have NUL characters; convert the file.")


def _check_count(
    cells: Sequence[str], named: Sequence[str], places: dict[str, int], where: str, number: int
) -> None:
    """Check that a row has a cell for each column that is read.

    Raises:
        BadInput: if it lacks one, or has more cells than there are columns.
    """
    if len(cells) > len(named):
        more = f"row {number} has {len(cells)}"
        raise BadInput(
            f"{where}: a row must have at most {len(named)} cells, but {more}; quote commas in it."
        )
    for column, place in places.items():
        if place >= len(cells):
            has = f"row {number} has {len(cells)} of {len(named)} cells"
            raise BadInput(
                f"{where}: every row must have a cell for {column!r}, but {has}; add what is"
                " missing."
            )


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet

    with refused(f"the data file {path} must be Parquet, but isn't: {{}}.", pyarrow.ArrowException):
        file = pyarrow.parquet.ParquetFile(path)
    names = names_of(file.schema_arrow, path)
    number = 0
    with file:
        require_columns(columns, file.schema_arrow.names, str(path))
        unreadable = (pyarrow.ArrowException, ValueError, OverflowError, OSError)
        batches = file.iter_batches(columns=list(columns))
        while True:
            after = (
                f"the data file {path} must hold values that Python can read, but after row"
                f" {number} it doesn't"
            )
            with refused(f"{after} (columns {', '.join(columns)}): {{}}.", *unreadable):
                batch = next(batches, None)
                values_of_rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for values in values_of_rows:
                number += 1
                where = f"{path}, row {number}"
                yield Row(with_names(values, names, where), where)


_tsv = functools.partial(_csv, delimiter="\t")
READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Row]]] = {
    ".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json,
    ".csv": _csv, ".tsv": _tsv, ".parquet": _parquet,
}  # fmt: skip


def require_columns(columns: Sequence[str], present: Sequence[str], where: str) -> None:
    """Check that each column is present exactly once.

    Raises:
        BadInput: if a column is missing, or several have its name.
    """
    for column in columns:
        times = present.count(column)
        if times == 0:
            raise BadInput(
                f"{where} has no column {column!r}; its columns are {', '.join(present) or 'none'}"
                f"{_remedy(column, present)}."
            )
        if times > 1:
            raise BadInput(
                f"{where} must name each column once, but has {column!r} {times} times; rename."
            )


def _remedy(column: str, present: Sequence[str]) -> str:
    """Return what helps if a header has a column, but not as it must be written."""
    spaced = next((name for name in present if name.strip() == column), None)
    if spaced is not None:
        return f"; take the spaces out of {spaced!r}"
    if present and present[0].lower().startswith("sep="):
        return "; remove the first line, and separate the cells of CSV by commas"
    separated = (sep for sep in (";", "\t", "|") if len(present) == 1 and sep in present[0])
    if (found := next(separated, None)) is not None:
        return f"; separate cells by commas rather than {found!r}, or by tabs in a .tsv file"
    return ""


def hub_rows(dataset: Dataset, columns: Sequence[str]) -> SourceRows:
    """Read a hub's data set, or a local folder laid out as one.

    Images stay as they are stored, {"bytes": .., "path": ..}.

    Raises:
        BadInput: if there is no such data set, split or column.
    """
    if not Path(str(dataset.name_or_path)).is_dir():
        return _hub_rows(dataset, columns, None)
    # The library's own cache identifies a folder by its files' times, which copies can keep, rather
    # than by their contents.
    with tempfile.TemporaryDirectory(prefix="carbonopt-") as cache:
        return _hub_rows(dataset, columns, cache)


def _hub_rows(dataset: Dataset, columns: Sequence[str], cache: str | None) -> SourceRows:
    import datasets
    import yaml

    # This imports datasets, which takes 1.5 s, so it is done only where it is needed.
    from carbonopt.train.data.folders import library_names, loaded_splits

    name = dataset.name_or_path
    compressed = (EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)
    damaged = (datasets.exceptions.DatasetsError, OSError, ValueError, yaml.YAMLError, *compressed)
    unreachable = (
        f"can't reach the Hugging Face hub for the data set {name!r}, and it is not in the local"
        " cache"
    )
    with (
        refused(f"can't load the data set {name!r}: {{}}.", *damaged),
        refused(f"{unreachable}; give a local folder or train_files.", ConnectionError),
    ):
        loaded = loaded_splits(dataset, cache)
    parts: list[list[Row]] = []
    names: list[ClassNames] = []
    for split in dict.fromkeys((dataset.train_split, dataset.eval_split)):
        if split not in loaded:
            raise BadInput(_missing_split(dataset, split, list(loaded)))
        if isinstance(part := loaded[split], tuple):
            parts.append([row for path in part for row in file_rows(path, columns)])
            names.append(all_names(part))
        else:
            where = f"the data set {name!r}, split {split},"
            require_columns(columns, part.column_names, where)
            names.append(library_names(part))
            parts.append(_library_rows(part, columns, where, names[-1]))
    return SourceRows(parts[0], parts[1] if len(parts) > 1 else None, merged(names))


def _missing_split(dataset: Dataset, split: str, present: Sequence[str]) -> str:
    """Return the error for a split that a data set lacks."""
    from carbonopt.train.data.folders import evaluation_name

    name = dataset.name_or_path
    lacks = f"the data set {name!r} has no split {split!r}; its splits are {', '.join(present)}"
    if split != dataset.eval_split or dataset.train_split not in present:
        return f"{lacks}."
    aside = f"eval_split: {dataset.train_split} sets eval_fraction of that aside"
    others = [other for other in present if other != dataset.train_split]
    if others:
        usual = [other for other in others if other in ("validation", "test")]
        named = " or ".join(usual or others)
        return f"{lacks}; eval_split: {named} takes that for evaluation; {aside}."
    folder = Path(str(name))
    if folder.is_dir() and (found := evaluation_name(folder)) is not None:
        return (
            f"{lacks}. {found} looks like a part of another: name files so that they are one, such"
            " as train.csv and validation.csv, or have folders train and validation. If it is for"
            f" training, {aside}."
        )
    return f"{lacks}; {aside}."


def _library_rows(part: Any, columns: Sequence[str], where: str, names: ClassNames) -> list[Row]:
    """Return the rows of a split that the datasets library has read.

    Args:
        part: the split, a datasets.Dataset.
        where: what the rows' places begin with.
        names: the split's names of classes.
    """
    import datasets

    rows = part.select_columns(list(columns))
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
    return [
        Row(with_names(values, names, f"{where} row {number}"), f"{where} row {number}")
        for number, values in enumerate(rows, start=1)
    ]
