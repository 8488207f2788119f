"""Where the study's energy went, how each part is known, and how sure it is."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from carbonopt.analysis.footprint import summed
from carbonopt.core import format as fmt
from carbonopt.core import units
from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPARED_FROM_S, COMPONENTS, LARGEST_DISAGREEMENT, GpuEnergy, Phase, TrialRecord
from carbonopt.energy.codecarbon import FRESH_AFTER_S
from carbonopt.report.document import MISSING, Block, Maker, Section, Table, num, table, word
from carbonopt.report.figures.energy import energy as energy_figure
from carbonopt.report.study_view import StudyView

PHASES = {
    Phase.PREPARE: "preparation, at each start of carbonopt run",
    Phase.GAP: "between trials",
    Phase.SETUP: "start-up of trials",
    Phase.TRAIN: "training",
    Phase.EVAL: "evaluation",
}
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


def section(study: StudyView) -> Section:
    figure = energy_figure(study.spent)
    tables = (_by_phase(study), _by_state(study), _closure(study), _by_component(study), _readings(study))
    blocks: list[Block] = [figure] if figure else []
    blocks += [*tables, _components(study)]
    return Section(key="energy", title="Where the energy went", blocks=tuple(blocks))


def _by_phase(study: StudyView) -> Table:
    """With the GPUs' part of each, which their counters' reading of the whole checks, where not only the GPUs count."""
    spent = study.spent
    parts = [_Part(PHASES[phase], kwh, spent.gpu_parts_kwh.get(phase)) for phase, kwh in spent.by_phase_kwh.items()]
    if spent.earlier_attempts_kwh:
        what = "attempts that were interrupted and run again"
        parts.append(_Part(what, spent.earlier_attempts_kwh, spent.gpu_earlier_attempts_kwh))
    split = study.data.config.carbon.objective == "all" and spent.outer_gpu_kwh is not None
    return _energy_table(study, "by-phase", "Energy of the study by phase", "Phase", parts, split=split, paper="energy")


def _by_state(study: StudyView) -> Table:
    spent, counts = study.spent, study.recommendation.trials_by_state
    parts = [
        _Part(f"{state.value} ({fmt.count_text(counts[state], 'trial')})", kwh)
        for state, kwh in spent.by_state_kwh.items()
    ]
    between_kwh = spent.by_phase_kwh[Phase.PREPARE] + spent.by_phase_kwh[Phase.GAP]
    parts.append(_Part("no trial: preparation and pauses", between_kwh))
    note = "A trial counts with its earlier attempts that were interrupted." if spent.earlier_attempts_kwh else ""
    return _energy_table(study, "by-state", "Energy by what became of the trials", "State", parts, note=note)


def _energy_table(
    study: StudyView,
    key: str,
    caption: str,
    first: str,
    parts: Sequence[_Part],
    *,
    split: bool = False,
    note: str = "",
    paper: str = "",
) -> Table:
    """`split`: with a column of the GPUs' part."""
    spent, intensity = study.spent, study.data.provenance.intensity.g_co2e_per_kwh

    def kg(row: _Part) -> float:
        return units.emissions_kg_co2e(row.energy_kwh, intensity, study.data.config.carbon.pue)

    def total(row: _Part) -> bool:
        return row.total

    whole = _Part("sum", spent.energy_kwh, spent.gpu_kwh, total=True)
    energy, emissions = fmt.energy_scale([spent.energy_kwh]), fmt.emissions_scale([kg(whole)])
    return table(
        key,
        caption,
        [*parts, whole],
        [
            word(first, lambda row: row.what, strong=total),
            num(energy.label("Energy"), lambda row: row.energy_kwh, energy.text, strong=total),
            num(energy.label("of it GPUs"), lambda row: row.gpu_kwh, energy.text, strong=total) if split else None,
            num(emissions.label("Emissions"), kg, emissions.text, strong=total),
            num(
                "Share",
                lambda row: row.energy_kwh / spent.energy_kwh if spent.energy_kwh else None,
                fmt.percent_text,
                share=lambda row: not row.total,
            ),
        ],
        note=note,
        paper=paper,
    )


def _closure(study: StudyView) -> Table:
    """The sums of the parts against one reading of the whole; without rows where there is none."""
    spent = study.spent
    checks = [("GPUs, by their counters", spent.outer_gpu_kwh, spent.gpu_closure)]
    if study.data.config.carbon.objective == "all" or spent.gpu_closure is None:
        checks.append(("all that counts", spent.outer_kwh, spent.closure))
    known = [check for check in checks if check[2] is not None and not study.data.provenance.is_replay]
    scale = fmt.energy_scale(kwh for _, kwh, _ in known)
    return table(
        "closure",
        "The sum of the parts against one reading of the whole",
        known,
        [
            word("Of", lambda row: row[0]),
            num(scale.label("One reading"), lambda row: row[1], scale.text),
            num("The parts add up to", lambda row: row[2], fmt.two_decimals_text),
        ],
        note="Checks the book-keeping, that no window was lost or counted twice, not the sensors: both sides read "
        "the same counters and models.",
    )


def _by_component(study: StudyView) -> Table:
    """Training energy by component, how each is known, and its share of what the objective counts."""
    data, energies = study.data, study.spent.train_by_component_kwh
    known = data.provenance.energy_source
    scale = fmt.energy_scale(energies.values())
    counted_kwh = sum(kwh for component, kwh in energies.items() if is_counted(data, component))

    def share(component: str) -> float | None:
        counts = component in energies and counted_kwh and is_counted(data, component)
        return energies[component] / counted_kwh if counts else None

    note = "Of each trial's last attempt: earlier ones that were interrupted are not in it."
    return table(
        "by-component",
        "Training energy of all trials by component",
        [component for component in COMPONENTS if component in known or component in energies],
        [
            word("Component", str.upper),
            word("How known", lambda row: known.get(row, MISSING) + ("" if is_counted(data, row) else ", not counted")),
            num(scale.label("Energy"), energies.get, scale.text),
            num("Share", share, fmt.percent_text, share=lambda row: True),
        ],
        note=note if study.spent.earlier_attempts_kwh else "",
    )


def _readings(study: StudyView) -> Table:
    """The GPUs' energy in the trials by both readings."""
    by_phase = study.spent.gpu_by_phase_kwh
    parts = [(PHASES[phase], gpu, False) for phase, gpu in by_phase.items()]
    if parts:
        parts.append(("sum", summed(by_phase.values()), True))
    scale = fmt.energy_scale(value for _, gpu, _ in parts for value in (gpu.counter, gpu.codecarbon))

    def total(row: tuple[str, GpuEnergy, bool]) -> bool:
        return row[2]

    def idle_share(row: tuple[str, GpuEnergy, bool]) -> float | None:
        gpu = row[1]
        return gpu.idle / gpu.counter if gpu.counter and gpu.net_of_idle is not None else None

    return table(
        "readings",
        "GPU energy of the trials, read twice",
        parts,
        [
            word("Phase", lambda row: row[0], strong=total),
            num(scale.label("Counters"), lambda row: row[1].counter, scale.text, strong=total),
            _uncertainty(lambda row: row[1]),
            num(scale.label("CodeCarbon"), lambda row: row[1].codecarbon, scale.text, strong=total),
            num("Difference", lambda row: difference_of(row[1]), fmt.difference_text),
            num("Idle share", idle_share, fmt.percent_text),
            num(scale.label("Net of idle"), lambda row: row[1].net_of_idle, scale.text, strong=total),
        ],
        note="The GPUs' own counters are the figure that is used; CodeCarbon read the same windows, but not twice "
        f"within {FRESH_AFTER_S * 1000:g} ms: a shorter evaluation is in its figure of the training beside it. Idle "
        f"share: what the same GPUs use idle in as much time. {UNCERTAINTY_NOTE}{_net_note(by_phase.values())}",
    )


def _uncertainty(gpu_of: Callable[[Any], GpuEnergy | None]) -> Maker:
    def fraction(row: Any) -> float | None:
        gpu = gpu_of(row)
        return gpu.uncertainty / gpu.counter if gpu and gpu.counter else None

    return num("±", fraction, fmt.uncertainty_text)


def _components(study: StudyView) -> Table:
    """Each trial's training window by component; without rows where there is nothing to split."""
    data = study.data
    measured = [record for record in data.records if record.energy_kwh is not None]
    names = [name for name in COMPONENTS if any(_component_kwh(record, name) is not None for record in measured)]
    twice = any(record.gpu_energy_kwh is not None for record in measured)
    scale = fmt.energy_scale(_component_kwh(record, name) for record in measured for name in names)
    makers = [num("Trial", lambda row: row.trial)]
    for name in names:
        label = scale.label(_component_label(data, name, twice))
        makers.append(num(label, partial(_component_kwh, component=name), scale.text))
        if name == "gpu" and twice:
            makers += _beside_the_counter(scale)
    trainings = [training for record in measured if (training := _training(record))]
    return table(
        "components",
        "Training energy of each trial by component",
        measured if twice or len(names) > 1 else (),
        makers,
        note=f"{UNCERTAINTY_NOTE} CodeCarbon differs by: the largest over single windows of {COMPARED_FROM_S:g} s and "
        f"more and over the whole trial, in bold above {fmt.percent_text(LARGEST_DISAGREEMENT)}.{_net_note(trainings)}"
        if twice
        else "",
        long=True,
        folded=True,
    )


def _beside_the_counter(scale: fmt.Scale) -> list[Maker]:
    def net_kwh(row: TrialRecord) -> float | None:
        training = _training(row)
        return training.net_of_idle if training else None

    return [
        _uncertainty(_training),
        num(scale.label("GPU net of idle"), net_kwh, scale.text),
        num("CodeCarbon differs by", lambda row: row.gpu_disagreement, fmt.difference_text, strong=_disagrees),
    ]


def _disagrees(record: TrialRecord) -> bool:
    return record.gpu_disagreement is not None and abs(record.gpu_disagreement) > LARGEST_DISAGREEMENT


def _component_kwh(record: TrialRecord, component: str) -> float | None:
    return getattr(record.energy_kwh, f"train_{component}") if record.energy_kwh else None


def _component_label(data: StudyData, component: str, twice: bool) -> str:
    how = (
        "by its counter"
        if component == "gpu" and twice
        else data.provenance.energy_source.get(component, "not known how")
    )
    return f"{component.upper()} {how}" + ("" if is_counted(data, component) else ", not counted")


def _training(record: TrialRecord) -> GpuEnergy | None:
    return record.gpu_energy_kwh[Phase.TRAIN] if record.gpu_energy_kwh is not None else None


def _net_note(shown: Iterable[GpuEnergy]) -> str:
    """Why a figure net of idle is missing; nothing where none is."""
    return f" {NET_NOTE}" if any(gpu.net_of_idle is None for gpu in shown) else ""


def is_counted(data: StudyData, component: str) -> bool:
    """Whether the objective has it in."""
    return component == "gpu" or data.config.carbon.objective == "all"


def difference_of(gpu: GpuEnergy) -> float | None:
    """CodeCarbon's reading against the counters', relative."""
    return gpu.codecarbon / gpu.counter - 1 if gpu.counter else None
