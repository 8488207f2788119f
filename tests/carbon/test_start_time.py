"""When work begins, against brute force over every minute; and windows on days of clock changes."""

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import fmean

import pytest

from carbonopt.carbon.expected_intensity import hour_of
from carbonopt.carbon.start_time import cleanest_start, daily_windows
from carbonopt.core.errors import BadInput
from carbonopt.spec.schedule_settings import Schedule

NOW = datetime(2024, 3, 5, 18, 0, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def by_minute(rates: list[float], minutes: list[int], first: int, needed: int) -> float:
    """Return the mean intensity of work from the `first` allowed minute on, over its durations."""

    def mean(length: int) -> float:
        return fmean(rates[minute // 60] for minute in minutes[first : first + length])

    return fmean(mean(round(share * needed)) for share in (0.5, 0.75, 1.0))


@pytest.mark.parametrize("seed", range(30))
def test_no_minute_is_a_cleaner_start_than_the_one_that_is_taken(seed: int) -> None:
    rng = random.Random(seed)
    span = rng.choice([6, 15, 24, 40])
    rates = [rng.uniform(50, 500) for _ in range(span + 1)]
    begin = hour_of(NOW)
    needed = 4 * rng.randrange(1, 15 * span // 2)
    windows = []
    if seed % 2:
        edges = sorted(rng.sample(range(60 * span), 4))
        windows = [(NOW + a * MINUTE, NOW + b * MINUTE) for a, b in pairwise(edges)][::2]
    allowed = [
        minute
        for minute in range(60 * span)
        if not windows or any(a <= NOW + minute * MINUTE < b for a, b in windows)
    ]
    start = cleanest_start(
        NOW,
        lambda hour: rates[hour - begin],
        needed * MINUTE,
        NOW + span * HOUR,
        windows,
    )
    if needed > len(allowed):
        assert not start.in_time and start.at == NOW + allowed[0] * MINUTE
        return
    costs = [by_minute(rates, allowed, first, needed) for first in range(len(allowed) - needed + 1)]
    at = (start.at - NOW) / MINUTE
    taken = by_minute(rates, allowed, allowed.index(round(at)), needed)
    assert at == pytest.approx(round(at), abs=1e-6) and start.in_time
    assert taken == pytest.approx(min(costs), rel=1e-9)
    at_once = by_minute(rates, list(range(60 * span)), 0, needed)
    assert start.saving == pytest.approx(1 - taken / at_once, abs=1e-9), "against a start now"
    assert round(at) == allowed[0] or taken < costs[0]


def test_a_smaller_saving_than_asked_for_is_not_waited_for() -> None:
    rates = [100.0, 96.0, 96.0]
    begin = hour_of(NOW)

    def starts(at_least: float) -> datetime:
        return cleanest_start(
            NOW, lambda h: rates[h - begin], HOUR, NOW + 3 * HOUR, at_least_saving=at_least
        ).at

    assert starts(0.0) == starts(0.04) == NOW + HOUR
    assert starts(0.041) == NOW


def test_hours_that_are_not_known_attract_no_work() -> None:
    rates = [200.0, None, 100.0, 300.0]
    begin = hour_of(NOW)
    start = cleanest_start(NOW, lambda h: rates[h - begin], HOUR, NOW + 4 * HOUR)
    assert start.at == NOW + 2 * HOUR and start.saving == pytest.approx(0.5)


def windows(hours: list[str], zone: str, begin: datetime, days: int) -> list[tuple[str, str]]:
    schedule = Schedule(finish_by="+24h", hours=hours, time_zone=zone)
    spans = daily_windows(schedule, begin, begin + timedelta(days=days))
    return [(f"{a:%d %H:%M}", f"{b:%d %H:%M}") for a, b in spans]


def test_windows_are_local_times_over_a_change_of_clocks() -> None:
    assert windows(["18:00-09:00"], "Europe/Berlin", datetime(2026, 3, 28, 12, tzinfo=UTC), 2) == [
        ("28 17:00", "29 07:00"),  # an hour shorter
        ("29 16:00", "30 07:00"),
    ]
    assert windows(["18:00-09:00"], "Europe/Berlin", datetime(2026, 3, 28, 5, tzinfo=UTC), 1) == [
        ("28 05:00", "28 08:00"),
        ("28 17:00", "29 05:00"),
    ]


def test_clocks_that_change_beside_the_asked_time_do_not_matter() -> None:
    """At 02:30 on 29 March 2026 in Berlin, after the end, and before the begin."""
    before = datetime(2026, 3, 27, 23, tzinfo=UTC)
    assert windows(["02:30-05:00"], "Europe/Berlin", before, 1) == [("28 01:30", "28 04:00")]
    after = datetime(2026, 3, 29, 22, tzinfo=UTC)
    assert windows(["02:30-05:00"], "Europe/Berlin", after, 1) == [("30 00:30", "30 03:00")]


def test_of_equally_clean_hours_the_first_is_taken() -> None:
    for minute in range(60):
        now = datetime(2026, 6, 1, 2, minute, 17, 123_457, tzinfo=UTC)
        start = cleanest_start(
            now,
            lambda hour: 100.0 / 3 if 5 <= hour % 24 < 9 else 400.0 / 3,
            timedelta(hours=1, seconds=7),
            now + timedelta(hours=12),
        )
        assert start.at == datetime(2026, 6, 1, 5, tzinfo=UTC)


def test_windows_that_touch_or_overlap_are_one() -> None:
    begin = datetime(2026, 6, 1, 0, tzinfo=UTC)
    assert windows(["08:00-12:00", "11:00-13:00", "13:00-14:00"], "UTC", begin, 1) == [
        ("01 08:00", "01 14:00")
    ]


@pytest.mark.parametrize(
    ("day", "both"),
    [
        (datetime(2026, 3, 29, tzinfo=UTC), ("00:30+00:00", "01:30+00:00")),  # does not exist
        (datetime(2026, 10, 25, tzinfo=UTC), ("00:30+00:00", "01:30+00:00")),  # exists twice
    ],
)
def test_a_window_that_begins_where_clocks_change_is_refused_with_both_readings(
    day: datetime, both: tuple[str, str]
) -> None:
    with pytest.raises(BadInput) as refused:
        windows(["02:30-06:00"], "Europe/Berlin", day, 1)
    assert all(reading in str(refused.value) for reading in both)
