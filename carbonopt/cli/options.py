"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from carbonopt.core.files import user_path

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
