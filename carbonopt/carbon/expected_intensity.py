"""The carbon intensity that is expected for the coming hours, from an hourly file alone.

The expected intensity of an hour is a mean of the same hour of the day over 28 days. If the file
reaches almost to now, these are its last 28 days before now, and a correction is added to the mean
where the file reaches far enough back. Otherwise they are the days around the same hour 364 days
earlier, from 14 days before it to 13 after it, without a correction. Hours after now are not used.

The correction is learnt by ridge regression on earlier days: how the last hours, the last week and
the weekday moved the following hours away from the mean (Hastie, Tibshirani and Friedman, The
Elements of Statistical Learning, 2009, 3.4.1). reports/schedule.md has what this saves on recorded
grids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from carbonopt.core.errors import BadInput
from carbonopt.spec.study_data import CarbonTrace

if TYPE_CHECKING:
    import numpy as np

DAYS = 28
_HOURS = 24 * DAYS
FRESH_HOURS = 7 * 24  # a file that ends earlier before now is not taken for the last 28 days
_YEAR_HOURS = 364 * 24  # whole weeks, so that weekdays stay weekdays
# Days that the correction is learnt from, and the fewest that it can be learnt from.
_MOST_LEARNT_DAYS, _LEAST_LEARNT_DAYS = 365, 90
_RIDGE = 0.05  # penalty of the regression, for each of these days
_LEAST_LEVEL = 0.1  # share of the usual level below which a day's shares are not learnt from
_LAST_HOURS = 12  # hours before now whose deviations count one by one
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
        BadInput: if the file has neither the last 28 days nor the same weeks a year earlier, or if
            more than MOST_HOLE_HOURS consecutive hours have no mean, as it lacks them on all 28
            days.
    """
    begin = hour_of(datetime.fromisoformat(trace.start))
    rates = trace.g_co2e_per_kwh
    end, first, count = begin + len(rates), hour_of(now), hour_of(until) - hour_of(now) + 1
    past = range(max(begin, min(end, first) - _HOURS), min(end, first))
    if first - past.stop <= FRESH_HOURS and len(past) == _HOURS:
        rule = "the mean of the hour over the file's last 28 days before now"
        lead = first - past.stop
        hours = _of_days(rates[past.start - begin : past.stop - begin], lead + count)
        corrected = _corrected(rates, begin, past.stop, hours)
        if corrected is not None:
            rule += ", corrected by what followed such hours before"
            hours = corrected
        hours = hours[lead:]
    else:
        middle = first - _YEAR_HOURS
        year_ago = range(middle - _HOURS // 2, middle + _HOURS // 2 + count)
        if year_ago.start < begin or year_ago.stop > end:
            raise _too_short(trace, begin, end, first, year_ago)
        rule = "the mean of the hour over the same four weeks a year earlier"
        hours = _a_year_earlier(rates, begin, middle, count)
    if end > first + 1:
        rule += "; the file's hours after now are not used"
    _check_holes(hours, trace)
    return ExpectedIntensity(first, tuple(hours), rule)


def _of_days(past: Sequence[float | None], count: int) -> list[float | None]:
    """Return the mean of each of the coming hours of the day over the past ones."""
    by_hour = [
        [rate for rate in past[hour::24] if rate is not None] for hour in range(min(24, count))
    ]
    means = [sum(known) / len(known) if known else None for known in by_hour]
    return [means[hour % 24] for hour in range(count)]


def _corrected(
    rates: Sequence[float | None], begin: int, end: int, usual: Sequence[float | None]
) -> list[float | None] | None:
    """Return the usual intensities of the hours from `end` on with the learnt correction.

    Returns None if the file has too few days to learn from (the hours of the week before and of the
    same length after must be known), if an hour of the day is unknown in each of the last 28, or if
    their intensities are almost 0.

    Args:
        rates: the file's intensities, from the hour `begin` on.
        usual: the means over the last 28 days; None: the file has no such hour.
    """
    import numpy as np  # imported here, since most studies have no schedule

    known = np.array([np.nan if rate is None else rate for rate in rates[: end - begin]])
    # The latest start that can be learnt from is so many days back: the file has as many hours
    # after it as are expected now.
    last_day = -(-len(usual) // 24)
    starts = [
        start
        for days in range(last_day, last_day + _MOST_LEARNT_DAYS)
        if (start := len(known) - 24 * days) >= _HOURS
        and np.isfinite(known[start - 7 * 24 : start + len(usual)]).all()
        and _has_means(known, start)
    ]
    if len(starts) < _LEAST_LEARNT_DAYS or not _has_means(known, len(known)):
        return None
    means_of = {start: _means(known, start) for start in (*starts, len(known))}
    least_level = _LEAST_LEVEL * np.median([means.mean() for means in means_of.values()])
    # Shares of a level that is almost 0, as of weeks that were filled with zeros, say nothing.
    starts = [start for start in starts if means_of[start].mean() > least_level]
    means_now = means_of[len(known)]
    if len(starts) < _LEAST_LEARNT_DAYS or means_now.mean() <= least_level:
        return None
    signs = np.array([_signs(known, start, begin, means_of[start]) for start in starts])
    means = np.array([means_of[start] for start in starts])
    levels = means.mean(1, keepdims=True)
    leads = np.arange(len(usual))
    followed = np.array([known[start : start + len(usual)] for start in starts])
    deviations = (followed - means[:, leads % 24]) / levels
    middle, spread = signs.mean(0), signs.std(0)
    spread[spread == 0] = 1.0
    scaled = (signs - middle) / spread
    penalty = _RIDGE * len(starts) * np.eye(scaled.shape[1])
    slopes = np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ deviations)
    now = np.nan_to_num((_signs(known, len(known), begin, means_now) - middle) / spread)
    corrections = now @ slopes * means_now.mean()
    return [
        None if mean is None else max(0.0, float(mean + correction))
        for mean, correction in zip(usual, corrections, strict=True)
    ]


def _has_means(known: "np.ndarray", start: int) -> bool:
    import numpy as np

    return bool(np.isfinite(known[start - _HOURS : start].reshape(DAYS, 24)).any(0).all())


def _means(known: "np.ndarray", start: int) -> "np.ndarray":
    """Return the mean of each hour of the day over the 28 days before a start, from its hour on."""
    import numpy as np

    means: np.ndarray = np.nanmean(known[start - _HOURS : start].reshape(DAYS, 24), axis=0)
    return means


def _signs(known: "np.ndarray", start: int, begin: int, means: "np.ndarray") -> "np.ndarray":
    """Return the features of a start from which the correction of the following hours is learnt.

    The first ones are deviations from the mean of the hour, as shares of the mean level: of each of
    the last 12 hours, of the whole last day, and of the last week for every two hours of the day.
    The other seven say the day of the week: one is 1, the others are 0.

    Args:
        means: the start's means by hour, as `_means` returns them.
    """
    import numpy as np

    day = known[start - 24 : start] - means
    week = (known[start - 7 * 24 : start].reshape(7, 24).mean(0) - means).reshape(12, 2).mean(1)
    weekday = np.eye(7)[(begin + start) // 24 % 7]
    return np.concatenate([[*day[-_LAST_HOURS:], day.mean(), *week] / means.mean(), weekday])


def _a_year_earlier(
    rates: Sequence[float | None], begin: int, middle: int, count: int
) -> list[float | None]:
    """Return the mean of the hour over the 28 days around each of the hours from `middle` on."""

    def mean(hour: int) -> float | None:
        around = range(hour - _HOURS // 2, hour + _HOURS // 2, 24)
        known = [rate for at in around if (rate := rates[at - begin]) is not None]
        return sum(known) / len(known) if known else None

    return [mean(middle + after) for after in range(count)]


def _check_holes(hours: Sequence[float | None], trace: CarbonTrace) -> None:
    hole = 0
    for rate in hours:
        hole = 0 if rate is not None else hole + 1
        if hole > MOST_HOLE_HOURS:
            raise BadInput(
                f"schedule: {trace.source} must not lack more than {MOST_HOLE_HOURS} hours in a row"
                " of each of the 28 days, but does; give a file with these hours."
            )


def _too_short(trace: CarbonTrace, begin: int, end: int, now: int, year_ago: range) -> BadInput:
    needed = (
        f"must have the 28 days until {_iso(now)} (or until {FRESH_HOURS // 24} days before), or"
        f" those from {_iso(year_ago.start)} to {_iso(year_ago.stop)}"
    )
    return BadInput(
        f"schedule: {trace.source} {needed}, but goes from {_iso(begin)} to {_iso(end)}; give a"
        " longer or newer file."
    )


def _iso(hour: int) -> str:
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
    return time.isoformat(timespec="minutes")
