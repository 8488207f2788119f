"""The connection to the agent of one machine of a launch.

The agents' side is `carbonopt.engines.agent`.
"""

import json
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from carbonopt.core import errors
from carbonopt.core.errors import INTERRUPTED, CarbonoptError, MachineLost, StudyInterrupted
from carbonopt.engines.agent_protocol import ALIVE_EVERY_S, BEGINS
from carbonopt.engines.engine import (
    await_own_signal,
)
from carbonopt.engines.process.processes import said_since

_TICK_S = 0.1
_END_S = 10.0  # time for an agent, or the program that started it, to end
_ANSWER_S = 60.0  # time to answer most requests; ending a trial may take 20 s
_INTERRUPTED_S = 15.0  # time to answer once the study is asked to end
_TOLD_S = 1.0  # time for the program that started an agent to end after its output has
_SSH_LOST = 255  # ssh's exit code for an error of its own, where others are the command's
_PATIENT = ("begin", "prepare", "await_free")  # requests without a time limit


class RemoteNode:
    """A connection to the agent of one machine, from its start until it is closed.

    Args:
        name: the machine's name in messages.
        program: the command that starts the agent.
        environment: the environment of that command.
        log: the file that receives what the agent prints to standard error.
        warn: receives the agent's warnings.
        interrupted: returns whether the study is asked to end.
    """

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
        """Send a request and return the agent's answer.

        Raises:
            MachineLost: if the agent is gone. Errors that the agent raises are raised here, too.
            StudyInterrupted: if the study is asked to end meanwhile.
        """
        self.send(what, **given)
        return self.answer(_limit_s(what))

    def send(self, what: str, **given: Any) -> None:
        """Send a request without waiting; a call of `answer` must follow."""
        assert self._process.stdin is not None
        # `answer` reports an agent that is gone.
        with suppress(BrokenPipeError), self._writing:
            self._process.stdin.write(json.dumps({"do": what, "with": given}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float | None) -> Any:
        """Return the answer to the oldest request that has none yet.

        Raises MachineLost if no answer comes within `limit_s` seconds (None: no limit).
        """
        while not self._has_answered and (line := self._line(limit_s)) != BEGINS:
            self._said_before = line.decode(errors="replace").strip() or self._said_before
        if not self._has_answered:
            self._has_answered = True
            threading.Thread(target=self._keep_alive, daemon=True).start()
        answer = json.loads(self._line(limit_s))
        for text in answer["warnings"]:
            self._warn(f"{self.name}: {text}")
        if "raised" in answer:
            raise self._as_raised(answer["raised"], answer["text"])
        return answer["result"]

    def _as_raised(self, kind: str, text: str) -> CarbonoptError:
        error: type[CarbonoptError] = getattr(errors, kind, CarbonoptError)
        return error(text) if error is StudyInterrupted else error(f"{self.name}: {text}")

    def _keep_alive(self) -> None:
        """Tell the agent every ALIVE_EVERY_S seconds that the study is alive."""
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
                    raise StudyInterrupted(INTERRUPTED)
                raise MachineLost(
                    f"{self.name}: its agent doesn't answer for {limit_s:g} s (log: {self._log})."
                )
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self) -> CarbonoptError:
        # Whoever ends a job also ends the program that started the agent.
        if await_own_signal(self._interrupted):
            return StudyInterrupted(INTERRUPTED)
        said = [
            line.strip()
            for line in said_since(self._log_begins, self._log).splitlines()
            if line.strip()
        ]
        why = said[-1] if said else self._said_before or self._how_it_ended()
        # If the agent never answered, the study is refused and its folder is removed again.
        log = f" (log: {self._log})" if self._has_answered else ""
        return MachineLost(f"{self.name}: its agent has ended: {why.rstrip('.')}{log}.")

    def _how_it_ended(self) -> str:
        """Say how the program that started the agent ended, where nothing was printed."""
        try:
            code = self._process.wait(_TOLD_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code == _SSH_LOST:
            return "the connection to its machine was lost"
        return f"it ended with code {code} and said nothing"

    def close(self) -> None:
        """End the agent, in an orderly way if it is alive. Calling it again does nothing."""
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
        """Kill the program that started the agent, which cuts the agent's lifeline."""
        self._process.kill()
        self._process.wait()


def _limit_s(what: str) -> float | None:
    """Return how many seconds an agent may take to answer a request; None: no limit."""
    return None if what in _PATIENT else _ANSWER_S


def together(
    remotes: Sequence[RemoteNode], what: str, given: Sequence[dict[str, Any]] | None = None
) -> list[Any]:
    """Send a request to all agents at once and return their answers.

    `given` has the arguments for each agent. The first error is raised after all have answered.
    """
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
