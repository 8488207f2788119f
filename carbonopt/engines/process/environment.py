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

from carbonopt.core.channel import GPU_UUIDS
from carbonopt.core.errors import BadInput
from carbonopt.core.values import Frozen
from carbonopt.engines.process.extensions import CACHE_HOME, cache_folder
from carbonopt.spec.launch_settings import Launch

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "OMP_NUM_THREADS"
_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PACKAGE_FOLDER = Path(__file__).parents[2]  # the folder of the package carbonopt
_FIRST_PORT = 20_000  # lower ports are the defaults of services of all kinds
# Variables that torchrun, accelerate launch and mpirun set for their own workers. A trial's ranks
# are not their workers: with these variables, ranks would wait for torchrun's store, train where
# accelerate was told to, or take MPI's rank for their own. All of accelerate's variables are
# removed, also those that a user has set: they choose device, precision and compiler, which the
# study chooses. Without ACCELERATE_USE_FSDP, ACCELERATE_USE_MEGATRON_LM and the like, nothing reads
# FSDP_* and MEGATRON_LM_*.
_OF_LAUNCHERS = re.compile(
    r"(TORCHELASTIC|ACCELERATE|OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI)_.*"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|MPI_LOCAL(NRANKS|RANKID)"
)

# Variables that make a tracker continue one certain run. Users set them to resume a run, and
# wandb's sweeps set them for the programs that they start. Every trial would overwrite that one
# run, and only the last trial would be left.
ONE_TRACKED_RUN = re.compile(
    r"WANDB_(RUN_ID|RESUME|SWEEP_ID|SWEEP_PARAM_PATH)|MLFLOW_RUN_ID|COMET_EXPERIMENT_KEY"
    r"|NEPTUNE_CUSTOM_RUN_ID"
)


class Ranks(Frozen):
    """The ranks of a trial that run on one machine."""

    world_size: int  # the trial's, on all its machines
    first: int = 0  # the first rank on this machine
    here: int  # number of ranks on this machine
    node: int = 0  # this machine's number among the trial's machines
    nodes: int = 1  # number of the trial's machines
    address: str = "127.0.0.1"  # address of the machine that has rank 0
    port: int  # a port of that machine on which nobody listens yet

    @classmethod
    def alone(cls, world_size: int) -> "Ranks":
        """Return the ranks of a trial that runs on this machine alone."""
        return cls(world_size=world_size, here=world_size, port=free_port())

    def can_take_over(self, started: "Ranks") -> bool:
        """Return whether these ranks can be processes that were started as the ranks `started`.

        On one machine the port may differ.
        """
        return self == started or (
            self.nodes == started.nodes == 1 and self.world_size == started.world_size
        )

    @property
    def environments(self) -> list[dict[str, str]]:
        """The environment variables of torch.distributed for each rank."""
        shared = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "WORLD_SIZE": str(self.world_size),
        }
        return [
            {**shared, "RANK": str(self.first + each), "LOCAL_RANK": str(each)}
            for each in range(self.here)
        ]


def of_launcher(ranks: Ranks) -> dict[str, str]:
    """Return the variables from which torchrun takes its options' defaults on several machines.

    The same torchrun command then works on one machine and on each of several.
    """
    if ranks.nodes == 1:
        return {}
    given = {
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
        "NNODES": str(ranks.nodes),
    }
    given |= {"NODE_RANK": str(ranks.node), "NPROC_PER_NODE": str(ranks.here)}
    return {f"PET_{name}": value for name, value in given.items()}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port outside the range from which the system takes ports for connections.

    Ranks that were started ahead listen on it much later. Where no such port is found from 20,000
    on, any port that is free now is returned.
    """
    below = range(_FIRST_PORT, int(_PORTS_OF_CONNECTIONS.read_text().split()[0]))
    for port in random.SystemRandom().sample(below, min(len(below), 100)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_environment(base: Mapping[str, str] = os.environ) -> None:
    """Raise BadInput, with advice, for environment variables that would make every trial fail."""
    threads = base.get(_THREADS, "")
    # OpenMP also accepts a list, with one number for each level of nesting, but accelerate reads
    # the value as one number.
    if threads and (not re.fullmatch(r"\s*[0-9]+\s*", threads) or int(threads) == 0):
        advice = (
            f"export {_THREADS}=N, or unset {_THREADS} for this machine's cores divided by the"
            " ranks"
        )
        raise BadInput(
            f"{_THREADS} must be one whole number above 0, but is {threads!r} in the environment;"
            f" {advice}."
        )
    cache = base.get(_COMPILE_CACHE)
    if cache and (reason := _why_not_written(Path(cache))) is not None:
        is_none = (
            f"but is {cache!r} in the environment ({reason}); export another one, or unset"
            f" {_COMPILE_CACHE}"
        )
        raise BadInput(
            f"{_COMPILE_CACHE} must be a folder that can be made and written, {is_none}."
        )


def work_environment(
    launch: Launch, gpu_uuids: Sequence[str], base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment that all ranks share, in which only the launch's devices are visible.

    The user's variables are passed on, except those that launchers set (torchrun, accelerate, MPI)
    and those that name one run of a tracker. The user's own values are kept for OMP_NUM_THREADS,
    TORCHINDUCTOR_CACHE_DIR, GOMP_SPINCOUNT, OMP_WAIT_POLICY and glibc's MALLOC_*; the first two, if
    empty, count as not set. A relative XDG_CACHE_HOME counts as not set, too.

    Args:
        launch: the launch on this machine.
        gpu_uuids: the UUIDs of `launch.gpus`, in that order. Every rank compares them with the GPU
            that CUDA gave it, so that the GPUs that NVML measures are those that train.
        base: the user's environment.
    """
    unset = {
        name for name in base if _OF_LAUNCHERS.fullmatch(name) or ONE_TRACKED_RUN.fullmatch(name)
    }
    unset |= {name for name in (_THREADS, _COMPILE_CACHE) if not base.get(name)}
    if not Path(base.get(CACHE_HOME, "")).is_absolute():  # libraries would take a relative one
        unset.add(CACHE_HOME)
    environment = {name: value for name, value in base.items() if name not in unset}
    # GPUs are given by index, since DeepSpeed 0.19.8 dies on a UUID here, and in the order of the
    # bus, in which NVML and nvidia-smi count.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment[VISIBLE_DEVICES] = ",".join(map(str, launch.gpus))
    environment[GPU_UUIDS] = ",".join(gpu_uuids)
    environment["PATH"] = programs_path(base)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # The products of torch.compile are kept for later trials and studies. A user without a home
    # keeps torch's default, a folder in /tmp, since torch makes its folder when it is imported, and
    # dies where it can't.
    cache = cache_folder(environment) / "torchinductor"
    if (
        _COMPILE_CACHE not in environment
        and cache.is_absolute()
        and _why_not_written(cache) is None
    ):
        environment[_COMPILE_CACHE] = str(cache)
    environment["PYTHONUNBUFFERED"] = "1"
    if not launch.gpus:
        environment["DS_ACCELERATOR"] = "cpu"
        # GOMP_SPINCOUNT is how often OpenMP's threads look for work before they sleep. Waking
        # threads takes a quarter of the quickstart's step. Threads that look for long take the core
        # from a working process, where another process needs one; train.cores notices that, if the
        # kernel counts the waits.
        if "OMP_WAIT_POLICY" not in environment:
            environment.setdefault("GOMP_SPINCOUNT", "30000" if _kernel_tells_waits() else "1000")
        # By default glibc returns freed memory to the system, and the next step's activations fault
        # it in again, page by page.
        for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            environment.setdefault(name, str(2**40))  # bytes: it keeps all
    environment.setdefault(_THREADS, str(max(1, len(os.sched_getaffinity(0)) // launch.world_size)))
    if ARCH_LIST in environment:
        # DeepSpeed 0.19.8 parses the part after the dot as a number and dies on "9.0a".
        environment[ARCH_LIST] = re.sub(r"(\d+\.\d+)[a-z]+", r"\1", environment[ARCH_LIST])
    return environment


def finds_script_lines(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment in which any Python finds carbonopt, for the lines of a script.

    A script may run in an environment of its own that has no carbonopt; `carbonopt.script` needs no
    other package. `folder` gets a link to this package alone, since other libraries of this Python
    would replace the script's own. On PYTHONPATH it comes after the user's entries.
    """
    link = folder / "carbonopt"
    if not link.exists():
        link.symlink_to(PACKAGE_FOLDER)
    entries = [environment.get("PYTHONPATH", ""), str(folder)]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, entries))}


def programs_path(base: Mapping[str, str] = os.environ) -> str:
    """Return PATH with the folder of this Python first, in which its ninja is found.

    Its environment need not be activated. With another ninja, DeepSpeed's operators count as
    changed and are compiled again.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])


def _kernel_tells_waits() -> bool:
    """Return whether the kernel counts for how long threads wait for a core.

    It does with CONFIG_SCHED_INFO; gVisor, for one, doesn't.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[0]) > 0
    except (OSError, ValueError, IndexError):
        return False


def _why_not_written(folder: Path) -> str | None:
    """Make a folder and return why nothing can be written there; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
