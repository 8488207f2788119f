"""The environment that a trial's ranks run in."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from carbonopt.channel import GPU_UUIDS
from carbonopt.config import LocalLaunch

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
_QUIET_PERCENT = 10  # of all cores, for what is never idle on a machine
_KEPT_BY_MALLOC = 2**40  # bytes: all
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def cpu_is_quiet() -> bool:
    """Whether nothing else works on this machine's CPUs now. Takes 0.2 s."""
    return psutil.cpu_percent(0.2) < _QUIET_PERCENT


def work_environment(
    launch: LocalLaunch, gpu_uuids: Sequence[str], base: Mapping[str, str] = os.environ, *, quiet: bool = False
) -> dict[str, str]:
    """What all ranks share: exactly the launch's devices visible, nothing that changes with the user's shell.

    `quiet`: the CPUs are the trials' alone. It matters where they train on them.
    `gpu_uuids` are those of launch.gpus, in that order. Every rank compares them with what CUDA gave it: the GPUs that
    NVML measures are those that train.
    """
    environment = dict(base)
    # By index, since DeepSpeed 0.19.8 dies on a UUID here; in the order of the bus, as NVML and nvidia-smi count.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment[VISIBLE_DEVICES] = ",".join(map(str, launch.gpus))
    environment[GPU_UUIDS] = ",".join(gpu_uuids)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # What torch.compile has made is kept for later trials and studies; torch's default is a folder in /tmp.
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "torchinductor"))
    environment["PYTHONUNBUFFERED"] = "1"
    if not launch.gpus:
        environment["DS_ACCELERATOR"] = "cpu"
        # How often OpenMP's threads look for work before they sleep. By default they look for long, and take the core
        # from who works where another process has one; to sleep and be woken takes as much time where none has. A
        # step of the quickstart's model on two cores, alone and beside a busy process: looking 10,000 times 20.8 and
        # 110 ms, 1,000 times 22.8 and 42, never 32 and 32; a virtual machine's cores are slower to wake at times.
        if "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", "30000" if quiet else "1000")
        # glibc gives what is freed back to the system, and the next step's activations fault it in again, page by page.
        for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            environment.setdefault(name, str(_KEPT_BY_MALLOC))
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // launch.world_size)))
    if ARCH_LIST in environment:
        # DeepSpeed 0.19.8 takes the part after the dot for a number and dies on "9.0a".
        environment[ARCH_LIST] = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", environment[ARCH_LIST])
    return environment


def rank_environments(launch: LocalLaunch) -> list[dict[str, str]]:
    """What each rank has for itself: torch.distributed's variables, with a port nobody listens on."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(launch.world_size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(launch.world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
