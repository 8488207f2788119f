"""Folders of pictures, where the folder of a picture names its class.

The datasets library takes the folder in which a picture lies for its class, however deep that is,
and leaves out what it can't read or what a metadata file doesn't name, without a word.
"""

import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from datasets.data_files import SPLIT_KEYWORDS
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text
from carbonopt.train.data.data_notes import note

PICTURES = set(ImageFolder.EXTENSIONS)
SPLIT_WORDS = set().union(*SPLIT_KEYWORDS.values())  # the names that mean a split
# Suffixes of files without data, which may lie beside the files of any folder.
NO_DATA = {"", ".md", ".py", ".yaml", ".yml"}
# Suffixes of files that describe pictures, or that systems write beside them.
_ABOUT_PICTURES = {*NO_DATA, ".csv", ".db", ".html", ".ini", ".json", ".jsonl", ".txt", ".xml"}
_NAMED_ENDINGS = 5  # the most endings that a note names

Splits = Mapping[str, Sequence[Path]]  # each split's files


def check_pictures(folder: Path, splits: Splits) -> None:
    """Check that each picture's folder names its class, and note which files are not read.

    Args:
        folder: the data set's folder.
        splits: the files that the datasets library has found. Without pictures, nothing is checked.

    Raises:
        BadInput: if pictures are not all as many folders deep, or in folders of folders of classes,
            or all in one folder, or in archives; if a folder beside those of the classes has no
            picture that can be read; or if some splits have a table about their pictures and others
            don't.
    """
    pictures = {split: list(_pictures(files)) for split, files in splits.items()}
    shown = [path for paths in pictures.values() for path in paths]
    if not shown:
        return
    with_table = [split for split, files in splits.items() if any(map(_is_metadata, files))]
    if with_table:
        _check_tables(folder, pictures, with_table)
        return
    _check_depths(folder, shown)
    for paths in pictures.values():
        _check_one_level(folder, paths)
    _check_unpacked(pictures)
    _check_unread(folder, shown)


def note_unnamed(folder: Path, split: str, names: Sequence[str], rows: int) -> None:
    """Note for the report how many pictures of a split a metadata file leaves out.

    Args:
        folder: the data set's folder.
        split: the split's name.
        names: the paths of the files that the datasets library has found for the split.
        rows: the number of rows that it has made of them.
    """
    files = list(map(Path, names))
    pictures = sum(1 for _ in _pictures(files))
    tables = [path.name for path in files if _is_metadata(path)]
    if tables and rows < pictures:
        note(
            f"In {folder}, split {split}, {tables[0]} names {rows:,} of"
            f" {count_text(pictures, 'picture')}; the others are not used."
        )


def members(path: Path) -> Iterator[Path]:
    """Yield the paths of the files in a zip archive, below its own; for other files, the file."""
    if path.suffix.lower() != ".zip":
        yield path
        return
    with zipfile.ZipFile(path) as archive:
        names = (name for name in archive.namelist() if not name.endswith("/"))
        yield from (path / name for name in names if not name.startswith("__MACOSX/"))


def _pictures(files: Sequence[Path]) -> Iterator[Path]:
    for file in files:
        yield from (path for path in members(file) if path.suffix.lower() in PICTURES)


def _is_metadata(path: Path) -> bool:
    return any(member.name in ImageFolder.METADATA_FILENAMES for member in members(path))


def _check_tables(folder: Path, pictures: Splits, with_table: Sequence[str]) -> None:
    """Refuse a table about the pictures of some splits alone: the others would have no rows."""
    without = [split for split, paths in pictures.items() if paths and split not in with_table]
    if without:
        raise BadInput(
            f"{folder} must have a metadata file for the pictures of every split, or for none, but"
            f" has one for {', '.join(with_table)} and none for {', '.join(without)}; add it there,"
            " or move it away to have the folders' names for classes."
        )


def _check_unpacked(pictures: Splits) -> None:
    """Refuse pictures in archives, whose folders the library doesn't take for classes."""
    within = (path for paths in pictures.values() for path in paths if not path.is_file())
    if (path := next(within, None)) is not None:
        archive = next(parent for parent in path.parents if parent.is_file())
        raise BadInput(
            f"{archive} must be unpacked, so that the folders of its pictures name their classes,"
            " or hold a metadata file; unpack it into a folder"
            f" {archive.with_suffix('').name}, and move it away."
        )


def _check_depths(folder: Path, pictures: Sequence[Path]) -> None:
    depths = Counter(len(path.relative_to(folder).parts) for path in pictures)
    (usual, _), *others = depths.most_common()
    if others:
        stray = next(path for path in pictures if len(path.relative_to(folder).parts) != usual)
        most = next(path for path in pictures if len(path.relative_to(folder).parts) == usual)
        raise BadInput(
            f"{folder} must have a folder for each class, with pictures alone in it, but has"
            f" {stray.relative_to(folder)} beside {most.relative_to(folder)}; move it."
        )
    if len(classes := {path.parent.name for path in pictures}) == 1:
        raise BadInput(
            f"{folder} must have folders of pictures of two classes at least, but has"
            f" {classes.pop()!r} alone."
        )


def _check_one_level(folder: Path, pictures: Sequence[Path]) -> None:
    """Check that a split's pictures lie in folders side by side.

    Raises:
        BadInput: if they don't: either the outer folders or the inner ones may be meant for
            classes.
    """
    parents = sorted({path.parent for path in pictures})
    if len({path.parent for path in parents}) < 2:
        return
    common = Path(os.path.commonpath(parents))
    outer = {path.relative_to(common).parts[0]: path for path in reversed(parents)}
    inner = {path.name for path in parents}
    one, *others = sorted(outer)
    if any(map(_is_split, inner)):
        instead = f"put the folders of splits above those of classes, as in train/{one}"
    elif any(map(_is_split, outer)):
        instead = "write the names of splits in lower case: train, validation, test"
    else:
        instead = (
            f"if {one} and {others[0]} are classes, move the pictures up into these folders;"
            f" otherwise have one folder for each class, {min(inner)} among them"
        )
    found = " and ".join(str(outer[name].relative_to(folder)) for name in (one, others[0]))
    raise BadInput(
        f"{folder} must have one level of folders, which name the classes, but has {found};"
        f" {instead}."
    )


def _is_split(name: str) -> bool:
    """Return whether a folder's name means a split, in whatever case it is written."""
    return name.lower() in SPLIT_WORDS


def _check_unread(folder: Path, pictures: Sequence[Path]) -> None:
    """Check that each folder beside those of classes has a picture, and note what is left out.

    Raises:
        BadInput: if a folder has files, but none that can be read as a picture, or no file though
            there is no such class.
    """
    read = set(pictures)
    places = {path.parent for path in pictures}
    classes = {place.name for place in places}
    left_out: Counter[str] = Counter()
    for place in _folders_beside(places):
        unread = [path for path in _files_in(place) if path not in read]
        if place in places:
            left_out.update(path.suffix.lower() or path.name for path in unread)
        elif unread or place.name not in classes:
            holds = unread[0].name if unread else "no file"
            raise BadInput(
                f"{folder} must have pictures of every class, but {place.relative_to(folder)} has"
                f" none that can be read: it has {holds}; convert the pictures to PNG or JPEG, or"
                " move the folder away."
            )
    if left_out:
        endings = ", ".join(
            f"{count:,} {ending}" for ending, count in left_out.most_common(_NAMED_ENDINGS)
        )
        note(
            f"In {folder}, {count_text(left_out.total(), 'file')} beside the pictures can't be read"
            f" as pictures and are not used: {endings}."
        )


def _folders_beside(places: set[Path]) -> list[Path]:
    """Return the folders beside those of classes, these included, that may hold pictures.

    A link to a folder in which it lies is none.
    """
    above = {place.parent for place in places}
    beside = (path for parent in above if parent.is_dir() for path in parent.iterdir())
    folders = [path for path in beside if path.is_dir() and not _is_hidden(path)]
    others = {path for path in folders if path not in places and not _is_about_pictures(path)}
    around = {path for path in others if path.parent.resolve().is_relative_to(path.resolve())}
    return sorted({*places.intersection(folders), *(others - around)})


def _is_about_pictures(folder: Path) -> bool:
    """Return whether a folder holds files, all of which describe the pictures of others."""
    suffixes = {path.suffix.lower() for path in folder.rglob("*") if path.is_file()}
    return bool(suffixes) and suffixes <= _ABOUT_PICTURES


def _files_in(folder: Path) -> list[Path]:
    """Return the files in a folder that may be pictures."""
    shown = (
        path
        for path in folder.rglob("*")
        if not any(
            map(_is_hidden, (path, *path.parents[: len(path.relative_to(folder).parts) - 1]))
        )
    )
    return sorted(
        path for path in shown if path.is_file() and path.suffix.lower() not in _ABOUT_PICTURES
    )


def _is_hidden(path: Path) -> bool:
    """Return whether the datasets library leaves a file or folder out by its name."""
    return path.name.startswith((".", "__"))
