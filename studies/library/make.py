"""Write train.jsonl and eval.jsonl: questions about a library's books, each with its SQL.

    python studies/library/make.py

The rows of studies/library-sql.yaml, always the same ones. They are split by query: no query of the
evaluation rows is one of the training rows, so that a match is composed and not known by heart.
"""

import itertools
import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
SEED = 0
EVALUATION_SHARE = 0.2  # of the queries
TRAINING_QUESTIONS, EVALUATION_QUESTIONS = 3, 2  # for each query

COLUMNS = {"pages": "pages", "year": "year", "price": "price", "copies": "number of copies"}
AGGREGATES = {
    "AVG": ("average", "mean"),
    "MIN": ("lowest", "smallest"),
    "MAX": ("highest", "largest"),
    "SUM": ("total", "sum of the"),
}
FILTERS = {
    "": ("all books", "the books"),
    **{f" WHERE genre = '{genre}'": (f"{genre} books", f"books of the genre {genre}") for genre in
       ("crime", "fantasy", "history", "poetry", "science", "travel")},
    **{f" WHERE language = '{language}'": (f"{language} books", f"books in {language}") for
       language in ("English", "French", "German", "Spanish")},
}  # fmt: skip
ASKED = (
    "What is the {} of {}?",
    "Tell me the {} of {}.",
    "I want to know the {} of {}.",
    "{} of {}?",
)
COUNTED = (
    "How many {} are there?",
    "Count {}.",
    "I want to know how many {} we have.",
    "The number of {}?",
)


def queries() -> dict[str, list[str]]:
    """Return the questions that each query answers."""
    asked = {}
    for condition, books in FILTERS.items():
        asked[f"SELECT COUNT(*) FROM book{condition}"] = [  # noqa: S608
            form.format(named) for form, named in itertools.product(COUNTED, books)
        ]
        for (column, label), (function, words) in itertools.product(
            COLUMNS.items(), AGGREGATES.items()
        ):
            asked[f"SELECT {function}({column}) FROM book{condition}"] = [  # noqa: S608
                form.format(f"{word} {label}", named)
                for form, word, named in itertools.product(ASKED, words, books)
            ]
    return asked


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows for training and for evaluation."""
    draw = np.random.default_rng(SEED)
    asked = queries()
    shuffled = [str(query) for query in draw.permutation(list(asked))]
    cut = round(len(shuffled) * EVALUATION_SHARE)
    parts = []
    for chosen, count in (
        (shuffled[cut:], TRAINING_QUESTIONS),
        (shuffled[:cut], EVALUATION_QUESTIONS),
    ):
        questions = {query: draw.choice(asked[query], count, replace=False) for query in chosen}
        parts.append(
            [{"question": str(text), "sql": query} for query in chosen for text in questions[query]]
        )
    return parts[0], parts[1]


def main() -> None:
    """Write both files beside this one."""
    for name, some in zip(("train", "eval"), rows(), strict=True):
        (FOLDER / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
