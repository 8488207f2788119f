"""What training a model needs of a GPU's memory, as far as it doesn't depend on how ZeRO divides it among GPUs: found
out once, by running the model without numbers (`train.memory`). `analysis.memory` estimates from it what trials need.
"""

from typing import Any

from carbonopt.core.config import Space
from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.values import Frozen, Whole

# DeepSpeed's buffer in which ranks add up gradients. Its default of 5e8 elements allocates 1 GB (half precision) twice
# over, whatever the model's size.
REDUCE_BUCKET_ELEMENTS = 50_000_000
LIVE_PARAMETERS = 1_000_000_000  # as many as ZeRO 3 keeps gathered: DeepSpeed's stage3_max_live_parameters

# By `analysis.memory`, for each parameter.
_COUNTED = ("zero_stage", "offload", "world_size", "optimizer", "weight_averaging")
# Dimensions by which the memory of a step differs beside these and the micro batch.
PROFILED = tuple(name for name in affecting("memory") if name not in (*_COUNTED, "micro_batch_size_per_gpu"))


class Moment(Frozen):
    """Of a forward and backward pass."""

    activation_bytes: Whole  # all tensors but parameters and their gradients
    gradient_elements: Whole  # of which gradients have been computed


class Activations(Frozen):
    """Of one micro batch."""

    micro_batch_size: Whole
    moments: tuple[Moment, ...]  # those that no other one exceeds in both
    evaluation_bytes: Whole  # most at once in an evaluation's forward pass


class MemoryProfile(Frozen):
    """Of one combination of the PROFILED dimensions."""

    settings: dict[str, Any]  # their values
    parameters: Whole
    trained_parameters: Whole  # fewer with LoRA
    largest_parameter: Whole  # elements of the largest trained one
    hidden_parameters: Whole = 0  # the trained ones that Muon has orthogonal steps for
    muon_step_bytes: Whole = 0  # that such a step needs beside weights, gradients and momenta
    buffer_bytes: Whole  # that the model has beside its parameters
    activations: tuple[Activations, ...]  # of the smallest and the largest micro batch


class ModelMemory(Frozen):
    """Of a study's model: all that memory is estimated from."""

    profiles: tuple[MemoryProfile, ...]
    optimizer_bytes_per_parameter: float  # its states: 8 of AdamW
    optimizer_step_bytes_per_parameter: float  # that its step needs beside them for a moment
    reduce_bucket_elements: Whole = REDUCE_BUCKET_ELEMENTS
    live_parameters: Whole = LIVE_PARAMETERS
    overlapped: bool | None = None  # DeepSpeed's overlap_comm; None: its default

    def profile(self, params: TrialParams) -> MemoryProfile | None:
        """None: the study's space has no such combination."""
        settings = profiled(params)
        return next((profile for profile in self.profiles if profile.settings == settings), None)


class MemorySpec(Frozen):
    """What `train.memory`, a program of its own, is asked."""

    workload: dict[str, Any]  # the task's settings, dumped
    space: Space
    world_size: int
    gpu_memory_bytes: Whole | None = None  # None: not known


class MemoryAnswer(Frozen):
    memory: ModelMemory | None = None
    why_none: str | None = None  # a sentence without its full stop


def profiled(params: TrialParams) -> dict[str, Any]:
    """The PROFILED dimensions of a trial."""
    return {name: getattr(params, name) for name in PROFILED}
