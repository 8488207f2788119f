"""A pipeline as a document.

It shows what one run of all steps takes against the settings that the pipeline began with, and what
the searches spent.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from carbonopt.analysis.footprint import known_sum
from carbonopt.analysis.pipeline_summary import PathRun, PipelineSummary, StepRun, summarise
from carbonopt.analysis.study_comparison import ComparedRun
from carbonopt.core import format as fmt
from carbonopt.core.units import human_duration
from carbonopt.report.assemble import critical_caveats
from carbonopt.report.document import (
    Block,
    Caveat,
    Document,
    Paragraph,
    Section,
    Table,
    Tile,
    num,
    scaled,
    table,
    word,
)
from carbonopt.report.figures.steps_figure import steps as steps_figure
from carbonopt.report.sections.energy_section import CLOSURE_TOLERANCE, closure_table, how_known
from carbonopt.report.sections.provenance_section import stated_of_machine
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import confidence_text, is_within_noise, runs_text, short_params
from carbonopt.spec.pipeline_file import PipelineData

_FROZEN = (
    "Each step was settled before the next began, which is an assumption: another configuration of"
    " an earlier step could be worth more to a later one. The settings that a step is compared with"
    " were trained from the same weights as what is recommended there, not from those that the"
    " steps before would have given with theirs."
)


class PipelineView:
    """A pipeline's data with the summary and the studies that its document is made from."""

    def __init__(self, data: PipelineData) -> None:
        self.data, self.summary = data, summarise(data)
        self.studies = {folder: StudyView(study) for folder, study in data.studies.items()}

    @cached_property
    def any_study(self) -> StudyView:
        return next(iter(self.studies.values()))

    @property
    def best(self) -> PathRun | None:
        return next(iter(self.summary.paths), None)

    def caveat(self, key: str, **numbers: Any) -> Caveat:
        return self.any_study.caveat(key, **numbers)


class _StepRow(NamedTuple):
    """A row of the table of one run of all steps.

    `run` is None in the row of the sum.
    """

    name: str
    run: StepRun | None
    of: ComparedRun | None
    emissions_kg_co2e: float | None
    energy_kwh: float | None
    duration_s: float | None


def page(view: PipelineView) -> Document:
    sections = (_one_run(view), _spent(view), _paths(view), _provenance(view))
    return pipeline_top(view).model_copy(
        update={"sections": tuple(section for section in sections if section)}
    )


def pipeline_top(view: PipelineView) -> Document:
    """Return the pipeline's document without the sections."""
    return Document(
        name=view.summary.name,
        headline=_headline(view),
        details=tuple(_details(view)),
        tiles=tuple(_tiles(view)),
        caveats=tuple(sorted(_caveats(view), key=lambda caveat: caveat.level)),
    )


def _headline(view: PipelineView) -> str:
    summary, best = view.summary, view.best
    if best is None:
        missed = ", ".join(_missed(summary))
        why = f"{missed} met no target" if missed else "it has not ended"
        return f"No run of all {len(view.data.pipeline.pipeline)} steps: {why}"
    steps = f"one run of all {fmt.count_text(len(best.steps), 'step')}"
    if summary.saving_fraction is None:
        return f"The least CO2e for {steps}: {fmt.emissions_text(best.emissions_kg_co2e)}"
    if summary.saving_fraction == 0:
        return f"No run emitted less CO2e for {steps} than {_baseline(best)}"
    doubt = ", within the noise" if is_within_noise(summary.saving_interval) else ""
    return f"{fmt.less_text(summary.saving_fraction)} CO2e for {steps}{doubt}"


def _details(view: PipelineView) -> Iterator[str]:
    best = view.best
    if best is None:
        return
    if view.summary.saving_fraction:
        yield f"Saving: {confidence_text(view.summary.saving_interval)}; against {_baseline(best)}."
    for run in best.steps:
        quality, taken = run.target.quality, run.taken
        reached = f"{quality.label} {quality.text(taken.value)}, target {quality.bound_word} "
        yield (
            f"{run.step}: {short_params(taken.params)}."
            f" {reached}{quality.target_text(run.target.value)}."
        )


def _baseline(path: PathRun) -> str:
    """Name the settings that a run of all steps is compared with."""
    starts = [run.baseline_is_start for run in path.steps]
    if all(starts):
        return "the settings at the start"
    most_accurate = "the most accurate settings"
    return (
        f"the settings at the start or, without, {most_accurate}" if any(starts) else most_accurate
    )


def _tiles(view: PipelineView) -> Iterator[Tile]:
    summary, best = view.summary, view.best
    if best is not None:
        note = f"{fmt.energy_text(best.energy_kwh)} in training"
        yield Tile(
            label="One run of all steps", text=fmt.emissions_text(best.emissions_kg_co2e), note=note
        )
        if best.baseline_emissions_kg_co2e is not None:
            note = f"{fmt.energy_text(best.baseline_energy_kwh)} in training"
            text = fmt.emissions_text(best.baseline_emissions_kg_co2e)
            yield Tile(label=f"With {_baseline(best)}", text=text, note=note)
    note = f"{fmt.energy_text(summary.energy_kwh)}, {fmt.count_text(_trials(summary), 'trial')}"
    yield Tile(label="The searches", text=fmt.emissions_text(summary.emissions_kg_co2e), note=note)
    if best is not None:
        text, note = _paid_back(summary)
        yield Tile(label="Pays back after", text=text, note=note)


def _paid_back(summary: PipelineSummary) -> tuple[str, str]:
    """Say after how many runs the searches are paid back, and a note on it."""
    if summary.break_even_runs is not None:
        ends = runs_text(summary.break_even_interval)
        note = f"of all steps; {ends}" if ends else "of all steps"
        return fmt.count_text(summary.break_even_runs, "run"), note
    if summary.saving_fraction and is_within_noise(summary.saving_interval):
        return "not known", "a run may save nothing"
    return "never", "a run saves nothing"


def _trials(summary: PipelineSummary) -> int:
    return sum(study.trials for study in summary.spent)


def _caveats(view: PipelineView) -> Iterator[Caveat]:
    summary, best = view.summary, view.best
    if not summary.ended and summary.met:
        yield view.caveat("pipeline_running", studies=", ".join(_unfinished(summary)))
    if best is not None:
        if unsure := [run.step for run in best.steps if run.confirmed is False]:
            yield view.caveat("steps_not_confirmed", steps=", ".join(unsure))
        if once := [run.step for run in best.steps if run.confirmed is None]:
            yield view.caveat("steps_run_once", steps=", ".join(once))
        if summary.saving_fraction and is_within_noise(summary.saving_interval):
            lowest, highest = summary.saving_interval or (0.0, 0.0)
            yield view.caveat("saving_within_noise", lowest=lowest, highest=highest)
        if others := [run.step for run in best.steps if not run.baseline_is_start]:
            yield view.caveat("steps_without_start", steps=", ".join(others))
        yield view.caveat("steps_frozen")
    folders = [run.study for run in best.steps] if best is not None else _missed(summary)
    yield from critical_caveats({folder: view.studies[folder] for folder in folders})
    for folder, study in view.studies.items():
        if trials := study.spent.unmeasured_trials:
            yield view.caveat("unmeasured_trials_of", study=folder, trials=trials)
    for key, fraction in (
        ("closure_gpus", summary.gpu_closure),
        ("closure_whole", summary.closure),
    ):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            yield view.caveat(key, fraction=fraction)
    if summary.outer_kwh is None and view.data.sessions:
        yield view.caveat("call_killed")
    yield from how_known(view.any_study)
    yield view.caveat("meter_setup")


def _missed(summary: PipelineSummary) -> list[str]:
    return [study.study for study in summary.spent if study.ended and not study.met]


def _unfinished(summary: PipelineSummary) -> list[str]:
    return [*(study.study for study in summary.spent if not study.ended), *summary.to_begin]


def _one_run(view: PipelineView) -> Section | None:
    if (best := view.best) is None:
        return None
    taken = _rows(best, lambda run: run.taken)
    baseline = _rows(best, lambda run: run.baseline)
    blocks: list[Block] = [
        _steps(view, "recommended", "One run of all steps as recommended", taken)
    ]
    if best.baseline_emissions_kg_co2e is not None:
        blocks.append(steps_figure(best))
        blocks.append(
            _steps(view, "start", f"One run of all steps with {_baseline(best)}", baseline)
        )
    blocks.append(Paragraph(text=_FROZEN, style="note"))
    return Section(key="run", title="One run of all steps", blocks=tuple(blocks))


def _rows(path: PathRun, of: Callable[[StepRun], ComparedRun | None]) -> list[_StepRow]:
    rows = []
    for run in path.steps:
        used = of(run)
        figures = (
            (None,) * 3
            if used is None
            else (used.emissions_kg_co2e, used.energy_kwh, used.duration_s)
        )
        rows.append(_StepRow(run.step, run, used, *figures))
    return [*rows, _StepRow("sum", None, None, *map(known_sum, list(zip(*rows, strict=True))[3:]))]


def _steps(view: PipelineView, key: str, caption: str, rows: Sequence[_StepRow]) -> Table:
    whole = rows[-1]

    def share(field: str) -> Callable[[_StepRow], float | None]:
        def of(row: _StepRow) -> float | None:
            part, total = getattr(row, field), getattr(whole, field)
            return part / total if part is not None and total else None

        return of

    def configuration(row: _StepRow) -> str:
        if row.run is None:
            return ""
        return "no trial completed" if row.of is None else short_params(row.of.params)

    def reached(row: _StepRow) -> str:
        if row.run is None or row.of is None:
            return ""
        return f"{row.run.target.quality.label} {row.run.target.quality.text(row.of.value)}"

    def is_sum(row: _StepRow) -> bool:
        return row.run is None

    columns = [
        word("Step", "name", strong=is_sum),
        word("Configuration", configuration),
        num("Runs", lambda row: row.of and row.of.seeds),
        word("Quality", reached),
        scaled("Energy", "energy_kwh", fmt.energy_scale, rows, strong=is_sum),
        num("Share", share("energy_kwh"), fmt.percent_text, share=lambda row: row.run is not None),
        num("Time", "duration_s", human_duration, strong=is_sum),
        num("Share of time", share("duration_s"), fmt.percent_text),
        scaled("CO2e", "emissions_kg_co2e", fmt.emissions_scale, rows, strong=is_sum),
    ]
    note = "By their training windows; means where a configuration ran with several seeds."
    return table(key, caption, rows, columns, note=note)


class _Spent(NamedTuple):
    name: str
    trials: int | None
    energy_kwh: float
    emissions_kg_co2e: float
    duration_s: float | None


def _spent(view: PipelineView) -> Section:
    summary, priced = view.summary, view.any_study.data.emissions_kg_co2e
    rows = [
        _Spent(each.study, each.trials, each.energy_kwh, each.emissions_kg_co2e, each.duration_s)
        for each in summary.spent
    ]
    between_s = summary.duration_s - sum(row.duration_s or 0.0 for row in rows)
    between = "between the studies"
    rows.append(
        _Spent(between, None, summary.between_kwh, priced(summary.between_kwh), max(0.0, between_s))
    )
    rows.append(
        _Spent(
            "sum",
            _trials(summary),
            summary.energy_kwh,
            summary.emissions_kg_co2e,
            summary.duration_s,
        )
    )

    def is_sum(row: _Spent) -> bool:
        return row is rows[-1]

    columns = [
        word("Study", "name", strong=is_sum),
        num("Trials and repeats", "trials"),
        num("Time", "duration_s", human_duration, strong=is_sum),
        scaled("Energy", "energy_kwh", fmt.energy_scale, rows, strong=is_sum),
        num(
            "Share",
            lambda row: row.energy_kwh / summary.energy_kwh if summary.energy_kwh else None,
            fmt.percent_text,
        ),
        scaled("CO2e", "emissions_kg_co2e", fmt.emissions_scale, rows, strong=is_sum),
    ]
    note = (
        "All of each study: preparation, stopped and failed trials, interrupted attempts, repeats,"
        " the runs whose weights were handed on. "
    )
    note += (
        "The time between them holds the seconds of each call before its meter runs; the energy"
        " does not."
    )
    spent = table("spent", "What the searches spent", rows, columns, note=note)
    return Section(key="spent", title="What the searches spent", blocks=(spent, _closure(summary)))


def _closure(summary: PipelineSummary) -> Table:
    gpus = ("GPUs, by their counters", summary.outer_gpu_kwh, summary.gpu_closure)
    note = "One reading: of the meter at the begin and the end of each call, across all steps."
    return closure_table([gpus, ("all that counts", summary.outer_kwh, summary.closure)], note)


def _paths(view: PipelineView) -> Section | None:
    """Show what carrying several configurations of a step into the next one achieved.

    Return None where no step carried more than its recommended configuration, or where no run of
    all steps met every target.
    """
    carried = [step for step in view.data.pipeline.pipeline if step.carry > 1]
    if not carried or view.best is None:
        return None
    paths, best = view.summary.paths, view.best

    def chosen(step: str) -> Callable[[PathRun], str]:
        return lambda path: next(
            f"trial {run.taken.trial} (no. {run.rank})" for run in path.steps if run.step == step
        )

    columns = [
        *(word(step.step, chosen(step.step)) for step in carried),
        scaled("Energy", "energy_kwh", fmt.energy_scale, paths),
        scaled(
            "CO2e of all steps",
            "emissions_kg_co2e",
            fmt.emissions_scale,
            paths,
            strong=lambda path: path is best,
        ),
        num(
            "Relative to the least",
            lambda path: path.emissions_kg_co2e / best.emissions_kg_co2e,
            fmt.rate_text,
        ),
    ]
    shown = table("paths", "Runs of all steps by what was carried into the next", paths, columns)
    return Section(
        key="paths",
        title="Whether settling each step mattered",
        blocks=(Paragraph(text=_mattered(view)), shown),
    )


def _provenance(view: PipelineView) -> Section:
    rows = {f"Report of {folder}": f"{folder}/report/" for folder in view.studies}
    rows |= stated_of_machine(view.any_study.data)
    columns = [word("What", 0), word("Value", 1)]
    shown = table("provenance", "Where the figures come from", rows.items(), columns)
    return Section(key="provenance", title="Provenance", blocks=(shown,))


def _mattered(view: PipelineView) -> str:
    assert view.best is not None
    settled = next((path for path in view.summary.paths if set(path.ranks.values()) == {1}), None)
    if len(view.summary.paths) == 1 and settled is not None:
        return "No other configuration that was carried led to a run that met every target."
    if settled is None:
        return (
            "The recommended configurations led to no run that met every target; what was carried"
            " beside them did."
        )
    if settled is view.best:
        ratio = view.summary.paths[1].emissions_kg_co2e / settled.emissions_kg_co2e
        least = "It did not: beginning from each step's recommended configuration takes the least"
        return f"{least}; the next takes {fmt.rate_text(ratio)} times that."
    saving = 1 - view.best.emissions_kg_co2e / settled.emissions_kg_co2e
    return (
        f"It did: {fmt.less_text(saving)} CO2e for all steps than beginning from each step's"
        " recommended configuration."
    )
