"""One trial from its start to its record: hears its processes, keeps the meter's phases, applies the rules."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from carbonopt.core import events
from carbonopt.core.trial import (
    TRIAL_PHASES,
    Durations,
    Energy,
    EvalPoint,
    Failure,
    Kernels,
    NodeReadings,
    Phase,
    QualityResult,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialSpec,
    TrialState,
)
from carbonopt.core.units import now_utc
from carbonopt.energy.codecarbon import FRESH_AFTER_S
from carbonopt.energy.meter import Meter, Reading, disagreement, largest
from carbonopt.engines.base import RunningTrial
from carbonopt.search.cap import passes_cap, will_pass_cap

TICK_S = 0.5  # how long to wait for an event before looking at the clock, the cap and the budget again
STORE_EVERY_S = 2.0  # what a running trial has used is stored so often: that much is lost when the study is killed
SIGNALLED = 128
# Of kinds of failure; of all others it is FAILED.
_STATES = {"out_of_memory": TrialState.INFEASIBLE, "diverged": TrialState.DIVERGED, "timeout": TrialState.TIMEOUT}


@dataclass(frozen=True)
class Rules:
    """What may end this trial before its own end."""

    should_prune: Callable[[Sequence[EvalPoint], int], bool] | None  # by evaluations and total steps; None: never asked
    audit: bool  # a trial that is should_prune is run to its end all the same
    cap_kg_co2e: float | None  # emissions of the best feasible trial; None: no cap
    emissions_kg_co2e: Callable[[float], float]  # of an energy in kWh
    budget_spent: Callable[[], bool]
    interrupted: Callable[[], bool]
    timeout_s: float


class TrialObserver(Protocol):
    """Who follows trials: the live display and the trackers."""

    def trial_started(self, spec: TrialSpec) -> None: ...
    def evaluated(self, number: int, point: EvalPoint, emissions_kg_co2e: float) -> None: ...
    def trial_ended(self, record: TrialRecord) -> None: ...


@dataclass
class _Outcome:
    state: TrialState
    stop_reason: StopReason | None = None
    failure: Failure | None = None


@dataclass
class TrialWatch:
    """Watches one running trial. `store` takes its record so far, every STORE_EVERY_S and at each evaluation."""

    spec: TrialSpec
    quality: str  # its name
    trial: RunningTrial
    meter: Meter
    rules: Rules
    observers: list[TrialObserver]
    progress: Callable[[int, int, float], None]  # step, total steps, energy of the training window in kWh
    store: Callable[[TrialRecord], None]
    earlier: TrialRecord | None = None  # of an attempt that was interrupted
    worker: str | None = None  # who runs it
    _evals: list[EvalPoint] = field(default_factory=list)
    _total_steps: int | None = None
    _step: int | None = None
    _first_progress: tuple[int, float] | None = None  # step and energy in kWh: what is before has compilation in it
    _projected_kwh: float = 0.0  # energy of all steps
    _projected_from: float = 0.0  # share of the steps that this is told from
    _audited_at_step: int | None = None
    _peak_memory_gib: float | None = None
    _cpu_wait_fraction: float | None = None
    _kernels: Kernels | None = None
    _phase: Phase = Phase.SETUP
    _stage: Stage = Stage.IMPORTS
    _stages: dict[Stage, StageCost] = field(default_factory=dict)
    _closed_at_s: float = 0.0  # when the last stage that has ended did
    _closed_kwh: float = 0.0  # energy of the stages that have ended
    _stored_at: float = 0.0
    _started_at: str = field(default_factory=lambda: now_utc("milliseconds"))

    def __post_init__(self) -> None:
        self._closed_at_s = time.monotonic() - self.meter.running(Phase.SETUP).duration_s

    def run(self) -> TrialRecord:
        """The trial's record when it has ended, for whatever reason. Its processes are gone by then.

        The meter must be in SETUP since before the processes were started; it is in GAP afterwards.
        """
        oom_kills = _host_oom_kills()
        with contextlib.ExitStack() as ending:
            ending.callback(self.trial.end)
            ending.callback(self._enter, Phase.SETUP)  # the end of the processes is neither training nor evaluation
            outcome = self._listen(oom_kills)
        self._enter(Phase.GAP)
        readings = self.meter.take(*TRIAL_PHASES)
        if outcome.state == TrialState.COMPLETE:
            outcome = self._unmeasured(readings[Phase.TRAIN]) or outcome
        return self._record(outcome, readings)

    def _unmeasured(self, train: Reading) -> _Outcome | None:
        """A training too short for a reading has cost something all the same: as 0 it would be the cheapest of all."""
        counted = {"the GPUs": train.gpu_kwh}
        if train.objective == "all":
            counted |= {"the CPU": train.cpu_kwh, "the RAM": train.ram_kwh}
        silent = [name for name, energy_kwh in counted.items() if energy_kwh is not None and not energy_kwh > 0]
        if not silent:
            return None
        text = (
            f"no energy was measured for {' and '.join(silent)} in the {train.duration_s:.2g} s that it trained: "
            f"readings are {FRESH_AFTER_S * 1000:g} ms apart; train longer (more epochs or more data)"
        )
        failure = Failure(kind="unmeasured", text=text, log=str(self.trial.log))
        return _Outcome(TrialState.FAILED, failure=failure)

    def _listen(self, oom_kills: int) -> _Outcome:
        heard = time.monotonic()
        while True:
            event = self.trial.receive(TICK_S)
            if event is not None:
                heard = time.monotonic()
                outcome = self._on_event(event, oom_kills)
                if outcome is not None:
                    return outcome
            if isinstance(event, events.Evaluated):
                continue  # the trial is about to ask for its next phase: nothing that takes time before that answer
            reason = self._stop_now()
            if reason is not None:
                self.trial.answer(stop=reason)
                state = TrialState.FAILED if reason == StopReason.INTERRUPTED else TrialState.PRUNED
                return _Outcome(state, reason)
            if time.monotonic() - heard > self.rules.timeout_s:
                text = f"no sign of progress for {self.rules.timeout_s:g} s (launch.timeout_s)"
                return self._failed("timeout", text)
            if time.monotonic() - self._stored_at > STORE_EVERY_S:
                self._store()

    def _on_event(self, event: events.Event, oom_kills: int) -> _Outcome | None:
        match event:
            case events.PhaseChanged(phase=phase):
                # The trial's device is idle and waits. Reading the meter takes a few ms, the counters tick every 0.1 s:
                # going on first moves a window's edge by less than can be seen, and costs the trial nothing.
                self.trial.answer()
                self._enter(phase)
            case events.StageBegun(stage=stage, kernels=kernels):
                self._kernels = kernels or self._kernels
                self._begin(stage)
            case events.Progress(step=step, total_steps=total, cpu_wait_fraction=wait):
                self._total_steps, self._step = total, step
                self._cpu_wait_fraction = self._cpu_wait_fraction if wait is None else wait
                self._project(step, total)
                self.progress(step, total, self._train_kwh())
            case events.Evaluated(point=point, total_steps=total, peak_memory_gib=peak, cpu_wait_fraction=wait):
                self._peak_memory_gib, self._cpu_wait_fraction = peak, wait  # a trial that is stopped says no more
                return self._on_evaluation(point, total)
            case events.Finished() if self._finished_training():
                return _Outcome(TrialState.COMPLETE)
            case events.Finished():
                return self._failed("crash", "the trial said that it had finished, but its last evaluation is missing")
            case events.Failed(kind=kind, text=text, peak_memory_gib=peak):
                self._peak_memory_gib = self._peak_memory_gib if peak is None else peak
                return self._failed(kind, text)
            case events.Exited(code=code):
                return self._exited(code, _host_oom_kills() > oom_kills)
        return None

    def _on_evaluation(self, point: EvalPoint, total_steps: int) -> _Outcome | None:
        self._total_steps, self._step = total_steps, point.step
        train_kwh = self._train_kwh()  # closed before the evaluation began: nothing is read here
        point = point.model_copy(update={"train_energy_kwh": train_kwh})
        self._evals.append(point)
        finite = point.value is not None
        stop = finite and point.step < total_steps and self._should_prune(total_steps)
        if finite:  # the trial waits for this: first the answer, then the book-keeping
            self.trial.answer(stop=StopReason.TARGET if stop else None)
        emissions = self.rules.emissions_kg_co2e(train_kwh)
        for observer in self.observers:
            observer.evaluated(self.spec.number, point, emissions)
        self._stored_at = 0.0  # due, once the trial is on its way again
        if not finite:
            return self._failed("diverged", "the evaluation loss is not finite")
        return _Outcome(TrialState.PRUNED, StopReason.TARGET) if stop else None

    def _stop_now(self) -> StopReason | None:
        if self.rules.interrupted():
            return StopReason.INTERRUPTED
        if self._finished_training():
            return None  # all its energy is spent already: its result costs nothing more
        if self._audited_at_step is None and self._passes_cap():
            return StopReason.CAP
        return StopReason.BUDGET if self.rules.budget_spent() else None

    def _should_prune(self, total_steps: int) -> bool:
        should_prune = self.rules.should_prune
        if should_prune is None or self._audited_at_step is not None or not should_prune(self._evals, total_steps):
            return False
        if self.rules.audit:
            self._audited_at_step = self._evals[-1].step
        return not self.rules.audit

    def _passes_cap(self) -> bool:
        emissions_kg_co2e, cap = self.rules.emissions_kg_co2e, self.rules.cap_kg_co2e
        spent, projected = emissions_kg_co2e(self._train_kwh()), emissions_kg_co2e(self._projected_kwh)
        return passes_cap(spent, cap) or will_pass_cap(self._projected_from, projected, cap)

    def _project(self, step: int, total_steps: int) -> None:
        """What the whole training will take, if every step takes what those since the first report have taken."""
        train_kwh = self._train_kwh()
        first_step, first_kwh = self._first_progress = self._first_progress or (step, train_kwh)
        if step > first_step:
            per_step_kwh = (train_kwh - first_kwh) / (step - first_step)
            self._projected_from = (step - first_step) / total_steps
            self._projected_kwh = train_kwh + per_step_kwh * (total_steps - step)

    def _finished_training(self) -> bool:
        return bool(self._evals) and self._evals[-1].step == self._total_steps

    def _exited(self, code: int, host_oom: bool) -> _Outcome:
        """Processes that ended without a word of why."""
        if code == events.OUT_OF_MEMORY_EXIT:
            return self._failed("out_of_memory", "a rank other than the first ran out of memory")
        if code == SIGNALLED + 9 and host_oom:
            return self._failed("out_of_memory", "the kernel killed it because the host ran out of memory")
        ended = f"were ended by signal {code - SIGNALLED}" if code > SIGNALLED else f"ended with code {code}"
        if code == SIGNALLED + 7:
            ended += " (SIGBUS: /dev/shm is too small; give the container a larger one, such as --shm-size=8g)"
        return self._failed("crash", f"its processes {ended}")

    def _failed(self, kind: str, text: str) -> _Outcome:
        tail = self.trial.log_tail()
        failure = Failure(kind=kind, text=f"{text}\n{tail}" if tail else text, log=str(self.trial.log))
        return _Outcome(_STATES.get(kind, TrialState.FAILED), failure=failure)

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        self.meter.enter(phase)
        self._phase = phase
        training = Stage.STEPS if self._evals else Stage.COMPILE
        stages = {Phase.TRAIN: training, Phase.EVAL: Stage.EVALUATION, Phase.SETUP: Stage.TEARDOWN}
        self._begin(stages.get(phase, self._stage))

    def _begin(self, stage: Stage) -> None:
        """The stage before has what was used since it began, by the meter's own readings: all add up to the trial."""
        spent_kwh = math.fsum(self.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
        used = StageCost(duration_s=time.monotonic() - self._closed_at_s, energy_kwh=spent_kwh - self._closed_kwh)
        self._stages[self._stage] = self._stages.get(self._stage, StageCost()) + used
        self._closed_at_s += used.duration_s
        self._closed_kwh = spent_kwh
        self._stage = stage

    def _train_kwh(self) -> float:
        return self.meter.running(Phase.TRAIN).total_kwh

    def _store(self) -> None:
        self._stored_at = time.monotonic()
        so_far = {phase: self.meter.running(phase) for phase in TRIAL_PHASES}
        self.store(self._record(_Outcome(TrialState.RUNNING), so_far))

    def _record(self, outcome: _Outcome, readings: dict[Phase, Reading]) -> TrialRecord:
        train, whole = readings[Phase.TRAIN], _whole(readings)
        running = outcome.state == TrialState.RUNNING  # its emissions so far are no result
        last = self._evals[-1:] if outcome.state == TrialState.COMPLETE else []
        reached = {name: getattr(point, name) for point in last for name in ("value", "sum", "count")}
        seconds = {phase.value: reading.duration_s for phase, reading in readings.items()}
        gpu_energy = {phase: gpu for phase, reading in readings.items() if (gpu := reading.gpu) is not None}
        nodes = {node: {phase: reading.nodes[node] for phase, reading in readings.items()} for node in whole.nodes}
        return TrialRecord(
            trial=self.spec.number,
            **vars(outcome),
            attempt=self.spec.attempt,
            seed=self.spec.seed,
            repeat_of=self.spec.repeat_of,
            params=self.spec.params,
            quality=QualityResult(name=self.quality, **reached),
            emissions_kg_co2e=None if running else self.rules.emissions_kg_co2e(train.total_kwh),
            energy_kwh=_energy(readings),
            duration_s=Durations(**seconds, total=whole.duration_s),
            stages=None if running else self._stages,
            evals=tuple(self._evals),
            peak_memory_gib=self._peak_memory_gib,
            kernels=self._kernels,
            started_at=self._started_at,
            worker=self.worker,
            nodes=tuple(
                NodeReadings(name=node.name, devices=node.devices, readings=_energy(parts))
                for node, parts in nodes.items()
            ),
            gpu_energy_kwh=gpu_energy if len(gpu_energy) == len(TRIAL_PHASES) else None,
            gpu_disagreement=largest((whole.disagreement, disagreement(whole.gpu, whole.duration_s))),
            gpu_utilisation=train.gpu_utilisation,
            cpu_wait_fraction=self._cpu_wait_fraction,
            earlier_attempts_energy_kwh=0.0 if self.earlier is None else self.earlier.spent_kwh,
            earlier_attempts_gpu_kwh=None if self.earlier is None else self.earlier.spent_gpu_kwh,
            total_steps=self._total_steps,
            steps_done=self._step,
            audited_at_step=self._audited_at_step,
        )


def _whole(readings: dict[Phase, Reading]) -> Reading:
    return readings[Phase.TRAIN] + readings[Phase.SETUP] + readings[Phase.EVAL]


def _energy(readings: dict[Phase, Reading]) -> Energy:
    train = readings[Phase.TRAIN]
    return Energy(
        **{phase.value: reading.total_kwh for phase, reading in readings.items()},
        total=_whole(readings).total_kwh,
        train_gpu=train.gpu_kwh,
        train_cpu=train.cpu_kwh,
        train_ram=train.ram_kwh,
    )


def _host_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it booted; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
