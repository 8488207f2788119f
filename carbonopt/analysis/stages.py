"""Where the trials' time and energy went: by stage, and how fast each trial trained."""

import statistics
from collections.abc import Iterable

from carbonopt.config import ReplayLaunch
from carbonopt.record import StudyData
from carbonopt.trial import Frozen, Stage, StageCost, TrialRecord
from carbonopt.units import JOULES_PER_KWH

# FLOP/s of a GPU's tensor cores in bf16 and fp16 without sparsity, by what its name holds, as the makers' data sheets
# have them: H100 SXM, H200 and GH200 989.4e12, H100 PCIe 756e12, A100 312e12, L40S 362e12.
_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
_HALF_PRECISIONS = ("bf16", "fp16")
_FLOP_PER_PARAMETER_AND_TOKEN = 6  # 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361); attention's not in it


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


class Stages(Frozen):
    shares: tuple[StageShare, ...]  # in order; empty: no trial tells its stages
    speeds: tuple[Speed, ...]  # by trial number; those with more than one step


def stages(data: StudyData) -> Stages:
    replayed = isinstance(data.config.launch, ReplayLaunch)  # its seconds are those of reading a table
    measured = [] if replayed else [record for record in data.records if record.stages]
    speeds = (_speed(record, data) for record in measured)
    return Stages(shares=tuple(_shares(measured)), speeds=tuple(one for one in speeds if one is not None))


def _shares(records: Iterable[TrialRecord]) -> list[StageShare]:
    costs: dict[Stage, list[StageCost]] = {}
    for record in records:
        for stage, cost in (record.stages or {}).items():
            costs.setdefault(stage, []).append(cost)
    whole = StageCost()
    totals = {stage: sum(costs[stage], StageCost()) for stage in Stage if stage in costs}
    for total in totals.values():
        whole += total
    return [
        StageShare(
            stage=stage,
            duration_s=total.duration_s,
            energy_kwh=total.energy_kwh,
            duration_share=total.duration_s / whole.duration_s if whole.duration_s else 0.0,
            energy_share=total.energy_kwh / whole.energy_kwh if whole.energy_kwh else 0.0,
            median_s=statistics.median(cost.duration_s for cost in costs[stage]),
        )
        for stage, total in totals.items()
    ]


def _speed(record: TrialRecord, data: StudyData) -> Speed | None:
    assert record.stages is not None
    steps, first = record.stages.get(Stage.STEPS), record.stages.get(Stage.COMPILE)
    done = record.steps_done or 0
    if data.prepared is None or steps is None or first is None or done < 2 or steps.duration_s <= 0:
        return None
    tokens = (done - 1) * record.params.global_batch_size * data.prepared.sequence_length
    excess_kwh = max(0.0, first.energy_kwh - steps.energy_kwh / (done - 1))
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
        flops_utilisation=_utilisation(tokens_per_s, record, data),
    )


def _utilisation(tokens_per_s: float, record: TrialRecord, data: StudyData) -> float | None:
    """Model FLOP utilisation as Chowdhery et al. 2022 (arXiv 2204.02311) have it, without attention's FLOP."""
    hardware = data.provenance.hardware
    peaks = [_peak_flops(name) for name in hardware.gpus] if hardware is not None else []
    known = [peak for peak in peaks if peak is not None]
    # With adapters the frozen weights need no gradients: another number of FLOP.
    if not known or len(known) < len(peaks) or record.params.precision not in _HALF_PRECISIONS:
        return None
    if record.params.lora_rank or data.prepared is None:
        return None
    return _FLOP_PER_PARAMETER_AND_TOKEN * data.prepared.model_parameters * tokens_per_s / sum(known)


def _peak_flops(gpu_name: str) -> float | None:
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in gpu_name), None)
