"""The answers for every target against `recommend`, on made-up studies; the front's knee against a
figure by hand.
"""

import itertools
import math
import time

import numpy as np
import pytest
from analysis.test_confidence import repeated, runs
from analysis.test_recommend import record, study
from hypothesis import assume, given
from hypothesis import strategies as st

from carbonopt.analysis.front import knee, pareto_front
from carbonopt.analysis.recommend import (
    TargetRange,
    recommend,
    recommendation_by_target,
    target_range_for,
)
from carbonopt.core.quality import PERPLEXITY, Target
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.report.document import Steps
from carbonopt.report.sections.front_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

# Few different values, so that ties are common; perplexities from where the study's target of 10
# is.
EMISSIONS = st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.none(), st.floats(0.5, 4.0))
PERPLEXITIES = st.one_of(
    st.sampled_from([1.0, 9.9, 10.0, 10.1, math.nan]), st.floats(1.0, 30.0), st.floats(9.5, 10.5)
)
SEEDS = st.integers(2, 3)
STATES = st.sampled_from([TrialState.COMPLETE] * 5 + [TrialState.DIVERGED, TrialState.FAILED])


@st.composite
def configurations(draw: st.DrawFn, trial: int) -> list[TrialRecord]:
    """One with up to three repeats: wild ones that may end anyhow, or steady ones, as seeds mostly
    are.
    """
    if draw(st.booleans()):
        first = record(trial, draw(EMISSIONS), draw(PERPLEXITIES), state=draw(STATES))
        more = [
            (draw(EMISSIONS), draw(PERPLEXITIES), draw(STATES))
            for _ in range(draw(st.sampled_from([0, 0, 1, 3])))
        ]
    else:
        kg, perplexity = (
            draw(st.sampled_from([1.0, 2.0, 3.0])),
            draw(st.sampled_from([9.0, 9.9, 9.99])),
        )
        first = record(trial, kg, perplexity)
        factors = draw(st.lists(st.sampled_from([1.0, 1.001, 1.01]), max_size=3))
        more = [(kg * factor, perplexity * factor, TrialState.COMPLETE) for factor in factors]
    return [
        first,
        *(
            record(100 * seed + trial, kg, value, state=state, repeat_of=trial, seed=seed)
            for seed, (kg, value, state) in enumerate(more, start=1)
        ),
    ]


@st.composite
def studies(draw: st.DrawFn) -> StudyData:
    """Up to six configurations, to be run with two or three seeds, with and without a start."""
    data = repeated(
        *(draw(configurations(trial)) for trial in range(draw(st.integers(0, 6)))),
        seeds=draw(SEEDS),
    )
    search = data.config.search.model_copy(
        update={"start": draw(st.sampled_from([None, {"epochs": 1}]))}
    )
    return data.model_copy(update={"config": data.config.model_copy(update={"search": search})})


def expected(data: StudyData, target: float) -> tuple:
    rec = recommend(data, target)
    return (
        *(rec.trial, rec.value, rec.emissions_kg_co2e, rec.energy_kwh),
        *(rec.saving_fraction, rec.saving_interval, rec.break_even_runs, rec.break_even_interval),
        *(
            rec.confidence.value_bound if rec.confidence else None,
            rec.baseline.trial if rec.baseline else None,
        ),
    )


def told(answer: TargetRange) -> tuple:
    return tuple(answer.model_dump(exclude={"from_value", "study_target_only", "seeds"}).values())


@given(studies(), st.lists(st.floats(1.0, 40.0), max_size=5))
@pytest.mark.slow
def test_the_answer_at_every_target_is_the_recommendation(
    data: StudyData, more: list[float]
) -> None:
    answers = recommendation_by_target(data)
    steps = [answer.from_value for answer in answers] + [
        data.config.target.perplexity,
        PERPLEXITY.lowest,
    ]
    beside = [math.nextafter(step, side) for step in steps for side in (0.0, math.inf)]
    known = [run.value for run in data.records if run.value and math.isfinite(run.value)]
    between = [(a + b) / 2 for a, b in itertools.pairwise(sorted(steps))]
    for target in {*steps, *beside, *known, *between, *more, 1e9}:
        if target >= PERPLEXITY.lowest:
            assert told(target_range_for(answers, Target(PERPLEXITY, target))) == expected(
                data, target
            ), target


@given(studies())
def test_steps_are_sorted_and_neighbours_differ(data: StudyData) -> None:
    answers = recommendation_by_target(data)
    assert answers[0].from_value == PERPLEXITY.lowest and not answers[0].study_target_only
    steady = [answer for answer in answers if not answer.study_target_only]
    starts = [answer.from_value for answer in steady]
    assert starts == sorted(set(starts))
    assert all(a.trial != b.trial for a, b in itertools.pairwise(steady))
    own = [answer for answer in answers if answer.study_target_only]
    assert [answer.from_value for answer in own] in ([], [data.config.target.perplexity])
    assert answers == tuple(
        sorted(answers, key=lambda answer: (answer.from_value, answer.study_target_only))
    )


def test_what_was_confirmed_counts_at_the_studys_own_target_only() -> None:
    data = repeated(runs(0, [2.0, 2.0, 2.0], [9.0, 9.01, 9.02]), runs(1, [1.0], [9.5]))
    mean = math.exp(sum(map(math.log, [9.0, 9.01, 9.02])) / 3)
    steps = [
        (answer.from_value, answer.study_target_only, answer.trial)
        for answer in recommendation_by_target(data)
    ]
    assert steps == [
        (1.0, False, None),
        (pytest.approx(mean), False, 0),  # in doubt, then sure of it: the same answer
        (9.5, False, 1),
        (10.0, True, 0),
    ]
    ranges, targets = (
        recommendation_by_target(data),
        [Target(PERPLEXITY, value) for value in (9.99, 10.0, 10.01)],
    )
    assert [target_range_for(ranges, target).trial for target in targets] == [1, 0, 1]


def test_without_repeats_the_steps_are_the_front() -> None:
    rng = np.random.default_rng(0)
    data = study(*(record(k, *map(float, 1 + rng.lognormal(1.0, 0.5, 2))) for k in range(100)))
    data = data.model_copy(update={"records": tuple(run for run in data.records if run.value > 1)})
    answers = recommendation_by_target(data)
    assert [answer.trial for answer in answers] == [None, *reversed(pareto_front(data.records))]
    assert all(answer.from_value == answer.value for answer in answers[1:])


def test_no_trial() -> None:
    (only,) = recommendation_by_target(study())
    assert only.from_value == 1.0 and told(only) == (None,) * 10 and only.seeds == 0


def test_a_target_says_how_many_runs_are_behind_its_answer_and_how_sure_its_saving_is() -> None:
    """Of two that cost the baseline's but for the noise, one ran once."""
    data = repeated(
        runs(0, [4.0], [8.0]),
        runs(1, [2.0, 2.1, 1.9], [9.0, 9.01, 9.02]),
        runs(2, [3.9], [8.5]),
        runs(3, [4.1], [7.9]),
    )
    view = StudyView(data)
    (steps,) = (block for block in section(view).blocks if isinstance(block, Steps))
    texts = {step.number: step.text for step in steps.steps}
    assert [answer.seeds for answer in recommendation_by_target(data)] == [0, 1, 1, 1, 3]
    assert ", one run · " in texts["8"] and " · saves 2.44 % against trial 3 (" in texts["8"]
    assert texts["8"].endswith("or more with 95 % confidence)")
    assert (
        ", mean of 3 seeds, at most 9.0" in texts["9.01"]
        and "saves 51.2 % against trial 3" in texts["9.01"]
    )
    alone = study(record(0, 4.0, 8.0), record(1, 2.0, 9.0))
    (steps,) = (block for block in section(StudyView(alone)).blocks if isinstance(block, Steps))
    assert "saves 50 % against trial 0 (run-to-run spread not known)" in steps.steps[-1].text


@pytest.mark.slow
def test_time_grows_with_the_trials_not_with_their_square() -> None:
    """The worst case: all of them are on the front. Eight times as many take 8 to 14 times as long,
    not 64.
    """
    small, large = (
        study(*(record(k, 1.0 + k, 30.0 - k / 1000) for k in range(count)))
        for count in (1_250, 10_000)
    )
    assert len(recommendation_by_target(large)) == 10_001
    assert shortest_time(large) < 30 * shortest_time(small)


def shortest_time(data: StudyData) -> float:
    """In seconds of the processor, of three."""

    def time_once() -> float:
        start = time.process_time()
        recommendation_by_target(data)
        return time.process_time() - start

    return min(time_once() for _ in range(3))


def on_axes(*points: tuple[float, float]) -> list[TrialRecord]:
    return [record(k, math.exp(x), math.exp(y)) for k, (x, y) in enumerate(points)]


def test_knee_is_farthest_from_the_chord() -> None:
    assert knee(on_axes((0, 8), (1, 2), (2, 1.9), (4, 0.5))) == 1
    assert knee(on_axes((0, 8), (1, 6), (2, 0.6), (4, 0.5))) == 2
    # (2, 4) is 1 − 0.2 − 0.5 from the chord, (5, 1) 1 − 0.5 − 0.125; whatever the unit
    assert knee(on_axes((0, 8), (2, 4), (5, 1), (10, 0))) == 2


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 8),),
        ((0, 8), (4, 1)),
        ((0, 8), (0, 8), (0, 8)),
        ((0, 8), (2, 7), (4, 1)),
        ((0, 8), (2, 6), (4, 4)),
    ],
)
def test_no_knee(points: tuple[tuple[float, float], ...]) -> None:
    """Too few points, the same points, points beyond the chord and on it."""
    assert knee(on_axes(*points)) is None


def test_no_knee_where_nothing_was_emitted() -> None:
    assert knee([record(0, 0.0, 9.0), record(1, 1.0, 3.0), record(2, 9.0, 2.0)]) is None


@given(st.lists(st.tuples(st.floats(0.1, 4.0), st.floats(1.1, 4.0)), min_size=3, max_size=8))
def test_knee_is_the_farthest_point_by_plain_geometry(points: list[tuple[float, float]]) -> None:
    records = [record(k, *point) for k, point in enumerate(points)]
    logs = np.log([points[trial] for trial in pareto_front(records)])
    assume(len(logs) >= 3 and (np.ptp(logs, axis=0) > 1e-3).all())
    scaled = (logs - logs.min(axis=0)) / np.ptp(logs, axis=0)
    distance = (1 - scaled.sum(axis=1)) / math.sqrt(
        2
    )  # of each from the line from (0, 1) to (1, 0)
    knee_trial = knee(records)
    assert (knee_trial is None) == (distance.max() <= 1e-8)
    if knee_trial is not None:
        at = pareto_front(records).index(knee_trial)
        assert distance[at] == pytest.approx(distance.max(), abs=1e-9)
