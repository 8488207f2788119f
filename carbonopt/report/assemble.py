"""A study's whole document: its top, all caveats, and the sections in their order."""

from carbonopt.report import summary
from carbonopt.report.document import Document
from carbonopt.report.sections import MODULES
from carbonopt.report.study_view import StudyView


def top(study: StudyView) -> Document:
    """Return the document without its sections: what to do, what it saves, and every caveat.

    Its details say how sure the saving is.
    """
    warned = [
        caveat for part in MODULES if hasattr(part, "caveats") for caveat in part.caveats(study)
    ]
    return Document(
        name=study.data.config.name,
        headline=summary.headline(study),
        details=summary.details(study),
        tiles=summary.tiles(study),
        caveats=tuple(sorted(warned, key=lambda caveat: caveat.level)),
    )


def whole(study: StudyView) -> Document:
    sections = (part.section(study) for part in MODULES if hasattr(part, "section"))
    return top(study).model_copy(
        update={"sections": tuple(section for section in sections if section is not None)}
    )
