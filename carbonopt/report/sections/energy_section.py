"""The study's energy: where it went, how each part is known, and how sure it is.

Its caveats say what the figures can't tell.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from carbonopt.analysis.footprint import Footprint, known_sum, summed
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core import format as fmt
from carbonopt.core.trial import (
    COMPARED_FROM_S,
    COMPONENTS,
    FEWEST_READINGS,
    LARGEST_DISAGREEMENT,
    READINGS_APART_S,
    GpuEnergy,
    Phase,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.export.settings import has_own_step
from carbonopt.report.document import (
    MISSING,
    Caveat,
    Maker,
    Section,
    Table,
    num,
    scaled,
    table,
    word,
)
from carbonopt.report.figures.energy_figure import PHASES
from carbonopt.report.figures.energy_figure import energy as energy_figure
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData, counted_at_once

CLOSURE_TOLERANCE = 0.005
_COUNTED_ONCE = 1.01  # the times that CPU and RAM were counted, with room for rounding
# A training whose energy is uncertain by this share or more makes savings meaningless.
_UNKNOWN_FROM = 0.5
UNCERTAINTY_NOTE = (
    "± is one standard uncertainty, from how rarely the counters tick; their own accuracy is not"
    " in it."
)
NET_NOTE = (
    "Net of idle is not known (–) where the idle power measured before the study would make it"
    " negative: the GPUs were at work then, or the time is too short for the counters' ticks."
)


def section(study: StudyView) -> Section:
    figure = energy_figure(study.spent)
    tables = tuple(
        table_of(study)
        for table_of in (_by_phase, _by_state, _closure, _by_component, _readings, _components)
    )
    return Section(
        key="energy", title="Where the energy went", blocks=(figure, *tables) if figure else tables
    )


def _by_phase(study: StudyView) -> Table:
    """Show the energy by phase.

    Where not only the GPUs count, the table also has the GPUs' part of each phase, which their
    counters' reading of the whole checks.
    """
    spent, data = study.spent, study.data
    whole = ("sum", spent.energy_kwh, spent.gpu_kwh)
    scale = fmt.energy_scale([spent.energy_kwh])
    gpus = num(scale.label("GPUs' part"), 2, scale.text, strong=_is_sum)
    # a replay's records don't tell their GPUs' part, phase by phase
    split = data.config.carbon.objective == "all" and any(spent.gpu_parts_kwh.values())
    energy, *emissions_and_share = _energy_columns(study, whole)
    columns = [
        word("Phase", 0, strong=_is_sum),
        energy,
        gpus if split else None,
        *emissions_and_share,
    ]
    untold = (
        "The script does not tell its phases: its start-up and evaluations are in its training."
    )
    unrecorded = (
        "Recorded runs have the energy of training and evaluation alone; that of anything else"
        f" is not known ({MISSING})."
    )
    note = untold if counts_whole_processes(data) else ""
    note = unrecorded if data.provenance.is_replay else note
    if data.config.checkpoint is not None:
        note += (
            " The writing of checkpoints counts as start-up and end of trials; the table of stages"
            " has it alone."
        )
    rows = [*_phase_rows(study), whole]
    caption = "Energy of the study by phase"
    return table("by-phase", caption, rows, columns, paper="energy", note=note.strip())


def _by_state(study: StudyView) -> Table:
    """Show the energy by what became of the trials."""
    spent, counts = study.spent, study.recommendation.trials_by_state
    whole = ("sum", spent.energy_kwh)
    trials = {state: fmt.count_text(counts[state], "trial") for state in spent.by_state_kwh}
    states: list[tuple[str, float | None]] = [
        (f"{_became(state, study.data)} ({trials[state]})", kwh)
        for state, kwh in spent.by_state_kwh.items()
    ]
    between_kwh = known_sum([spent.by_phase_kwh[Phase.PREPARE], spent.by_phase_kwh[Phase.GAP]])
    if spent.probes_kwh:
        states.append(("no trial: probes", spent.probes_kwh))
    states.append(("no trial: preparation and pauses", between_kwh))
    columns = [word("State", 0, strong=_is_sum), *_energy_columns(study, whole)]
    earlier = "A trial counts with its earlier attempts that were interrupted."
    note = earlier if spent.earlier_attempts_kwh else ""
    caption = "Energy by what became of the trials"
    return table("by-state", caption, [*states, whole], columns, note=note)


def _energy_columns(study: StudyView, whole: tuple[Any, ...]) -> list[Maker]:
    """Return the columns of a row's energy, its emissions and its share of the whole."""
    scale = fmt.energy_scale([study.spent.energy_kwh])
    of_all = partial(_ratio, whole=study.spent.energy_kwh)
    return [
        num(scale.label("Energy"), 1, scale.text, strong=_is_sum),
        scaled(
            "Emissions",
            lambda row: None if row[1] is None else study.data.emissions_kg_co2e(row[1]),
            fmt.emissions_scale,
            [whole],
            strong=_is_sum,
        ),
        num(
            "Share",
            lambda row: of_all(row[1]),
            fmt.percent_text,
            share=lambda row: not _is_sum(row),
        ),
    ]


def _became(state: TrialState, data: StudyData) -> str:
    """Say what became of a state's trials; an interrupted one has failed only so far."""
    of_state = [record for record in data.records if record.state is state]
    interrupted = sum(record.stop_reason is StopReason.INTERRUPTED for record in of_state)
    if not interrupted:
        return state.value
    return "interrupted" if interrupted == len(of_state) else f"{state.value} or interrupted"


def _phase_rows(study: StudyView) -> list[tuple[str, float | None, float | None]]:
    """Return each phase with its energy in kWh and the GPUs' part of it."""
    spent = study.spent
    rows = [
        (PHASES[phase], kwh, spent.gpu_parts_kwh.get(phase))
        for phase, kwh in spent.by_phase_kwh.items()
    ]
    if spent.earlier_attempts_kwh:
        attempts = "lost work of attempts that were interrupted"
        rows.append((attempts, spent.earlier_attempts_kwh, spent.gpu_earlier_attempts_kwh))
    if spent.probes_kwh:
        probes = f"{fmt.count_text(len(study.data.probes), 'probe')} of a few steps"
        rows.append((probes, spent.probes_kwh, spent.gpu_probes_kwh))
    return rows


def _is_sum(row: tuple[Any, ...]) -> bool:
    return bool(row[0] == "sum")


def _ratio(part: float | None, whole: float) -> float:
    """Return a share of the whole; where that is 0 or the part is None, not a number.

    Tables show that as unknown.
    """
    return part / whole if whole and part is not None else math.nan


def _closure(study: StudyView) -> Table:
    """Compare the sum of the parts with one reading of the whole.

    The table has no rows where there is no such reading.
    """
    spent = study.spent
    checks = [("GPUs, by their counters", spent.outer_gpu_kwh, spent.gpu_closure)]
    if study.data.config.carbon.objective == "all" or spent.gpu_closure is None:
        checks.append(("all that counts", spent.outer_kwh, spent.closure))
    note = (
        "Checks the book-keeping, that no window was lost or counted twice, not the sensors: both"
        " sides read "
    )
    note += "the same counters and models."
    note += _of_other_work(study)
    if spent.slurm_kwh:
        checks.append(
            (
                "all that the nodes drew, by Slurm",
                spent.slurm_kwh,
                _parts_kwh(spent) / spent.slurm_kwh,
            )
        )
        note += " Slurm's reading is of its own, of all that the nodes draw, whoever uses it."
    return closure_table([] if study.data.provenance.is_replay else checks, note)


def _parts_kwh(spent: Footprint) -> float:
    return spent.energy_kwh + (spent.other_kwh or 0.0)


def _of_other_work(study: StudyView) -> str:
    """Say how much of the whole is other work, and what CodeCarbon has for the CPU."""
    spent = study.spent
    if study.data.config.carbon.objective != "all" or not spent.other_kwh:
        return ""
    energies = spent.other_kwh, spent.codecarbon_cpu_kwh
    scale = fmt.energy_scale(energies)
    other, codecarbon = (f"{scale.text(kwh)} {scale.unit}" for kwh in energies)
    text = (
        f" All that counts includes {other} of other work on the study's cores, which is not the"
        " study's."
    )
    if spent.codecarbon_cpu_kwh:
        text += f" CodeCarbon itself has {codecarbon} for the whole CPU, whoever used it."
    return text


def closure_table(checks: Sequence[tuple[str, float | None, float | None]], note: str) -> Table:
    """Return the table that compares sums of parts with readings of the whole.

    Args:
        checks: For each reading, its name, the reading in kWh, and the sum of the parts divided by
            it. Checks whose last value is None are left out.
        note: The text below the table.
    """
    known = [check for check in checks if check[2] is not None]
    columns = [
        word("Of", 0),
        scaled("One reading", 1, fmt.energy_scale, known),
        num("The parts add up to", 2, fmt.two_decimals_text),
    ]
    return table(
        "closure",
        "The sum of the parts against one reading of the whole",
        known,
        columns,
        note=note,
    )


def _by_component(study: StudyView) -> Table:
    """Show the training energy of all trials by component.

    Shares are of what the objective counts.
    """
    data, energies = study.data, study.spent.train_by_component_kwh
    known = data.provenance.energy_source
    rows = [component for component in COMPONENTS if component in known or component in energies]
    counted = {component: kwh for component, kwh in energies.items() if is_counted(data, component)}
    counted_kwh = sum(counted.values())
    columns = [
        word("Component", str.upper),
        word("How known", lambda row: known.get(row, MISSING) + _not_counted(data, row)),
        scaled("Energy", energies.get, fmt.energy_scale, rows),
        num(
            "Share",
            lambda row: _ratio(counted.get(row, math.nan), counted_kwh),
            fmt.percent_text,
            share=bool,
        ),
    ]
    note = (
        "Interrupted attempts are not in it, except up to a checkpoint that a trial went on from."
    )
    note = note if study.spent.earlier_attempts_kwh else ""
    return table(
        "by-component", "Training energy of all trials by component", rows, columns, note=note
    )


def _readings(study: StudyView) -> Table:
    by_phase = study.spent.gpu_by_phase_kwh
    whole = [("sum", summed(by_phase.values()))] if by_phase else []
    rows = [*((PHASES[phase], gpu) for phase, gpu in by_phase.items()), *whole]
    scale = fmt.energy_scale(kwh for _, gpu in rows for kwh in (gpu.counter, gpu.codecarbon))

    def idle_share(row: tuple[str, GpuEnergy]) -> float | None:
        return _ratio(row[1].idle, row[1].counter) if row[1].net_of_idle is not None else None

    columns = [
        word("Phase", 0, strong=_is_sum),
        num(scale.label("Counters"), lambda row: row[1].counter, scale.text, strong=_is_sum),
        num("±", lambda row: _uncertainty(row[1]), fmt.uncertainty_text),
        num(scale.label("CodeCarbon"), lambda row: row[1].codecarbon, scale.text, strong=_is_sum),
        num(
            "Difference",
            lambda row: _ratio(row[1].codecarbon, row[1].counter) - 1,
            fmt.difference_text,
        ),
        num("Idle share", idle_share, fmt.percent_text),
        num(scale.label("Net of idle"), lambda row: row[1].net_of_idle, scale.text, strong=_is_sum),
    ]
    note = (
        "The GPUs' own counters are the figure that is used; CodeCarbon read the same windows, but"
        " not twice within "
    )
    note += (
        f"{READINGS_APART_S * 1000:g} ms: a shorter evaluation is in its figure of the training"
        " beside it. Idle "
    )
    note += (
        "share: what the same GPUs use idle in as much time."
        f" {UNCERTAINTY_NOTE}{_net_note(by_phase.values())}"
    )
    return table("readings", "GPU energy of the trials, read twice", rows, columns, note=note)


def _uncertainty(gpu: GpuEnergy) -> float:
    return _ratio(gpu.uncertainty, gpu.counter)


def _components(study: StudyView) -> Table:
    """Show the training energy of each trial by component.

    The table has no rows where there is nothing to split.
    """
    data = study.data
    measured = [record for record in data.records if record.energy_kwh is not None]
    names = [
        name
        for name in COMPONENTS
        if any(_component_kwh(record, name) is not None for record in measured)
    ]
    trainings = [gpu for record in measured if (gpu := _training(record))]  # the windows read twice
    scale = fmt.energy_scale(_component_kwh(record, name) for record in measured for name in names)
    columns, note = [num("Trial", "trial")], ""
    for name in names:
        by_counter = name == "gpu" and trainings
        how = (
            "by its counter"
            if by_counter
            else data.provenance.energy_source.get(name, "not known how")
        )
        label = scale.label(f"{name.upper()} {how}{_not_counted(data, name)}")
        columns.append(num(label, partial(_component_kwh, component=name), scale.text))
        if by_counter:
            net_label = scale.label("GPU net of idle")
            columns += [
                num(
                    "±",
                    lambda row: (gpu := _training(row)) and _uncertainty(gpu),
                    fmt.uncertainty_text,
                ),
                num(net_label, lambda row: (gpu := _training(row)) and gpu.net_of_idle, scale.text),
                num(
                    "CodeCarbon differs by",
                    "gpu_disagreement",
                    fmt.difference_text,
                    strong=_disagrees,
                ),
            ]
    if trainings:
        note = (
            f"{UNCERTAINTY_NOTE} CodeCarbon differs by: the largest over single windows of"
            f" {COMPARED_FROM_S:g} s "
        )
        note += (
            "and more and over the whole trial, in bold above"
            f" {fmt.percent_text(LARGEST_DISAGREEMENT)}."
        )
        note += _net_note(trainings)
    rows = measured if trainings or len(names) > 1 else []
    caption = "Training energy of each trial by component"
    return table("components", caption, rows, columns, note=note, long=True, folded=True)


def _disagrees(record: TrialRecord) -> bool:
    return (
        record.gpu_disagreement is not None and abs(record.gpu_disagreement) > LARGEST_DISAGREEMENT
    )


def _component_kwh(record: TrialRecord, component: str) -> float | None:
    return getattr(record.energy_kwh, f"train_{component}") if record.energy_kwh else None


def _training(record: TrialRecord) -> GpuEnergy | None:
    return record.gpu_energy_kwh[Phase.TRAIN] if record.gpu_energy_kwh is not None else None


def _net_note(shown: Iterable[GpuEnergy]) -> str:
    return f" {NET_NOTE}" if any(gpu.net_of_idle is None for gpu in shown) else ""


def _not_counted(data: StudyData, component: str) -> str:
    return "" if is_counted(data, component) else ", not counted"


def is_counted(data: StudyData, component: str) -> bool:
    return component == "gpu" or data.config.carbon.objective == "all"


_UNREAD_S = 5.0  # what a study's end by any other cause leaves unread is less
_ONE_COMMAND = "The workers of one command (launch.workers, launch.gpus_per_trial) count shares."
# What counts a machine's RAM and idle CPU once; launch.workers are jobs of their own on Slurm.
_ADVICE_ON_SHARES = {
    "slurm": (
        "Jobs that share a node each count all of it: use launch.gpus_per_trial in one job, or"
        " launch.exclusive."
    )
}


def caveats(study: StudyView) -> Iterator[Caveat]:
    data, spent, rec = study.data, study.spent, study.recommendation
    if data.provenance.is_replay:
        yield study.caveat("replay", quality=study.quality.name)
    else:
        yield from _of_the_meters(study)
    counted = counted_at_once(data.sessions) if is_counted(data, "cpu") else {}
    for host, times in counted.items():
        if times > _COUNTED_ONCE:
            advice = _ADVICE_ON_SHARES.get(data.config.launch.kind, _ONE_COMMAND)
            yield study.caveat("counted_twice", host=host, times=times, advice=advice)
    unread_s = math.fsum(session.unread_s for session in data.sessions)
    if unread_s > _UNREAD_S:
        yield study.caveat("machine_lost", seconds=unread_s)
    if spent.unmeasured_trials:
        yield study.caveat("unmeasured_trials", trials=spent.unmeasured_trials)
    for key, fraction in (("closure_gpus", spent.gpu_closure), ("closure_whole", spent.closure)):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            yield study.caveat(key, fraction=fraction)
    if rec.params is not None and has_own_step(data.config, rec.params):
        yield study.caveat("own_optimizer_step")
    yield from _short_trainings(study)
    pue = data.config.carbon.pue
    if data.provenance.is_replay:
        yield study.caveat("fixed_intensity_recorded", pue=pue)
    elif counts_whole_processes(data):
        yield study.caveat("whole_processes", pue=pue)
    # Only a complete trial shows whether a script reports its phases.
    elif not data.config.is_script or any(
        record.state is TrialState.COMPLETE for record in data.records
    ):
        yield study.caveat("fixed_intensity", pue=pue)


def _short_trainings(study: StudyView) -> Iterator[Caveat]:
    """Yield a caveat where the shortest training behind the answer is short against the readings.

    At each end, a window may lack what the CPU used since the last reading, or include what it used
    until the window was read.
    """
    data, rec = study.data, study.recommendation
    chosen = [
        rec.trial,
        rec.baseline.trial if rec.baseline else None,
        rec.closest.trial if rec.closest else None,
    ]
    records = [
        record
        for trial in chosen
        if (record := study.record(trial)) is not None and record.duration_s
    ]
    shortest = min(records, key=lambda record: _training_s(record), default=None)
    if (
        data.provenance.is_replay
        or not is_counted(data, "cpu")
        or shortest is None
        or _training_s(shortest) >= FEWEST_READINGS * READINGS_APART_S
    ):
        return
    took_s = _training_s(shortest)
    share = round(min(1.0, 2 * READINGS_APART_S / took_s), 2) if took_s else 1.0
    numbers = {
        "trial": shortest.trial,
        "duration": took_s,
        "apart": READINGS_APART_S,
        "share": share,
    }
    name = "too_short_training" if share >= _UNKNOWN_FROM else "short_training"
    yield study.caveat(name, components="CPU", **numbers)


def _training_s(record: TrialRecord) -> float:
    return record.duration_s.train if record.duration_s else 0.0


def how_known(study: StudyView) -> Iterator[Caveat]:
    """Yield the caveats on which part of the energy is measured and which is not."""
    known = study.data.provenance.energy_source
    modelled = " and ".join(name.upper() for name, how in known.items() if how == "modelled")
    if study.data.config.carbon.objective == "gpu":
        yield study.caveat("gpus_only")
    elif modelled:
        yield study.caveat(
            "modelled_energy" if "gpu" in known else "nothing_measured", components=modelled
        )
    elif "gpu" not in known:
        yield study.caveat("no_gpu")


def _of_the_meters(study: StudyView) -> Iterator[Caveat]:
    yield from how_known(study)
    if differing := list(filter(_disagrees, study.data.records)):
        worst = max(differing, key=lambda record: abs(record.gpu_disagreement or 0.0))
        difference = worst.gpu_disagreement
        yield study.caveat(
            "readings_disagree", count=len(differing), trial=worst.trial, difference=difference
        )
    if study.spent.gpu_by_phase_kwh:
        yield study.caveat("counter_accuracy")
    yield study.caveat("meter_setup")
