"""A study's whole document: its top, all caveats, and the sections in their order.

Each section is a file of `report.sections` whose name stands in `SECTIONS`. The file's function
`section` returns what it shows, or None where the study has nothing to show there; its function
`caveats` yields its warnings. A file may lack one of the two.
"""

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module

from carbonopt.report import summary
from carbonopt.report.document import Caveat, Document, Figure, Level, Section
from carbonopt.report.study_view import StudyView

SECTIONS = (
    *("shortfall", "contention", "trial_conduct"),  # these have caveats alone
    *("front", "policy", "comparison", "confirmation", "predictions", "citation"),  # the answer
    *("space", "influence", "batch", "scaling", "memory", "returns"),  # what decides it
    *("energy", "stages", "probes", "longer_runs", "nodes"),  # the energy that was used
    *("waiting", "elsewhere"),  # when it was used, and where it might have been
    *("trials", "provenance"),
)
# The figures for a paper, each with the section that draws it.
FIGURES = {
    "pareto": "front",
    "policy": "policy",
    "batch": "batch",
    "influence": "influence",
    "effects": "influence",
    "returns": "returns",
    "energy": "energy",
}
_MODULES = tuple(import_module(f"carbonopt.report.sections.{name}_section") for name in SECTIONS)


def top(study: StudyView) -> Document:
    """Return the document without its sections: what to do, what it saves, and every caveat.

    Its details say what came closest, where no trial met the target.
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


def critical_caveats(studies: Mapping[str, StudyView]) -> Iterator[Caveat]:
    """Yield a caveat for each study that has critical ones: their number, and the first of them.

    Args:
        studies: the studies of a page on several, by the names that it gives them.
    """
    for name, study in studies.items():
        critical = [caveat for caveat in top(study).caveats if caveat.level is Level.CRITICAL]
        if critical:
            first = critical[0].text.removesuffix(".")
            key = "own_critical_caveat" if len(critical) == 1 else "own_critical_caveats"
            yield study.caveat(key, study=name, count=len(critical), first=first)


def sections(study: StudyView, names: Collection[str] = SECTIONS) -> dict[str, Section]:
    """Return the sections that a study has, by their names in `SECTIONS`, in the document's order.

    Args:
        study: The study.
        names: The names of the sections to make.
    """
    made = {
        name: part.section(study)
        for name, part in zip(SECTIONS, _MODULES, strict=True)
        if name in names and hasattr(part, "section")
    }
    return {name: section for name, section in made.items() if section is not None}


def paper_figure(study: StudyView, name: str) -> Figure | None:
    """Return the figure of a name in `FIGURES`; None if the study has nothing to draw there."""
    made = sections(study, (FIGURES[name],))
    drawn = (figure for section in made.values() for figure in section.paper_figures())
    return next((figure for figure in drawn if figure.name == name), None)


def whole(study: StudyView) -> Document:
    return top(study).model_copy(update={"sections": tuple(sections(study).values())})
