"""Footprint of a whole study, with pruned, failed and interrupted trials, preparation and gaps."""

import math
from collections.abc import Collection, Iterable, Sequence

from carbonopt.core.trial import (
    COMPONENTS,
    TRIAL_PHASES,
    Energy,
    GpuEnergy,
    Phase,
    TrialRecord,
    TrialState,
)
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class Footprint(Frozen):
    """A study's own energy in kWh as the objective counts it, and its emissions.

    Energy is without PUE, emissions include it. `by_phase_kwh`, `earlier_attempts_kwh` and
    `probes_kwh` add up to `energy_kwh`; so do `by_state_kwh` (earlier attempts included), probes,
    prepare and gap. A table of recorded runs has the energy of training and evaluation alone:
    prepare, gap and setup of a replay are not known.
    """

    energy_kwh: float
    emissions_kg_co2e: float
    by_phase_kwh: dict[Phase, float | None]  # None: not known
    # energy of trials that were interrupted and run again; not split by phase
    earlier_attempts_kwh: float
    probes_kwh: float  # energy of probes, which run a few steps or compile; not split by phase
    by_state_kwh: dict[TrialState, float]  # only states that occur
    # part of energy_kwh: repeats with other seeds, whose purpose is to confirm; 0 where none ran
    repeats_kwh: float
    repeats_emissions_kg_co2e: float
    # gpu, cpu, ram in the training windows; a component is absent if no trial's figures have it
    train_by_component_kwh: dict[str, float]
    # trials without an energy figure that do not run (a running one gets it soon); they count as
    # nothing above
    unmeasured_trials: tuple[int, ...]
    # energy of other work on the study's cores meanwhile, not in energy_kwh; None: not recorded
    other_kwh: float | None
    # read once at each session's begin and end; None: at least one has no such figure
    outer_kwh: float | None
    # (energy_kwh + other_kwh) ÷ outer_kwh: 1.0 when nothing was lost or counted twice
    closure: float | None
    # part of by_phase_kwh, by the GPUs' counters; None: not known
    gpu_parts_kwh: dict[Phase, float | None]
    gpu_earlier_attempts_kwh: float | None  # part of earlier_attempts_kwh, by the GPUs' counters
    gpu_probes_kwh: float | None  # part of probes_kwh, by the GPUs' counters
    gpu_kwh: float | None  # the sum of these; None: one of them is not known
    outer_gpu_kwh: float | None  # like outer_kwh, but by the GPUs' counters
    gpu_closure: float | None  # gpu_kwh ÷ outer_gpu_kwh
    # energy of the machines' CPUs, whoever used them, by CodeCarbon's own model or RAPL
    codecarbon_cpu_kwh: float | None
    slurm_kwh: float | None  # like outer_kwh, but all that the nodes drew, by Slurm
    # energy of the trials that have both readings; empty: none has
    gpu_by_phase_kwh: dict[Phase, GpuEnergy]


def footprint(data: StudyData) -> Footprint:
    """Add up the study's energy and emissions, at the reference intensity and PUE of the study."""
    records = data.records
    measured = [record.energy_kwh for record in records if record.energy_kwh is not None]
    by_gpu = [record.gpu_energy_kwh for record in records if record.gpu_energy_kwh is not None]
    energy_kwh = data.spent_kwh()
    repeats_kwh = math.fsum(record.spent_kwh for record in records if record.repeat_of is not None)
    other_kwh = _of_sessions(data, "other_kwh")
    outer_kwh = _of_sessions(data, "outer_kwh")
    outer_gpu_kwh = _of_sessions(data, "outer_gpu_kwh")
    gpu_parts = _gpu_parts_kwh(data)
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
        by_phase_kwh=_by_phase_kwh(data),
        earlier_attempts_kwh=sum(record.earlier_attempts_energy_kwh for record in records),
        probes_kwh=math.fsum(probe.spent_kwh for probe in data.probes),
        by_state_kwh=_by_state_kwh(records),
        train_by_component_kwh=_train_by_component_kwh(measured),
        unmeasured_trials=tuple(
            record.trial
            for record in records
            if record.energy_kwh is None and record.state is not TrialState.RUNNING
        ),
        other_kwh=other_kwh,
        outer_kwh=outer_kwh,
        closure=(energy_kwh + (other_kwh or 0.0)) / outer_kwh if outer_kwh else None,
        gpu_parts_kwh=gpu_parts,
        gpu_earlier_attempts_kwh=gpu_earlier_kwh,
        gpu_probes_kwh=gpu_probes_kwh,
        gpu_kwh=gpu_kwh,
        outer_gpu_kwh=outer_gpu_kwh,
        codecarbon_cpu_kwh=_of_sessions(data, "codecarbon_cpu_kwh"),
        slurm_kwh=_of_sessions(data, "slurm_kwh"),
        gpu_closure=gpu_kwh / outer_gpu_kwh if gpu_kwh is not None and outer_gpu_kwh else None,
        gpu_by_phase_kwh={
            phase: summed([gpu[phase] for gpu in by_gpu]) for phase in TRIAL_PHASES if by_gpu
        },
    )


def _by_phase_kwh(data: StudyData) -> dict[Phase, float | None]:
    """Return the energy of each phase; None where a replay's table does not have it."""
    measured = [record.energy_kwh for record in data.records if record.energy_kwh is not None]
    by_phase: dict[Phase, float | None] = {
        Phase.PREPARE: sum(session.prepare_kwh for session in data.sessions),
        Phase.GAP: sum(session.gap_kwh for session in data.sessions),
        **{phase: sum(getattr(energy, phase) for energy in measured) for phase in TRIAL_PHASES},
    }
    return by_phase | _not_recorded(data)


def _not_recorded(data: StudyData) -> dict[Phase, None]:
    """Return the phases of which a replay's table has no energy; none where trials were run."""
    phases = (Phase.PREPARE, Phase.GAP, Phase.SETUP) if data.provenance.is_replay else ()
    return dict.fromkeys(phases)


def _gpu_parts_kwh(data: StudyData) -> dict[Phase, float | None]:
    """Return the GPUs' part of each phase; None where it is not known of every trial."""
    measured = [record for record in data.records if record.energy_kwh is not None]
    return {
        Phase.PREPARE: _of_sessions(data, "prepare_gpu_kwh"),
        Phase.GAP: _of_sessions(data, "gap_gpu_kwh"),
        **{
            phase: known_sum(
                record.gpu_energy_kwh[phase].counter if record.gpu_energy_kwh else None
                for record in measured
            )
            for phase in TRIAL_PHASES
        },
        **_not_recorded(data),
    }


def _of_sessions(data: StudyData, name: str) -> float | None:
    """Add up a field of the study's sessions; None where one of them does not know it."""
    return known_sum((getattr(session, name) for session in data.sessions), of_none=None)


def _by_state_kwh(records: Sequence[TrialRecord]) -> dict[TrialState, float]:
    """Add up what trials have spent, by their states."""
    by_state = {
        state: [record.spent_kwh for record in records if record.state is state]
        for state in TrialState
    }
    return {state: sum(spent_kwh) for state, spent_kwh in by_state.items() if spent_kwh}


def _train_by_component_kwh(energies: Sequence[Energy]) -> dict[str, float]:
    """Add up the training energy of each component that was measured."""
    by_component = {
        part: [getattr(energy, f"train_{part}") for energy in energies] for part in COMPONENTS
    }
    return {
        part: sum(known)
        for part, train_kwh in by_component.items()
        if (known := [kwh for kwh in train_kwh if kwh is not None])
    }


def summed(parts: Collection[GpuEnergy]) -> GpuEnergy:
    """Add up the energy of several windows.

    Where one window begins as another ends, the tick at that edge cancels out, and the uncertainty
    is an upper bound.
    """
    return GpuEnergy(
        counter=math.fsum(part.counter for part in parts),
        codecarbon=math.fsum(part.codecarbon for part in parts),
        idle=math.fsum(part.idle for part in parts),
        uncertainty=math.hypot(*(part.uncertainty for part in parts)),
    )


def known_sum(parts: Iterable[float | None], of_none: float | None = 0.0) -> float | None:
    """Return the sum of the parts; None if one of them is not known.

    Args:
        of_none: the result if there are no parts.
    """
    known = list(parts)
    return (
        of_none
        if not known
        else None
        if None in known
        else math.fsum(part for part in known if part is not None)
    )
