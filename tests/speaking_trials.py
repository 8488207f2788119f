"""Trials whose process only says what a trial says, and a meter that shows where energy goes."""

from carbonopt.core.trial import Phase
from carbonopt.energy.replay_meter import ReplayMeter

SPEAKING = """
import json, math, os, socket, sys, time
connection = socket.socket(fileno=int(os.environ["CARBONOPT_CHANNEL_FD"]))
lines = connection.makefile("rb")
def say(event, **fields):
    connection.sendall(json.dumps({"event": event, **fields}).encode() + b"\\n")
def ask(event, **fields):
    say(event, **fields)
    return json.loads(lines.readline())["stop"]
def evaluated(step, nll, total=100, **more):
    ask("PhaseChanged", phase="eval")
    value = None if nll is None else math.exp(nll)
    point = {"step": step, "tokens": step, "value": value, "sum": nll, "count": 1}
    stop = ask("Evaluated", point=point, total_steps=total, **more)
    if stop:
        time.sleep(600)  # the study ends a trial that it has stopped
    ask("PhaseChanged", phase="train")
ask("PhaseChanged", phase="train")
"""


class JoulePerPhase(ReplayMeter):
    """Charges 1 kWh in every window that is opened: enough to see where energy goes."""

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        self.advance(phase, 1.0, 1.0)
