"""The search space that carbonopt chose by itself with `space: auto`, and why."""

from carbonopt.report.document import Section, table, word
from carbonopt.report.study_view import StudyView
from carbonopt.space.search_space import describe
from carbonopt.spec.auto_facts import AutoSpace


def section(study: StudyView) -> Section | None:
    auto: AutoSpace | None = study.auto
    if auto is None:
        return None
    chosen = table(
        "space",
        "The space, chosen by carbonopt from model, data and hardware",
        [(name, describe(auto.space[name]), why) for name, why in auto.why.items()],
        [word("Dimension", 0), word("Values", 1), word("Why", 2)],
    )
    left_out = table(
        "left-out",
        "What was left out of it",
        auto.left_out.items(),
        [word("Dimension", 0), word("Why", 1)],
    )
    return Section(key="space", title="The search space", blocks=(chosen, left_out))
