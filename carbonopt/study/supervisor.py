"""One trial from its start to its record: hears its processes, keeps the meter's phases, applies the rules."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from carbonopt.core import events
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import Quality
from carbonopt.core.reported import printed_evaluation
from carbonopt.core.trial import (
    TRIAL_PHASES,
    EvalPoint,
    Forecast,
    Phase,
    QualityResult,
    Stage,
    StopReason,
    TrialRecord,
    TrialSpec,
    TrialState,
)
from carbonopt.core.units import now_utc
from carbonopt.energy.codecarbon import FRESH_AFTER_S
from carbonopt.energy.meter import Meter, Reading, disagreement, largest
from carbonopt.engines.base import RunningTrial, was_interrupted
from carbonopt.search.cap import passes_cap
from carbonopt.train.failures import ran_out_of_memory

TICK_S = 0.5  # how long to wait for an event before looking at the clock, the cap and the budget again
_STORE_AGAIN_S = 0.2  # evaluations that follow each other faster are stored together
STORE_EVERY_S = 2.0  # what a running trial has used is stored so often: that much is lost when the study is killed
SIGNALLED = 128
_MOST_TAIL_CHARACTERS = 10_000  # of a log, in a record
PRINTED_LINES = 200  # in which a script without carbonopt's lines may say its quality
_MEASURED_BY_RANKS = ("total_steps", "peak_memory_gib", "rank_peak_memory_gib", "cpu_wait_fraction")
# Of kinds of failure; of all others it is FAILED.
_STATES = {"out_of_memory": TrialState.INFEASIBLE, "diverged": TrialState.DIVERGED, "timeout": TrialState.TIMEOUT}


@dataclass(frozen=True)
class Rules:
    """What may end this trial before its own end."""

    # Why to stop it for its target, by evaluations and total steps; None: is never asked.
    should_prune: Callable[[Sequence[EvalPoint], int], Forecast | None] | None
    audit: bool  # a trial that should be stopped is run to its end all the same
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


def begun(spec: TrialSpec, quality: Quality, worker: str, earlier: TrialRecord | None) -> TrialRecord:
    """The record of a trial or a probe that this worker begins now; `earlier`: of an attempt that was interrupted."""
    known: dict[str, Any] = {name: getattr(spec, name) for name in ("attempt", "seed", "repeat_of", "params")}
    known |= {"trial": spec.number, "quality": QualityResult.named(quality), "worker": worker}
    if earlier is not None:
        known |= {"earlier_attempts_energy_kwh": earlier.spent_kwh, "earlier_attempts_gpu_kwh": earlier.spent_gpu_kwh}
    return TrialRecord(**known, state=TrialState.RUNNING, started_at=now_utc("milliseconds"))


@dataclass
class TrialWatch:
    """Watches one running trial. `store` takes its record so far, every STORE_EVERY_S and at each evaluation."""

    spec: TrialSpec
    so_far: TrialRecord  # as `begun`; then with what the trial and its watch have told
    trial: RunningTrial
    meter: Meter
    rules: Rules
    observers: list[TrialObserver]
    progress: Callable[[int, int, float], None]  # step, total steps, energy of the training window in kWh
    store: Callable[[TrialRecord], None]
    _first_progress: tuple[int, float] | None = None  # step and energy in kWh: what is before has compilation in it
    _projected: tuple[float, float] = (0.0, 0.0)  # share of the steps that it is told from; kWh of all steps
    _phase: Phase = Phase.SETUP
    _phase_untold: bool = True
    _log_size: tuple[int, float] = (0, -math.inf)  # in bytes; since when
    _stage: Stage = Stage.IMPORTS
    _stages: dict[Stage, dict[str, float]] = field(default_factory=dict)  # fields of StageCost
    _closed_at_s: float = 0.0  # when the last stage that has ended did
    _closed_kwh: float = 0.0  # energy of the stages that have ended
    _store_at: float = field(init=False)  # when it is due, by the monotonic clock

    def __post_init__(self) -> None:
        self._store_at = time.monotonic() + STORE_EVERY_S  # whoever began it has stored that
        self._oom_kills = _host_oom_kills()
        self._closed_at_s = time.monotonic() - self.meter.running(Phase.SETUP).duration_s

    def run(self) -> TrialRecord:
        """The trial's record when it has ended, for whatever reason; its processes are gone by then. The meter must be
        in SETUP since before they were started; it is in GAP afterwards."""
        with contextlib.ExitStack() as ending:
            ending.callback(self.trial.end)
            ending.callback(self._enter, Phase.SETUP)  # the end of the processes is neither training nor evaluation
            self._listen()
        self._enter(Phase.GAP)
        readings = self.meter.take(*TRIAL_PHASES)
        if self.spec.program is not None and self._phase_untold:
            # It has told no phases: all of it is taken for training, set-up and evaluations in it.
            readings[Phase.TRAIN], readings[Phase.SETUP] = readings[Phase.SETUP], readings[Phase.TRAIN]
        if self.so_far.state == TrialState.COMPLETE and (text := _unmeasured(readings[Phase.TRAIN])):
            self._fail("unmeasured", text, with_tail=False)
        return self._record(readings)

    def _note(self, **fields: Any) -> None:
        """What is None is no news."""
        news = {name: value for name, value in fields.items() if value is not None}
        self.so_far = TrialRecord(**vars(self.so_far) | news)

    def _listen(self) -> None:
        heard = time.monotonic()
        while self.so_far.state == TrialState.RUNNING:
            event = self.trial.receive(TICK_S)
            if event is not None:
                heard = time.monotonic()
                self._on_event(event)
            if self.so_far.state != TrialState.RUNNING or isinstance(event, events.Evaluated):
                continue  # the trial is about to ask for its next phase: nothing that takes time before that answer
            if (reason := self._stop_now()) is not None:
                self.trial.answer(stop=reason)
                state = TrialState.FAILED if reason == StopReason.INTERRUPTED else TrialState.PRUNED
                self._note(state=state, stop_reason=reason)
            elif time.monotonic() - max(heard, self._said_at()) > self.rules.timeout_s:
                self._fail("timeout", f"no sign of progress for {self.rules.timeout_s:g} s (launch.timeout_s)")
            elif time.monotonic() > self._store_at:
                self._store_at = time.monotonic() + STORE_EVERY_S
                self.store(self._record({phase: self.meter.running(phase) for phase in TRIAL_PHASES}))

    def _said_at(self) -> float:
        """When a script has last written to its log, by the monotonic clock: it may have no other sign of life."""
        if self.spec.program is None:
            return -math.inf
        with contextlib.suppress(OSError):  # a script that removes its log can say nothing by it
            if (size := self.trial.log.stat().st_size) != self._log_size[0]:
                self._log_size = size, time.monotonic()
        return self._log_size[1]

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.PhaseChanged(phase=phase):
                # The trial's device is idle and waits. Reading the meter takes a few ms, the counters tick every 0.1 s:
                # going on first moves a window's edge by less than can be seen, and costs the trial nothing.
                self.trial.answer()
                self._phase_untold = False
                self._enter(phase)
            case events.StageBegun(stage=stage, kernels=kernels):
                self._note(kernels=kernels)
                self._begin(stage)
            case events.Progress(step=step, total_steps=total, cpu_wait_fraction=wait):
                self._note(total_steps=total, steps_done=step, cpu_wait_fraction=wait)
                self._project(step, total)
                self.progress(step, total, self._train_kwh())
            case events.Evaluated():
                self._on_evaluation(event)
            case events.Probed():
                told = {name: getattr(event, name) for name in _MEASURED_BY_RANKS}
                self._note(**told, steps_done=event.step, state=TrialState.PRUNED, stop_reason=StopReason.PROBE)
            case events.Finished() if self._finished_training():
                self._note(state=TrialState.COMPLETE)
            case events.Finished():
                self._fail("crash", "the trial said that it had finished, but its last evaluation is missing")
            case events.Failed(kind=kind, text=text, peak_memory_gib=peak):
                self._note(peak_memory_gib=peak)
                self._fail(kind, text)
            case events.Exited(code=0) if self.spec.program is not None:
                self._on_program_end()
            case events.Exited(code=code):
                self._on_exit(code)

    def _on_evaluation(self, told: events.Evaluated) -> None:
        train_kwh = self._train_kwh()  # closed before the evaluation began: nothing is read here
        point = told.point.model_copy(update={"train_energy_kwh": train_kwh})
        self._note(
            **{name: getattr(told, name) for name in _MEASURED_BY_RANKS},
            # A script may evaluate again after its last step: that one counts.
            evals=(*(earlier for earlier in self.so_far.evals if earlier.step < point.step), point),
            predictions=told.predictions or None,
            steps_done=point.step,
        )
        finite = point.value is not None
        stop = finite and point.step < told.total_steps and self._should_prune(told.total_steps)
        if finite:  # the trial waits for this: first the answer, then the book-keeping
            self.trial.answer(stop=StopReason.TARGET if stop else None)
        emissions = self.rules.emissions_kg_co2e(train_kwh)
        for observer in self.observers:
            observer.evaluated(self.spec.number, point, emissions)
        self._store_at -= STORE_EVERY_S - _STORE_AGAIN_S  # once the trial is on its way again
        if not finite:
            self._fail("diverged", self._not_finite)
        elif stop:
            self._note(state=TrialState.PRUNED, stop_reason=StopReason.TARGET)

    def _stop_now(self) -> StopReason | None:
        if self.rules.interrupted():
            return StopReason.INTERRUPTED
        if self._finished_training() and self.spec.program is None:
            return None  # all its energy is spent already: its result costs nothing more
        if self._finished_training():  # a script may still do anything
            return StopReason.BUDGET if self.rules.budget_spent() else None
        if self.so_far.audited_at_step is None and self._passes_cap():
            return StopReason.CAP
        return StopReason.BUDGET if self.rules.budget_spent() else None

    def _should_prune(self, total_steps: int) -> bool:
        should_prune, evals = self.rules.should_prune, self.so_far.evals
        if should_prune is None or self.so_far.audited_at_step is not None:
            return False
        if (forecast := should_prune(evals, total_steps)) is None:
            return False
        self._note(forecast=forecast, audited_at_step=evals[-1].step if self.rules.audit else None)
        return not self.rules.audit

    def _passes_cap(self) -> bool:
        cap, share, projected_kwh = self.rules.cap_kg_co2e, *self._projected
        spent, projected = map(self.rules.emissions_kg_co2e, (self._train_kwh(), projected_kwh))
        return passes_cap(cap, spent, share, projected)

    def _project(self, step: int, total_steps: int) -> None:
        """What the whole training will take, if every step takes what those since the first report have taken."""
        train_kwh = self._train_kwh()
        first_step, first_kwh = self._first_progress = self._first_progress or (step, train_kwh)
        if step > first_step:
            per_step_kwh = (train_kwh - first_kwh) / (step - first_step)
            self._projected = (step - first_step) / total_steps, train_kwh + per_step_kwh * (total_steps - step)

    def _finished_training(self) -> bool:
        return bool(self.so_far.evals) and self.so_far.evals[-1].step == self.so_far.total_steps

    def _on_program_end(self) -> None:
        """A script is complete with its last report; one that has none of carbonopt's lines may print it."""
        if not self.so_far.evals:
            try:
                said, steps = self.trial.log_tail(PRINTED_LINES), self.so_far.steps_done or 1
                point = printed_evaluation(said, self._quality, steps)
            except BadInput as error:
                self._fail("bad_input", str(error))
                return
            self._note(**({} if point is None else {"evals": (point,), "steps_done": point.step}))
        if not self.so_far.evals:
            name = self._quality.name
            report = f'report it by carbonopt.script, or print one line of JSON at its end: {{"{name}": VALUE}}'
            self._fail("no_quality", f"the script ended without saying its {name}, the quality of the target; {report}")
        elif self.so_far.evals[-1].value is None:
            self._fail("diverged", self._not_finite)
        else:  # by its own will perhaps earlier than it had said
            self._note(state=TrialState.COMPLETE, total_steps=self.so_far.steps_done or self.so_far.evals[-1].step)

    @property
    def _quality(self) -> Quality:
        return self.so_far.quality.of

    @property
    def _not_finite(self) -> str:
        return f"the {'evaluation loss' if self._quality.value_of_mean == 'exp' else self._quality.name} is not finite"

    def _on_exit(self, code: int) -> None:
        """Processes that ended without a word of why."""
        by_signal = code > SIGNALLED or self.spec.program is not None  # programs turn a signal into a code of theirs
        if by_signal and was_interrupted(self.rules.interrupted):
            self._note(state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
        elif self.spec.program is not None and ran_out_of_memory(self.trial.log_tail(PRINTED_LINES)):
            self._fail("out_of_memory", f"the script ran out of memory and ended with code {code}")
        elif code == events.OUT_OF_MEMORY_EXIT and self.spec.program is None:
            self._fail("out_of_memory", "a rank other than the first ran out of memory")
        elif code == SIGNALLED + 9 and _host_oom_kills() > self._oom_kills:
            self._fail("out_of_memory", "the kernel killed it because the host ran out of memory")
        else:
            ended = f"were ended by signal {code - SIGNALLED}" if code > SIGNALLED else f"ended with code {code}"
            if code == SIGNALLED + 7:
                ended += " (SIGBUS: /dev/shm is too small; give the container a larger one, such as --shm-size=8g)"
            self._fail("crash", f"its processes {ended}")

    def _fail(self, kind: str, text: str, *, with_tail: bool = True) -> None:
        if with_tail and (tail := self.trial.log_tail()):
            text = f"{text}\n{tail[-_MOST_TAIL_CHARACTERS:]}"
        failure = {"kind": kind, "text": text, "log": str(self.trial.log)}
        self._note(state=_STATES.get(kind, TrialState.FAILED), failure=failure)

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        self.meter.enter(phase)
        self._phase = phase
        training = Stage.STEPS if self.so_far.evals else Stage.COMPILE
        stages = {Phase.TRAIN: training, Phase.EVAL: Stage.EVALUATION, Phase.SETUP: Stage.TEARDOWN}
        self._begin(stages.get(phase, self._stage))

    def _begin(self, stage: Stage) -> None:
        """The stage before has what was used since it began, by the meter's own readings: all add up to the trial."""
        spent_kwh = math.fsum(self.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
        used = {"duration_s": time.monotonic() - self._closed_at_s, "energy_kwh": spent_kwh - self._closed_kwh}
        before = self._stages.get(self._stage, {})
        self._stages[self._stage] = {name: before.get(name, 0.0) + cost for name, cost in used.items()}
        self._closed_at_s += used["duration_s"]
        self._closed_kwh = spent_kwh
        self._stage = stage

    def _train_kwh(self) -> float:
        return self.meter.running(Phase.TRAIN).total_kwh

    def _record(self, readings: dict[Phase, Reading]) -> TrialRecord:
        """What is told and what is measured; emissions so far are no result."""
        state, train, whole = self.so_far.state, readings[Phase.TRAIN], _whole(readings)
        last = self.so_far.evals[-1:] if state == TrialState.COMPLETE else ()
        reached = {name: getattr(point, name) for point in last for name in ("value", "sum", "count")}
        seconds = {phase.value: reading.duration_s for phase, reading in readings.items()}
        gpu_energy = {phase: gpu for phase, reading in readings.items() if (gpu := reading.gpu) is not None}
        nodes = {node: {phase: reading.nodes[node] for phase, reading in readings.items()} for node in whole.nodes}
        measured: dict[str, Any] = {
            "quality": {**vars(self.so_far.quality), **reached},
            "energy_kwh": _energy(readings),
            "duration_s": {**seconds, "total": whole.duration_s},
            "nodes": tuple({**vars(node), "readings": _energy(parts)} for node, parts in nodes.items()),
            "gpu_energy_kwh": gpu_energy if len(gpu_energy) == len(TRIAL_PHASES) else None,
            "gpu_disagreement": largest((whole.disagreement, disagreement(whole.gpu, whole.duration_s))),
            "gpu_start_temperature_c": train.start_temperature_c,
            "gpu_utilisation": train.gpu_utilisation,
        }
        if state != TrialState.RUNNING:
            emissions = self.rules.emissions_kg_co2e(train.total_kwh)
            measured |= {"stages": self._stages if whole.nodes else None, "emissions_kg_co2e": emissions}
        return TrialRecord(**vars(self.so_far) | measured)


def _unmeasured(train: Reading) -> str | None:
    """A training too short for a reading has cost something all the same: as 0 it would be the cheapest of all."""
    counted = {"the GPUs": train.gpu_kwh}
    if train.objective == "all":
        counted |= {"the CPU": train.cpu_kwh, "the RAM": train.ram_kwh}
    silent = [name for name, energy_kwh in counted.items() if energy_kwh is not None and not energy_kwh > 0]
    text = (
        f"no energy was measured for {' and '.join(silent)} in the {train.duration_s:.2g} s that it trained: readings"
    )
    return f"{text} are {FRESH_AFTER_S * 1000:g} ms apart; train longer (more epochs or more data)" if silent else None


def _whole(readings: dict[Phase, Reading]) -> Reading:
    return readings[Phase.TRAIN] + readings[Phase.SETUP] + readings[Phase.EVAL]


def _energy(readings: dict[Phase, Reading]) -> dict[str, float | None]:
    by_phase = {phase.value: reading.total_kwh for phase, reading in readings.items()}
    by_component = {f"train_{name}": getattr(readings[Phase.TRAIN], f"{name}_kwh") for name in ("gpu", "cpu", "ram")}
    return {**by_phase, **by_component, "total": _whole(readings).total_kwh}


def _host_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it booted; 0 where it does not say."""
    vmstat = Path("/proc/vmstat")
    lines = vmstat.read_text().splitlines() if vmstat.exists() else []  # not Linux
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
