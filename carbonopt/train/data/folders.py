"""The splits of a data set that the datasets library reads.

The data set is a hub's, a local folder, or what `save_to_disk` wrote.

In a local folder the library looks for the names of splits in whole paths. Pictures of a class
named dev would then be in the validation split as well, and of many photos only my-test.png would
be read. Here the splits are the folders directly below the data set's folder, or they are named by
the files in it, and nothing further below matters.
"""

import glob
import itertools
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
from datasets.data_files import (
    SPLIT_KEYWORDS,
    DataFilesDict,
    get_data_patterns,
    sanitize_patterns,
)
from datasets.packaged_modules.csv import csv as csv_reader
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.json.json import JsonConfig
from datasets.packaged_modules.parquet.parquet import ParquetConfig
from huggingface_hub.repocard import metadata_load

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.class_names import ClassNames, check_same_names
from carbonopt.train.data.opened_files import check_no_pointer, data_suffix
from carbonopt.train.data.picture_folders import (
    NO_DATA,
    PICTURES,
    SPLIT_WORDS,
    check_pictures,
    members,
    note_unnamed,
)
from carbonopt.train.data.row_layout import check_no_header, has_plain_rows
from carbonopt.train.data.swallowed_rows import SwallowedRows
from carbonopt.train.failures import refused

# pandas warns so where it drops cells. It is the pandas that the library itself needs.
_CELLS_DROPPED = csv_reader.pd.errors.ParserWarning
# The formats of rows with columns, by the files' suffixes.
_FORMATS = {
    ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".parquet": "parquet",
}  # fmt: skip
_TRAINING_WORDS = set(SPLIT_KEYWORDS[datasets.Split.TRAIN])
_EVALUATION_WORDS = SPLIT_WORDS - _TRAINING_WORDS
# The settings of the library's readers, as they are unless a card says otherwise.
_USUAL: dict[type, Any] = {
    CsvConfig: CsvConfig, JsonConfig: JsonConfig, ParquetConfig: ParquetConfig,
}  # fmt: skip
# What the library calls the columns of a Parquet file that pyarrow reads as the library does.
_PLAIN_KINDS = {b"ClassLabel", b"Image", b"LargeList", b"List", b"Sequence", b"Value"}
# The settings of the library's readers that don't say how rows are written, or are judged apart.
_NAMING = ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter")


def loaded_splits(
    dataset: Dataset, cache: str | None
) -> Mapping[str, "datasets.Dataset | tuple[Path, ...]"]:
    """Return the splits by their names.

    Splits of a local folder that are files with columns are those files, for the reader of
    `train_files` to read. The library's reader takes the first cells of a row of CSV for an index
    where the row has too many, and joins rows where a quote doesn't close. It takes texts that look
    like dates for dates, and truth values in one file for the numbers in another.

    Args:
        cache: the folder into which the library writes what it has read; None: its own.

    Raises:
        BadInput: if it is unclear which files of a folder belong to which split, or `config` is
            given for a folder that can't have one.
        datasets.exceptions.DatasetsError, OSError, ValueError: if the library can't read it.
        ConnectionError: if the hub can't be reached.
    """
    folder = Path(str(dataset.name_or_path))
    saved_split, saved_splits = folder / "state.json", folder / "dataset_dict.json"
    if not saved_split.is_file() and not saved_splits.is_file():
        return _read_files(dataset, folder, cache)
    if dataset.config is not None:
        raise BadInput(
            f"dataset.config must be left out for {folder}, which save_to_disk wrote: it has none."
        )
    for path in folder.rglob("*.arrow"):
        check_no_pointer(path)
    loaded = datasets.load_from_disk(str(folder))
    return loaded if saved_splits.is_file() else {dataset.train_split: loaded}


def _read_files(
    dataset: Dataset, folder: Path, cache: str | None
) -> Mapping[str, "datasets.Dataset | tuple[Path, ...]"]:
    """Read the splits from the data set's files.

    Cells of CSV are read as they are written: "NA", "None" and "null" are texts, as they are in
    `train_files`.
    """
    options: dict[str, Any] = {"cache_dir": cache}
    if folder.is_dir() and (patterns := files_of_splits(folder)) is not None:
        options["data_files"] = patterns
    builder = datasets.load_dataset_builder(dataset.name_or_path, dataset.config, **options)
    if folder.is_dir():
        for path in itertools.chain(*builder.config.data_files.values()):
            check_no_pointer(Path(path))
    if folder.is_dir() and not _tells_its_files(folder / "README.md"):
        files = {str(split): list(map(Path, of)) for split, of in builder.config.data_files.items()}
        read = dict.fromkeys(itertools.chain(*files.values()))
        # The library names files by the folder as it was given, or by the one that it links to.
        given = folder.absolute()
        base = given if all(path.is_relative_to(given) for path in read) else folder.resolve()
        _check_links(base, read, options.get("data_files"))
        _check_formats(base, read, options.get("data_files"))
        if list(options.get("data_files", ())) == ["train"]:
            _check_names(base, read)
        if isinstance(builder, ImageFolder):
            check_pictures(base, files)
    if folder.is_dir() and (plain := _plain_files(builder)) is not None:
        return plain
    if not isinstance(builder.config, CsvConfig):
        builder.download_and_prepare()
        loaded = dict(builder.as_dataset())
        if folder.is_dir():
            # The library gives all files the names of classes of the first one.
            for split, rows in loaded.items():
                files_of_split = map(Path, builder.config.data_files[split])
                check_same_names(files_of_split, dataset.columns, library_names(rows))
        if folder.is_dir() and isinstance(builder, ImageFolder):
            for split, rows in loaded.items():
                note_unnamed(folder, split, builder.config.data_files[split], len(rows))
        return loaded
    return _read_tables(dataset, {**options, "index_col": builder.config.index_col})


def library_names(rows: datasets.Dataset) -> ClassNames:
    """Return the names of classes that the library has for the numbers in a split's columns."""
    return {
        column: list(feature.names)
        for column, feature in rows.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }


def _read_tables(dataset: Dataset, options: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Let the library read a hub's CSV, or a folder's whose card says how it is written.

    Raises:
        BadInput: if a row has more cells than there are columns, or has joined others.
    """
    name = f"the data set {dataset.name_or_path!r}"
    if options["index_col"] is None:
        # Otherwise pandas takes the first cells for an index where a row has too many.
        options = {**options, "index_col": False}
    builder = datasets.load_dataset_builder(
        dataset.name_or_path, dataset.config, keep_default_na=False, **options
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", _CELLS_DROPPED)
            builder.download_and_prepare()
    except datasets.exceptions.DatasetGenerationError as error:
        if not isinstance(error.__cause__, _CELLS_DROPPED):
            raise
        raise BadInput(
            f"{name}: a row must not have more cells than there are columns, but one has; quote"
            " commas in it."
        ) from error
    splits = dict(builder.as_dataset())
    for split, rows in splits.items():
        _check_lines(rows, builder.config.sep, f"{name}, split {split},")
    return splits


def _check_links(
    folder: Path, read: Collection[Path], patterns: dict[str, list[str]] | None
) -> None:
    """Check that the library has found the files in linked folders.

    Args:
        folder: the data set's folder.
        read: the files that it has found.
        patterns: those by which it looked for them; None: its own.

    Raises:
        BadInput: if it hasn't.
    """
    suffixes = {path.suffix.lower() for path in read}
    if patterns is None and any(map(_names_a_split, read)):
        return  # the names of tables say their splits: a linked folder is no part of the data
    for link in _linked_folders(folder):
        for path in _files_below(link):
            if path.suffix.lower() in suffixes and path not in read:
                raise BadInput(
                    f"{folder}: files in the linked folder {link.name}, such as {path.name}, are"
                    " not found here; put the folder itself in the place of the link."
                )


def _check_formats(
    folder: Path, read: Collection[Path], patterns: dict[str, list[str]] | None
) -> None:
    """Check that no tables are left out because others have another format.

    Args:
        folder: the data set's folder.
        read: the files that the library has found.
        patterns: those by which it looked for them; None: its own.

    Raises:
        BadInput: if there are such tables.
    """
    if not {path.suffix.lower() for path in read} <= {*_FORMATS, ".gz"}:
        return  # a folder of pictures may hold tables, which are about them
    matched = DataFilesDict.from_patterns(
        sanitize_patterns(patterns or get_data_patterns(str(folder))),
        base_path=str(folder),
        allowed_extensions=list(_FORMATS),
    )
    beside = map(Path, itertools.chain(*matched.values()))
    # JSON that is neither read nor named as a split may hold anything.
    tables = [path for path in beside if data_suffix(path) != ".json" or _names_a_split(path)]
    of_format = {_FORMATS.get(data_suffix(path)): path for path in (*read, *tables)}
    if len(of_format) > 1:
        raise BadInput(
            f"{folder} must hold tables in one format, but has"
            f" {' beside '.join(path.name for path in of_format.values())}; convert or move them."
        )


def _check_names(folder: Path, read: Collection[Path]) -> None:
    """Check that files for evaluation are not read as training data, all files being these.

    Pictures' own names say nothing, nor do the names of classes.

    Raises:
        BadInput: if names of tables, or within archives, speak of training and of evaluation.
    """
    found: dict[bool, Path] = {}  # by whether it is for training
    for path in itertools.chain(*map(members, read)):
        name = path.relative_to(folder)
        is_picture = path.suffix.lower() in PICTURES
        words = _words(name.parent if is_picture else name)
        if words & _EVALUATION_WORDS and not words & _TRAINING_WORDS:
            found.setdefault(False, name)
        elif words & _TRAINING_WORDS and not (is_picture and path in read):
            found.setdefault(True, name)
    if len(found) == 2:
        common = Path(os.path.commonpath(found.values()))
        firsts = [path.relative_to(common).parts[0] for path in found.values()]
        instead = "write train and validation in lower case, and unpack archives"
        if common.parts and (folder / common).is_dir() and all(map(_has_split_word, firsts)):
            instead = f"give the folder that holds them, {folder / common}"
        raise BadInput(
            f"{folder} must name its splits so that they are found, but {found[False]} would be for"
            f" training as {found[True]} is; {instead}."
        )


def evaluation_name(folder: Path) -> Path | None:
    """Return the first data file of a folder, below it, whose name speaks of evaluation.

    Returns:
        None: there is none, or the data set's card names its files.
    """
    if _tells_its_files(folder / "README.md"):
        return None
    data = {*PICTURES, *_FORMATS}
    files = itertools.chain(*map(members, _files_below(folder)))
    names = (path.relative_to(folder) for path in files if data_suffix(path) in data)
    return next((name for name in names if _words(name) & _EVALUATION_WORDS), None)


def _words(name: Path) -> set[str]:
    """Return the words of a path in lower case."""
    return set(re.split(r"[-._ 0-9/]", name.as_posix().lower()))


def _plain_files(builder: datasets.DatasetBuilder) -> dict[str, tuple[Path, ...]] | None:
    """Return each split's files that the reader of `train_files` can read.

    Returns:
        None: another format, compression or archive is among them, the data set's card says how to
        read them.
    """
    usual = _USUAL.get(type(builder.config))
    if usual is None or builder.info.features is not None:
        return None
    given, by_default = (
        {key: value for key, value in vars(config).items() if key not in _NAMING}
        for config in (builder.config, usual())
    )
    splits = {
        str(split): tuple(map(Path, files)) for split, files in builder.config.data_files.items()
    }
    paths = [path for files in splits.values() for path in files]
    suffixes = set(map(data_suffix, paths))
    if given != by_default or not suffixes <= set(_FORMATS):
        return None
    if isinstance(builder.config, CsvConfig):
        # A folder of both is read with the separator of the kind that has more files.
        separators = {"\t" if suffix == ".tsv" else "," for suffix in suffixes}
        return splits if builder.config.sep in separators else None
    of_format = _has_plain_columns if suffixes == {".parquet"} else has_plain_rows
    return splits if all(map(of_format, paths)) else None


def _has_plain_columns(path: Path) -> bool:
    """Return whether a Parquet file's columns are what they seem without the datasets library.

    The library writes into its files what their columns mean, such as sounds.
    """
    with refused(f"the data file {path} must be Parquet, but isn't: {{}}.", pyarrow.ArrowException):
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
    kinds = set(re.findall(rb'"_type": "(\w+)"', metadata.get(b"huggingface", b"")))
    return kinds <= _PLAIN_KINDS


def _check_lines(rows: datasets.Dataset, delimiter: str, name: str) -> None:
    """Check that no row of a table repeats its column names, and no cell has swallowed rows.

    Raises:
        BadInput: if one does.
    """
    swallowed = SwallowedRows(rows.column_names, delimiter)
    for number, row in enumerate(rows, start=1):
        cells = [value if isinstance(value, str) else "" for value in row.values()]
        check_no_header(cells, rows.column_names, f"{name} row {number}")
        swallowed.look_at(cells, f"{name} row {number}")
    swallowed.finish(name)


def files_of_splits(folder: Path) -> dict[str, list[str]] | None:
    """Return the patterns of each split's files, or None where the datasets library may find them.

    The library finds them by the folder's own README.md, or by the names of the files that lie in
    it or in its folder `data`.

    Raises:
        BadInput: if two folders are of one split, or folders of data lie beside those of splits.
        ValueError, yaml.YAMLError: if README.md can't be read.
    """
    if _tells_its_files(folder / "README.md"):
        return None
    links = _linked_folders(folder)
    shown = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_"))]
    folders = [path for path in shown if path.is_dir()]
    splits = _split_folders(folders)
    if splits:
        others = [path for path in folders if path not in splits.values()]
        _check_others(folder, list(splits.values()), others)
        return {
            split: [
                f"{path.name}/**",
                *_patterns(folder, [link for link in links if path in link.parents]),
            ]
            for split, path in splits.items()
        }
    if any(_names_a_split(path) for path in shown) or [path.name for path in folders] == ["data"]:
        return None
    return {"train": ["**", *_patterns(folder, links)]}


def _patterns(folder: Path, links: Iterable[Path]) -> list[str]:
    """Return patterns of the files in linked folders, which the library's `**` doesn't follow."""
    return [f"{glob.escape(link.relative_to(folder).as_posix())}/**" for link in links]


def _linked_folders(folder: Path) -> list[Path]:
    """Return all folders below a folder that are links, also those within linked ones.

    A link to a folder in which it lies is left out, since that is read anyway.

    Raises:
        BadInput: if a link of a data file or a folder leads nowhere.
    """
    links = []
    for place, folders, files in os.walk(folder, followlinks=True):
        # The library leaves these out.
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        # Of the very many files that there may be, only links are looked at.
        with os.scandir(place) as entries:
            linked = {entry.name for entry in entries if entry.is_symlink()}
        for path in (Path(place, name) for name in linked.intersection(files)):
            # Without a suffix it may be meant to be a folder.
            is_data = path.suffix.lower() in {"", *PICTURES} or data_suffix(path) in _FORMATS
            if is_data and not path.name.startswith(".") and not path.exists():
                raise BadInput(
                    f"the link {path} must lead somewhere, but doesn't; mend or remove it."
                )
        for path in [Path(place, name) for name in folders if name in linked]:
            target = path.resolve()
            above = (path.parents[n] for n in range(len(path.relative_to(folder).parts)))
            if any(parent.resolve().is_relative_to(target) for parent in above):
                folders.remove(path.name)  # otherwise it would be walked for ever
            else:
                links.append(path)
    return links


def _split_folders(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the folders that hold a split, by the split that their name means to the library."""
    splits: dict[str, Path] = {}
    for path in folders:
        for split, words in SPLIT_KEYWORDS.items():
            if path.name not in words:
                continue
            if str(split) in splits:
                both = f"{splits[str(split)].name} and {path.name} are both {split}"
                raise BadInput(
                    f"{path.parent} must have one folder for each split, but {both}; rename one."
                )
            splits[str(split)] = path
    return splits


def _check_others(folder: Path, splits: Sequence[Path], others: Sequence[Path]) -> None:
    """Check that no other folder holds the same kind of files as the folders of splits.

    Such folders are classes, most likely, one of which has the name of a split.

    Raises:
        BadInput: if one does.
    """
    held = {suffix for path in splits for suffix in _suffixes(path)}
    beside = [path.name for path in others if held & _suffixes(path)]
    if beside:
        raise BadInput(
            f"{folder} must hold either folders of splits (train, test) or folders of classes, but"
            f" has {', '.join(beside)} beside {', '.join(path.name for path in splits)}; put"
            " classes into a folder train, or rename."
        )


def _names_a_split(path: Path) -> bool:
    """Return whether a file's name says its split, as train-00000-of-00001.parquet does.

    A picture's name doesn't.
    """
    if not path.is_file() or path.suffix.lower() in PICTURES:
        return False
    return _has_split_word(path.name)


def _has_split_word(name: str) -> bool:
    """Return whether the name of a file or folder has the name of a split as a word."""
    return not SPLIT_WORDS.isdisjoint(re.split(r"[-._ 0-9]", name))


def _tells_its_files(readme: Path) -> bool:
    """Return whether a data set's card names its files, as cards on the hub do."""
    return readme.is_file() and "configs" in (metadata_load(readme) or {})


def _suffixes(folder: Path) -> set[str]:
    return {path.suffix.lower() for path in _files_below(folder)} - NO_DATA


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that the library reads, which are those not hidden."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))
