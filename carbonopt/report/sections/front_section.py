"""The Pareto front: what each trial emitted and how good it became.

A slider shows what is recommended for any target.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from carbonopt.analysis.confidence import Configuration, configurations
from carbonopt.analysis.recommend import TargetRange, target_range_for
from carbonopt.core import format as fmt
from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.report.caveats import trials_text
from carbonopt.report.document import (
    Block,
    Maker,
    Paragraph,
    Section,
    Step,
    Steps,
    Table,
    num,
    scaled,
    table,
)
from carbonopt.report.figures.pareto_figure import interactive_pareto, pareto_of
from carbonopt.report.figures.points import GROUPS
from carbonopt.report.sections.trials_section import ALL_TRIALS, setting, shared_settings
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import confidence_text, runs_of_value, runs_text, short_params


def section(study: StudyView) -> Section:
    printed = pareto_of(study)
    blocks: list[Block] = [
        Paragraph(text="There is nothing to draw: no trial has both an evaluation and energy.")
    ]
    if printed is not None:
        better = (
            f"{'Lower' if study.quality.direction == 'minimize' else 'Higher'} and further left is"
            " better."
        )
        figure = interactive_pareto(
            study, printed, rows_in=ALL_TRIALS, row_note=shared_settings(study)
        )
        blocks = [figure, Paragraph(text=" ".join([better, *_left_out(study)]), style="note")]
    title = f"Pareto front: emissions against {study.quality.name}"
    return Section(key="front", title=title, blocks=(*blocks, _slider(study), _trade_offs(study)))


def _left_out(study: StudyView) -> Iterator[str]:
    """Say which trials the figure does not show, and why."""
    plot = study.plot
    shown = {point.trial for point in plot.points} | {trial for trial, _ in plot.unevaluated}
    without = Counter(
        record.state.value for record in study.data.records if record.trial not in shown
    )
    if without:
        listed = ", ".join(f"{count} {state}" for state, count in without.items())
        yield f"Not drawn for want of an evaluation or of energy: {listed}."
    if outside := plot.outside():
        yield f"Outside the frame: {fmt.count_text(len(outside), 'trial')} that did not complete."
    if hidden := sum(len(plot.of(group)) - len(plot.drawn(group)) for group in GROUPS):
        yield (
            "Not drawn, because they lie under other marks of their kind:"
            f" {fmt.count_text(hidden, 'trial')}."
        )
    on_front = study.recommendation.pareto_front
    failed = [
        tried.trial
        for tried in configurations(study.data.records)
        if tried.failed_replicate and tried.trial in on_front
    ]
    if failed:
        with_another = "diverged or did not fit in memory with another seed"
        yield f"On the front, but never recommended: {trials_text(failed)}, which {with_another}."


def _slider(study: StudyView) -> Steps:
    quality, own = study.quality, study.recommendation.target
    return Steps(
        label=f"Another target, {quality.name} {quality.bound_word}",
        steps=tuple(_steps(study)),
        own=own.value,
        chosen=study.recommendation_by_target.index(
            target_range_for(study.recommendation_by_target, own)
        ),
        lowest=quality.lowest if math.isfinite(quality.lowest) else None,
        highest=quality.highest if math.isfinite(quality.highest) else None,
        rising=quality.direction == "minimize",
        refusal=f"{quality.label} is {quality.bounds_text}.",
    )


def _steps(study: StudyView) -> Iterator[Step]:
    row_of: dict[int | None, int] = {
        record.trial: row for row, record in enumerate(study.data.records)
    }
    general = [
        answer.from_value
        for answer in study.recommendation_by_target
        if not answer.study_target_only
    ]
    numbers = [
        fmt.number_from(begin, end)
        for begin, end in pairwise([*general, study.quality.rank(math.inf)])
    ]
    bounds = dict(zip(general, zip(numbers, [*numbers[1:], None], strict=True), strict=True))
    general_answer: TargetRange | None = None
    for answer in study.recommendation_by_target:
        begins, alone, place = answer.from_value, answer.study_target_only, None
        number, label = (
            repr(begins),
            f"the study's own target, {study.quality.target_text(begins)}, alone",
        )
        if not alone:
            number, following = bounds[begins]
            label = f"targets from {number} {'on' if following is None else f'to {following}'}"
            if math.isinf(begins):
                side = "below" if study.quality.direction == "minimize" else "above"
                label = "any target" if following is None else f"targets {side} {following}"
        if answer.emissions_kg_co2e is not None and answer.value is not None:
            place = answer.emissions_kg_co2e * study.plot.per_kg, answer.value
        text, row = _text(study, answer), row_of.get(answer.trial)
        if not alone:
            general_answer = answer
        elif general_answer is not None and general_answer.trial is not None:
            text += (
                f" · for this target it comes before trial {general_answer.trial}, which is cheaper"
                " but less sure to meet it"
            )
        begins_at = begins if math.isfinite(begins) else None
        yield Step(
            begins=begins_at,
            alone=alone,
            number=number,
            label=label,
            text=text,
            row=row,
            place=place,
        )


def _text(study: StudyView, answer: TargetRange) -> str:
    record, quality = study.record(answer.trial), study.quality
    if record is None:
        return "No trial meets such a target."
    runs = runs_of_value(quality, answer.seeds, answer.value_bound)
    parts = [
        f"Trial {answer.trial} ({short_params(record.params, study.varied)})",
        f"{quality.name} {quality.text(answer.value)}, {runs}",
        (
            f"{fmt.emissions_text(answer.emissions_kg_co2e)} a run"
            f" ({fmt.energy_text(answer.energy_kwh)})"
        ),
    ]
    if (saving := answer.saving_fraction) is not None and answer.trial != answer.baseline_trial:
        interval = answer.saving_interval
        if saving < 0:
            interval = (-interval[1], -interval[0]) if interval else None
            of_it = f"emits {fmt.percent_text(-saving)} more than trial {answer.baseline_trial}"
        else:
            of_it = f"saves {fmt.percent_text(saving)} against trial {answer.baseline_trial}"
        parts.append(f"{of_it} ({confidence_text(interval)})")
    if answer.break_even_runs is not None:
        likely = runs_text(answer.break_even_interval)
        after = f"pays back after {fmt.count_text(answer.break_even_runs, 'run')}"
        parts.append(f"{after} ({likely})" if likely else after)
    return " · ".join(parts)


def _trade_offs(study: StudyView) -> Table:
    """Compare each configuration of the front with the one of the best quality.

    The table shows how much a little less quality saves.
    """
    rec, quality = study.recommendation, study.quality
    by_trial = {
        configuration.first.trial: configuration
        for configuration in configurations(study.data.records)
    }
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
            f"Worse than the best {quality.name}",
            lambda row: quality.worse_by(row.value, best_value),
            fmt.percent_text,
        ),
        scaled(
            "Emissions of a run", "emissions_kg_co2e", fmt.emissions_scale, front, strong=chosen
        ),
        num("Saves against the most accurate", saves, fmt.percent_text),
        *_settings(front),
    ]
    beyond = (
        f"Beyond the knee, trial {study.knee}, either improves only at a high price in the other."
    )
    notes = [] if study.knee is None else [beyond]
    if len(front) > 1 and any(row.n == 1 for row in front):
        notes.append("A trial that ran once may be on the front by luck.")
    caption = (
        "Pareto front: no other complete trial is better in one objective without being worse in"
        " the other"
    )
    caption += "; means where repeated" if any(row.n > 1 for row in front) else ""
    return table("pareto", caption, front, columns, note=" ".join(notes), paper="pareto")


def _settings(front: Sequence[Configuration]) -> Iterator[Maker]:
    """Yield a column for each setting that tells the front's configurations apart.

    These are the settings that decide most, others that differ, and those that the user has
    defined.
    """
    names = {
        "global_batch_size": "Global batch",
        "learning_rate": "Learning rate",
        "epochs": "Epochs",
    }
    for name in DIMENSIONS:
        if name not in names and len({row.first.params.value(name) for row in front}) > 1:
            names[name] = DIMENSIONS[name].label[:1].upper() + DIMENSIONS[name].label[1:]
    names |= {name: name for row in front for name in row.first.params.own}
    for name, label in names.items():
        if any(row.first.params.value(name) is not None for row in front):
            yield setting(name, label, lambda row: row.first.params.as_record())
