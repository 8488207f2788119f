"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from carbonopt.core.errors import BadInput


def user_path(text: str) -> Path:
    """Return the path that a user means by a text, with ~ expanded.

    A shell does not expand ~ in --out=~/runs, and nobody dares to remove a folder called ~.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadInput(f"the path {text!r} can't be used: {error}") from error


StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY.yaml", help="The study file.", parser=user_path)
]
StudyDir = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The folder of a study, such as runs/quickstart.", parser=user_path
    ),
]
StorageUrl = Annotated[
    str | None, typer.Option("--storage", metavar="URL", help="SQLAlchemy URL of Optuna's storage.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
