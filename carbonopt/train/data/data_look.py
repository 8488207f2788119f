"""A first look at a user's data, for the study file that `carbonopt init` proposes.

It finds the files of a folder, their columns, and what is in the first rows.
"""

import gzip
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import is_file, is_folder, is_there, user_path
from carbonopt.core.refusals import hint
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.labels import check_classes, label_text
from carbonopt.train.data.messages import read_messages
from carbonopt.train.data.opened_files import data_suffix, readable
from carbonopt.train.data.row_checks import FirstRows, most_tokens
from carbonopt.train.data.rows import (
    READERS,
    Row,
    column_names,
    file_rows,
    unread_columns,
)
from carbonopt.train.data.spellings import check_spellings
from carbonopt.train.data.text import NO_TEXT

MOST_ROWS = 10_000  # rows of a data set that are looked at
_MOST_BYTES = 2**22  # of a text file
_MOST_PICTURES = 100_000
_FIRST_FILES = 20  # of a folder, by which it is told whether it holds pictures of a class
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
_TRAIN = ("train", "training")
# The words by which files and folders name a split, by the split's name in the datasets library.
_EVALUATION = {
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
HUB_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]*/\w[\w.-]*")
_TEXT = ".txt"
RoleKind = Literal["text", "messages", "label", "image"]


@dataclass(frozen=True)
class Role:
    """A column that a task reads."""

    key: str  # its key in the study file
    kind: RoleKind
    names: tuple[str, ...]  # the usual names of such a column, the likeliest first
    required: bool = True


# The share of the rows that is evaluated where no file is, since init writes no other.
_EVAL_FRACTION: float = Dataset.model_fields["eval_fraction"].default
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_PROMPT = Role("prompt_column", "text", _PROMPTS)
_RESPONSE = Role(
    "response_column", "text", ("response", "completion", "output", "answer", "target", "chosen")
)
_PAIRS = (
    Role("prompt_column", "text", _PROMPTS, required=False),
    Role("chosen_column", "text", ("chosen", "preferred", "better", "accepted")),
    Role("rejected_column", "text", ("rejected", "worse", "dispreferred")),
)
_MESSAGES = Role(
    "messages_column", "messages", ("messages", "conversations", "conversation", "chat")
)
_IMAGE = Role("image_column", "image", ("image", "img", "picture", "pixels"))
_LABEL = Role("label_column", "label", ("label", "labels", "class", "category", "intent", "target"))
_OUTPUTS = (_RESPONSE, *_PAIRS[1:], _LABEL)
_TEXTS = ("text", "content", "document", "sentence", "body", "review")
_CHATS = ("sft", "reward", "dpo", "rlhf")  # tasks whose columns of texts may hold lists of messages
_OF_TASK: dict[str, tuple[Role, ...]] = {
    "causal_lm": (Role("text_column", "text", _TEXTS),),
    "sft": (_PROMPT, _RESPONSE),
    "reward": _PAIRS,
    "dpo": _PAIRS,
    "rlhf": (_PROMPT,),
    "classification": (Role("text_column", "text", (*_TEXTS, *_PROMPTS)), _LABEL),
    "seq2seq": (
        Role("source_column", "text", ("source", "question", "input", "document", "text")),
        Role("target_column", "text", ("target", "sql", "query", "output", "answer", "summary")),
    ),
}


class ColumnUnknown(BadInput):
    """No column has one of the names that are usual for a role, so the user has to say which."""

    def __init__(self, role: Role, columns: Sequence[str]) -> None:
        self.role, self.columns = role, tuple(columns)
        among = ", ".join(map(shortened, columns)) or "none"
        other = next((mark for mark in ";|\t" if len(columns) == 1 and mark in columns[0]), None)
        separated = "" if other is None else f" Separate them by commas instead of {other!r}."
        super().__init__(
            f"--column {role.key}=NAME is missing: the data has no column called"
            f" {' or '.join(role.names)}; its columns are {among}.{separated}"
        )


@dataclass(frozen=True)
class DataSource:
    """A data set that has been found, before its rows are read."""

    # keys of `workload.dataset` that say where it is, with paths as absolute paths
    keys: dict[str, Any]
    train: tuple[Path, ...] = ()
    evaluation: tuple[Path, ...] = ()
    columns: tuple[str, ...] | None = None  # None: it has none, or they are not known
    classes: tuple[str, ...] = ()  # of a folder of pictures: each picture's class

    @property
    def is_plain_text(self) -> bool:
        return bool(self.train) and self.columns is None


@dataclass(frozen=True)
class DataLook:
    """The contents of a data set, as far as it has been looked at."""

    columns: dict[str, str | None] = field(default_factory=dict)  # by their keys
    rows: int | None = None  # rows that were read; None: it has none, or is not read
    is_whole: bool = True  # False: there are more
    characters: int | None = None  # of all texts that were read
    # the most tokens that all texts for training can be; None: not known, or not of causal_lm
    most_tokens: int | None = None
    long_row: int | None = None  # characters of a row; nine of ten rows are no longer
    classes: dict[str, int] = field(default_factory=dict)  # rows by class
    has_messages: bool = (
        False  # True if its texts are lists of messages, which need a chat template
    )
    unread: tuple[str, ...] = ()  # columns with text that the task doesn't read


def find_data(answer: str, builtins: Sequence[str]) -> DataSource:
    """Find the data set that a user means: a file, a folder, a built-in one or a hub's.

    Args:
        answer: the user's words.
        builtins: the names of the task's built-in data sets.

    Raises:
        BadInput: if there is no such data set, or it holds nothing to train on.
    """
    path = user_path(answer, "--data")
    if answer in builtins and not is_there(path):
        return DataSource({"builtin": answer})
    if is_folder(path):
        return _folder(path.absolute())
    if is_file(path):
        beside = _evaluation_beside(path.absolute())
        return _files((path.absolute(),), beside)
    is_hubs = HUB_NAME.fullmatch(answer) and data_suffix(path) not in (*READERS, _TEXT)
    if is_there(path) or not is_hubs:
        known = f" or {', '.join(builtins)}" if builtins else ""
        near = f"; {hint(answer, builtins)}" if builtins else ""
        raise BadInput(
            f"--data must be a file, a folder, OWNER/NAME of the Hugging Face hub{known}, but"
            f" {shortened(answer)} is none{near}"
        )
    return DataSource({"name_or_path": answer})


def data_files_in(folder: Path) -> list[Path]:
    """Return the data files in a folder, those for training first; none if it can't be read."""
    if not is_folder(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return []
    files = [path for path in sorted(folder.iterdir()) if data_suffix(path) in (*READERS, _TEXT)]
    kept = [path for path in files if is_file(path) and _split_of(path.name) in ("train", None)]
    return sorted(kept, key=lambda path: _split_of(path.name) is None)


def picture_folder_in(folder: Path) -> Path | None:
    """Return a folder with a folder of pictures for each class, and no other folders in it.

    It is the given folder or the first of those in it; None: there is none, or it can't be read.
    """
    return next(filter(_has_classes, (folder, *_folders_in(folder))), None)


def _has_classes(folder: Path) -> bool:
    """Return whether a folder has a folder for each of two classes, or for each split."""
    folders = _folders_in(folder)
    train = next((path for path in folders if _split_of(path.name) == "train"), None)
    of_classes = folders if train is None else _folders_in(train)
    return len(of_classes) > 1 and all(map(_is_class, of_classes))


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden; none if it can't be read."""
    if not is_folder(folder) or not os.access(folder, os.R_OK | os.X_OK):
        return []
    paths = (path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_")))
    return [path for path in paths if is_folder(path)]


def _is_class(folder: Path) -> bool:
    """Return whether the first files of a folder are pictures; it has no folders then."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False
    first = list(itertools.islice(folder.iterdir(), _FIRST_FILES))
    shown = [path for path in first if not path.name.startswith(".")]
    return bool(shown) and all(path.suffix.lower() in _PICTURES for path in shown)


def likely_task(source: DataSource) -> str | None:
    """Return the first task whose usual columns a data set has; None: it has those of none."""
    has = {name.lower() for name in source.columns or ()}
    if source.classes or (has & set(_IMAGE.names) and has & set(_LABEL.names)):
        return "classification"
    if has & set(_MESSAGES.names):
        return "sft"
    for task in ("dpo", "classification", "sft", "seq2seq", "causal_lm"):
        required = [role for role in _OF_TASK[task] if role.required]
        if all(has & set(role.names) for role in required):
            return task
    return None


def _files(train: tuple[Path, ...], evaluation: tuple[Path, ...]) -> DataSource:
    suffixes = {data_suffix(path) in READERS for path in train}
    columns = column_names(train[0]) if suffixes == {True} else None
    keys: dict[str, Any] = {"train_files": list(map(str, train))}
    if evaluation:
        keys["eval_files"] = list(map(str, evaluation))
    return DataSource(keys, train, evaluation, columns)


def _split_of(name: str) -> str | None:
    """Return the split that the words of a name say: train, validation or test."""
    words = set(re.split(r"[-._ 0-9]+", name.lower()))
    if words & set(_TRAIN):
        return "train"
    return next((split for split, known in _EVALUATION.items() if words & set(known)), None)


def _evaluation_beside(path: Path) -> tuple[Path, ...]:
    """Return the file beside a training file that is named as its evaluation, if there is one."""
    words = [word for word in _TRAIN if re.search(rf"\b{word}\b", path.name)]
    for word in words:
        for known in itertools.chain(*_EVALUATION.values()):
            beside = path.with_name(re.sub(rf"\b{word}\b", known, path.name))
            if is_file(beside):
                return (beside,)
    return ()


def _folder(folder: Path) -> DataSource:
    try:
        shown = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_"))]
    except OSError as error:
        raise BadInput(f"--data {folder} can't be read: {error.strerror}.") from error
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return DataSource({"name_or_path": str(folder)}, columns=_saved_columns(folder))
    files = [path for path in shown if path.is_file()]
    # A text beside folders of pictures describes them.
    for suffix in READERS if _has_classes(folder) else (*READERS, _TEXT):
        alike = [path for path in files if data_suffix(path) == suffix]
        train = [path for path in alike if _split_of(path.name) == "train"]
        evaluation = next((named for split in _EVALUATION if (named := _named(alike, split))), [])
        of_no_split = [path for path in alike if _split_of(path.name) is None]
        if train or of_no_split:
            return _files(tuple(train or of_no_split), tuple(evaluation))
    folders = [path for path in shown if path.is_dir()]
    return _pictures(folder, folders)


def _named(files: Sequence[Path], split: str) -> list[Path]:
    return [path for path in files if _split_of(path.name) == split]


def _saved_columns(folder: Path) -> tuple[str, ...] | None:
    """Return the columns of a data set that `save_to_disk` wrote; None where it doesn't say."""
    descriptions = sorted(folder.glob("dataset_info.json")) or sorted(
        folder.glob("*/dataset_info.json")
    )
    for path in descriptions:
        with readable(path):
            try:
                info = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise BadInput(f"{path} must be JSON, but isn't: {error}.") from error
        features = info.get("features") if isinstance(info, dict) else None
        if isinstance(features, dict):
            return tuple(map(str, features))
    return None


def _pictures(folder: Path, folders: Sequence[Path]) -> DataSource:
    """Return a folder of pictures, whose classes are its folders, or those of its splits."""
    splits = {path.name: path for path in folders if _split_of(path.name)}
    train = [path for name, path in splits.items() if _split_of(name) == "train"]
    of_classes = [path for path in train[0].iterdir() if path.is_dir()] if train else folders
    classes = _classes_of(of_classes)
    if not classes:
        raise BadInput(
            f"--data {folder} must hold {', '.join((*READERS, _TEXT))} files, or folders with the"
            " pictures of each class, but holds neither; give a file."
        )
    held_out = [split for split in _EVALUATION if any(_split_of(name) == split for name in splits)]
    evaluated = (path for name, path in splits.items() if _split_of(name) in held_out[:1])
    for path in evaluated if train else ():
        _check_classes_known(path, set(classes))
    keys = {"name_or_path": str(folder), "image_column": "image"}
    if held_out[:1] != ["validation"]:
        keys["eval_split"] = held_out[0] if held_out else "train"
    return DataSource(keys, classes=tuple(classes), columns=("image", "label"))


def _classes_of(folders: Sequence[Path]) -> list[str]:
    """Return the class of each picture in folders of classes."""
    classes = []
    for path in sorted(folders):
        pictures = (file for file in path.rglob("*") if file.suffix.lower() in _PICTURES)
        classes += [path.name for _ in itertools.islice(pictures, _MOST_PICTURES)]
    return classes


def _check_classes_known(split: Path, classes: Collection[str]) -> None:
    """Refuse a split's folder for evaluation with a class that the training data lacks."""
    for name in _classes_of([path for path in split.iterdir() if path.is_dir()]):
        if name not in classes:
            raise BadInput(
                f"--data: {split} must have the training data's classes alone, but has {name!r};"
                f" they are {', '.join(sorted(classes))}."
            )


def choose_columns(
    task: str, source: DataSource, given: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the name of each column that the task reads, by its key.

    Args:
        given: the columns that the user has named, by their keys.

    Raises:
        ColumnUnknown: if a column has to be named.
        BadInput: if the user named a key that the task lacks, or a column that the data lacks.
    """
    roles = _roles(task, source.columns or (), given)
    for key in given:
        if key not in {role.key for role in roles}:
            known = [role.key for role in roles]
            raise BadInput(
                f"--column: the task {task} reads no {shortened(key)}; {hint(key, known)}"
            )
    if source.is_plain_text and task != "causal_lm":
        raise BadInput(
            f"--data for the task {task} must be one of {', '.join(READERS)}, which have columns,"
            f" but {source.train[0]} is read as plain text; convert it."
        )
    if source.columns is None:
        if given and (source.is_plain_text or "builtin" in source.keys):
            raise BadInput(
                "--column goes with data that has columns, but this has none; leave it out."
            )
        return dict(given)
    if len(roles) == 1 and len(source.columns) == 1 and not given:
        return {roles[0].key: source.columns[0]}
    return {role.key: _column(role, source.columns, given) for role in roles}


def _roles(task: str, columns: Sequence[str], given: Mapping[str, str]) -> tuple[Role, ...]:
    roles = _OF_TASK[task]
    has = {name.lower() for name in columns}
    if task == "sft":
        # Prompts and responses are meant where both are there.
        has_both = all(has & set(role.names) for role in roles)
        chats = not given and not has_both and bool(has & set(_MESSAGES.names))
        return (_MESSAGES,) if chats or _MESSAGES.key in given else roles
    if task == "classification":
        pictures = "text_column" not in given and bool(has & set(_IMAGE.names))
        return (_IMAGE, _LABEL) if pictures or _IMAGE.key in given else roles
    return roles


def _column(role: Role, columns: Sequence[str], given: Mapping[str, str]) -> str | None:
    if role.key in given:
        name = given[role.key]
        if name not in columns:
            raise BadInput(
                f"--column {role.key}={name}: the data has no such column; {hint(name, columns)}"
            )
        return name
    for known in role.names:
        alike = [name for name in columns if name.lower() == known]
        if alike:
            return alike[0]
    if not role.required:
        return None
    raise ColumnUnknown(role, columns)


def possible_inputs(
    task: str, source: DataSource, columns: Mapping[str, str | None], given: Collection[str]
) -> tuple[str, list[str]] | None:
    """Return the key of the task's input, and the columns that it could be, the chosen one first.

    These are the columns with its usual names, and those that have several words in a row and no
    usual name of something else, such as a response.

    Args:
        columns: the columns that are chosen, by their keys.
        given: the keys whose columns the user has named.

    Returns:
        None: it is one column alone, the user has named it, or the data's rows are not at hand.

    Raises:
        BadInput: if the rows can't be read.
    """
    role, *others = _roles(task, source.columns or (), _given(columns))
    chosen = columns.get(role.key)
    if role.kind != "text" or role.key in given or chosen is None or source.is_plain_text:
        return None
    unread = unread_columns(source.train, _given(columns).values())
    elsewhere = {name for other in (*others, *_OUTPUTS) for name in other.names}
    possible = [
        name
        for name, has_words in unread.items()
        if name.lower() in role.names or (has_words and name.lower() not in elsewhere)
    ]
    return (role.key, [chosen, *possible]) if possible else None


def look_at(task: str, source: DataSource, columns: dict[str, str | None]) -> DataLook:
    """Read the first rows of a data set.

    Raises:
        BadInput: if they can't be read, or hold other values than the task needs.
    """
    if source.classes:
        pictures = dict(Counter(source.classes))
        folders = [Row({}, f"the folder {name!r}") for name in pictures]
        check_spellings(list(pictures), folders, "label")
        splits = source.keys.get("eval_split") == "train"
        check_classes(pictures, "label", _EVAL_FRACTION if splits else None)
        return DataLook(columns, rows=len(source.classes), classes=pictures)
    if source.is_plain_text:
        texts = [_text_of(path) for path in source.train]
        for path in source.evaluation:
            _text_of(path)
        fraction = None if source.evaluation else _EVAL_FRACTION
        return DataLook(
            columns,
            characters=sum(map(len, texts)),
            most_tokens=most_tokens(texts, fraction),
        )
    if not source.train:
        unread = set(source.columns or ()) - set(columns.values())
        return DataLook(columns, unread=tuple(sorted(unread)))
    names = [name for name in columns.values() if name is not None]
    rows = _first_rows(source.train, names)
    evaluation = _first_rows(source.evaluation, names) if source.evaluation else None
    roles = [
        role
        for role in _roles(task, source.columns or (), _given(columns))
        if columns.get(role.key)
    ]
    may_be_chats = task in _CHATS
    lengths = sorted(_characters(row, roles, columns, may_be_chats) for row in rows)
    for row in evaluation or ():
        _characters(row, roles, columns, may_be_chats)
    is_whole = len(rows) < MOST_ROWS
    FirstRows(rows, evaluation, _EVAL_FRACTION, is_whole).check(task, columns)
    labels = [label_text(row, str(columns[_LABEL.key])) for row in rows if _LABEL.key in columns]
    most: int | None = None
    if task == "causal_lm" and is_whole:
        fraction = _EVAL_FRACTION if evaluation is None else None
        most = most_tokens([row.text(names[0]) for row in rows], fraction)
    return DataLook(
        columns,
        rows=len(rows),
        is_whole=is_whole,
        characters=sum(lengths),
        most_tokens=most,
        long_row=lengths[len(lengths) * 9 // 10],
        classes=dict(Counter(labels)),
        has_messages=any(isinstance(value, list) for value in rows[0].values.values()),
        unread=tuple(unread_columns(source.train, names)),
    )


def _first_rows(paths: Sequence[Path], columns: Sequence[str]) -> list[Row]:
    """Return the first rows of some files.

    Raises:
        BadInput: if there are none, or they can't be read.
    """
    every = itertools.chain.from_iterable(file_rows(path, columns) for path in paths)
    rows = list(itertools.islice(every, MOST_ROWS))
    if not rows:
        raise BadInput(f"the data file {paths[0]} must have rows in it, but is empty.")
    return rows


def _given(columns: Mapping[str, str | None]) -> dict[str, str]:
    return {key: name for key, name in columns.items() if name is not None}


def _text_of(path: Path) -> str:
    """Return the beginning of a text file.

    Raises:
        BadInput: if it is no text.
    """
    if data_suffix(path) in NO_TEXT:
        raise BadInput(
            f"the data file {path} must be text or one of {', '.join(READERS)}; convert it."
        )
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with readable(path):
        with opened(path, "rb") as file:
            beginning = bytes(file.read(_MOST_BYTES))
        # A character may be cut at the end of what was read.
        text = beginning.decode(
            "utf-8-sig", errors="strict" if len(beginning) < _MOST_BYTES else "ignore"
        )
    if "\0" in text:
        raise BadInput(f"the data file {path} must be text, but has NUL characters; convert it.")
    if not text.strip():
        raise BadInput(f"the data file {path} must have text in it, but is empty.")
    return text


def _characters(
    row: Row, roles: Sequence[Role], columns: Mapping[str, str | None], may_be_chats: bool
) -> int:
    """Count the characters of a row's texts.

    Args:
        may_be_chats: whether the values of texts may be lists of messages.

    Raises:
        BadInput: if a value is no text, or no list of messages.
    """
    count = 0
    for role in roles:
        column = str(columns[role.key])
        is_list = isinstance(row.values[column], list)
        if role.kind == "messages" or (role.kind == "text" and may_be_chats and is_list):
            count += _message_characters(row, column)
        elif role.kind == "text":
            count += len(row.text(column))
    return count


def _message_characters(row: Row, column: str) -> int:
    rule = f"column {column!r} must hold lists of messages, each with a role and a content"
    messages = read_messages(row.values[column], rule, row.where)
    return sum(len(message["content"]) for message in messages)
