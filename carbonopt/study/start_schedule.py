"""The times at which trials may begin: a study's schedule, applied to what is left of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from carbonopt.analysis.remaining import mean_duration, remaining_time
from carbonopt.carbon.expected_intensity import ExpectedIntensity, expected_intensity
from carbonopt.carbon.start_time import Start, cleanest_start, daily_windows
from carbonopt.core.errors import BadInput
from carbonopt.core.format import count_text, percent_text
from carbonopt.core.trial import TrialRecord
from carbonopt.core.units import human_duration
from carbonopt.spec.launch_settings import SlurmLaunch
from carbonopt.spec.schedule_settings import MOST_DAYS, Schedule
from carbonopt.spec.study_data import CarbonTrace, PlannedStart, StudyData, wall_clock_s
from carbonopt.study_file.study_checks import CheckedStudy

_MINUTE = timedelta(minutes=1)


def now_in_utc() -> datetime:
    return datetime.now(UTC)


def first_call(data: StudyData, now: datetime) -> datetime:
    """Return when a study was first called; `now` if no call has begun its trials."""
    begun = [session.started_at for session in data.sessions if not session.before_study]
    return min([now, *map(datetime.fromisoformat, begun)])


def check_schedule(checked: CheckedStudy, now: datetime) -> None:
    """Check that a study which begins now can keep its schedule.

    Raises:
        BadInput: if the deadline has passed or comes too soon for `budget.hours`, with the earliest
            one that is possible; if it is more than 366 days away; if the windows can't be told on
            a day when clocks change; or if the file of intensities can't be used.
    """
    schedule = checked.config.schedule
    if schedule is None:
        return
    if isinstance(checked.forecast_or_error, BadInput):
        raise checked.forecast_or_error
    finish_by = schedule.deadline(now)
    needed = timedelta(hours=checked.config.budget.hours or 0)
    deadline = f"schedule.finish_by is {_minute(finish_by)}"
    if finish_by - now > timedelta(days=MOST_DAYS):
        raise BadInput(
            f"{deadline}, but it is {_minute(now)}; the latest possible is {MOST_DAYS} days later,"
            f" {_minute(now + timedelta(days=MOST_DAYS))}."
        )
    if finish_by <= now or _allowed(schedule, now, finish_by) < needed:
        after = f", and budget.hours allows {human_duration(needed.total_seconds())}" * bool(needed)
        earliest = _earliest_deadline(schedule, now, needed)
        if earliest is None:
            raise BadInput(
                f"schedule.hours must allow budget.hours,"
                f" {human_duration(needed.total_seconds())}, within {MOST_DAYS} days, but"
                f" {', '.join(schedule.hours)} is too short for that; give longer windows or fewer"
                " hours."
            )
        raise BadInput(
            f"{deadline}, but it is {_minute(now)}{after}; the earliest possible is"
            f" {_minute(earliest)}."
        )
    if not _allowed(schedule, now, finish_by):
        raise BadInput(f"{deadline}, before any of schedule.hours begins; give a later one.")
    if checked.forecast_or_error is not None:
        expected_intensity(checked.forecast_or_error, now, finish_by)


def _allowed(schedule: Schedule, begin: datetime, end: datetime) -> timedelta:
    return _total(daily_windows(schedule, begin, end), begin)


def _total(windows: Iterable[tuple[datetime, datetime]], begin: datetime) -> timedelta:
    """Return the duration of all windows from a time on."""
    return sum((until - max(since, begin) for since, until in windows), timedelta(0))


def _earliest_deadline(schedule: Schedule, now: datetime, needed: timedelta) -> datetime | None:
    """Return the earliest deadline, in whole minutes, that a call within a minute can still keep.

    None: there is none within MOST_DAYS.
    """
    end = _earliest_end(schedule, now + _MINUTE, needed)
    if end is None:
        return None
    whole = end.replace(second=0, microsecond=0)
    return whole if whole == end else whole + _MINUTE


def _earliest_end(schedule: Schedule, now: datetime, needed: timedelta) -> datetime | None:
    """Return when work of this duration ends if it begins as soon as the windows allow.

    None: it ends after more than MOST_DAYS.
    """
    for day in range(MOST_DAYS):
        since = now + timedelta(days=day)
        try:
            windows = daily_windows(schedule, since, since + timedelta(days=1))
        except BadInput:
            continue  # the clocks are changed within a window: a deadline after that is refused
        for begin, end in windows:
            if needed <= end - begin:
                return begin + needed
            needed -= end - begin
    return None


@dataclass
class StartSchedule:
    """Decides for a worker whether its next trial begins now.

    Args:
        checked: the study.
        first_called_at: when the study was first called.
        warn: is told, once, why the study does not wait.
    """

    checked: CheckedStudy
    first_called_at: datetime
    warn: Callable[[str], None]
    # of the last plan: the saving that was smaller than `at_least_saving`; None: there was none
    forgone_saving: float | None = None
    _said: set[str] = field(default_factory=set)

    def plan(
        self,
        records: tuple[TrialRecord, ...],
        remaining: timedelta | None,
        now: datetime,
        *,
        waits: bool,
    ) -> PlannedStart | None:
        """Return when the next trial is to begin; None: now.

        Args:
            records: the trials so far.
            remaining: how long the rest of the study takes; None: nothing is known of it, so that
                a first trial has to tell.
            now: the time.
            waits: whether the study waits already. Then `at_least_saving` no longer applies.
        """
        schedule = self.checked.config.schedule
        if schedule is None:
            return None
        finish_by = schedule.deadline(self.first_called_at)
        if finish_by <= now:
            self._say(f"schedule.finish_by, {_minute(finish_by)}, has passed: it goes on at once")
            return None
        try:
            windows = daily_windows(schedule, now, finish_by)
        except BadInput as error:
            self._say(f"it goes on at once: {error}")
            return None
        try:
            expected = self._expected(now, finish_by)
        except BadInput as error:
            if not schedule.hours:
                self._say(f"it goes on at once: {error}")
                return None
            expected = None  # the windows need no file
            self._say(f"it keeps schedule.hours, but does not wait for cleaner hours: {error}")
        start = self._choose(records, remaining, now, finish_by, windows, expected, waits=waits)
        self.forgone_saving = start.forgone_saving
        if start.at <= now:
            return None
        return PlannedStart(
            at=start.at.isoformat(timespec="seconds"),
            finish_by=finish_by.isoformat(timespec="seconds"),
            expected_saving=start.saving,
            rule="" if expected is None else expected.rule,
        )

    def _choose(
        self,
        records: tuple[TrialRecord, ...],
        remaining: timedelta | None,
        now: datetime,
        finish_by: datetime,
        windows: tuple[tuple[datetime, datetime], ...],
        expected: ExpectedIntensity | None,
        *,
        waits: bool,
    ) -> Start:
        schedule = self.checked.config.schedule
        assert schedule is not None
        trial = mean_duration(records)
        if schedule.hours and trial is not None:
            # A trial that would go on beyond its window waits for the next one.
            windows = tuple(
                window for window in windows if window[1] - max(now, window[0]) >= trial
            )
        if not windows:
            lack = "is left" if trial is None else "is as long as a trial"
            length = "" if trial is None else f" ({human_duration(trial.total_seconds())})"
            self._say(
                f"no window of schedule.hours until {_minute(finish_by)} {lack}{length}: it goes on"
                " at once"
            )
            return Start(now, in_time=False)
        if expected is None or remaining is None:
            if remaining is not None and _total(windows, now) < remaining:
                self._say(
                    f"what is left takes about {human_duration(remaining.total_seconds())}, longer"
                    f" than schedule.hours allow until {_minute(finish_by)}"
                )
            return Start(max(now, windows[0][0]))
        start = cleanest_start(
            now,
            expected.at,
            remaining,
            finish_by,
            windows,
            at_least_saving=0.0 if waits else schedule.at_least_saving,
        )
        if not start.in_time:
            self._say(
                f"what is left takes about {human_duration(remaining.total_seconds())}, too long to"
                f" end by {_minute(finish_by)}: it does not wait for cleaner hours"
            )
        return start

    def _expected(self, now: datetime, finish_by: datetime) -> ExpectedIntensity | None:
        if isinstance(self.checked.forecast_or_error, BadInput):
            raise self.checked.forecast_or_error
        if self.checked.forecast_or_error is None:
            return None
        return expected_intensity(self.checked.forecast_or_error, now, finish_by)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.warn(text)


def plan_first(
    checked: CheckedStudy, now: datetime, warn: Callable[[str], None]
) -> PlannedStart | None:
    """Return when a study that is called now would begin; None: at once.

    It is taken to last for `budget.hours`; where a Slurm job runs it, no longer than the job.
    """
    schedule = StartSchedule(checked, now, warn)
    return schedule.plan((), _whole_duration(checked), now, waits=False)


def _whole_duration(checked: CheckedStudy) -> timedelta | None:
    """Return how long a new study takes at most, as far as its file tells."""
    config = checked.config
    limits = [timedelta(hours=config.budget.hours)] if config.budget.hours is not None else []
    if isinstance(config.launch, SlurmLaunch):
        limits.append(timedelta(minutes=config.launch.time))
    return min(limits, default=None)


def _rest(checked: CheckedStudy, begun: StudyData) -> timedelta | None:
    """Return how long what is left of a study takes at most, with one worker."""
    energy_kwh = begun.spent_kwh()
    hours = wall_clock_s(begun.sessions) / 3600
    kg_co2e = checked.emissions_kg_co2e(energy_kwh)
    return remaining_time(checked.config, begun, hours, energy_kwh, kg_co2e, 1)


def schedule_text(checked: CheckedStudy, now: datetime, begun: StudyData | None = None) -> str:
    """Describe the plan of a study that is called now.

    Args:
        begun: the study as an earlier call has left it; None: it is new.
    """
    schedule = checked.config.schedule
    if schedule is None:
        return ""
    first = now if begun is None else first_call(begun, now)
    parts = [f"ends by {_minute(schedule.deadline(first))}"]
    if schedule.hours:
        parts.append(f"runs {', '.join(schedule.hours)} ({schedule.time_zone})")
    if begun is not None and isinstance(checked.config.launch, SlurmLaunch):
        parts.append("has begun, so that its jobs do not wait")
        return "; ".join(parts)
    remaining = _whole_duration(checked) if begun is None else _rest(checked, begun)
    records = () if begun is None else begun.records
    planner = StartSchedule(checked, first, parts.append)
    plan = planner.plan(records, remaining, now, waits=False)
    if plan is not None:
        at = _minute(datetime.fromisoformat(plan.at))
        by = f" (by {plan.rule})" if plan.rule else ""
        parts.append(f"called now, it would wait until {at}{plan.effect}{by}")
    elif remaining is None and isinstance(checked.forecast_or_error, CarbonTrace):
        parts.append(
            f"begins at once: how long {count_text(1, 'trial')} takes is known only then (or give"
            " budget.hours)"
        )
    else:
        small = ""
        if planner.forgone_saving is not None:
            small = (
                f": a wait is expected to save {percent_text(planner.forgone_saving)}, and"
                f" schedule.at_least_saving is {percent_text(schedule.at_least_saving)}"
            )
        parts.append(f"called now, it would not wait{small}")
    return "; ".join(parts)


def _minute(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="minutes")
