"""Where the study's energy went, how each part is known, how sure it is, and what the figures can't tell."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from carbonopt.analysis.footprint import summed
from carbonopt.core import format as fmt
from carbonopt.core import units
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPARED_FROM_S, COMPONENTS, LARGEST_DISAGREEMENT, GpuEnergy, Phase, TrialRecord
from carbonopt.energy.codecarbon import FRESH_AFTER_S
from carbonopt.export.settings import has_own_step
from carbonopt.report.document import MISSING, Block, Caveat, Maker, Section, Table, num, table, word
from carbonopt.report.figures.energy import PHASES
from carbonopt.report.figures.energy import energy as energy_figure
from carbonopt.report.study_view import StudyView

CLOSURE_TOLERANCE = 0.005
UNCERTAINTY_NOTE = "± is one standard uncertainty, from how rarely the counters tick; their own accuracy is not in it."
NET_NOTE = (
    "Net of idle is not known (–) where the idle power measured before the study would make it negative: the GPUs "
    "were at work then, or the time is too short for the counters' ticks."
)


class _Part(NamedTuple):
    what: str
    energy_kwh: float
    gpu_kwh: float | None = None
    total: bool = False


class _Reading(NamedTuple):
    phase: str
    gpu: GpuEnergy
    total: bool = False


def section(study: StudyView) -> Section:
    figure = energy_figure(study.spent)
    tables = (_by_phase, _by_state, _closure, _by_component, _readings, _components)
    blocks: list[Block] = [figure] if figure else []
    blocks += [made(study) for made in tables]
    return Section(key="energy", title="Where the energy went", blocks=tuple(blocks))


def _by_phase(study: StudyView) -> Table:
    """With the GPUs' part of each, which their counters' reading of the whole checks, where not only the GPUs count."""
    spent = study.spent
    parts = [_Part(PHASES[phase], kwh, spent.gpu_parts_kwh.get(phase)) for phase, kwh in spent.by_phase_kwh.items()]
    if spent.earlier_attempts_kwh:
        what = "attempts that were interrupted and run again"
        parts.append(_Part(what, spent.earlier_attempts_kwh, spent.gpu_earlier_attempts_kwh))
    split = study.data.config.carbon.objective == "all" and spent.outer_gpu_kwh is not None
    columns = _energy_columns(study, "Phase", split=split)
    return table("by-phase", "Energy of the study by phase", [*parts, _whole(study)], columns, paper="energy")


def _by_state(study: StudyView) -> Table:
    spent, counts = study.spent, study.recommendation.trials_by_state
    parts = [
        _Part(f"{state.value} ({fmt.count_text(counts[state], 'trial')})", kwh)
        for state, kwh in spent.by_state_kwh.items()
    ]
    between_kwh = spent.by_phase_kwh[Phase.PREPARE] + spent.by_phase_kwh[Phase.GAP]
    parts += [_Part("no trial: preparation and pauses", between_kwh), _whole(study)]
    note = "A trial counts with its earlier attempts that were interrupted." if spent.earlier_attempts_kwh else ""
    columns = _energy_columns(study, "State", split=False)
    return table("by-state", "Energy by what became of the trials", parts, columns, note=note)


def _whole(study: StudyView) -> _Part:
    return _Part("sum", study.spent.energy_kwh, study.spent.gpu_kwh, total=True)


def _energy_columns(study: StudyView, first: str, *, split: bool) -> list[Maker | None]:
    spent, intensity = study.spent, study.data.provenance.intensity.g_co2e_per_kwh

    def kg(row: _Part) -> float:
        return units.emissions_kg_co2e(row.energy_kwh, intensity, study.data.config.carbon.pue)

    def share(row: _Part) -> float | None:
        return row.energy_kwh / spent.energy_kwh if spent.energy_kwh else None

    energy, emissions = fmt.energy_scale([spent.energy_kwh]), fmt.emissions_scale([kg(_whole(study))])
    return [
        word(first, "what", strong="total"),
        num(energy.label("Energy"), "energy_kwh", energy.text, strong="total"),
        num(energy.label("of it GPUs"), "gpu_kwh", energy.text, strong="total") if split else None,
        num(emissions.label("Emissions"), kg, emissions.text, strong="total"),
        num("Share", share, fmt.percent_text, share=lambda row: not row.total),
    ]


def _closure(study: StudyView) -> Table:
    """Without rows where there is no reading of the whole."""
    spent = study.spent
    checks = [("GPUs, by their counters", spent.outer_gpu_kwh, spent.gpu_closure)]
    if study.data.config.carbon.objective == "all" or spent.gpu_closure is None:
        checks.append(("all that counts", spent.outer_kwh, spent.closure))
    known = [check for check in checks if check[2] is not None and not study.data.provenance.is_replay]
    scale = fmt.energy_scale(kwh for _, kwh, _ in known)
    columns = [
        word("Of", lambda row: row[0]),
        num(scale.label("One reading"), lambda row: row[1], scale.text),
        num("The parts add up to", lambda row: row[2], fmt.two_decimals_text),
    ]
    note = "Checks the book-keeping, that no window was lost or counted twice, not the sensors: both sides read "
    note += "the same counters and models."
    return table("closure", "The sum of the parts against one reading of the whole", known, columns, note=note)


def _by_component(study: StudyView) -> Table:
    """A share is of what the objective counts."""
    data, energies = study.data, study.spent.train_by_component_kwh
    known = data.provenance.energy_source
    scale = fmt.energy_scale(energies.values())
    counted_kwh = sum(kwh for component, kwh in energies.items() if is_counted(data, component))

    def share(component: str) -> float | None:
        counts = component in energies and counted_kwh and is_counted(data, component)
        return energies[component] / counted_kwh if counts else None

    columns = [
        word("Component", str.upper),
        word("How known", lambda row: known.get(row, MISSING) + _not_counted(data, row)),
        num(scale.label("Energy"), energies.get, scale.text),
        num("Share", share, fmt.percent_text, share=lambda row: True),
    ]
    rows = [component for component in COMPONENTS if component in known or component in energies]
    note = "Of each trial's last attempt: earlier ones that were interrupted are not in it."
    caption = "Training energy of all trials by component"
    return table("by-component", caption, rows, columns, note=note if study.spent.earlier_attempts_kwh else "")


def _readings(study: StudyView) -> Table:
    by_phase = study.spent.gpu_by_phase_kwh
    rows = [_Reading(PHASES[phase], gpu) for phase, gpu in by_phase.items()]
    if rows:
        rows.append(_Reading("sum", summed(by_phase.values()), total=True))
    scale = fmt.energy_scale(kwh for row in rows for kwh in (row.gpu.counter, row.gpu.codecarbon))

    def difference(row: _Reading) -> float | None:
        return row.gpu.codecarbon / row.gpu.counter - 1 if row.gpu.counter else None

    def idle_share(row: _Reading) -> float | None:
        return row.gpu.idle / row.gpu.counter if row.gpu.counter and row.gpu.net_of_idle is not None else None

    columns = [
        word("Phase", "phase", strong="total"),
        num(scale.label("Counters"), "gpu.counter", scale.text, strong="total"),
        num("±", lambda row: _uncertainty(row.gpu), fmt.uncertainty_text),
        num(scale.label("CodeCarbon"), "gpu.codecarbon", scale.text, strong="total"),
        num("Difference", difference, fmt.difference_text),
        num("Idle share", idle_share, fmt.percent_text),
        num(scale.label("Net of idle"), "gpu.net_of_idle", scale.text, strong="total"),
    ]
    note = "The GPUs' own counters are the figure that is used; CodeCarbon read the same windows, but not twice "
    note += (
        f"within {FRESH_AFTER_S * 1000:g} ms: a shorter evaluation is in its figure of the training beside it. Idle "
    )
    note += f"share: what the same GPUs use idle in as much time. {UNCERTAINTY_NOTE}{_net_note(by_phase.values())}"
    return table("readings", "GPU energy of the trials, read twice", rows, columns, note=note)


def _uncertainty(gpu: GpuEnergy | None) -> float | None:
    return gpu.uncertainty / gpu.counter if gpu and gpu.counter else None


def _components(study: StudyView) -> Table:
    """Without rows where there is nothing to split."""
    data = study.data
    measured = [record for record in data.records if record.energy_kwh is not None]
    names = [name for name in COMPONENTS if any(_component_kwh(record, name) is not None for record in measured)]
    twice = any(record.gpu_energy_kwh is not None for record in measured)
    scale = fmt.energy_scale(_component_kwh(record, name) for record in measured for name in names)

    def net_kwh(row: TrialRecord) -> float | None:
        return gpu.net_of_idle if (gpu := _training(row)) else None

    columns = [num("Trial", "trial")]
    for name in names:
        by_counter = name == "gpu" and twice
        how = "by its counter" if by_counter else data.provenance.energy_source.get(name, "not known how")
        label = scale.label(f"{name.upper()} {how}{_not_counted(data, name)}")
        columns.append(num(label, partial(_component_kwh, component=name), scale.text))
        if by_counter:
            columns += [
                num("±", lambda row: _uncertainty(_training(row)), fmt.uncertainty_text),
                num(scale.label("GPU net of idle"), net_kwh, scale.text),
                num("CodeCarbon differs by", "gpu_disagreement", fmt.difference_text, strong=_disagrees),
            ]
    note = ""
    if twice:
        note = f"{UNCERTAINTY_NOTE} CodeCarbon differs by: the largest over single windows of {COMPARED_FROM_S:g} s "
        note += f"and more and over the whole trial, in bold above {fmt.percent_text(LARGEST_DISAGREEMENT)}."
        note += _net_note(gpu for record in measured if (gpu := _training(record)))
    rows = measured if twice or len(names) > 1 else []
    caption = "Training energy of each trial by component"
    return table("components", caption, rows, columns, note=note, long=True, folded=True)


def _disagrees(record: TrialRecord) -> bool:
    return record.gpu_disagreement is not None and abs(record.gpu_disagreement) > LARGEST_DISAGREEMENT


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


def caveats(study: StudyView) -> Iterator[Caveat]:
    data, spent, rec = study.data, study.spent, study.recommendation
    if data.provenance.is_replay:
        yield study.caveat("replay", quality=study.quality.name)
    else:
        yield from _of_the_meters(study)
    if spent.unmeasured_trials:
        yield study.caveat("unmeasured_trials", trials=spent.unmeasured_trials)
    for key, fraction in (("closure_gpus", spent.gpu_closure), ("closure_whole", spent.closure)):
        if fraction is not None and abs(fraction - 1) > CLOSURE_TOLERANCE:
            yield study.caveat(key, fraction=fraction)
    if rec.params is not None and has_own_step(data.config, rec.params):
        yield study.caveat("own_optimizer_step")
    yield study.caveat("fixed_intensity", pue=data.config.carbon.pue)


def _of_the_meters(study: StudyView) -> Iterator[Caveat]:
    data, known = study.data, study.data.provenance.energy_source
    modelled = " and ".join(name.upper() for name, how in known.items() if how == "modelled")
    if data.config.carbon.objective == "gpu":
        yield study.caveat("gpus_only")
    elif modelled:
        yield study.caveat("modelled_energy" if "gpu" in known else "nothing_measured", components=modelled)
    elif "gpu" not in known:
        yield study.caveat("no_gpu")
    if differing := list(filter(_disagrees, data.records)):
        worst = max(differing, key=lambda record: abs(record.gpu_disagreement or 0.0))
        numbers = {"trial": worst.trial, "difference": worst.gpu_disagreement}
        yield study.caveat("readings_disagree", count=len(differing), **numbers)
    if study.spent.gpu_by_phase_kwh:
        yield study.caveat("counter_accuracy")
    yield study.caveat("meter_setup")
