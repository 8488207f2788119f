"""What probes measured: a few steps of settings that leave the quality alone, and of what a trial would compile."""

from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.study import StudyData
from carbonopt.core.trial import Kernels, StopReason
from carbonopt.core.values import Frozen


class ProbeResult(Frozen):
    probe: int
    params: TrialParams
    became: str  # "measured", or the state and reason it ended in
    step_kwh: float | None  # mean of its steps after the first; None: it made the first alone
    first_step_excess_kwh: float | None  # what the first took beyond that
    kernels: Kernels | None
    peak_memory_gib: float | None
    spent_kwh: float  # all of it, its start and end in it


class Probes(Frozen):
    settings: tuple[str, ...]  # dimensions that decide what a step costs: the batch, and others that differ
    results: tuple[ProbeResult, ...]  # by number
    spent_kwh: float
    spent_share: float  # of the whole study's energy


def probes(data: StudyData) -> Probes | None:
    """None where the study made none."""
    if not data.probes:
        return None
    values = {name: {getattr(probe.params, name) for probe in data.probes} for name in affecting("cost")}
    spent_kwh = sum(probe.spent_kwh for probe in data.probes)
    return Probes(
        settings=tuple(name for name in values if len(values[name]) > 1 or name == "global_batch_size"),
        results=tuple(
            ProbeResult(
                probe=probe.trial,
                params=probe.params,
                became="measured" if probe.stop_reason is StopReason.PROBE else probe.stop_reason or probe.state,
                step_kwh=probe.step_kwh,
                first_step_excess_kwh=probe.first_step_excess_kwh,
                kernels=probe.kernels,
                peak_memory_gib=probe.peak_memory_gib,
                spent_kwh=probe.spent_kwh,
            )
            for probe in data.probes
        ),
        spent_kwh=spent_kwh,
        spent_share=spent_kwh / whole_kwh if (whole_kwh := data.spent_kwh()) else 0.0,
    )
