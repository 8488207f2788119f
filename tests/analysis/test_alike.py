"""Values of a dimension that give the same evaluations."""

from typing import Any

import pytest
from small_studies import BLEU, script_run, script_study

from carbonopt.analysis.alike import alike
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import ACCURACY, Quality
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.report.sections import trial_conduct_section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData


def run(
    number: int,
    value: float,
    learning_rate: float = 0.1,
    seed: int = 3,
    quality: Quality = BLEU,
    **own: Any,
) -> TrialRecord:
    record = script_run(number, value, own=own, seed=seed, quality=quality)
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


def curved(number: int, shuffle: bool, values: list[float], state: TrialState) -> TrialRecord:
    points = (
        EvalPoint.of(BLEU, value, 1, step=step, tokens=None) for step, value in enumerate(values, 1)
    )
    record = run(number, values[-1], shuffle=shuffle)
    return record.model_copy(update={"state": state, "evals": tuple(points)})


@pytest.mark.parametrize(
    ("other", "is_found"),
    [([20.0, 22.0], True), ([20.0, 22.1], False), ([20.0], False)],
)
def test_pruned_trials_with_equal_curves_are_found(other: list[float], is_found: bool) -> None:
    data = script_study(
        curved(0, True, [20.0, 22.0, 25.0], TrialState.COMPLETE),
        curved(1, False, other, TrialState.PRUNED),
        space=SHUFFLE,
    )
    assert bool(found(data)) is is_found


@pytest.mark.parametrize("pairs", [1, 3])
def test_one_pair_of_equal_shares_may_be_chance(pairs: int) -> None:
    runs = [
        run(2 * pair + shuffle, 0.9, 0.1 + pair, shuffle=bool(shuffle), quality=ACCURACY)
        for pair in range(pairs)
        for shuffle in (0, 1)
    ]
    data = script_study(*runs, space=SHUFFLE, target={"accuracy": 0.8})
    assert [same.dimension for same in alike(data)].count("shuffle") == (pairs == 3)
