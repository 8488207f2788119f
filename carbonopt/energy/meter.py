"""The energy meter of a study: the energy of each phase by component, and what all meters share."""

from collections import defaultdict
from typing import Protocol

from carbonopt.core.trial import Phase
from carbonopt.energy.meter_reading import Reading
from carbonopt.spec.study_data import EnergySource, IdlePower


class Meter(Protocol):
    """Splits the energy of a study into windows of one phase each, without gaps between them.

    Energy that other programs use on the study's cores meanwhile counts as phase OTHER, which takes
    no time of its own.
    """

    # How the energy of "gpu", "cpu" and "ram" is known; a component is absent if it isn't counted.
    energy_source: dict[str, EnergySource]
    models: dict[str, str]  # description of the models of "cpu" and "ram", where not measured
    idle: tuple[IdlePower, ...]  # each GPU's idle power before the first trial

    def enter(self, phase: Phase) -> None:
        """Close the running window and open the next, in this phase.

        Raises MeasurementError if no energy can be measured.
        """

    def use(self, gpus: int) -> None:
        """Set how many GPUs a trial uses: the first `gpus` of the meter's. The open window counts.

        The energy of the other GPUs counts as phase GAP, as does the CPU time of the study's own
        processes. No GPU is left over if the trial uses all, or if there are none.
        """

    def running(self, phase: Phase) -> Reading:
        """Return a phase's reading since it was last taken, the open window included."""

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        """Return the sums of these phases' closed windows since they were last taken.

        The windows are then forgotten. Raises ValueError if one of the phases is open now.
        """

    def move(self, part: Reading, source: Phase, destination: Phase) -> None:
        """Count a part of one phase's energy (see `Reading.part_since`) as another phase's."""

    def outer(self) -> Reading:
        """Return the total so far, from one reading when the meter began and one now.

        It does not depend on the windows.
        """

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        """Return the readings of `running` for these phases and of `outer`, at one moment."""

    def close(self) -> None:
        """Close the running window and end the measurement; readings can still be taken."""


class EnergyWindows:
    """The closed windows by phase and the open phase: the part of `Meter` that meters share."""

    def __init__(
        self, nothing: Reading, energy_source: dict[str, EnergySource], models: dict[str, str]
    ) -> None:
        self.energy_source, self.models = energy_source, models
        self.idle: tuple[IdlePower, ...] = ()
        self._nothing = nothing  # a reading of zero, with the components that this meter knows
        self._closed = defaultdict[Phase, Reading](lambda: nothing)
        self._phase: Phase | None = None

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        if self._phase in phases:
            raise ValueError(
                f"the open window can't be taken: {self._phase} is running; enter another phase"
                " first"
            )
        return {phase: self._closed.pop(phase, self._nothing) for phase in phases}

    def move(self, part: Reading, source: Phase, destination: Phase) -> None:
        self._closed[source] = self._closed[source].without(part)
        self._closed[destination] += part
