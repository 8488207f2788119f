"""What the page says of a study that runs: powers, what is left, what it is doing."""

from datetime import UTC, datetime, timedelta

import pytest
from small_studies import REPLAY, evaluation, many, study, trial

from carbonopt.analysis.recommend import recommend
from carbonopt.core.format import emissions_text
from carbonopt.core.trial import Durations, Energy, StopReason, TrialRecord, TrialState
from carbonopt.core.units import kwh_from_joules
from carbonopt.report.assemble import sections
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import PlannedStart, StudyData
from carbonopt.storage.watched_study import WatchedState
from carbonopt.storage.workers import KnownWorker
from carbonopt.watch.now_panel import Panel
from carbonopt.watch.page_parts import (
    QUICK,
    SLOW,
    document_parts,
    quick_document,
    settled,
    study_document,
)
from carbonopt.watch.running_study import (
    EndedTrials,
    PowerHistory,
    last_trials,
    recorded_spans,
    trial_left_s,
    work_left,
)

BEGUN = "2026-01-01T00:00:00+00:00"
BEGUN_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
WORKER = KnownWorker(
    id="me",
    host="<b>host</b>",
    pid=7,
    process="x",
    joins=False,
    began_at_s=BEGUN_S,
    silent_s=0.0,
    heartbeats=0,
)


def timed(number: int, seconds: float, joules: float, begun: str = BEGUN, **changes) -> TrialRecord:
    kwh = kwh_from_joules(joules)
    values = {
        "started_at": begun,
        "duration_s": Durations(train=seconds, setup=0, eval=0, total=seconds),
        "energy_kwh": Energy(train=kwh, setup=0, eval=0, total=kwh),
        **changes,
    }
    return trial(number, **values)


def running(number: int, seconds: float, joules: float, **changes) -> TrialRecord:
    changes = {"state": TrialState.RUNNING, "worker": "me", "evals": (), **changes}
    return timed(number, seconds, joules, perplexity=None, **changes)


def test_power_of_a_running_trial_is_that_between_its_energies():
    power = PowerHistory()
    for seconds, joules in ((2, 20), (4, 60), (4, 60), (6, 70)):
        record = running(0, seconds, joules)
        power.note([record])
    spans = power.spans([record])
    assert [span.power_w for span in spans] == pytest.approx([10, 20, 5])
    assert [(span.begin_s - BEGUN_S, span.end_s - BEGUN_S) for span in spans] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]
    assert all(span.of_running for span in spans)


def test_an_ended_trial_has_one_mean_power():
    power = PowerHistory()
    power.note([running(0, 2, 20)])
    power.note([])
    (span,) = power.spans([timed(0, 10, 150)])
    assert (span.power_w, span.of_running) == (pytest.approx(15), False)


def test_another_attempt_begins_its_power_anew():
    power = PowerHistory()
    power.note([running(0, 50, 500)])
    again = running(0, 2, 40, attempt=2)
    power.note([again])
    assert [span.power_w for span in power.spans([again])] == pytest.approx([20])


def test_long_histories_keep_their_first_and_last_moment():
    power = PowerHistory()
    for number in range(1, 2001):
        record = running(0, number, 3.0 * number)
        power.note([record])
    spans = power.spans([record])
    assert len(spans) <= 121
    assert (spans[0].begin_s, spans[-1].end_s) == (BEGUN_S, BEGUN_S + 2000)
    assert [span.power_w for span in spans] == pytest.approx([3.0] * len(spans))


def test_a_trial_goes_on_at_the_pace_of_its_steps():
    durations = Durations(train=8, setup=100, eval=2, total=110)
    record = running(0, 1, 1, steps_done=10, total_steps=40, duration_s=durations)
    assert trial_left_s(record) == pytest.approx(30)
    assert trial_left_s(running(0, 1, 1, total_steps=40)) is None


def test_running_and_interrupted_trials_are_still_to_do():
    ended = [timed(0, 10, 1), timed(1, 20, 1)]
    halted = timed(2, 1, 1, state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
    data = study(*ended, halted, running(3, 1, 1), ended=None)
    assert data.config.budget.trials == 5
    assert work_left(data, [WORKER], 0.0) == timedelta(seconds=3 * 15)
    assert work_left(data, [WORKER, WORKER], 0.0) == timedelta(seconds=3 * 15 / 2)
    assert work_left(study(running(0, 1, 1), ended=None), [WORKER], 0.0) is None
    assert work_left(study(*ended), [], 0.0) is None


def confirmed() -> StudyData:
    """A study whose repeats confirm trial 0; trial 3 is cheaper, but ran once."""
    repeats = (trial(n, (4 + n) * 1e-3, 4.0, repeat_of=0, seed=n) for n in (1, 2))
    return study(
        trial(0, 4e-3, 4.0),
        *repeats,
        trial(3, 3e-3, 4.9),
        ended=None,
        raw={"confirm": {"seeds": 3, "runners_up": 0}},
    )


def test_the_best_so_far_is_what_the_header_recommends() -> None:
    data = confirmed()
    header = recommend(data)
    assert (header.trial, header.seeds) == (0, 3)
    assert EndedTrials.of(data, None).recommendation == header
    shown = Panel("").draw(WatchedState(data, (WORKER,)))
    emissions = emissions_text(header.emissions_kg_co2e)
    assert f"trial 0, {emissions}, mean of 3 seeds" in shown


def test_the_last_trials_are_those_that_ended_last():
    first = timed(0, 100, 1)
    second = timed(1, 10, 1, begun="2026-01-01T00:00:20+00:00")
    assert [record.trial for record in last_trials(study(first, second), 1)] == [0]
    assert [record.trial for record in last_trials(study(first, second), 5)] == [0, 1]


def test_a_trial_that_went_on_has_no_power_at_a_time_of_day() -> None:
    """Its durations are those of both attempts: it would seem to end 80 s from now."""
    went_on = timed(0, 100, 1, begun="2026-01-01T00:00:20+00:00", continued_at_steps=(7,))
    later = timed(1, 20, 1, begun="2026-01-01T00:00:40+00:00")
    assert went_on.span is None and later.span is not None
    assert PowerHistory.latest([went_on, later]) == [later]
    assert [record.trial for record in last_trials(study(went_on, later), 1)] == [1]


def test_the_power_of_a_replay_is_that_of_its_trainings_without_a_time_of_day():
    """Recorded evaluations have energy but no time."""
    durations = Durations(train=10, setup=0, eval=0, total=10)
    energy = Energy(
        train=kwh_from_joules(3000),
        setup=0,
        eval=kwh_from_joules(1500),
        total=kwh_from_joules(4500),
    )
    first = timed(0, 10, 1, energy_kwh=energy, duration_s=durations)
    second = timed(1, 5, 1000, begun="2026-01-01T00:00:01+00:00")
    assert recorded_spans([second, first]) == [
        (0.0, 10.0, pytest.approx(300), False),
        (10.0, 15.0, pytest.approx(200), False),
    ]
    data = study(second, first, raw=REPLAY)
    shown = Panel("").draw(WatchedState(data, ()))
    assert "The latest: 200 W" in shown
    assert "time of day" not in shown
    assert [record.trial for record in last_trials(data, 2)] == [1, 0]


def test_ended_trials_are_looked_at_again_only_when_one_ends():
    first = study(timed(0, 10, 1), running(1, 1, 1), ended=None)
    known = EndedTrials.of(first, None)
    assert [record.trial for record in (known.best, *known.last, *known.powered)] == [0, 0, 0]
    going_on = first.model_copy(update={"records": (first.records[0], running(1, 2, 2))})
    assert EndedTrials.of(going_on, known) is known
    both = first.model_copy(update={"records": (first.records[0], timed(1, 20, 1, train_kwh=1e-4))})
    assert EndedTrials.of(both, known).best.trial == 1
    harder = study(*first.records, target=4.0, ended=None)
    assert EndedTrials.of(harder, known).best is None


def test_the_panel_escapes_and_names_all():
    record = running(0, 4, 60, steps_done=10, evals=(evaluation(7.0, 1),))
    plan = PlannedStart(
        at="2026-01-02T03:04:05+00:00", finish_by=BEGUN, expected_saving=0.25, rule="a rule"
    )
    data = study(record, ended=None, planned_start=plan)
    shown = Panel("<i>step").draw(WatchedState(data, (WORKER,)))
    assert "&lt;i&gt;step" in shown
    assert "&lt;b&gt;host" in shown
    assert "<i>step" not in shown and "<b>host" not in shown
    assert 'value="10"' in shown and 'max="40"' in shown
    assert f"{plan.local_time}: expected to save 25 %" in shown
    assert shown.count("<svg") == 2


def test_a_plan_is_shown_while_a_worker_is_at_work() -> None:
    """A study that was killed while it waited leaves its plan in the storage."""
    plan = PlannedStart(
        at="2026-01-02T03:04:05+00:00", finish_by=BEGUN, expected_saving=0.25, rule="a rule"
    )
    data = study(timed(0, 10, 1), ended=None, planned_start=plan)
    for workers in ((WORKER,), ()):
        shown = Panel("").draw(WatchedState(data, workers))
        assert ("Next start" in shown) is bool(workers)
        assert ("Waiting for cleaner hours" in shown) is bool(workers)
        # once as the next start, and once as the begin of the work that is left
        begins = plan.local_time
        assert shown.count(begins) == (2 if workers else 0)
    both = data.model_copy(update={"records": (*data.records, running(1, 4, 60))})
    assert Panel("").draw(WatchedState(both, (WORKER,))).count(begins) == 1, "some work goes on"


def test_an_attempt_that_made_no_step_has_no_quality_and_no_emissions() -> None:
    cut = {"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED, "evals": ()}
    nothing = trial(0, 0.0, None, **cut)
    assert "no step" in Panel("").draw(WatchedState(study(nothing, ended=None), (WORKER,)))
    some = trial(0, 1e-3, None, steps_done=3, **cut)
    assert "no step" not in Panel("").draw(WatchedState(study(some, ended=None), (WORKER,)))


def test_every_section_is_either_quick_or_slow():
    assert set(QUICK).isdisjoint(SLOW)
    data = many(60)
    whole = sections(StudyView(data))
    quick = quick_document(data)
    assert quick[1].keys() == whole.keys() - set(SLOW)
    slow = {name: section for name, section in whole.items() if name in SLOW}
    document = study_document(quick, slow)
    assert [section.key for section in document.sections] == [
        section.key for section in whole.values()
    ]


def test_a_trial_that_ends_changes_few_lines():
    before = document_parts(study_document(quick_document(many(60)), {}))
    after = document_parts(study_document(quick_document(many(61)), {}))
    assert len(after["table all-trials"]) == len(before["table all-trials"]) + 1
    same = set(before["table all-trials"]) & set(after["table all-trials"])
    assert len(same) >= len(before["table all-trials"]) - 5


def test_progress_within_a_trial_is_no_news_for_the_document():
    one = study(running(0, 2, 20), ended=None)
    other = study(running(0, 4, 60, steps_done=3), ended=None)
    assert settled(one) == settled(other)
    assert settled(study(running(0, 2, 20), running(1, 0, 0), ended=None)) == settled(one)
    assert settled(study(timed(0, 5, 70), ended=None)) != settled(one)
    assert settled(one.model_copy(update={"ended": "done"})) != settled(one)
