"""The live display of a running study."""

import time

import pytest
from small_studies import script_run, script_study, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.cli.display import LiveDisplay, print_tables
from carbonopt.core.format import emissions_text
from carbonopt.core.trial import Failure, StopReason, TrialState
from carbonopt.core.units import kwh_from_joules
from carbonopt.report.comparison_report import StudiesView, compared
from carbonopt.report.study_view import StudyView
from carbonopt.spec.trial_spec import TrialSpec


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock: the monotonic time in seconds, which a test moves."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def begun(data) -> tuple[LiveDisplay, TrialSpec]:
    display = LiveDisplay(data.config)
    display.study_started(data.model_copy(update={"records": (), "sessions": ()}), 0.0)
    spec = TrialSpec(
        number=0,
        attempt=1,
        seed=0,
        params=data.records[0].params,
        workload={},
        prepared_dir="",
        trial_dir="",
    )
    return display, spec


def lines(display: LiveDisplay) -> list[str]:
    return str(display._live.renderable).splitlines()


def test_a_script_without_lines_is_shown_by_its_time_and_energy(now: list[float]) -> None:
    data = script_study(script_run(0, 25.0))
    display, spec = begun(data)
    display.trial_started(spec, None)
    first, _, used = lines(display)
    assert "trial 0  0.0 s" in first
    now[0] += 22.0
    display.still_running(0.0)
    assert "22" in lines(display)[0] and "J" not in lines(display)[0]
    now[0] += 10.0
    display.still_running(kwh_from_joules(286.0))
    first, _, used = lines(display)
    assert "32" in first and "286 J" in first and "286 J" in used
    display.trial_ended(data.records[0])
    display.trial_started(spec, None)
    first, _, used = lines(display)
    assert "286" not in first + used, "the record has its energy"


def test_what_a_trial_reported_stays_while_its_time_goes_on(now: list[float]) -> None:
    display, spec = begun(study(trial(0)))
    display.trial_started(spec, None)
    display.progress(3, 10, kwh_from_joules(50.0))
    now[0] += 5.0
    display.still_running(kwh_from_joules(70.0))
    first, _, used = lines(display)
    assert "5.0 s" in first and "step 3/10" in first and "50.0 J" in first and "70.0 J" in used


def test_what_is_left_is_counted_as_the_budget_counts_it(now: list[float]) -> None:
    """After 8 hours of waiting; gaps and other workers' trials are in the energy, too."""
    data = study(trial(0), raw={"budget": {"hours": 4, "energy_kwh": 5}})
    display, spec = begun(data)
    now[0] += 8 * 3600.0
    display.used(0.5, 2.0)
    display.trial_started(spec, None)
    now[0] += 1800.0
    display.still_running(1.0)
    used = lines(display)[2]
    assert "used: 1 h 00 min, 3.00 kWh" in used
    assert "3 h 00 min and 2.00 kWh left of the budget" in used


def test_trial_that_goes_on_from_its_checkpoint_counts_once(now: list[float]) -> None:
    """Its record has the energy of both attempts, and its first attempt was not its end."""
    data = study(trial(0, 2.0), raw={"budget": {"trials": 3}})
    display, spec = begun(data)
    crashed = {"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED}
    first = data.records[0].model_copy(update=crashed)
    display.trial_ended(first)
    display.used(1.0, first.spent_kwh)
    display.trial_started(spec, None)
    display.still_running(0.5)
    display.progress(7, 10, 2.4)
    used = lines(display)[2]
    assert f"{first.spent_kwh + 0.5:.2f} kWh" in used
    assert "trial 1 of 3" in used and "left" not in used


def test_the_best_so_far_is_no_lucky_repeat(now: list[float]) -> None:
    data = study(trial(0, 2e-3), trial(1, 1e-3, repeat_of=0, seed=1))
    display, spec = begun(data)
    for record in data.records:
        display.trial_ended(record)
    display.trial_started(spec, None)
    assert "best so far: trial 0" in lines(display)[1]


def test_the_best_so_far_is_what_the_report_recommends(now: list[float]) -> None:
    """A confirmed configuration, by its mean, before a cheaper one that ran once."""
    repeats = [trial(n, (4 + n) * 1e-3, 4.0, repeat_of=0, seed=n) for n in (1, 2)]
    records = (trial(0, 4e-3, 4.0), *repeats, trial(3, 3e-3, 4.9))
    data = study(*records, raw={"confirm": {"seeds": 3, "runners_up": 0}})
    display, spec = begun(data)
    for record in data.records:
        display.trial_ended(record)
    display.trial_started(spec, None)
    emissions = emissions_text(recommend(data).emissions_kg_co2e)
    assert f"trial 0, {emissions}, mean of 3 seeds" in lines(display)[1]


@pytest.mark.parametrize("log", ["trials/0000/log-1.txt", None])
def test_a_failure_names_its_log_where_there_is_one(log: str | None, capsys) -> None:
    failure = Failure(kind="diverged", text="the loss is not finite\nmore", log=log)
    record = trial(0, perplexity=None, state=TrialState.DIVERGED, failure=failure)
    display, _ = begun(study(record))
    display.trial_ended(record)
    shown = " ".join(capsys.readouterr().err.split())
    assert "the loss is not finite" in shown
    assert ("log" in shown) == (log is not None)


@pytest.mark.parametrize("width", [40, 80, 100, 300])
def test_a_table_is_never_cut(width: int, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = ("quickstart-of-a-long-name", "another-study-of-a-long-name")
    view = StudiesView({name: StudyView(study(trial(0), name=name)) for name in names})
    tables = [table for table in compared(view).tables() if not table.folded]
    print_tables(tables)
    out = capsys.readouterr().out
    assert "…" not in out
    for table in tables:
        assert all(column.label in out for column in table.columns)
        assert all(cell.text in out for row in table.rows for cell in row)
    recommended = next(table for table in tables if table.key == "recommended")
    cell = recommended.rows[0][1]
    line = f"{recommended.columns[1].label}: {cell.text}"
    assert (line in out.splitlines()) is (width < 300)
