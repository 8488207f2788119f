"""Predictions of the recommended trial's model for some evaluation examples, as a check."""

from carbonopt.report.document import Section, table, word
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    record = study.record(study.recommendation.trial)
    if record is None or not record.predictions:
        return None
    columns = [
        word("Source", "source"),
        word("Expected", "expected"),
        word("Predicted", "predicted"),
    ]
    caption = f"Predictions of trial {record.trial} at its end, by greedy decoding"
    note = "Of the evaluation examples, evenly spread; long texts are cut."
    rows = table("predictions", caption, record.predictions, columns, note=note)
    return Section(key="predictions", title="Predictions", blocks=(rows,))
