"""The Pareto front: what each trial emitted and how good it became, and what is recommended for any target."""

import math
from collections import Counter
from collections.abc import Iterator

from carbonopt.analysis.by_target import TargetRange, target_range_for
from carbonopt.analysis.confidence import Configuration, configurations
from carbonopt.core import format as fmt
from carbonopt.report.document import Block, Paragraph, Section, Step, Steps, Table, num, scaled, table
from carbonopt.report.figures.pareto import interactive_pareto, pareto
from carbonopt.report.figures.points import GROUPS
from carbonopt.report.sections.trials import ALL_TRIALS, shared_settings
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import confidence_text, runs_of_value, runs_text, short_params


def section(study: StudyView) -> Section:
    printed = pareto(study.plot, study.recommendation, study.knee, study.quality)
    blocks: list[Block] = [Paragraph(text="There is nothing to draw: no trial has both an evaluation and energy.")]
    if printed is not None:
        better = f"{'Lower' if study.quality.direction == 'minimize' else 'Higher'} and further left is better."
        figure = interactive_pareto(study, printed, rows_in=ALL_TRIALS, row_note=shared_settings(study))
        blocks = [figure, Paragraph(text=" ".join([better, *_left_out(study)]), style="note")]
    title = f"Pareto front: emissions against {study.quality.name}"
    return Section(key="front", title=title, blocks=(*blocks, _steps(study), _trade_offs(study)))


def _left_out(study: StudyView) -> Iterator[str]:
    """Which trials the figure does not show, and why."""
    plot = study.plot
    shown = {point.trial for point in plot.points} | {trial for trial, _ in plot.unevaluated}
    without = Counter(record.state.value for record in study.data.records if record.trial not in shown)
    if without:
        listed = ", ".join(f"{count} {state}" for state, count in without.items())
        yield f"Not drawn for want of an evaluation or of energy: {listed}."
    if outside := plot.outside():
        yield f"Outside the frame: {fmt.count_text(len(outside), 'trial')} that did not complete."
    if hidden := sum(len(plot.of(group)) - len(plot.drawn(group)) for group in GROUPS):
        yield f"Not drawn, because they lie under other marks of their kind: {fmt.count_text(hidden, 'trial')}."


def _steps(study: StudyView) -> Steps:
    quality, ranges, own = study.quality, study.recommendation_by_target, study.recommendation.target
    rows: dict[int | None, int] = {record.trial: row for row, record in enumerate(study.data.records)}
    return Steps(
        label=f"Another target, {quality.name} {quality.bound_word}",
        steps=tuple(_step(study, index, rows) for index in range(len(ranges))),
        own=own.value,
        chosen=ranges.index(target_range_for(ranges, own)),
        lowest=quality.lowest,
        highest=quality.highest if math.isfinite(quality.highest) else None,
        rising=quality.direction == "minimize",
        refusal=f"{quality.label} is {quality.bounds_text}.",
    )


def _step(study: StudyView, index: int, rows: dict[int | None, int]) -> Step:
    ranges = study.recommendation_by_target
    answer, number = ranges[index], _number(ranges, index)
    following = next((at for at in range(index + 1, len(ranges)) if not ranges[at].study_target_only), None)
    label = f"targets from {number} {'on' if following is None else f'to {_number(ranges, following)}'}"
    if answer.study_target_only:
        label = f"the study's own target, {study.quality.text(answer.from_value)}, alone"
    place = None
    if answer.emissions_kg_co2e is not None and answer.value is not None:
        place = answer.emissions_kg_co2e * study.plot.per_kg, answer.value
    return Step(
        begins=answer.from_value,
        alone=answer.study_target_only,
        number=number,
        label=label,
        text=_text(study, answer),
        row=rows.get(answer.trial),
        place=place,
    )


def _number(ranges: tuple[TargetRange, ...], index: int) -> str:
    begin = ranges[index].from_value
    if ranges[index].study_target_only:
        return repr(begin)
    later = (answer.from_value for answer in ranges[index + 1 :] if not answer.study_target_only)
    return fmt.number_from(begin, next(later, math.inf))


def _text(study: StudyView, answer: TargetRange) -> str:
    record, quality = study.record(answer.trial), study.quality
    if record is None:
        return "No trial meets such a target."
    runs = runs_of_value(quality, answer.seeds, answer.value_bound)
    parts = [
        f"Trial {answer.trial} ({short_params(record.params)})",
        f"{quality.name} {quality.text(answer.value)}, {runs}",
        f"{fmt.emissions_text(answer.emissions_kg_co2e)} a run ({fmt.energy_text(answer.energy_kwh)})",
    ]
    if answer.saving_fraction is not None and answer.trial != answer.baseline_trial:
        saves = f"saves {fmt.percent_text(answer.saving_fraction)} against trial {answer.baseline_trial}"
        parts.append(f"{saves} ({confidence_text(answer.saving_interval)})")
    if answer.break_even_runs is not None:
        interval = runs_text(answer.break_even_interval)
        after = f"pays back after {fmt.count_text(answer.break_even_runs, 'run')}"
        parts.append(f"{after} ({interval})" if interval else after)
    return " · ".join(parts)


def _trade_offs(study: StudyView) -> Table:
    """Each configuration of the front against the best of them: what does a little quality save?"""
    rec, quality = study.recommendation, study.quality
    by_trial = {found.first.trial: found for found in configurations(study.data.records)}
    front = [by_trial[trial] for trial in rec.pareto_front]
    best = min(front, key=lambda row: quality.worse_by(row.value, 1.0), default=None)
    best_value, best_kg = (best.value, best.emissions_kg_co2e) if best else (math.nan, 0.0)

    def chosen(row: Configuration) -> bool:
        return row.first.trial == rec.trial

    def saves(row: Configuration) -> float | None:
        return 1 - row.emissions_kg_co2e / best_kg if best_kg else None

    columns = [
        num("Trial", "first.trial", strong=chosen),
        num("Runs", "n"),
        num(quality.label, "value", quality.text, strong=chosen),
        num(
            f"Worse than the best {quality.name}", lambda row: quality.worse_by(row.value, best_value), fmt.percent_text
        ),
        scaled("Emissions of a run", "emissions_kg_co2e", fmt.emissions_scale, front, strong=chosen),
        num("Saves against the most accurate", saves, fmt.percent_text),
        num("Global batch", "first.params.global_batch_size"),
        num("Learning rate", "first.params.learning_rate", fmt.value_text),
        num("Epochs", "first.params.epochs", fmt.value_text),
    ]
    notes = [] if study.knee is None else [f"The knee is trial {study.knee}."]
    if len(front) > 1 and any(row.n == 1 for row in front):
        notes.append("A trial that ran once may be on the front by luck.")
    caption = "Pareto front: no other trial is better in one objective without being worse in the other"
    caption += "; means where repeated" if any(row.n > 1 for row in front) else ""
    return table("pareto", caption, front, columns, note=" ".join(notes), paper="pareto")
