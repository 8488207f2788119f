"""The one channel between a trial's process and the study that started it: one JSON object a line.

Rank 0 alone speaks: `phase`, `stage`, `progress`, `evaluated`, `finished`, `failed`. The parent answers `phase` with go
on (so a measured window begins when both know of it) and `evaluated` with go on or stop and the reason.
"""

import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

from carbonopt.trial import EvalPoint, Frozen, Kernels, Phase, Stage, StopReason

CHANNEL_FD = "CARBONOPT_CHANNEL_FD"  # environment variable: the descriptor that rank 0 inherits
SPEC_FD = "CARBONOPT_SPEC_FD"  # environment variable: the descriptor of a file that will hold the trial's specification
GATE_FD = "CARBONOPT_GATE_FD"  # environment variable: the descriptor of a pipe that ends once it does
PREPARED = "CARBONOPT_PREPARED"  # environment variable: the folder of the tokenized data and the model's configuration
FINGERPRINT = "CARBONOPT_FINGERPRINT"  # environment variable: of the workload that this folder is made for
# Environment variable: the seed of the random model that a waiting trial will most likely train; empty where it trains
# another kind.
LIKELY_SEED = "CARBONOPT_LIKELY_SEED"
GPU_UUIDS = "CARBONOPT_GPU_UUIDS"  # environment variable: the measured GPUs, as NVML names them, with commas

FailureKind = Literal["out_of_memory", "diverged", "bad_input", "crash"]


class PhaseChanged(Frozen):
    """The trial is about to begin `phase`, its device idle, and waits for go on."""

    phase: Phase


class StageBegun(Frozen):
    """The trial goes on with `stage`; it waits for no answer."""

    stage: Stage
    kernels: Kernels | None = None  # that were compiled or loaded so far


class Progress(Frozen):
    step: int
    total_steps: int
    core_wait: float | None = None  # as a trial's record has it, but of rank 0; told until the first evaluation


class Evaluated(Frozen):
    point: EvalPoint
    total_steps: int
    peak_memory_gib: float | None = None  # of the trial so far, of the rank that needed most
    core_wait: float | None = None  # as a trial's record has it


class Finished(Frozen):
    summary: dict[str, Any]


class Failed(Frozen):
    kind: FailureKind
    text: str
    peak_memory_gib: float | None = None


class Exited(Frozen):
    """The trial's processes ended. `code` as the shell has it: 137 is SIGKILL."""

    code: int


Event = PhaseChanged | StageBegun | Progress | Evaluated | Finished | Failed | Exited

_SPOKEN: dict[str, type[Frozen]] = {
    model.__name__: model for model in (PhaseChanged, StageBegun, Progress, Evaluated, Finished, Failed)
}


class Speaker:
    """The trial's end of the channel."""

    PROGRESS_INTERVAL_S = 0.5

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._last_progress = 0.0

    @classmethod
    def inherited(cls) -> "Speaker":
        """The end that the parent passed down, by the descriptor's number in the environment."""
        return cls(socket.socket(fileno=int(os.environ[CHANNEL_FD])))

    def phase(self, phase: Phase) -> None:
        self._say(PhaseChanged(phase=phase))
        self._answer()

    def stage(self, stage: Stage, kernels: Kernels | None = None) -> None:
        self._say(StageBegun(stage=stage, kernels=kernels))

    def progress(self, step: int, total_steps: int, core_wait: Callable[[], float | None] | None) -> None:
        """A sign of life; at most two a second go out, the rest cost nothing: only then `core_wait` is asked."""
        now = time.monotonic()
        if now - self._last_progress >= self.PROGRESS_INTERVAL_S:
            self._last_progress = now
            waited = None if core_wait is None else core_wait()
            self._say(Progress(step=step, total_steps=total_steps, core_wait=waited))

    def evaluated(self, evaluated: Evaluated) -> StopReason | None:
        """Reports an evaluation; returns why to stop, or None to go on."""
        self._say(evaluated)
        reason = self._answer().get("stop")
        return StopReason(reason) if reason else None

    def finished(self, summary: dict[str, Any]) -> None:
        self._say(Finished(summary=summary))

    def failed(self, kind: FailureKind, text: str, peak_memory_gib: float | None = None) -> None:
        self._say(Failed(kind=kind, text=text, peak_memory_gib=peak_memory_gib))

    def _say(self, event: Frozen) -> None:
        message = {"event": type(event).__name__, **event.model_dump(mode="json")}
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self) -> dict:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the study that started this trial is gone")
        return json.loads(line)


class Listener:
    """The parent's end. It never blocks for longer than it was told to."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = bytearray()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None: nothing came in time, or the other end is closed (see `closed`)."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._closed:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            try:
                data = self._connection.recv(65536)
            except ConnectionError:
                data = b""
            if data:
                self._buffer += data
            else:
                self._closed = True
        if b"\n" not in self._buffer:
            return None
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        message = json.loads(line)
        return _SPOKEN[message.pop("event")].model_validate(message)  # type: ignore[return-value]

    @property
    def closed(self) -> bool:
        return self._closed and b"\n" not in self._buffer

    def answer(self, stop: StopReason | None = None) -> None:
        """Go on, or stop and why. A trial that died meanwhile can't hear it; its exit is the next event."""
        try:
            self._connection.sendall(json.dumps({"stop": stop}).encode() + b"\n")
        except ConnectionError:
            self._closed = True

    def close(self) -> None:
        self._selector.close()
        self._connection.close()
