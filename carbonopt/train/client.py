"""The trial's end of the channel (see `carbonopt.core.events`).

It imports nothing but Python's own library and carbonopt's light modules.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from carbonopt.core import channel
from carbonopt.core.states import Kernels, Phase, Stage, StopReason


class Speaker:
    PROGRESS_INTERVAL_S = 0.5

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")
        self._last_progress = 0.0
        # the last step, total steps, and when that step ended; None after a change of phase
        self._last_step: tuple[int, int, float] | None = None
        self._is_said = False  # that step has been reported
        # When what waits for the next answer began to be said. The study may take the sender's core
        # as soon as it hears of it.
        self._asked_s: float | None = None
        self._waited_s = 0.0  # for the last answer

    @classmethod
    def inherited(cls) -> Speaker:
        """Return the end that the parent process passed down.

        Its descriptor's number is in the environment.
        """
        return cls(socket.socket(fileno=int(os.environ[channel.CHANNEL_FD])))

    def phase(self, phase: Phase, stage: Stage | None = None, *, since_step: bool = False) -> None:
        """Change the phase, and return when the study says to go on.

        The fields are those of `events.PhaseChanged`.
        """
        self._last_step = None
        self._ask("PhaseChanged", phase=phase, stage=stage, since_step=since_step)

    def stage(self, stage: Stage, kernels: Kernels | None = None) -> None:
        self._say("StageBegun", stage=stage, kernels=kernels)

    def progress(
        self,
        step: int,
        total_steps: int,
        cpu_wait_fraction: Callable[[], float | None] | None = None,
        last: bool = False,
    ) -> None:
        """Report progress as a sign of life, at most twice a second, or always for the last step.

        Other calls send nothing and cost nothing, not even measuring the CPU wait.
        """
        now = time.monotonic()
        self._last_step, self._is_said = (step, total_steps, now), False
        if last or now - self._last_progress >= self.PROGRESS_INTERVAL_S:
            self._last_progress, self._is_said = now, True
            waited = None if cpu_wait_fraction is None else cpu_wait_fraction()
            self._say("Progress", step=step, total_steps=total_steps, cpu_wait_fraction=waited)

    def catch_up(self, *, again: bool = False) -> None:
        """Report the last step of the open phase, and how long ago it ended.

        Args:
            again: Report it also if it has been reported, because only this process knows exactly
                what time has passed since.
        """
        if self._last_step is not None and (again or not self._is_said):
            step, total_steps, ended_s = self._last_step
            self._is_said, self._asked_s = True, time.monotonic()
            self._say("Progress", step=step, total_steps=total_steps, ago_s=self._asked_s - ended_s)

    def evaluated(self, **fields: Any) -> StopReason | None:
        """Report an evaluation, with the fields of `events.Evaluated`.

        Returns:
            The reason to stop, or None to go on.
        """
        reason = self._ask("Evaluated", **fields).get("stop")
        return StopReason(reason) if reason else None

    def waited(self) -> None:
        """Report how long the last answer took, which was no work of the trial's."""
        self._say("Waited", seconds=self._waited_s)

    def probed(self, **fields: Any) -> None:
        """Report the end of a probe, with the fields of `events.Probed`."""
        self._say("Probed", **fields)

    def continued(self, step: int) -> None:
        """Report that the trial goes on after a step, from an earlier attempt's checkpoint."""
        self._say("Continued", step=step)

    def saved(self, step: int) -> None:
        """Report that a checkpoint of the training after a step is written."""
        self._say("Saved", step=step)

    def remark(self, text: str) -> None:
        """Report what the user should know, in a sentence without its full stop."""
        self._say("Remarked", text=text)

    def finished(self, summary: dict[str, Any]) -> None:
        self._say("Finished", summary=summary)

    def failed(
        self, kind: channel.FailureKind, text: str, peak_memory_gib: float | None = None
    ) -> None:
        self._say("Failed", kind=kind, text=text, peak_memory_gib=peak_memory_gib)

    def left(self, kind: channel.FailureKind | None, text: str) -> None:
        """Report that the process ends, with the error that ends it, if any.

        Its command may hide its exit code.
        """
        self._say("ScriptEnded", kind=kind, text=text)

    def _say(self, event: str, **fields: Any) -> None:
        """Send an event by its name.

        The study checks the fields. Objects among the values are sent as their own fields.
        """
        self._connection.sendall(
            json.dumps({"event": event, **fields}, default=vars).encode() + b"\n"
        )

    def _ask(self, event: str, **fields: Any) -> Any:
        """Send an event, and return the study's answer to it."""
        asked_s = time.monotonic() if self._asked_s is None else self._asked_s
        self._say(event, **fields)
        if not (line := self._lines.readline()):
            raise ConnectionError("the study that started this trial is gone")
        self._waited_s = time.monotonic() - asked_s
        self._asked_s = None
        return json.loads(line)
