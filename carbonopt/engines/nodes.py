"""The meters of several nodes as one."""

import contextlib
import functools
import operator
from collections.abc import Mapping

from carbonopt.core.study import EnergySource, IdlePower
from carbonopt.core.trial import Node, Phase
from carbonopt.energy.meter import Meter, Reading


class NodeMeters:
    """All nodes of a study, each with a meter of its own: they change phases together, and their readings are summed.
    Implements `Meter`; its readings also tell each node's own."""

    def __init__(self, meters: Mapping[Node, Meter]) -> None:
        self._meters = dict(meters)
        self.energy_source: dict[str, EnergySource] = {}
        self.models: dict[str, str] = {}
        for meter in self._meters.values():
            for component, how in meter.energy_source.items():  # modelled on one node: the sum isn't measured
                self.energy_source[component] = how if self.energy_source.get(component, how) == how else "modelled"
            self.models |= meter.models
        self.idle: tuple[IdlePower, ...] = tuple(idle for meter in self._meters.values() for idle in meter.idle)

    def enter(self, phase: Phase) -> None:
        for meter in self._meters.values():
            meter.enter(phase)

    def running(self, phase: Phase) -> Reading:
        return across({node: meter.running(phase) for node, meter in self._meters.items()})

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        taken = {node: meter.take(*phases) for node, meter in self._meters.items()}
        return {phase: across({node: readings[phase] for node, readings in taken.items()}) for phase in phases}

    def outer(self) -> Reading:
        return across({node: meter.outer() for node, meter in self._meters.items()})

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # each of them, also if another one can't read any more
            for meter in self._meters.values():
                closing.callback(meter.close)


def across(readings: Mapping[Node, Reading]) -> Reading:
    """What several nodes used in the same time: energies add up, the seconds don't."""
    total = functools.reduce(operator.add, readings.values())
    duration_s = max(reading.duration_s for reading in readings.values())
    return total.model_copy(update={"duration_s": duration_s, "nodes": dict(readings)})
