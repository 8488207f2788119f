"""Starts a trial's or a preparation's processes as a study does, and answers on their channel."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from carbonopt.core.events import CHANNEL_FD, Evaluated, Event, PhaseChanged, Progress, StageBegun
from carbonopt.core.trial import EvalPoint
from carbonopt.engines.process.environment import programs_path
from carbonopt.engines.process.processes import Listener

TIMEOUT_S = 120


@dataclass(frozen=True)
class Run:
    events: list[Event]
    exit_codes: list[int]
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
        return [event.phase if isinstance(event, PhaseChanged) else type(event).__name__ for event in said]


def start(module: str, spec: dict, folder: Path, world_size: int = 1, stop=None, **environment: str) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(spec))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ours, theirs = socket.socketpair()
    ranks = []
    for rank in range(world_size):
        env = os.environ | environment | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            "PATH": programs_path(os.environ),  # as trials: with another ninja they would all compile operators anew
        }  # fmt: skip
        descriptors = [theirs.fileno()] if rank == 0 else []
        if descriptors:
            env[CHANNEL_FD] = str(theirs.fileno())
        command = [sys.executable, "-m", f"carbonopt.train.{module}", str(spec_path)]
        ranks.append(subprocess.Popen(command, env=env, pass_fds=descriptors))
    theirs.close()
    listener = Listener(ours)
    events: list[Event] = []
    try:
        while not listener.closed:
            event = listener.receive(timeout_s=TIMEOUT_S)
            if event is None:
                assert listener.closed, f"no word for {TIMEOUT_S} s after {events[-3:]}"
                continue
            events.append(event)
            if isinstance(event, PhaseChanged):
                listener.answer()
            elif isinstance(event, Evaluated):
                listener.answer(stop=stop)
        exit_codes = [process.wait(timeout=TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        listener.close()
    return Run(events, exit_codes, folder)
