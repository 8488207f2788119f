"""One trial from its start to its record: hears its processes, keeps the meter's phases, applies the rules."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from carbonopt.channel import Evaluated, Event, Exited, Failed, Finished, PhaseChanged, Progress
from carbonopt.energy.meter import Meter, Reading
from carbonopt.search.pruning import cannot_reach, passes_cap
from carbonopt.train.exits import OUT_OF_MEMORY_EXIT
from carbonopt.trial import (
    TRIAL_PHASES,
    Durations,
    Energy,
    EvalPoint,
    Failure,
    Phase,
    StopReason,
    TrialRecord,
    TrialSpec,
    TrialState,
)

TICK_S = 0.5  # how long to wait for an event before looking at the clock, the cap and the budget again
STORE_EVERY_S = 2.0  # what a running trial has used is stored so often: that much is lost when the study is killed
SIGNALLED = 128


class TrialProcesses(Protocol):
    """What a launcher starts."""

    log: Path

    def receive(self, timeout_s: float) -> Event | None: ...
    def answer(self, stop: StopReason | None = None) -> None: ...
    def end(self) -> None: ...
    def log_tail(self) -> str: ...


@dataclass(frozen=True)
class Rules:
    """What may end this trial before its own end."""

    target_perplexity: float
    prune_target: bool
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
    peak_memory_gib: float | None = None


@dataclass
class TrialWatch:
    """Watches one running trial. `store` takes its record so far, every STORE_EVERY_S and at each evaluation."""

    spec: TrialSpec
    processes: TrialProcesses
    meter: Meter
    rules: Rules
    observers: list[TrialObserver]
    progress: Callable[[int, int, float], None]  # step, total steps, energy of the training window in kWh
    store: Callable[[TrialRecord], None]
    earlier_attempts_energy_kwh: float = 0.0
    _evals: list[EvalPoint] = field(default_factory=list)
    _total_steps: int | None = None
    _phase: Phase = Phase.SETUP
    _stored_at: float = 0.0

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
                self.processes.end()
        self._enter(Phase.GAP)
        readings = self.meter.take(*TRIAL_PHASES)
        return self._record(outcome, readings)

    def _listen(self, oom_kills: int) -> _Outcome:
        heard = time.monotonic()
        while True:
            event = self.processes.receive(TICK_S)
            if event is not None:
                heard = time.monotonic()
                outcome = self._on_event(event, oom_kills)
                if outcome is not None:
                    return outcome
            reason = self._stop_now()
            if reason is not None:
                self.processes.answer(stop=reason)
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
                self._enter(phase)
                self.processes.answer()
            case Progress(step=step, total_steps=total):
                self._total_steps = total
                self.progress(step, total, self.meter.running_kwh(Phase.TRAIN))
            case Evaluated(point=point, total_steps=total):
                return self._on_evaluation(point, total)
            case Finished(summary=summary):
                return self._finished(summary.get("peak_memory_gib"))
            case Failed(kind=kind, text=text, peak_memory_gib=peak):
                state = {"out_of_memory": TrialState.INFEASIBLE, "diverged": TrialState.DIVERGED}.get(
                    kind, TrialState.FAILED
                )
                return _Outcome(state, failure=self._failure(kind, text), peak_memory_gib=peak)
            case Exited(code=code):
                return self._exited(code, _host_oom_kills() > oom_kills)
        return None

    def _on_evaluation(self, point: EvalPoint, total_steps: int) -> _Outcome | None:
        self._total_steps = total_steps
        train_kwh = self.meter.running_kwh(Phase.TRAIN)
        point = point.model_copy(update={"train_energy_kwh": train_kwh})
        self._evals.append(point)
        emissions = self.rules.emissions_kg_co2e(train_kwh)
        for observer in self.observers:
            observer.evaluated(self.spec.number, point, emissions)
        self._store()
        if not math.isfinite(point.perplexity):
            return _Outcome(TrialState.DIVERGED, failure=self._failure("diverged", "the evaluation loss is not finite"))
        hopeless = cannot_reach(self._evals, total_steps, self.rules.target_perplexity)
        if self.rules.prune_target and point.step < total_steps and hopeless:
            self.processes.answer(stop=StopReason.TARGET)
            return _Outcome(TrialState.PRUNED, StopReason.TARGET)
        self.processes.answer()
        return None

    def _stop_now(self) -> StopReason | None:
        if self.rules.interrupted():
            return StopReason.INTERRUPTED
        if self._finished_training():
            return None  # all its energy is spent already: its result costs nothing more
        if passes_cap(self.rules.emissions_kg_co2e(self.meter.running_kwh(Phase.TRAIN)), self.rules.cap_kg_co2e):
            return StopReason.CAP
        if self.rules.budget_spent():
            return StopReason.BUDGET
        return None

    def _finished_training(self) -> bool:
        return bool(self._evals) and self._evals[-1].step == self._total_steps

    def _finished(self, peak_memory_gib: float | None) -> _Outcome:
        if not self._finished_training():
            text = "the trial said that it had finished, but its last evaluation is missing"
            return _Outcome(TrialState.FAILED, failure=self._failure("crash", text))
        return _Outcome(TrialState.COMPLETE, peak_memory_gib=peak_memory_gib)

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
        tail = self.processes.log_tail()
        return Failure(kind=kind, text=f"{text}\n{tail}" if tail else text, log=str(self.processes.log))

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase:
            self.meter.enter(phase)
            self._phase = phase

    def _store(self) -> None:
        self._stored_at = time.monotonic()
        used = {phase: self.meter.running_kwh(phase) for phase in TRIAL_PHASES}
        energy = Energy(
            train=used[Phase.TRAIN], setup=used[Phase.SETUP], eval=used[Phase.EVAL], total=math.fsum(used.values())
        )
        self.store(self._base(TrialState.RUNNING).model_copy(update={"energy_kwh": energy}))

    def _base(self, state: TrialState) -> TrialRecord:
        return TrialRecord(
            trial=self.spec.number,
            state=state,
            attempt=self.spec.attempt,
            seed=self.spec.seed,
            params=self.spec.params,
            evals=tuple(self._evals),
            earlier_attempts_energy_kwh=self.earlier_attempts_energy_kwh,
            total_steps=self._total_steps,
        )

    def _record(self, outcome: _Outcome, readings: dict[Phase, Reading]) -> TrialRecord:
        train, setup, evaluation = (readings[phase] for phase in (Phase.TRAIN, Phase.SETUP, Phase.EVAL))
        complete = outcome.state == TrialState.COMPLETE
        last = self._evals[-1] if complete else None
        return self._base(outcome.state).model_copy(
            update={
                "stop_reason": outcome.stop_reason,
                "perplexity": last and last.perplexity,
                "nll_sum": last and last.nll_sum,
                "eval_tokens": last and last.eval_tokens,
                "emissions_kg_co2e": self.rules.emissions_kg_co2e(train.total_kwh),
                "energy_kwh": Energy(
                    train=train.total_kwh,
                    setup=setup.total_kwh,
                    eval=evaluation.total_kwh,
                    total=train.total_kwh + setup.total_kwh + evaluation.total_kwh,
                    train_gpu=train.gpu_kwh,
                    train_cpu=train.cpu_kwh,
                    train_ram=train.ram_kwh,
                ),
                "duration_s": Durations(
                    train=train.duration_s,
                    setup=setup.duration_s,
                    eval=evaluation.duration_s,
                    total=train.duration_s + setup.duration_s + evaluation.duration_s,
                ),
                "peak_memory_gib": outcome.peak_memory_gib,
                "failure": outcome.failure,
            }
        )


def _host_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it booted; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
