"""The sections of the report, in their order: a file each, and a name here. `section` of a file is what it shows, None
where the study has nothing of it, and `caveats` is what it warns of; it may have one of them alone."""

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
    provenance,
    returns,
    shortfall,
    stages,
    trials,
)

SECTIONS = (
    *(shortfall, contention),  # caveats alone
    *(front, comparison, confirmation, citation),  # the answer
    *(influence, batch, returns),  # what decides it
    *(energy, stages, longer_runs, elsewhere),  # what was used
    *(trials, provenance),
)
