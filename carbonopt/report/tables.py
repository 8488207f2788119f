"""The report's tables. Every row's text is ready to read; values to sort by ride along."""

from collections.abc import Sequence

from carbonopt.analysis.confidence import Configuration, Standing, by_means, configurations
from carbonopt.analysis.front import knee
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.replicates import Repeats
from carbonopt.core import units
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.format import (
    MISSING,
    Scale,
    emissions_scale,
    energy_scale,
    percent_text,
    quality_text,
    spread_text,
    value_text,
)
from carbonopt.core.study import StudyData
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.report.view import Cell, Column, Table, columns, number, word

STOPPED_BECAUSE = {
    StopReason.TARGET: "target out of reach",
    StopReason.CAP: "emits more, or is sure to emit more, than the best",
    StopReason.BUDGET: "the budget ended",
    StopReason.INTERRUPTED: "interrupted",
}
STANDINGS = {
    Standing.CONFIRMED: "confirmed",
    Standing.INCONCLUSIVE: "in doubt",
    Standing.UNREPLICATED: "in doubt",
    Standing.REJECTED: "refuted",
}
FAILURE_TEXT_LENGTH = 160  # characters; the whole text is in the exported record


def trade_offs(data: StudyData, rec: Recommendation) -> Table:
    """The Pareto front, each trial against the most accurate one: what does a little perplexity save?"""
    by_number = {one.first.trial: one for one in configurations(data.records)}
    front = [by_number[trial] for trial in rec.pareto_front]
    best = min(front, key=lambda one: one.perplexity, default=None)
    scale = emissions_scale(one.emissions_kg_co2e for one in front)
    rows = []
    for one in front:
        assert best is not None
        params, emissions_kg = one.first.params, one.emissions_kg_co2e
        worse = one.perplexity / best.perplexity - 1
        saved = 1 - emissions_kg / best.emissions_kg_co2e if best.emissions_kg_co2e else None
        chosen = one.first.trial == rec.trial
        rows.append(
            (
                number(str(one.first.trial), one.first.trial, strong=chosen),
                number(str(one.n), one.n),
                number(quality_text(one.perplexity), one.perplexity, strong=chosen),
                number(percent_text(worse), worse),
                number(scale.text(emissions_kg), emissions_kg, strong=chosen),
                number(percent_text(saved), saved),
                number(str(params.global_batch_size), params.global_batch_size),
                number(value_text(params.learning_rate), params.learning_rate),
                number(value_text(params.epochs), params.epochs),
            )
        )
    labels = (
        "Trial",
        "Runs",
        "Perplexity",
        "Above the best perplexity",
        scale.label("Emissions of a run"),
        "Saves against the most accurate",
    )
    return Table(
        caption="Pareto front: no other trial is better in one objective without being worse in the other"
        + ("; means where repeated" if any(one.n > 1 for one in front) else ""),
        columns=columns(*labels, "Global batch", "Learning rate", "Epochs", numeric_from=0),
        rows=tuple(rows),
        note=" ".join(_of_the_front(front, knee(by_means(data.records)))),
    )


def _of_the_front(front: Sequence[Configuration], knee_trial: int | None) -> list[str]:
    """Which trial is the knee, and what a figure of a single run is worth."""
    said = []
    if knee_trial is not None:
        runs = next(one.n for one in front if one.first.trial == knee_trial)
        said.append(f"The knee is trial {knee_trial} ({'one run' if runs == 1 else f'mean of {runs} runs'}).")
    if len(front) > 1 and any(one.n == 1 for one in front):
        said.append("A trial that ran once may be on the front by luck.")
    return said


def configuration(rec: Recommendation) -> Table | None:
    """The recommended (or closest) configuration beside the baseline's; what differs is strong."""
    chosen, label = (rec, "Recommended") if rec.met else (rec.closest, "Closest")
    if chosen is None or chosen.params is None:
        return None
    params = chosen.params.as_record()
    compared = rec.baseline if rec.baseline is not None and rec.baseline.trial != chosen.trial else None
    if compared is None:
        return Table(
            caption="Configuration",
            columns=columns("Setting", f"{label} (trial {chosen.trial})"),
            rows=tuple((word(name), word(value_text(value))) for name, value in params.items()),
        )
    other = compared.params.as_record()
    rows = []
    for name in {**params, **other}:
        ours, theirs = params.get(name), other.get(name)
        rows.append((word(name), word(_optional(ours), strong=ours != theirs), word(_optional(theirs))))
    return Table(
        caption="Configuration",
        columns=columns("Setting", f"{label} (trial {chosen.trial})", f"Baseline (trial {compared.trial})"),
        rows=tuple(rows),
    )


def trials(data: StudyData, rec: Recommendation) -> tuple[Table, str]:
    """Every trial; and, as one line, the settings that all of them share."""
    settings = [record.params.as_record() for record in data.records]
    order = [*TrialParams.model_fields, "gradient_accumulation_steps"]
    names = sorted({name for params in settings for name in params}, key=order.index)
    shared = [name for name in names if len({repr(params.get(name)) for params in settings}) == 1]
    varied = [name for name in names if name not in shared]
    emissions = emissions_scale(record.emissions_kg_co2e for record in data.records)
    energy = energy_scale(record.energy_kwh.total for record in data.records if record.energy_kwh)
    rows = tuple(
        _trial_row(record, rec, emissions, energy) + tuple(_setting(params.get(name)) for name in varied)
        for record, params in zip(data.records, settings, strict=True)
    )
    head = (
        Column(label="Trial", numeric=True),
        Column(label="State"),
        *columns("Perplexity", emissions.label("Emissions"), energy.label("Training energy"), numeric_from=0),
        *columns(energy.label("All energy"), "Time", "Memory (GiB)", numeric_from=0),
    )
    table = Table(
        caption="Every trial",
        columns=(*head, *(Column(label=name, numeric=True) for name in varied)),
        rows=rows,
    )
    return table, ", ".join(f"{name} {value_text(settings[0][name])}" for name in shared)


def repeats(found: Sequence[Repeats], rec: Recommendation) -> Table:
    """Each configuration that completed more than once: how far its runs differ, and whether it holds the target."""
    scale = emissions_scale(one.emissions_kg_co2e.highest for one in found)
    rows = []
    for one in found:
        perplexity, emissions = one.perplexity, one.emissions_kg_co2e
        chosen = one.params == rec.params
        standing = one.standing(rec.target_perplexity)
        rows.append(
            (
                word(", ".join(map(str, one.trials)), strong=chosen),
                number(str(one.n), one.n),
                word(", ".join(map(str, one.seeds))),
                number(spread_text(perplexity), perplexity.mean, strong=chosen),
                number(f"{quality_text(perplexity.lowest)} to {quality_text(perplexity.highest)}", None),
                number(quality_text(one.perplexity_bound), one.perplexity_bound),
                word(MISSING if standing is None else STANDINGS[standing]),
                number(spread_text(emissions, scale), emissions.mean, strong=chosen),
                number(f"{scale.text(emissions.lowest)} to {scale.text(emissions.highest)}", None),
            )
        )
    head = [Column(label=label, numeric=label == "n") for label in ("Trials", "n", "Seeds")]
    values = (
        *columns("Perplexity", "Range", "Its mean at most", numeric_from=0),
        Column(label="Holds the target"),
        *columns(scale.label("Emissions"), "Range", numeric_from=0),
    )
    judged = [one for one in found if one.standing(rec.target_perplexity) is not None]
    return Table(
        caption="Configurations that completed more than once: mean ± its own standard deviation, and range",
        columns=(*head, *values),
        rows=tuple(rows),
        note=_of_the_standings(judged[0].level, rec) if judged else "",
    )


def _of_the_standings(level: float, rec: Recommendation) -> str:
    return (
        f"Its mean at most: over all seeds, with {percent_text(level)} confidence. Confirmed: this bound meets the "
        f"target of {quality_text(rec.target_perplexity)}; in doubt: the mean of the runs does, the bound doesn't; "
        "refuted: the mean doesn't, or a run diverged or did not fit in memory."
    )


def _trial_row(record: TrialRecord, rec: Recommendation, emissions_as: Scale, energy_as: Scale) -> tuple[Cell, ...]:
    emissions_kg, duration, memory_gib = record.emissions_kg_co2e, record.duration_s, record.peak_memory_gib
    train_kwh, all_kwh = (record.energy_kwh.train, record.energy_kwh.total) if record.energy_kwh else (None, None)
    return (
        number(str(record.trial), record.trial, strong=record.trial == rec.trial),
        word(state_text(record, rec)),
        _perplexity_cell(record),
        number(emissions_as.text(emissions_kg), emissions_kg),
        number(energy_as.text(train_kwh), train_kwh),
        number(energy_as.text(all_kwh), all_kwh),
        number(units.human_duration(duration.total) if duration else MISSING, duration.total if duration else None),
        number(MISSING if memory_gib is None else f"{memory_gib:.3g}", memory_gib),
    )


def state_text(record: TrialRecord, rec: Recommendation) -> str:
    """The state, why, and the part that the trial plays in the report."""
    text = record.state.value
    if record.stop_reason is not None:
        text += f": {STOPPED_BECAUSE[record.stop_reason]}"
    if record.failure is not None:
        text += f": {record.failure.kind}" if record.failure.kind != record.state.value else ""
        text += f": {record.failure.text.strip().partition(chr(10))[0][:FAILURE_TEXT_LENGTH]}"
    parts = [
        role
        for role, trial in (("recommended", rec.trial), ("baseline", rec.baseline.trial if rec.baseline else None))
        if trial == record.trial
    ]
    if record.trial in rec.pareto_front:
        parts.append("front")
    if record.trial in rec.ties:
        parts.append("tie")
    if record.audited_at_step is not None:
        parts.append(f"audit: due to be stopped at step {record.audited_at_step}")
    if record.repeat_of is not None:
        parts.append(f"trial {record.repeat_of} with seed {record.seed}")
    return f"{text} ({', '.join(parts)})" if parts else text


def _perplexity_cell(record: TrialRecord) -> Cell:
    if record.state is TrialState.COMPLETE:
        return number(quality_text(record.perplexity), record.perplexity)
    if not record.evals:
        return number(MISSING, None)
    last = record.evals[-1]
    return number(f"{quality_text(last.perplexity)} at step {last.step}", last.perplexity)


def _setting(value: int | float | str | bool | None) -> Cell:
    if value is None or isinstance(value, bool | str):
        return word(_optional(value))
    return number(value_text(value), value)


def _optional(value: object) -> str:
    return "default" if value is None else value_text(value)
