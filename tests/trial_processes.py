"""Starts a trial's or a preparation's processes as a study does, and answers on their channel."""

import atexit
import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from carbonopt.core.channel import PREPARES
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.events import Evaluated, Event, Exited, PhaseChanged, Progress, StageBegun
from carbonopt.engines.process.environment import Ranks, work_environment
from carbonopt.engines.process.forking import ForkedWork, ForkServer
from carbonopt.engines.process.processes import WorkProcesses, run_module
from carbonopt.spec.launch_settings import LocalLaunch

TIMEOUT_S = 300  # the first trial of a home compiles DeepSpeed's operators, beside other tests


@dataclass(frozen=True)
class Run:
    events: list[Event]
    exit_code: int  # 0 where that of every rank is
    folder: Path

    def only(self, kind):
        (event,) = [event for event in self.events if isinstance(event, kind)]
        return event

    @property
    def points(self) -> list[EvalPoint]:
        return [event.point for event in self.events if isinstance(event, Evaluated)]

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    @property
    def shape(self) -> list:
        """The conversation, without what is said in passing."""
        said = [event for event in self.events if not isinstance(event, Progress | StageBegun)]
        return [
            event.phase if isinstance(event, PhaseChanged) else type(event).__name__
            for event in said
        ]


@functools.cache
def _environment() -> dict[str, str]:
    path = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    base = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    return work_environment(LocalLaunch(gpus=[]), [], base)


@functools.cache
def _fork_server(module: str) -> ForkServer:
    """What the trials of all tests are forked from."""
    server = ForkServer(module, _environment(), Path(tempfile.mkdtemp()) / "log.txt")
    atexit.register(server.close)
    assert server.ready(TIMEOUT_S)
    return server


def start(
    module: str, spec: dict, folder: Path, world_size: int = 1, stop=None, cold=False,
    forked="carbonopt.train.fork_template", **environment: str,
) -> Run:  # fmt: skip
    """Until they have ended. They are forked, as a study's are, from a process with the module
    `forked`; those that are `cold` are not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [rank | environment for rank in Ranks.alone(world_size).environments]
    if not cold:
        ranks = [rank | ({PREPARES: "1"} if module == "prepare" else {}) for rank in ranks]
        work = ForkedWork(_fork_server(forked), ranks, folder / "waiting.txt")
        work.begin(json.dumps(spec), folder / "log.txt")
    else:
        spec_file = folder / "spec.json"
        spec_file.write_text(json.dumps(spec))
        argv = run_module(f"carbonopt.train.{module}", str(spec_file))
        work = WorkProcesses(argv, ranks, _environment(), folder / "log.txt")
    events: list[Event] = []
    try:
        while True:
            event = work.receive(TIMEOUT_S)
            assert event is not None, (
                f"no word for {TIMEOUT_S} s after {events[-3:]}: {work.log_tail()}"
            )
            if isinstance(event, Exited):
                print(work.log_tail())
                return Run(events, event.code, folder)
            events.append(event)
            if isinstance(event, PhaseChanged | Evaluated):
                work.answer(stop if isinstance(event, Evaluated) else None)
    finally:
        work.end()
