"""What the whole study spent: pruned, failed and interrupted trials, preparation and gaps included."""

import math
from collections.abc import Collection, Iterable

from carbonopt.core.study import StudyData
from carbonopt.core.trial import COMPONENTS, TRIAL_PHASES, GpuEnergy, Phase, TrialState
from carbonopt.core.values import Frozen


class Footprint(Frozen):
    """A study's own energy in kWh as the objective counts it, without PUE; its emissions, PUE in. `by_phase_kwh`,
    `earlier_attempts_kwh` and `probes_kwh` add up to `energy_kwh`; so do `by_state_kwh` (earlier attempts in it),
    probes, prepare and gap."""

    energy_kwh: float
    emissions_kg_co2e: float
    by_phase_kwh: dict[Phase, float]
    earlier_attempts_kwh: float  # of trials that were interrupted and run again; not split by phase
    probes_kwh: float  # a few steps alone, or compiling; not split by phase
    by_state_kwh: dict[TrialState, float]  # only states that occur
    repeats_kwh: float  # of energy_kwh: repeats with other seeds, whose purpose is to confirm; 0 where none ran
    repeats_emissions_kg_co2e: float
    train_by_component_kwh: dict[str, float]  # gpu, cpu, ram in the training windows; absent: in no trial's figures
    unmeasured_trials: tuple[int, ...]  # ended or running without an energy figure; they count as nothing above
    outer_kwh: float | None  # by one reading at each session's begin and end; None: at least one has no such figure
    closure: float | None  # energy_kwh ÷ outer_kwh: 1.0 when nothing was lost or counted twice
    gpu_parts_kwh: dict[Phase, float | None]  # of by_phase_kwh what the GPUs' counters say; None: not known
    gpu_earlier_attempts_kwh: float | None  # of earlier_attempts_kwh likewise
    gpu_probes_kwh: float | None  # of probes_kwh likewise
    gpu_kwh: float | None  # the sum of these; None: one of them is not known
    outer_gpu_kwh: float | None  # as outer_kwh, of the GPUs' counters
    gpu_closure: float | None  # gpu_kwh ÷ outer_gpu_kwh
    slurm_kwh: float | None  # as outer_kwh, of all that the nodes drew, by Slurm's own reading
    gpu_by_phase_kwh: dict[Phase, GpuEnergy]  # of the trials that have both readings; empty: none has


def footprint(data: StudyData) -> Footprint:
    """Adds up the study's energy; emissions at the reference intensity and PUE of the study."""
    records, sessions = data.records, data.sessions
    measured = [(energy, record.gpu_energy_kwh) for record in records if (energy := record.energy_kwh) is not None]
    by_gpu = [record.gpu_energy_kwh for record in records if record.gpu_energy_kwh is not None]
    by_state = {state: [record.spent_kwh for record in records if record.state is state] for state in TrialState}
    by_component = {part: [getattr(energy, f"train_{part}") for energy, _ in measured] for part in COMPONENTS}
    energy_kwh = data.spent_kwh()
    repeats_kwh = math.fsum(record.spent_kwh for record in records if record.repeat_of is not None)
    outer_kwh = known_sum((session.outer_kwh for session in sessions), of_none=None)
    outer_gpu_kwh = known_sum((session.outer_gpu_kwh for session in sessions), of_none=None)
    gpu_parts = {
        Phase.PREPARE: known_sum((session.prepare_gpu_kwh for session in sessions), of_none=None),
        Phase.GAP: known_sum((session.gap_gpu_kwh for session in sessions), of_none=None),
        **{phase: known_sum(gpu[phase].counter if gpu else None for _, gpu in measured) for phase in TRIAL_PHASES},
    }
    gpu_earlier_kwh = known_sum(
        record.earlier_attempts_gpu_kwh for record in records if record.earlier_attempts_energy_kwh
    )
    gpu_probes_kwh = known_sum(probe.spent_gpu_kwh for probe in data.probes)
    gpu_kwh = known_sum([*gpu_parts.values(), gpu_earlier_kwh, gpu_probes_kwh])
    return Footprint(
        energy_kwh=energy_kwh,
        emissions_kg_co2e=data.emissions_kg_co2e(energy_kwh),
        repeats_kwh=repeats_kwh,
        repeats_emissions_kg_co2e=data.emissions_kg_co2e(repeats_kwh),
        by_phase_kwh={
            Phase.PREPARE: sum(session.prepare_kwh for session in sessions),
            Phase.GAP: sum(session.gap_kwh for session in sessions),
            **{phase: sum(getattr(energy, phase) for energy, _ in measured) for phase in TRIAL_PHASES},
        },
        earlier_attempts_kwh=sum(record.earlier_attempts_energy_kwh for record in records),
        probes_kwh=math.fsum(probe.spent_kwh for probe in data.probes),
        by_state_kwh={state: sum(spent_kwh) for state, spent_kwh in by_state.items() if spent_kwh},
        train_by_component_kwh={
            part: sum(known)
            for part, train_kwh in by_component.items()
            if (known := [kwh for kwh in train_kwh if kwh is not None])
        },
        unmeasured_trials=tuple(record.trial for record in records if record.energy_kwh is None),
        outer_kwh=outer_kwh,
        closure=energy_kwh / outer_kwh if outer_kwh else None,
        gpu_parts_kwh=gpu_parts,
        gpu_earlier_attempts_kwh=gpu_earlier_kwh,
        gpu_probes_kwh=gpu_probes_kwh,
        gpu_kwh=gpu_kwh,
        outer_gpu_kwh=outer_gpu_kwh,
        slurm_kwh=known_sum((session.slurm_kwh for session in sessions), of_none=None),
        gpu_closure=gpu_kwh / outer_gpu_kwh if gpu_kwh is not None and outer_gpu_kwh else None,
        gpu_by_phase_kwh={phase: summed([gpu[phase] for gpu in by_gpu]) for phase in TRIAL_PHASES if by_gpu},
    )


def summed(parts: Collection[GpuEnergy]) -> GpuEnergy:
    """Of several windows. Where one window begins as another ends, the tick at that edge cancels out, and the
    uncertainty is an upper bound."""
    return GpuEnergy(
        counter=math.fsum(part.counter for part in parts),
        codecarbon=math.fsum(part.codecarbon for part in parts),
        idle=math.fsum(part.idle for part in parts),
        uncertainty=math.hypot(*(part.uncertainty for part in parts)),
    )


def known_sum(parts: Iterable[float | None], of_none: float | None = 0.0) -> float | None:
    """None if one of the parts is not known; of no parts `of_none`."""
    known = list(parts)
    return of_none if not known else None if None in known else math.fsum(part for part in known if part is not None)
