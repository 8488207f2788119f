"""The trials and their energy on each machine of a study that used several."""

import math
from collections.abc import Sequence

from carbonopt.core.trial import NodeReadings, TrialRecord
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class NodeUse(Frozen):
    """One machine's part in the trials' last attempts, without the pauses between trials."""

    name: str
    gpus: int | None  # different GPUs that trials had there; None: they ran on its CPU
    trials: int  # trials that used this machine
    most_ranks: int | None  # largest number of ranks that one trial had there; None: not known
    train_kwh: float  # energy of the training windows
    train_gpu_kwh: float | None  # None: no GPU was measured
    total_kwh: float  # energy of the trials with their setup and evaluations


def by_node(data: StudyData) -> tuple[NodeUse, ...]:
    """Return the use of each machine by its name; empty where all trials ran on one."""
    parts: dict[str, list[tuple[TrialRecord, NodeReadings]]] = {}
    for record in data.records:
        for node in record.nodes:
            if node.readings.total == 0:
                continue  # the trial left this machine idle
            parts.setdefault(node.name, []).append((record, node))
    if len(parts) < 2:
        return ()
    room = data.config.launch.ranks_of_nodes
    return tuple(_use(name, parts[name], room) for name in sorted(parts))


def _use(
    name: str, parts: Sequence[tuple[TrialRecord, NodeReadings]], room: Sequence[int]
) -> NodeUse:
    readings = [node.readings for _, node in parts]
    gpu_kwh = [own.train_gpu for own in readings if own.train_gpu is not None]
    ranks = [_ranks(record, node, room) for record, node in parts]
    # A trial has the first devices, one for each of its ranks there.
    devices = {
        device
        for (_, node), count in zip(parts, ranks, strict=True)
        for device in node.devices[:count]
    }
    known = [count for count in ranks if count is not None]
    return NodeUse(
        name=name,
        gpus=None if devices == {"cpu"} else len(devices),
        trials=len(parts),
        most_ranks=max(known, default=None),
        train_kwh=math.fsum(own.train for own in readings),
        train_gpu_kwh=math.fsum(gpu_kwh) if gpu_kwh else None,
        total_kwh=math.fsum(own.total for own in readings),
    )


def _ranks(record: TrialRecord, node: NodeReadings, room: Sequence[int]) -> int | None:
    """Return how many of a trial's ranks a machine had; ranks fill the machines in order.

    None if the trial had another number of machines than the study's launch gives now.
    """
    if len(record.nodes) != len(room):
        return None
    position = record.nodes.index(node)
    before = sum(room[:position])
    return min(room[position], max(0, record.params.world_size - before))
