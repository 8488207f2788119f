"""Values of a dimension that give the same evaluations."""

from typing import Any

import pytest
from small_studies import script_run, script_study

from carbonopt.analysis.alike import alike
from carbonopt.core.trial import TrialRecord
from carbonopt.report.sections import trial_conduct_section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData


def run(
    number: int, value: float, learning_rate: float = 0.1, seed: int = 3, **own: Any
) -> TrialRecord:
    record = script_run(number, value, own=own, seed=seed)
    return record.model_copy(
        update={"params": record.params.model_copy(update={"learning_rate": learning_rate})}
    )


def found(data: StudyData) -> list[tuple]:
    return [(same.dimension, same.values, same.trials) for same in alike(data)]


SHUFFLE = {"shuffle": {"choices": [True, False]}}


def test_two_values_that_change_nothing_are_found_and_said() -> None:
    data = script_study(run(0, 25.5, shuffle=True), run(1, 25.5, shuffle=False), space=SHUFFLE)
    assert found(data) == [("shuffle", (False, True), (0, 1))]
    (caveat,) = (
        caveat for caveat in trial_conduct_section.caveats(StudyView(data)) if caveat.key == "alike"
    )
    assert "shuffle" in caveat.text and "False" in caveat.text and "True" in caveat.text


@pytest.mark.parametrize(
    "runs",
    [
        (run(0, 25.5, shuffle=True), run(1, 25.6, shuffle=False)),  # they differ
        (
            run(0, 25.5, shuffle=True),
            run(1, 25.5, learning_rate=0.2, shuffle=False),
        ),  # something else does, too
        (run(0, 25.5, shuffle=True), run(1, 25.5, seed=4, shuffle=False)),  # the seed does, too
        (run(0, 25.5, shuffle=True), run(1, 25.5, shuffle=True)),  # nothing does
        (  # alike by chance, once
            *(run(0, 25.5, shuffle=True), run(1, 25.5, shuffle=False)),
            *(
                run(2, 25.7, learning_rate=0.2, shuffle=True),
                run(3, 25.8, learning_rate=0.2, shuffle=False),
            ),
        ),
    ],
)
def test_what_may_have_changed_something_is_not_found(runs: tuple[TrialRecord, ...]) -> None:
    assert found(script_study(*runs, space=SHUFFLE)) == []


def test_any_dimension_is_looked_at_but_those_that_leave_the_quality_alone() -> None:
    runs = (run(0, 25.5, learning_rate=0.1, workers=1), run(1, 25.5, learning_rate=0.2, workers=1))
    workers = {"workers": {"choices": [1, 2]}}
    assert found(script_study(*runs, space=workers)) == [("learning_rate", (0.1, 0.2), (0, 1))]
    runs = (run(0, 25.5, workers=1), run(1, 25.5, workers=2))
    assert found(script_study(*runs, space=workers)) == [("workers", (1, 2), (0, 1))]
    assert (
        found(script_study(*runs, space={"workers": {"choices": [1, 2], "affects": "cost"}})) == []
    )
