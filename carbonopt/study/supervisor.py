"""One trial from its start to its record: hears its processes, keeps the meter's phases, applies the rules."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from carbonopt.core.events import (
    OUT_OF_MEMORY_EXIT,
    Evaluated,
    Event,
    Exited,
    Failed,
    Finished,
    PhaseChanged,
    Progress,
    StageBegun,
)
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
    _projection: tuple[float, float] | None = None  # share of the steps it is made from, energy of them all in kWh
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
    _started_at: str = ""

    def __post_init__(self) -> None:
        self._closed_at_s = time.monotonic() - self.meter.running(Phase.SETUP).duration_s
        self._started_at = now_utc("milliseconds")

    def run(self) -> TrialRecord:
        """The trial's record when it has ended, for whatever reason. Its processes are gone by then.

        The meter must be in SETUP since before the processes were started; it is in GAP afterwards.
        """
        oom_kills = _host_oom_kills()
        try:
            outcome = self._listen(oom_kills)
        finally:
            try:
                self._enter(Phase.SETUP)  # the end of the processes is neither training nor evaluation
            finally:
                self.trial.end()
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
        return _Outcome(TrialState.FAILED, failure=Failure(kind="unmeasured", text=text, log=str(self.trial.log)))

    def _listen(self, oom_kills: int) -> _Outcome:
        heard = time.monotonic()
        while True:
            event = self.trial.receive(TICK_S)
            if event is not None:
                heard = time.monotonic()
                outcome = self._on_event(event, oom_kills)
                if outcome is not None:
                    return outcome
            if isinstance(event, Evaluated):
                continue  # the trial is about to ask for its next phase: nothing that takes time before that answer
            reason = self._stop_now()
            if reason is not None:
                self.trial.answer(stop=reason)
                state = TrialState.FAILED if reason == StopReason.INTERRUPTED else TrialState.PRUNED
                return _Outcome(state, reason)
            if time.monotonic() - heard > self.rules.timeout_s:
                text = f"no sign of progress for {self.rules.timeout_s:g} s (launch.timeout_s)"
                return _Outcome(TrialState.TIMEOUT, failure=self._failure("timeout", text))
            if time.monotonic() - self._stored_at > STORE_EVERY_S:
                self._store()

    def _on_event(self, event: Event, oom_kills: int) -> _Outcome | None:
        match event:
            case PhaseChanged(phase=phase):
                # The trial's device is idle and waits. Reading the meter takes a few ms, the counters tick every 0.1 s:
                # going on first moves a window's edge by less than can be seen, and costs the trial nothing.
                self.trial.answer()
                self._enter(phase)
            case StageBegun(stage=stage, kernels=kernels):
                self._kernels = kernels or self._kernels
                self._begin(stage)
            case Progress(step=step, total_steps=total, cpu_wait_fraction=cpu_wait_fraction):
                self._total_steps, self._step = total, step
                if cpu_wait_fraction is not None:
                    self._cpu_wait_fraction = cpu_wait_fraction
                self._project(step, total)
                self.progress(step, total, self._train_kwh())
            case Evaluated(point=point, total_steps=total, peak_memory_gib=peak, cpu_wait_fraction=cpu_wait_fraction):
                self._peak_memory_gib, self._cpu_wait_fraction = (
                    peak,
                    cpu_wait_fraction,
                )  # a trial that is stopped says no more
                return self._on_evaluation(point, total)
            case Finished():
                return self._finished()
            case Failed(kind=kind, text=text, peak_memory_gib=peak):
                state = {"out_of_memory": TrialState.INFEASIBLE, "diverged": TrialState.DIVERGED}.get(
                    kind, TrialState.FAILED
                )
                self._peak_memory_gib = peak if peak is not None else self._peak_memory_gib
                return _Outcome(state, failure=self._failure(kind, text))
            case Exited(code=code):
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
            return _Outcome(TrialState.DIVERGED, failure=self._failure("diverged", "the evaluation loss is not finite"))
        return _Outcome(TrialState.PRUNED, StopReason.TARGET) if stop else None

    def _stop_now(self) -> StopReason | None:
        if self.rules.interrupted():
            return StopReason.INTERRUPTED
        if self._finished_training():
            return None  # all its energy is spent already: its result costs nothing more
        if self._audited_at_step is None and self._passes_cap():
            return StopReason.CAP
        if self.rules.budget_spent():
            return StopReason.BUDGET
        return None

    def _should_prune(self, total_steps: int) -> bool:
        if self.rules.should_prune is None or self._audited_at_step is not None:
            return False
        should_prune = self.rules.should_prune(self._evals, total_steps)
        if should_prune and self.rules.audit:
            self._audited_at_step = self._evals[-1].step
            return False
        return should_prune

    def _passes_cap(self) -> bool:
        train_kwh, cap = self._train_kwh(), self.rules.cap_kg_co2e
        if passes_cap(self.rules.emissions_kg_co2e(train_kwh), cap):
            return True
        if self._projection is None:
            return False
        share, projected_kwh = self._projection
        return will_pass_cap(share, self.rules.emissions_kg_co2e(projected_kwh), cap)

    def _project(self, step: int, total_steps: int) -> None:
        """What the whole training will take, if every step takes what those since the first report have taken."""
        train_kwh = self._train_kwh()
        if self._first_progress is None:
            self._first_progress = (step, train_kwh)
        first_step, first_kwh = self._first_progress
        if step > first_step:
            per_step_kwh = (train_kwh - first_kwh) / (step - first_step)
            self._projection = ((step - first_step) / total_steps, train_kwh + per_step_kwh * (total_steps - step))

    def _finished_training(self) -> bool:
        return bool(self._evals) and self._evals[-1].step == self._total_steps

    def _finished(self) -> _Outcome:
        if not self._finished_training():
            text = "the trial said that it had finished, but its last evaluation is missing"
            return _Outcome(TrialState.FAILED, failure=self._failure("crash", text))
        return _Outcome(TrialState.COMPLETE)

    def _exited(self, code: int, host_oom: bool) -> _Outcome:
        """Processes that ended without a word of why."""
        if code == OUT_OF_MEMORY_EXIT:
            text = "a rank other than the first ran out of memory"
        elif code == SIGNALLED + 9 and host_oom:
            text = "the kernel killed it because the host ran out of memory"
        else:
            text = f"its processes ended with code {code}"
            if code > SIGNALLED:
                text = f"its processes were ended by signal {code - SIGNALLED}"
            if code == SIGNALLED + 7:
                text += " (SIGBUS: /dev/shm is too small; give the container a larger one, such as --shm-size=8g)"
            return _Outcome(TrialState.FAILED, failure=self._failure("crash", text))
        return _Outcome(TrialState.INFEASIBLE, failure=self._failure("out_of_memory", text))

    def _failure(self, kind: str, text: str) -> Failure:
        tail = self.trial.log_tail()
        return Failure(kind=kind, text=f"{text}\n{tail}" if tail else text, log=str(self.trial.log))

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        self.meter.enter(phase)
        self._phase = phase
        if phase is Phase.TRAIN:
            self._begin(Stage.STEPS if self._evals else Stage.COMPILE)
        elif phase is Phase.EVAL:
            self._begin(Stage.EVALUATION)
        elif phase is Phase.SETUP:
            self._begin(Stage.TEARDOWN)
        else:
            self._close_stage()

    def _begin(self, stage: Stage) -> None:
        self._close_stage()
        self._stage = stage

    def _close_stage(self) -> None:
        """What was used since the last change of stage, by the meter's own readings: all stages add up to the trial."""
        spent_kwh = math.fsum(self.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
        used = StageCost(duration_s=time.monotonic() - self._closed_at_s, energy_kwh=spent_kwh - self._closed_kwh)
        self._stages[self._stage] = self._stages.get(self._stage, StageCost()) + used
        self._closed_at_s += used.duration_s
        self._closed_kwh = spent_kwh

    def _train_kwh(self) -> float:
        return self.meter.running(Phase.TRAIN).total_kwh

    def _store(self) -> None:
        self._stored_at = time.monotonic()
        so_far = {phase: self.meter.running(phase) for phase in TRIAL_PHASES}
        self.store(self._record(_Outcome(TrialState.RUNNING), so_far))

    def _record(self, outcome: _Outcome, readings: dict[Phase, Reading]) -> TrialRecord:
        train, setup, evaluation = (readings[phase] for phase in (Phase.TRAIN, Phase.SETUP, Phase.EVAL))
        last = self._evals[-1] if outcome.state == TrialState.COMPLETE else None
        running = outcome.state == TrialState.RUNNING  # its emissions so far are no result
        whole = train + setup + evaluation
        duration_s = Durations(
            train=train.duration_s,
            setup=setup.duration_s,
            eval=evaluation.duration_s,
            total=whole.duration_s,
        )
        measured = {phase: gpu for phase, reading in readings.items() if (gpu := reading.gpu) is not None}
        gpu_energy = measured if len(measured) == len(TRIAL_PHASES) else None
        differs = largest((whole.disagreement, disagreement(whole.gpu, whole.duration_s)))
        return TrialRecord(
            trial=self.spec.number,
            state=outcome.state,
            stop_reason=outcome.stop_reason,
            attempt=self.spec.attempt,
            seed=self.spec.seed,
            repeat_of=self.spec.repeat_of,
            params=self.spec.params,
            quality=QualityResult(
                name=self.quality,
                value=last.value if last else None,
                sum=last.sum if last else None,
                count=last.count if last else None,
            ),
            emissions_kg_co2e=None if running else self.rules.emissions_kg_co2e(train.total_kwh),
            energy_kwh=_energy(readings),
            duration_s=duration_s,
            stages=None if running else self._stages,
            evals=tuple(self._evals),
            peak_memory_gib=self._peak_memory_gib,
            kernels=self._kernels,
            failure=outcome.failure,
            started_at=self._started_at,
            worker=self.worker,
            nodes=tuple(
                NodeReadings(
                    name=node.name,
                    devices=node.devices,
                    readings=_energy({phase: reading.nodes[node] for phase, reading in readings.items()}),
                )
                for node in whole.nodes
            ),
            gpu_energy_kwh=gpu_energy,
            gpu_disagreement=differs,
            gpu_utilisation=train.gpu_utilisation,
            cpu_wait_fraction=self._cpu_wait_fraction,
            earlier_attempts_energy_kwh=0.0 if self.earlier is None else self.earlier.spent_kwh,
            earlier_attempts_gpu_kwh=None if self.earlier is None else self.earlier.spent_gpu_kwh,
            total_steps=self._total_steps,
            steps_done=self._step,
            audited_at_step=self._audited_at_step,
        )


def _energy(readings: dict[Phase, Reading]) -> Energy:
    train, setup, evaluation = (readings[phase] for phase in (Phase.TRAIN, Phase.SETUP, Phase.EVAL))
    return Energy(
        train=train.total_kwh,
        setup=setup.total_kwh,
        eval=evaluation.total_kwh,
        total=(train + setup + evaluation).total_kwh,
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
