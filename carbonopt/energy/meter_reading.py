"""The reading of a meter: energy by component, and the time in which it was used."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from carbonopt.core.trial import COMPARED_FROM_S, GpuEnergy, Node
from carbonopt.core.values import Frozen

Objective = Literal["all", "gpu"]

# Interval between readings of NVML's utilisation, which covers the last 1/6 to 1 s, depending on
# the product. At this distance from each other and from the window's beginning, no two readings
# cover the same time, none covers time before the window, and they cost next to nothing.
UTILISATION_EVERY_S = 1.0


class Reading(Frozen):
    """Energy in kWh by component (None: not measured) and the seconds in which it was used."""

    gpu_kwh: float | None = None  # energy by the GPUs' own counters
    cpu_kwh: float | None = None
    ram_kwh: float | None = None
    duration_s: float = 0.0
    codecarbon_gpu_kwh: float | None = None  # the same windows of the same GPUs, read by CodeCarbon
    idle_gpu_kwh: float | None = None  # energy that these GPUs would use in the same time when idle
    # Variance of gpu_kwh, from the counters' ticks; windows are independent.
    gpu_variance_kwh2: float | None = None
    objective: Objective = "all"  # the components that count
    # CodeCarbon's GPU energy ÷ the counters' − 1, over the window of COMPARED_FROM_S or more where
    # they differ most.
    disagreement: float | None = None
    utilisation_sum: float = 0.0  # sum of the readings of the GPUs' utilisation, each 0 to 1
    utilisation_readings: int = 0
    # Mean temperature of the GPUs when the first of these windows began.
    start_temperature_c: float | None = None
    # All energy that a whole node draws, as Slurm reads it; returned by `outer` alone.
    slurm_kwh: float | None = None
    # Energy of a whole node's CPU, as CodeCarbon itself counts it; returned by `outer` alone.
    codecarbon_cpu_kwh: float | None = None
    # Each node's part, where nodes have meters of their own.
    nodes: dict[Node, "Reading"] = Field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the reading as an object of JSON; its nodes become a list."""
        nodes = [
            [node.model_dump(mode="json"), part.as_json()] for node, part in self.nodes.items()
        ]
        return {**self.model_dump(mode="json", exclude={"nodes"}), "nodes": nodes}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Reading":
        """Return the reading that `as_json` has stored.

        Raises:
            ValidationError: (pydantic's) if it is damaged.
        """
        nodes = {Node.model_validate(node): cls.from_json(part) for node, part in stored["nodes"]}
        return cls(**{**stored, "nodes": nodes})

    @property
    def gpu_utilisation(self) -> float | None:
        """The mean of the utilisation's readings; None where they cover less than half the time.

        They may cover a first step alone, say.
        """
        if self.utilisation_readings * UTILISATION_EVERY_S < self.duration_s / 2:
            return None
        return (
            self.utilisation_sum / self.utilisation_readings if self.utilisation_readings else None
        )

    @property
    def total_kwh(self) -> float:
        """The energy that the objective counts: all components, or the GPUs alone."""
        parts = (
            (self.gpu_kwh,)
            if self.objective == "gpu"
            else (self.gpu_kwh, self.cpu_kwh, self.ram_kwh)
        )
        return math.fsum(part for part in parts if part is not None)

    @property
    def gpu(self) -> GpuEnergy | None:
        """The GPUs' energy; None where CodeCarbon's reading or the idle power is missing."""
        counter, codecarbon, idle, variance = (getattr(self, name) for name in OF_GPUS)
        if counter is None or codecarbon is None or idle is None or variance is None:
            return None
        return GpuEnergy(
            counter=counter, codecarbon=codecarbon, idle=idle, uncertainty=math.sqrt(variance)
        )

    def __add__(self, other: "Reading") -> "Reading":
        shared = {
            node: self.nodes[node] + part
            for node, part in other.nodes.items()
            if node in self.nodes
        }
        sums: dict[str, Any] = {
            name: _sum(getattr(self, name), getattr(other, name)) for name in _SUMMED
        }
        sums |= {
            "disagreement": largest((self.disagreement, other.disagreement)),
            "objective": self.objective,
        }
        starts_c = (self.start_temperature_c, other.start_temperature_c)
        sums["start_temperature_c"] = next(
            (degrees_c for degrees_c in starts_c if degrees_c is not None), None
        )
        return Reading(**sums, nodes=self.nodes | other.nodes | shared)

    def since(self, earlier: "Reading") -> "Reading":
        """Return the energy and time between two readings of one meter's total."""
        used: dict[str, Any] = {}
        for name in _RUNNING:
            now, before = getattr(self, name), getattr(earlier, name)
            used[name] = None if now is None else now - (before or 0.0)
        return Reading(**used, objective=self.objective)

    def part_since(self, earlier: "Reading", share: float = 1.0) -> "Reading":
        """Return a share of the energy that one phase used between two readings, on every node.

        It is 0 where the later reading is lower, since it has shown that other work kept the trial
        waiting.
        """
        part: dict[str, Any] = {}
        for name in _MOVABLE:
            now, before = getattr(self, name), getattr(earlier, name)
            part[name] = None if now is None else max(0.0, now - (before or 0.0)) * share
        nothing = Reading(objective=self.objective)
        nodes = {
            node: own.part_since(earlier.nodes.get(node, nothing), share)
            for node, own in self.nodes.items()
        }
        return Reading(**part, nodes=nodes, objective=self.objective)

    def as_idle(self) -> "Reading":
        """Return the reading's time with what does not depend on the work that is done in it.

        RAM is charged by time. GPUs use their idle power, or nothing if that is not known, and the
        CPU nothing.
        """
        idle: dict[str, Any] = {"cpu_kwh": 0.0, "gpu_variance_kwh2": 0.0}
        for name in ("gpu_kwh", "codecarbon_gpu_kwh"):
            idle[name] = min(getattr(self, name) or 0.0, self.idle_gpu_kwh or 0.0)
        known = {name: kwh for name, kwh in idle.items() if getattr(self, name) is not None}
        nodes = {node: own.as_idle() for node, own in self.nodes.items()}
        return self.model_copy(update={**known, "nodes": nodes})

    def without(self, part: "Reading") -> "Reading":
        """Return the reading without a part of it, on every node; it may fall below 0."""
        rest: dict[str, Any] = {}
        for name in _MOVABLE:
            now, less = getattr(self, name), getattr(part, name)
            rest[name] = None if now is None else now - (less or 0.0)
        nodes = {
            node: own.without(part.nodes[node]) if node in part.nodes else own
            for node, own in self.nodes.items()
        }
        return self.model_copy(update={**rest, "nodes": nodes})

    def at_least_nothing(self) -> "Reading":
        """Return the reading with 0 in place of each energy below it."""
        below = {name: 0.0 for name in _MOVABLE if (getattr(self, name) or 0.0) < 0.0}
        return self.model_copy(update=below) if below else self


OF_GPUS = ("gpu_kwh", "codecarbon_gpu_kwh", "idle_gpu_kwh", "gpu_variance_kwh2")
_RUNNING = ("gpu_kwh", "cpu_kwh", "ram_kwh", "duration_s", "codecarbon_cpu_kwh")
_MOVABLE = (*_RUNNING, "codecarbon_gpu_kwh", "idle_gpu_kwh")
_SUMMED = Reading.model_fields.keys() - {
    "objective",
    "disagreement",
    "start_temperature_c",
    "nodes",
}


def _sum(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None and theirs is None else (mine or 0) + (theirs or 0)


def disagreement(gpu: GpuEnergy | None, duration_s: float) -> float | None:
    """Return CodeCarbon's GPU energy ÷ the counters' − 1; None if the window is too short."""
    if gpu is None or not gpu.counter or duration_s < COMPARED_FROM_S:
        return None
    return gpu.codecarbon / gpu.counter - 1


def largest(disagreements: Iterable[float | None]) -> float | None:
    """Return the disagreement farthest from 0, with its sign; None if there is none."""
    return max((share for share in disagreements if share is not None), key=abs, default=None)
