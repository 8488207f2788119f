"""Measurements of probes.

A probe runs a few steps to measure what they take, or compiles what a trial would compile.
"""

from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.trial import Kernels, StopReason
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData


class ProbeResult(Frozen):
    probe: int
    params: TrialParams
    became: str  # "measured", or the state and reason it ended in
    step_kwh: float | None  # mean of its steps after the first; None: it made only the first
    first_step_excess_kwh: float | None  # energy of the first step beyond that mean
    kernels: Kernels | None
    peak_memory_gib: float | None
    spent_kwh: float  # all of its energy, start and end included


class Probes(Frozen):
    # dimensions that decide what a step costs: the batch, and others that differ between probes
    settings: tuple[str, ...]
    results: tuple[ProbeResult, ...]  # sorted by number
    spent_kwh: float
    spent_share: float  # share of the whole study's energy


def probes(data: StudyData) -> Probes | None:
    """Return the study's probes; None where it made none."""
    if not data.probes:
        return None
    values = {
        name: {getattr(probe.params, name) for probe in data.probes} for name in affecting("cost")
    }
    spent_kwh = sum(probe.spent_kwh for probe in data.probes)
    return Probes(
        settings=tuple(
            name for name in values if len(values[name]) > 1 or name == "global_batch_size"
        ),
        results=tuple(
            ProbeResult(
                probe=probe.trial,
                params=probe.params,
                became="measured"
                if probe.stop_reason is StopReason.PROBE
                else probe.stop_reason or probe.state,
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
