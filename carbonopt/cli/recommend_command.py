"""`carbonopt recommend`: print the recommendation alone."""

import json
from typing import Annotated

import typer

from carbonopt.api.study_folder import pipeline_in, pipeline_view, read_study_folder
from carbonopt.cli.answers import print_pipeline, print_recommendation
from carbonopt.cli.exit_codes import check_output, exit_by
from carbonopt.cli.options import AsJson, StorageUrl, StudyDir
from carbonopt.core.errors import BadInput


def recommend(
    study_dir: StudyDir,
    target: Annotated[
        float | None,
        typer.Option("--target", metavar="X", help="Another target of the same quality."),
    ] = None,
    as_json: AsJson = False,
    storage: StorageUrl = None,
) -> None:
    """Print only the recommendation; another --target needs no new trials."""
    check_output()
    if (pipeline := pipeline_in(study_dir, storage)) is not None:
        if target is not None:
            raise BadInput(
                f"--target is for one study, but {study_dir} holds several; give the folder of one"
                " of them."
            )
        exit_by(print_pipeline(pipeline_view(pipeline), as_json=as_json))
    paths, data = read_study_folder(study_dir, storage, for_answer=True)
    if not as_json:
        from carbonopt.storage.folder import is_locked

        exit_by(print_recommendation(data, target, running=is_locked(paths)))
    from carbonopt.report.assemble import top
    from carbonopt.report.document import with_caveats
    from carbonopt.report.study_view import StudyView

    study = StudyView(data, target)
    answer = with_caveats(study.recommendation.as_json(), top(study).caveats)
    print(json.dumps(answer, indent=2, allow_nan=False))
    exit_by(study.recommendation.met)
