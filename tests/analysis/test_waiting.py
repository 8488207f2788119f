"""What waiting for clean hours cost and saved, by hand."""

from datetime import UTC, datetime, timedelta

import pytest
from small_studies import study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.analysis.repricing import repricing
from carbonopt.analysis.waiting import waiting
from carbonopt.core.trial import Attempt, Durations
from carbonopt.report.sections.waiting_section import caveats, section
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import CarbonTrace, SessionLedger, StudyData, Wait

BEGAN = datetime(2024, 3, 5, 18, tzinfo=UTC)
RATES = (400.0, 300.0, 200.0, 100.0, 100.0, 500.0)  # from 18:00 to 24:00
HOUR_S = 3600.0


def waited(rates: tuple[float | None, ...] | None = RATES) -> StudyData:
    """Called at 18:00, it waits for two hours, and its one trial runs from 20:00 to 22:00."""
    lasts = Durations(train=2 * HOUR_S, setup=0, eval=0, total=2 * HOUR_S)
    record = trial(0, 1.0, duration_s=lasts).model_copy(
        update={"started_at": (BEGAN + timedelta(hours=2)).isoformat()}
    )
    wait = Wait(
        started_at=BEGAN.isoformat(), duration_s=2 * HOUR_S, energy_kwh=0.1, expected_saving=0.5
    )
    total_kwh = 0.1 + record.energy_kwh.total
    session = SessionLedger(
        started_at=BEGAN.isoformat(),
        duration_s=4 * HOUR_S,
        gap_kwh=0.1,
        outer_kwh=total_kwh,
        waits=(wait,),
    )
    trace = None
    if rates is not None:
        trace = CarbonTrace(source="made", start=BEGAN.isoformat(), g_co2e_per_kwh=rates)
    return study(record).model_copy(update={"sessions": (session,), "trace": trace})


def test_the_saving_is_that_of_the_trials_hours_against_those_without_the_wait() -> None:
    data = waited()
    found = waiting(data)
    assert (found.waits, found.waited_s, found.idle_kwh) == (1, 2 * HOUR_S, 0.1)
    assert found.expected_saving == 0.5
    # 20:00 to 22:00 at 150 g, instead of 18:00 to 20:00 at 350 g
    assert found.realised_saving == pytest.approx(1 - 150 / 350)
    total_kwh = data.records[0].energy_kwh.total
    net = 1 - (150 * total_kwh + 350 * 0.1) / (350 * total_kwh)
    assert found.realised_net_saving == pytest.approx(net)
    (table,) = section(StudyView(data)).blocks
    assert table.rows[0][1].text == "1 wait"


@pytest.mark.parametrize("rates", [None, (400.0, 300.0, 200.0), (400.0, None, 200.0, 100.0)])
def test_a_trace_that_lacks_these_hours_tells_nothing(rates) -> None:
    found = waiting(waited(rates))
    assert found.realised_saving is None and found.realised_net_saving is None
    assert found.idle_kg_co2e > 0


def test_hours_of_attempts_that_an_earlier_version_ran_are_not_known() -> None:
    """Its two hours are those of both attempts; only the later one's start was stored then."""
    data = waited()
    went_on = data.records[0].model_copy(update={"continued_at_steps": (7,)})
    data = data.model_copy(update={"records": (went_on,)})
    found = waiting(data)
    assert found.realised_saving is None and found.realised_net_saving is None
    (table,) = section(StudyView(data)).blocks
    assert "checkpoint" in table.rows[-1][1].text


def test_hours_of_each_attempt_that_counts_are_priced() -> None:
    """An hour before the wait and an hour after it: only the latter would have been at 18:00."""
    data = waited()
    began = data.records[0].started_at
    attempts = (
        Attempt(started_at=(BEGAN - timedelta(hours=2)).isoformat()),  # all of it was lost
        Attempt(started_at=(BEGAN - timedelta(hours=1)).isoformat(), counted_s=HOUR_S),
    )
    changes = {"continued_at_steps": (7,), "earlier_attempts": attempts}
    went_on = data.records[0].model_copy(update=changes)
    start = (BEGAN - timedelta(hours=1)).isoformat()
    trace = CarbonTrace(source="made", start=start, g_co2e_per_kwh=(250.0, *RATES))
    found = waiting(data.model_copy(update={"records": (went_on,), "trace": trace}))
    assert found.first_start == attempts[0].started_at < began
    # 17:00 to 18:00 at 250 g, then 20:00 to 21:00 at 200 g, instead of 18:00 to 19:00 at 400 g
    assert found.realised_saving == pytest.approx(1 - (250 + 200) / (250 + 400))


def test_a_study_without_waits_has_no_section() -> None:
    assert waiting(study(trial(0, 1.0))) is None
    assert section(StudyView(study(trial(0, 1.0)))) is None


def test_a_sessions_energy_is_priced_at_the_hours_in_which_it_was_used() -> None:
    data = waited()
    priced = repricing(data, recommend(data))
    total_kwh = data.records[0].energy_kwh.total
    grams = 0.1 * 350 + total_kwh * 150
    assert priced.study_emissions_kg_co2e == pytest.approx(grams / 1000 * data.config.carbon.pue)


@pytest.mark.parametrize(
    ("rates", "idle_kwh", "key"),
    [
        (RATES, 1e-6, None),
        (RATES, 5.0, "waiting_dearer"),
        (None, 1e-6, None),
        (None, 5.0, "waiting_perhaps_dearer"),
    ],
)
def test_a_wait_that_cost_more_than_it_saved_is_a_caveat(rates, idle_kwh, key) -> None:
    data = waited(rates)
    (session,) = data.sessions
    (wait,) = session.waits
    session = session.model_copy(
        update={"waits": (wait.model_copy(update={"energy_kwh": idle_kwh}),)}
    )
    data = data.model_copy(update={"sessions": (session,)})
    assert data.records[0].energy_kwh.total < 5.0 / 2
    assert [caveat.key for caveat in caveats(StudyView(data))] == ([key] if key else [])
