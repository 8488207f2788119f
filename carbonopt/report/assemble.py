"""A study's document: its top from the summary and all caveats, and below it the sections in their order."""

from carbonopt.report import summary
from carbonopt.report.document import Document
from carbonopt.report.sections import SECTIONS
from carbonopt.report.study_view import StudyView


def top(study: StudyView) -> Document:
    """What to do, what it saves, how sure that is, and every caveat: without the sections."""
    warned = [caveat for entry in SECTIONS for caveat in entry.caveats(study)]
    return Document(
        name=study.data.config.name,
        headline=summary.headline(study),
        details=summary.details(study),
        tiles=summary.tiles(study),
        caveats=tuple(sorted(warned, key=lambda caveat: caveat.level)),
    )


def whole(study: StudyView) -> Document:
    """Everything that the page and the Markdown show."""
    sections = (entry.section(study) for entry in SECTIONS)
    return top(study).model_copy(update={"sections": tuple(section for section in sections if section is not None)})
