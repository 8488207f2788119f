"""Estimate the memory that a trial needs on each GPU.

The estimate is from what DeepSpeed allocates for its ZeRO stage and offload. ZeRO: Rajbhandari et
al., 2020 (arXiv:1910.02054). What is allocated, and when, is read off DeepSpeed 0.19.8 with
carbonopt's settings (`train.optim.deepspeed_config`): runtime/fp16/unfused_optimizer.py,
runtime/zero/stage_1_and_2.py and runtime/zero/stage3.py.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carbonopt.core.dimensions import TrainingParams, affecting
from carbonopt.core.trial import TrialRecord
from carbonopt.core.units import BYTES_PER_GIB
from carbonopt.core.values import Frozen, Scalar
from carbonopt.space.search_space import ENUMERATION_LIMIT, SearchSpace, all_values, is_integer
from carbonopt.spec.model_memory import Activations, MemoryProfile, ModelMemory, Moment
from carbonopt.spec.space_settings import Domain, Range, values_of
from carbonopt.spec.study_data import StudyData

# Workspace of cuBLAS on Hopper. PyTorch allocates it once for each stream and each thread that uses
# it, here the forward and the backward pass's, and keeps it
# (aten/src/ATen/cuda/CublasHandlePool.cpp). Whole steps have a stream of their own.
_MATRIX_PRODUCTS_BYTES = 2 * 32 * 2**20
# Elements that are all-reduced at once without ZeRO: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE.
_ALL_REDUCED_ELEMENTS = 500_000_000
# The rest of a GPU's memory is CUDA's, the allocator's reserve, and that of the next trial's
# process, which waits beside.
USABLE_SHARE = 0.9
GPU_NUMBERS = (1, 2, 4, 8, 16, 32, 64)  # numbers of GPUs for which the need is estimated, too
# Dimensions that decide together which batches can exist.
_BATCHES = ("global_batch_size", "micro_batch_size_per_gpu", "num_generations")
_MASTER_BYTES = 4  # bytes of a float32 weight or gradient, which the optimizer works on


class MemoryEstimate(Frozen):
    """The estimated memory of each GPU, in GiB.

    Each part is its own maximum; not all parts are at their maximum at the same moment.
    """

    parameters_gib: float  # includes the model's buffers
    gradients_gib: float  # includes the buffers in which ranks add them up
    # the optimizer's states, the weights in float32 where training is in half precision, averaged
    # weights
    optimizer_gib: float
    activations_gib: float  # activations of a micro batch and its loss, or of an evaluation
    peak_gib: float  # maximum of all together, with what matrix products need


class MemoryNeed(Frozen):
    """The memory need of one combination of the settings that decide memory."""

    params: TrainingParams  # its other settings are arbitrary
    estimate: MemoryEstimate

    def fits(self, gpu_memory_gib: float) -> bool:
        return self.estimate.peak_gib <= USABLE_SHARE * gpu_memory_gib


class MeasuredMemory(Frozen):
    """The measured memory of the trials of one combination, beside the estimate."""

    params: TrainingParams  # settings of the first of these trials
    trials: tuple[int, ...]
    measured_gib: tuple[float, ...]  # for each rank, the most that these trials needed
    estimate: MemoryEstimate
    ratio: float  # the estimate ÷ the most that a rank needed


@dataclass(frozen=True)
class _MemoryLayout:
    """The memory layout of a training in bytes: what is always there, and gradients over time."""

    parameters: float
    optimizer: float
    gathered: float = 0.0  # part of the parameters that is not there in the optimizer's step
    always: float = 0.0  # buffers that are never freed
    # During a forward and backward pass there are also the gradients of earlier micro batches,
    held: float = 0.0
    # from the first gradient of the pass on, the buffer in which ranks add them up,
    from_first: float = 0.0
    # and once that buffer was full, this rank's own gradients.
    kept: float = 0.0
    full_at: float = math.inf  # gradient elements with which the buffer is full
    # during a backward pass, for each element whose gradient has been computed
    per_gradient: float = 0.0
    most_gradients: float = math.inf  # the most elements that wait to be given away
    # all that is not always there at the end of a step's last backward pass, when activations are
    # gone
    at_end: float = 0.0
    in_step: float = 0.0  # in the optimizer's step, all that is not always there

    def running(self, moment: Moment) -> float:
        count = moment.gradient_elements
        gradients = self.held + self.per_gradient * min(count, self.most_gradients)
        gradients += (self.from_first if count else 0.0) + (
            self.kept if count > self.full_at else 0.0
        )
        return moment.activation_bytes + gradients


def estimate(params: TrainingParams, memory: ModelMemory) -> MemoryEstimate | None:
    """Estimate the memory of each GPU; None if the model was not examined in these settings."""
    if (profile := memory.profile(params)) is None:
        return None
    layout = _LAYOUTS[params.zero_stage](params, memory, profile)
    step = _at_micro_batch(params.micro_batch_size_per_gpu, profile.activations)
    activations = max(step.evaluation_bytes, *(moment.activation_bytes for moment in step.moments))
    running = max(map(layout.running, step.moments))
    weights = layout.parameters + profile.buffer_bytes
    averaged = profile.trained_parameters if params.weight_averaging else 0
    optimizer = layout.optimizer + _MASTER_BYTES * averaged
    # In an evaluation of averaged weights, the model's own weights are kept aside.
    evaluating = step.evaluation_bytes + _bytes_of(params) * averaged
    at_once = max(running, layout.at_end, layout.in_step - layout.gathered, evaluating)
    products = _MATRIX_PRODUCTS_BYTES * (2 if params.allows_whole_step else 1)
    return MemoryEstimate(
        parameters_gib=weights / BYTES_PER_GIB,
        gradients_gib=(layout.always + max(layout.at_end, layout.in_step)) / BYTES_PER_GIB,
        optimizer_gib=optimizer / BYTES_PER_GIB,
        activations_gib=activations / BYTES_PER_GIB,
        peak_gib=(weights + optimizer + layout.always + at_once + products) / BYTES_PER_GIB,
    )


class EstimatedNeeds:
    """The memory that a GPU must have for a configuration, in GiB, by the estimate.

    It is the estimate with its margin: `MemoryNeed.fits` is whether the GPU has as much.
    """

    def __init__(self, memory: ModelMemory) -> None:
        self._memory = memory
        self._known: dict[str, float | None] = {}

    def __call__(self, values: Mapping[str, Any]) -> float | None:
        """Return the need of these parameters; None if the model was not examined in them."""
        params = TrainingParams(**values)
        key = _decisive(params)
        if key not in self._known:
            estimated = estimate(params, self._memory)
            self._known[key] = None if estimated is None else estimated.peak_gib / USABLE_SHARE
        return self._known[key]


def checkpoint_bytes(space: SearchSpace, memory: ModelMemory) -> tuple[int, int]:
    """Return the smallest and the largest size of a trial's checkpoint on disk, in bytes.

    It holds the trained weights, the copies in float32 from which they are rounded or of which each
    rank has its part, the optimizer's states and the averaged weights.

    Raises:
        ValueError: If the model was examined in none of the space's settings.
    """
    sizes = []
    for need in needs(space, memory):
        params, profile = need.params, memory.profile(need.params)
        assert profile is not None
        trained, each = profile.trained_parameters, _bytes_of(params)
        by_muon = profile.hidden_parameters if params.optimizer == "muon" else 0
        states = memory.optimizer_bytes_per_parameter * (trained - by_muon)
        states += _MASTER_BYTES * by_muon
        copied = params.zero_stage > 0 or each < _MASTER_BYTES
        copies = _MASTER_BYTES * (copied + bool(params.weight_averaging))
        sizes.append(round((each + copies) * trained + states + profile.buffer_bytes))
    return min(sizes), max(sizes)


def needs(
    space: SearchSpace, memory: ModelMemory, gpus: int | None = None
) -> tuple[MemoryNeed, ...]:
    """Return the need of every combination in the space that can exist, as far as memory differs.

    A range counts with both of its ends.

    Args:
        gpus: Number of GPUs of every trial; None: the numbers that the space has.
    """
    numbers: list[Scalar] = [space.world_size if gpus is None else gpus]
    if gpus is None and (domain := space.dimensions["world_size"]) is not None:
        numbers = all_values("world_size", domain) or _ends("world_size", domain)
    # Of a setting that makes no difference to memory, one value is enough.
    values = {
        name: _ends(name, domain)[: None if name in affecting("memory") else 1]
        for name, domain in space.dimensions.free().items()
        if name not in (*_BATCHES, "world_size")
    }
    by_setting: dict[str, MemoryNeed] = {}
    batches = [each for number in numbers for each in _batches(space, int(number))]
    for batch, combination in itertools.product(batches, itertools.product(*values.values())):
        setting = {**batch, **dict(zip(values, combination, strict=True))}
        if space.rule_broken(setting) is None:
            params = TrainingParams.of(space.params(setting))
            if (estimated := estimate(params, memory)) is not None:
                by_setting.setdefault(
                    _decisive(params), MemoryNeed(params=params, estimate=estimated)
                )
    return tuple(by_setting.values())


def _batches(space: SearchSpace, gpus: int) -> list[dict[str, Scalar]]:
    """Return the batch sizes that can exist on a number of GPUs, as far as memory differs.

    The global batch must be a multiple of micro batch × GPUs. Memory differs by the micro batch and
    by whether gradients are accumulated.
    """
    domains = {name: domain for name in _BATCHES if (domain := space.dimensions[name]) is not None}
    values = {
        name: all_values(name, domain) or _ends(name, domain) for name, domain in domains.items()
    }
    if math.prod(map(len, values.values())) > ENUMERATION_LIMIT:
        values = {name: _ends(name, domain) for name, domain in domains.items()}
    different: dict[tuple[bool, int], dict[str, Scalar]] = {}
    for sizes in itertools.product(*values.values()):
        batch = dict(zip(values, sizes, strict=True))
        whole = int(batch["global_batch_size"])
        micro = int(batch.get("micro_batch_size_per_gpu", max(1, whole // gpus)))
        if whole % (micro * gpus) == 0 and whole % int(batch.get("num_generations", 1)) == 0:
            accumulates = whole > micro * gpus
            different.setdefault((accumulates, micro), {**batch, "world_size": gpus})
    if not isinstance(domains.get("micro_batch_size_per_gpu", domains["global_batch_size"]), Range):
        return list(different.values())
    # Of a range, the smallest and the largest micro batch, with and without accumulation.
    ends = []
    for accumulates in (False, True):
        if keys := [key for key in different if key[0] is accumulates]:
            ends += [min(keys), max(keys)]
    return [different[key] for key in dict.fromkeys(ends)]


def differing_settings(every: Iterable[TrainingParams], but: Collection[str]) -> list[str]:
    """Return the names of dimensions that decide memory and that have different values in `every`.

    Args:
        but: names that are left out.
    """
    every = list(every)
    others = [name for name in affecting("memory") if name not in but]
    return [name for name in others if len({getattr(params, name) for params in every}) > 1]


def _ends(name: str, domain: Domain) -> list[Scalar]:
    """Return a range's ends, or all values of another domain."""
    if not isinstance(domain, Range):
        return list(values_of(domain))
    return [int(end) if is_integer(name, domain) else end for end in (domain.low, domain.last)]


def needs_by_gpus(space: SearchSpace, memory: ModelMemory) -> dict[int, tuple[MemoryNeed, ...]]:
    """Return the needs by number of GPUs, for the space's own number and GPU_NUMBERS.

    A number has the configurations of the space that can exist with so many GPUs, if there are any.
    """
    numbers = sorted({space.world_size, *GPU_NUMBERS})
    return {gpus: needs(space, memory, gpus) for gpus in numbers}


def measured_memory(data: StudyData) -> tuple[MeasuredMemory, ...] | None:
    """Return the estimates beside the measured peaks, sorted by estimate.

    None: the study runs on a CPU, or nothing was estimated.
    """
    memory = None if data.prepared is None else data.prepared.memory
    if memory is None or not data.config.launch.gpus:
        return None
    trials: dict[str, list[TrialRecord]] = {}
    for record in data.records:
        if record.rank_peak_memory_gib:
            trials.setdefault(_decisive(TrainingParams.of(record.params)), []).append(record)
    rows = []
    for records in trials.values():
        if (estimated := estimate(TrainingParams.of(records[0].params), memory)) is None:
            continue
        peaks = tuple(
            map(max, zip(*(record.rank_peak_memory_gib for record in records), strict=True))
        )
        rows.append(
            MeasuredMemory(
                params=TrainingParams.of(records[0].params),
                trials=tuple(record.trial for record in records),
                measured_gib=peaks,
                estimate=estimated,
                ratio=estimated.peak_gib / max(peaks),
            )
        )
    return tuple(sorted(rows, key=lambda row: row.estimate.peak_gib)) or None


def _decisive(params: TrainingParams) -> str:
    """Return a key that is equal for equal estimates."""
    settings = params.model_dump(include={*affecting("memory"), "world_size"})
    settings["weight_averaging"] = bool(params.weight_averaging)  # its range makes no difference
    return repr((settings, params.gradient_accumulation_steps > 1))


def _at_micro_batch(size: int, known: Sequence[Activations]) -> Activations:
    """Return the activations at a micro batch size, interpolated by straight lines.

    A tensor grows with the micro batch or doesn't depend on it, and gradients come in the same
    order. Beyond what is known, the lines go on.
    """
    low, high = (choose(known, key=lambda each: each.micro_batch_size) for choose in (min, max))
    span = high.micro_batch_size - low.micro_batch_size

    def between(at_low: int, at_high: int) -> int:
        if span == 0:
            return round(at_low * size / low.micro_batch_size)
        return max(0, round(at_low + (at_high - at_low) * (size - low.micro_batch_size) / span))

    counts = sorted({moment.gradient_elements for each in (low, high) for moment in each.moments})
    most = [(_most_from(count, low), _most_from(count, high)) for count in counts]
    return Activations(
        micro_batch_size=size,
        moments=tuple(
            Moment(activation_bytes=between(*bytes_), gradient_elements=count)
            for count, bytes_ in zip(counts, most, strict=True)
        ),
        evaluation_bytes=between(low.evaluation_bytes, high.evaluation_bytes),
    )


def _most_from(gradients: int, activations: Activations) -> int:
    """Return the most bytes from when so many gradients have been computed on."""
    later = (m.activation_bytes for m in activations.moments if m.gradient_elements >= gradients)
    return max(later, default=0)


def _unpartitioned(
    params: TrainingParams, memory: ModelMemory, profile: MemoryProfile
) -> _MemoryLayout:
    """Return the layout of ZeRO 0.

    Training in float32 has torch's optimizer, in half precision FP16_UnfusedOptimizer with its
    copies in float32.
    """
    number, trained, each = profile.parameters, profile.trained_parameters, _bytes_of(params)
    copies = 0 if each == _MASTER_BYTES else _MASTER_BYTES * trained
    gradients = each * trained
    # The gradient of one parameter, which is added, and all gradients, to which it is added.
    accumulated = gradients + each * profile.largest_parameter
    accumulates = params.gradient_accumulation_steps > 1
    all_reduced = each * min(trained, _ALL_REDUCED_ELEMENTS) if params.world_size > 1 else 0
    has_muon = params.optimizer == "muon"
    by_muon = profile.hidden_parameters if has_muon else 0
    by_other = trained - by_muon
    states = _MASTER_BYTES * by_muon + memory.optimizer_bytes_per_parameter * by_other
    in_step = max(
        profile.muon_step_bytes * has_muon, memory.optimizer_step_bytes_per_parameter * by_other
    )
    return _MemoryLayout(
        parameters=each * number,
        optimizer=copies + states,
        held=accumulated if accumulates else 0,
        per_gradient=0 if accumulates else each,
        at_end=gradients + all_reduced,
        in_step=gradients + copies + in_step,
    )


def _partitioned(
    params: TrainingParams, memory: ModelMemory, profile: MemoryProfile
) -> _MemoryLayout:
    """Return the layout of ZeRO 1 and 2.

    Their optimizer has its own float32 weights, even where training is in float32.
    """
    trained, each, ranks = profile.trained_parameters, _bytes_of(params), params.world_size
    accumulates, offloads = params.gradient_accumulation_steps > 1, params.offload != "none"
    partition = trained / ranks
    buffer = each * memory.reduce_bucket_elements * (2 if memory.overlapped else 1)
    own_gradients = 0.0 if offloads else each * partition
    at_end = buffer + _copied_to_reduce(params, memory, profile) + own_gradients
    if params.zero_stage == 1:  # all gradients are there until the last backward pass ends
        held = buffer + each * (trained + profile.largest_parameter) if accumulates else 0.0
        from_first, at_end = 0.0 if accumulates else buffer, at_end + each * trained
    else:  # each full buffer leaves the rank's own gradients behind
        held, from_first = own_gradients if accumulates else 0.0, buffer
        at_end += held
    flattened = own_gradients if each < _MASTER_BYTES else 0.0  # copy before they become float32
    in_step = (
        own_gradients
        + flattened
        + (_MASTER_BYTES + memory.optimizer_step_bytes_per_parameter) * partition
    )
    return _MemoryLayout(
        parameters=each * profile.parameters,
        optimizer=(
            0.0 if offloads else (_MASTER_BYTES + memory.optimizer_bytes_per_parameter) * partition
        ),
        # A buffer for parameters on their way to the host and back.
        always=each * profile.largest_parameter if offloads else 0.0,
        held=held,
        from_first=from_first,
        kept=own_gradients if params.zero_stage == 2 else 0.0,
        full_at=memory.reduce_bucket_elements,
        per_gradient=0.0 if params.zero_stage == 1 and accumulates else each,
        most_gradients=math.inf if params.zero_stage == 1 else profile.largest_parameter,
        at_end=at_end,
        in_step=0.0 if offloads else in_step,
    )


def _fully_partitioned(
    params: TrainingParams, memory: ModelMemory, profile: MemoryProfile
) -> _MemoryLayout:
    """Return the layout of ZeRO 3.

    On several GPUs, or from the host, parameters are gathered, and stay so as long as there are
    fewer than DeepSpeed's stage3_max_live_parameters. Its own float32 weights are as with ZeRO 1.
    """
    trained, each, ranks = profile.trained_parameters, _bytes_of(params), params.world_size
    offloads, on_host = params.offload != "none", params.offload == "parameters"
    partition = trained / ranks
    gathered = (
        each * min(profile.parameters, memory.live_parameters) if ranks > 1 or on_host else 0.0
    )
    own_gradients = 0.0 if offloads else each * partition
    flattened = own_gradients if each < _MASTER_BYTES else 0.0
    in_step = flattened + (_MASTER_BYTES + memory.optimizer_step_bytes_per_parameter) * partition
    return _MemoryLayout(
        parameters=(0.0 if on_host else each * profile.parameters / ranks) + gathered,
        gathered=gathered,
        optimizer=(
            0.0 if offloads else (_MASTER_BYTES + memory.optimizer_bytes_per_parameter) * partition
        ),
        always=each * memory.reduce_bucket_elements + own_gradients,
        per_gradient=each,
        most_gradients=profile.largest_parameter,
        at_end=_copied_to_reduce(params, memory, profile),
        in_step=0.0 if offloads else in_step,
    )


def _copied_to_reduce(params: TrainingParams, memory: ModelMemory, profile: MemoryProfile) -> float:
    """Return the bytes of a copy of a full buffer, which is made where there is another rank."""
    elements = min(profile.trained_parameters, memory.reduce_bucket_elements)
    return _bytes_of(params) * elements if params.world_size > 1 else 0.0


_LAYOUTS = {0: _unpartitioned, 1: _partitioned, 2: _partitioned, 3: _fully_partitioned}


def _bytes_of(params: TrainingParams) -> int:
    """Return the bytes of a parameter that is trained, which are those of its gradient, too."""
    return 2 if params.precision in ("bf16", "fp16") else 4
