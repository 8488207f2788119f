"""Rows with a class label: their classes, and their split into training and evaluation."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from carbonopt.core.errors import BadInput
from carbonopt.spec.base_settings import Name
from carbonopt.spec.workload_settings import Dataset
from carbonopt.train.data.rows import Row, SourceRows, source_rows
from carbonopt.train.data.spellings import as_seen, check_spellings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Labels = npt.NDArray[np.int64]  # [rows], the index of each row's class

_NAMED = 8  # the most labels that an error names
_UNNAMED = re.compile(r"LABEL_\d+")  # what transformers calls a class that nobody has named
_IN_NAME = re.compile(r"\d{1,15}")  # a number in a class's name
_DIGITS_WHITE = 16  # the white of scikit-learn's digits, whose black is 0


class LabelledDataset(Dataset, extra="forbid"):
    """A data set of texts or images, each with its class."""

    builtin: Literal["digits"] | None = None  # scikit-learn's 1,797 images of 8 × 8 pixels
    text_column: Name | None = None
    """The texts' column; `text` unless given."""

    image_column: Name | None = None  # None: the data set has texts
    """The images' column; the data set then is of images, not texts."""

    label_column: Name = "label"
    """The column of the classes."""

    @property
    def has_images(self) -> bool:
        return self.image_column is not None or self.builtin is not None

    @property
    def content_column(self) -> str:
        return self.image_column or self.text_column or ("image" if self.has_images else "text")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.content_column, self.label_column)

    def violations(self) -> dict[str, bool]:
        both = self.text_column is not None and self.image_column is not None
        named = self.text_column is not None or self.image_column is not None
        files = [*(self.train_files or ()), *(self.eval_files or ())]
        no_images = next((file for file in files if not file.lower().endswith(".parquet")), None)
        return {
            **super().violations(),
            "must have text_column or image_column, but has both": both,
            f"builtin: {self.builtin} has no columns to be named": (
                named and self.builtin is not None
            ),
            f"{'image' if self.has_images else 'text'}_column and label_column must differ, but"
            f" both are {self.label_column!r}": self.content_column == self.label_column,
            "image_column goes with a folder, a hub data set or Parquet files, which hold the"
            f" images themselves, but got {no_images}": (
                self.image_column is not None and no_images is not None
            ),
        }


@dataclass(frozen=True)
class LabelledRows:
    rows: list[Row]
    labels: Labels


class Labelled(NamedTuple):
    train: LabelledRows
    evaluation: LabelledRows
    # The training data's classes in order; after `in_model_order`, those of the model's head.
    classes: tuple[str, ...]

    @property
    def head(self) -> dict[str, Any]:
        """The classes, as fields of a model's configuration."""
        of_place = dict(enumerate(self.classes))
        places = {name: place for place, name in of_place.items()}
        # A checkpoint for several labels at once, or for a number, would otherwise pass its problem
        # type on to the saved model, and whoever loads that would get a sigmoid for each class.
        one_of_them = {"problem_type": "single_label_classification"}
        return {
            "num_labels": len(of_place),
            "id2label": of_place,
            "label2id": places,
            **one_of_them,
        }


class Contents(NamedTuple):
    """The inputs made of labelled rows for a model, with the model's configuration."""

    config: "PreTrainedConfig"
    train: dict[str, npt.NDArray[Any]]  # arrays to be saved, the labels among them
    evaluation: dict[str, npt.NDArray[Any]]
    notes: tuple[str, ...] = ()
    train_tokens: int | None = None
    vocab_size: int | None = None


def read_labelled(dataset: LabelledDataset) -> Labelled:
    """Read the whole data set.

    Without rows for evaluation, the last `eval_fraction` of each class is set aside for it, since
    many files have one class after the other.

    Raises:
        BadInput: if a source can't be read, has no such split or column, a row has no label, there
            is only one class, or the evaluation has a class that training lacks.
    """
    columns = dataset.columns
    source = _digits(*columns) if dataset.builtin == "digits" else source_rows(dataset, columns)
    names = source.names.get(dataset.label_column)
    words = [label_text(row, dataset.label_column) for row in source.train]
    evaluated = [label_text(row, dataset.label_column) for row in source.evaluation or ()]
    check_alike(source.train, dataset.label_column)
    rows = [*source.train, *(source.evaluation or ())]
    check_spellings([*words, *evaluated], rows, dataset.label_column)
    fraction = dataset.eval_fraction if source.evaluation is None else None
    check_classes(Counter(words), dataset.label_column, fraction)
    classes = _sorted(set(words), names)
    places = {word: place for place, word in enumerate(classes)}
    labels = np.array([places[word] for word in words], np.int64)
    if source.evaluation is None:
        train, evaluation = _split(source.train, labels, dataset.eval_fraction)
    else:
        train = LabelledRows(source.train, labels)
        evaluation = _evaluation(source.evaluation, evaluated, places, dataset.label_column)
    return Labelled(train, evaluation, tuple(classes))


def in_model_order(
    labelled: Labelled, own: tuple[str, ...] | None
) -> tuple[Labelled, tuple[str, ...]]:
    """Renumber the classes to match the outputs of a pretrained classifier's head.

    Args:
        own: the classes of the head's outputs, in order; None: the model has no head yet, and any
            order will do.

    Returns:
        The labelled rows, and notes for the report on how labels and classes were matched.

    Raises:
        BadInput: if the head has no class for a label, or it can't be told which one.
    """
    if own is None:
        return labelled, ()
    words = labelled.classes
    are_names = not all(_UNNAMED.fullmatch(name) for name in own)
    folded = [as_seen(name).casefold() for name in own]
    notes: tuple[str, ...] = ()
    classes = own
    if set(words) <= set(own):
        places = [own.index(word) for word in words]
    elif len(set(folded)) == len(own) and {as_seen(word).casefold() for word in words} <= set(
        folded
    ):
        places = [folded.index(as_seen(word).casefold()) for word in words]
        notes = (f"The data's labels are the model's classes in another spelling: {listed(own)}.",)
    elif all(word.isdecimal() and int(word) < len(own) for word in words):
        if are_names:
            _check_places(words, own)
        places = [int(word) for word in words]
        meant = ", ".join(f"{word} is {own[int(word)]}" for word in words[:_NAMED])
        notes = (
            (f"The data's numbers are taken for the places of the model's classes: {meant}.",)
            if are_names or "0" not in words
            else ()
        )
    elif not are_names and len(words) == len(own):
        places, classes = list(range(len(own))), words
        order = "they were taken in the order of their names, which may not be that of its training"
        notes = (f"The model does not name its classes; {order}: {listed(words)}.",)
    else:
        word = next((word for word in words if word not in own), words[0])
        rule = f"the model's head must have an output for every label, but has none for {word!r}"
        has = f"its {len(own)} classes are {listed(own)}, the data's {len(words)} {listed(words)}"
        instead = (
            "rename the labels, or give the model without its head, as AutoModel loads and saves it"
        )
        raise BadInput(f"{rule}: {has}; {instead}.")
    renumbered = np.array(places, np.int64)
    train, evaluation = (
        LabelledRows(part.rows, renumbered[part.labels])
        for part in (labelled.train, labelled.evaluation)
    )
    return Labelled(train, evaluation, classes), notes


def _check_places(words: Sequence[str], own: tuple[str, ...]) -> None:
    """Refuse numbers that may be other classes of the head than those at these places.

    Data may count from 1, or mean the numbers in the classes' names: 1 is "1 star", though "2 star"
    is at place 1.
    """
    named = [{int(number) for number in _IN_NAME.findall(name)} for name in own]
    wrong = next((word for word in words if int(word) not in named[int(word)]), None)
    if wrong is None:
        return
    if all(int(word) for word in words):
        why = "no label is 0, so the data may count from 1"
    elif {int(word) for word in words} <= set().union(*named):
        why = "the classes' names have all these numbers, too"
    else:
        return
    raise BadInput(
        "labels that are numbers must be the places of the model's classes, from 0 on, so that"
        f" {wrong} is {own[int(wrong)]!r}, but {why}; write the names of the classes in the data:"
        f" {listed(own)}."
    )


def listed(words: Sequence[str]) -> str:
    """Return labels for a sentence, of many the first ones."""
    return ", ".join(words[:_NAMED]) + (", …" if len(words) > _NAMED else "")


def _digits(image_column: str, label_column: str) -> SourceRows:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / _DIGITS_WHITE)).astype(np.uint8)
    found = zip(pixels, digits.tolist(), strict=True)
    rows = [
        Row({image_column: image, label_column: digit}, "scikit-learn's digits")
        for image, digit in found
    ]
    return SourceRows(rows, None, {})


def check_classes(rows: Mapping[str, int], column: str, fraction: float | None) -> None:
    """Check that there are two classes at least, and rows for the evaluation.

    Args:
        rows: the numbers of training rows by class.
        column: the column of the classes.
        fraction: the share that is set aside for evaluation; None: it has rows of its own.

    Raises:
        BadInput: if there is one class alone, or no class has a row to be set aside.
    """
    if len(rows) < 2:
        only = f"has {next(iter(rows))!r} alone" if rows else "has no rows"
        raise BadInput(
            f"column {column!r} must have two classes at least, but the training data {only}."
        )
    if fraction is not None and max(rows.values()) < 2:
        raise BadInput(
            f"eval_fraction={fraction:g} needs a class with two training rows or more, but every"
            " class has one; give more rows, or rows for evaluation."
        )


def check_known(
    words: Sequence[str], rows: Sequence[Row], classes: Sequence[str], column: str
) -> None:
    """Refuse an evaluation row whose class the training data lacks.

    Args:
        words: the classes of the evaluation rows, in their order.
        classes: the training data's classes, in order.
    """
    known = set(classes)
    for row, word in zip(rows, words, strict=True):
        if word not in known:
            lacks = f"{row.where} has {word!r}, which the training data lacks"
            raise BadInput(
                f"column {column!r} must hold one of the training data's labels, but {lacks}:"
                f" {listed(classes)}."
            )


def filled_text(row: Row, column: str) -> str:
    """Return a row's text; raises BadInput if it is empty."""
    if not (text := row.text(column)).strip():
        raise BadInput(
            f"column {column!r} must hold a text in every row, but that of {row.where} is empty."
        )
    return text


def check_alike(rows: Sequence[Row], column: str) -> None:
    """Refuse whole numbers, words and truth values beside each other.

    1 would be the same class as "1", and true might be either "true" or 1.
    """
    first = {_kind(row.values[column]): row for row in reversed(rows)}
    if len(first) > 1:
        one, other = (
            f"{row.where} has {row.values[column]!r:.40}" for row in list(first.values())[:2]
        )
        raise BadInput(
            f"column {column!r} must hold whole numbers, words or truth values, not several of"
            f" them, but {one} and {other}."
        )


def _kind(value: Any) -> type:
    kinds = (str, bool)
    return next((kind for kind in kinds if isinstance(value, kind)), int)


def label_text(row: Row, column: str) -> str:
    """Return a row's label as text.

    A truth value is true or false, as JSON has it. A float such as 1.0 is the whole number, since
    tables in which a value is missing turn a whole column of numbers into floats. So is a decimal
    number, as databases write them.

    Raises:
        BadInput: if there is none, or it is neither a word nor a whole number or truth value.
    """
    value: Any = row.values[column]
    is_missing = value is None or value == "" or value != value  # NaN alone differs from itself
    if is_missing:
        raise BadInput(
            f"column {column!r} must hold a label in every row, but {row.where} has none."
        )
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if not isinstance(value, int | str):
        must = f"column {column!r} must hold whole numbers, words or truth values"
        raise BadInput(
            f"{must}, but {row.where} has the {type(value).__name__} {value!r:.40}; write a word"
            " for each class."
        )
    return str(value)


def _sorted(words: set[str], names: list[str] | None) -> list[str]:
    """Sort classes in the data set's own order if it has one, else by number or as text."""

    if names is not None:
        places = {name: place for place, name in enumerate(names)}
        return sorted(words, key=lambda word: (places.get(word, len(places)), word))
    if all(re.fullmatch(r"-?\d+", word) for word in words):
        return sorted(words, key=lambda word: (int(word), word))
    return sorted(words)


def _split(
    rows: Sequence[Row], labels: Labels, fraction: float
) -> tuple[LabelledRows, LabelledRows]:
    held_back = np.zeros(len(rows), bool)
    for place in np.unique(labels):
        own = np.flatnonzero(labels == place)
        count = min(max(1, round(len(own) * fraction)), len(own) - 1)
        held_back[own[len(own) - count :]] = True
    parts = [
        LabelledRows([rows[index] for index in np.flatnonzero(chosen).tolist()], labels[chosen])
        for chosen in (~held_back, held_back)
    ]
    return parts[0], parts[1]


def _evaluation(
    rows: list[Row], words: Sequence[str], places: dict[str, int], column: str
) -> LabelledRows:
    if not rows:
        raise BadInput("the evaluation data must have rows in it, but is empty.")
    check_known(words, rows, list(places), column)
    return LabelledRows(rows, np.array([places[word] for word in words], np.int64))
