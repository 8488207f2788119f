"""A study's energy meter: which phase spent how much, by component; what all meters have in common."""

import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from typing import Any, Literal, Protocol, TypeVar

from pydantic import Field

from carbonopt.core.study import EnergySource, IdlePower
from carbonopt.core.trial import COMPARED_FROM_S, TRIAL_PHASES, GpuEnergy, Node, Phase
from carbonopt.core.values import Frozen

Objective = Literal["all", "gpu"]
_Answer = TypeVar("_Answer")

# NVML's utilisation is that of the last 1/6 to 1 s, by product. So far apart from each other and from the window's
# beginning, no reading tells of another one's time or of what was before the window; and they cost next to nothing.
UTILISATION_EVERY_S = 1.0


class Reading(Frozen):
    """Energy in kWh by component (None: not measured) and the seconds it was used in."""

    gpu_kwh: float | None = None  # by the GPUs' own counters
    cpu_kwh: float | None = None
    ram_kwh: float | None = None
    duration_s: float = 0.0
    codecarbon_gpu_kwh: float | None = None  # the same windows of the same GPUs, read by CodeCarbon
    idle_gpu_kwh: float | None = None  # what these GPUs use idle in as much time
    gpu_variance_kwh2: float | None = None  # of gpu_kwh, from the counters' ticks; windows are independent
    objective: Objective = "all"  # what counts
    # CodeCarbon's GPU energy ÷ the counters' − 1 over the window of COMPARED_FROM_S or more where they differ most
    disagreement: float | None = None
    utilisation_sum: float = 0.0  # of the GPUs' utilisation as it was read, 0 to 1
    utilisation_readings: int = 0
    start_temperature_c: float | None = None  # of the GPUs as the first of these windows began, their mean
    slurm_kwh: float | None = None  # of a whole node, all that it draws, as Slurm reads it; told by `outer` alone
    nodes: dict[Node, "Reading"] = Field(default_factory=dict)  # each node's part, where nodes have meters of their own

    @property
    def gpu_utilisation(self) -> float | None:
        """Mean of its readings; None where they tell of less than half of the time: of a first step alone, say."""
        if self.utilisation_readings * UTILISATION_EVERY_S < self.duration_s / 2:
            return None
        return self.utilisation_sum / self.utilisation_readings if self.utilisation_readings else None

    @property
    def total_kwh(self) -> float:
        """What the objective counts: all that is measured and modelled, or the GPUs alone."""
        parts = (self.gpu_kwh,) if self.objective == "gpu" else (self.gpu_kwh, self.cpu_kwh, self.ram_kwh)
        return math.fsum(part for part in parts if part is not None)

    @property
    def gpu(self) -> GpuEnergy | None:
        """What is known of the GPUs' energy; None where a second reading or an idle power is missing."""
        counter, codecarbon, idle, variance = (getattr(self, name) for name in OF_GPUS)
        if counter is None or codecarbon is None or idle is None or variance is None:
            return None
        return GpuEnergy(counter=counter, codecarbon=codecarbon, idle=idle, uncertainty=math.sqrt(variance))

    def __add__(self, other: "Reading") -> "Reading":
        shared = {node: self.nodes[node] + part for node, part in other.nodes.items() if node in self.nodes}
        sums: dict[str, Any] = {name: _sum(getattr(self, name), getattr(other, name)) for name in _SUMMED}
        sums |= {"disagreement": largest((self.disagreement, other.disagreement)), "objective": self.objective}
        starts_c = (self.start_temperature_c, other.start_temperature_c)
        sums["start_temperature_c"] = next((degrees_c for degrees_c in starts_c if degrees_c is not None), None)
        return Reading(**sums, nodes=self.nodes | other.nodes | shared)

    def since(self, earlier: "Reading") -> "Reading":
        """What was used between two readings of one meter's whole: energies and seconds alone."""
        used: dict[str, Any] = {}
        for name in _RUNNING:
            now, before = getattr(self, name), getattr(earlier, name)
            used[name] = None if now is None else now - (before or 0.0)
        return Reading(**used, objective=self.objective)


OF_GPUS = ("gpu_kwh", "codecarbon_gpu_kwh", "idle_gpu_kwh", "gpu_variance_kwh2")
_RUNNING = ("gpu_kwh", "cpu_kwh", "ram_kwh", "duration_s")
_SUMMED = Reading.model_fields.keys() - {"objective", "disagreement", "start_temperature_c", "nodes"}


def _sum(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None and theirs is None else (mine or 0) + (theirs or 0)


def disagreement(gpu: GpuEnergy | None, duration_s: float) -> float | None:
    """CodeCarbon's GPU energy ÷ the counters' − 1 over one window; None if it is too short to be compared."""
    if gpu is None or not gpu.counter or duration_s < COMPARED_FROM_S:
        return None
    return gpu.codecarbon / gpu.counter - 1


def largest(disagreements: Iterable[float | None]) -> float | None:
    """The one farthest from 0, with its sign; None if there is none."""
    return max((share for share in disagreements if share is not None), key=abs, default=None)


class Meter(Protocol):
    """Splits the energy of a study into windows, each of one phase, one after the other without a gap."""

    energy_source: dict[str, EnergySource]  # of gpu, cpu, ram: how its energy is known; absent where not in the figures
    models: dict[str, str]  # of cpu and ram: how what is not measured is modelled, in words
    idle: tuple[IdlePower, ...]  # of each GPU, before the first trial

    def enter(self, phase: Phase) -> None:
        """Closes the running window and opens the next. Raises MeasurementError if there is no energy to be had."""

    def use(self, gpus: int) -> None:
        """From the window that is open now on, a trial has so many of the GPUs, the first; what the others draw
        meanwhile counts as GAP. None are left over where it has as many as there are, or there are no GPUs."""

    def running(self, phase: Phase) -> Reading:
        """Of that phase since it was last taken, the open window included."""

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        """The closed windows of these phases since they were last taken, summed; and forgets them. Raises ValueError if
        one of them is open now."""

    def outer(self) -> Reading:
        """The whole so far by one reading at the meter's begin and one now, which know of no windows."""

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        """What `running` says of these phases and `outer` of the whole, at one moment."""

    def close(self) -> None:
        """Closes the running window and ends the measurement. What was measured can still be taken."""


class EnergyWindows:
    """Closed windows by phase, and which phase is open. The rest is as `Meter` has it."""

    def __init__(self, nothing: Reading, energy_source: dict[str, EnergySource], models: dict[str, str]) -> None:
        self.energy_source, self.models = energy_source, models
        self.idle: tuple[IdlePower, ...] = ()
        self._nothing = nothing  # no energy in no time, with the components that this meter knows
        self._closed = defaultdict[Phase, Reading](lambda: nothing)
        self._open: Phase | None = None

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        if self._open in phases:
            raise ValueError(f"the open window can't be taken: {self._open} is running; enter another phase first")
        return {phase: self._closed.pop(phase, self._nothing) for phase in phases}


class ReplayMeter(EnergyWindows):
    """Takes energy from a table of recorded runs instead of this machine. Implements `Meter`."""

    def __init__(self) -> None:
        super().__init__(Reading(gpu_kwh=0.0), {"gpu": "recorded"}, {})
        self._all = self._nothing

    def advance(self, phase: Phase, energy_kwh: float, duration_s: float) -> None:
        """Adds recorded energy, which the tables don't split by component, to a phase."""
        recorded = Reading(gpu_kwh=energy_kwh, duration_s=duration_s)
        self._closed[phase] += recorded
        self._all += recorded

    def enter(self, phase: Phase) -> None:
        self._open = phase

    def use(self, gpus: int) -> None:
        """A table tells what the trial took."""

    def running(self, phase: Phase) -> Reading:
        return self._closed[phase]

    def outer(self) -> Reading:
        return self._all

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        return {phase: self._closed[phase] for phase in phases}, self._all

    def close(self) -> None:
        self._open = None


class NodeMeters:
    """The nodes of a study, each with a meter of its own, as one: they change phases together, and their readings are
    summed, and also told of each. A node that a trial leaves idle is in GAP meanwhile. Implements `Meter`.

    Args:
        ranks: that each node has room for; a trial's fill the nodes in their order.
    """

    def __init__(self, meters: Mapping[Node, Meter], ranks: Sequence[int]) -> None:
        self._meters, self._ranks = dict(meters), dict(zip(meters, ranks, strict=True))
        self.energy_source: dict[str, EnergySource] = {}
        self.models: dict[str, str] = {}
        for meter in meters.values():
            for component, how in meter.energy_source.items():  # modelled on one node: the sum isn't measured
                self.energy_source[component] = how if self.energy_source.get(component, how) == how else "modelled"
            self.models |= meter.models
        self.idle = tuple(idle for meter in meters.values() for idle in meter.idle)
        self._idle_nodes: frozenset[Node] = frozenset()
        self._phase = Phase.PREPARE
        # Each of them answers within some ms, other machines' at the same time.
        self._at_once = ThreadPoolExecutor(len(meters)) if len(meters) > 1 else None

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self._of_each(lambda node, meter: meter.enter(self._phase_of(node)))

    def _phase_of(self, node: Node) -> Phase:
        return Phase.GAP if node in self._idle_nodes and self._phase in TRIAL_PHASES else self._phase

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
        return {phase: _across({node: readings[phase] for node, readings in taken.items()}) for phase in phases}

    def outer(self) -> Reading:
        return _across(self._of_each(lambda _, meter: meter.outer()))

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        accounts = self._of_each(lambda _, meter: meter.account(*phases))
        parts = {phase: _across({node: parts[phase] for node, (parts, _) in accounts.items()}) for phase in phases}
        return parts, _across({node: outer for node, (_, outer) in accounts.items()})

    def _of_each(self, ask: Callable[[Node, Meter], _Answer]) -> dict[Node, _Answer]:
        every = map if self._at_once is None else self._at_once.map
        return dict(zip(self._meters, every(ask, self._meters.keys(), self._meters.values()), strict=True))

    def close(self) -> None:
        with ExitStack() as closing:  # each of them, also if another one can't read any more
            for meter in self._meters.values():
                closing.callback(meter.close)
            if self._at_once is not None:
                closing.callback(self._at_once.shutdown)


def _across(readings: Mapping[Node, Reading]) -> Reading:
    """What several nodes used in the same time: energies add up, the seconds don't."""
    total = reduce(operator.add, readings.values())
    duration_s = max(reading.duration_s for reading in readings.values())
    starts_c = [degrees_c for reading in readings.values() if (degrees_c := reading.start_temperature_c) is not None]
    together = {"duration_s": duration_s, "start_temperature_c": statistics.fmean(starts_c) if starts_c else None}
    return total.model_copy(update={**together, "nodes": dict(readings)})


class MeterInTurn:
    """One meter for several studies, one after the other, which also tells what lies between them."""

    def __init__(self) -> None:
        self._meter: Meter | None = None  # from the first study on
        self._between: tuple[Reading, ...] = ()  # that are over
        self._gaps_before = Reading()  # of the last study

    def lend(self, opened: Callable[[], Meter]) -> Meter:
        """To a study, whose it is from now on until the study closes it. `opened` makes it, for the first one."""
        if self._meter is None:
            self._meter, began = opened(), None
        else:
            self._meter.enter(Phase.PREPARE)
            self._between += (self._meter.take(Phase.GAP)[Phase.GAP].since(self._gaps_before),)
            began = self._meter.outer()
        return _LentMeter(self._meter, began, self._taken_back)

    def _taken_back(self) -> None:
        assert self._meter is not None
        self._meter.enter(Phase.GAP)
        self._meter.take(Phase.PREPARE, *TRIAL_PHASES)  # the study has read them
        self._gaps_before = self._meter.running(Phase.GAP)

    def between(self, *, lent: bool = False) -> Reading:
        """So far. `lent`: a study has it now."""
        assert self._meter is not None
        running = () if lent else (self._meter.running(Phase.GAP).since(self._gaps_before),)
        return reduce(operator.add, (*self._between, *running), Reading(objective=self._meter.outer().objective))

    def outer(self) -> Reading:
        assert self._meter is not None
        return self._meter.outer()

    @property
    def runs(self) -> bool:
        """Whether any study has asked for it."""
        return self._meter is not None

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


class _LentMeter:
    """A meter as one study sees it. Implements `Meter`."""

    def __init__(self, meter: Meter, began: Reading | None, taken_back: Callable[[], None]) -> None:
        self.energy_source, self.models, self.idle = meter.energy_source, meter.models, meter.idle
        self.enter, self.use, self.running, self.take = meter.enter, meter.use, meter.running, meter.take
        self._meter, self._began, self._taken_back = meter, began, taken_back
        self._ended: Reading | None = None

    def outer(self) -> Reading:
        if self._ended is not None:
            return self._ended
        return self._own(self._meter.outer())

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        parts, whole = self._meter.account(*phases)
        return parts, self._own(whole)

    def _own(self, whole: Reading) -> Reading:
        return whole if self._began is None else whole.since(self._began)

    def close(self) -> None:
        if self._ended is None:
            self._ended = self.outer()
            self._taken_back()
