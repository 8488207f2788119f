"""The part `launch` of a study file: where trials run, one class for each kind."""

import math
import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
)

from carbonopt.core.errors import shortened
from carbonopt.spec.base_settings import Name, Settings
from carbonopt.spec.hostfile_format import MOST_HOSTS, Host

_MOST_AT_ONCE = 1_000_000


def _trials_at_once(given: Any) -> Any:
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if given != "auto" and not (is_number and 1 <= given <= _MOST_AT_ONCE):
        must = f"must be auto or a whole number from 1 to {_MOST_AT_ONCE:,}"
        raise ValueError(f"{must}, but got {shortened(given)}")
    return given


# The most trials that several workers run at once. Concurrent proposals rest on fewer observations
# and cost more energy: "auto" lets 2 + finished ÷ 6 trials run (see `analysis.concurrency`).
MaxConcurrentTrials = Annotated[
    Literal["auto"] | int,
    BeforeValidator(
        _trials_at_once,
        json_schema_input_type=Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST_AT_ONCE)],
    ),
]


_CLOCK = r"([0-9]{1,6}):([0-5]?[0-9]):([0-5]?[0-9])"  # HH:MM:SS


def _seconds(given: Any) -> Any:
    """Return the seconds of a number or of a text HH:MM:SS.

    Any other value is returned unchanged, and pydantic refuses it.
    """
    if isinstance(given, str) and (parts := re.fullmatch(_CLOCK, given)):
        hours, minutes, seconds = map(int, parts.groups())
        return 3600.0 * hours + 60.0 * minutes + seconds
    if isinstance(given, str):
        raise ValueError(
            f"must be seconds or HH:MM:SS, such as 02:30:00, but got {shortened(given)}"
        )
    return given


TimeLimit = Annotated[
    float,
    BeforeValidator(
        _seconds,
        json_schema_input_type=Annotated[float, Field(gt=0, le=1e8)]
        | Annotated[str, Field(pattern=f"^{_CLOCK}$")],
    ),
    Field(gt=0, le=1e8),
]


class _Training(Settings):
    """A launch whose trials train, with one rank for each GPU, or on the CPU without GPUs.

    Several trials run at once, each in a slot of its own, where there are GPUs or workers for them.
    """

    # trials train a workload; False: nothing runs and nothing is spent
    trains: ClassVar[bool] = True
    # trials run on the devices of this machine that the launch names
    is_local: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ()  # files that trials read beside those of the workload

    timeout_s: float = Field(default=900.0, gt=0)
    """A trial that makes no progress for this long is stopped."""

    trial_time_limit_s: TimeLimit | None = None
    """A trial that takes longer than this in total is stopped (`timeout`): seconds, or
    `"HH:MM:SS"`."""

    warm_start: bool = True
    """Forks trials from a process that has already imported everything."""

    max_concurrent_trials: MaxConcurrentTrials = "auto"
    """The most trials that [several workers](workers.md#what-speed-costs) run at once: a number, or
    `auto`: few, to save energy."""

    @property
    def slots_of_node(self) -> int:
        """The number of trials that run at once on each machine of a launch over several."""
        return 1


class _Shared(_Training):
    """A launch on machines whose devices several trials may share."""

    gpus_per_trial: int | None = Field(default=None, ge=1)
    """GPUs of one trial; must divide the number of `gpus`. [Trials run side by
    side](workers.md#on-one-machine). Left out: a trial has all."""

    cpu_ranks: int = Field(default=1, ge=1, le=64)
    """Ranks of a trial on each machine, with `gpus: []`."""


class LocalLaunch(_Shared):
    """Trials on this machine."""

    is_local: ClassVar[bool] = True

    kind: Literal["local"] = "local"
    """The place where trials run. `local`: this machine. `slurm`: [jobs](workers.md#on-slurm).
    `hostfile`: [machines](workers.md#trials-over-several-machines) that ssh reaches. `replay`: a
    table of recorded runs."""

    gpus: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """GPU numbers as nvidia-smi shows them. A trial has a rank on each of its GPUs: all of these,
    or `gpus_per_trial` of them. `[]`: the CPU."""

    workers: int = Field(default=1, ge=1, le=64)
    """Trials that run side by side with `gpus: []`, each on its share of the cores."""

    def violations(self) -> dict[str, bool]:
        return {
            f"gpus must differ from each other, but got {shortened(list(self.gpus))}": (
                len(set(self.gpus)) < len(self.gpus)
            ),
            "cpu_ranks goes with gpus: [] only": bool(self.gpus) and self.cpu_ranks > 1,
            "workers goes with gpus: [] only; with GPUs give gpus_per_trial": (
                bool(self.gpus) and self.workers > 1
            ),
            "gpus_per_trial needs GPUs, but launch.gpus is []": (
                not self.gpus and self.gpus_per_trial is not None
            ),
            f"gpus_per_trial must divide the number of gpus, but got {self.gpus_per_trial} and"
            f" {len(self.gpus)}": bool(
                self.gpus and self.gpus_per_trial and len(self.gpus) % self.gpus_per_trial
            ),
        }

    @property
    def world_size(self) -> int:
        """The number of ranks of a trial."""
        return self.gpus_per_trial or len(self.gpus) or self.cpu_ranks

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """The largest number of ranks that a trial may have on each of its machines."""
        return (self.world_size,)

    @property
    def slots(self) -> int:
        """The number of trials that one command runs at once."""
        return len(self.gpus) // self.world_size if self.gpus else self.workers

    @property
    def side_by_side(self) -> int:
        """The number of trials of the study that run at once, as far as the study file says."""
        return self.slots

    def of_slot(self, slot: int) -> "LocalLaunch":
        """Return the launch of one slot's trials, as if there were no other slots."""
        gpus = self.gpus[slot * self.world_size : (slot + 1) * self.world_size]
        return self.model_copy(update={"gpus": gpus, "gpus_per_trial": None, "workers": 1})


_SBATCH_TIME = r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}"


def _minutes(text: Any) -> int:
    """Return the minutes of a time as sbatch takes it, rounded up.

    sbatch takes minutes, minutes:seconds, hours:minutes:seconds and days-hours[:minutes[:seconds]].
    """
    days, dash, within_day = str(text).rpartition("-")
    parts = within_day.split(":")
    ways = (
        {1: ("h",), 2: ("h", "m"), 3: ("h", "m", "s")}
        if dash
        else {1: ("m",), 2: ("m", "s"), 3: ("h", "m", "s")}
    )
    if not re.fullmatch(_SBATCH_TIME, str(text)):
        raise ValueError(
            f"must be a time as sbatch takes it, such as 08:00:00, but got {shortened(text)}"
        )
    in_minutes = {"h": 60.0, "m": 1.0, "s": 1 / 60}
    minutes = sum(
        in_minutes[unit] * int(part) for unit, part in zip(ways[len(parts)], parts, strict=True)
    )
    return math.ceil(minutes + 24 * 60 * int(days or 0))


class SlurmLaunch(_Shared):
    """Trials in jobs that carbonopt submits to Slurm.

    Where a job runs already, the trials run in its allocation.
    """

    kind: Literal["slurm"]
    nodes: int = Field(default=1, ge=1, le=1000)
    """Nodes of a job."""

    nodes_per_trial: int | None = Field(default=None, ge=1)
    """Nodes of one trial; must divide `nodes`. Trials run side by side. Left out: [a
    trial](workers.md#trials-over-several-machines) has all."""

    gpus_per_node: int = Field(default=1, ge=0, le=64)
    """GPUs of a node; `0`: the CPU."""

    cpus_per_node: int | None = Field(default=None, ge=1)
    """Cores of a node. Left out: what the partition gives."""

    memory_gib: float | None = Field(default=None, ge=0.01, le=1e6)
    """Memory of a node. Left out: what the partition gives."""

    partition: Name | None = None
    """The `--partition` of sbatch."""

    account: Name | None = None
    """The `--account` of sbatch."""

    qos: Name | None = None
    """The `--qos` of sbatch."""

    constraint: Name | None = None
    """The `--constraint` of sbatch."""

    time: Annotated[
        int,
        BeforeValidator(
            _minutes,
            json_schema_input_type=Annotated[int, Field(ge=1, le=525_600)]
            | Annotated[str, Field(pattern=f"^{_SBATCH_TIME}$")],
        ),
    ] = Field(default=60, ge=1, le=525_600)
    """A job's time limit: minutes, or as sbatch takes it, such as `"08:00:00"`."""

    exclusive: bool = False
    """Requests whole nodes."""

    workers: int = Field(default=1, ge=1, le=1000)
    """Jobs that work on the study at the same time."""

    setup: tuple[Name, ...] = ()
    """Shell lines that run before the command, such as `module load cuda`."""

    def violations(self) -> dict[str, bool]:
        gpus, each = self.gpus_per_node, self.gpus_per_trial
        return {
            f"nodes_per_trial must divide nodes, but got {self.nodes_per_trial} and {self.nodes}": (
                bool(self.nodes_per_trial and self.nodes % self.nodes_per_trial)
            ),
            "gpus_per_trial is for trials within one node; give nodes_per_trial: 1 beside it, or"
            " leave it out": bool(each and (self.nodes_per_trial or self.nodes) > 1),
            "cpu_ranks goes with gpus_per_node: 0 only": gpus > 0 and self.cpu_ranks > 1,
            "gpus_per_trial needs GPUs, but gpus_per_node is 0": gpus == 0 and each is not None,
            f"gpus_per_trial must divide gpus_per_node, but got {each} and {gpus}": bool(
                each and gpus % each
            ),
        }

    @property
    def warned_s(self) -> int:
        """Seconds before its limit at which a job is told to end what runs and to store it.

        It is half of a short job's time.
        """
        return min(300, 30 * self.time)

    @property
    def usable_s(self) -> int:
        """Seconds of a job until it is told to end (see `warned_s`)."""
        return 60 * self.time - self.warned_s

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of a node, counted from 0.

        Which GPUs these are, Slurm says in the job.
        """
        return tuple(range(self.gpus_per_node))

    @property
    def world_size(self) -> int:
        """The number of ranks of a trial."""
        return sum(self.ranks_of_nodes)

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """The largest number of ranks that a trial may have on each of its nodes."""
        return (self.gpus_per_trial or self.gpus_per_node or self.cpu_ranks,) * (
            self.nodes_per_trial or self.nodes
        )

    @property
    def slots(self) -> int:
        """The number of trials that run at once in a job."""
        return self.nodes // (self.nodes_per_trial or self.nodes) * self.slots_of_node

    @property
    def slots_of_node(self) -> int:
        """The number of trials that run at once on one node."""
        return self.gpus_per_node // self.gpus_per_trial if self.gpus_per_trial else 1

    @property
    def side_by_side(self) -> int:
        """The number of trials of the study that run at once."""
        return self.slots * self.workers

    def on_this_machine(self, gpus: tuple[int, ...]) -> LocalLaunch:
        """Return the launch of a job's trials on one of its nodes, which has these GPUs."""
        kept = {name: getattr(self, name) for name in _Shared.model_fields}
        return LocalLaunch(**kept, gpus=gpus)


class HostfileLaunch(_Training):
    """Trials over the machines of a hostfile, which are reached by ssh."""

    kind: Literal["hostfile"]
    hostfile: Name
    """A file with a line `HOST slots=N` for each
    [machine](workers.md#trials-over-several-machines)."""

    # the hosts of the hostfile, read with the study file
    hosts: tuple[Host, ...] = Field(min_length=1, max_length=MOST_HOSTS)
    device: Literal["gpu", "cpu"] = "gpu"
    """The kind of slots: `gpu`, or `cpu` for ranks on the CPU."""

    nodes_per_trial: int | None = Field(default=None, ge=1)
    """Machines of one trial; must divide their number. Trials run side by side. Left out: a trial
    has all."""

    def violations(self) -> dict[str, bool]:
        each, slots = self.nodes_per_trial or len(self.hosts), [host.slots for host in self.hosts]
        groups = {tuple(slots[first : first + each]) for first in range(0, len(slots), each)}
        return {
            f"nodes_per_trial must divide the number of hosts, but got {each} and {len(slots)}": (
                len(slots) % each != 0
            ),
            f"the hosts of all trials must have the same slots, but have {slots}": len(groups) > 1,
        }

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of the host that has most, counted from 0.

        It is empty for trials on CPUs.
        """
        return tuple(range(max(self.ranks_of_nodes))) if self.device == "gpu" else ()

    @property
    def ranks_of_nodes(self) -> tuple[int, ...]:
        """The largest number of ranks that a trial may have on each of its machines."""
        return tuple(host.slots for host in self.hosts[: self.nodes_per_trial])

    @property
    def world_size(self) -> int:
        """The number of ranks of a trial."""
        return sum(self.ranks_of_nodes)

    @property
    def slots(self) -> int:
        """The number of trials that run at once."""
        return len(self.hosts) // len(self.ranks_of_nodes)

    @property
    def side_by_side(self) -> int:
        """The number of trials of the study that run at once."""
        return self.slots

    def on_host(self, number: int) -> LocalLaunch:
        """Return the launch of trials on one of the hosts alone."""
        kept, slots = (
            {name: getattr(self, name) for name in _Training.model_fields},
            self.hosts[number].slots,
        )
        if self.device == "cpu":
            return LocalLaunch(**kept, gpus=(), cpu_ranks=slots)
        return LocalLaunch(**kept, gpus=tuple(range(slots)))


class ReplayLaunch(Settings):
    """Trials from a table of recorded runs, which has one JSON object a line.

    The class has the properties of `LocalLaunch`.
    """

    trains: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    gpus: ClassVar[tuple[int, ...]] = ()
    world_size: ClassVar[int] = 1
    ranks_of_nodes: ClassVar[tuple[int, ...]] = (1,)
    slots: ClassVar[int] = 1
    slots_of_node: ClassVar[int] = 1
    side_by_side: ClassVar[int] = 1
    timeout_s: ClassVar[float] = math.inf
    trial_time_limit_s: ClassVar[None] = None
    warm_start: ClassVar[bool] = False

    kind: Literal["replay"]
    table: Name
    """The table of recorded runs; with `kind: replay` only."""

    max_concurrent_trials: MaxConcurrentTrials = "auto"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.table,)


Launch = LocalLaunch | SlurmLaunch | HostfileLaunch | ReplayLaunch
LAUNCHES: dict[str, type[Launch]] = {
    get_args(cls.model_fields["kind"].annotation)[0]: cls for cls in get_args(Launch)
}
