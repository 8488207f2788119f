"""The data set's text: where it comes from, and which of it is for training and which for evaluation."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from carbonopt.core.config import Dataset
from carbonopt.core.errors import BadInput
from carbonopt.train.data.rows import READERS, Row, file_rows, hub_rows, readable


class Text(NamedTuple):
    """Documents, none of them empty."""

    train: list[str]
    evaluation: list[str]


class TextDataset(Dataset, extra="forbid"):
    builtin: Literal["python-docs"] | None = None
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


def _texts(documents: Iterable[Row], column: str, source: str) -> list[str]:
    texts = [text for row in documents if (text := row.text(column))]
    if not texts:
        raise BadInput(f"{source} must have text in it, but is empty.")
    return texts


def _documents(path: Path, column: str) -> Iterable[Row]:
    if path.suffix.lower() in READERS:
        return file_rows(path, (column,))
    with readable(path):
        # Bytes, not text mode, so that no line ending changes and every character counts.
        return [Row({column: path.read_bytes().decode("utf-8-sig")}, str(path))]


def _hub(dataset: TextDataset) -> Text:
    column, rows = dataset.text_column, hub_rows(dataset, (dataset.text_column,))
    of = f"column {column!r} of the data set {dataset.name_or_path!r}, split"
    train = _texts(rows.train, column, f"{of} {dataset.train_split},")
    if rows.evaluation is None:
        return _split(train, dataset.eval_fraction)
    return Text(train, _texts(rows.evaluation, column, f"{of} {dataset.eval_split},"))
