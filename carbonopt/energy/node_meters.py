"""One meter made of the meters of a study's nodes."""

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from typing import TypeVar

from carbonopt.core.trial import TRIAL_PHASES, Node, Phase
from carbonopt.energy.meter import Meter
from carbonopt.energy.meter_reading import Reading
from carbonopt.spec.study_data import EnergySource

_Answer = TypeVar("_Answer")


class NodeMeters:
    """One meter made of the meters of a study's nodes. Implements `Meter`.

    The nodes change phases together. Readings have their sum and each node's part. A node that a
    trial leaves idle is in phase GAP meanwhile.

    Args:
        meters: the meter of each node.
        ranks: the number of ranks that each node has room for; a trial fills the nodes in order.
    """

    def __init__(self, meters: Mapping[Node, Meter], ranks: Sequence[int]) -> None:
        self._meters, self._ranks = dict(meters), dict(zip(meters, ranks, strict=True))
        self.energy_source: dict[str, EnergySource] = {}
        self.models: dict[str, str] = {}
        for meter in meters.values():
            # If a component is modelled on one node, its sum isn't measured.
            for component, how in meter.energy_source.items():
                self.energy_source[component] = (
                    how if self.energy_source.get(component, how) == how else "modelled"
                )
            self.models |= meter.models
        self.idle = tuple(idle for meter in meters.values() for idle in meter.idle)
        self._idle_nodes: frozenset[Node] = frozenset()
        self._phase = Phase.PREPARE
        # Each meter answers within some ms; meters of other machines are asked at the same time.
        self._at_once = ThreadPoolExecutor(len(meters)) if len(meters) > 1 else None

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self._of_each(lambda node, meter: meter.enter(self._phase_of(node)))

    def _phase_of(self, node: Node) -> Phase:
        return (
            Phase.GAP if node in self._idle_nodes and self._phase in TRIAL_PHASES else self._phase
        )

    def use(self, gpus: int) -> None:
        idle, first = set(), 0
        for node, room in self._ranks.items():
            used = min(room, max(0, gpus - first))
            self._meters[node].use(used or room)
            if used == 0:
                idle.add(node)
            first += room
        changed, self._idle_nodes = idle ^ self._idle_nodes, frozenset(idle)
        for node in changed:
            self._meters[node].enter(self._phase_of(node))

    def running(self, phase: Phase) -> Reading:
        return _across(self._of_each(lambda _, meter: meter.running(phase)))

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        taken = self._of_each(lambda _, meter: meter.take(*phases))
        return {
            phase: _across({node: readings[phase] for node, readings in taken.items()})
            for phase in phases
        }

    def move(self, part: Reading, source: Phase, destination: Phase) -> None:
        for node, own in part.nodes.items():
            self._meters[node].move(own, source, destination)

    def outer(self) -> Reading:
        return _across(self._of_each(lambda _, meter: meter.outer()))

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        by_node = self._of_each(lambda _, meter: meter.parts_and_outer(*phases))
        parts = {
            phase: _across({node: parts[phase] for node, (parts, _) in by_node.items()})
            for phase in phases
        }
        return parts, _across({node: outer for node, (_, outer) in by_node.items()})

    def _of_each(self, ask: Callable[[Node, Meter], _Answer]) -> dict[Node, _Answer]:
        every = map if self._at_once is None else self._at_once.map
        return dict(
            zip(self._meters, every(ask, self._meters.keys(), self._meters.values()), strict=True)
        )

    def close(self) -> None:
        with ExitStack() as closing:  # closes every meter, also if another one fails to read
            for meter in self._meters.values():
                closing.callback(meter.close)
            if self._at_once is not None:
                closing.callback(self._at_once.shutdown)


def _across(readings: Mapping[Node, Reading]) -> Reading:
    """Sum the readings of several nodes of the same time: energies add up, seconds don't."""
    total = reduce(operator.add, readings.values())
    duration_s = max(reading.duration_s for reading in readings.values())
    starts_c = [
        degrees_c
        for reading in readings.values()
        if (degrees_c := reading.start_temperature_c) is not None
    ]
    together = {
        "duration_s": duration_s,
        "start_temperature_c": statistics.fmean(starts_c) if starts_c else None,
    }
    return total.model_copy(update={**together, "nodes": dict(readings)})
