"""The report's tables. Every row's text is ready to read; values to sort by ride along."""

from collections.abc import Sequence

from carbonopt import units
from carbonopt.analysis.footprint import Footprint
from carbonopt.analysis.front import objectives
from carbonopt.analysis.recommend import Recommendation
from carbonopt.record import StudyData
from carbonopt.report.quantities import (
    MISSING,
    count_text,
    emissions_text,
    energy_text,
    percent_text,
    perplexity_text,
    value_text,
)
from carbonopt.report.view import Cell, Column, Table, columns, number, word
from carbonopt.trial import Phase, StopReason, TrialParams, TrialRecord, TrialState

STOPPED_BECAUSE = {
    StopReason.TARGET: "target out of reach",
    StopReason.CAP: "emits more than the best",
    StopReason.BUDGET: "the budget ended",
    StopReason.INTERRUPTED: "interrupted",
}
PHASES = {
    Phase.PREPARE: "preparation, once per study",
    Phase.GAP: "between trials",
    Phase.SETUP: "start-up of trials",
    Phase.TRAIN: "training",
    Phase.EVAL: "evaluation",
}
FAILURE_TEXT_LENGTH = 160  # characters; the whole text is in the exported record


def trade_offs(data: StudyData, rec: Recommendation) -> Table:
    """The Pareto front, each trial against the most accurate one: what does a little perplexity save?"""
    front = [(record, *point) for record in _by_number(data, rec.pareto_front) if (point := objectives(record))]
    best = min(front, key=lambda entry: entry[2]) if front else None
    rows = []
    for record, emissions_kg, perplexity in front:
        assert best is not None
        worse = perplexity / best[2] - 1
        saved = 1 - emissions_kg / best[1] if best[1] else None
        chosen = record.trial == rec.trial
        rows.append(
            (
                number(str(record.trial), record.trial, strong=chosen),
                number(perplexity_text(perplexity), perplexity, strong=chosen),
                number(percent_text(worse), worse),
                number(emissions_text(emissions_kg), emissions_kg, strong=chosen),
                number(percent_text(saved), saved),
                number(str(record.params.global_batch_size), record.params.global_batch_size),
                number(value_text(record.params.learning_rate), record.params.learning_rate),
                number(value_text(record.params.epochs), record.params.epochs),
            )
        )
    labels = ("Trial", "Perplexity", "Above the lowest by", "Emissions of a run", "Saves")
    return Table(
        caption="Pareto front: no other trial is better in one and no worse in the other",
        columns=columns(*labels, "Global batch", "Learning rate", "Epochs", numeric_from=0),
        rows=tuple(rows),
    )


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
    rows = tuple(
        _trial_row(record, rec) + tuple(_setting(params.get(name)) for name in varied)
        for record, params in zip(data.records, settings, strict=True)
    )
    head = (
        Column(label="Trial", numeric=True),
        Column(label="State"),
        *columns("Perplexity", "Emissions", "Training energy", "All energy", "Time", "Memory", numeric_from=0),
    )
    table = Table(
        caption="Every trial",
        columns=(*head, *(Column(label=name, numeric=True) for name in varied)),
        rows=rows,
    )
    return table, ", ".join(f"{name} {value_text(settings[0][name])}" for name in shared)


def by_phase(data: StudyData, spent: Footprint) -> Table:
    parts = [(PHASES[phase], energy_kwh) for phase, energy_kwh in spent.by_phase_kwh.items()]
    if spent.earlier_attempts_kwh:
        parts.append(("attempts that were interrupted and run again", spent.earlier_attempts_kwh))
    return _energy_table("Energy of the study by phase", "Phase", parts, data, spent)


def by_state(data: StudyData, rec: Recommendation, spent: Footprint) -> Table:
    parts = [
        (f"{state.value} ({count_text(rec.trials_by_state[state], 'trial')})", energy_kwh)
        for state, energy_kwh in spent.by_state_kwh.items()
    ]
    parts.append(
        ("no trial: preparation and pauses", spent.by_phase_kwh[Phase.PREPARE] + spent.by_phase_kwh[Phase.GAP])
    )
    return _energy_table("Energy of the study by what became of the trials", "State", parts, data, spent)


def by_component(data: StudyData, spent: Footprint) -> Table:
    """Training energy by component, and how each is known."""
    energies = spent.train_by_component_kwh
    total_kwh = sum(energies.values())
    rows = []
    for component in {**data.provenance.known, **energies}:
        energy_kwh = energies.get(component)
        share = energy_kwh / total_kwh if energy_kwh is not None and total_kwh else None
        rows.append(
            (
                word(component.upper()),
                word(data.provenance.known.get(component, MISSING)),
                number(energy_text(energy_kwh), energy_kwh),
                number(percent_text(share), share, share=share),
            )
        )
    return Table(
        caption="Training energy of all trials by component",
        columns=columns("Component", "How known", "Energy", "Share", numeric_from=2),
        rows=tuple(rows),
    )


def _energy_table(
    caption: str, first: str, parts: Sequence[tuple[str, float]], data: StudyData, spent: Footprint
) -> Table:
    def row(label: str, energy_kwh: float, *, total: bool = False) -> tuple[Cell, ...]:
        share = energy_kwh / spent.energy_kwh if spent.energy_kwh else None
        emissions_kg = units.emissions_kg_co2e(
            energy_kwh, data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue
        )
        return (
            word(label, strong=total),
            number(energy_text(energy_kwh), energy_kwh, strong=total),
            number(emissions_text(emissions_kg), emissions_kg, strong=total),
            number(percent_text(share), share, share=None if total else share),
        )

    return Table(
        caption=caption,
        columns=columns(first, "Energy", "Emissions", "Share"),
        rows=(*(row(label, energy_kwh) for label, energy_kwh in parts), row("sum", spent.energy_kwh, total=True)),
    )


def _trial_row(record: TrialRecord, rec: Recommendation) -> tuple[Cell, ...]:
    energy, duration, memory_gib = record.energy_kwh, record.duration_s, record.peak_memory_gib
    return (
        number(str(record.trial), record.trial, strong=record.trial == rec.trial),
        word(state_text(record, rec)),
        _perplexity_cell(record),
        number(emissions_text(record.emissions_kg_co2e), record.emissions_kg_co2e),
        number(energy_text(energy.train if energy else None), energy.train if energy else None),
        number(energy_text(energy.total if energy else None), energy.total if energy else None),
        number(units.human_duration(duration.total) if duration else MISSING, duration.total if duration else None),
        number(MISSING if memory_gib is None else f"{memory_gib:.3g} GiB", memory_gib),
    )


def state_text(record: TrialRecord, rec: Recommendation) -> str:
    """The state, why, and the part that the trial plays in the report."""
    text = record.state.value
    if record.stop_reason is not None:
        text += f": {STOPPED_BECAUSE[record.stop_reason]}"
    if record.failure is not None:
        text += f": {record.failure.kind}: {record.failure.text.strip().partition(chr(10))[0][:FAILURE_TEXT_LENGTH]}"
    parts = [
        role
        for role, trial in (("recommended", rec.trial), ("baseline", rec.baseline.trial if rec.baseline else None))
        if trial == record.trial
    ]
    if record.trial in rec.pareto_front:
        parts.append("front")
    return f"{text} ({', '.join(parts)})" if parts else text


def _perplexity_cell(record: TrialRecord) -> Cell:
    if record.state is TrialState.COMPLETE:
        return number(perplexity_text(record.perplexity), record.perplexity)
    if not record.evals:
        return number(MISSING, None)
    last = record.evals[-1]
    return number(f"{perplexity_text(last.perplexity)} at step {last.step}", last.perplexity)


def _setting(value: int | float | str | bool | None) -> Cell:
    if value is None or isinstance(value, bool | str):
        return word(_optional(value))
    return number(value_text(value), value)


def _optional(value: object) -> str:
    return "default" if value is None else value_text(value)


def _by_number(data: StudyData, numbers: Sequence[int]) -> list[TrialRecord]:
    by_number = {record.trial: record for record in data.records}
    return [by_number[trial] for trial in numbers]
