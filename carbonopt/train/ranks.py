"""Collective operations of a trial's ranks, and facts about each rank."""

import os
import resource
from typing import Any

import torch
import torch.distributed as dist

from carbonopt.core.channel import GPU_UUIDS
from carbonopt.core.errors import BadInput
from carbonopt.core.units import BYTES_PER_GIB


def rank() -> int:
    """Return this process's rank, from 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """Return this rank's device: its current GPU, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def check_devices() -> None:
    """Raise BadInput unless PyTorch has exactly the GPUs that the study measures.

    Otherwise it would silently train on the CPU, or on a GPU that nobody measures. Without a study
    any GPUs are accepted.
    """
    if GPU_UUIDS not in os.environ:
        return
    measured = [uuid.removeprefix("GPU-") for uuid in os.environ[GPU_UUIDS].split(",") if uuid]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    if seen != measured:
        rule = f"PyTorch must train on the GPUs of launch.gpus ({', '.join(measured) or 'none'})"
        but = f"PyTorch {torch.__version__} sees {', '.join(seen) or 'none'}"
        build = "install a CUDA build that fits the driver (`carbonopt doctor` says more)"
        raise BadInput(f"{rule}, but {but}; {build}, or set launch.gpus: [] for the CPU.")


def wait_for_device() -> None:
    """Wait until this rank's device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def together() -> None:
    """Wait until the device is idle on every rank.

    Nothing that belongs to one phase then runs on into the next.
    """
    wait_for_device()
    if world_size() > 1:
        dist.barrier()


def largest(value: float) -> float:
    """Return the largest value over all ranks."""
    return summed([value], dist.ReduceOp.MAX)[0]


def of_each(value: float) -> list[float]:
    """Return every rank's value, by rank."""
    return summed([value if each == rank() else 0.0 for each in range(world_size())])


def summed(
    values: list[float], operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Return each value summed, or reduced by another operation, over all ranks, in float64."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def peak_memory_gib() -> float:
    """Return this rank's peak memory.

    On a GPU it is the memory of its tensors, without what the allocator keeps in reserve (that
    depends on what happens to be free); on the CPU it is the process's resident memory.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / BYTES_PER_GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / BYTES_PER_GIB
