"""`carbonopt compare`: compare studies of the same task."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from carbonopt.api.report_files import refuse_other_files, write_comparison_page
from carbonopt.api.study_folder import read_study_folder
from carbonopt.cli.exit_codes import check_output
from carbonopt.cli.options import AsJson
from carbonopt.core.errors import BadInput, printable
from carbonopt.core.files import user_path


def compare(
    study_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR DIR ...", help="The folders of two or more studies.", parser=user_path
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR2", help="Also write a page there.", parser=user_path),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare studies of the same task, for example on other machines, models or data."""
    from carbonopt.core.files import COMPARISON_JSON
    from carbonopt.report.comparison_report import StudiesView, compared
    from carbonopt.report.study_view import StudyView

    if out is None or as_json:
        check_output()
    if len({os.path.realpath(folder) for folder in study_dirs}) < max(2, len(study_dirs)):
        given = " ".join(map(str, study_dirs))
        raise BadInput(
            f"compare needs the folders of two or more different studies, but got {given}."
        )
    read = [(folder, read_study_folder(folder, None)[1]) for folder in study_dirs]
    called = Counter(data.config.name for _, data in read)
    names = [
        data.config.name if called[data.config.name] == 1 else f"{data.config.name} ({at})"
        for at, data in read
    ]
    view = StudiesView({name: StudyView(data) for name, (_, data) in zip(names, read, strict=True)})
    document = compared(view)
    if out is not None:
        refuse_other_files(out, COMPARISON_JSON, "comparison")
        page = write_comparison_page(view, document, out)
    if as_json:
        caveats = [caveat.as_json() for caveat in document.caveats]
        print(json.dumps({**view.results(), "caveats": caveats}, indent=2, allow_nan=False))
        return
    from carbonopt.cli.display import print_tables
    from carbonopt.report.render import terminal

    all_caveats = "in --json" if out is None else "on the page and in --json"
    print(printable(terminal.render(document, all_caveats)))
    print_tables(table for table in document.tables() if not table.folded)
    if out is not None:
        print(f"Page: {printable(str(page))}")
