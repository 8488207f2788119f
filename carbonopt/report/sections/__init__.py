"""The sections of the report, in their order: a file each, and a line here."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from carbonopt.report.document import Caveat, Section
from carbonopt.report.sections import (
    batch,
    citation,
    comparison,
    confirmation,
    contention,
    elsewhere,
    energy,
    front,
    influence,
    longer_runs,
    measurement,
    provenance,
    returns,
    shortfall,
    stages,
    trials,
)
from carbonopt.report.study_view import StudyView


class Entry(NamedTuple):
    """What a section shows, None where the study has nothing of it, and what it warns of."""

    section: Callable[[StudyView], Section | None] = lambda study: None
    caveats: Callable[[StudyView], Iterable[Caveat]] = lambda study: ()


SECTIONS: tuple[Entry, ...] = (
    Entry(caveats=shortfall.caveats),
    Entry(caveats=contention.caveats),
    Entry(front.section),
    Entry(comparison.section, comparison.caveats),
    Entry(confirmation.section, confirmation.caveats),
    Entry(citation.section),
    Entry(influence.section),
    Entry(batch.section),
    Entry(returns.section),
    Entry(energy.section, measurement.caveats),
    Entry(stages.section),
    Entry(longer_runs.section, longer_runs.caveats),
    Entry(elsewhere.section),
    Entry(trials.section, trials.caveats),
    Entry(provenance.section),
)
