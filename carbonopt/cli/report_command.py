"""`carbonopt report`: write the report of a study again."""

from pathlib import Path
from typing import Annotated

import typer

from carbonopt.api.report_files import (
    refuse_other_files,
    write_pipeline_report,
    write_study_report,
)
from carbonopt.api.study_folder import pipeline_in, read_study_folder
from carbonopt.cli.options import StorageUrl, StudyDir
from carbonopt.core.files import user_path


def report(
    study_dir: StudyDir,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR2", help="Default: DIR/report.", parser=user_path),
    ] = None,
    storage: StorageUrl = None,
) -> None:
    """Write the report of a study again from its storage."""
    from carbonopt.core.files import PIPELINE_JSON, REPORT_JSON

    if (pipeline := pipeline_in(study_dir, storage)) is not None:
        folder = out if out is not None else pipeline.report
        refuse_other_files(folder, PIPELINE_JSON, "report of a pipeline")
        print(write_pipeline_report(pipeline, folder)[1])
        return
    paths, data = read_study_folder(study_dir, storage)
    folder = out if out is not None else paths.report
    refuse_other_files(folder, REPORT_JSON, "report")
    print(write_study_report(data, paths, folder))
