"""A trial and a meter whose parts are with the agents of several machines."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carbonopt.core.events import SPOKEN, Event, Exited
from carbonopt.core.last_error import failed_because_of_others
from carbonopt.core.trial import Phase, StopReason
from carbonopt.energy.meter_reading import Reading
from carbonopt.engines.process.guard import GRACE_S
from carbonopt.engines.process.processes import LOG_TAIL_LINES
from carbonopt.engines.remote_node import RemoteNode, together
from carbonopt.spec.study_data import IdlePower

_TICK_S = 0.1
_LINES = 200  # last lines of a log in which the reason of a failure is looked for


class RemoteMeter:
    """The meter of one machine, which runs in the machine's agent. Implements `Meter`."""

    def __init__(self, remote: RemoteNode, answer: dict[str, Any]) -> None:
        self._remote = remote
        self.energy_source, self.models = answer["energy_source"], answer["models"]
        self.idle = tuple(IdlePower.model_validate(idle) for idle in answer["idle"])

    def enter(self, phase: Phase) -> None:
        self._remote.ask("enter", phase=phase)

    def use(self, gpus: int) -> None:
        self._remote.ask("use", gpus=gpus)

    def running(self, phase: Phase) -> Reading:
        return Reading.model_validate(self._remote.ask("running", phase=phase))

    def take(self, *phases: Phase) -> dict[Phase, Reading]:
        taken = self._remote.ask("take", phases=phases)
        return {Phase(phase): Reading.model_validate(reading) for phase, reading in taken.items()}

    def move(self, part: Reading, source: Phase, destination: Phase) -> None:
        self._remote.ask(
            "move",
            part=part.model_dump(mode="json", exclude={"nodes"}),
            source=source,
            destination=destination,
        )

    def outer(self) -> Reading:
        return Reading.model_validate(self._remote.ask("outer"))

    def parts_and_outer(self, *phases: Phase) -> tuple[dict[Phase, Reading], Reading]:
        answer = self._remote.ask("parts_and_outer", phases=phases)
        parts = {
            Phase(phase): Reading.model_validate(part) for phase, part in answer["parts"].items()
        }
        return parts, Reading.model_validate(answer["outer"])

    def close(self) -> None:
        self._remote.ask("close_meter")


class NodesTrial:
    """A trial whose ranks run on several machines; the first machine has rank 0.

    Implements `RunningTrial`.
    """

    def __init__(self, logs: Mapping[RemoteNode, Path]) -> None:
        self._logs, self._remotes = logs, (remotes := list(logs))
        # `_silent` has the other machines whose ranks have not ended; they report only their end.
        self._first, self._silent = (
            remotes[0],
            list(remotes[1:]),
        )
        self._first_ended: Exited | None = None
        self._failures: dict[RemoteNode, Exited] = {}
        # The machine whose log says why the trial failed; of rank 0 unless another one has failed.
        self._blamed = self._first
        self._ends_at_s = 0.0  # latest end after a failure, by the monotonic clock

    def receive(self, timeout_s: float) -> Event | None:
        deadline = time.monotonic() + timeout_s
        while True:
            for remote in tuple(self._silent):
                if isinstance(event := self._event(remote, 0.0), Exited):
                    self._silent.remove(remote)
                    self._note_failure(remote, event)
            if self._first_ended is None:
                left_s = min(
                    _TICK_S if self._failures else timeout_s, max(0.0, deadline - time.monotonic())
                )
                event = self._event(self._first, left_s)
                if event is not None and not isinstance(event, Exited):
                    return event
                if event is not None:
                    self._first_ended = event
                    self._note_failure(self._first, event)
            elif self._silent:
                time.sleep(min(_TICK_S, max(0.0, deadline - time.monotonic())))
            if self._has_ended():
                self._blame()
                return self._failures.get(self._blamed, self._first_ended)
            if time.monotonic() >= deadline:
                return None

    def _has_ended(self) -> bool:
        """Return whether all ranks have ended, or some failed and others had time to say why."""
        if self._first_ended is not None and not self._silent:
            return True
        return bool(self._failures) and time.monotonic() > self._ends_at_s

    def _note_failure(self, remote: RemoteNode, event: Exited) -> None:
        if event.code != 0:
            if not self._failures:
                self._blamed, self._ends_at_s = remote, time.monotonic() + GRACE_S
            self._failures[remote] = event

    def _blame(self) -> None:
        """Find the machine whose ranks failed for a reason of their own, as far as can be told.

        Ranks that wait for a failed one fail, too, and may be noticed before it. If all say that
        they lost another one, it is the machine whose log ended first.
        """
        if len(self._failures) < 2:
            return
        tails = {remote: remote.ask("log_tail", lines=_LINES) for remote in self._failures}
        own = [remote for remote, tail in tails.items() if not failed_because_of_others(tail)]
        self._blamed = min(
            own or self._failures, key=lambda remote: _written_at_s(self._logs[remote])
        )

    @property
    def log(self) -> Path:
        """The log of the machine whose ranks failed, otherwise of rank 0's machine."""
        return self._logs[self._blamed]

    @staticmethod
    def _event(remote: RemoteNode, timeout_s: float) -> Event | None:
        if (answer := remote.ask("receive", timeout_s=timeout_s)) is None:
            return None
        kind: Any = SPOKEN.get(answer.pop("event"), Exited)
        return kind.model_validate(answer)  # type: ignore[no-any-return]

    def answer(self, stop: StopReason | None = None) -> None:
        self._first.ask("answer", stop=stop)

    def runnable_s(self) -> None:
        """Return None: the trial also runs on other machines, which go on while this one waits."""

    def cpu_wait_fraction(self) -> float | None:
        shares = [remote.ask("cpu_wait_fraction") for remote in self._remotes]
        return max((share for share in shares if share is not None), default=None)

    def runnable_while_stopped_s(self) -> None:
        """Return None: the processes of other machines are not looked at."""

    def end(self) -> None:
        together(self._remotes, "end")

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        tail: str = self._blamed.ask("log_tail", lines=lines)
        return tail


def _written_at_s(log: Path) -> float:
    """Return when a log was last written, in seconds since 1970; infinity if it isn't there."""
    return log.stat().st_mtime if log.exists() else math.inf
