"""Shows a running study on the command line.

On a terminal it is shown live; elsewhere, with one line per trial.
"""

import time
from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from carbonopt.analysis.confirmation import confirmation_progress
from carbonopt.analysis.recommend import Recommendation, recommend
from carbonopt.analysis.remaining import Limit, limits, used_up
from carbonopt.core.dimensions import TrialParams, label
from carbonopt.core.errors import printable
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import (
    count_text,
    emissions_text,
    energy_text,
    less_text,
    mean_of_text,
    run_counts_text,
    value_text,
    visible_text,
)
from carbonopt.core.trial import (
    LARGEST_DISAGREEMENT,
    Failure,
    StopReason,
    TrialRecord,
)
from carbonopt.core.units import human_duration
from carbonopt.report.document import Table
from carbonopt.report.study_text import unfinished_texts
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import PlannedStart, StudyData, wall_clock_s
from carbonopt.spec.trial_spec import TrialSpec

_WIDEST = 10_000  # columns of a terminal that any table fits into


class LiveDisplay:
    """A display of a running study on standard error, which implements `StudyDisplay`."""

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        if self._console.is_terminal:
            self._live.start()
        # What the study had used at the monotonic time `_began`.
        self._began = time.monotonic()
        self._spent_kwh = self._hours_before = 0.0
        self._ended = 0
        self._running = self._configuration = self._reached = ""
        self._what = ""  # the latest that the running trial reported; empty: nothing yet
        self._trial_began_s, self._running_kwh = self._began, 0.0  # of the running trial
        self._confirming = self._has_named_fixed = False
        self._searched = frozenset[str]()  # dimensions with more than one value
        self._data: StudyData | None = None  # with the trials that have ended, by number
        self._best: Recommendation | None = None  # None: no trial has ended

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def preparing(self, anything: bool) -> None:
        """Show that a preparation has begun.

        Args:
            anything: Whether data is prepared. False: an earlier call has done that, and only
                processes are started.
        """
        text = (
            "preparing data, tokenizer and DeepSpeed's ops, a minute or two at first …"
            if anything
            else "starting …"
        )
        if self._console.is_terminal:
            self._live.update(Text(text))
        else:
            self._print(text)

    def study_started(self, data: StudyData, hours_before: float) -> None:
        self._spent_kwh = data.spent_kwh()
        self._hours_before = hours_before
        self._searched = frozenset(data.config.search.space.free())
        self._data = data
        if data.records:
            self._best = recommend(data)
        self._ended = _searched(data)
        if earlier := self._config.search.learn_from:
            self._print(f"learns from {', '.join(map(visible_text, earlier))}")
        if self._ended:
            # Those that were interrupted are run again, and those that run are other workers'.
            finished = [record for record in data.records if record.has_finished]
            repeats = sum(record.repeat_of is not None for record in finished)
            counted = run_counts_text(len(finished) - repeats, repeats)
            done = ", ".join([f"{counted} done", *unfinished_texts(data.records)])
            self._print(f"going on with {self._config.name!r}: {done}")

    def used(self, hours: float, energy_kwh: float) -> None:
        self._hours_before, self._spent_kwh = hours, energy_kwh
        self._began = time.monotonic()

    def waiting(self, start: PlannedStart) -> None:
        text = f"waiting until {start.local_time}{start.effect}"
        self._print(f"{text}; Ctrl-C ends the command, the same one waits again")
        if self._console.is_terminal:
            self._live.update(Text(text))

    def trial_started(self, spec: TrialSpec, started_at: str | None) -> None:
        self._name_what_is_fixed(spec.params)
        self._confirming = spec.repeat_of is not None or spec.replaces_repeat
        self._begin(f"trial {spec.number}{_repeats(spec)}", spec)
        if spec.checkpoints is not None and spec.checkpoints.continue_from is not None:
            step = spec.checkpoints.continue_from
            self._print(f"trial {spec.number} goes on from its checkpoint at step {step:,}")

    def probe_started(self, spec: TrialSpec) -> None:
        self._name_what_is_fixed(spec.params)
        self._begin(f"probe {spec.number}", spec)

    def _begin(self, running: str, spec: TrialSpec) -> None:
        self._running = running
        self._configuration = self._settings(spec.params)
        self._reached = ""
        self._trial_began_s, self._running_kwh = time.monotonic(), 0.0
        self._refresh("")

    def still_running(self, spent_kwh: float) -> None:
        self._running_kwh = spent_kwh
        self._refresh(self._what)

    def probe_ended(self, record: TrialRecord) -> None:
        self._spent_kwh += record.spent_kwh
        self._running_kwh = 0.0
        self._print(_probe_line(record, self._settings(record.params)))

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None:
        self._refresh(f"step {step}/{total_steps}{self._reached}  {energy_text(train_kwh)}")

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        quality = self._config.quality.name
        self._reached = "" if point.value is None else f"  {quality} {point.value:.4g}"
        self._refresh(f"step {point.step}{self._reached}  {emissions_text(emissions_kg_co2e)}")

    def trial_ended(self, record: TrialRecord) -> None:
        self._ended += record.counts_for_budget and record.has_finished
        self._consider(record)
        line = _trial_line(record, self._settings(record.params))
        is_best = self._best is not None and record.trial == self._best.trial
        self._print(line, "green" if is_best else None)

    def close(self) -> None:
        self._live.stop()

    def _settings(self, params: TrialParams) -> str:
        """Return the values of a trial that the search chooses, as one short line."""
        return settings_text(params, self._searched, searched=True)

    def _name_what_is_fixed(self, params: TrialParams) -> None:
        """Print once what all trials have in common."""
        if not self._has_named_fixed:
            self._has_named_fixed = True
            if fixed := settings_text(params, self._searched, searched=False):
                self._print(f"all trials: {fixed}")

    def _consider(self, record: TrialRecord) -> None:
        """Recommend anew, as the report does, with a trial that has ended."""
        if self._data is not None:
            by_number = {each.trial: each for each in self._data.records} | {record.trial: record}
            records = tuple(by_number[number] for number in sorted(by_number))
            self._data = self._data.model_copy(update={"records": records})
            self._best = recommend(self._data)

    def _best_text(self) -> str:
        best = self._best
        if best is None or not best.met:
            return f"none meets {self._config.target.at()}"
        text = f"trial {best.trial}, {emissions_text(best.emissions_kg_co2e)}"
        text += mean_of_text(best.seeds)
        baseline = best.baseline
        is_other = baseline is not None and baseline.is_start and baseline.trial != best.trial
        if is_other and best.saving_fraction is not None:
            text += f", {less_text(best.saving_fraction)} than the start"
        return text

    def _refresh(self, what: str) -> None:
        self._what = what
        elapsed = human_duration(time.monotonic() - self._trial_began_s)
        if not what:
            what = energy_text(self._running_kwh) if self._running_kwh else "starting"
        # A narrow terminal cuts off the ends of lines, so the configuration comes last.
        lines = [
            f"{self._running}  {elapsed}  {what}  {self._configuration}",
            f"best so far: {self._best_text()}",
            self._left(),
        ]
        self._live.update(Text(printable("\n".join(lines)), overflow="ellipsis", no_wrap=True))

    def _left(self) -> str:
        budget = self._config.budget
        elapsed_s = self._hours_before * 3600 + time.monotonic() - self._began
        left_s = (budget.hours or 0.0) * 3600 - elapsed_s
        spent_kwh = self._spent_kwh + self._running_kwh
        left_kwh = (budget.energy_kwh or 0.0) - spent_kwh
        searching = ""
        if budget.trials is not None:
            searching = f"trial {self._ended + 1} of {budget.trials}"
            if self._ended and budget.hours is None and not self._confirming:
                rest_s = elapsed_s / self._ended * (budget.trials - self._ended)
                searching += f", about {human_duration(rest_s)} of work left"
        of_budget = [
            "" if budget.hours is None else human_duration(max(0.0, left_s)),
            "" if budget.energy_kwh is None else energy_text(max(0.0, left_kwh)),
        ]
        budget_left = " and ".join(filter(None, of_budget))
        parts = [
            f"used: {human_duration(elapsed_s)}, {energy_text(spent_kwh)}",
            "confirming" if self._confirming else searching,
            f"{budget_left} left of the budget" if budget_left else "",
        ]
        return "; ".join(filter(None, parts))

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(printable(text), style=style or ""), soft_wrap=True)


def settings_text(params: TrialParams, free: Collection[str], *, searched: bool) -> str:
    """Return a trial's settings as one short line.

    Args:
        params: The trial's settings.
        free: The dimensions that the search may move.
        searched: True for the values of these dimensions, False for those of all others.
    """
    ranks = f"×{params.world_size} ranks" if params.world_size > 1 else ""
    words, in_the_batch = [], {"world_size"}
    if (accumulation_steps := params.gradient_accumulation_steps) is not None:
        in_the_batch |= {"global_batch_size", "micro_batch_size_per_gpu"}
        if searched is not in_the_batch.isdisjoint(free):
            batch = f"{params.micro_batch_size_per_gpu}×{accumulation_steps}{ranks}"
            words.append(f"{label('global_batch_size')} {params.global_batch_size} ({batch})")
    for name, value in params.model_dump(exclude_none=True, exclude=in_the_batch).items():
        if (name in free) is searched and (name, value) != ("offload", "none"):
            words.append(
                f"{label(name)} {f'{value:.3g}' if isinstance(value, float) else value_text(value)}"
            )
    return ", ".join(words)


def not_ended(data: StudyData, recommendation: Recommendation, running: bool) -> str:
    """Say what an unfinished study still has to do, and what its answer lacks until then."""
    why = (
        "it still runs"
        if running
        else "it was interrupted; the same `carbonopt run` goes on with it"
    )
    parts = [f"The study has not ended: {why}."]
    if (start := data.planned_start) is not None and running:
        parts.append(f"Its next trial is planned for {start.local_time}.")
    budget_limits = _limits(data)
    reached = used_up(budget_limits)
    if reached is not None:
        parts.append(f"Left: nothing, as {reached}.")
    elif left := _left_to_run(data):
        left_texts = [_left_text(limit) for limit in budget_limits]
        within = f", in at most {' and '.join(left_texts)}" if left_texts else ""
        parts.append(f"Left: {left}{within}.")
    if recommendation.met and (running or reached is None):
        sure = recommendation.confidence
        unconfirmed = data.config.confirm is not None and (sure is None or not sure.confirmed)
        parts.append(
            f"Until then the recommendation {'is not confirmed' if unconfirmed else 'may change'}."
        )
    return " ".join(parts)


def _limits(data: StudyData) -> tuple[Limit, ...]:
    spent_kwh = data.spent_kwh()
    used_hours = wall_clock_s(data.sessions) / 3600
    return limits(data.config.budget, used_hours, spent_kwh, data.emissions_kg_co2e(spent_kwh))


def _left_text(limit: Limit) -> str:
    left = limit.limit - limit.used
    texts = {
        "hours": human_duration(3600 * left),
        "kWh": energy_text(left),
        "kg CO2e": emissions_text(left),
    }
    return f"{texts[limit.unit]} of {limit.limit:g} {limit.unit}"


def _left_to_run(data: StudyData) -> str:
    """Say which trials and repeats a study may still run, its limits of time and energy aside."""
    budget, done = data.config.budget, _searched(data)
    confirms = data.config.confirm is not None
    if budget.trials is None or done < budget.trials:
        left = "trials"
        if budget.trials is not None:
            left = f"at most {budget.trials - done} of {count_text(budget.trials, 'trial')}"
        elif budget.until is not None:
            left = "trials until another one does not pay"
        return f"{left}, then the repeats with other seeds" if confirms else left
    due = confirmation_progress(data, lambda seed, params: True).next if confirms else None
    return "" if due is None else f"repeats with other seeds, the next of trial {due.trial}"


def _searched(data: StudyData) -> int:
    """Count the finished trials that `budget.trials` counts."""
    return sum(record.counts_for_budget and record.has_finished for record in data.records)


def _repeats(trial: TrialSpec | TrialRecord) -> str:
    return "" if trial.repeat_of is None else f" (trial {trial.repeat_of} with seed {trial.seed})"


def _trial_line(record: TrialRecord, settings: str) -> str:
    interrupted = record.stop_reason is StopReason.INTERRUPTED
    state = "interrupted, will be run again" if interrupted else f"{record.state.value:<10}"
    reached, differs = "", record.gpu_disagreement or 0.0
    if record.value is not None:
        reached = f"{record.quality.name} {record.value:.4g}"
    elif record.evals and (last := record.evals[-1]).value is not None:
        reached = f"{record.quality.name} {last.value:.4g} at step {last.step}"
    parts = [
        f"trial {record.trial:>3}{_repeats(record)}  {state}",
        f"({record.stop_reason.value})" if record.stop_reason and not interrupted else "",
        reached,
        "" if record.emissions_kg_co2e is None else emissions_text(record.emissions_kg_co2e),
        human_duration(record.duration_s.total) if record.duration_s else "",
        f"CodeCarbon reads {100 * differs:+.1f} % against the GPUs' counters"
        if abs(differs) > LARGEST_DISAGREEMENT
        else "",
        f"other work had the cores for {100 * (record.cpu_wait_fraction or 0):.0f} % of its time"
        if record.is_contended
        else "",
        settings,
        _failure_text(record.failure) if record.failure else "",
    ]
    return "  ".join(filter(None, parts))


def _failure_text(failure: Failure) -> str:
    """Return the reason of a failure, and its log if it has one."""
    log = "" if failure.log is None else f" (log: {failure.log})"
    return f"— {failure.text.splitlines()[0]}{log}"


def _probe_line(record: TrialRecord, settings: str) -> str:
    reached = record.state.value if record.stop_reason is None else record.stop_reason.value
    if record.stop_reason is StopReason.PROBE:
        # A probe that compiles kernels for its trial makes only the first step.
        made = "" if record.kernels is None else record.kernels.value
        reached = made if record.step_kwh is None else f"{energy_text(record.step_kwh)} a step"
    elif record.failure:
        reached += f" {_failure_text(record.failure)}"
    return f"probe {record.trial:>3}  {reached}  {settings}"


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables of a document on standard output, as wide as the terminal.

    A table that doesn't fit is printed as one line of each cell, with its column's label: as
    columns, words would be cut.
    """
    console = Console(highlight=False)
    for table in tables:
        grid = Grid(title=Text(printable(table.caption)), title_justify="left", box=box.SIMPLE)
        for column in table.columns:
            grid.add_column(
                Text(printable(column.label)), justify="right" if column.numeric else "left"
            )
        for row in table.rows:
            grid.add_row(
                *(Text(printable(cell.text), "bold" if cell.strong else "") for cell in row)
            )
        if console.measure(grid, options=console.options.update_width(_WIDEST)).maximum > (
            console.width
        ):
            _print_as_lines(console, table)
        else:
            console.print(grid)


def _print_as_lines(console: Console, table: Table) -> None:
    lines = ["", table.caption]
    for row in table.rows:
        lines.append("")
        lines += [
            f"{column.label}: {cell.text}" for column, cell in zip(table.columns, row, strict=True)
        ]
    console.print(Text(printable("\n".join(lines))), soft_wrap=True)
