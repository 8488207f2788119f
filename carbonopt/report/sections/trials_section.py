"""Every trial, with what became of it and its settings.

Its caveats say what the search itself can't tell.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from carbonopt.analysis.confidence import lowest_share
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core import format as fmt
from carbonopt.core import units
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import QUALITIES
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.report.document import (
    Caveat,
    Cell,
    Column,
    Maker,
    Paragraph,
    Section,
    num,
    scaled,
    table,
    word,
)
from carbonopt.report.figures.points import last_value
from carbonopt.report.study_view import StudyView
from carbonopt.space.search_space import all_values

ALL_TRIALS = "all-trials"
FEW_TRIALS = 10  # completed trials; with fewer, the front is a sketch
# Evaluation examples; of more, a share is known to 5 points at the level of all intervals.
FEW_EXAMPLES = 400
# The most standard errors of its evaluation by which a chosen accuracy was too high in simulated
# searches of 5 and 20 trials, where cost and accuracy rise together (docs/limits.md).
MOST_ERRORS_OF_CHOICE = 1.3
FAILURE_TEXT_LENGTH = 160  # characters; the whole text is in the exported record
_STOPPED_BECAUSE = {
    StopReason.TARGET: "target out of reach",
    StopReason.CAP: "emits more, or is expected to emit more, than the best",
    StopReason.BUDGET: "the budget ended",
    StopReason.INTERRUPTED: "interrupted",
}


def section(study: StudyView) -> Section:
    records, rec, quality = study.data.records, study.recommendation, study.quality
    if not records:
        return Section(
            key="trials",
            title="Every trial",
            blocks=(Paragraph(text="No trial has been started."),),
        )
    settings = {record.trial: study.settings(record.params) for record in records}
    own = [name for params in settings.values() for name in params]
    order = [*TrialParams.model_fields, "gradient_accumulation_steps", *own]
    names = {name for params in settings.values() for name in params} - _shared(
        list(settings.values())
    ).keys()
    energy = fmt.energy_scale(record.energy_kwh.total for record in records if record.energy_kwh)
    columns = [
        num("Trial", "trial", strong=lambda row: row.trial == rec.trial),
        word("State", lambda row: state_text(row, rec)),
        num(quality.label, lambda row: last_value(row)[0], shown=lambda row: _reached(study, row)),
        *(_other_quality(name) for name in _other_qualities(records)),
        scaled("Emissions", "emissions_kg_co2e", fmt.emissions_scale, records),
        num(
            energy.label("Training energy"),
            lambda row: row.energy_kwh and row.energy_kwh.train,
            energy.text,
        ),
        num(
            energy.label("All energy"),
            lambda row: row.energy_kwh and row.energy_kwh.total,
            energy.text,
        ),
        num("Time", lambda row: row.duration_s and row.duration_s.total, units.human_duration),
        num("Memory (GiB)", "peak_memory_gib", fmt.memory_text),
        *(
            setting(name, name, lambda row: settings[row.trial])
            for name in sorted(names, key=order.index)
        ),
    ]
    states = tuple(row.state.value for row in records)
    values = tuple(row.value if row.state is TrialState.COMPLETE else None for row in records)
    row_filter = {
        "label": "State",
        "groups": states,
        "values_label": "meets the target of",
        "values": values,
    }
    shown = {"long": True, "filter": row_filter, "note": _left_out(study)}
    every = table(ALL_TRIALS, "Every trial", records, columns, **shown)
    notes = [Paragraph(text=text, style="note")] if (text := shared_settings(study)) else []
    return Section(key="trials", title="Every trial", blocks=(every, *notes))


def _left_out(study: StudyView) -> str:
    """Say what interrupted attempts used; empty if there were none."""
    earlier_kwh = study.spent.earlier_attempts_kwh
    if not earlier_kwh:
        return ""
    return (
        "Energies and times leave out what attempts that were interrupted had used in vain:"
        f" {fmt.energy_text(earlier_kwh)}."
    )


def shared_settings(study: StudyView) -> str:
    """Name the settings that all trials share, which the table leaves out."""
    shared = _shared([study.settings(record.params) for record in study.data.records])
    listed = ", ".join(f"{name} {fmt.value_text(setting)}" for name, setting in shared.items())
    return f"The same in every trial: {listed}." if listed else ""


def _shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: setting
        for name, setting in (settings[0] if settings else {}).items()
        if all(name in params and repr(params[name]) == repr(setting) for params in settings)
    }


def _reached(study: StudyView, record: TrialRecord) -> str:
    value, last = last_value(record)
    return study.quality.text(value) + (f" at step {last.step}" if last else "")


def _other_qualities(records: Sequence[TrialRecord]) -> list[str]:
    return list(
        dict.fromkeys(
            name for record in records for point in record.evals for name in point.other_qualities
        )
    )


def _other_quality(name: str) -> Maker:
    """Make the column of a quality beside the study's own.

    Its values are those that the last evaluation of each trial found.
    """
    label = QUALITIES[name].label if name in QUALITIES else name
    return num(
        label,
        lambda row: row.evals[-1].other_qualities.get(name) if row.evals else None,
        "{:#.4g}".format,
    )


def setting_text(value: object) -> str:
    return "default" if value is None else fmt.value_text(value)


def setting(name: str, label: str, settings_of: Callable[[Any], Mapping[str, Any]]) -> Maker:
    """Make the column of one setting, a number or a word.

    `settings_of` returns the settings of a row, which has this one under `name`.
    """

    def cell(row: Any) -> Cell:
        value = settings_of(row).get(name)
        text = setting_text(value)
        return Cell(
            text=text, sort=text if value is None or isinstance(value, bool | str) else value
        )

    return Column(label=label, numeric=True), cell


def end_text(record: TrialRecord) -> str:
    """Return a trial's state and, of one that was stopped, why.

    An interrupted trial did not fail, although its state says so until it runs again.
    """
    if record.stop_reason is None:
        return record.state.value
    because = _STOPPED_BECAUSE[record.stop_reason]
    interrupted = record.stop_reason is StopReason.INTERRUPTED
    return because if interrupted else f"{record.state.value}: {because}"


def state_text(record: TrialRecord, rec: Recommendation) -> str:
    """Return a trial's state, the reason for it, and the trial's part in the report."""
    text = end_text(record)
    if record.forecast is not None:
        forecast = record.forecast
        off = f"{forecast.sds_short:.1f} standard deviations off, {forecast.sds_needed:.1f} needed"
        text += f" (forecast {forecast.value:.4g}, {off})"
    if record.failure is not None:
        text += f": {record.failure.kind}" if record.failure.kind != record.state.value else ""
        text += f": {record.failure.text.strip().partition(chr(10))[0][:FAILURE_TEXT_LENGTH]}"
    parts = {
        "recommended": record.trial == rec.trial,
        "baseline": rec.baseline is not None and record.trial == rec.baseline.trial,
        "front": record.trial in rec.pareto_front,
        "tie": record.trial in rec.ties,
        f"audit: due to be stopped at step {record.audited_at_step}": record.audited_at_step
        is not None,
        f"trial {record.repeat_of} with seed {record.seed}": record.repeat_of is not None,
    }
    played = ", ".join(part for part, plays in parts.items() if plays)
    return f"{text} ({played})" if played else text


def _examples(study: StudyView) -> int | None:
    """Return how many examples the recommended trial's quality is a share of; None: not known.

    Scripts that do not tell the number have 1.
    """
    if not study.quality.is_share_of_examples:
        return None
    if study.data.prepared is not None:
        return study.data.prepared.eval_examples
    record = study.record(study.recommendation.trial)
    count = None if record is None else record.quality.count
    return None if count == 1 else count


def _few_examples(study: StudyView) -> Iterator[Caveat]:
    """Warn if so few evaluation examples leave it open whether the target is met."""
    rec, count = study.recommendation, _examples(study)
    if rec.value is None or count is None:
        return
    lowest = lowest_share(rec.value, count)
    if count < FEW_EXAMPLES and not rec.target.is_met_by(lowest):
        name = study.quality.label.lower()
        more = " (dataset.eval_files, or a larger dataset.eval_fraction)"
        how = "" if study.data.prepared is None else more
        yield study.caveat("few_examples", name=name, examples=count, lowest=lowest, how=how)


def _selection_bias(study: StudyView) -> Caveat:
    rec, count = study.recommendation, _examples(study)
    if rec.value is None or count is None:
        return study.caveat("selection_bias", quality=study.quality.name)
    # Two more right and two more wrong: all right would have no error (Agresti and Coull, The
    # American Statistician 52, 1998).
    share = (rec.value * count + 2) / (count + 4)
    error = math.sqrt(share * (1 - share) / (count + 4))
    return study.caveat(
        "selection_bias_of_share",
        quality=study.quality.name,
        most_errors=MOST_ERRORS_OF_CHOICE,
        most=MOST_ERRORS_OF_CHOICE * error,
        examples=count,
    )


def caveats(study: StudyView) -> Iterator[Caveat]:
    search, audited = study.data.config.search, study.audited
    if study.data.ended is None:
        yield study.caveat("running")
    searched = [record for record in study.data.records if record.repeat_of is None]
    completed = sum(record.state is TrialState.COMPLETE for record in searched)
    if 0 < completed < FEW_TRIALS and not _all_tried(study, searched):
        yield study.caveat("few_trials", completed=completed)
    yield from _few_examples(study)
    if search.learn_from:
        yield study.caveat("learned_from", studies=len(search.learn_from))
    for edge in study.edges:
        yield study.caveat("at_space_end", **edge.model_dump())
    asked, own = study.recommendation.target, study.data.config.target.at()
    # An easier target might be met by trials that were stopped because they could not meet the
    # study's own; a harder one by trials that emitted more than the best at the study's own.
    if asked != own and search.goal == "recommend":
        met = [
            run.trial
            for run in searched
            if run.state is TrialState.PRUNED and _met_with_less(run, study.recommendation)
        ]
        if met:
            yield study.caveat("met_before_stopped", trials=met, own=own.value)
    reason = (
        StopReason.TARGET
        if asked.quality.rank(asked.value) > own.quality.rank(own.value)
        else StopReason.CAP
    )
    if (
        asked != own
        and search.goal == "recommend"
        and (stopped := sum(run.stop_reason is reason for run in searched))
    ):
        yield study.caveat("stopped_for_own_target", stopped=stopped, own=own.value)
    if audited is not None and audited.lowest_rate is None:
        yield study.caveat(
            "pruning_audit_none", share=search.pruning.audit, cut_short=audited.cut_short
        )
    elif audited is not None:
        numbers = audited.model_dump()
        numbers |= {"lowest": numbers.pop("lowest_rate"), "highest": numbers.pop("highest_rate")}
        did = "ended on the Pareto front" if search.goal == "front" else "met the target"
        yield study.caveat("pruning_audit", did=did, **numbers)
    if study.recommendation.met and completed > 1:  # one trial leaves nothing to choose
        yield _selection_bias(study)


def _all_tried(study: StudyView, searched: Sequence[TrialRecord]) -> bool:
    """Return whether each combination of the space was tried; a continuous range has no end."""
    domains = study.data.config.search.space.free()
    listed = [all_values(name, domain) for name, domain in domains.items()]
    sizes = [math.inf if values is None else len(values) for values in listed]
    return len({record.params for record in searched}) >= math.prod(sizes)


def _met_with_less(run: TrialRecord, recommendation: Recommendation) -> bool:
    """Return whether a stopped trial had met the target with less energy than is recommended."""
    most_kwh = math.inf if recommendation.energy_kwh is None else recommendation.energy_kwh
    return any(
        point.value is not None
        and recommendation.target.is_met_by(point.value)
        and point.train_energy_kwh is not None
        and point.train_energy_kwh < most_kwh
        for point in run.evals
    )
