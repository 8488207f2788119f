"""The expected intensity of coming hours, on made traces whose means are known."""

import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from carbonopt.carbon.expected_intensity import expected_intensity, hour_of
from carbonopt.core.errors import BadInput
from carbonopt.spec.study_data import CarbonTrace

NOW = datetime(2024, 3, 5, 18, 20, tzinfo=UTC)  # a Tuesday
HOURS_A_DAY = 24


def trace(hours: int, rate, end: datetime = NOW) -> CarbonTrace:
    """A trace of so many hours that ends with the hour before `end`."""
    last = hour_of(end)
    start = datetime.fromtimestamp(3600 * (last - hours), UTC)
    rates = tuple(rate(hour) for hour in range(last - hours, last))
    return CarbonTrace(source="made", start=start.isoformat(), g_co2e_per_kwh=rates)


def expected(of: CarbonTrace, hours: int = 24) -> tuple[float | None, ...]:
    return expected_intensity(of, NOW, NOW + timedelta(hours=hours)).g_co2e_per_kwh


def test_a_daily_cycle_goes_on() -> None:
    made = trace(28 * 24, lambda hour: 100.0 + hour % 24)
    begin = hour_of(NOW)
    assert expected(made) == pytest.approx([100 + hour % 24 for hour in range(begin, begin + 25)])


def test_hours_after_now_are_not_used_and_the_rule_says_so() -> None:
    def rate(hour: int) -> float:
        return 100.0 + hour % 24 if hour < hour_of(NOW) else 1000.0 - hour % 24

    until = NOW + timedelta(hours=24)
    past = expected_intensity(trace(28 * 24, rate), NOW, until)
    goes_on = trace(33 * 24, rate, end=NOW + timedelta(days=5))
    both = expected_intensity(goes_on, NOW, until)
    assert both.g_co2e_per_kwh == past.g_co2e_per_kwh
    assert "after now are not used" in both.rule and "after now" not in past.rule


def test_weekends_are_learnt_from_a_year() -> None:
    def rate(hour: int) -> float:
        return 50.0 if (hour // 24 + 3) % 7 >= 5 else 150.0

    def most_wrong(days: int) -> float:
        hours = enumerate(expected(trace(days * 24, rate), 6 * 24))
        return max(abs(value - rate(hour_of(NOW) + after)) for after, value in hours)

    assert most_wrong(400) < 5
    assert most_wrong(28) > 60


def test_what_follows_a_dirty_hour_is_learnt_from_a_year() -> None:
    """Each day's level is half of the day before's and something new; the last one is dirty."""
    noise = np.random.default_rng(0).normal(0.0, 10.0, 500)
    levels = list(itertools.accumulate(noise, lambda level, new: 0.5 * level + new, initial=0.0))
    last = hour_of(NOW)

    def rate(hour: int) -> float:
        days_ago = (last - 1 - hour) // 24
        return 100.0 + (40.0 if days_ago == 0 else levels[days_ago])

    rates = [rate(hour) for hour in range(last - 28 * 24, last)]
    usual = sum(rates) / len(rates)
    follow = expected(trace(450 * 24, rate))[:24]
    assert sum(follow) / 24 - usual == pytest.approx(0.5 * (140 - usual), abs=4)
    plain = expected(trace(28 * 24, rate))[:24]
    assert plain == pytest.approx([usual] * 24)


def test_a_year_with_holes_still_corrects_and_too_little_does_not() -> None:
    def rate(hour: int) -> float | None:
        return None if hour % 500 == 0 else 100.0 + hour % 24

    rule = "corrected"
    until = NOW + timedelta(hours=24)
    assert rule in expected_intensity(trace(400 * 24, rate), NOW, until).rule
    assert rule not in expected_intensity(trace(100 * 24, rate), NOW, until).rule


@pytest.mark.parametrize("zeros", [27, 30, 35])
@pytest.mark.filterwarnings("error")
def test_weeks_of_zeros_long_ago_leave_the_expectation_as_it_is(zeros: int) -> None:
    noise = np.random.default_rng(0).normal(0.0, 20.0, 400 * 24)
    last = hour_of(NOW)

    def rate(hour: int) -> float:
        return 400.0 + 50 * np.sin(hour % 24 / 24 * 2 * np.pi) + float(noise[last - 1 - hour])

    def damaged(hour: int) -> float:
        return 0.0 if 200 * 24 <= last - hour < (200 + zeros) * 24 else rate(hour)

    assert expected(trace(390 * 24, damaged)) == pytest.approx(
        expected(trace(390 * 24, rate)), rel=0.1
    )


@pytest.mark.parametrize("zeros", [28, 390])
@pytest.mark.filterwarnings("error")
def test_zeros_now_are_expected_to_go_on(zeros: int) -> None:
    last = hour_of(NOW)
    made = trace(390 * 24, lambda hour: 0.0 if last - hour <= zeros * 24 else 400.0)
    assert set(expected(made)) == {0.0}


def test_a_file_that_ended_long_ago_gives_the_same_weeks_a_year_earlier() -> None:
    """Whole weeks earlier, so that the weekday is the same."""
    made = trace(400 * 24, lambda hour: float(hour), end=NOW - timedelta(days=200))
    planned = expected_intensity(made, NOW, NOW + timedelta(hours=3))
    begin = hour_of(NOW) - 364 * 24
    # 14 days before to 13 after: half a day earlier in the mean
    assert planned.g_co2e_per_kwh == pytest.approx([begin - 12 + after for after in range(4)])
    assert "year earlier" in planned.rule


@pytest.mark.parametrize(("hours", "days_ago"), [(28 * 24 - 1, 0), (28 * 24, 8), (400 * 24, 400)])
def test_a_file_that_is_too_short_for_both_rules_is_refused(hours: int, days_ago: int) -> None:
    with pytest.raises(BadInput, match="made must have the 28 days until"):
        expected(trace(hours, lambda hour: 1.0, end=NOW - timedelta(days=days_ago)))


@pytest.mark.parametrize(("hole", "refused"), [(3, False), (4, True)])
def test_hours_that_no_day_has_are_borne_up_to_three(hole: int, refused: bool) -> None:
    made = trace(28 * 24, lambda hour: None if hour % 24 in range(1, 1 + hole) else 7.0)
    if refused:
        with pytest.raises(BadInput, match="more than 3 hours"):
            expected(made)
    else:
        assert expected(made).count(None) == hole
