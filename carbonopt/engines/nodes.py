"""Engine for trials over several machines: the study's side of the agents that run there.

The connections to the agents are `carbonopt.engines.remote_node`, the agents' side is
`carbonopt.engines.agent`.
"""

import os
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import carbonopt
from carbonopt.core.errors import BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.format import count_text
from carbonopt.core.trial import Node
from carbonopt.energy.meter import Meter
from carbonopt.energy.node_meters import NodeMeters
from carbonopt.engines.engine import (
    Engine,
    EngineObserver,
    MeterProvider,
    own_meter,
)
from carbonopt.engines.local import GPU_POWER_W, check_files
from carbonopt.engines.process.environment import Ranks
from carbonopt.engines.process.processes import run_module
from carbonopt.engines.remote_node import RemoteNode, together
from carbonopt.engines.remote_trial import NodesTrial, RemoteMeter
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.launch_settings import ReplayLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import Hardware
from carbonopt.spec.trial_spec import Prepared, TrialSpec
from carbonopt.storage.paths import StudyPaths

# Time for an agent to say that it has begun: ssh, a shell's start-up files and imports.
_GREETING_S = 120.0


class NodesEngine(Engine):
    """Engine that runs trials over several machines, with an agent on each.

    An agent owns its machine's ranks and meter. This process starts no rank and measures nothing;
    the energy that it uses itself is in the reading of the machine that it runs on, if that has an
    agent.

    Where the launch has several slots, the engine has one of them: a group of machines, or one slot
    of one machine.
    """

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        launch = config.launch
        assert not isinstance(launch, ReplayLaunch) and config.workload is not None
        self._config, self._workload, self._launch = config, config.workload, launch
        self._ranks_of_nodes = launch.ranks_of_nodes  # the most ranks on each of its machines
        machines = len(self._ranks_of_nodes)
        group, self._slot_of_node = divmod(slot, launch.slots_of_node)
        # Positions of this engine's machines among all machines of the launch.
        self._numbers = range(group * machines, (group + 1) * machines)
        self.max_power_w = GPU_POWER_W * launch.world_size * launch.slots if launch.gpus else None
        what = count_text(launch.world_size, "GPU" if launch.gpus else "rank")
        self.description = (
            f"{what}{'' if launch.gpus else ' on CPUs'} of {count_text(machines, 'machine')}"
        )
        if launch.slots > 1:
            self.description += f"; {launch.slots} trials side by side"
        self._to_close = ExitStack()  # what `begin` has opened
        self._remotes: list[RemoteNode] = []
        # World size of the next trial, if its ranks have been told their numbers.
        self._announced: int | None = None
        self._prepared_ahead = False  # whether the next trial's processes have been started

    @abstractmethod
    def _programs(self) -> list[tuple[str, list[str]]]:
        """Return each machine's name and the command that starts an agent there.

        The machines are in the launch's order. Raises BadInput for machines that are not available.
        """

    @abstractmethod
    def _config_of(self, number: int) -> StudyConfig:
        """Return the study's configuration on one machine alone, for the agent there."""

    def _environment(self) -> Mapping[str, str]:
        """Return the environment in which the agents are started."""
        return os.environ

    def _passed(self) -> dict[str, str]:
        """Return the variables of this process that agents do not inherit."""
        return {}

    def check(self, space: SearchSpace) -> None:
        check_files(self._workload)

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        meter_provider: MeterProvider = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        programs = self._programs()
        machines = [programs[number] for number in self._numbers]
        self._start_agents(machines, paths, observer, interrupted)
        hosts = self._greeted()
        self._check_versions(hosts)
        self._address = hosts[0]["address"]
        answers = self._begin_agents(paths, fingerprint, prepares=prepares)
        observer.preparing(any(answer["prepares_data"] for answer in answers))
        nodes = [
            Node(name=name, devices=answer["devices"])
            for (name, _), answer in zip(machines, answers, strict=True)
        ]
        self.hardware = _of_all(
            [Hardware.model_validate(answer["hardware"]) for answer in answers], observer
        )

        def opened() -> Meter:
            meters = [
                RemoteMeter(remote, answer)
                for remote, answer in zip(self._remotes, answers, strict=True)
            ]
            return NodeMeters(dict(zip(nodes, meters, strict=True)), self._ranks_of_nodes)

        self.meter = self._to_close.enter_context(closing(meter_provider(opened)))

    def _start_agents(
        self,
        machines: Sequence[tuple[str, list[str]]],
        paths: StudyPaths,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
    ) -> None:
        """Start an agent on each of this engine's machines (see `_programs`)."""
        for machine, program in machines:
            is_shared = self._launch.slots_of_node > 1
            name = f"{machine}-{self._slot_of_node}" if is_shared else machine
            log = StudyPaths(paths.root, name).worker_log
            remote = RemoteNode(name, program, self._environment(), log, observer.warn, interrupted)
            self._remotes.append(self._to_close.enter_context(closing(remote)))

    def _check_versions(self, hosts: Sequence[dict[str, Any]]) -> None:
        """Raise BadInput if a machine has another version of carbonopt."""
        for remote, host in zip(self._remotes, hosts, strict=True):
            if host["version"] != carbonopt.__version__:
                rule = f"all machines must have the same carbonopt, {carbonopt.__version__} as here"
                raise BadInput(
                    f"{rule}, but {remote.name} has {host['version']}; install it there."
                )

    def _begin_agents(
        self, paths: StudyPaths, fingerprint: str, *, prepares: bool
    ) -> list[dict[str, Any]]:
        """Have each agent begin its engine, and return their answers. The first one prepares."""
        with _marked(paths) as mark:
            shared = {
                "world_size": self._launch.world_size,
                "root": str(paths.root.resolve()),
                "mark": mark,
                "fingerprint": fingerprint,
                "address": self._address,
                "slot": self._slot_of_node,
            }
            requests = [
                {
                    **shared,
                    "config": self._config_of(number).model_dump(mode="json"),
                    "name": remote.name,
                    "prepares": prepares and remote is self._remotes[0],
                }
                for number, remote in zip(self._numbers, self._remotes, strict=True)
            ]
            return together(self._remotes, "begin", requests)

    def _greeted(self) -> list[dict[str, Any]]:
        """Return each agent's description of its machine.

        Raises BadInput if an agent couldn't be started.
        """
        hosts, failures = [], []
        for remote in self._remotes:
            remote.send("hello", environment=self._passed())
        for remote in self._remotes:
            try:
                hosts.append(remote.answer(_GREETING_S))
            except StudyInterrupted:
                raise
            except CarbonoptError as error:
                failures.append(str(error).removesuffix("."))
        if failures:
            raise BadInput(
                f"each machine of the launch must run an agent, but {'; '.join(failures)}."
            )
        return hosts

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        self._announce(self._launch.world_size)
        first, *others = self._remotes
        prepared = first.ask("prepare")
        together(others, "prepare")
        self._prepared_ahead = True
        return None if prepared is None else Prepared.model_validate(prepared)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        answers = zip(self._remotes, together(self._remotes, "await_free"), strict=True)
        return "; ".join(f"{remote.name}: {text}" for remote, text in answers if text) or None

    def start(self, spec: TrialSpec, log: Path) -> NodesTrial:
        world_size = spec.params.world_size
        if self._announced != world_size:
            self._announce(world_size)
        self._announced = None
        having = self._having_ranks(world_size)
        if spec.program is not None and not spec.program.on_each_machine:
            having = having[:1]
        logs = [
            log,
            *(log.with_name(f"{log.stem}-{remote.name}{log.suffix}") for remote in having[1:]),
        ]
        spec_json = spec.model_dump(mode="json")
        together(having, "start", [{"spec": spec_json, "log": str(path)} for path in logs])
        self._prepared_ahead, self._last_world_size = False, world_size
        return NodesTrial(dict(zip(having, logs, strict=True)))

    def prepare_next(self) -> None:
        if self._prepared_ahead or not self._launch.gpus:
            return
        self._announce(self._last_world_size)
        together(self._having_ranks(self._last_world_size), "prepare_next")
        self._prepared_ahead = True

    def drop_next(self) -> None:
        together(self._remotes, "drop_next")
        self._prepared_ahead = False

    def _having_ranks(self, world_size: int) -> list[RemoteNode]:
        """Return the machines that run a trial's ranks, in their order."""
        befores = [
            sum(self._ranks_of_nodes[:number]) for number in range(len(self._ranks_of_nodes))
        ]
        return [
            remote
            for remote, before in zip(self._remotes, befores, strict=True)
            if before < world_size
        ]

    def _announce(self, world_size: int) -> None:
        """Tell each machine which of the next trial's ranks it runs."""
        having, port, first = self._having_ranks(world_size), self._remotes[0].ask("free_port"), 0
        given = []
        for number, _ in enumerate(having):
            here = min(self._ranks_of_nodes[number], world_size - first)
            ranks = Ranks(
                world_size=world_size,
                address=self._address,
                port=port,
                first=first,
                here=here,
                node=number,
                nodes=len(having),
            )
            given.append({"ranks": ranks.model_dump()})
            first += here
        together(having, "ranks", given)
        self._announced = world_size

    def close(self) -> None:
        self._to_close.close()


@contextmanager
def _marked(paths: StudyPaths) -> Iterator[str]:
    """Make a temporary file in the study's folder and yield its name.

    Other machines look for it, to check that they share the folder.
    """
    mark = paths.root / f".seen-{uuid.uuid4().hex}.part"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def _of_all(machines: Sequence[Hardware], observer: EngineObserver) -> Hardware:
    """Describe several machines as one, like the first; warn if their CPUs or GPUs differ."""
    first = machines[0]
    if any(
        (machine.cpu, set(machine.gpus)) != (first.cpu, set(first.gpus)) for machine in machines
    ):
        observer.warn(
            "the machines differ in their CPU or GPUs; a trial waits for the slowest of its ranks."
        )
    memory_gib = [
        machine.gpu_memory_gib for machine in machines if machine.gpu_memory_gib is not None
    ]
    gpus = tuple(name for machine in machines for name in machine.gpus)
    update = {"nodes": len(machines), "gpus": gpus, "gpu_memory_gib": min(memory_gib, default=None)}
    return first.model_copy(update=update)


def agent_program() -> list[str]:
    """Return the command that starts an agent in this process's working folder."""
    return run_module("carbonopt.engines.agent")
