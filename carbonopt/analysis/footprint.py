"""What the whole study spent: pruned, failed and interrupted trials, preparation and gaps included."""

from collections.abc import Iterable

from carbonopt import units
from carbonopt.record import SessionLedger, StudyData
from carbonopt.trial import TRIAL_PHASES, Frozen, Phase, TrialRecord, TrialState


class Footprint(Frozen):
    """A study's own energy in kWh, without PUE, split in two ways, and its emissions, PUE in.

    `by_phase_kwh` and `earlier_attempts_kwh` add up to `energy_kwh`. So do `by_state_kwh` (where a trial's earlier
    attempts count with it), prepare and gap.
    """

    energy_kwh: float
    emissions_kg_co2e: float
    by_phase_kwh: dict[Phase, float]
    earlier_attempts_kwh: float  # of trials that were interrupted and run again; not split by phase
    by_state_kwh: dict[TrialState, float]  # only states that occur
    train_by_component_kwh: dict[str, float]  # gpu, cpu, ram in the training windows; absent: in no trial's figures
    unmeasured_trials: tuple[int, ...]  # ended or running without an energy figure; they count as nothing above
    outer_kwh: float | None  # the sessions as a second tracker saw them; None: at least one has no such figure
    closure: float | None  # energy_kwh ÷ outer_kwh: 1.0 when nothing was lost or counted twice


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
    outer_kwh = _outer_kwh(data.sessions)
    return Footprint(
        energy_kwh=energy_kwh,
        emissions_kg_co2e=units.emissions_kg_co2e(
            energy_kwh, data.provenance.intensity.g_co2e_per_kwh, data.config.carbon.pue
        ),
        by_phase_kwh=by_phase,
        earlier_attempts_kwh=earlier_kwh,
        by_state_kwh=_by_state_kwh(data.records),
        train_by_component_kwh=_by_component_kwh(data.records),
        unmeasured_trials=tuple(record.trial for record in data.records if record.energy_kwh is None),
        outer_kwh=outer_kwh,
        closure=energy_kwh / outer_kwh if outer_kwh else None,
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


def _outer_kwh(sessions: tuple[SessionLedger, ...]) -> float | None:
    readings = [session.outer_kwh for session in sessions if session.outer_kwh is not None]
    return sum(readings) if readings and len(readings) == len(sessions) else None
