"""The part `schedule` of a study file: when the study may run, and until when it must end."""

import difflib
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, Field, StringConstraints

from carbonopt.core.errors import shortened
from carbonopt.spec.base_settings import Name, Settings

_SPAN = re.compile(r"\+([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*(h|min|d)")
_SPAN_UNIT = {"h": timedelta(hours=1), "min": timedelta(minutes=1), "d": timedelta(days=1)}
_WINDOW = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])")
MOST_DAYS = 366  # from a study's first call until its deadline
_YEARS = range(2000, 3000)  # others overflow when their offset is subtracted


def _time_or_span(text: str) -> str:
    """Check `finish_by`; a missing offset is refused later, where the time zone is known."""
    if text.startswith("+"):
        match = _SPAN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f'must be like "+24h", "+90min" or "+3d", but got {shortened(text)}')
        if not timedelta(0) < _span(match) <= timedelta(days=MOST_DAYS):
            raise ValueError(
                f"must be more than 0 and at most {MOST_DAYS} days, but got {shortened(text)}"
            )
        return text
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        must = 'must be a time with its offset, such as 2026-12-01T09:00+01:00, or "+24h"'
        raise ValueError(f"{must}, but got {shortened(text)} ({error})") from error
    if time.year not in _YEARS:
        raise ValueError(
            f"must be within {MOST_DAYS} days of the first call, but got {shortened(text)}"
        )
    return text


def _window(text: str) -> str:
    match = _WINDOW.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(
            f'must be like "18:00-09:00", from 00:00 to 23:59, but got {shortened(text)}'
        )
    if match.group(1, 2) == match.group(3, 4):
        raise ValueError(f"must begin and end at different times, but got {shortened(text)}")
    return text.replace(" ", "")


def _known_zone(text: str) -> str:
    known = available_timezones()
    if text not in known:
        near = difflib.get_close_matches(text, known, n=3)
        advice = f"the nearest: {', '.join(near)}" if near else "such as Europe/Berlin"
        raise ValueError(
            f"must be a time zone of the IANA database, but got {shortened(text)}; {advice}"
        )
    return text


class Schedule(Settings):
    """The hours in which a study runs: clean ones, or the user's own, before a deadline.

    The search never sees them. Trials begin later, never stop earlier.
    """

    finish_by: Annotated[str, AfterValidator(_time_or_span)]
    """The deadline by which the study has to end: a time with its offset, such as
    `2026-12-01T09:00+01:00`, or a span such as `"+24h"`, counted from the study's first call. At
    most 366 days after it."""

    hours: tuple[Annotated[str, AfterValidator(_window)], ...] = ()
    """Windows of each day in which trials may run, such as `["18:00-09:00"]`; needs
    `time_zone`."""

    time_zone: Annotated[Name, AfterValidator(_known_zone)] | None = None
    """The time zone of `hours`, such as `Europe/Berlin`."""

    forecast: Annotated[str, StringConstraints(min_length=1)] | None = None
    """A CSV file of [hourly intensities](emissions.md#other-grids-and-hours) that has the last four
    weeks, or the same weeks a year earlier. Default: `carbon.trace`."""

    at_least_saving: float = Field(default=0.02, ge=0, le=1)
    """The smallest share of the emissions, 0 to 1, for which the study waits."""

    def violations(self) -> dict[str, bool]:
        naive = not self.finish_by.startswith("+") and (
            datetime.fromisoformat(self.finish_by).tzinfo is None
        )
        no_offset = f"finish_by must have its offset, but got {shortened(self.finish_by)}"
        return {
            "hours needs time_zone, such as Europe/Berlin": (
                bool(self.hours) and self.time_zone is None
            ),
            f"{no_offset}; {self._readings()}": naive,
        }

    def _readings(self) -> str:
        """Say what a time without an offset may mean."""
        if self.finish_by.startswith("+"):
            return ""
        time = datetime.fromisoformat(self.finish_by)
        zone = None if self.time_zone is None else ZoneInfo(self.time_zone)
        both = readings(time, zone) if time.tzinfo is None else [time]
        return "write " + " or ".join(_minute(reading) for reading in both)

    def deadline(self, first_call: datetime) -> datetime:
        """Return when the study has to have ended; `first_call` is when it was first called."""
        match = _SPAN.fullmatch(self.finish_by.strip())
        return (
            datetime.fromisoformat(self.finish_by) if match is None else first_call + _span(match)
        )


def readings(time: datetime, zone: ZoneInfo | None) -> list[datetime]:
    """Return what a local time can mean, with its offsets: two times where clocks are set back.

    Where clocks are set forward, the time does not exist, and the two are those around the gap.

    Args:
        time: a time without an offset.
        zone: its time zone; None: this machine's.
    """
    both = [time.replace(fold=fold, tzinfo=zone) for fold in (0, 1)]
    if zone is None:
        both = [time.replace(fold=fold).astimezone() for fold in (0, 1)]
    distinct = {reading.astimezone(UTC): reading for reading in both}
    return [distinct[instant] for instant in sorted(distinct)]


def _span(match: re.Match[str]) -> timedelta:
    return float(match[1]) * _SPAN_UNIT[match[2]]


def _minute(time: datetime) -> str:
    return time.isoformat(timespec="minutes")
