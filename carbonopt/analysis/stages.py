"""Where the trials' time and energy went: by stage, how fast each trained, and what its first step was spent on."""

import statistics
from collections.abc import Iterable, Iterator

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.study import StudyData
from carbonopt.core.trial import Kernels, Stage, StageCost, StopReason, TrialRecord
from carbonopt.core.units import JOULES_PER_KWH
from carbonopt.core.values import Frozen

# FLOP/s of a GPU's tensor cores in bf16 and fp16 without sparsity, by what its name holds, as the makers' data sheets
# have them; H100 and H200 are the SXM ones, and
# H200 stands for GH200, too.
_PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12}
_HALF_PRECISIONS = ("bf16", "fp16")
_FLOP_PER_PARAMETER_AND_TOKEN = 6  # 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361); attention's not in it

# Any of these arguments of Hugging Face's switches compilation on.
_COMPILING_ARGUMENTS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
_MOST = 0.5  # of a training's energy


class StageShare(Frozen):
    """A stage in all trials together."""

    stage: Stage
    duration_s: float
    energy_kwh: float
    duration_share: float  # of all stages
    energy_share: float
    median_s: float  # of the trials that had this stage


class Speed(Frozen):
    """How a trial trained, its first step left out, which compiles and warms up."""

    trial: int
    tokens_per_s: float  # over all ranks
    millijoules_per_token: float  # of what the objective counts
    first_step_s: float
    first_step_excess_kwh: float  # beyond a mean step: compilation and warming up; 0 where it took no more
    first_step_excess_share: float  # of the training's energy: what a longer run would not have again
    gpu_utilisation: float | None  # share of the time with a kernel on the GPUs, the first step's too; None: not told
    flops_utilisation: float | None  # 6 × parameters × tokens/s ÷ what the GPUs can do; None: not known of these
    kernels: Kernels | None = None  # None: it isn't compiled, or not known


class StoppedEarly(Frozen):
    """A trial that a rule stopped when most of its training's energy had gone into its first step."""

    trial: int
    stop_reason: StopReason
    steps_done: int
    total_steps: int | None
    first_step_kwh: float
    training_kwh: float
    compiles: bool
    kernels: Kernels | None


class Stages(Frozen):
    shares: tuple[StageShare, ...]  # in order; empty: no trial tells its stages
    speeds: tuple[Speed, ...]  # by trial number; those with more than one step
    stopped_early: tuple[StoppedEarly, ...] = ()  # by trial number
    compiles: bool = False  # any of these trials does
    imported_before: bool = False  # trials are forks of a process that had imported what they need


def stages(data: StudyData) -> Stages:
    replayed = data.provenance.is_replay  # its seconds are those of reading a table
    measured = [] if replayed else [record for record in data.records if record.stages]
    return Stages(
        shares=tuple(_shares(measured)),
        speeds=tuple(speed for record in measured if (speed := _speed(record, data))),
        stopped_early=tuple(early for record in measured if (early := _stopped_early(record, data))),
        compiles=any(compiles(record.params, data) for record in measured),
        imported_before=data.config.launch.warm_start and bool(measured),
    )


def compiles(params: TrialParams, data: StudyData) -> bool:
    """Whether its first step compiles kernels, or loads those that an earlier trial has compiled."""
    workload = data.config.workload
    given = workload.training_arguments if workload is not None else {}
    if params.torch_compile or any(given.get(name) for name in _COMPILING_ARGUMENTS):
        return True
    on_gpu = bool(data.config.launch.gpus)
    return params.attention_implementation == "flex_attention" or (params.has_fused_output_layer and on_gpu)


def _stopped_early(record: TrialRecord, data: StudyData) -> StoppedEarly | None:
    parts, done, compiled = record.stages or {}, record.steps_done or 0, compiles(record.params, data)
    if record.stop_reason not in (StopReason.CAP, StopReason.TARGET) or Stage.COMPILE not in parts:
        return None
    first_step_kwh = parts[Stage.COMPILE].energy_kwh
    training_kwh = first_step_kwh + parts.get(Stage.STEPS, StageCost()).energy_kwh
    # Without compilation it would say nothing of a trial of one or two steps: the first is half of them.
    if first_step_kwh <= _MOST * training_kwh or not (compiled or done > 2):
        return None
    return StoppedEarly(
        trial=record.trial,
        stop_reason=record.stop_reason,
        steps_done=done,
        total_steps=record.total_steps,
        first_step_kwh=first_step_kwh,
        training_kwh=training_kwh,
        compiles=compiled,
        kernels=record.kernels,
    )


def _shares(records: Iterable[TrialRecord]) -> Iterator[StageShare]:
    costs: dict[Stage, list[StageCost]] = {}
    for record in records:
        for stage, cost in (record.stages or {}).items():
            costs.setdefault(stage, []).append(cost)
    totals = {stage: sum(costs[stage], StageCost()) for stage in Stage if stage in costs}
    whole = sum(totals.values(), StageCost())
    for stage, total in totals.items():
        yield StageShare(
            stage=stage,
            duration_s=total.duration_s,
            energy_kwh=total.energy_kwh,
            duration_share=total.duration_s / whole.duration_s if whole.duration_s else 0.0,
            energy_share=total.energy_kwh / whole.energy_kwh if whole.energy_kwh else 0.0,
            median_s=statistics.median(cost.duration_s for cost in costs[stage]),
        )


def _speed(record: TrialRecord, data: StudyData) -> Speed | None:
    parts, others = record.stages or {}, (record.steps_done or 0) - 1
    steps, first = parts.get(Stage.STEPS), parts.get(Stage.COMPILE)
    if data.prepared is None or steps is None or first is None or others < 1 or steps.duration_s <= 0:
        return None
    tokens = others * record.params.global_batch_size * data.prepared.sequence_length
    excess_kwh = max(0.0, first.energy_kwh - steps.energy_kwh / others)
    training_kwh = first.energy_kwh + steps.energy_kwh
    tokens_per_s = tokens / steps.duration_s
    return Speed(
        trial=record.trial,
        tokens_per_s=tokens_per_s,
        millijoules_per_token=steps.energy_kwh * JOULES_PER_KWH * 1000 / tokens,
        first_step_s=first.duration_s,
        first_step_excess_kwh=excess_kwh,
        first_step_excess_share=excess_kwh / training_kwh if training_kwh else 0.0,
        gpu_utilisation=record.gpu_utilisation,
        flops_utilisation=_utilisation(tokens_per_s, data.prepared.model_parameters, record.params, data),
        kernels=record.kernels,
    )


def _utilisation(tokens_per_s: float, model_parameters: int, params: TrialParams, data: StudyData) -> float | None:
    """Model FLOP utilisation as Chowdhery et al. 2022 (arXiv 2204.02311) have it, without attention's FLOP."""
    gpus = data.provenance.hardware.gpus if data.provenance.hardware is not None else ()
    peaks = [next((peak for name, peak in _PEAK_FLOPS.items() if name in gpu), None) for gpu in gpus]
    # With adapters the frozen weights need no gradients: another number of FLOP.
    if not peaks or None in peaks or params.precision not in _HALF_PRECISIONS or params.lora_rank:
        return None
    return _FLOP_PER_PARAMETER_AND_TOKEN * model_parameters * tokens_per_s / sum(peak for peak in peaks if peak)
