"""The splits of a data set that the datasets library reads.

The data set is a hub's, a local folder, or what `save_to_disk` wrote.

In a local folder the library looks for the names of splits in whole paths. Pictures of a class
named dev would then be in the validation split as well, and of many photos only my-test.png would
be read. Here the splits are the folders directly below the data set's folder, or they are named by
the files in it, and nothing further below matters.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.data_files import SPLIT_KEYWORDS
from datasets.packaged_modules.csv.csv import CsvConfig
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub.repocard import metadata_load

from carbonopt.core.errors import BadInput
from carbonopt.spec.workload_settings import Dataset

# Suffixes of files without data, which may lie beside the files of any folder.
_NO_DATA = {"", ".md", ".py", ".yaml", ".yml"}
_PICTURES = set(ImageFolder.EXTENSIONS)


def loaded_splits(dataset: Dataset, cache: str | None) -> Any:
    """Return the splits by their names.

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
    loaded = datasets.load_from_disk(str(folder))
    return loaded if saved_splits.is_file() else {dataset.train_split: loaded}


def _read_files(dataset: Dataset, folder: Path, cache: str | None) -> Any:
    """Read the splits from the data set's files.

    Cells of CSV are read as they are written: "NA", "None" and "null" are texts, as they are in
    `train_files`.
    """
    options: dict[str, Any] = {"cache_dir": cache}
    if folder.is_dir() and (files := files_of_splits(folder)) is not None:
        options["data_files"] = files
    builder = datasets.load_dataset_builder(dataset.name_or_path, dataset.config, **options)
    if isinstance(builder.config, CsvConfig):
        builder = datasets.load_dataset_builder(
            dataset.name_or_path, dataset.config, keep_default_na=False, **options
        )
    builder.download_and_prepare()
    return builder.as_dataset()


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
    shown = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_"))]
    folders = [path for path in shown if path.is_dir()]
    splits = _split_folders(folders)
    if splits:
        others = [path for path in folders if path not in splits.values()]
        _check_others(folder, list(splits.values()), others)
        return {split: [f"{path.name}/**"] for split, path in splits.items()}
    if any(_names_a_split(path) for path in shown) or [path.name for path in folders] == ["data"]:
        return None
    return {"train": ["**"]}


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
    if not path.is_file() or path.suffix.lower() in _PICTURES:
        return False
    words = set(re.split(r"[-._ 0-9]", path.name))
    return any(words & set(keywords) for keywords in SPLIT_KEYWORDS.values())


def _tells_its_files(readme: Path) -> bool:
    """Return whether a data set's card names its files, as cards on the hub do."""
    return readme.is_file() and "configs" in (metadata_load(readme) or {})


def _suffixes(folder: Path) -> set[str]:
    suffixes = {Path(name).suffix.lower() for _, _, names in os.walk(folder) for name in names}
    return suffixes - _NO_DATA
