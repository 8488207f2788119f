"""The one channel between a trial's process and its study: one JSON object a line. Rank 0 alone speaks. A phase waits
for the answer, so that a measured window begins when both know of it; so does an evaluation, to go on or stop."""

from typing import Any, Literal, get_args

from carbonopt.core.trial import EvalPoint, Kernels, Phase, Prediction, Stage
from carbonopt.core.values import Frozen, Whole

# Environment variables: descriptors that rank 0 inherits, and what it needs beside them.
CHANNEL_FD = "CARBONOPT_CHANNEL_FD"  # of the channel
SPEC_FD = "CARBONOPT_SPEC_FD"  # of a file that will hold the trial's specification
GATE_FD = "CARBONOPT_GATE_FD"  # of a pipe that ends once it does
TASK = "CARBONOPT_TASK"  # that forked trials will train
PREPARES = "CARBONOPT_PREPARES"  # set: what is forked prepares the data, and its specification says from what
PREPARED = "CARBONOPT_PREPARED"  # the folder of the tokenized data and the model's configuration
FINGERPRINT = "CARBONOPT_FINGERPRINT"  # of the workload that this folder is made for
LIKELY_SEED = "CARBONOPT_LIKELY_SEED"  # of the random model that a waiting trial will most likely train; empty: none
COMPILES = "CARBONOPT_COMPILES"  # set: forked trials may use torch's compiler
# Of a user's script, which a launcher of its own may start: then no descriptor is passed on.
CHANNEL_PATH = "CARBONOPT_CHANNEL"  # a socket that rank 0 connects to
QUALITY = "CARBONOPT_QUALITY"  # of the study's target; without it no study runs the script
DIRECTION = "CARBONOPT_QUALITY_DIRECTION"  # of what is better
WORKLOAD = "CARBONOPT_WORKLOAD"  # whose script is forked, as JSON
RANKS = "CARBONOPT_RANKS"  # how many the study launches
TOTAL_STEPS = "CARBONOPT_TOTAL_STEPS"  # by the study file; empty: the script says
GPU_UUIDS = "CARBONOPT_GPU_UUIDS"  # the measured GPUs, as NVML names them, with commas

FailureKind = Literal["out_of_memory", "diverged", "bad_input", "crash"]


class PhaseChanged(Frozen):
    """The trial is about to begin `phase`, its device idle, and waits for go on."""

    phase: Phase


class StageBegun(Frozen):
    """The trial goes on with `stage`; it waits for no answer."""

    stage: Stage
    kernels: Kernels | None = None  # that were compiled or loaded so far


class Progress(Frozen):
    step: Whole
    total_steps: Whole
    cpu_wait_fraction: float | None = None  # as a trial's record has it, but of rank 0; told until the first evaluation


class Evaluated(Frozen):
    point: EvalPoint
    total_steps: Whole
    predictions: tuple[Prediction, ...] = ()  # as a trial's record has them
    peak_memory_gib: float | None = None  # of the trial so far, of the rank that needed most
    rank_peak_memory_gib: tuple[float, ...] | None = None  # ... of each rank
    cpu_wait_fraction: float | None = None  # as a trial's record has it


class Probed(Frozen):
    """A probe's last step is done, its device idle."""

    step: Whole
    total_steps: Whole
    peak_memory_gib: float  # as `Evaluated` has them
    rank_peak_memory_gib: tuple[float, ...]
    cpu_wait_fraction: float | None = None


class Finished(Frozen):
    summary: dict[str, Any]


class Failed(Frozen):
    kind: FailureKind
    text: str
    peak_memory_gib: float | None = None


class Exited(Frozen):
    """The trial's processes ended. `code` as the shell has it: 137 is SIGKILL."""

    code: int


Event = PhaseChanged | StageBegun | Progress | Evaluated | Probed | Finished | Failed | Exited

SPOKEN: dict[str, type[Frozen]] = {event.__name__: event for event in get_args(Event) if event is not Exited}

# How the processes of a trial end. The channel says more; the codes remain when a rank without one has to speak.
FINISHED_EXIT = 0  # also after a stop, and after a divergence that the channel has reported
CRASH_EXIT = 1
BAD_INPUT_EXIT = 2
OUT_OF_MEMORY_EXIT = 78  # on any rank; those that then wait for it forever are the launcher's to end
