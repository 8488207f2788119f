"""The part of the page that says what a study is doing now, as HTML."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from carbonopt.analysis.recommend import Recommendation
from carbonopt.core import format as fmt
from carbonopt.core.trial import TrialRecord
from carbonopt.core.units import human_duration
from carbonopt.report.render.html import environment
from carbonopt.report.sections.trials_section import end_text
from carbonopt.report.summary import short_params
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.watched_study import WatchedState
from carbonopt.storage.workers import KnownWorker
from carbonopt.watch.charts import Chart, Line, Point
from carbonopt.watch.running_study import (
    EndedTrials,
    PowerHistory,
    PowerSpan,
    clock_text,
    from_seconds,
    recorded_spans,
    running_trials,
    trial_left_s,
    work_left,
)

_STYLES = ("curve-0", "curve-1", "curve-2", "curve-3")  # of running trials' curves, in turn


_ENVIRONMENT = environment("carbonopt.watch")


class Panel:
    """The panel of one study.

    Args:
        name: The folder's name of a pipeline's step; empty: the folder is the study's own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._power = PowerHistory()
        self._ended: EndedTrials | None = None

    def draw(self, state: WatchedState) -> str:
        """Return the panel of the study's present state."""
        data = state.data
        running = running_trials(data)
        self._ended = ended = EndedTrials.of(data, self._ended)
        shown = running or ended.last[:1]
        self._power.note(running)
        is_replay = data.provenance.is_replay
        powered = [*ended.powered, *running]
        spans = recorded_spans(powered) if is_replay else self._power.spans(powered)
        return _ENVIRONMENT.get_template("now.html").render(
            name=self._name,
            doing=_doing(state, running),
            at_work=is_at_work(state),
            trials=[_trial(record, data) for record in running],
            facts=_facts(state, ended.recommendation),
            curve=_curve(data, shown, ended.best),
            curve_note=_curve_note(data, shown, ended.best),
            power=_power(spans, is_replay=is_replay),
            power_note=_power_note(spans, is_replay=is_replay),
            workers=[_worker(worker, running) for worker in state.workers],
            last=[_ended(record, data) for record in ended.last],
        )


def is_at_work(state: WatchedState) -> bool:
    """Return whether workers are at work on the study; its plans are valid only then."""
    return bool(state.workers) and state.data.ended is None


def empty_panel() -> str:
    """Return the panel of a folder whose storage holds no study yet."""
    return _ENVIRONMENT.get_template("empty.html").render()


def _doing(state: WatchedState, running: Sequence[TrialRecord]) -> str:
    data = state.data
    if data.ended is not None:
        return f"Ended: {data.ended}"
    if not state.workers:
        return "Not running: no worker is at work. The same `carbonopt run` goes on with it"
    if running:
        return f"Running {fmt.count_text(len(running), 'trial')}"
    if data.planned_start is not None:
        return f"Waiting for {'cleaner' if data.planned_start.rule else 'its'} hours"
    return "Running, but no trial runs now"


def _facts(state: WatchedState, best: Recommendation) -> list[tuple[str, str]]:
    """Return what is left, what was used and what comes next, each with its label."""
    data = state.data
    spent_kwh = data.spent_kwh()
    facts = []
    plan = data.planned_start if is_at_work(state) else None
    begins = "" if plan is None else plan.local_time
    if (left := work_left(data, state.workers, spent_kwh)) is not None:
        later = f", from {begins} on" if begins and not running_trials(data) else ""
        facts.append(("Work left", f"about {human_duration(left.total_seconds())} at most{later}"))
    elif data.ended is None:
        facts.append(("Work left", "not known before the first trial has ended"))
    budget = data.config.budget.trials
    repeats = sum(record.repeat_of is not None for record in data.records)
    added = sum(record.replaces_repeat for record in data.records)
    of_budget = "" if budget is None else f" of {budget}"
    instead = f", {added} in place of repeats" if added else ""
    again = f", {fmt.count_text(repeats, 'repeat')}" if repeats else ""
    searched = sum(record.counts_for_budget for record in data.records)
    facts.append(("Trials begun", f"{searched}{of_budget}{instead}{again}"))
    if plan is not None:
        facts.append(("Next start", f"{begins}{plan.effect}"))
    used = f"{fmt.energy_text(spent_kwh)}, {fmt.emissions_text(data.emissions_kg_co2e(spent_kwh))}"
    facts.append(("Used so far", used))
    text = f"none meets {data.config.target.at()}"
    if best.met:
        mean = fmt.mean_of_text(best.seeds)
        text = f"trial {best.trial}, {fmt.emissions_text(best.emissions_kg_co2e)}{mean}"
    facts.append(("Best so far", text))
    return facts


def _trial(record: TrialRecord, data: StudyData) -> dict[str, Any]:
    """Return the facts of a running trial, for its template."""
    repeat = (
        "" if record.repeat_of is None else f" (trial {record.repeat_of} with seed {record.seed})"
    )
    last = record.evals[-1] if record.evals else None
    parts = []
    if record.energy_kwh is not None:
        parts.append(fmt.energy_text(record.energy_kwh.total))
    if last is not None:
        parts.append(f"{data.config.quality.name} {data.config.quality.text(last.value)}")
    if (left_s := trial_left_s(record)) is not None:
        parts.append(f"about {human_duration(left_s)} left")
    begun = record.started_at and datetime.fromisoformat(record.started_at).astimezone(UTC)
    return {
        "title": f"Trial {record.trial}{repeat}",
        "attempt": record.attempt,
        "since": begun.isoformat() if begun else "",
        "settings": short_params(record.params, tuple(data.config.search.space.free())),
        "done": record.steps_done,
        "total": record.total_steps,
        "parts": parts,
    }


def _curve(data: StudyData, shown: Sequence[TrialRecord], best: TrialRecord | None) -> Markup:
    """Draw the evaluations of the trials that are shown, and of the best so far."""
    lines = [] if best is None else [Line(_evaluations(best), "best")]
    for place, record in enumerate(shown):
        if best is None or record.trial != best.trial:
            lines.append(Line(_evaluations(record), _STYLES[place % len(_STYLES)]))
    return Chart(lines, level=data.config.target.at().value).svg()


def _curve_note(data: StudyData, shown: Sequence[TrialRecord], best: TrialRecord | None) -> str:
    names = [f"trial {record.trial}" for record in shown]
    against = "" if best is None else f"; grey: trial {best.trial}, the best so far"
    return (
        f"{data.config.quality.label} by optimizer step: {', '.join(names)}{against}."
        " Dashed: the target."
    )


def _evaluations(record: TrialRecord) -> list[Point]:
    return [(float(point.step), point.value) for point in record.evals if point.value is not None]


def _power(spans: Sequence[PowerSpan], *, is_replay: bool) -> Markup:
    lines = [
        Line(
            [(span.begin_s, span.power_w), (span.end_s, span.power_w)],
            "power-running" if span.of_running else "power",
        )
        for span in spans
    ]
    x_text = human_duration if is_replay else _time_of_day
    return Chart(lines, from_zero=True, x_text=x_text).svg()


def _power_note(spans: Sequence[PowerSpan], *, is_replay: bool) -> str:
    if not spans:
        return ""
    latest = max(spans, key=lambda span: span.end_s)
    if is_replay:
        return (
            "Mean power (W) of the latest trials' recorded trainings, by their time, one after"
            f" another. The latest: {fmt.rate_text(latest.power_w)} W."
        )
    return (
        "Mean power (W) of each of the latest trials, by the time of day; of a running trial,"
        f" between the energies that it stored. The latest: {fmt.rate_text(latest.power_w)} W."
    )


def _time_of_day(seconds: float) -> str:
    return from_seconds(seconds).astimezone().strftime("%H:%M:%S")


def _worker(worker: KnownWorker, running: Sequence[TrialRecord]) -> dict[str, str]:
    trials = [f"trial {record.trial}" for record in running if record.worker == worker.id]
    return {
        "who": f"process {worker.pid} on {worker.host}",
        "since": clock_text(from_seconds(worker.began_at_s)),
        "doing": ", ".join(trials) or "no trial",
    }


def _ended(record: TrialRecord, data: StudyData) -> dict[str, str]:
    last = record.evals[-1].value if record.evals else None
    value = record.value if record.value is not None else last
    result = f"{data.config.quality.text(value)}, {fmt.emissions_text(record.emissions_kg_co2e)}"
    if value is None and not record.steps_done and not record.emissions_kg_co2e:
        result = "no step"
    return {
        "trial": f"Trial {record.trial}",
        "state": end_text(record),
        "result": result,
        "settings": short_params(record.params, tuple(data.config.search.space.free())),
    }
