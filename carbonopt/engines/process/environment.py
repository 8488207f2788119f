"""The environment that a trial's ranks run in."""

import contextlib
import errno
import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from carbonopt.core.config import Launch
from carbonopt.core.errors import BadInput
from carbonopt.core.events import GPU_UUIDS
from carbonopt.core.values import Frozen
from carbonopt.engines.process.extensions import cache_folder

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "OMP_NUM_THREADS"
_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # below lie those that services of all kinds have as a default
# What torchrun, accelerate launch and mpirun say to their own workers. A trial's ranks are not theirs: they would wait
# for a store of torchrun's, train where accelerate was told to, or take MPI's place for their own. Of accelerate's all
# go, also what a user has set: they choose device, precision and compiler, which are the study's to choose, and without
# ACCELERATE_USE_FSDP, ACCELERATE_USE_MEGATRON_LM and the like nothing reads FSDP_* and MEGATRON_LM_*.
_OF_LAUNCHERS = re.compile(
    r"(TORCHELASTIC|ACCELERATE|OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI)_.*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|MPI_LOCAL(NRANKS|RANKID)"
)


class Ranks(Frozen):
    """Those of a trial that run on one machine."""

    world_size: int  # of the trial, on all its machines
    first: int = 0
    here: int  # so many from the first on
    node: int = 0  # this machine's number among the trial's
    nodes: int = 1
    address: str = "127.0.0.1"  # of the machine that has rank 0
    port: int  # there, on which nobody listens yet

    @classmethod
    def alone(cls, world_size: int) -> "Ranks":
        """All of a trial on this machine."""
        return cls(world_size=world_size, here=world_size, port=free_port())

    def may_be(self, started: "Ranks") -> bool:
        """Whether processes that were `started` as those can be these. On one machine they may have another port."""
        return self == started or (self.nodes == started.nodes == 1 and self.world_size == started.world_size)

    @property
    def environments(self) -> list[dict[str, str]]:
        """What each rank has for itself: torch.distributed's variables."""
        shared = {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port), "WORLD_SIZE": str(self.world_size)}
        return [{**shared, "RANK": str(self.first + each), "LOCAL_RANK": str(each)} for each in range(self.here)]


def of_launcher(ranks: Ranks) -> dict[str, str]:
    """What torchrun reads as its options' defaults, on each of several machines: it is typed as for one."""
    if ranks.nodes == 1:
        return {}
    given = {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port), "NNODES": str(ranks.nodes)}
    given |= {"NODE_RANK": str(ranks.node), "NPROC_PER_NODE": str(ranks.here)}
    return {f"PET_{name}": value for name, value in given.items()}


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on now, and that the system gives to no connection, as ranks that were started ahead
    listen on it much later. Where the system leaves none for that, any that is free now."""
    below = range(_FIRST_PORT, int(_PORTS_OF_CONNECTIONS.read_text().split()[0]))
    for port in random.SystemRandom().sample(below, min(len(below), 100)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_environment(base: Mapping[str, str] = os.environ) -> None:
    """Raises BadInput for what the user has set and every trial would die of, with what to do."""
    threads = base.get(_THREADS, "")
    # OpenMP also takes a list, one number for each level of nesting, but accelerate reads it as one number.
    if threads and (not re.fullmatch(r"\s*[0-9]+\s*", threads) or int(threads) == 0):
        advice = f"export {_THREADS}=N, or unset {_THREADS} for this machine's cores divided by the ranks"
        raise BadInput(f"{_THREADS} must be one whole number above 0, but is {threads!r} in the environment; {advice}.")
    cache = base.get(_COMPILE_CACHE)
    if cache and (reason := _why_not_written(Path(cache))) is not None:
        is_none = f"but is {cache!r} in the environment ({reason}); export another one, or unset {_COMPILE_CACHE}"
        raise BadInput(f"{_COMPILE_CACHE} must be a folder that can be made and written, {is_none}.")


def work_environment(launch: Launch, gpu_uuids: Sequence[str], base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What all ranks share: exactly the launch's devices visible, nothing that changes with the user's shell. The
    user's variables pass, but for what launchers set (torchrun, accelerate, MPI). A value of the user's own stands for
    OMP_NUM_THREADS, TORCHINDUCTOR_CACHE_DIR, GOMP_SPINCOUNT, OMP_WAIT_POLICY and glibc's MALLOC_*; the first two, if
    empty, count as not set. Every rank compares `gpu_uuids`, those of launch.gpus in that order, with what CUDA gave
    it: the GPUs that NVML measures are those that train."""
    unset = {name for name in base if _OF_LAUNCHERS.fullmatch(name)}
    unset |= {name for name in (_THREADS, _COMPILE_CACHE) if not base.get(name)}
    environment = {name: value for name, value in base.items() if name not in unset}
    # By index, since DeepSpeed 0.19.8 dies on a UUID here; in the order of the bus, as NVML and nvidia-smi count.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment[VISIBLE_DEVICES] = ",".join(map(str, launch.gpus))
    environment[GPU_UUIDS] = ",".join(gpu_uuids)
    environment["PATH"] = programs_path(base)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # What torch.compile has made is kept for later trials and studies. Torch's default is a folder in /tmp: it stays
    # for a user without a home, since torch makes its folder as it is imported, and dies where it can't.
    cache = cache_folder(environment) / "torchinductor"
    if _COMPILE_CACHE not in environment and cache.is_absolute() and _why_not_written(cache) is None:
        environment[_COMPILE_CACHE] = str(cache)
    environment["PYTHONUNBUFFERED"] = "1"
    if not launch.gpus:
        environment["DS_ACCELERATOR"] = "cpu"
        # How often OpenMP's threads look for work before they sleep. To be woken takes a quarter of the quickstart's
        # step; to look for long takes the core from who works, where another process wants one: see train.cores, which
        # notices that if the kernel tells it.
        if "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", "30000" if _kernel_tells_waits() else "1000")
        # glibc gives what is freed back to the system, and the next step's activations fault it in again, page by page.
        for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            environment.setdefault(name, str(2**40))  # bytes: it keeps all
    environment.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // launch.world_size)))
    if ARCH_LIST in environment:
        # DeepSpeed 0.19.8 takes the part after the dot for a number and dies on "9.0a".
        environment[ARCH_LIST] = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", environment[ARCH_LIST])
    return environment


def programs_path(base: Mapping[str, str] = os.environ) -> str:
    """PATH with the folder of this Python first, whether its environment is activated or not: its ninja has to be
    found, and for another one DeepSpeed's operators count as changed and are compiled anew."""
    return os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])


def _kernel_tells_waits() -> bool:
    """Whether it counts for how long threads wait for a core (CONFIG_SCHED_INFO; gVisor, for one, doesn't)."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False


def _why_not_written(folder: Path) -> str | None:
    """Makes the folder; why nothing can be written there, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
