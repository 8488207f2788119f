"""The states, phases and stages of a trial.

Nothing but Python is imported here, as a user's own script reads it too (see `carbonopt.script`).
"""

import sys
from enum import Enum

# A user's script may run on an older Python than carbonopt.
if sys.version_info >= (3, 11):  # noqa: UP036
    from enum import StrEnum
else:

    class StrEnum(str, Enum):  # noqa: UP042
        """The class of the same name in Python 3.11."""

        __str__ = str.__str__


# From this `TrialRecord.cpu_wait_fraction` on, a trial is said to have competed for its cores. The
# quickstart has 0.03 to 0.06 alone on two cores, and 0.35 to 0.39 beside one busy process.
CPU_CONTENTION_FROM = 0.15


class TrialState(StrEnum):
    COMPLETE = "complete"
    PRUNED = "pruned"  # stopped by a rule, by the budget, or as a probe; stop_reason says which
    INFEASIBLE = "infeasible"  # does not fit in memory
    DIVERGED = "diverged"  # the loss became NaN or infinite
    # the process died (`failure` has the last lines of its log), or stop_reason says: interrupted
    FAILED = "failed"
    # no sign of progress for launch.timeout_s, or longer than launch.trial_time_limit_s
    TIMEOUT = "timeout"
    RUNNING = "running"


class StopReason(StrEnum):
    TARGET = "target"  # predicted from its curve and the other trials, it can't reach the target
    # its emissions have passed, or are likely to pass, those of the best trial that meets it
    CAP = "cap"
    BUDGET = "budget"  # the study's budget ended while it ran
    PROBE = "probe"  # a probe has measured its steps, which was its only purpose
    INTERRUPTED = "interrupted"  # the study was ended from outside


class Phase(StrEnum):
    """The phases that energy is booked to.

    A trial has setup, train and eval. Prepare and gap are the study's own. All other energy that is
    read for the study's cores is booked to `other`.
    """

    # before a worker's first trial, in each call: reading and tokenizing the data set, compiling
    # DeepSpeed's operators
    PREPARE = "prepare"
    # between trials; while a trial runs, the study's own processes, GPUs that no trial uses, and
    # the time for which a script's training or evaluation waits for the study's answer
    GAP = "gap"
    OTHER = "other"  # used on the study's cores by programs that are not the study's
    # a trial's start, and its later work that is neither training nor evaluation: saving
    # checkpoints, a script's work after its last step, the end of the processes
    SETUP = "setup"
    TRAIN = "train"
    EVAL = "eval"


TRIAL_PHASES = (Phase.SETUP, Phase.TRAIN, Phase.EVAL)


class Stage(StrEnum):
    """The stages of a trial, which divide its phases further.

    One follows the other without a gap.
    """

    IMPORTS = "imports"  # starting its processes, importing what is not imported yet
    DATA = "data"  # opening the device and the tokens
    MODEL = "model"  # torch.distributed, the model and its weights
    ENGINE = "engine"  # the Trainer, DeepSpeed's engine, the optimizer
    # the first optimizer step, with compilation and whatever else only that one does
    COMPILE = "compile"
    GENERATION = "generation"  # generating the completions to train on, in the other steps
    STEPS = "steps"  # the other steps
    EVALUATION = "evaluation"
    SAVING = "saving"  # checkpoints
    AFTER = "after"  # work of a script after its last step, such as testing its model
    TEARDOWN = "teardown"  # ending its processes


class Kernels(StrEnum):
    """The origin of the kernels that a trial compiles."""

    COMPILED = "compiled"  # at least one kernel was compiled
    # all kernels were loaded, because an earlier trial or study had compiled them
    LOADED = "from the cache"
