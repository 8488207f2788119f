"""How much memory a trial needs on each GPU: an estimate from what DeepSpeed allocates for its ZeRO stage and offload.

ZeRO: Rajbhandari et al., 2020 (arXiv:1910.02054). What is allocated, and when, is read off DeepSpeed 0.19.8 with
carbonopt's settings (`train.deepspeed_config`): runtime/fp16/unfused_optimizer.py, runtime/zero/stage_1_and_2.py and
runtime/zero/stage3.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.memory import Activations, MemoryProfile, ModelMemory, Moment
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.core.values import Frozen

# For cuBLAS on Hopper, which PyTorch allocates once and keeps (aten/src/ATen/cuda/CublasHandlePool.cpp).
_MATRIX_PRODUCTS_BYTES = 32 * 2**20
_ALL_REDUCED_ELEMENTS = 500_000_000  # at once, without ZeRO: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
_MASTER_BYTES = 4  # of a float32 weight or gradient, which the optimizer works on


class MemoryEstimate(Frozen):
    """Of each GPU, in GiB. Each part is its own most; not all parts are at their most at the same moment."""

    parameters_gib: float  # and the model's buffers
    gradients_gib: float  # and the buffers in which ranks add them up
    optimizer_gib: float  # its states, and the weights in float32 where training is in half precision
    activations_gib: float  # of a micro batch, the loss among them
    peak_gib: float  # most of all together, and what matrix products need


@dataclass(frozen=True)
class _Layout:
    """In bytes: what is there always, and what else of gradients at each time."""

    parameters: float
    optimizer: float
    held: float = 0.0  # during a forward and backward pass: buffers, and gradients of earlier micro batches
    held_always: float = 0.0  # the part of it that is never freed
    per_gradient: float = 0.0  # during a backward pass, of each element whose gradient has been computed
    most_gradients: float = float("inf")  # elements, of which that many at most wait to be given away
    at_end: float = 0.0  # of a step's last backward pass, when activations are gone
    in_step: float = 0.0  # of the optimizer

    def running(self, moment: Moment) -> float:
        return moment.activation_bytes + self.per_gradient * min(moment.gradient_elements, self.most_gradients)


def estimate(params: TrialParams, memory: ModelMemory) -> MemoryEstimate | None:
    """None: the model was not looked at in these settings."""
    if (profile := memory.profile(params)) is None:
        return None
    layout, of = _LAYOUTS[params.zero_stage](params, memory, profile), profile.activations

    def at_micro_batch(value: Callable[[Activations], float]) -> float:
        return _interpolated(params.micro_batch_size_per_gpu, {each.micro_batch_size: value(each) for each in of})

    activations = at_micro_batch(lambda each: max(moment.activation_bytes for moment in each.moments))
    running = at_micro_batch(lambda each: max(map(layout.running, each.moments)))
    evaluating = at_micro_batch(lambda each: each.evaluation_bytes)
    weights = layout.parameters + profile.buffer_bytes
    gradients = max(layout.held + layout.per_gradient * profile.trained_parameters, layout.at_end, layout.in_step)
    at_once = max(layout.held + running, layout.at_end, layout.in_step, layout.held_always + evaluating)
    return MemoryEstimate(
        parameters_gib=weights / BYTES_PER_GIB,
        gradients_gib=gradients / BYTES_PER_GIB,
        optimizer_gib=layout.optimizer / BYTES_PER_GIB,
        activations_gib=activations / BYTES_PER_GIB,
        peak_gib=(weights + layout.optimizer + at_once + _MATRIX_PRODUCTS_BYTES) / BYTES_PER_GIB,
    )


def _interpolated(size: int, values: dict[int, float]) -> float:
    """By a straight line: every tensor grows with the micro batch or doesn't depend on it."""
    (low, at_low), (high, at_high) = min(values.items()), max(values.items())
    if low == high:
        return at_low * size / low
    return at_low + (at_high - at_low) * (size - low) / (high - low)


def _unpartitioned(params: TrialParams, memory: ModelMemory, profile: MemoryProfile) -> _Layout:
    """ZeRO 0: in float32 torch's optimizer, in half precision FP16_UnfusedOptimizer with its copies in float32."""
    number, trained, each = profile.parameters, profile.trained_parameters, _bytes_of(params)
    copies = 0 if each == _MASTER_BYTES else _MASTER_BYTES * trained
    gradients = each * trained
    accumulated = gradients + each * profile.largest_parameter  # one that is added, and all to which it is
    accumulates = params.gradient_accumulation_steps > 1
    all_reduced = each * min(trained, _ALL_REDUCED_ELEMENTS) if params.world_size > 1 else 0
    return _Layout(
        parameters=each * number,
        optimizer=copies + memory.optimizer_bytes_per_parameter * trained,
        held=accumulated if accumulates else 0,
        per_gradient=0 if accumulates else each,
        at_end=gradients + all_reduced,
        in_step=gradients + copies + memory.optimizer_step_bytes_per_parameter * trained,
    )


def _partitioned(params: TrialParams, memory: ModelMemory, profile: MemoryProfile) -> _Layout:
    """ZeRO 1 and 2, whose optimizer has its own float32 weights also where training is in float32."""
    number, trained, each, ranks = profile.parameters, profile.trained_parameters, _bytes_of(params), params.world_size
    accumulates, offloads = params.gradient_accumulation_steps > 1, params.offload != "none"
    partition = trained / ranks
    buffer = each * memory.reduce_bucket_elements * (2 if memory.overlapped else 1)
    reduced = each * min(trained, memory.reduce_bucket_elements) if ranks > 1 else 0  # a copy
    on_way_to_host = each * profile.largest_parameter if offloads else 0
    own_gradients = 0 if offloads else each * partition
    held, at_end = buffer + on_way_to_host, buffer + on_way_to_host + reduced + own_gradients
    if params.zero_stage == 1:
        at_end += each * trained
        held += each * (trained + profile.largest_parameter) if accumulates else 0
    else:
        fills = trained > memory.reduce_bucket_elements  # before the end, so that gradients are given away
        held += own_gradients * (int(accumulates) + int(fills))
        at_end += own_gradients * int(accumulates)
    step = 2 * own_gradients if each < _MASTER_BYTES else own_gradients  # flattened, before they are float32
    return _Layout(
        parameters=each * number,
        optimizer=0 if offloads else (_MASTER_BYTES + memory.optimizer_bytes_per_parameter) * partition,
        held=held,
        held_always=on_way_to_host,
        per_gradient=0 if params.zero_stage == 1 and accumulates else each,
        most_gradients=float("inf") if params.zero_stage == 1 else profile.largest_parameter,
        at_end=at_end,
        in_step=0 if offloads else step + (_MASTER_BYTES + memory.optimizer_step_bytes_per_parameter) * partition,
    )


def _fully_partitioned(params: TrialParams, memory: ModelMemory, profile: MemoryProfile) -> _Layout:
    """ZeRO 3: on several GPUs, or from the host, parameters are gathered, and stay so as long as there are fewer than
    DeepSpeed's stage3_max_live_parameters."""
    number, trained, each, ranks = profile.parameters, profile.trained_parameters, _bytes_of(params), params.world_size
    offloads, on_host = params.offload != "none", params.offload == "parameters"
    partition = trained / ranks
    gathered = each * min(number, memory.live_parameters) if ranks > 1 or on_host else 0
    buffer = each * memory.reduce_bucket_elements
    own_gradients = 0 if offloads else each * partition
    reduced = each * min(trained, memory.reduce_bucket_elements) if ranks > 1 else 0
    copies = 0 if each == _MASTER_BYTES else _MASTER_BYTES
    step = own_gradients + (copies + memory.optimizer_step_bytes_per_parameter) * partition
    return _Layout(
        parameters=(0 if on_host else each * number / ranks) + gathered,
        optimizer=0 if offloads else (copies + memory.optimizer_bytes_per_parameter) * partition,
        held=buffer + own_gradients,
        held_always=buffer + own_gradients,
        per_gradient=each,
        most_gradients=profile.largest_parameter,
        at_end=buffer + own_gradients + reduced,
        in_step=0 if offloads else buffer + own_gradients + step,
    )


_LAYOUTS = {0: _unpartitioned, 1: _partitioned, 2: _partitioned, 3: _fully_partitioned}


def _bytes_of(params: TrialParams) -> int:
    """Of a parameter that is trained, and of its gradient."""
    return 2 if params.precision in ("bf16", "fp16") else 4
