"""When a study's trials begin: its deadline and its windows, what is left of it, and real waits."""

import os
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from small_studies import study, trial
from study.test_resume import go_on, read, start, wait_for, workers

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.remaining import mean_duration, remaining_time
from carbonopt.analysis.waiting import waiting
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Durations, TrialState
from carbonopt.spec.search_settings import Budget, Confirm
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import CarbonTrace, SessionLedger, Wait, wall_clock_s
from carbonopt.study.start_schedule import (
    StartSchedule,
    check_schedule,
    first_call,
    schedule_text,
)
from carbonopt.study.trial_loop import STORE_WAIT_S
from carbonopt.study_file.reader import parse_study
from carbonopt.study_file.study_checks import CheckedStudy, check

NOW = datetime(2026, 6, 3, 18, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


def trace() -> CarbonTrace:
    """28 days until NOW, clean from 02:00 to 06:00 UTC."""
    begin = NOW - timedelta(days=28)
    rates = tuple(100.0 if (begin + n * HOUR).hour in range(2, 6) else 400.0 for n in range(672))
    return CarbonTrace(source="made", start=begin.isoformat(), g_co2e_per_kwh=rates)


def checked(tiny_study: dict, forecast: CarbonTrace | None = None, **schedule) -> CheckedStudy:
    tiny_study["budget"] = {"trials": 4, "hours": 4}
    tiny_study["schedule"] = {"finish_by": "+24h", "hours": [], **schedule}
    if forecast is not None:
        tiny_study["carbon"]["trace"] = "grid.csv"
    config = parse_study(tiny_study, "study.yaml")
    bare = config.model_copy(
        update={"carbon": config.carbon.model_copy(update={"trace": None}), "schedule": None}
    )
    made = check(bare)
    return CheckedStudy(**{**vars(made), "config": config, "forecast_or_error": forecast})


def planned(of: CheckedStudy, records=(), now=NOW, first_call=NOW, waits=False, hours=4.0):
    said: list[str] = []
    plan = StartSchedule(of, first_call, said.append).plan(
        study(*records).records, None if hours is None else hours * HOUR, now, waits=waits
    )
    return None if plan is None else datetime.fromisoformat(plan.at), said


def test_the_study_waits_for_the_clean_hours_of_its_window(tiny_study: dict) -> None:
    of = checked(tiny_study, trace())
    assert planned(of) == (NOW + 8 * HOUR, [])
    assert planned(of, now=NOW + 8 * HOUR) == (None, [])
    assert planned(of, hours=None) == (None, []), "nothing is known of how long it takes"


def test_a_deadline_counts_from_the_first_call(tiny_study: dict) -> None:
    of = checked(tiny_study, trace(), finish_by="+10h")
    start, said = planned(of)
    assert start == NOW + 6 * HOUR and not said, "the latest start"
    start, said = planned(of, first_call=NOW - 11 * HOUR)
    assert start is None and "has passed" in said[0]
    start, said = planned(of, hours=11)
    assert start is None and "too long" in said[0]


def test_a_saving_that_is_too_small_is_told(tiny_study: dict) -> None:
    """Work of 4 hours in the clean hours from 02:00 to 06:00 emits a quarter."""
    of = checked(tiny_study, trace(), at_least_saving=0.8)
    planner = StartSchedule(of, NOW, print)
    assert planner.plan((), 4 * HOUR, NOW, waits=False) is None
    assert planner.forgone_saving == pytest.approx(0.75)
    assert "75 %" in schedule_text(of, NOW) and "80 %" in schedule_text(of, NOW)
    asked = checked(tiny_study, trace(), at_least_saving=0.7)
    planner = StartSchedule(asked, NOW, print)
    assert planner.plan((), 4 * HOUR, NOW, waits=False) is not None
    assert planner.forgone_saving is None


def test_check_plans_what_is_left_of_a_study_that_has_begun(tiny_study: dict) -> None:
    """A call 9 hours ago was in time for its 4 hours; one hour is left now, and an hour of work."""
    of = checked(tiny_study, trace(), finish_by="+10h")
    session = SessionLedger(started_at=(NOW - 9 * HOUR).isoformat(), duration_s=3 * 3600)
    begun = study(sessions=(session,), ended=None)
    assert first_call(begun, NOW) == NOW - 9 * HOUR
    text = schedule_text(of, NOW, begun)
    assert "2026-06-03T19:00" in text and "too long" not in text
    later = schedule_text(of, NOW + 2 * HOUR, begun)
    assert "has passed" in later
    assert "2026-06-04T04:00" in schedule_text(of, NOW), "a new study has the whole time"


@pytest.mark.parametrize("forecast", [True, False])
def test_without_a_window_before_the_deadline_nothing_waits_outside_of_them(
    forecast: bool, tiny_study: dict
) -> None:
    of = checked(
        tiny_study, trace() if forecast else None,
        finish_by="+12h", hours=["16:00-17:30"], time_zone="UTC",
    )  # fmt: skip
    start, said = planned(of)
    assert start is None and len(said) == 1 and "no window of schedule.hours" in said[0]


def test_the_earliest_deadline_that_is_named_is_possible(tiny_study: dict) -> None:
    """5 hours in windows of a minute take 300 days; 7 hours don't fit into a year."""

    def refused(hours: float, finish_by: str) -> str:
        of = checked(tiny_study, hours=["10:00-10:01"], time_zone="UTC", finish_by=finish_by)
        budget = of.config.budget.model_copy(update={"hours": hours})
        config = of.config.model_copy(update={"budget": budget})
        with pytest.raises(BadInput) as error:
            check_schedule(CheckedStudy(**{**vars(of), "config": config}), NOW)
        return str(error.value)

    earliest = refused(5.0, "+24h").split()[-1].removesuffix(".")
    assert datetime.fromisoformat(earliest) > NOW + timedelta(days=299)
    of = checked(tiny_study, hours=["10:00-10:01"], time_zone="UTC", finish_by=earliest)
    budget = of.config.budget.model_copy(update={"hours": 5.0})
    config = of.config.model_copy(update={"budget": budget})
    check_schedule(CheckedStudy(**{**vars(of), "config": config}), NOW)
    assert "366 days" in refused(7.0, "+24h")


def test_outside_of_its_windows_no_trial_begins(tiny_study: dict) -> None:
    of = checked(tiny_study, hours=["20:00-23:00"], time_zone="UTC")
    assert planned(of)[0] == NOW + 2 * HOUR
    assert planned(of, now=NOW + 2 * HOUR)[0] is None
    long = {"duration_s": Durations(train=7000, setup=100, eval=100, total=7200)}
    assert planned(of, [trial(0, 1.0, **long)], now=NOW + 3 * HOUR)[0] is None
    # two hours of trial don't fit in the last hour: the window of the next day begins too late
    start, said = planned(of, [trial(0, 1.0, **long)], now=NOW + 4 * HOUR)
    assert start is None and "no window" in said[0]


@pytest.mark.parametrize(
    ("hours", "known", "saves"),
    [
        ("02:00-06:00", 4, 0.75),  # clean hours, and now it is not: 100 instead of 400 g
        ("06:00-12:00", 4, 0.0),
        ("02:00-06:00", None, None),  # how long it takes is not known, so neither are its hours
    ],
)
def test_a_wait_saves_against_a_start_now_which_its_windows_forbid(
    hours: str, known: int | None, saves: float | None, tiny_study: dict
) -> None:
    of = checked(tiny_study, trace(), hours=[hours], time_zone="UTC", finish_by="+24h")
    remaining = None if known is None else known * HOUR
    plan = StartSchedule(of, NOW, print).plan((), remaining, NOW, waits=False)
    assert plan.expected_saving == (None if saves is None else pytest.approx(saves))
    dirtier = NOW + 10 * HOUR  # at 04:00
    plan = StartSchedule(of, NOW, print).plan((), remaining, dirtier, waits=False)
    if hours == "06:00-12:00":
        assert plan.expected_saving < 0, "the clean hours are forbidden"


def test_windows_that_are_too_short_until_the_deadline_are_said(tiny_study: dict) -> None:
    of = checked(tiny_study, hours=["20:00-23:00"], time_zone="UTC")
    start, said = planned(of, hours=3)
    assert start == NOW + 2 * HOUR and said == []
    start, said = planned(of, hours=4)
    assert start == NOW + 2 * HOUR and len(said) == 1
    start, said = planned(of, now=NOW + 4 * HOUR, hours=2)  # one hour of the window is left
    assert start is None and len(said) == 1


def test_windows_alone_say_nothing_of_emissions(tiny_study: dict) -> None:
    of = checked(tiny_study, hours=["20:00-23:00"], time_zone="UTC")
    plan = StartSchedule(of, NOW, print).plan((), 2 * HOUR, NOW, waits=False)
    assert plan.expected_saving is None and plan.effect == ""
    wait = Wait(started_at=NOW.isoformat(), duration_s=60, energy_kwh=0.1, expected_saving=None)
    session = SessionLedger(started_at=NOW.isoformat(), duration_s=90, waits=(wait,))
    assert waiting(study(sessions=(session,))).expected_saving is None


def test_a_forecast_that_is_gone_lets_a_study_go_on(tiny_study: dict) -> None:
    of = checked(tiny_study, trace())
    gone = CheckedStudy(**{**vars(of), "forecast_or_error": BadInput("can't read grid.csv")})
    start, said = planned(gone)
    assert start is None and "grid.csv" in said[0]
    with pytest.raises(BadInput, match=r"grid\.csv"):
        check_schedule(gone, NOW)


@pytest.mark.parametrize("hours", [4.0, 2.0])
def test_windows_are_kept_without_the_forecast(hours: float, tiny_study: dict) -> None:
    """4 hours of work don't fit into the 3 hours of the window, which is said too."""
    windows = {"hours": ["20:00-23:00"], "time_zone": "UTC", "finish_by": "+12h"}
    old = trace()  # ended 60 days before the call, and has no hours of a year ago
    cases = [(BadInput("can't read grid.csv"), NOW), (old, NOW + timedelta(days=60))]
    for forecast, now in cases:
        of = checked(tiny_study, trace(), **windows)
        of = CheckedStudy(**{**vars(of), "forecast_or_error": forecast})
        said: list[str] = []
        schedule = StartSchedule(of, now, said.append)
        for minutes in (0, 1):
            at = now + timedelta(minutes=minutes)
            plan = schedule.plan((), hours * HOUR, at, waits=False)
            assert plan is not None and plan.expected_saving is None
            assert datetime.fromisoformat(plan.at) == now + 2 * HOUR
        assert len(said) == (1 if hours == 2.0 else 2), "each is said once"
        assert schedule.plan((), hours * HOUR, now + 3 * HOUR, waits=False) is None


@pytest.mark.parametrize(
    ("schedule", "earliest"),
    [
        ({"finish_by": "2026-06-03T17:00+00:00"}, "2026-06-03T22:02"),
        ({"finish_by": "2026-06-03T21:59+00:00"}, "2026-06-03T22:02"),
        # The window of today is open until 20:00 UTC, and too short for half of the 4 hours.
        (
            {"finish_by": "+10h", "hours": ["20:00-22:00"], "time_zone": "Europe/Berlin"},
            "2026-06-05T18:02",
        ),
        (
            {"finish_by": "+10h", "hours": ["20:10-22:10"], "time_zone": "Europe/Berlin"},
            "2026-06-04T20:10",
        ),
    ],
)
def test_a_deadline_that_comes_too_soon_is_answered_with_the_earliest(
    schedule: dict, earliest: str, tiny_study: dict
) -> None:
    """It is what a call within a minute can still keep, and no minute more."""
    now = NOW + timedelta(seconds=27.5)
    of = checked(tiny_study, trace(), **schedule)
    with pytest.raises(BadInput) as refused:
        check_schedule(of, now)
    assert f"the earliest possible is {earliest}" in str(refused.value)
    given = datetime.fromisoformat(f"{earliest}+00:00")
    typed = checked(tiny_study, trace(), **schedule | {"finish_by": given.isoformat()})
    check_schedule(typed, now + timedelta(minutes=1))
    too_early = (given - timedelta(minutes=1)).isoformat()
    with pytest.raises(BadInput, match="earliest possible"):
        check_schedule(
            checked(tiny_study, trace(), **schedule | {"finish_by": too_early}),
            now + timedelta(minutes=1),
        )


@pytest.mark.parametrize("late", ["2027-06-04T18:01+00:00", "2999-12-31T23:59:59+00:00"])
@pytest.mark.parametrize("hours", [[], ["20:00-22:00"]])
def test_a_deadline_is_at_most_366_days_away(late: str, hours: list, tiny_study: dict) -> None:
    of = checked(tiny_study, trace(), finish_by=late, hours=hours, time_zone="Europe/Berlin")
    with pytest.raises(BadInput, match="the latest possible is 366 days later, 2027-06-04T18:00"):
        check_schedule(of, NOW)
    check_schedule(checked(tiny_study, finish_by="2027-06-04T18:00+00:00"), NOW)


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        ({"finish_by": "2026-06-04T09:00"}, "2026-06-04T09:00"),
        ({"finish_by": "24h"}, "24h"),
        ({"finish_by": "+0h"}, r"\+0h"),
        ({"finish_by": "9999-12-31T23:59:59+00:00"}, "9999"),
        ({"finish_by": "9999-12-31T23:59:59-12:00"}, "9999"),
        ({"finish_by": "9999-12-31T23:59:59"}, "9999"),
        ({"finish_by": "0001-01-01T00:00+14:00"}, "0001"),
        ({"finish_by": "+24h", "hours": ["18-9"], "time_zone": "UTC"}, "18-9"),
        ({"finish_by": "+24h", "hours": ["09:00-09:00"], "time_zone": "UTC"}, "09:00-09:00"),
        ({"finish_by": "+24h", "hours": ["18:00-09:00"]}, "time_zone"),
        ({"finish_by": "+24h", "hours": ["18:00-09:00"], "time_zone": "Berlin"}, "Europe/Berlin"),
        ({"finish_by": "+24h"}, "schedule.forecast or carbon.trace"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(
    schedule: dict, found: str, tiny_study: dict
) -> None:
    with pytest.raises(BadInput, match=found):
        parse_study({**tiny_study, "schedule": schedule}, "study.yaml")


def test_a_time_that_exists_twice_is_answered_with_both_readings(tiny_study: dict) -> None:
    schedule = {"finish_by": "2026-10-25T02:30", "time_zone": "Europe/Berlin"}
    with pytest.raises(BadInput) as refused:
        parse_study({**tiny_study, "schedule": schedule}, "study.yaml")
    assert "02:30+02:00 or 2026-10-25T02:30+01:00" in str(refused.value)


def test_a_replay_has_no_hours_to_wait_for(replay_study: dict) -> None:
    with pytest.raises(BadInput, match="replay"):
        parse_study({**replay_study, "schedule": {"finish_by": "+24h"}}, "study.yaml")


def remaining_s(
    budget: dict,
    records=(),
    used_hours=0.0,
    used_kwh=0.0,
    workers=1,
    confirm: Confirm | None = None,
) -> float | None:
    data = study(*records)
    update = {"budget": Budget(**budget), "confirm": confirm}
    config: StudyConfig = data.config.model_copy(update=update)
    left = remaining_time(config, data, used_hours, used_kwh, used_kwh * 0.3, workers)
    return None if left is None else left.total_seconds()


def test_what_is_left_is_the_least_that_a_limit_leaves() -> None:
    lasts = {"duration_s": Durations(train=80, setup=10, eval=10, total=100)}
    two = [trial(0, 1.0, **lasts), trial(1, 1.0, **lasts)]
    assert remaining_s({"trials": 10}) is None
    assert remaining_s({"trials": 10, "hours": 2}, used_hours=0.5) == 5400
    assert remaining_s({"trials": 10}, two) == 800
    assert remaining_s({"trials": 10}, two, workers=2) == 400
    assert remaining_s({"trials": 10, "hours": 2}, two, used_hours=1.9) == pytest.approx(360)
    assert remaining_s({"trials": 10, "energy_kwh": 3}, two, used_kwh=1.0) == pytest.approx(400)


def test_a_trial_that_has_just_begun_makes_no_pace_and_is_still_to_do() -> None:
    lasts = {"duration_s": Durations(train=80, setup=10, eval=10, total=100)}
    just_begun = {
        "state": TrialState.RUNNING,
        "duration_s": Durations(train=5, setup=0, eval=0, total=5),
    }
    records = [trial(0, 1.0, **lasts), trial(1, 1.0, **just_begun)]
    assert remaining_s({"trials": 10}, records) == 900
    assert mean_duration(tuple(records)) == timedelta(seconds=100)


def test_what_is_left_has_the_repeats_of_the_baseline_too() -> None:
    lasts = {"duration_s": Durations(train=80, setup=10, eval=10, total=100)}
    ran = [trial(0, 1.0, **lasts), trial(1, 1.0, repeat_of=0, **lasts)]
    confirm = Confirm(seeds=3, runners_up=1)
    # 9 trials of the search and 2 × 2 repeats are left, less the one that ran
    assert remaining_s({"trials": 10}, ran, confirm=confirm) == 1200
    with_baseline = Confirm(seeds=3, runners_up=1, baseline=True)
    assert remaining_s({"trials": 10}, ran, confirm=with_baseline) == 1400


def test_a_wait_is_no_working_time() -> None:
    wait = Wait(
        started_at="2026-06-03T18:10:00+00:00", duration_s=600, energy_kwh=0.1, expected_saving=0.2
    )
    session = SessionLedger(started_at="2026-06-03T18:00:00+00:00", duration_s=3600, waits=(wait,))
    assert wall_clock_s([session]) == 3000
    other = SessionLedger(started_at="2026-06-03T18:15:00+00:00", duration_s=300)
    assert wall_clock_s([session, other]) == 3300


def with_window(tiny_study: dict, write_study, after: timedelta) -> tuple[Path, datetime]:
    """A study of one trial, whose window begins with the first minute after this time."""
    opens = (datetime.now(UTC) + after).replace(second=0, microsecond=0) + timedelta(minutes=1)
    closes = opens + 3 * HOUR
    tiny_study["search"]["space"] = {
        "global_batch_size": 64,
        "learning_rate": {"choices": [1e-3, 2e-3]},
        "epochs": 0.1,
    }
    tiny_study["budget"] = {"trials": 1, "hours": 1}
    tiny_study["schedule"] = {
        "finish_by": "+20h",
        "hours": [f"{opens:%H:%M}-{closes:%H:%M}"],
        "time_zone": "UTC",
    }
    return write_study(tiny_study), opens


def waits(folder: Path, call: int) -> bool:
    """Whether the call, numbered from 1, waits by now."""
    try:
        data = read(folder)
    except BadInput:  # the command has not stored the study yet
        return False
    has_begun = len(data.sessions) == call and bool(data.sessions[-1].waits)
    return data.planned_start is not None and has_begun


def interrupted(command: subprocess.Popen, number: int) -> int:
    os.killpg(command.pid, number)
    command.communicate(timeout=60)
    return command.returncode


@pytest.mark.slow
def test_a_study_waits_through_kills_and_then_runs(
    tiny_study: dict, write_study, tmp_path: Path
) -> None:
    study_file, opens = with_window(tiny_study, write_study, 2 * HOUR)
    folder = tmp_path / "out"
    signals = ((1, signal.SIGKILL, -signal.SIGKILL), (2, signal.SIGINT, 130))
    for call, number, code in signals:
        command = start(study_file, folder)
        wait_for(partial(waits, folder, call))
        time.sleep(2 * STORE_WAIT_S)
        pressed_s = time.monotonic()
        assert interrupted(command, number) == code
        assert time.monotonic() - pressed_s < 10
        wait = read(folder).sessions[-1].waits[-1]
        assert wait.duration_s > STORE_WAIT_S and wait.energy_kwh > 0
        assert datetime.fromisoformat(read(folder).planned_start.at) == opens
        wait_for(lambda: workers(folder) == [], 15)
    # The schedule of a study may be changed; this call has less to prepare.
    study_file, opens = with_window(tiny_study, write_study, timedelta(seconds=45))
    done = go_on(study_file, folder, 1)
    assert done.returncode in (0, 3), done.stderr
    data = read(folder)
    (record,) = data.records
    assert datetime.fromisoformat(record.started_at) >= opens
    assert data.planned_start is None and data.ended_by_budget
    (last,) = data.sessions[-1].waits
    assert 0 < last.energy_kwh <= data.sessions[-1].gap_kwh
    until = last.span[1]
    assert until - opens < timedelta(seconds=5), "it ends with the window's beginning"
    worked_s = wall_clock_s(data.sessions)
    spans_s = sum(session.duration_s for session in data.sessions)
    waited_s = sum(wait.duration_s for session in data.sessions for wait in session.waits)
    assert worked_s == pytest.approx(spans_s - waited_s, abs=0.1)
    assert footprint(data).closure == pytest.approx(1.0, abs=0.005)
