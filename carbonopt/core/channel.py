"""The names that a study and the processes of its trials share.

They are environment variables, exit codes and kinds of failure. Nothing but Python is imported
here, as a user's own script reads it too (see `carbonopt.script`).
"""

from typing import Literal

# Environment variables: descriptors that rank 0 inherits, and other things that it needs.
CHANNEL_FD = "CARBONOPT_CHANNEL_FD"  # descriptor of the channel
SPEC_FD = "CARBONOPT_SPEC_FD"  # descriptor of a file that will have the trial's specification
GATE_FD = "CARBONOPT_GATE_FD"  # descriptor of a pipe that ends once the specification is there
TASK = "CARBONOPT_TASK"  # task that forked trials will train
# set: the forked process prepares the data, which its specification names
PREPARES = "CARBONOPT_PREPARES"
PREPARED = "CARBONOPT_PREPARED"  # the folder of the tokenized data and the model's configuration
FINGERPRINT = "CARBONOPT_FINGERPRINT"  # identifies the workload that this folder was made for
# seed of the random model that a waiting trial will most likely train; empty: none
LIKELY_SEED = "CARBONOPT_LIKELY_SEED"
COMPILES = "CARBONOPT_COMPILES"  # set: forked trials may use torch's compiler
# Environment variables of a user's script. A launcher of its own may start it, which passes no
# descriptor on.
CHANNEL_PATH = "CARBONOPT_CHANNEL"  # a socket that rank 0 connects to
QUALITY = "CARBONOPT_QUALITY"  # quality of the study's target; without it no study runs the script
DIRECTION = "CARBONOPT_QUALITY_DIRECTION"  # direction that is better
WORKLOAD = "CARBONOPT_WORKLOAD"  # workload whose script is forked, as JSON
RANKS = "CARBONOPT_RANKS"  # number of ranks that the study launches
# steps of the training in the study file; empty: the script gives them
TOTAL_STEPS = "CARBONOPT_TOTAL_STEPS"
# set: the script may go on from a checkpoint of its own, which an earlier attempt has made
CONTINUES = "CARBONOPT_CONTINUES"
GPU_UUIDS = "CARBONOPT_GPU_UUIDS"  # UUIDs of the measured GPUs from NVML, with commas

FailureKind = Literal["out_of_memory", "diverged", "bad_input", "crash"]

# Exit codes of a trial's processes. The channel has more details; the codes are for ranks without a
# channel.
FINISHED_EXIT = 0  # also after a stop, and after a divergence that the channel has reported
CRASH_EXIT = 1
BAD_INPUT_EXIT = 2
# on any rank; the launcher ends the other ranks, which would wait for it forever
OUT_OF_MEMORY_EXIT = 78
