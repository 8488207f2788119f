"""Trials over several machines: the study's side of the agents that work on them (see `carbonopt.engines.agent`)."""

import json
import math
import os
import select
import subprocess
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import carbonopt
from carbonopt.core import errors
from carbonopt.core.config import HostfileLaunch, SlurmLaunch, StudyConfig
from carbonopt.core.errors import BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.events import SPOKEN, Event, Exited
from carbonopt.core.format import count_text
from carbonopt.core.space import SearchSpace
from carbonopt.core.study import Hardware, IdlePower
from carbonopt.core.trial import Node, Phase, Prepared, StopReason, TrialSpec
from carbonopt.energy.meter import Meter, NodeMeters, Reading
from carbonopt.engines.agent import ALIVE_EVERY_S, BEGINS
from carbonopt.engines.base import Engine, EngineObserver, LendMeter, own_meter, was_interrupted
from carbonopt.engines.local import GPU_POWER_W, check_files
from carbonopt.engines.process.environment import Ranks
from carbonopt.engines.process.guard import GRACE_S
from carbonopt.engines.process.processes import LOG_TAIL_LINES, run_module, said_since
from carbonopt.storage.paths import StudyPaths

_TICK_S = 0.1
_END_S = 10.0  # that an agent, or the program that has started it, takes to end
_GREETING_S = 120.0  # until an agent says that it has begun: ssh, a shell's start-up files and imports
_ANSWER_S = 60.0  # to most of what it is asked; a trial's end may take it 20
_INTERRUPTED_S = 15.0  # when the study is asked to end meanwhile
_PATIENT = ("begin", "prepare", "await_free")  # for which it takes as long as it takes


class RemoteNode:
    """An agent that `program` starts on a machine, until it is closed. `log` takes what it prints, `warn` what it warns
    of."""

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        warn: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self._log, self._warn, self._interrupted = name, log, warn, interrupted
        with log.open("ab") as printed:
            self._log_begins = printed.tell()
            self._process = subprocess.Popen(
                list(program),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # a Ctrl-C reaches the study alone
            )
        self._unread, self._has_answered, self._said_before = b"", False, ""
        self._writing, self._ended = threading.Lock(), threading.Event()

    def ask(self, what: str, **given: Any) -> Any:
        """What the agent answers. Raises what it raises; CarbonoptError if it is gone, StudyInterrupted if the study is
        asked to end meanwhile."""
        self.send(what, **given)
        return self.answer(_limit_s(what))

    def send(self, what: str, **given: Any) -> None:
        """Asks without waiting; `answer` must follow."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._writing:  # `answer` says that it is gone
            self._process.stdin.write(json.dumps({"do": what, "with": given}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float | None) -> Any:
        """Of the oldest `send` that had none. Raises CarbonoptError if none comes within `limit_s`."""
        while not self._has_answered and (line := self._line(limit_s)) != BEGINS:
            self._said_before = line.decode(errors="replace").strip() or self._said_before
        if not self._has_answered:
            self._has_answered = True
            threading.Thread(target=self._keep_alive, daemon=True).start()
        answer = json.loads(self._line(limit_s))
        for text in answer["warnings"]:
            self._warn(f"{self.name}: {text}")
        if "raised" in answer:
            raise self._as_told(answer["raised"], answer["text"])
        return answer["result"]

    def _as_told(self, kind: str, text: str) -> CarbonoptError:
        error: type[CarbonoptError] = getattr(errors, kind, CarbonoptError)
        return error(text) if error is StudyInterrupted else error(f"{self.name}: {text}")

    def _keep_alive(self) -> None:
        """Tells the agent now and then that the study lives."""
        while not self._ended.wait(ALIVE_EVERY_S):
            self.send("alive")

    def _line(self, limit_s: float | None) -> bytes:
        assert self._process.stdout is not None
        asked_to_end, source = False, self._process.stdout.fileno()
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if select.select([source], [], [], _TICK_S)[0]:
                if not (data := os.read(source, 65536)):
                    raise self._lost()
                self._unread += data
            elif not asked_to_end and self._interrupted():
                self.send("interrupt")
                asked_to_end, deadline = True, min(deadline, time.monotonic() + _INTERRUPTED_S)
            elif time.monotonic() > deadline:
                self._kill()
                if asked_to_end:
                    raise StudyInterrupted("interrupted; the same command goes on with the study.")
                raise CarbonoptError(f"{self.name}: its agent doesn't answer for {limit_s:g} s (log: {self._log}).")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self) -> CarbonoptError:
        if was_interrupted(self._interrupted):  # who ends a job ends what has started the agent, too
            return StudyInterrupted("interrupted; the same command goes on with the study.")
        said = [line.strip() for line in said_since(self._log_begins, self._log).splitlines() if line.strip()]
        why = said[-1] if said else self._said_before or "it said nothing"
        log = f" (log: {self._log})" if self._has_answered else ""  # else the folder is gone again, with the refusal
        return CarbonoptError(f"{self.name}: its agent has ended: {why}{log}.")

    def close(self) -> None:
        """Ends the agent, in order if it lives. Again it does nothing."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._interrupted = lambda: False
        if self._has_answered:
            self.send("close")
            with suppress(CarbonoptError):  # it is gone, or hangs
                self.answer(_END_S)
        self._ended.set()
        with suppress(BrokenPipeError), self._writing:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S if self._has_answered else 0)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        """What has started the agent, which loses its lifeline by that."""
        self._process.kill()
        self._process.wait()


class _RemoteMeter:
    """The meter of one machine, which its agent has. Implements `Meter`."""

    def __init__(self, remote: RemoteNode, told: dict[str, Any]) -> None:
        self._remote = remote
        self.energy_source, self.models = told["energy_source"], told["models"]
        self.idle = tuple(IdlePower.model_validate(idle) for idle in told["idle"])

    def enter(self, phase: Phase) -> None:
        self._remote.ask("enter", phase=phase)

    def use(self, gpus: int) -> None:
        self._remote.ask("use", gpus=gpus)

    def running(self, phase: Phase) -> Reading:
        return Reading.model_validate(self._remote.ask("running", phase=phase))

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        taken = self._remote.ask("take", phases=phases)
        return {Phase(phase): Reading.model_validate(reading) for phase, reading in taken.items()}

    def outer(self) -> Reading:
        return Reading.model_validate(self._remote.ask("outer"))

    def account(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        told = self._remote.ask("account", phases=phases)
        parts = {Phase(phase): Reading.model_validate(part) for phase, part in told["parts"].items()}
        return parts, Reading.model_validate(told["outer"])

    def close(self) -> None:
        self._remote.ask("close_meter")


class NodesTrial:
    """A trial whose ranks are on several machines, the first of which has rank 0. Implements `RunningTrial`."""

    def __init__(self, logs: Mapping[RemoteNode, Path]) -> None:
        self._logs, self._remotes = logs, (remotes := list(logs))
        self._first, self._silent = remotes[0], list(remotes[1:])  # of the latter those that have not ended
        self._first_ended: Exited | None = None
        self._failure: tuple[RemoteNode, Exited] | None = None
        self._ends_at_s = 0.0  # after a failure, by the monotonic clock

    def receive(self, timeout_s: float) -> Event | None:
        deadline = time.monotonic() + timeout_s
        while True:
            for remote in tuple(self._silent):
                if isinstance(event := self._event(remote, 0.0), Exited):
                    self._silent.remove(remote)
                    self._note_failure(remote, event)
            if self._first_ended is None:
                left_s = min(_TICK_S if self._failure else timeout_s, max(0.0, deadline - time.monotonic()))
                event = self._event(self._first, left_s)
                if event is not None and not isinstance(event, Exited):
                    return event
                if event is not None:
                    self._first_ended = event
                    self._note_failure(self._first, event)
            elif self._silent and not self._failure:
                time.sleep(min(_TICK_S, max(0.0, deadline - time.monotonic())))
            if self._has_ended():
                return self._failure[1] if self._failure else self._first_ended
            if time.monotonic() >= deadline:
                return None

    def _has_ended(self) -> bool:
        """All its ranks; or some have failed, and rank 0 has had the time to say why."""
        if self._failure:
            return self._first_ended is not None or time.monotonic() > self._ends_at_s
        return self._first_ended is not None and not self._silent

    def _note_failure(self, remote: RemoteNode, event: Exited) -> None:
        if event.code != 0 and self._failure is None:
            self._failure, self._ends_at_s = (remote, event), time.monotonic() + GRACE_S

    @property
    def log(self) -> Path:
        """Of the machine whose ranks failed, or of rank 0's."""
        return self._logs[self._failure[0] if self._failure else self._first]

    @staticmethod
    def _event(remote: RemoteNode, timeout_s: float) -> Event | None:
        if (told := remote.ask("receive", timeout_s=timeout_s)) is None:
            return None
        kind: Any = SPOKEN.get(told.pop("event"), Exited)
        return kind.model_validate(told)  # type: ignore[no-any-return]

    def answer(self, stop: StopReason | None = None) -> None:
        self._first.ask("answer", stop=stop)

    def end(self) -> None:
        together(self._remotes, "end")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        remote = self._failure[0] if self._failure else self._first
        tail: str = remote.ask("log_tail", lines=lines)
        return tail


def _limit_s(what: str) -> float | None:
    """How long an agent may take to answer; None: as long as it does."""
    return None if what in _PATIENT else _ANSWER_S


def together(remotes: Sequence[RemoteNode], what: str, given: Sequence[dict[str, Any]] | None = None) -> list[Any]:
    """Asks all at once, each with its own of `given`, and returns their answers. Raises the first error when all have
    answered."""
    for remote, own in zip(remotes, given or [{}] * len(remotes), strict=True):
        remote.send(what, **own)
    answers, raised = [], None
    for remote in remotes:
        try:
            answers.append(remote.answer(_limit_s(what)))
        except CarbonoptError as error:
            raised = raised or error
    if raised is not None:
        raise raised
    return answers


class NodesEngine(Engine):
    """Owns an agent on each of several machines, which owns that machine's ranks and meter. This process starts no rank
    and measures nothing; what it takes itself is in the reading of the machine that it runs on, if that has an agent.

    Where the launch has several slots, the engine has one of them: its machines, or a slot of one machine."""

    def __init__(self, config: StudyConfig, slot: int = 0) -> None:
        launch = config.launch
        assert isinstance(launch, SlurmLaunch | HostfileLaunch) and config.workload is not None
        self._config, self._workload, self._launch = config, config.workload, launch
        self._rooms, (group, self._slot_of_node) = launch.ranks_of_nodes, divmod(slot, launch.slots_of_node)
        self._numbers = range(group * len(self._rooms), (group + 1) * len(self._rooms))  # of its machines, of them all
        self.max_power_w = GPU_POWER_W * launch.world_size * launch.slots if launch.gpus else None
        what = count_text(launch.world_size, "GPU" if launch.gpus else "rank")
        self.description = f"{what}{'' if launch.gpus else ' on CPUs'} of {count_text(len(self._rooms), 'machine')}"
        if launch.slots > 1:
            self.description += f"; {launch.slots} trials side by side"
        self._begun, self._remotes = ExitStack(), list[RemoteNode]()
        self._announced: int | None = None  # of the next trial: its world size, where its ranks know who they are
        self._prepared_ahead = False  # its processes have been started

    @abstractmethod
    def _programs(self) -> list[tuple[str, list[str]]]:
        """The name of each machine of the launch, in its order, and the command that starts an agent there. Raises
        BadInput for machines that can't be had."""

    @abstractmethod
    def _config_of(self, number: int) -> StudyConfig:
        """The study as it is on one machine alone, whose slot this engine's agent has."""

    def _environment(self) -> Mapping[str, str]:
        """Of those commands."""
        return os.environ

    def _passed(self) -> dict[str, str]:
        """Of this process's environment what the agents have not."""
        return {}

    def check(self, space: SearchSpace) -> None:
        check_files(self._workload)

    def begin(
        self,
        paths: StudyPaths,
        fingerprint: str,
        observer: EngineObserver,
        interrupted: Callable[[], bool],
        lend: LendMeter = own_meter,
        *,
        prepares: bool = True,
    ) -> None:
        hold = self._begun.enter_context
        programs = self._programs()
        for number in self._numbers:
            name, program = programs[number]
            if self._launch.slots_of_node > 1:
                name = f"{name}-{self._slot_of_node}"
            log = StudyPaths(paths.root, name).worker_log
            remote = RemoteNode(name, program, self._environment(), log, observer.warn, interrupted)
            self._remotes.append(hold(closing(remote)))
        hosts = self._greeted()
        for remote, host in zip(self._remotes, hosts, strict=True):
            if host["version"] != carbonopt.__version__:
                rule = f"all machines must have the same carbonopt, {carbonopt.__version__} as here"
                raise BadInput(f"{rule}, but {remote.name} has {host['version']}; install it there.")
        self._address = hosts[0]["address"]
        with _marked(paths) as mark:
            shared = {"world_size": self._launch.world_size, "root": str(paths.root.resolve()), "mark": mark}
            shared |= {"fingerprint": fingerprint, "address": self._address}
            given = []
            for number, remote in zip(self._numbers, self._remotes, strict=True):
                own = {"config": self._config_of(number).model_dump(mode="json"), "name": remote.name}
                is_first = remote is self._remotes[0]
                given.append({**shared, **own, "slot": self._slot_of_node, "prepares": prepares and is_first})
            told = together(self._remotes, "begin", given)
        observer.preparing(any(one["prepares_data"] for one in told))
        nodes = [
            Node(name=programs[number][0], devices=one["devices"])
            for number, one in zip(self._numbers, told, strict=True)
        ]
        self.hardware = _of_all([Hardware.model_validate(one["hardware"]) for one in told], observer)

        def opened() -> Meter:
            meters = [_RemoteMeter(remote, one) for remote, one in zip(self._remotes, told, strict=True)]
            return NodeMeters(dict(zip(nodes, meters, strict=True)), self._rooms)

        self.meter = hold(closing(lend(opened)))

    def _greeted(self) -> list[dict[str, Any]]:
        """What each agent says of its machine. Raises BadInput for those that couldn't be started."""
        hosts, faults = [], []
        for remote in self._remotes:
            remote.send("hello", environment=self._passed())
        for remote in self._remotes:
            try:
                hosts.append(remote.answer(_GREETING_S))
            except StudyInterrupted:
                raise
            except CarbonoptError as error:
                faults.append(str(error).removesuffix("."))
        if faults:
            raise BadInput(f"each machine of the launch must run an agent, but {'; '.join(faults)}.")
        return hosts

    def prepare(self, interrupted: Callable[[], bool]) -> Prepared | None:
        self._announce(self._launch.world_size)
        first, *others = self._remotes
        prepared = first.ask("prepare")
        together(others, "prepare")
        self._prepared_ahead = True
        return None if prepared is None else Prepared.model_validate(prepared)

    def await_free(self, interrupted: Callable[[], bool]) -> str | None:
        told = zip(self._remotes, together(self._remotes, "await_free"), strict=True)
        return "; ".join(f"{remote.name}: {text}" for remote, text in told if text) or None

    def start(self, spec: TrialSpec, log: Path) -> NodesTrial:
        world_size = spec.params.world_size
        if self._announced != world_size:
            self._announce(world_size)
        self._announced = None
        having = self._having_ranks(world_size)
        if spec.program is not None and not spec.program.on_each_machine:
            having = having[:1]
        logs = [log, *(log.with_name(f"{log.stem}-{remote.name}{log.suffix}") for remote in having[1:])]
        given = [{"spec": spec.model_dump(mode="json"), "log": str(own)} for own in logs]
        together(having, "start", given)
        self._prepared_ahead, self._last_world_size = False, world_size
        return NodesTrial(dict(zip(having, logs, strict=True)))

    def prepare_next(self) -> None:
        if self._prepared_ahead or not self._launch.gpus:
            return
        self._announce(self._last_world_size)
        together(self._having_ranks(self._last_world_size), "prepare_next")
        self._prepared_ahead = True

    def _having_ranks(self, world_size: int) -> list[RemoteNode]:
        """The machines that a trial's ranks fill, in their order."""
        befores = [sum(self._rooms[:number]) for number in range(len(self._rooms))]
        return [remote for remote, before in zip(self._remotes, befores, strict=True) if before < world_size]

    def _announce(self, world_size: int) -> None:
        """Tells each machine which of the next trial's ranks it has."""
        having, port, first = self._having_ranks(world_size), self._remotes[0].ask("free_port"), 0
        given = []
        for number, _ in enumerate(having):
            here = min(self._rooms[number], world_size - first)
            own = {"first": first, "here": here, "node": number, "nodes": len(having)}
            ranks = Ranks(world_size=world_size, address=self._address, port=port, **own)
            given.append({"ranks": ranks.model_dump()})
            first += here
        together(having, "ranks", given)
        self._announced = world_size

    def close(self) -> None:
        self._begun.close()


@contextmanager
def _marked(paths: StudyPaths) -> Iterator[str]:
    """A new file in the study's folder, by which other machines see that it is theirs, too."""
    mark = paths.root / f".seen-{uuid.uuid4().hex}.part"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def _of_all(machines: Sequence[Hardware], observer: EngineObserver) -> Hardware:
    """As one: what the first is, so many times."""
    first = machines[0]
    if any((machine.cpu, set(machine.gpus)) != (first.cpu, set(first.gpus)) for machine in machines):
        observer.warn("the machines differ in their CPU or GPUs; a trial waits for the slowest of its ranks.")
    memory_gib = [machine.gpu_memory_gib for machine in machines if machine.gpu_memory_gib is not None]
    gpus = tuple(name for machine in machines for name in machine.gpus)
    update = {"nodes": len(machines), "gpus": gpus, "gpu_memory_gib": min(memory_gib, default=None)}
    return first.model_copy(update=update)


def agent_program() -> list[str]:
    """The command of an agent, in this process's folder."""
    return run_module("carbonopt.engines.agent")
