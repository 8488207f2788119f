"""`carbonopt export`: print the records of all trials, or the study in a standard's form."""

import sys
from typing import Annotated

import typer

from carbonopt.api.export_forms import (
    CROISSANT,
    FORMATS,
    RECORDS,
    check_form,
    pipeline_text,
    study_texts,
)
from carbonopt.api.study_folder import pipeline_in, pipeline_view, read_study_folder
from carbonopt.cli.exit_codes import check_output
from carbonopt.cli.options import StorageUrl, StudyDir


def export(
    study_dir: StudyDir,
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}."),
    ] = "jsonl",
    data_license: Annotated[
        str | None,
        typer.Option("--license", metavar="LICENSE", help="Croissant, required: the license."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Croissant, required: the tables' page."),
    ] = None,
    creator: Annotated[
        str | None,
        typer.Option(
            "--creator", metavar="NAME", help="Croissant, required: person, or Organization: X."
        ),
    ] = None,
    storage: StorageUrl = None,
) -> None:
    """Print one record per trial, whatever its state, or the study in a standard's form."""
    asked = {"--license": data_license, "--url": url, "--creator": creator}
    pipeline = pipeline_in(study_dir, storage)
    if pipeline is None or form != CROISSANT:  # a pipeline has no tables that it could describe
        check_form(form, asked)
    check_output()
    if pipeline is not None:
        view = pipeline_view(pipeline)
        text = pipeline_text(view, form)
        _say_draft(view.summary.ended)
        sys.stdout.write(text)
        return
    _, data = read_study_folder(study_dir, storage)
    publication = {option.removeprefix("--"): value for option, value in asked.items()}
    text = next(iter(study_texts(data, form, publication).values()))
    if form not in RECORDS:
        _say_draft(data.ended is not None)
    sys.stdout.write(text)


def _say_draft(ended: bool) -> None:
    """Say on standard error that an export is a draft, unless the study has ended."""
    from carbonopt.report.standards import DRAFT

    if not ended:
        print(f"carbonopt: {DRAFT}", file=sys.stderr)
