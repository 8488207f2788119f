"""Time and energy of the trials by stage, their training speed, and the ranking in longer runs.

Longer runs can change the ranking, since a run compiles and warms up once, however long it is.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from carbonopt.analysis.confidence import (
    Configuration,
    Evidence,
    Pooled,
    Standing,
    less_interval,
    pooled,
)
from carbonopt.analysis.recommend import Recommendation
from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.trial import Kernels, Stage, StageCost, StopReason, TrialRecord, TrialState
from carbonopt.core.units import JOULES_PER_KWH
from carbonopt.core.values import Frozen
from carbonopt.spec.study_data import StudyData

# Share of a training's energy from which on another trial's larger first step is reported.
WORTH_SAYING = 0.01

# FLOP/s of a GPU's tensor cores in bf16 and fp16 without sparsity, from the makers' data sheets, by
# a part of the GPU's name; the first that fits counts. H100 and H200 are the SXM ones, and H200
# stands for GH200, too.
_PEAK_FLOPS = {
    "H100 NVL": 835.5e12,
    "H200 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
# 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361); those of attention are left out.
_FLOP_PER_PARAMETER_AND_TOKEN = 6
_MOST = 0.5  # share of a training's energy that counts as most of it
_ROUNDING = 1e-9  # relative difference by which two equal figures may differ


class StageShare(Frozen):
    """The time and energy of a stage in all trials together."""

    stage: Stage
    duration_s: float
    energy_kwh: float
    duration_share: float  # share of all stages' time
    energy_share: float
    median_s: float  # median over the trials that had this stage


# Stages that are training.
_TRAINING = (Stage.COMPILE, Stage.GENERATION, Stage.STEPS)


class Speed(Frozen):
    """The training speed of a trial, without its first step, which compiles and warms up."""

    trial: int
    # summed over all ranks; None: the examples' lengths differ, or they are no tokens
    tokens_per_s: float | None
    millijoules_per_token: float | None  # energy that the objective counts
    examples_per_s: float
    millijoules_per_example: float
    first_step_s: float
    # energy beyond a mean step: compilation and warming up; 0 where it took no more
    first_step_excess_kwh: float
    # the excess as a share of the training's energy, which a longer run would not have again
    first_step_excess_share: float
    # share of the time with a kernel on the GPUs, the first step included; None: not recorded
    gpu_utilisation: float | None
    # 6 × parameters × tokens/s ÷ the GPUs' peak FLOP/s; None: the peak is not known, or doesn't
    # apply
    flops_utilisation: float | None
    kernels: Kernels | None = None  # None: nothing is compiled, or it is not known


Speeds = Mapping[int, Speed]  # keyed by trial number


class StoppedEarly(Frozen):
    """A trial that was stopped after most of its training's energy had gone into the first step."""

    trial: int
    stop_reason: StopReason
    steps_done: int
    total_steps: int | None
    first_step_kwh: float
    training_kwh: float
    compiles: bool
    kernels: Kernels | None


class Stages(Frozen):
    shares: tuple[StageShare, ...]  # in the order of the stages; empty: no trial recorded stages
    speeds: tuple[Speed, ...]  # sorted by trial number; only trials with more than one step
    stopped_early: tuple[StoppedEarly, ...] = ()  # sorted by trial number
    compiles: bool = False  # whether any of these trials does
    imported_before: bool = False  # trials are forks of a process with all imports done

    @property
    def evaluation_share(self) -> float | None:
        """The energy of all evaluations ÷ that of all training; None: one of both is not known."""
        energies = {share.stage: share.energy_kwh for share in self.shares}
        training = sum(energies.get(stage, 0.0) for stage in _TRAINING)
        evaluation = energies.get(Stage.EVALUATION)
        return None if evaluation is None or not training else evaluation / training


class CheapestFrom(Frozen):
    """A configuration that is the cheapest from some length of the runs on.

    It is the cheapest up to the length where the next one begins.
    """

    trial: int
    from_length: float  # multiple of the length that the runs had
    excess_kwh: float  # energy that is spent once a run
    energy_per_length_kwh: float  # energy of the rest of the training
    # share of the recommended one's energy that it saves in runs so long that no first step counts;
    # 0 for the recommended one itself
    less_in_the_limit: float
    # interval of that share, from how far energies without the excess spread between repeats; None:
    # nothing was repeated, or it is itself
    less_interval: tuple[float, float] | None


class AsFirst(Frozen):
    """The recommended configuration, charged as if nothing had been compiled before it."""

    # the trial with the largest excess among those that compile the same; None: it was a probe
    like: int | None
    like_probe: int | None  # the probe, if it was one
    excess_kwh: float  # excess of that trial or probe
    energy_kwh: float  # energy of the recommended one's training with that excess
    cheapest: int  # trial that is the cheapest once each configuration is charged so
    cheapest_energy_kwh: float


class NotCompared(Frozen):
    """The compiled trial with the cheapest steps among those that are not compared.

    Trials are not compared if they were stopped or may not be recommended. What a token costs this
    trial is known, and so what a long run would cost; the quality that a long run would reach is
    not.
    """

    trial: int
    of: int  # number of such trials
    # share of the recommended one's energy per token, after its first step, that it saves;
    # negative: it takes more
    less_a_token: float


class Amortisation(Frozen):
    """The recommended configuration among others, if their runs were longer.

    All figures of a configuration that was repeated, and is judged by that, are means over its
    runs.
    """

    # the recommended one; where no trial met the target, the complete one with the least energy
    trial: int
    met: bool
    # configurations, itself included: those that may be recommended, or all complete ones
    compared: int
    unknown: int  # further such configurations, whose first steps were not measured
    energy_kwh: float  # energy of its training
    excess_kwh: float  # part of that energy that is spent once a run
    largest_excess_share: float  # largest share of any trial of the study
    # sorted by length, `trial` first; if there is no other, `trial` stays the cheapest
    cheapest: tuple[CheapestFrom, ...]
    as_first: AsFirst | None  # None: charged so, it costs hardly more
    compiles: bool = False  # whether `trial` does
    not_compared: NotCompared | None = None  # None: there is no such trial


def counts_whole_processes(data: StudyData) -> bool:
    """Return whether trainings are whole processes, none of whose time is set-up or evaluation.

    They are for a script without carbonopt's lines, which does not report its phases.
    """
    completed = [
        row.duration_s
        for row in data.records
        if row.state is TrialState.COMPLETE and row.duration_s
    ]
    return data.config.is_script and any(0 < took.train == took.total for took in completed)


def stages(data: StudyData) -> Stages:
    # The seconds of a replay are those of reading a table, and a process that reports no phases has
    # one stage.
    untold = data.provenance.is_replay or counts_whole_processes(data)
    measured = [] if untold else [record for record in data.records if record.stages]
    return Stages(
        shares=tuple(_shares([record.stages or {} for record in measured])),
        speeds=tuple(speed for record in measured if (speed := _speed(record, data))),
        stopped_early=tuple(
            early for record in measured if (early := _stopped_early(record, data))
        ),
        compiles=any(data.config.compiles(record.params) for record in measured),
        imported_before=bool(measured) and data.config.launch.warm_start and data.config.can_fork,
    )


def _stopped_early(record: TrialRecord, data: StudyData) -> StoppedEarly | None:
    parts, done, compiles = (
        record.stages or {},
        record.steps_done or 0,
        data.config.compiles(record.params),
    )
    if record.stop_reason not in (StopReason.CAP, StopReason.TARGET) or Stage.COMPILE not in parts:
        return None
    first_step_kwh = parts[Stage.COMPILE].energy_kwh
    others = parts.get(Stage.STEPS, StageCost()) + parts.get(Stage.GENERATION, StageCost())
    training_kwh = first_step_kwh + others.energy_kwh
    # Without compilation, a trial of one or two steps would say nothing: the first is half of them.
    if first_step_kwh <= _MOST * training_kwh or not (compiles or done > 2):
        return None
    return StoppedEarly(
        trial=record.trial,
        stop_reason=record.stop_reason,
        steps_done=done,
        total_steps=record.total_steps,
        first_step_kwh=first_step_kwh,
        training_kwh=training_kwh,
        compiles=compiles,
        kernels=record.kernels,
    )


def _shares(trials: Sequence[Mapping[Stage, StageCost]]) -> Iterator[StageShare]:
    costs = {stage: [parts[stage] for parts in trials if stage in parts] for stage in Stage}
    totals = {stage: sum(costs[stage], StageCost()) for stage in Stage if costs[stage]}
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
    parts, others = record.stages or {}, (record.steps_done or 0) - record.first_steps
    steps, first = record.later_steps, parts.get(Stage.COMPILE)
    batch = record.params.global_batch_size
    if (
        batch is None
        or data.prepared is None
        or steps is None
        or first is None
        or others < 1
        or steps.duration_s <= 0
    ):
        return None
    examples, length = others * batch, data.prepared.sequence_length
    tokens = None if length is None else examples * length
    excess_kwh = record.first_step_excess_kwh or 0.0
    training_kwh = first.energy_kwh + steps.energy_kwh
    tokens_per_s = None if tokens is None else tokens / steps.duration_s
    millijoules = steps.energy_kwh * JOULES_PER_KWH * 1000
    return Speed(
        trial=record.trial,
        tokens_per_s=tokens_per_s,
        millijoules_per_token=None if tokens is None else millijoules / tokens,
        examples_per_s=examples / steps.duration_s,
        millijoules_per_example=millijoules / examples,
        first_step_s=first.duration_s / record.first_steps,
        first_step_excess_kwh=excess_kwh,
        first_step_excess_share=excess_kwh / training_kwh if training_kwh else 0.0,
        gpu_utilisation=record.gpu_utilisation,
        flops_utilisation=_utilisation(tokens_per_s, record.params, data),
        kernels=record.kernels,
    )


def flop_per_token(params: TrialParams, data: StudyData) -> int | None:
    """Return the model's FLOP of training on a token: 6 × parameters (arXiv 2001.08361).

    The FLOP of attention and those of recomputed activations are left out. None: the parameters are
    not known, a token meets only some of them (experts), or all but adapters are frozen, which
    need no gradients.
    """
    prepared = data.prepared
    if prepared is None or prepared.model_parameters is None:
        return None
    if prepared.has_experts or params.lora_rank:
        return None
    return _FLOP_PER_PARAMETER_AND_TOKEN * prepared.model_parameters


def _utilisation(tokens_per_s: float | None, params: TrialParams, data: StudyData) -> float | None:
    """Return the model FLOP utilisation of Chowdhery et al. 2022 (arXiv 2204.02311).

    The FLOP of attention are left out.
    """
    each = flop_per_token(params, data)
    if tokens_per_s is None or each is None:
        return None
    gpus = data.provenance.hardware.gpus if data.provenance.hardware else ()
    gpus = gpus[: params.world_size]  # a trial may leave GPUs idle
    peaks = [next((peak for name, peak in _PEAK_FLOPS.items() if name in gpu), 0.0) for gpu in gpus]
    if not peaks or 0 in peaks or params.precision not in ("bf16", "fp16"):
        return None
    return each * tokens_per_s / sum(peaks)


class _Line(NamedTuple):
    """The energy of a configuration's run as a straight line over its length."""

    config: Configuration
    runs: int  # number of runs of which these are means
    excess_kwh: float
    per_length_kwh: float

    @property
    def energy_kwh(self) -> float:
        return self.excess_kwh + self.per_length_kwh


def amortisation(data: StudyData, rec: Recommendation, timed: Stages) -> Amortisation | None:
    """Return what longer runs make of the recommended configuration and the ranking.

    None: no trial completed, or the first steps of the recommended one were not measured.
    """
    evidence = Evidence.of(data, rec.target)
    standings = {config: evidence.standing(config) for config in evidence.configurations}
    standing = next((standings[config] for config in standings if config.trial == rec.trial), None)
    # The recommendation is the cheapest configuration of the best standing that there is.
    eligible = [config for config in standings if standing in (None, standings[config])]
    speeds = {speed.trial: speed for speed in timed.speeds}
    by_first = standing is Standing.INCOMPLETE
    lines = [line for config in eligible if (line := _line(config, speeds, by_first=by_first))]
    lines.sort(
        key=lambda line: (
            line.config.trial != rec.trial,
            line.energy_kwh,
            line.config.mean_rank[1:],
        )
    )
    if not lines or (rec.met and lines[0].config.trial != rec.trial):
        return None
    first, spread = lines[0], _log_spread(evidence.configurations, speeds)
    return Amortisation(
        trial=first.config.trial,
        met=rec.met,
        compared=len(lines),
        unknown=len(eligible) - len(lines),
        energy_kwh=first.energy_kwh,
        excess_kwh=first.excess_kwh,
        largest_excess_share=max(speed.first_step_excess_share for speed in timed.speeds),
        cheapest=tuple(
            CheapestFrom(
                trial=line.config.trial,
                from_length=length,
                excess_kwh=line.excess_kwh,
                energy_per_length_kwh=line.per_length_kwh,
                less_in_the_limit=(
                    0.0 if line is first else 1 - line.per_length_kwh / first.per_length_kwh
                ),
                less_interval=None if line is first else _less_interval(spread, line, first),
            )
            for length, line in _envelope(lines)
        ),
        as_first=_as_first(data, lines, speeds),
        compiles=data.config.compiles(first.config.first.params),
        not_compared=_not_compared(
            data, {config.trial for config in eligible}, first.config, speeds
        ),
    )


def _line(config: Configuration, speeds: Speeds, *, by_first: bool) -> _Line | None:
    """Return a configuration's energy over its length; None if a first step was not measured.

    Args:
        by_first: whether only the search's own run counts, as in the ranking of configurations that
            weren't run with all their seeds.
    """
    runs = config.runs[:1] if by_first else config.runs
    parts = [part for run in runs if (part := _parts_kwh(run, speeds))]
    if len(parts) < len(runs):
        return None
    return _Line(
        config,
        len(runs),
        statistics.fmean(excess_kwh for excess_kwh, _ in parts),
        statistics.fmean(rest_kwh for _, rest_kwh in parts),
    )


def _parts_kwh(run: TrialRecord, speeds: Speeds) -> tuple[float, float] | None:
    """Return a training's energy as its first step's excess and the rest; None: not measured."""
    if run.energy_kwh is None or run.trial not in speeds:
        return None
    excess_kwh = min(speeds[run.trial].first_step_excess_kwh, run.energy_kwh.train)
    return excess_kwh, run.energy_kwh.train - excess_kwh


def _log_spread(tried: Sequence[Configuration], speeds: Speeds) -> Pooled | None:
    """Return the spread of the logarithm of runs' energies without their first steps' excess.

    Whole runs spread otherwise: less where the excess is a large and steady part of them, more
    where kernels are compiled once and then loaded. None: nothing was repeated.
    """
    rests_kwh = [
        [part[1] for run in config.runs if (part := _parts_kwh(run, speeds))] for config in tried
    ]
    return pooled(
        [math.log(kwh) for kwh in of_runs] for of_runs in rests_kwh if min(of_runs, default=0) > 0
    )


def _envelope(lines: Sequence[_Line]) -> list[tuple[float, _Line]]:
    """Return which configuration is the cheapest from which length on.

    The first one begins at length 1. If two begin at the same length, the one with the lower slope
    counts, which is the cheaper one beyond it.
    """
    steps = [(1.0, lines[0])]
    while True:
        length, now = steps[-1]
        overtaking = [
            (
                max(
                    length,
                    (line.excess_kwh - now.excess_kwh) / (now.per_length_kwh - line.per_length_kwh),
                ),
                line,
            )
            for line in lines
            if line.per_length_kwh < now.per_length_kwh * (1 - _ROUNDING)
        ]
        if not overtaking:
            return steps
        next_length = min(at for at, _ in overtaking)
        there = [line for at, line in overtaking if at <= next_length * (1 + _ROUNDING)]
        steps.append(
            (
                next_length,
                min(there, key=lambda line: (line.per_length_kwh, line.config.mean_rank[1:])),
            )
        )


def _less_interval(spread: Pooled | None, line: _Line, first: _Line) -> tuple[float, float] | None:
    """Return the interval of the saving in the limit."""
    if spread is None or not line.per_length_kwh > 0:
        return None
    margin = spread.margin(line.runs, first.runs)
    return less_interval(line.per_length_kwh / first.per_length_kwh, margin)


class _FirstStep(NamedTuple):
    excess_kwh: float
    trial: int | None
    probe: int | None


def _as_first(data: StudyData, lines: Sequence[_Line], speeds: Speeds) -> AsFirst | None:
    compiled_by = attrgetter(*affecting("kernels"))
    # Keys are equal where one trial finds the other's kernels in the cache. A stopped trial or a
    # probe may have been the first.
    first_steps: dict[Any, list[_FirstStep]] = defaultdict(list)
    for record in data.records:
        if record.trial in speeds:
            step = _FirstStep(speeds[record.trial].first_step_excess_kwh, record.trial, None)
            first_steps[compiled_by(record.params)].append(step)
    for probe in data.probes:
        if probe.first_step_excess_kwh is not None:
            first_steps[compiled_by(probe.params)].append(
                _FirstStep(probe.first_step_excess_kwh, None, probe.trial)
            )
    like = [
        max(first_steps[compiled_by(line.config.first.params)], key=itemgetter(0)) for line in lines
    ]
    charged = [
        (line.per_length_kwh + by.excess_kwh, line.config.trial)
        for line, by in zip(lines, like, strict=True)
    ]
    if charged[0][0] <= (1 + WORTH_SAYING) * lines[0].energy_kwh:
        return None
    least_kwh, trial = reduce(
        lambda least, other: other if other[0] < least[0] * (1 - _ROUNDING) else least, charged
    )
    return AsFirst(
        like=like[0].trial,
        like_probe=like[0].probe,
        excess_kwh=like[0].excess_kwh,
        energy_kwh=charged[0][0],
        cheapest=trial,
        cheapest_energy_kwh=least_kwh,
    )


def _not_compared(
    data: StudyData, compared: set[int], first: Configuration, speeds: Speeds
) -> NotCompared | None:
    millijoules = {
        record.trial: speeds[record.trial].millijoules_per_example
        for record in data.records
        if record.state in (TrialState.PRUNED, TrialState.COMPLETE)
        and record.trial in speeds
        and not {record.trial, record.repeat_of} & compared
        and data.config.compiles(record.params)
    }
    of_first = statistics.fmean(
        speeds[run.trial].millijoules_per_example for run in first.runs if run.trial in speeds
    )
    if not millijoules or not of_first > 0:
        return None
    least = min(millijoules, key=lambda trial: millijoules[trial])
    return NotCompared(
        trial=least, of=len(millijoules), less_a_token=1 - millijoules[least] / of_first
    )
