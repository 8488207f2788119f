"""The report's tables of energy: where it went, how it is known, and how sure it is. Each has one unit."""

from collections.abc import Iterable, Sequence

from carbonopt.analysis.footprint import Footprint, summed
from carbonopt.analysis.recommend import Recommendation
from carbonopt.analysis.repricing import Repricing
from carbonopt.core import units
from carbonopt.core.format import (
    MISSING,
    Scale,
    count_text,
    difference_text,
    emissions_scale,
    energy_scale,
    intensity_text,
    percent_text,
    uncertainty_text,
)
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPARED_FROM_S, COMPONENTS, LARGEST_DISAGREEMENT, GpuEnergy, Phase, TrialRecord
from carbonopt.energy.codecarbon import FRESH_AFTER_S
from carbonopt.report.view import Cell, Column, Table, columns, number, word

PHASES = {
    Phase.PREPARE: "preparation, at each start of carbonopt run",
    Phase.GAP: "between trials",
    Phase.SETUP: "start-up of trials",
    Phase.TRAIN: "training",
    Phase.EVAL: "evaluation",
}
UNCERTAINTY_NOTE = (
    "± is one standard uncertainty, from how rarely the counters tick; their own accuracy is not known and not in it."
)
NET_UNKNOWN_BECAUSE = (
    "by the idle power measured before the study the GPUs would have used more idle than their counters say in all: "
    "they were at work then, or the time is too short for the counters' ticks"
)
_NET_NOTE = f"Net of idle is not known (–) where {NET_UNKNOWN_BECAUSE}."


def by_phase(data: StudyData, spent: Footprint) -> Table:
    """With the GPUs' part of each, which their counters' reading of the whole checks, where not only the GPUs count."""
    parts = [(PHASES[phase], energy_kwh) for phase, energy_kwh in spent.by_phase_kwh.items()]
    gpu_kwh = list(spent.gpu_parts_kwh.values())
    if spent.earlier_attempts_kwh:
        parts.append(("attempts that were interrupted and run again", spent.earlier_attempts_kwh))
        gpu_kwh.append(spent.gpu_earlier_attempts_kwh)
    gpu_kwh.append(spent.gpu_kwh)
    split = data.config.carbon.objective == "all" and spent.outer_gpu_kwh is not None
    return _energy_table("Energy of the study by phase", "Phase", parts, data, spent, gpu_kwh if split else None)


def by_state(data: StudyData, rec: Recommendation, spent: Footprint) -> Table:
    parts = [
        (f"{state.value} ({count_text(rec.trials_by_state[state], 'trial')})", energy_kwh)
        for state, energy_kwh in spent.by_state_kwh.items()
    ]
    parts.append(
        ("no trial: preparation and pauses", spent.by_phase_kwh[Phase.PREPARE] + spent.by_phase_kwh[Phase.GAP])
    )
    table = _energy_table("Energy of the study by what became of the trials", "State", parts, data, spent)
    note = "A trial counts with its earlier attempts that were interrupted." if spent.earlier_attempts_kwh else ""
    return table.model_copy(update={"note": note})


def by_component(data: StudyData, spent: Footprint) -> Table:
    """Training energy by component, how each is known, and its share of what the objective counts."""
    energies, known = spent.train_by_component_kwh, data.provenance.energy_source
    scale = energy_scale(energies.values())
    counted_kwh = sum(energy_kwh for component, energy_kwh in energies.items() if is_counted(data, component))
    rows = []
    for component in COMPONENTS:
        if component not in known and component not in energies:
            continue
        energy_kwh = energies.get(component)
        share = None
        if energy_kwh is not None and counted_kwh and is_counted(data, component):
            share = energy_kwh / counted_kwh
        rows.append(
            (
                word(component.upper()),
                word(known.get(component, MISSING) + ("" if is_counted(data, component) else ", not counted")),
                number(scale.text(energy_kwh), energy_kwh),
                number(percent_text(share), share, share=share),
            )
        )
    return Table(
        caption="Training energy of all trials by component",
        columns=columns("Component", "How known", scale.label("Energy"), "Share", numeric_from=2),
        rows=tuple(rows),
        note="Of each trial's last attempt: earlier ones that were interrupted are not in it."
        if spent.earlier_attempts_kwh
        else "",
    )


def readings(spent: Footprint) -> Table:
    """The GPUs' energy in the trials by both readings."""
    parts = [(PHASES[phase], gpu) for phase, gpu in spent.gpu_by_phase_kwh.items()]
    if parts:
        parts.append(("sum", summed(gpu for _, gpu in parts)))
    scale = energy_scale(value for _, gpu in parts for value in (gpu.counter, gpu.codecarbon))

    def row(label: str, gpu: GpuEnergy) -> tuple[Cell, ...]:
        total = label == "sum"
        difference, net_kwh = difference_of(gpu), gpu.net_of_idle
        idle_share = gpu.idle / gpu.counter if gpu.counter and net_kwh is not None else None
        return (
            word(label, strong=total),
            number(scale.text(gpu.counter), gpu.counter, strong=total),
            _uncertainty_cell(gpu),
            number(scale.text(gpu.codecarbon), gpu.codecarbon, strong=total),
            number(difference_text(difference), difference),
            number(percent_text(idle_share), idle_share),
            number(scale.text(net_kwh), net_kwh, strong=total),
        )

    counter, codecarbon, net = map(scale.label, ("Counters", "CodeCarbon", "Net of idle"))
    return Table(
        caption="GPU energy of the trials, read twice",
        columns=columns("Phase", counter, "±", codecarbon, "Difference", "Idle share", net),
        rows=tuple(row(label, gpu) for label, gpu in parts),
        note="The GPUs' own counters are the figure that is used; CodeCarbon read the same windows. Idle share: what "
        "the same GPUs use idle in as much time; net of idle: the rest. CodeCarbon doesn't measure twice within "
        f"{FRESH_AFTER_S * 1000:g} ms: the energy of an evaluation shorter than that is in its figure of the training "
        f"beside it. {UNCERTAINTY_NOTE}{_net_note(gpu for _, gpu in parts)}",
    )


def components(data: StudyData) -> Table:
    """Each trial's training window by component; without rows where there is nothing to split."""
    measured = [record for record in data.records if record.energy_kwh is not None]
    names = [name for name in COMPONENTS if any(_component_kwh(record, name) is not None for record in measured)]
    twice = any(record.gpu_energy_kwh is not None for record in measured)
    scale = energy_scale(_component_kwh(record, name) for record in measured for name in names)
    head = [Column(label="Trial", numeric=True)]
    for name in names:
        head.append(Column(label=scale.label(_component_label(data, name, twice)), numeric=True))
        if name == "gpu" and twice:
            head += columns("±", scale.label("GPU net of idle"), "CodeCarbon differs by", numeric_from=0)

    def row(record: TrialRecord) -> tuple[Cell, ...]:
        cells = [number(str(record.trial), record.trial)]
        for name in names:
            energy_kwh = _component_kwh(record, name)
            cells.append(number(scale.text(energy_kwh), energy_kwh))
            if name == "gpu" and twice:
                cells += _gpu_cells(record, scale)
        return tuple(cells)

    return Table(
        caption="Training energy of each trial by component",
        columns=tuple(head),
        rows=tuple(map(row, measured)) if twice or len(names) > 1 else (),
        note=f"{UNCERTAINTY_NOTE} CodeCarbon differs by: the largest over single windows of {COMPARED_FROM_S:g} s and "
        f"more and over the whole trial, in bold above {percent_text(LARGEST_DISAGREEMENT)}."
        f"{_net_note(training for record in measured if (training := _training(record)))}"
        if twice
        else "",
    )


def repricing(data: StudyData, rec: Recommendation, found: Repricing | None) -> Table | None:
    """The same joules, priced by the hour."""
    if found is None:
        return None
    starts, fixed_g = found.starts, data.provenance.intensity.g_co2e_per_kwh
    run, study = "the recommended run", "the whole study"
    parts: list[tuple[str, str, float | None, float | None]] = [
        (f"{run}, at the study's fixed intensity", MISSING, fixed_g, rec.emissions_kg_co2e),
    ]
    notes = [f"The trace has the hours from {_minute(found.first_hour)} to {_minute(found.last_hour)} (UTC)."]
    if starts is None:
        notes.append("The trace has nowhere as many hours in a row as the recommended run takes.")
    else:
        hours = count_text(starts.hours, "hour")
        parts += [
            (f"{run}, mean of {hours} to start at", MISSING, starts.mean_g_co2e_per_kwh, starts.mean_kg_co2e),
            *(
                (f"{run}, {which}", _minute(one.start), one.g_co2e_per_kwh, one.emissions_kg_co2e)
                for which, one in (("lowest", starts.lowest), ("highest", starts.highest))
            ),
        ]
        if starts.lowest.emissions_kg_co2e:
            factor = starts.highest.emissions_kg_co2e / starts.lowest.emissions_kg_co2e
            notes.append(f"The highest is {factor:.3g} times the lowest.")
        if starts.left_out:
            notes.append(
                f"Left out as a start: {count_text(starts.left_out, 'hour')} without a value, or from which the run "
                "would reach such an hour or go past the trace's end."
            )
    parts.append((f"{study}, at the study's fixed intensity", MISSING, fixed_g, rec.study_emissions_kg_co2e))
    own_kg = found.study_emissions_kg_co2e
    if own_kg is not None:
        parts.append((f"{study}, in the hours that it ran in", MISSING, found.study_g_co2e_per_kwh, own_kg))
    else:
        notes.append(f"The study in its own hours: not known, because {found.study_unknown}.")
    notes.append(
        "Power is taken as even over a run and over a session. The trace may count otherwise (direct or life-cycle "
        "emissions) than the fixed intensity does: compare its hours with each other."
    )
    scale = emissions_scale(emissions_kg for *_, emissions_kg in parts)
    return Table(
        caption=f"The same joules at other hours, by {found.source}",
        columns=columns("What", "Start (UTC)", "g CO2e/kWh", scale.label("Emissions"), numeric_from=2),
        rows=tuple(
            (word(what), word(start), number(intensity_text(rate_g), rate_g), number(scale.text(kg), kg))
            for what, start, rate_g, kg in parts
        ),
        note=" ".join(notes),
    )


def no_repricing(data: StudyData, rec: Recommendation, found: Repricing | None) -> str:
    """Which of the things that a price by the hour takes the study lacks; empty where it has one."""
    if found is not None:
        return ""
    missing = [] if data.trace is not None else ["hourly trace of the grid (carbon.trace)"]
    if not rec.met:
        missing.append("recommended run")
    elif data.trace is not None:
        missing.append("recommended run of known energy and duration")
    return f"By the hour nothing is said: this study has no {' and no '.join(missing)}."


def is_counted(data: StudyData, component: str) -> bool:
    """Whether the objective has it in."""
    return component == "gpu" or data.config.carbon.objective == "all"


def difference_of(gpu: GpuEnergy) -> float | None:
    """CodeCarbon's reading against the counters', relative."""
    return gpu.codecarbon / gpu.counter - 1 if gpu.counter else None


def _energy_table(
    caption: str,
    first: str,
    parts: Sequence[tuple[str, float]],
    data: StudyData,
    spent: Footprint,
    gpu_kwh: Sequence[float | None] | None = None,  # the GPUs' part of each row, the sum's last; None: no such column
) -> Table:
    def emissions_kg(energy_kwh: float) -> float:
        return units.emissions_kg_co2e(energy_kwh, data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue)

    energy, emissions = energy_scale([spent.energy_kwh]), emissions_scale([emissions_kg(spent.energy_kwh)])

    def row(label: str, energy_kwh: float, part_kwh: float | None, *, total: bool = False) -> tuple[Cell, ...]:
        share = energy_kwh / spent.energy_kwh if spent.energy_kwh else None
        gpus = () if gpu_kwh is None else (number(energy.text(part_kwh), part_kwh, strong=total),)
        return (
            word(label, strong=total),
            number(energy.text(energy_kwh), energy_kwh, strong=total),
            *gpus,
            number(emissions.text(emissions_kg(energy_kwh)), emissions_kg(energy_kwh), strong=total),
            number(percent_text(share), share, share=None if total else share),
        )

    *of_parts, of_sum = gpu_kwh or [None] * (len(parts) + 1)
    heads = (first, energy.label("Energy"), *([] if gpu_kwh is None else [energy.label("of it GPUs")]))
    return Table(
        caption=caption,
        columns=columns(*heads, emissions.label("Emissions"), "Share"),
        rows=(
            *(row(label, energy_kwh, part_kwh) for (label, energy_kwh), part_kwh in zip(parts, of_parts, strict=True)),
            row("sum", spent.energy_kwh, of_sum, total=True),
        ),
    )


def _component_kwh(record: TrialRecord, component: str) -> float | None:
    return getattr(record.energy_kwh, f"train_{component}") if record.energy_kwh else None


def _component_label(data: StudyData, component: str, twice: bool) -> str:
    how = (
        "by its counter"
        if component == "gpu" and twice
        else data.provenance.energy_source.get(component, "not known how")
    )
    return f"{component.upper()} {how}" + ("" if is_counted(data, component) else ", not counted")


def _gpu_cells(record: TrialRecord, scale: Scale) -> tuple[Cell, ...]:
    """What is known beside the counter's figure."""
    difference = record.gpu_disagreement
    marked = difference is not None and abs(difference) > LARGEST_DISAGREEMENT
    training = _training(record)
    net_kwh = training.net_of_idle if training else None
    return (
        _uncertainty_cell(training),
        number(scale.text(net_kwh), net_kwh),
        number(difference_text(difference), difference, strong=marked),
    )


def _training(record: TrialRecord) -> GpuEnergy | None:
    return record.gpu_energy_kwh[Phase.TRAIN] if record.gpu_energy_kwh is not None else None


def _net_note(shown: Iterable[GpuEnergy]) -> str:
    """Why a figure net of idle is missing; nothing where none is."""
    return f" {_NET_NOTE}" if any(gpu.net_of_idle is None for gpu in shown) else ""


def _minute(iso: str) -> str:
    """An instant without its seconds and its offset, which the column's head says."""
    return iso[:16].replace("T", " ")


def _uncertainty_cell(gpu: GpuEnergy | None) -> Cell:
    fraction = gpu.uncertainty / gpu.counter if gpu and gpu.counter else None
    return number(uncertainty_text(fraction), fraction)
