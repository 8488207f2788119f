"""What the command line shows of a running study: a live line on a terminal, one line a trial elsewhere."""

import math
import time
from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from carbonopt.analysis import confirmation as confirm
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.config import StudyConfig
from carbonopt.core.dimensions import TrialParams, label
from carbonopt.core.format import count_text, emissions_text, energy_text, value_text, visible_text
from carbonopt.core.study import StudyData
from carbonopt.core.trial import LARGEST_DISAGREEMENT, EvalPoint, StopReason, TrialRecord, TrialSpec, TrialState
from carbonopt.core.units import human_duration
from carbonopt.report.document import Table
from carbonopt.report.sections.contention import is_contended


class LiveDisplay:
    """Follows a study on standard error. Implements `StudyDisplay`."""

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        if self._console.is_terminal:
            self._live.start()
        self._began = time.monotonic()
        self._spent_kwh = self._hours_before = 0.0
        self._ended = 0
        self._running = self._configuration = self._reached = ""
        self._confirming = False
        self._best: TrialRecord | None = None
        self._best_kg_co2e = math.inf

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def preparing(self, anything: bool) -> None:
        """`anything`: else an earlier call has prepared all; only processes are started."""
        text = "preparing data, tokenizer and DeepSpeed's ops, a minute or two at first …" if anything else "starting …"
        if self._console.is_terminal:
            self._live.update(Text(text))
        else:
            self._print(text)

    def study_started(self, data: StudyData, hours_before: float) -> None:
        self._spent_kwh = data.spent_kwh()
        self._hours_before = hours_before
        for record in data.records:
            self._consider(record)
        self._ended = _searched(data)
        if earlier := self._config.search.learn_from:
            self._print(f"learns from {', '.join(map(visible_text, earlier))}")
        if self._ended:
            self._print(f"going on with {self._config.name!r}: {count_text(self._ended, 'trial')} done")

    def trial_started(self, spec: TrialSpec) -> None:
        self._running = f"trial {spec.number}{_repeats(spec)}"
        self._configuration = short(spec.params)
        self._reached = ""
        self._confirming = spec.repeat_of is not None
        self._refresh("starting")

    def probe_started(self, spec: TrialSpec) -> None:
        self._running = f"probe {spec.number}"
        self._configuration = short(spec.params)
        self._reached = ""
        self._refresh("starting")

    def probe_ended(self, record: TrialRecord) -> None:
        self._spent_kwh += record.spent_kwh
        self._print(_probe_line(record))

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None:
        self._refresh(f"step {step}/{total_steps}{self._reached}  {energy_text(train_kwh)}")

    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None:
        quality = self._config.quality.name
        self._reached = "" if point.value is None else f"  {quality} {point.value:.4g}"
        self._refresh(f"step {point.step}{self._reached}  {emissions_text(emissions_kg_co2e)}")

    def trial_ended(self, record: TrialRecord) -> None:
        self._spent_kwh += record.energy_kwh.total if record.energy_kwh else 0.0
        self._ended += record.repeat_of is None
        self._consider(record)
        self._print(_trial_line(record), "green" if record is self._best else None)

    def close(self) -> None:
        self._live.stop()

    def _consider(self, record: TrialRecord) -> None:
        """Keeps the best trial that meets the target."""
        kg_co2e = record.emissions_kg_co2e
        if record.meets(self._config.target.at()) and kg_co2e is not None and kg_co2e < self._best_kg_co2e:
            self._best, self._best_kg_co2e = record, kg_co2e

    def _refresh(self, what: str) -> None:
        best = f"none meets {self._config.target.at()}"
        if self._best is not None:
            best = f"trial {self._best.trial}, {emissions_text(self._best_kg_co2e)}"
        # In a narrow terminal the end of a line is missing.
        lines = [f"{self._running}  {what}  {self._configuration}", f"best so far: {best}", self._left()]
        self._live.update(Text("\n".join(lines), overflow="ellipsis", no_wrap=True))

    def _left(self) -> str:
        budget = self._config.budget
        elapsed_s = self._hours_before * 3600 + time.monotonic() - self._began
        left_s = (budget.hours or 0.0) * 3600 - elapsed_s
        left_kwh = (budget.energy_kwh or 0.0) - self._spent_kwh
        searching = "" if budget.trials is None else f"trial {self._ended + 1} of {budget.trials}"
        parts = [
            f"used: {human_duration(elapsed_s)}, {energy_text(self._spent_kwh)}",
            "confirming" if self._confirming else searching,
            "" if budget.hours is None else f"{human_duration(max(0.0, left_s))} left",
            "" if budget.energy_kwh is None else f"{energy_text(max(0.0, left_kwh))} left",
        ]
        return "; ".join(filter(None, parts))

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(text, style=style or ""), soft_wrap=True)


def short(params: TrialParams) -> str:
    """A configuration in one short line."""
    ranks = f"×{params.world_size} ranks" if params.world_size > 1 else ""
    words, in_the_batch = [], {"world_size"}
    if (accumulation_steps := params.gradient_accumulation_steps) is not None:
        batch = f"{params.micro_batch_size_per_gpu}×{accumulation_steps}{ranks}"
        words.append(f"{label('global_batch_size')} {params.global_batch_size} ({batch})")
        in_the_batch |= {"global_batch_size", "micro_batch_size_per_gpu"}
    for name, value in params.model_dump(exclude_none=True, exclude=in_the_batch).items():
        if (name, value) != ("offload", "none"):
            words.append(f"{label(name)} {f'{value:.3g}' if isinstance(value, float) else value_text(value)}")
    return ", ".join(words)


def not_ended(data: StudyData, recommendation: Recommendation, running: bool) -> str:
    """What a study that has not ended has still to do, and what its answer lacks until then."""
    budget, done, confirms = data.config.budget.trials, _searched(data), data.config.confirm is not None
    why = "it still runs" if running else "it was interrupted; the same `carbonopt run` goes on with it"
    parts = [f"The study has not ended: {why}."]
    if budget is None or done < budget:
        left = "trials" if budget is None else f"at most {budget - done} of {count_text(budget, 'trial')}"
        parts.append(f"Left: {left}{', then the repeats with other seeds' if confirms else ''}.")
    elif confirms and (due := confirm.plan(data, lambda seed, params: True).next) is not None:
        parts.append(f"Left: repeats with other seeds, the next of trial {due.trial}.")
    if recommendation.met:
        sure = recommendation.confidence
        unconfirmed = confirms and (sure is None or not sure.confirmed)
        parts.append(f"Until then the recommendation {'is not confirmed' if unconfirmed else 'may change'}.")
    return " ".join(parts)


def _searched(data: StudyData) -> int:
    """How many of the search's trials have ended."""
    own = [record for record in data.records if record.repeat_of is None and record.state is not TrialState.RUNNING]
    return sum(record.stop_reason is not StopReason.INTERRUPTED for record in own)


def _repeats(trial: TrialSpec | TrialRecord) -> str:
    return "" if trial.repeat_of is None else f" (trial {trial.repeat_of} with seed {trial.seed})"


def _trial_line(record: TrialRecord) -> str:
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
        f"CodeCarbon reads {differs:+.1%} against the GPUs' counters" if abs(differs) > LARGEST_DISAGREEMENT else "",
        f"other work had the cores for {record.cpu_wait_fraction:.0%} of its time" if is_contended(record) else "",
        short(record.params),
        f"— {record.failure.text.splitlines()[0]} (log: {record.failure.log})" if record.failure else "",
    ]
    return "  ".join(filter(None, parts))


def _probe_line(record: TrialRecord) -> str:
    reached = record.state.value if record.stop_reason is None else record.stop_reason.value
    if record.stop_reason is StopReason.PROBE:
        # One that compiles for its trial makes the first step alone.
        made = "" if record.kernels is None else record.kernels.value
        reached = made if record.step_kwh is None else f"{energy_text(record.step_kwh)} a step"
    elif record.failure:
        reached += f" — {record.failure.text.splitlines()[0]} (log: {record.failure.log})"
    return f"probe {record.trial:>3}  {reached}  {short(record.params)}"


def print_tables(tables: Iterable[Table], printable: Callable[[str], str]) -> None:
    """Of a document, on standard output, as wide as the terminal; `printable` cleans each text."""
    console = Console(highlight=False)
    for table in tables:
        grid = Grid(title=Text(printable(table.caption)), title_justify="left", box=box.SIMPLE)
        for column in table.columns:
            grid.add_column(Text(printable(column.label)), justify="right" if column.numeric else "left")
        for row in table.rows:
            grid.add_row(*(Text(printable(cell.text), "bold" if cell.strong else "") for cell in row))
        console.print(grid)
