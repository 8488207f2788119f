"""The expected intensity of coming hours, on made traces whose means are known."""

from datetime import UTC, datetime, timedelta

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


def test_weekends_are_expected_as_weekends_were() -> None:
    def rate(hour: int) -> float:
        return 50.0 if (hour // 24 + 3) % 7 >= 5 else 150.0

    hours = expected(trace(28 * 24, rate), 7 * 24)
    by_kind = {rate(hour_of(NOW) + after): value for after, value in enumerate(hours)}
    # 8 weekend days and 20 others in 28, the other kind with a weight of 0.3.
    assert by_kind[50.0] == pytest.approx((8 * 50 + 0.3 * 20 * 150) / (8 + 0.3 * 20), rel=0.02)
    assert by_kind[150.0] == pytest.approx((0.3 * 8 * 50 + 20 * 150) / (0.3 * 8 + 20), rel=0.02)


def test_a_dirty_day_is_carried_on_and_fades() -> None:
    last = hour_of(NOW)
    made = trace(28 * 24, lambda hour: 100.0 + 28 * (hour >= last - 24))
    hours = expected(made)
    usual = 100 + 28 / (20 + 0.3 * 8)  # 20 weekdays in 28 days, weekend days with a weight of 0.3
    assert hours[0] - usual == pytest.approx(0.5 * (128 - usual), rel=1e-6)
    assert hours[0] > hours[6] > hours[24] > usual
    assert (hours[12] - usual) / (hours[0] - usual) == pytest.approx(2.718281828**-1, rel=1e-6)


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
