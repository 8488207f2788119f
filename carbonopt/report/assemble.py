"""A study's whole document: its top, all caveats, and the sections in their order.

Each section is a file of `report.sections` whose name stands in `SECTIONS`. The file's function
`section` returns what it shows, or None where the study has nothing to show there; its function
`caveats` yields its warnings. A file may have only one of the two.
"""

from importlib import import_module

from carbonopt.report import summary
from carbonopt.report.document import Document
from carbonopt.report.study_view import StudyView

SECTIONS = (
    *("shortfall", "contention", "trial_conduct"),  # these have caveats alone
    *("front", "policy", "comparison", "confirmation", "predictions", "citation"),  # the answer
    *("space", "influence", "batch", "scaling", "memory", "returns"),  # what decides it
    *("energy", "stages", "probes", "longer_runs"),  # the energy that was used
    *("waiting", "elsewhere"),  # when it was used, and where it might have been
    *("trials", "provenance"),
)
_MODULES = tuple(import_module(f"carbonopt.report.sections.{name}_section") for name in SECTIONS)


def top(study: StudyView) -> Document:
    """Return the document without its sections: what to do, what it saves, and every caveat.

    Its details say how sure the saving is.
    """
    warned = [
        caveat for part in _MODULES if hasattr(part, "caveats") for caveat in part.caveats(study)
    ]
    return Document(
        name=study.data.config.name,
        headline=summary.headline(study),
        details=summary.details(study),
        tiles=summary.tiles(study),
        caveats=tuple(sorted(warned, key=lambda caveat: caveat.level)),
    )


def whole(study: StudyView) -> Document:
    sections = (part.section(study) for part in _MODULES if hasattr(part, "section"))
    return top(study).model_copy(
        update={"sections": tuple(section for section in sections if section is not None)}
    )
