"""The best time to begin or resume a study: the cleanest that still meets its deadline.

The study is planned as one block of work, which the windows of the day may interrupt. How long it
lasts is uncertain, mostly in one direction: a study often ends before its budget is used up. So a
start is judged by the average of three mean intensities, over the first half, the first three
quarters and the whole of the expected duration, while the deadline is held for the whole of it.
reports/schedule.md compares this with a plan of the whole block alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from statistics import fmean
from zoneinfo import ZoneInfo

from carbonopt.carbon.expected_intensity import hour_of
from carbonopt.core.errors import BadInput
from carbonopt.spec.schedule_settings import Schedule, readings

_SHARES = (0.5, 0.75, 1.0)
_HOUR = timedelta(hours=1)
_ROUNDING_S = 1e-6
_SAME = 1e-9  # share by which means of equal hours differ, as they are rounded

Window = tuple[datetime, datetime]


@dataclass(frozen=True)
class Start:
    """A planned start.

    Args:
        at: when to begin, in UTC.
        saving: the share of the emissions that is expected to be saved against a start now, whether
            or not work may be done now; negative where waiting for a window costs emissions. None:
            it was not estimated.
        in_time: whether the work is expected to end by the deadline.
        forgone_saving: the share that a later start would save against the earliest one, where
            that is less than was asked for; None: no later start is cleaner, or it was taken.
    """

    at: datetime
    saving: float | None = None
    in_time: bool = True
    forgone_saving: float | None = None


def daily_windows(schedule: Schedule, begin: datetime, end: datetime) -> tuple[Window, ...]:
    """Return the windows between two times in which trials may begin, merged and in order.

    Without `schedule.hours` this is the whole time.

    Raises:
        BadInput: if a window begins or ends at a local time that does not exist, or exists twice,
            because the clocks are changed on that day.
    """
    if not schedule.hours:
        return ((begin, end),)
    assert schedule.time_zone is not None
    zone = ZoneInfo(schedule.time_zone)
    first, last = (time.astimezone(zone).date() for time in (begin, end))
    days = [first + timedelta(days=n) for n in range(-1, (last - first).days + 1)]
    spans = [
        _on(day, text, zone)
        for day in days
        for text in schedule.hours
        if _may_overlap(day, text, begin.astimezone(zone), end.astimezone(zone))
    ]
    within = sorted((max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin)
    merged: list[Window] = []
    for span in within:
        if merged and span[0] <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span[1])
        else:
            merged.append(span)
    return tuple(merged)


def _may_overlap(day: date, window: str, begin: datetime, end: datetime) -> bool:
    """Return whether a window may overlap a time, by local clocks, which are changed by an hour."""
    since, until = _clocks(day, window)
    return since < end.replace(tzinfo=None) + _HOUR and until > begin.replace(tzinfo=None) - _HOUR


def _clocks(day: date, window: str) -> Window:
    """Return the local times, without a zone, at which a window that begins on a day does so."""
    begins, ends = window.split("-")
    next_day = day if begins < ends else day + timedelta(days=1)
    since, until = (f"{day.isoformat()}T{begins}", f"{next_day.isoformat()}T{ends}")
    return datetime.fromisoformat(since), datetime.fromisoformat(until)


def _on(day: date, window: str, zone: ZoneInfo) -> Window:
    since, until = (_instant(local, window, zone) for local in _clocks(day, window))
    return since, until


def _instant(local: datetime, window: str, zone: ZoneInfo) -> datetime:
    meanings = readings(local, zone)
    if len(meanings) > 1:
        both = " or ".join(
            reading.astimezone(UTC).isoformat(timespec="minutes") for reading in meanings
        )
        raise BadInput(
            f"schedule.hours: the clocks of {zone.key} are changed on {local.date().isoformat()},"
            f" so that {local:%H:%M} of {window} is {both}; give another time of that window."
        )
    return meanings[0].astimezone(UTC)


def cleanest_start(
    now: datetime,
    expected: Callable[[int], float | None],
    remaining: timedelta,
    finish_by: datetime,
    windows: Sequence[Window] = (),
    *,
    at_least_saving: float = 0.0,
) -> Start:
    """Return when to begin or go on with work that takes so long.

    Args:
        now: the time, with its offset.
        expected: returns the expected intensity of an hour, counted from 1970; None: not known.
        remaining: how long the work takes, at most.
        finish_by: when it has to have ended.
        windows: when it may run, in order, as `daily_windows` returns them; empty: always.
        at_least_saving: the smallest share of the emissions for which it waits.

    Returns:
        The earliest of the starts with the least expected emissions. The earliest start that is
        allowed, if waiting is not expected to save enough, or the work can't end in time.
    """
    now, finish_by = now.astimezone(UTC), finish_by.astimezone(UTC)
    always = ((now, max(finish_by, now)),)
    work = _AllowedTime(now, windows or always, expected)
    if not work.total_s:
        return Start(now, in_time=False)
    earliest, needed_s = work.begin_at(0.0), remaining.total_seconds()
    slack_s = work.total_s - needed_s
    if slack_s < 0 or needed_s <= 0:
        return Start(earliest, in_time=slack_s >= 0)
    means = {start_s: work.mean(start_s, needed_s) for start_s in work.starts(needed_s)}
    least = min(means.values())
    best_s = next(start_s for start_s, mean in means.items() if mean <= least * (1 + _SAME))
    saving = _saving(work.mean(best_s, needed_s), work.mean(0.0, needed_s))
    forgone = saving if 0 < saving < at_least_saving else None
    if saving <= 0 or forgone is not None:
        best_s = 0.0
    at_once = _AllowedTime(now, always, expected).mean(0.0, needed_s)
    saving = _saving(work.mean(best_s, needed_s), at_once)
    return Start(work.begin_at(best_s), saving, forgone_saving=forgone)


def _saving(later: float, now: float) -> float:
    """Return which share of the emissions the later of two mean intensities saves."""
    return 1 - later / now if now > 0 else 0.0


class _AllowedTime:
    """The time in which work may be done, in seconds that leave out the hours between windows.

    It consists of pieces, none of which crosses a full hour: the intensity is known by hour.

    Args:
        now: the beginning.
        windows: the windows, in order.
        expected: the intensity by hour. Hours that are not known count with the mean of the others.
    """

    def __init__(
        self, now: datetime, windows: Iterable[Window], expected: Callable[[int], float | None]
    ) -> None:
        pieces = [piece for window in windows for piece in _by_hour(now, window)]
        rates = [expected(hour_of(begin)) for begin, _ in pieces]
        usual = fmean([rate for rate in rates if rate is not None] or [0.0])
        self._begins = [begin for begin, _ in pieces]
        # Seconds of work, and of work × intensity, until each piece begins and the last one ends.
        self._work_s, self._weighted = [0.0], [0.0]
        for (begin, end), rate in zip(pieces, rates, strict=True):
            seconds = (end - begin).total_seconds()
            self._work_s.append(self._work_s[-1] + seconds)
            self._weighted.append(self._weighted[-1] + seconds * (usual if rate is None else rate))

    @property
    def total_s(self) -> float:
        return self._work_s[-1]

    def begin_at(self, work_s: float) -> datetime:
        """Return the time at which work begins after so many seconds of possible work."""
        at = self._piece(work_s)
        return self._begins[at] + timedelta(seconds=work_s - self._work_s[at])

    def starts(self, needed_s: float) -> list[float]:
        """Return the starts among which the best one is, in seconds of work from now.

        Between two neighbouring ones, the mean intensity is a linear function of the start, so no
        start between them is better than both. At each of them the work begins or ends together
        with a piece, where each of its possible durations (`_SHARES`) has its own end.
        """
        last = self.total_s - needed_s
        ends = [at - share * needed_s for share in _SHARES for at in self._work_s]
        return sorted({start for start in (0.0, last, *self._work_s, *ends) if 0 <= start <= last})

    def mean(self, start_s: float, needed_s: float) -> float:
        """Return the expected intensity of the work, over its possible durations."""
        return fmean(
            (self._until(start_s + share * needed_s) - self._until(start_s)) / (share * needed_s)
            for share in _SHARES
        )

    def _until(self, work_s: float) -> float:
        at = self._piece(work_s)
        begin, end = self._work_s[at], self._work_s[at + 1]
        part = (work_s - begin) / (end - begin)
        return self._weighted[at] + part * (self._weighted[at + 1] - self._weighted[at])

    def _piece(self, work_s: float) -> int:
        """Return the index of the piece that a moment lies in; a piece includes its beginning."""
        at = bisect_left(self._work_s, work_s + _ROUNDING_S) - 1
        return min(max(at, 0), len(self._begins) - 1)


def _by_hour(now: datetime, window: Window) -> list[Window]:
    """Divide what is left of a window at full hours."""
    begin, end = max(window[0], now), window[1]
    if begin >= end:
        return []
    full = begin.replace(minute=0, second=0, microsecond=0) + _HOUR
    edges = [begin]
    while full < end:
        edges.append(full)
        full += _HOUR
    return list(pairwise([*edges, end]))
