"""The agent: the process that works for a study on one of several machines.

    python -m carbonopt.engines.agent

It owns the ranks on its machine, the process that they are forked from, and the meter.

The study starts one agent on each machine, with ssh or srun (see `carbonopt.engines.nodes`), and
sends it requests for what `LocalEngine`, `WorkProcesses` and a meter do: one line of JSON on
standard input for each, answered by one line on standard output. Standard input is the agent's
lifeline: when it is closed, because the study has ended or was killed, or its machine is gone, the
agent ends at once, and its guards end the ranks.
"""

import contextlib
import ipaddress
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from pydantic_core import to_jsonable_python

import carbonopt
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.trial import Phase, StopReason
from carbonopt.energy.meter_reading import Reading
from carbonopt.engines.agent_protocol import BEGINS, DEAD_AFTER_S
from carbonopt.engines.kinds import ENGINES
from carbonopt.engines.local import LocalEngine
from carbonopt.engines.process.environment import Ranks, free_port
from carbonopt.engines.process.processes import WorkProcesses
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.paths import StudyPaths

# Time until a new file is seen on another machine: NFS looks again every 3 to 30 s.
_SEEN_WITHIN_S = 30.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Agent:
    """The requests that a study can send: one public method each, with its arguments in JSON."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        self.warnings: list[str] = []  # warnings since the last answer
        self._engine: LocalEngine
        self._trial: WorkProcesses | None = None
        self._prepares_data = False

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def preparing(self, anything: bool) -> None:
        self._prepares_data = anything

    def hello(self, environment: dict[str, str]) -> dict[str, Any]:
        """Take over environment variables of the study's command and describe this machine."""
        os.environ.update(environment)
        return {"version": carbonopt.__version__, "address": _own_address()}

    def begin(
        self,
        config: dict[str, Any],
        slot: int,
        world_size: int,
        root: str,
        name: str,
        mark: str,
        fingerprint: str,
        address: str,
        prepares: bool,
    ) -> dict[str, Any]:
        """Begin as an engine does (see `Engine.begin`) and describe this machine's devices.

        Args:
            config: the study's configuration on this machine alone.
            slot: the number of the launch's slot that this agent uses.
            world_size: the world size of a trial that uses all devices of all its machines.
            root: the study's folder.
            name: the study's name for this machine.
            mark: the name of a file in the study's folder that was made a moment ago.
            fingerprint: the fingerprint of all that the prepared data depends on.
            address: the address of the machine that has rank 0.
            prepares: whether this agent prepares the data.
        """
        paths = StudyPaths(Path(root), name)
        self._check_sees(paths.root / mark)
        os.environ.setdefault(_INTERFACE, _interface_to(address))
        engine = ENGINES[config["launch"]["kind"]](StudyConfig.model_validate(config), slot)
        assert isinstance(engine, LocalEngine)
        self._engine = engine
        engine.world_size = world_size
        # A name by which two agents on one machine notice each other, also under two names of the
        # machine. Slurm jobs on different cores may share a machine.
        cores = sorted(os.sched_getaffinity(0))
        engine.shared_names = (
            f"the CPU of {socket.gethostname()} (cores {cores[0]} to {cores[-1]})",
        )
        engine.begin(paths, fingerprint, self, self.interrupted.is_set, prepares=prepares)
        meter = engine.meter
        begun = {
            "devices": engine.devices,
            "hardware": engine.hardware,
            "prepares_data": self._prepares_data,
        }
        return {
            **begun,
            "energy_source": meter.energy_source,
            "models": meter.models,
            "idle": meter.idle,
        }

    def _check_sees(self, mark: Path) -> None:
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not mark.exists():
            if time.monotonic() > deadline or self.interrupted.is_set():
                must = "the study's folder must be one that all its machines share (NFS, say)"
                raise BadInput(f"{must}, but {mark.parent} isn't there; give another folder.")
            time.sleep(0.1)

    def ranks(self, ranks: dict[str, Any]) -> None:
        """Set which ranks of the next trial run on this machine."""
        own = Ranks.model_validate(ranks)
        self._engine.launcher.ranks_of = lambda _: own

    def free_port(self) -> int:
        return free_port("")

    def prepare(self) -> Any:
        return self._engine.prepare(self.interrupted.is_set)

    def await_free(self) -> str | None:
        return self._engine.await_free(self.interrupted.is_set)

    def start(self, spec: dict[str, Any], log: str) -> None:
        self._trial = self._engine.start(TrialSpec.model_validate(spec), Path(log))

    def prepare_next(self) -> None:
        self._engine.prepare_next()

    def drop_next(self) -> None:
        self._engine.drop_next()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._trial is not None
        event = self._trial.receive(timeout_s)
        return (
            None
            if event is None
            else {"event": type(event).__name__, **event.model_dump(mode="json")}
        )

    def answer(self, stop: str | None) -> None:
        assert self._trial is not None
        self._trial.answer(None if stop is None else StopReason(stop))

    def cpu_wait_fraction(self) -> float | None:
        assert self._trial is not None
        return self._trial.cpu_wait_fraction()

    def end(self) -> None:
        assert self._trial is not None
        self._trial.end()

    def log_tail(self, lines: int) -> str:
        assert self._trial is not None
        return self._trial.log_tail(lines)

    def enter(self, phase: str) -> None:
        self._engine.meter.enter(Phase(phase))

    def use(self, gpus: int) -> None:
        self._engine.meter.use(gpus)

    def running(self, phase: str) -> Reading:
        return _own(self._engine.meter.running(Phase(phase)))

    def take(self, phases: list[str]) -> dict[str, Reading]:
        taken = self._engine.meter.take(*map(Phase, phases))
        return {phase.value: _own(reading) for phase, reading in taken.items()}

    def move(self, part: dict[str, Any], source: str, destination: str) -> None:
        meter = self._engine.meter
        whole = Reading.model_validate(part)
        # The meter's sums are by node, too, and the agent's engine has one node.
        own = whole.model_copy(
            update={"nodes": dict.fromkeys(meter.running(Phase(source)).nodes, whole)}
        )
        meter.move(own, Phase(source), Phase(destination))

    def outer(self) -> Reading:
        return _own(self._engine.meter.outer())

    def parts_and_outer(self, phases: list[str]) -> dict[str, Any]:
        parts, outer = self._engine.meter.parts_and_outer(*map(Phase, phases))
        return {
            "parts": {phase.value: _own(part) for phase, part in parts.items()},
            "outer": _own(outer),
        }

    def close_meter(self) -> None:
        self._engine.meter.close()

    def close(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


def _own_address() -> str:
    """Return the address by which other machines reach this one.

    After a login by ssh it is the address that ssh used, unless that is a loopback address.
    """
    reached = os.environ.get("SSH_CONNECTION", "").split()
    if len(reached) != 4:
        return socket.gethostname()
    if not ipaddress.ip_address(reached[2].partition("%")[0]).is_loopback:
        return reached[2]
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    entries = [
        entry for name, all_of in psutil.net_if_addrs().items() if name in up for entry in all_of
    ]
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return next((own for own in addresses if not ipaddress.ip_address(own).is_loopback), reached[2])


def _own(reading: Reading) -> Reading:
    """Return a reading without its parts by node, since it is of this one machine."""
    return reading.model_copy(update={"nodes": {}})


def _interface_to(address: str) -> str:
    """Return the network interface by which this machine reaches an address, also its own.

    Gloo alone would take the address of its own host name, which on Debian is a loopback address.
    Raises CarbonoptError for an unknown name.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # nothing is sent
            probe.connect(place)
            own = probe.getsockname()[0]
    except OSError as error:
        raise CarbonoptError(
            f"{address}, which has rank 0, can't be reached: {error.strerror}."
        ) from error
    named: dict[str, str] = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
    }
    return named.get(own, "lo")


def _requests(interrupted: threading.Event) -> Iterator[dict[str, Any]]:
    """Yield the study's requests; when the study is gone, end this process, whatever it does."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def hear() -> None:
        unread = b""
        # The study says every ALIVE_EVERY_S that it is alive. When the network is gone, its end
        # can't be noticed otherwise.
        while select.select([sys.stdin.fileno()], [], [], DEAD_AFTER_S)[0]:
            if not (data := os.read(sys.stdin.fileno(), 65536)):
                break
            *lines, unread = (unread + data).split(b"\n")
            for request in map(json.loads, lines):
                if request["do"] == "interrupt":
                    interrupted.set()
                elif request["do"] != "alive":
                    waiting.put(request)
        os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    while True:
        yield waiting.get()


def _answered(do: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": to_jsonable_python(do(**given))}
    except CarbonoptError as error:
        return {"raised": type(error).__name__, "text": str(error)}


def main() -> None:
    # Slurm ends a job by signalling all its processes; here the study decides how this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Slurm's warning before the time limit; all that is started here inherits that it is ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with contextlib.ExitStack() as files:
        # Standard output is for answers alone; other output of this process goes to its log.
        answers = files.enter_context(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answers.write(BEGINS + b"\n")
        answers.flush()
        agent = Agent()
        for request in _requests(agent.interrupted):
            answer = _answered(getattr(agent, request["do"]), request["with"])
            answer["warnings"], agent.warnings = agent.warnings, []
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
