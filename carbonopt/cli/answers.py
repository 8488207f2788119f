"""Answers as commands print them."""

import json
from typing import TYPE_CHECKING

from carbonopt.core.errors import printable

if TYPE_CHECKING:
    from carbonopt.report.pipeline_report import PipelineView
    from carbonopt.spec.study_data import StudyData


def print_recommendation(
    data: "StudyData", target: float | None = None, *, running: bool = False
) -> bool:
    from carbonopt.cli.display import not_ended
    from carbonopt.report.assemble import top
    from carbonopt.report.render import terminal
    from carbonopt.report.study_view import StudyView

    study, own = StudyView(data, target), data.config.target.value
    recommendation = study.recommendation
    its_own = "" if recommendation.target.value == own else f", whose own target is {own:g},"
    ended = f"The study{its_own} ended: {data.ended}."
    print(printable(terminal.render(top(study))))
    print(
        f"  {printable(not_ended(data, recommendation, running) if data.ended is None else ended)}"
    )
    return recommendation.met


def print_pipeline(view: "PipelineView", *, as_json: bool = False) -> bool:
    from carbonopt.report.document import with_caveats
    from carbonopt.report.pipeline_report import pipeline_top
    from carbonopt.report.render import terminal

    document = pipeline_top(view)
    if as_json:
        answer = with_caveats(view.summary.as_json(), document.caveats)
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        print(printable(terminal.render(document)))
    return view.summary.met
