"""The GPU memory that training a model needs, before ZeRO divides it among GPUs.

It is found out once, by running the model on tensors without numbers (`train.models.memory_probe`).
`analysis.gpu_memory` estimates from it what trials need.
"""

from typing import Any

from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.values import Frozen, Whole
from carbonopt.spec.space_settings import Space

# DeepSpeed's buffer in which ranks add up gradients. Its default of 5e8 elements allocates 1 GB
# (half precision) twice over, whatever the model's size.
REDUCE_BUCKET_ELEMENTS = 50_000_000
# Parameters that ZeRO 3 keeps gathered: DeepSpeed's stage3_max_live_parameters.
LIVE_PARAMETERS = 1_000_000_000

# Dimensions that `analysis.gpu_memory` takes into account for each parameter.
_COUNTED = ("zero_stage", "offload", "world_size", "optimizer", "weight_averaging")
# Further dimensions that change the memory of a step, beside those and the micro batch.
PROFILED = tuple(
    name for name in affecting("memory") if name not in (*_COUNTED, "micro_batch_size_per_gpu")
)


class Moment(Frozen):
    """The memory in use at a moment of a forward and backward pass."""

    activation_bytes: Whole  # all tensors but parameters and their gradients
    gradient_elements: Whole  # parameters whose gradients have been computed


class Activations(Frozen):
    """The activation memory of one micro batch."""

    micro_batch_size: Whole
    moments: tuple[Moment, ...]  # only moments that no other moment exceeds in both fields
    evaluation_bytes: Whole  # the most at once in an evaluation's forward pass


class MemoryProfile(Frozen):
    """The memory of one combination of the PROFILED dimensions."""

    settings: dict[str, Any]  # the values of these dimensions
    parameters: Whole
    trained_parameters: Whole  # fewer with LoRA
    largest_parameter: Whole  # elements of the largest trained one
    smallest_side: Whole = 0  # rows or columns, the fewest of a matrix with LoRA; 0: without LoRA
    hidden_parameters: Whole = 0  # trained parameters that Muon makes orthogonal steps for
    muon_step_bytes: Whole = 0  # needed by such a step beside weights, gradients and momenta
    buffer_bytes: Whole  # the model's buffers beside its parameters
    activations: tuple[Activations, ...]  # for the smallest and the largest micro batch


class ModelMemory(Frozen):
    """The memory of a study's model: everything that estimates of a trial's memory rest on."""

    profiles: tuple[MemoryProfile, ...]
    optimizer_bytes_per_parameter: float  # the optimizer's states: 8 for AdamW
    optimizer_step_bytes_per_parameter: float  # needed for a moment by its step, beside the states
    reduce_bucket_elements: Whole = REDUCE_BUCKET_ELEMENTS
    live_parameters: Whole = LIVE_PARAMETERS
    overlapped: bool | None = None  # DeepSpeed's overlap_comm; None: its default
    left_out: str | None = None  # settings of the space that were not examined, in words

    def profile(self, params: TrialParams) -> MemoryProfile | None:
        """Return the profile of a trial's settings.

        It is None if the study's space has no such combination.
        """
        settings = profiled(params)
        return next((profile for profile in self.profiles if profile.settings == settings), None)


class MemorySpec(Frozen):
    """The question that `train.models.memory_probe` answers."""

    workload: dict[str, Any]  # the task's settings, dumped
    space: Space
    world_size: int
    gpu_memory_bytes: Whole | None = None  # None: not known


class MemoryAnswer(Frozen):
    memory: ModelMemory | None = None
    why_none: str | None = None  # a sentence without its full stop


def profiled(params: TrialParams) -> dict[str, Any]:
    """Return the PROFILED dimensions of a trial."""
    return {name: getattr(params, name) for name in PROFILED}
