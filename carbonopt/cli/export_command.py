"""`carbonopt export`: print the records of all trials."""

import json
import sys
from typing import Annotated, Literal

import typer

from carbonopt.cli.exit_codes import check_output
from carbonopt.cli.options import StorageUrl, StudyDir
from carbonopt.cli.reading import pipeline_in, pipeline_view, read_study_folder
from carbonopt.core.errors import BadInput


def export(
    study_dir: StudyDir,
    form: Annotated[
        Literal["jsonl", "csv"], typer.Option("--format", help="One record a trial.")
    ] = "jsonl",
    storage: StorageUrl = None,
) -> None:
    """Print one record per trial, whatever its state."""
    if (pipeline := pipeline_in(study_dir, storage)) is not None:
        folders = ", ".join(folder for folder in pipeline_view(pipeline).studies)
        raise BadInput(
            f"export is of one study, but {study_dir} holds several; give the folder of one:"
            f" {folders}."
        )
    check_output()
    _, data = read_study_folder(study_dir, storage)
    records = [record.as_json() for record in data.records]
    if form == "jsonl":
        sys.stdout.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
    else:
        from carbonopt.report.data_files import csv_text

        sys.stdout.write(csv_text(records))
