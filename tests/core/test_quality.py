"""A quality's directions, scales and bounds against what each of them is by definition."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import (
    ACCURACY,
    PERPLEXITY,
    QUALITIES,
    REWARD,
    Quality,
    Target,
    quality_of,
)

EVERY = pytest.mark.parametrize("quality", QUALITIES.values(), ids=QUALITIES.keys())
PERPLEXITIES, ACCURACIES = st.floats(1.0, 1e300), st.floats(0.0, 1.0)
OF_EACH = st.one_of(
    st.tuples(st.just(PERPLEXITY), PERPLEXITIES, PERPLEXITIES),
    st.tuples(st.just(ACCURACY), ACCURACIES, ACCURACIES),
)


def is_better(quality: Quality, value: float, other: float) -> bool:
    """By the names alone."""
    return value < other if quality.name == "perplexity" else value > other


def test_each_is_listed_by_its_name() -> None:
    assert QUALITIES["perplexity"] is PERPLEXITY and QUALITIES["accuracy"] is ACCURACY
    assert all(name == quality.name for name, quality in QUALITIES.items())


def test_a_value_is_a_sum_over_all_ranks_divided_once() -> None:
    assert PERPLEXITY.value(3.0 + 5.0, 2 + 6) == math.exp(1.0)
    assert ACCURACY.value(1 + 6, 2 + 6) == 0.875
    assert PERPLEXITY.value(710.0, 1) == math.inf, "too large for a float"
    assert math.isnan(PERPLEXITY.value(math.nan, 3)) and math.isnan(ACCURACY.value(math.nan, 3))


def test_a_loss_is_the_likelihoods_or_the_share_of_errors() -> None:
    assert PERPLEXITY.loss(2.5) == 2.5
    assert PERPLEXITY.loss_of(math.exp(2.5)) == pytest.approx(2.5)
    assert ACCURACY.loss(0.75) == ACCURACY.loss_of(0.75) == 0.25
    assert ACCURACY.is_share and not PERPLEXITY.is_share


def test_a_loss_without_a_highest_value_is_minus_the_value() -> None:
    reward = Quality(
        "reward", "Reward", "", "maximize", -math.inf, math.inf, "identity", "identity"
    )
    assert (reward.loss(3.0), reward.loss(-2.0), reward.loss_of(3.0)) == (-3.0, 2.0, -3.0)
    assert reward.beyond(-1e300) is reward.beyond(1e300) is None


def test_a_loss_has_its_unit():
    assert [quality.loss_text(0.02384) for quality in (PERPLEXITY, ACCURACY)] == [
        "0.0238 nats a token",
        "0.0238 (share of errors)",
    ]


@given(OF_EACH)
def test_ranks_scales_and_losses_order_values_as_the_direction_says(
    pair: tuple[Quality, float, float],
) -> None:
    quality, value, other = pair
    assert (quality.rank(value) < quality.rank(other)) == is_better(quality, value, other)
    assert quality.rank(quality.rank(value)) == value
    if is_better(
        quality, value, other
    ):  # neighbouring floats can have the same logarithm, never the opposite order
        assert quality.scaled(value) <= quality.scaled(other)
        assert quality.loss_of(value) <= quality.loss_of(other)
    assert not is_better(quality, value, quality.best)


@given(OF_EACH)
def test_a_scale_has_an_inverse(pair: tuple[Quality, float, float]) -> None:
    quality, value, _ = pair
    assert quality.unscaled(quality.scaled(value)) == pytest.approx(value, rel=1e-12)


def test_the_mean_of_perplexities_is_the_geometric_one() -> None:
    middle = (PERPLEXITY.scaled(4.0) + PERPLEXITY.scaled(9.0)) / 2
    assert PERPLEXITY.unscaled(middle) == pytest.approx(6.0)
    assert ACCURACY.unscaled((ACCURACY.scaled(0.5) + ACCURACY.scaled(0.75)) / 2) == 0.625


@pytest.mark.parametrize(
    ("quality", "value"), [(PERPLEXITY, 3.0), (PERPLEXITY, 40.0), (ACCURACY, 0.9)]
)
def test_a_deviation_is_carried_over_as_by_a_small_step(quality: Quality, value: float) -> None:
    step = 1e-6
    there = quality.unscaled(quality.scaled(value) + step)
    assert quality.unscaled_deviation(value, step) == pytest.approx(abs(there - value), rel=1e-5)


@pytest.mark.parametrize(
    ("quality", "value", "says"),
    [
        (PERPLEXITY, 0.999, "must be at least 1, but is 0.999"),
        (PERPLEXITY, -math.inf, "must be at least 1, but is -inf"),
        (PERPLEXITY, 1.0, None),
        (PERPLEXITY, 1e300, None),
        (ACCURACY, -0.001, "must be at least 0, but is -0.001"),
        (ACCURACY, 1.001, "must be at most 1, but is 1.001"),
        (ACCURACY, 0.0, None),
        (ACCURACY, 1.0, None),
    ],
)
def test_what_is_beyond_its_bounds_says_which(
    quality: Quality, value: float, says: str | None
) -> None:
    assert quality.beyond(value) == says


@EVERY
def test_what_is_not_finite_is_no_result_but_breaks_no_bound(quality: Quality) -> None:
    assert quality.beyond(math.nan) is quality.beyond(math.inf) is None


def test_what_is_worse_by_a_share() -> None:
    assert PERPLEXITY.relaxed(10.0, 0.01) == pytest.approx(10.1)
    assert ACCURACY.relaxed(0.9, 0.01) == pytest.approx(0.891)
    # a script's own quality may be negative
    assert PERPLEXITY.relaxed(-2.0, 0.01) == pytest.approx(-1.98)
    assert ACCURACY.relaxed(-80.0, 0.01) == pytest.approx(-80.8)


@given(OF_EACH, st.floats(0.0, 1.0))
def test_a_relaxed_value_is_worse_by_that_share(
    pair: tuple[Quality, float, float], share: float
) -> None:
    quality, value, _ = pair
    assume(1e-300 < value < 1e299)
    relaxed = quality.relaxed(value, share)
    assert quality.rank(relaxed) >= quality.rank(value)
    assert quality.worse_by(relaxed, value) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("quality", [REWARD, quality_of("nll", "minimize")])
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_what_is_worse_is_so_whatever_the_sign_of_the_reference(
    quality: Quality, value: float, reference: float
) -> None:
    worse, is_worse = quality.worse_by(value, reference), quality.rank(value - reference)
    assert worse == pytest.approx(0.0) or (worse > 0) == (is_worse > 0)


# -------------------------------------------------------------------------------------------------------------
# targets


def test_a_target_is_met_at_itself_and_on_its_better_side() -> None:
    perplexity, accuracy = Target(PERPLEXITY, 18.0), Target(ACCURACY, 0.9)
    assert (
        perplexity.is_met_by(18.0) and perplexity.is_met_by(17.9) and not perplexity.is_met_by(18.1)
    )
    assert accuracy.is_met_by(0.9) and accuracy.is_met_by(0.91) and not accuracy.is_met_by(0.89)
    for target in (perplexity, accuracy):
        assert not target.is_met_by(None) and not target.is_met_by(math.nan)
    assert not perplexity.is_met_by(math.inf)


def test_a_target_as_study_files_and_answers_have_it() -> None:
    assert Target(PERPLEXITY, 18.0).as_json() == {"quality": "perplexity", "at_most": 18.0}
    assert Target(ACCURACY, 0.9).as_json() == {"quality": "accuracy", "at_least": 0.9}
    assert (str(Target(PERPLEXITY, 18.0)), str(Target(ACCURACY, 0.9))) == (
        "perplexity 18",
        "accuracy 0.9",
    )


@given(OF_EACH)
def test_a_shortfall_is_the_distance_on_the_scale_and_none_where_the_target_is_met(
    pair: tuple[Quality, float, float],
) -> None:
    quality, value, bound = pair
    target = Target(quality, bound)
    assert target.shortfall(bound) == 0
    assert target.shortfall(value) == pytest.approx(
        quality.scaled(value) - quality.scaled(bound), rel=1e-9, abs=1e-12
    )
    if not math.isclose(value, bound, rel_tol=1e-12):
        assert (target.shortfall(value) <= 0) == target.is_met_by(value)


@given(
    st.integers(1, 5000).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))),
    ACCURACIES,
)
def test_what_meets_an_accuracy_has_no_more_loss_than_it(
    right_of: tuple[int, int], bound: float
) -> None:
    """Records are compared by their values and models by losses: both have to say the same."""
    right, count = right_of
    if Target(ACCURACY, bound).is_met_by(ACCURACY.value(right, count)):
        assert ACCURACY.loss(right / count) <= ACCURACY.loss_of(bound)


# ---------------------------------------------------------------------------------------------------------
# evaluations


def test_an_evaluation_keeps_what_its_value_is_made_of() -> None:
    point = EvalPoint.of(PERPLEXITY, 8.0, 4, step=3, tokens=96)
    assert (point.step, point.tokens, point.value, point.sum, point.count) == (
        3,
        96,
        math.exp(2.0),
        8.0,
        4,
    )
    assert point.loss(PERPLEXITY) == 2.0
    right = EvalPoint.of(ACCURACY, 3.0, 4, step=3, tokens=None)
    assert (right.value, right.sum, right.count, right.loss(ACCURACY)) == (0.75, 3.0, 4, 0.25)


@EVERY
def test_an_evaluation_that_is_no_number_has_none(quality: Quality) -> None:
    point = EvalPoint.of(quality, math.nan, 4, step=3, tokens=None)
    assert point.value is point.sum is None
    assert math.isnan(point.loss(quality))


def test_a_perplexity_too_large_for_a_float_has_a_loss_nevertheless() -> None:
    point = EvalPoint.of(PERPLEXITY, 800.0, 1, step=3, tokens=None)
    assert (point.value, point.sum, point.loss(PERPLEXITY)) == (None, 800.0, 800.0)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (0.5, "0.5000"),
        (0.92345, "0.92345"),
        (30.0, "30.00"),
        (30.003, "30.003"),
        (1e6, "1.000e+06"),
    ],
)
def test_a_target_keeps_the_digits_that_it_was_given(target: float, text: str) -> None:
    assert ACCURACY.target_text(target) == text


def test_a_value_has_the_digits_that_tell_it_from_a_target() -> None:
    texts = [PERPLEXITY.text_beside(value, 15.0) for value in (14.0, 15.0, 15.0004, None)]
    assert texts == ["14.00", "15.00", "15.0004", "–"]


def test_no_value_is_minus_zero() -> None:
    assert math.copysign(1, ACCURACY.unscaled(ACCURACY.scaled(0.0))) == 1
