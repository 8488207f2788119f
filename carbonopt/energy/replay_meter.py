"""The meter of recorded runs, whose energy comes from a table."""

from carbonopt.core.trial import Phase
from carbonopt.energy.meter import EnergyWindows
from carbonopt.energy.meter_reading import Reading


class ReplayMeter(EnergyWindows):
    """A meter of recorded runs, whose energy comes from a table. Implements `Meter`."""

    def __init__(self) -> None:
        super().__init__(Reading(gpu_kwh=0.0), {"gpu": "recorded"}, {})
        self._all = self._nothing

    def advance(self, phase: Phase, energy_kwh: float, duration_s: float) -> None:
        """Add recorded energy, which the tables don't split by component, to a phase."""
        recorded = Reading(gpu_kwh=energy_kwh, duration_s=duration_s)
        self._closed[phase] += recorded
        self._all += recorded

    def enter(self, phase: Phase) -> None:
        self._phase = phase

    def use(self, gpus: int) -> None:
        """Do nothing: the table has the energy of the GPUs that the trial used."""

    def running(self, phase: Phase) -> Reading:
        return self._closed[phase]

    def outer(self) -> Reading:
        return self._all

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        return {phase: self._closed[phase] for phase in phases}, self._all

    def close(self) -> None:
        self._phase = None
