"""What the whole study spent: pruned, failed and interrupted trials, preparation and gaps included."""

import math
from collections.abc import Iterable

from carbonopt.core import units
from carbonopt.core.study import StudyData
from carbonopt.core.trial import TRIAL_PHASES, GpuEnergy, Phase, TrialRecord, TrialState
from carbonopt.core.values import Frozen


class Footprint(Frozen):
    """A study's own energy in kWh as the objective counts it, without PUE, split in two ways; its emissions, PUE in.

    `by_phase_kwh` and `earlier_attempts_kwh` add up to `energy_kwh`. So do `by_state_kwh` (where a trial's earlier
    attempts count with it), prepare and gap.
    """

    energy_kwh: float
    emissions_kg_co2e: float
    by_phase_kwh: dict[Phase, float]
    earlier_attempts_kwh: float  # of trials that were interrupted and run again; not split by phase
    by_state_kwh: dict[TrialState, float]  # only states that occur
    repeats_kwh: float  # of energy_kwh: repeats with other seeds, whose purpose is to confirm; 0 where none ran
    repeats_emissions_kg_co2e: float
    train_by_component_kwh: dict[str, float]  # gpu, cpu, ram in the training windows; absent: in no trial's figures
    unmeasured_trials: tuple[int, ...]  # ended or running without an energy figure; they count as nothing above
    outer_kwh: float | None  # by one reading at each session's begin and end; None: at least one has no such figure
    closure: float | None  # energy_kwh ÷ outer_kwh: 1.0 when nothing was lost or counted twice
    gpu_parts_kwh: dict[Phase, float | None]  # of by_phase_kwh what the GPUs' counters say; None: not known
    gpu_earlier_attempts_kwh: float | None  # of earlier_attempts_kwh likewise
    gpu_kwh: float | None  # the sum of these; None: one of them is not known
    outer_gpu_kwh: float | None  # as outer_kwh, of the GPUs' counters
    gpu_closure: float | None  # gpu_kwh ÷ outer_gpu_kwh
    gpu_by_phase_kwh: dict[Phase, GpuEnergy]  # of the trials that have both readings; empty: none has


def footprint(data: StudyData) -> Footprint:
    """Adds up the study's energy; emissions at the reference intensity and PUE of the study."""
    measured = [record.energy_kwh for record in data.records if record.energy_kwh is not None]
    by_phase = {
        Phase.PREPARE: sum(session.prepare_kwh for session in data.sessions),
        Phase.GAP: sum(session.gap_kwh for session in data.sessions),
        **{phase: sum(getattr(energy, phase) for energy in measured) for phase in TRIAL_PHASES},
    }
    earlier_kwh = sum(record.earlier_attempts_energy_kwh for record in data.records)
    energy_kwh = data.spent_kwh()
    repeats_kwh = math.fsum(record.spent_kwh for record in data.records if record.repeat_of is not None)
    intensity, pue = data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue
    outer_kwh = _total(session.outer_kwh for session in data.sessions)
    gpu_parts = _gpu_parts_kwh(data)
    interrupted = (record for record in data.records if record.earlier_attempts_energy_kwh)
    gpu_earlier_kwh = _sum(record.earlier_attempts_gpu_kwh for record in interrupted)
    gpu_kwh = _sum([*gpu_parts.values(), gpu_earlier_kwh])
    outer_gpu_kwh = _total(session.outer_gpu_kwh for session in data.sessions)
    return Footprint(
        energy_kwh=energy_kwh,
        emissions_kg_co2e=units.emissions_kg_co2e(energy_kwh, intensity, pue),
        repeats_kwh=repeats_kwh,
        repeats_emissions_kg_co2e=units.emissions_kg_co2e(repeats_kwh, intensity, pue),
        by_phase_kwh=by_phase,
        earlier_attempts_kwh=earlier_kwh,
        by_state_kwh=_by_state_kwh(data.records),
        train_by_component_kwh=_by_component_kwh(data.records),
        unmeasured_trials=tuple(record.trial for record in data.records if record.energy_kwh is None),
        outer_kwh=outer_kwh,
        closure=energy_kwh / outer_kwh if outer_kwh else None,
        gpu_parts_kwh=gpu_parts,
        gpu_earlier_attempts_kwh=gpu_earlier_kwh,
        gpu_kwh=gpu_kwh,
        outer_gpu_kwh=outer_gpu_kwh,
        gpu_closure=gpu_kwh / outer_gpu_kwh if gpu_kwh is not None and outer_gpu_kwh else None,
        gpu_by_phase_kwh=_gpu_by_phase_kwh(data.records),
    )


def _by_state_kwh(records: Iterable[TrialRecord]) -> dict[TrialState, float]:
    by_state: dict[TrialState, float] = {}
    for record in records:
        by_state[record.state] = by_state.get(record.state, 0.0) + record.spent_kwh
    return {state: by_state[state] for state in TrialState if state in by_state}


def _by_component_kwh(records: Iterable[TrialRecord]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in records:
        for component in ("gpu", "cpu", "ram"):
            value = getattr(record.energy_kwh, f"train_{component}") if record.energy_kwh else None
            if value is not None:
                totals[component] = totals.get(component, 0.0) + value
    return totals


def _gpu_parts_kwh(data: StudyData) -> dict[Phase, float | None]:
    split = [record.gpu_energy_kwh for record in data.records if record.energy_kwh is not None]
    return {
        Phase.PREPARE: _total(session.prepare_gpu_kwh for session in data.sessions),
        Phase.GAP: _total(session.gap_gpu_kwh for session in data.sessions),
        **{phase: _sum(None if gpu is None else gpu[phase].counter for gpu in split) for phase in TRIAL_PHASES},
    }


def _gpu_by_phase_kwh(records: Iterable[TrialRecord]) -> dict[Phase, GpuEnergy]:
    split = [record.gpu_energy_kwh for record in records if record.gpu_energy_kwh is not None]
    return {phase: summed(gpu[phase] for gpu in split) for phase in TRIAL_PHASES} if split else {}


def summed(parts: Iterable[GpuEnergy]) -> GpuEnergy:
    """Of several windows. Where one window begins as another ends, the tick at that edge cancels out, and the
    uncertainty is an upper bound."""
    parts = tuple(parts)
    return GpuEnergy(
        counter=math.fsum(part.counter for part in parts),
        codecarbon=math.fsum(part.codecarbon for part in parts),
        idle=math.fsum(part.idle for part in parts),
        uncertainty=math.hypot(*(part.uncertainty for part in parts)),
    )


def _total(parts: Iterable[float | None]) -> float | None:
    """The sum; None if there are no parts or one of them is not known."""
    known = list(parts)
    return _sum(known) if known else None


def _sum(parts: Iterable[float | None]) -> float | None:
    """The sum, 0 of no parts; None if one of them is not known."""
    known = list(parts)
    return None if None in known else math.fsum(part for part in known if part is not None)
