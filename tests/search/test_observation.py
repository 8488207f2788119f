"""What the models are told of a trial."""

import itertools

import pytest
from small_studies import trial

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import ACCURACY, MACRO_F1, PERPLEXITY, Quality
from carbonopt.search.observation import (
    UNTOLD_EXAMPLES,
    examples,
    of_evaluations,
    of_record,
)


def curve(points: int):
    evals = tuple(
        EvalPoint.of(PERPLEXITY, 100 / step, 100, step=step, tokens=None).model_copy(
            update={"train_energy_kwh": step * 1e-6}
        )
        for step in range(points)
        if step
    )
    return of_record(trial(0, evals=evals, total_steps=points - 1)).curve


@pytest.mark.parametrize("points", [2, 9, 103, 129])
def test_a_short_curve_is_told_whole(points: int) -> None:
    assert len(curve(points)) == points - 1


def test_of_a_long_curve_a_part_is_told_with_its_end() -> None:
    told, whole = curve(8001), {step / 8000: 1 / step for step in range(1, 8001)}
    assert len(told) == 128 and told[-1][0] == 1.0
    assert all(whole[place] == pytest.approx(loss) for place, loss in told)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told)]
    assert max(gaps) - min(gaps) < 2 / 8000


def test_the_quality_before_the_first_step_is_no_point_of_the_curve() -> None:
    start = EvalPoint.of(PERPLEXITY, 500.0, 100, step=0, tokens=None).model_copy(
        update={"train_energy_kwh": 1e-9}
    )
    observed = of_record(trial(0, evals=(start,), total_steps=10, steps_done=None))
    assert observed.curve == () and observed.cost_per_step is None


def evaluated(step: int, train_kwh: float) -> EvalPoint:
    point = EvalPoint.of(PERPLEXITY, 300.0 - step, 100, step=step, tokens=None)
    return point.model_copy(update={"train_energy_kwh": train_kwh})


def test_a_running_trial_is_not_expected_to_make_its_first_step_again() -> None:
    """A first step that compiles takes as much as 100 others; the whole trial makes 300."""
    evals = [evaluated(step, (100 + step) * 1e-6) for step in (50, 75, 100)]
    observed = of_evaluations(7, {}, evals, 300, PERPLEXITY)
    assert observed.cost_per_step == pytest.approx(1e-6)
    assert observed.first_cost == pytest.approx(100e-6)
    once = of_evaluations(7, {}, evals[:1], 300, PERPLEXITY)
    assert once.cost_per_step == pytest.approx(3e-6) and once.first_cost is None


@pytest.mark.parametrize(
    ("quality", "count", "known"),
    [(ACCURACY, 88, 88), (ACCURACY, 1, UNTOLD_EXAMPLES), (MACRO_F1, 4, UNTOLD_EXAMPLES)],
)
def test_a_mean_over_classes_is_not_one_over_so_few_examples(
    quality: Quality, count: int, known: int
) -> None:
    """The loss of a share can't be told below half an example."""
    point = EvalPoint.of(quality, 0.95 * count, count, step=1, tokens=None)
    assert examples(point, quality) == known
