"""The text of a data set, read from its source and split into training and evaluation."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from carbonopt.core.errors import BadInput
from carbonopt.spec.base_settings import Name
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.opened_files import data_suffix, file_bytes, readable
from carbonopt.train.data.rows import READERS, Row, file_rows, hub_rows

# Suffixes of files that don't hold plain text to be trained on.
NO_TEXT = (
    ".7z", ".arrow", ".avro", ".bin", ".bz2", ".db", ".docx", ".feather", ".gz", ".h5", ".hdf5",
    ".jl", ".jsonlines", ".lz4", ".npy", ".npz", ".odt", ".ods", ".orc", ".pdf", ".pickle", ".pkl",
    ".pq", ".psv", ".pt", ".rar", ".sqlite", ".tab", ".tar", ".tgz", ".xls", ".xlsx", ".xz", ".zip",
    ".zst",
)  # fmt: skip


class Text(NamedTuple):
    """The documents for training and for evaluation, none of them empty."""

    train: list[str]
    evaluation: list[str]


class TextDataset(Dataset, extra="forbid"):
    builtin: Literal["python-docs"] | None = None
    text_column: Name | None = None
    """The column of the text in jsonl, csv, tsv, parquet and hub data sets; `text` unless given. A
    plain text file has no columns."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text_column or "text",)

    def violations(self) -> dict[str, bool]:
        files = [*(self.train_files or ()), *(self.eval_files or ())]
        plain = next((file for file in files if data_suffix(Path(file)) not in READERS), None)
        named = self.text_column is not None
        has_columns = (
            f"text_column needs files with columns ({', '.join(READERS)}, by their suffix)"
        )
        return {
            **super().violations(),
            f"builtin: {self.builtin} has no columns to be named": (
                named and self.builtin is not None
            ),
            f"{has_columns}, but {plain} is read as plain text; rename it, or leave text_column"
            " out": (named and plain is not None),
        }


def read_text(dataset: TextDataset) -> Text:
    """Read the whole data set.

    A source without a split of its own is split by `eval_fraction`; its end is for evaluation. A
    single document is split by its characters, several by whole documents. Empty rows are left
    out, since they have no token to learn or to predict.

    Raises:
        BadInput: if a source can't be read, has no such split or column, has no text, or is too
            short to be split.
    """
    from pydoc_data.topics import topics

    if dataset.builtin is not None:
        # These are the reference topics that every Python carries for its help(), in the order of
        # their names.
        return split_documents([topics[name] for name in sorted(topics)], dataset.eval_fraction)
    if dataset.name_or_path is not None:
        return _hub(dataset)
    train = _files(dataset.train_files or (), dataset)
    if dataset.eval_files is None:
        return split_documents(train, dataset.eval_fraction)
    return Text(train, _files(dataset.eval_files, dataset))


def split_documents(documents: list[str], eval_fraction: float) -> Text:
    """Set the last documents aside for evaluation, or the end of a single one.

    Raises:
        BadInput: if there is too little text.
    """
    if len(documents) == 1:
        (document,) = documents
        whole, unit, cut = len(document), "characters", int(len(document) * (1 - eval_fraction))
        parts = Text([document[:cut]], [document[cut:]])
    else:
        whole, unit = len(documents), "documents"
        cut = whole - max(1, round(whole * eval_fraction))
        parts = Text(documents[:cut], documents[cut:])
    if not 0 < cut < whole:
        aside = (
            f"to set eval_fraction={eval_fraction:g} of it aside for evaluation, but has {whole}"
            f" {unit}"
        )
        raise BadInput(
            f"the training text must be long enough {aside}; give more text or eval_files."
        )
    return parts


def _files(paths: tuple[str, ...], dataset: TextDataset) -> list[str]:
    sources = [
        _texts(_documents(path, dataset), dataset.columns[0], f"the data file {path}")
        for path in map(Path, paths)
    ]
    return [text for texts in sources for text in texts]


def _texts(documents: Iterable[Row], column: str, source: str) -> list[str]:
    texts = [text for row in documents if (text := row.text(column))]
    if not texts:
        raise BadInput(f"{source} must have text in it, but is empty.")
    return texts


def _documents(path: Path, dataset: TextDataset) -> Iterable[Row]:
    (column,), suffix = dataset.columns, data_suffix(path)
    if suffix in READERS:
        return file_rows(path, (column,))
    if suffix in NO_TEXT:
        readers = ", ".join(READERS)
        raise BadInput(
            f"the data file {path} must be text or one of {readers}, but is a {suffix} file;"
            " convert it."
        )
    with readable(path):
        # The file is read as bytes, so that no line ending changes and every character counts.
        text = file_bytes(path).decode("utf-8-sig")
    if "\0" in text:
        raise BadInput(f"the data file {path} must be text, but has NUL characters; convert it.")
    return [Row({column: text}, str(path))]


def _hub(dataset: TextDataset) -> Text:
    (column,), rows = dataset.columns, hub_rows(dataset, dataset.columns)
    of = f"column {column!r} of the data set {dataset.name_or_path!r}, split"
    train = _texts(rows.train, column, f"{of} {dataset.train_split},")
    if rows.evaluation is None:
        return split_documents(train, dataset.eval_fraction)
    return Text(train, _texts(rows.evaluation, column, f"{of} {dataset.eval_split},"))
