"""The trial's end of the channel (see `carbonopt.core.events`)."""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from carbonopt.core import events
from carbonopt.core.trial import Kernels, Phase, Stage, StopReason
from carbonopt.core.values import Frozen


class Speaker:
    PROGRESS_INTERVAL_S = 0.5

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")
        self._last_progress = 0.0

    @classmethod
    def inherited(cls) -> "Speaker":
        """The end that the parent passed down, by the descriptor's number in the environment."""
        return cls(socket.socket(fileno=int(os.environ[events.CHANNEL_FD])))

    def phase(self, phase: Phase) -> None:
        self._say(events.PhaseChanged(phase=phase))
        self._answer()

    def stage(self, stage: Stage, kernels: Kernels | None = None) -> None:
        self._say(events.StageBegun(stage=stage, kernels=kernels))

    def progress(
        self,
        step: int,
        total_steps: int,
        cpu_wait_fraction: Callable[[], float | None] | None = None,
        last: bool = False,
    ) -> None:
        """A sign of life; at most two a second go out, and the last: the rest cost nothing, not even the wait."""
        now = time.monotonic()
        if last or now - self._last_progress >= self.PROGRESS_INTERVAL_S:
            self._last_progress = now
            waited = None if cpu_wait_fraction is None else cpu_wait_fraction()
            self._say(events.Progress(step=step, total_steps=total_steps, cpu_wait_fraction=waited))

    def evaluated(self, evaluated: events.Evaluated) -> StopReason | None:
        """Reports an evaluation; returns why to stop, or None to go on."""
        self._say(evaluated)
        reason = self._answer().get("stop")
        return StopReason(reason) if reason else None

    def probed(self, probed: events.Probed) -> None:
        self._say(probed)

    def finished(self, summary: dict[str, Any]) -> None:
        self._say(events.Finished(summary=summary))

    def failed(self, kind: events.FailureKind, text: str, peak_memory_gib: float | None = None) -> None:
        self._say(events.Failed(kind=kind, text=text, peak_memory_gib=peak_memory_gib))

    def _say(self, event: Frozen) -> None:
        message = {"event": type(event).__name__, **event.model_dump(mode="json")}
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self) -> Any:
        if not (line := self._lines.readline()):
            raise ConnectionError("the study that started this trial is gone")
        return json.loads(line)
