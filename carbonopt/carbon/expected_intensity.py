"""The carbon intensity that is expected for the coming hours, from an hourly file alone.

The expected intensity of an hour is the mean of the same hour of the day over 28 days. If the file
reaches almost to now, these are its last 28 days; days of the other kind (weekday or weekend) count
less, and the deviation of the last hours is carried on and fades. Otherwise they are the same weeks
a year earlier. reports/schedule.md has what this saves on recorded grids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from carbonopt.core.errors import BadInput
from carbonopt.spec.study_data import CarbonTrace

DAYS = 28
_HOURS = 24 * DAYS
FRESH_HOURS = 7 * 24  # a file that ends earlier before now is not taken for the last 28 days
_YEAR_HOURS = 364 * 24  # whole weeks, so that weekdays stay weekdays
# Weight of days of the other kind, of those two that a week has.
_OTHER_KIND_WEIGHT = 0.3
# Share of the last hours' deviation that the next hour has, and the hours in which it fades.
_CARRIED_SHARE, _FADES_HOURS = 0.5, 12.0
_LAST_HOURS_FADE = 3.0
MOST_HOLE_HOURS = 3  # longest hole in the file's coming hours that a plan can bear


@dataclass(frozen=True)
class ExpectedIntensity:
    """The expected intensity of consecutive hours.

    Args:
        first_hour: the first hour, counted from 1970 in UTC.
        g_co2e_per_kwh: the hours' expected intensities; None: the file has no such hour.
        rule: where they come from, in words.
    """

    first_hour: int
    g_co2e_per_kwh: tuple[float | None, ...]
    rule: str

    def at(self, hour: int) -> float | None:
        """Return the intensity of an hour, counted from 1970; None: it is not known."""
        index = hour - self.first_hour
        return self.g_co2e_per_kwh[index] if 0 <= index < len(self.g_co2e_per_kwh) else None


def hour_of(time: datetime) -> int:
    """Return the hour of a time, counted from 1970 in UTC."""
    return int(time.timestamp() // 3600)


def expected_intensity(trace: CarbonTrace, now: datetime, until: datetime) -> ExpectedIntensity:
    """Return the intensity that is expected from now until a time.

    Raises:
        BadInput: if the file has neither the last 28 days nor the same weeks a year earlier, or
            lacks more than three consecutive hours of them.
    """
    begin = hour_of(datetime.fromisoformat(trace.start))
    rates = trace.g_co2e_per_kwh
    end, first, count = begin + len(rates), hour_of(now), hour_of(until) - hour_of(now) + 1
    past = range(max(begin, min(end, first) - _HOURS), min(end, first))
    if first - past.stop <= FRESH_HOURS and len(past) == _HOURS:
        rule = "the mean of the hour over the file's last 28 days"
        hours = _of_days(rates, begin, past, first, count)
    else:
        middle = first - _YEAR_HOURS
        year_ago = range(middle - _HOURS // 2, middle + _HOURS // 2 + count)
        if year_ago.start < begin or year_ago.stop > end:
            raise BadInput(_too_short(trace, begin, end, first, year_ago))
        rule = "the mean of the hour over the same four weeks a year earlier"
        hours = _a_year_earlier(rates, begin, middle, count)
    _check_holes(hours, trace)
    return ExpectedIntensity(first, tuple(hours), rule)


def _of_days(
    rates: Sequence[float | None], begin: int, past: range, first: int, count: int
) -> list[float | None]:
    """Return the weighted means of the last 28 days, with the last hours' deviation carried on."""

    def mean(hour: int) -> float | None:
        total = weights = 0.0
        for earlier in range(past.start + (hour - past.start) % 24, past.stop, 24):
            if (rate := rates[earlier - begin]) is not None:
                weight = 1.0 if _is_weekend(earlier) == _is_weekend(hour) else _OTHER_KIND_WEIGHT
                total, weights = total + weight * rate, weights + weight
        return total / weights if weights else None

    deviation = fades = 0.0
    for age, hour in enumerate(range(past.stop - 1, past.stop - 25, -1)):
        rate, usual = rates[hour - begin], mean(hour)
        if rate is not None and usual is not None:
            weight = math.exp(-age / _LAST_HOURS_FADE)
            deviation, fades = deviation + weight * (rate - usual), fades + weight
    carried = _CARRIED_SHARE * deviation / fades if fades else 0.0

    def expected(hour: int) -> float | None:
        usual = mean(hour)
        if usual is None:
            return None
        return max(0.0, usual + carried * math.exp(-(hour - past.stop) / _FADES_HOURS))

    return [expected(hour) for hour in range(first, first + count)]


def _a_year_earlier(
    rates: Sequence[float | None], begin: int, middle: int, count: int
) -> list[float | None]:
    def mean(hour: int) -> float | None:
        around = range(hour - _HOURS // 2, hour + _HOURS // 2, 24)
        known = [rate for at in around if (rate := rates[at - begin]) is not None]
        return sum(known) / len(known) if known else None

    return [mean(middle + after) for after in range(count)]


def _is_weekend(hour: int) -> bool:
    # 1970 began with a Thursday.
    return (hour // 24 + 3) % 7 >= 5


def _check_holes(hours: Sequence[float | None], trace: CarbonTrace) -> None:
    hole = 0
    for rate in hours:
        hole = 0 if rate is not None else hole + 1
        if hole > MOST_HOLE_HOURS:
            raise BadInput(
                f"schedule: {trace.source} must not lack more than {MOST_HOLE_HOURS} hours in a row"
                " of each of the 28 days, but does; give a file with these hours."
            )


def _too_short(trace: CarbonTrace, begin: int, end: int, now: int, year_ago: range) -> str:
    needed = (
        f"must have the 28 days until {_iso(now)} (or until {FRESH_HOURS // 24} days before), or"
        f" those from {_iso(year_ago.start)} to {_iso(year_ago.stop)}"
    )
    return (
        f"schedule: {trace.source} {needed}, but goes from {_iso(begin)} to {_iso(end)}; give a"
        " longer or newer file."
    )


def _iso(hour: int) -> str:
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
    return time.isoformat(timespec="minutes")
