"""The messages from a trial's process to its study: one JSON object a line.

Rank 0 alone sends them (`train.client`); the study receives them (`engines.process.processes`) and
acts on them (`study.trial_watch`). A phase waits for the study's answer, after which the study
switches the meter; an evaluation waits for the answer to go on or to stop.
"""

from typing import Any, get_args

from carbonopt.core.channel import FailureKind
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.trial import Kernels, Phase, Prediction, Stage
from carbonopt.core.values import Finite, Frozen, Whole


class PhaseChanged(Frozen):
    """The trial is about to begin `phase`, its device idle, and waits for permission to go on."""

    phase: Phase
    stage: Stage | None = None  # the stage that it begins with; None: the usual one
    # the phase began with the end of the last step, which a script has found out only now
    since_step: bool = False


class StageBegun(Frozen):
    """The trial goes on with `stage`; it waits for no answer."""

    stage: Stage
    kernels: Kernels | None = None  # kernels that were compiled or loaded so far


class Progress(Frozen):
    step: Whole
    total_steps: Whole
    # as in a trial's record, but for rank 0; sent until the first evaluation
    cpu_wait_fraction: float | None = None
    ago_s: Finite = 0.0  # seconds since the step ended, by the trial's clock


class Evaluated(Frozen):
    point: EvalPoint
    total_steps: Whole
    predictions: tuple[Prediction, ...] = ()  # as in a trial's record
    peak_memory_gib: float | None = None  # peak so far of the rank that needed most
    rank_peak_memory_gib: tuple[float, ...] | None = None  # peak so far of each rank
    cpu_wait_fraction: float | None = None  # as in a trial's record


class Waited(Frozen):
    """A script has waited for the answer to its last message, which took the study so long."""

    seconds: Finite  # by the script's clock


class Probed(Frozen):
    """A probe's last step is done, its device idle."""

    step: Whole
    total_steps: Whole
    peak_memory_gib: float  # both peaks as in `Evaluated`
    rank_peak_memory_gib: tuple[float, ...]
    cpu_wait_fraction: float | None = None


class Continued(Frozen):
    """The trial goes on after `step`, from the checkpoint of an earlier attempt."""

    step: Whole


class Saved(Frozen):
    """A checkpoint of the training after `step` is written."""

    step: Whole


class Remarked(Frozen):
    """The trial goes on, but the user should know this."""

    text: str  # one sentence without its full stop


class Finished(Frozen):
    summary: dict[str, Any]


class Failed(Frozen):
    kind: FailureKind
    text: str
    peak_memory_gib: float | None = None


class ScriptEnded(Frozen):
    """A script's own process ends as Python does; its command may go on, and end with code 0."""

    kind: FailureKind | None = None  # None: no error ends it
    text: str = ""


class Exited(Frozen):
    """The trial's processes ended.

    `code` is as in the shell: 137 is SIGKILL.
    """

    code: int


Event = (
    PhaseChanged
    | StageBegun
    | Progress
    | Evaluated
    | Waited
    | Probed
    | Continued
    | Saved
    | Remarked
    | Finished
    | Failed
    | ScriptEnded
    | Exited
)

SPOKEN: dict[str, type[Frozen]] = {
    event.__name__: event for event in get_args(Event) if event is not Exited
}
