"""Watches one trial from its start to its record.

It receives the events of the trial's processes, switches the meter's phases and applies the rules
that may stop the trial.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carbonopt.core import channel, events
from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import Quality
from carbonopt.core.script_reports import printed_evaluations
from carbonopt.core.trial import (
    TRIAL_PHASES,
    Attempt,
    Forecast,
    Phase,
    QualityLines,
    QualityResult,
    Stage,
    StageCost,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.core.units import now_utc
from carbonopt.energy.meter import Meter
from carbonopt.energy.meter_reading import Reading
from carbonopt.engines.engine import RunningTrial, await_own_signal
from carbonopt.search.cap import CostProjection, exceeds_cap
from carbonopt.spec.quality_source import FileState, NoQuality
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.phases import TrialPhases
from carbonopt.study.process_exit import (
    SIGNALLED,
    STILL_CONNECTED,
    host_oom_kills,
    how_they_ended,
    killed_by_signal,
)
from carbonopt.study.record_fields import at_most, measured_fields, unmeasured
from carbonopt.study.standstill import Standstill
from carbonopt.study.trial_checkpoint import Checkpoint
from carbonopt.study.trial_observer import TrialObserver
from carbonopt.train.failures import ran_out_of_memory

# Longest wait for an event before the clock, the cap and the budget are checked again.
TICK_S = 0.5
_STORE_AGAIN_S = 0.2  # evaluations that follow each other faster are stored together
# While a trial has fewer evaluations than this, each is stored at once; later ones wait for
# STORE_EVERY_S.
_STORED_AT_ONCE = 100

# Interval for storing what a running trial has used, which is lost when the study is killed.
STORE_EVERY_S = 2.0

# Largest share of a trial's time that storing its record may take: the more evaluations a record
# has, the longer it takes.
_STORE_SHARE = 0.02

# Largest number of times that the models are asked about one running trial: each answer takes
# milliseconds.
_MOST_QUESTIONS = 200
_MOST_TAIL_CHARACTERS = 10_000  # largest number of characters of a log that a record keeps
# Largest share of a script's steps whose energy may have been lost with a study that was killed.
MOST_UNMEASURED = 0.01
PRINTED_LINES = 200  # last lines in which a script without carbonopt's lines may print its quality
_MEASURED_BY_RANKS = ("total_steps", "peak_memory_gib", "rank_peak_memory_gib", "cpu_wait_fraction")

# A trial's state by its kind of failure; FAILED for all other kinds.
_STATES = {
    "out_of_memory": TrialState.INFEASIBLE,
    "diverged": TrialState.DIVERGED,
    "timeout": TrialState.TIMEOUT,
}


def begun_record(
    spec: TrialSpec, quality: Quality, worker: str, earlier: TrialRecord | None = None
) -> TrialRecord:
    """Return the record of a trial or a probe that this worker begins now.

    Args:
        earlier: The record of an attempt that was interrupted.
    """
    known: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ("attempt", "seed", "repeat_of", "replaces_repeat", "params")
    }
    known |= {"trial": spec.number, "quality": QualityResult.named(quality), "worker": worker}
    if earlier is not None:
        known |= {
            "earlier_attempts_energy_kwh": earlier.spent_kwh,
            "earlier_attempts_gpu_kwh": earlier.spent_gpu_kwh,
            # Nothing of them counts, unless this attempt goes on from a checkpoint.
            "earlier_attempts": tuple(
                Attempt(started_at=each.started_at) for each in earlier.attempts
            ),
        }
    return TrialRecord(**known, state=TrialState.RUNNING, started_at=now_utc("milliseconds"))


@dataclass(frozen=True)
class Rules:
    """The rules that may end a trial before its own end."""

    emissions_kg_co2e: Callable[[float], float]  # returns the emissions of an energy in kWh
    budget_spent: Callable[[], bool]
    interrupted: Callable[[], bool]
    timeout_s: float  # longest time without progress
    time_limit_s: float | None = None  # longest time for the whole trial
    # Is given a trial's evaluations and total steps. Returns the forecast that it will miss the
    # target, or None if it may meet it. If there is no function, no trial is pruned for its target.
    should_prune: Callable[[Sequence[EvalPoint], int], Forecast | None] | None = None
    audit: bool = False  # True: a trial that should be pruned runs to its end all the same
    # Lowest emissions of the trials in `TrialPlan.meeting`; None: no cap.
    cap_kg_co2e: float | None = None
    # whether the cap also counts what the steps that are left will cost
    projects_cost: bool = True


@dataclass
class TrialWatch:
    """The watch over one running trial.

    It passes the trial's record so far to `store` every STORE_EVERY_S, and _STORE_AGAIN_S after an
    evaluation unless there are _STORED_AT_ONCE already. If storing takes long, it is done less
    often.
    """

    spec: TrialSpec
    # first as `begun_record` returns it, then with all that is known of the trial
    so_far: TrialRecord
    trial: RunningTrial
    meter: Meter
    rules: Rules
    observers: list[TrialObserver]
    # Receives the step, the total steps and the energy of the training window in kWh.
    progress: Callable[[int, int, float], None]
    store: Callable[[TrialRecord], None]
    # Receives the energy in kWh of this attempt so far, each time that the trial is looked at.
    still_running: Callable[[float], None] = lambda spent_kwh: None
    # state of the file of the script's quality before the trial; None: there is none
    quality_file: FileState | None = None
    # the last checkpoint of earlier attempts; None: there is none
    checkpoint: Checkpoint | None = None
    # Receives a new checkpoint; returns whether it was stored.
    store_checkpoint: Callable[[Checkpoint], bool] = lambda checkpoint: False
    # Receives a message for the user.
    warn: Callable[[str], None] = lambda text: None
    _projection: CostProjection = field(default_factory=CostProjection)
    _phase_untold: bool = True  # no phase has been reported yet
    _warned_of_start: bool = False  # the user knows that the script only prints so far
    _log_size: tuple[int, float] = (0, -math.inf)  # size in bytes; time of its last change
    # Evaluations so far; `so_far` gets them when it is stored.
    _evals: list[EvalPoint] = field(default_factory=list)
    _planned_steps: int | None = None  # the first reported total; a script may make more
    _went_on: Checkpoint | None = None  # the checkpoint that this attempt goes on from
    # A resumed script may go on from its checkpoint or begin anew, which its first step shows.
    # Until then, this is the trial's record for the case that it begins anew. None: it is known
    # which it does, or the trial has no checkpoint.
    _undecided: TrialRecord | None = None
    # Reading of TRAIN at the last report of a step; None: no step has ended yet, or the program is
    # a script, whose work after its last step counts as no training.
    _at_report: Reading | None = None
    _left: events.ScriptEnded | None = None  # the end of the script's own process
    _has_saved: bool = False  # this attempt has a checkpoint of its own
    _ask_from: float = 0.0  # step from which the models are asked again whether to prune the trial
    _store_at: float = field(init=False)  # monotonic time at which storing is due
    _phases: TrialPhases = field(init=False)

    def __post_init__(self) -> None:
        self._store_at = time.monotonic() + STORE_EVERY_S  # the trial's begin is stored already
        self._oom_kills = host_oom_kills()
        self._began_s = time.monotonic()
        self._phases = TrialPhases(self.meter)
        if self._keeps_checkpoints and self.checkpoint is not None:
            self._undecided = self.so_far
            self._go_on(self.checkpoint, self.checkpoint.step)

    def run(self) -> TrialRecord:
        """Watch the trial until it has ended, for whatever reason, and return its record.

        The trial's processes are gone by then. The caller must have switched the meter to SETUP
        before starting them; this method leaves it in GAP.
        """
        with contextlib.ExitStack() as ending:  # calls the last callback first
            ending.callback(self.trial.end)
            # The end of the processes is neither training nor evaluation.
            ending.callback(self._phases.enter, Phase.SETUP, Stage.TEARDOWN)
            ending.callback(self._phases.end)
            self._listen()
            self._note_waiting()
        self._phases.enter(Phase.GAP)
        readings = self.meter.take(*TRIAL_PHASES)
        if self._is_one_piece:
            # The script reports no phases: all of its run counts as training, including its setup
            # and evaluations.
            readings[Phase.TRAIN], readings[Phase.SETUP] = (
                readings[Phase.SETUP],
                readings[Phase.TRAIN],
            )
            self._phases.join_as_training(readings[Phase.TRAIN])
            if self._went_on is not None:
                self._went_on = self._went_on.as_one_piece()
        train = self._with_earlier(readings)[Phase.TRAIN]
        if self.so_far.state == TrialState.COMPLETE and (text := unmeasured(train)):
            self._fail("unmeasured", text, with_tail=False)
        self._note_if_it_goes_on()
        record = self._record(readings)
        if self._keeps_checkpoints and record.stop_reason is StopReason.INTERRUPTED:
            self._save(record, readings, self._phases.stages)
        return record

    @property
    def _keeps_checkpoints(self) -> bool:
        """True for a script that saves itself, whose attempts are added up."""
        return self.spec.program is not None and self.spec.program.keeps_checkpoints

    def _note_if_it_goes_on(self) -> None:
        """Note that a trial that crashed will be run again, if this attempt has saved it.

        Each attempt thus comes further. A trial whose attempt crashed without saving has failed.
        """
        failure = self.so_far.failure
        if self._has_saved and failure is not None and failure.kind == "crash":
            self._note(stop_reason=StopReason.INTERRUPTED)

    @property
    def _is_one_piece(self) -> bool:
        """True for a script that reported no phases.

        False if it has carbonopt's lines but failed before it reached one.
        """
        program = self.spec.program
        if program is None or not self._phase_untold:
            return False
        return not program.has_lines or self.so_far.state is TrialState.COMPLETE

    def _note(self, **fields: Any) -> None:
        """Update the record with those of the fields that are not None."""
        news = {name: value for name, value in fields.items() if value is not None}
        self.so_far = TrialRecord(**vars(self.so_far) | news)

    def _listen(self) -> None:
        heard_s = time.monotonic()
        standstill = Standstill(self.trial.runnable_s, self.trial.runnable_while_stopped_s)
        trial_waits = False
        while self.so_far.state == TrialState.RUNNING:
            standstill.begin_waiting(trial_waits=trial_waits)
            event = self.trial.receive(TICK_S)
            trial_waits = isinstance(event, events.Evaluated | events.Waited)
            listened_s = time.monotonic()  # this process may be stopped anywhere below, too
            heard_s += self._leave_out(standstill)
            standstill.begin()
            self._phases.look()
            if event is None:
                self.still_running(self._phases.spent_kwh)
            else:
                if self._is_sign_of_life(event):
                    heard_s = time.monotonic()
                self._on_event(event)
            if self.so_far.state != TrialState.RUNNING or trial_waits:
                # The trial is about to ask for its next phase; nothing that takes time may delay
                # the answer.
                continue
            if (reason := self._stop_now()) is not None:
                self.trial.answer(stop=reason)
                state = TrialState.FAILED if reason == StopReason.INTERRUPTED else TrialState.PRUNED
                self._note(state=state, stop_reason=reason)
            elif listened_s - max(heard_s, self._said_at()) > self.rules.timeout_s:
                self._fail("timeout", self._silence)
            elif (
                limit_s := self.rules.time_limit_s
            ) is not None and listened_s - self._began_s > limit_s:
                self._fail(
                    "timeout", f"it had not ended after {limit_s:g} s (launch.trial_time_limit_s)"
                )
            else:
                self._warn_of_long_start(listened_s - heard_s)
                if time.monotonic() > self._store_at:
                    self._store()

    def _warn_of_long_start(self, unheard_s: float) -> None:
        """Warn once of a script that prints for long, but has not begun its training.

        It may load data, and show its progress, or wait for something for ever: nothing tells the
        study which it does, so it goes on.
        """
        program = self.spec.program
        if self._warned_of_start or program is None or not program.has_lines:
            return
        if not self._phase_untold or unheard_s <= self.rules.timeout_s:
            return
        self._warned_of_start = True
        limited = "" if self.rules.time_limit_s else "; set launch.trial_time_limit_s to end it"
        self.warn(
            f"trial {self.spec.number}: the script prints, but has not begun its training after"
            f" {self.rules.timeout_s:g} s (launch.timeout_s), and goes on while it prints{limited}."
        )

    def _leave_out(self, standstill: Standstill) -> float:
        """Leave the time in which the trial stood still out of its figures.

        Returns:
            The seconds of standstill by the monotonic clock, in which the study could not listen.
        """
        still_s, asleep_s = standstill.stood_still_s(TICK_S), standstill.asleep_s
        if still_s:
            self._phases.stand_still(still_s / standstill.waited_s())
            self._began_s += still_s
        # A trial that is stopped alone may stay so: its time limits go on.
        stopped_s = 0.0 if still_s else standstill.was_stopped_s()
        if stopped_s:
            self._phases.stand_still(1.0)
        if still_s or asleep_s or stopped_s:
            so_far_s = self.so_far.standstill_s or 0.0
            self._note(standstill_s=so_far_s + still_s + asleep_s + stopped_s)
        return still_s

    def _note_waiting(self) -> None:
        """Note how long a script that says nothing waited for cores, as read from outside.

        A training that reports its phases reads it itself, for the training alone.
        """
        if self.spec.program is not None and self._phase_untold:
            self._note(cpu_wait_fraction=self.trial.cpu_wait_fraction())

    def _store(self) -> None:
        began_s = time.monotonic()
        self._note_waiting()
        if self._keeps_checkpoints:
            readings, stages = self._phases.cut()
            record = self._record(readings)
            self.store(record)
            self._save(record, readings, stages)
        else:
            self.store(self._record({phase: self.meter.running(phase) for phase in TRIAL_PHASES}))
        ended_s = time.monotonic()
        self._store_at = ended_s + max(STORE_EVERY_S, (ended_s - began_s) / _STORE_SHARE)

    def _is_sign_of_life(self, event: events.Event) -> bool:
        """Return whether an event shows progress; a script's repeated step does not."""
        if self.spec.program is None or not isinstance(event, events.Progress):
            return True
        return self._undecided is not None or event.step > (self.so_far.steps_done or 0)

    def _said_at(self) -> float:
        """Return the monotonic time at which a script that reports no steps last wrote to its log.

        It has no other sign of life. A script that reports its steps may print whatever it likes
        while it hangs.
        """
        if self.spec.program is None or not self._phase_untold or self.trial.log is None:
            return -math.inf
        with contextlib.suppress(OSError):  # a removed log is no sign of life
            if (size := self.trial.log.stat().st_size) != self._log_size[0]:
                self._log_size = size, time.monotonic()
        return self._log_size[1]

    @property
    def _silence(self) -> str:
        limit = f"for {self.rules.timeout_s:g} s (launch.timeout_s)"
        if self.spec.program is None or self._phase_untold:
            return f"no sign of progress {limit}"
        return f"no step was made {limit}, after step {self.so_far.steps_done or 0}"

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.PhaseChanged(phase=phase, stage=stage, since_step=since_step):
                # The trial's device is idle until this answer, and may be at work again when the
                # meter is read. That takes a few ms, and the counters tick every 0.1 s: answering
                # first moves a window's edge by less than can be seen, and costs the trial nothing.
                self.trial.answer()
                self._phase_untold = False
                if since_step:
                    self._phases.claim(phase, stage or self._phases.usual(phase))
                self._phases.answered()
                self._phases.enter(phase, stage)
            case events.StageBegun(stage=stage, kernels=kernels):
                self._note(kernels=self.so_far.kernels or kernels)
                self._phases.begin(stage)
                if stage is Stage.STEPS:  # begins when the first step has ended
                    self._read_at_report()
            case events.Progress():
                self._on_progress(event)
            case events.Evaluated():
                self._on_evaluation(event)
            case events.Waited(seconds=waited_s):
                self._phases.waited(waited_s)
            case events.Probed():
                reported = {name: getattr(event, name) for name in _MEASURED_BY_RANKS}
                self._note(
                    **reported,
                    steps_done=event.step,
                    state=TrialState.PRUNED,
                    stop_reason=StopReason.PROBE,
                )
                self._read_at_report()
            case events.Continued(step=step):
                self._on_continued(step)
            case events.Saved(step=step):
                self._on_saved(step)
            case events.Remarked(text=text):
                self.warn(f"trial {self.spec.number}: {text}.")
            case events.Finished() if self._finished_training():
                self._note(state=TrialState.COMPLETE)
            case events.Finished():
                self._fail(
                    "crash",
                    "the trial said that it had finished, but its last evaluation is missing",
                )
            case events.Failed(kind=kind, text=text, peak_memory_gib=peak):
                self._note(peak_memory_gib=peak)
                self._fail(kind, text)
            case events.ScriptEnded():
                self._left = event
            case events.Exited(code=0) if self.spec.program is not None:
                if not self._failed_within():
                    self._on_program_end()
            case events.Exited(code=code):
                self._on_exit(code)

    def _on_progress(self, reported: events.Progress) -> None:
        step, total = reported.step, reported.total_steps
        goes_on = self._undecided is not None
        self._decide_going_on(step - 1)
        self._planned_steps = self._planned_steps or total
        self._note(total_steps=total, steps_done=step, cpu_wait_fraction=reported.cpu_wait_fraction)
        if goes_on and self._went_on is not None:
            self._note_unmeasured(self._went_on.unmeasured_steps(step - 1), total)
        if self.spec.program is not None:
            self._phases.stepped(reported.ago_s)
        self._read_at_report()
        self._project(step, total)
        self.progress(step, total, self._train_kwh())

    def _read_at_report(self) -> None:
        """Read what the training has used up to the step that was just reported."""
        if self.spec.program is None:
            self._at_report = self.meter.running(Phase.TRAIN)

    def _on_continued(self, step: int) -> None:
        if self.checkpoint is None or self.checkpoint.step != step:
            self._fail("crash", f"it goes on after step {step}, of which the study knows nothing")
            return
        self._go_on(self.checkpoint, step)

    def _decide_going_on(self, step: int) -> None:
        """Decide whether a script goes on with its earlier attempts: not if it begins with step 1.

        Args:
            step: The step before the first one that it has reported.
        """
        if self._undecided is None or self.checkpoint is None:
            return
        earlier = self.checkpoint.record.evals
        self._evals = [point for point in self._evals if point not in earlier]
        self.so_far, self._undecided, self._went_on = self._undecided, None, None
        self._began_s += self.checkpoint.readings_s
        if step > 0:
            self._go_on(self.checkpoint, step)

    def _note_unmeasured(self, steps: int, total_steps: int) -> None:
        """Note steps whose energy is not known, and end the trial if they are too many."""
        if steps == 0:
            return
        steps += self.so_far.unmeasured_steps or 0
        self._note(unmeasured_steps=steps)
        if steps > MOST_UNMEASURED * total_steps:
            self._fail(
                "unmeasured",
                f"the energy of {steps} of its {total_steps} steps is not known, at most"
                f" {MOST_UNMEASURED:.0%} may be: the script goes on after step"
                f" {(self.so_far.steps_done or 1) - 1}, but the study was killed before it had"
                " stored their energy, or the script left them out",
                with_tail=False,
            )

    def _go_on(self, checkpoint: Checkpoint, step: int) -> None:
        """Count what the earlier attempts had done and used as this trial's.

        Args:
            checkpoint: What they had used.
            step: The step after which this attempt goes on.
        """
        self._went_on = checkpoint
        before = [point for point in checkpoint.record.evals if point.step <= step]
        reached = before[-1].step if before else -1
        self._evals = before + [point for point in self._evals if point.step > reached]
        self.so_far = checkpoint.counted_in(self.so_far, step)
        self._began_s -= checkpoint.readings_s

    def _on_saved(self, step: int) -> None:
        readings, stages = self._phases.cut()
        self._note(steps_done=step)
        self._read_at_report()
        record = self._record(readings)
        self.store(record)
        self._has_saved |= self._save(record, readings, stages)

    def _save(
        self,
        record: TrialRecord,
        readings: dict[Phase, Reading],
        stages: dict[Stage, dict[str, float]],
    ) -> bool:
        """Store what the trial has done and used, as its checkpoint."""
        return self.store_checkpoint(
            Checkpoint(
                step=record.steps_done or 0,
                record=record,
                readings=self._with_earlier(readings),
                stages=self._with_earlier_stages(stages),
            )
        )

    def _with_earlier(self, readings: dict[Phase, Reading]) -> dict[Phase, Reading]:
        return readings if self._went_on is None else self._went_on.with_attempt(readings)

    def _with_earlier_stages(self, stages: dict[Stage, dict[str, float]]) -> dict[Stage, StageCost]:
        costs = {stage: StageCost(**cost) for stage, cost in stages.items()}
        return costs if self._went_on is None else self._went_on.with_stages(costs)

    def _on_evaluation(self, reported: events.Evaluated) -> None:
        # A script may have evaluated before this report without having reported the phase.
        if self.spec.program is not None:
            if reported.point.step > 0:
                self._decide_going_on(reported.point.step)
            self._phases.claim(Phase.EVAL, Stage.EVALUATION)
            self._phases.answered()
        # If the evaluation was announced, the training window is closed; if not, `claim` has just
        # moved what followed the last step to the evaluation.
        train_kwh = self._train_kwh()
        point = reported.point.model_copy(update={"train_energy_kwh": train_kwh})
        # A script may evaluate a step again: the later evaluation counts.
        replaced = None
        while self._evals and self._evals[-1].step >= point.step:
            replaced = self._evals.pop().value
        self._evals.append(point)
        self.so_far = self.so_far.model_copy(update={"replaced_value": replaced})
        self._note(
            **{name: getattr(reported, name) for name in _MEASURED_BY_RANKS},
            predictions=reported.predictions or None,
            steps_done=point.step,
        )
        self._read_at_report()
        finite = point.value is not None
        stop = (
            finite
            and 0 < point.step < reported.total_steps
            and self._should_prune(reported.total_steps)
        )
        if finite:  # the trial waits for the answer: bookkeeping comes later
            self.trial.answer(stop=StopReason.TARGET if stop else None)
        emissions = self.rules.emissions_kg_co2e(train_kwh)
        for observer in self.observers:
            observer.evaluated(self.spec.number, point, emissions)
        if len(self._evals) < _STORED_AT_ONCE:
            # Storing waits until the trial is running again.
            self._store_at -= STORE_EVERY_S - _STORE_AGAIN_S
        if not finite:
            self._fail("diverged", self._not_finite)
        elif stop:
            self._note(state=TrialState.PRUNED, stop_reason=StopReason.TARGET)

    def _stop_now(self) -> StopReason | None:
        if self.rules.interrupted():
            return StopReason.INTERRUPTED
        if self._finished_training() and self.spec.program is None:
            return None  # only the result is left: stopping would save nothing
        if self._finished_training():  # a script may go on using energy, so the budget still holds
            return StopReason.BUDGET if self.rules.budget_spent() else None
        # After the last step only the evaluation is left, so the cap no longer stops the trial.
        steps, total_steps = self.so_far.steps_done or 0, self.so_far.total_steps or math.inf
        if steps < total_steps and self.so_far.audited_at_step is None and self._exceeds_cap():
            return StopReason.CAP
        return StopReason.BUDGET if self.rules.budget_spent() else None

    def _should_prune(self, total_steps: int) -> bool:
        should_prune, evals = self.rules.should_prune, self._evals
        if (
            should_prune is None
            or self.so_far.audited_at_step is not None
            or evals[-1].step < self._ask_from
        ):
            return False
        self._ask_from = evals[-1].step + total_steps / _MOST_QUESTIONS
        if (forecast := should_prune(evals, total_steps)) is None:
            return False
        self._note(forecast=forecast, audited_at_step=evals[-1].step if self.rules.audit else None)
        return not self.rules.audit

    def _exceeds_cap(self) -> bool:
        projection = self._projection
        return exceeds_cap(
            self.rules.cap_kg_co2e,
            self.rules.emissions_kg_co2e(self._capped_kwh),
            projection.share,
            self.rules.emissions_kg_co2e(projection.energy_kwh),
            measured_s=projection.measured_s,
            contended=self.so_far.is_contended,
        )

    def _project(self, step: int, total_steps: int) -> None:
        """Project the energy of the whole training, unless trials may stop by themselves."""
        if self.rules.projects_cost:
            train_s = self.meter.running(Phase.TRAIN).duration_s
            self._projection.update(step, total_steps, self._capped_kwh, train_s)

    @property
    def _capped_kwh(self) -> float:
        """The energy of the training so far, as the cap counts it.

        Work that a script does after a step may not be training: only its steps count.
        """
        if self.spec.program is None or self._phase_untold:
            return self._train_kwh()
        return self._stepped_kwh()

    def _finished_training(self) -> bool:
        return bool(self._evals) and self._evals[-1].step == self.so_far.total_steps

    def _on_program_end(self) -> None:
        """Find the quality of a script that has ended, and note its state.

        A script is complete with its last report. One that has none of carbonopt's lines may print
        its quality, or the study file says where it is read.
        """
        try:
            self._read_quality()
        except (BadInput, NoQuality) as error:
            self._fail("bad_input" if isinstance(error, BadInput) else "no_quality", str(error))
            return
        if not self._evals:
            name = self._quality.name
            report = (
                f'report it by carbonopt.script, or print one line of JSON at its end: {{"{name}":'
                " VALUE}"
            )
            process = "the process that calls carbonopt.script.run"
            unheard = "processes that it starts or forks are not heard"
            if not self._phase_untold and self.so_far.steps_done:
                report = f"report it in {process}: {unheard}"
            elif not self._phase_untold:
                report = f"{process} made no step: train and report in it, since {unheard}"
            self._fail(
                "no_quality",
                f"the script ended without saying its {name}, the quality of the target; {report}",
            )
        elif self._evals[-1].value is None:
            self._fail("diverged", self._not_finite)
        elif not (steps := self.so_far.steps_done or self._evals[-1].step):
            must = "the last report must come after a step, but the script never called run.step()"
            self._fail(
                "bad_input",
                f"{must}; call it after each one: what lies between steps is the training",
            )
        else:
            planned = self._planned_steps or self.so_far.total_steps
            self._note(
                state=TrialState.COMPLETE,
                total_steps=steps,
                planned_steps=None if planned == steps else planned,
            )

    def _failed_within(self) -> bool:
        """Note the failure of a script that ended otherwise than its command, and return if so.

        A shell goes on after its programs in `python train.py; echo done` and `|| true`. A script
        without the lines says nothing of its end.
        """
        hidden = "although its command ended with code 0"
        if self._phase_untold:
            return False
        if self._left is None:  # a signal has ended it, or os._exit, which may be right
            if host_oom_kills() > self._oom_kills:
                kernel = "the kernel killed it because the host ran out of memory"
                self._fail("out_of_memory", f"{kernel}, {hidden}")
            elif (said := killed_by_signal(self.trial.log_tail(PRINTED_LINES))) is not None:
                self._fail("crash", f"a signal ended the script, {hidden}: {said}")
        elif self._left.kind is not None:
            self._fail(self._left.kind, f"an error ended the script, {hidden}: {self._left.text}")
        return self.so_far.state is not TrialState.RUNNING

    def _read_quality(self) -> None:
        """Read the evaluations that the script has printed or left in a file.

        Raises:
            BadInput: If they can't be read.
            NoQuality: If there are none where the study file says.
        """
        assert self.spec.program is not None
        source, steps = self.spec.program.quality_from, self.so_far.steps_done or 1
        if source is not None:
            assert self.trial.log is not None
            # Reading takes longer than a tick of the meter, and is no work of the script.
            self._phases.enter(Phase.GAP)
            folder = Path(self.spec.program.folder)
            read = source.read(self.trial.log, folder, self._quality, steps, self.quality_file)
        elif not self._evals:
            read = printed_evaluations(self.trial.log_tail(PRINTED_LINES), self._quality, steps)
        else:
            return
        points = read.points
        self._note(quality_lines=read.lines and QualityLines(**vars(read.lines)))
        self._evals[:] = [point for point in self._evals if points and point.step < points[0].step]
        self._evals += [EvalPoint(**vars(point)) for point in points]
        if points:  # a script that reports its steps may go on after its last evaluation
            self._note(steps_done=max(points[-1].step, self.so_far.steps_done or 0))

    @property
    def _quality(self) -> Quality:
        return self.so_far.quality.of

    @property
    def _not_finite(self) -> str:
        is_loss = self._quality.value_of_mean == "exp"
        return f"the {'evaluation loss' if is_loss else self._quality.name} is not finite"

    def _was_aborted_after_its_end(self) -> bool:
        """Return whether PyTorch aborted a script's processes that had reported all training.

        It may do so while Python ends, which changes nothing that was measured or reported.
        """
        ended_by_itself = self._left is not None and self._left.kind is None
        return (
            ended_by_itself
            and self._finished_training()
            and STILL_CONNECTED in self.trial.log_tail(PRINTED_LINES)
        )

    def _on_exit(self, code: int) -> None:
        """Note the failure of processes that ended without reporting a reason."""
        if self._was_aborted_after_its_end():
            self.warn(
                f"trial {self.spec.number}: PyTorch aborted a process when the script had ended,"
                " which changes no result; at the end delete the DDP model and its optimizer, and"
                " call torch.distributed.destroy_process_group()."
            )
            self._on_program_end()
            return
        # A program may turn a signal into an exit code of its own.
        by_signal = code > SIGNALLED or self.spec.program is not None
        if by_signal and await_own_signal(self.rules.interrupted):
            self._note(state=TrialState.FAILED, stop_reason=StopReason.INTERRUPTED)
        elif self.spec.program is not None and ran_out_of_memory(
            self.trial.log_tail(PRINTED_LINES)
        ):
            self._fail("out_of_memory", f"the script ran out of memory and ended with code {code}")
        elif code == channel.OUT_OF_MEMORY_EXIT and self.spec.program is None:
            self._fail("out_of_memory", "a rank other than the first ran out of memory")
        elif code == SIGNALLED + 9 and host_oom_kills() > self._oom_kills:
            self._fail("out_of_memory", "the kernel killed it because the host ran out of memory")
        else:
            self._fail("crash", how_they_ended(code, self.trial.log_tail(PRINTED_LINES)))

    def _fail(self, kind: str, text: str, *, with_tail: bool = True) -> None:
        if with_tail and (tail := self.trial.log_tail()):
            text = f"{text}\n{tail[-_MOST_TAIL_CHARACTERS:]}"
        log = None if self.trial.log is None else str(self.trial.log)
        failure = {"kind": kind, "text": text, "log": log}
        self._note(state=_STATES.get(kind, TrialState.FAILED), failure=failure)

    def _train_kwh(self) -> float:
        return self._earlier_train_kwh + self._phases.train_kwh

    def _stepped_kwh(self) -> float:
        return self._earlier_train_kwh + self._phases.stepped_kwh

    @property
    def _earlier_train_kwh(self) -> float:
        return 0.0 if self._went_on is None else self._went_on.readings[Phase.TRAIN].total_kwh

    def _after_reported(self, train: Reading) -> StageCost | None:
        """Return the training since the last report of a step, up to a reading of TRAIN."""
        if self._at_report is None:
            return None
        since = train.part_since(self._at_report)
        if since.duration_s <= 0.0:
            return None
        return StageCost(duration_s=since.duration_s, energy_kwh=max(0.0, since.total_kwh))

    def _record(self, readings: dict[Phase, Reading]) -> TrialRecord:
        """Return the trial's record with its measurements.

        A running trial's record has no emissions, because those so far are no result.
        """
        own_train_s = readings[Phase.TRAIN].duration_s
        after_reported = self._after_reported(readings[Phase.TRAIN])
        readings = self._with_earlier(readings)
        state, train = self.so_far.state, readings[Phase.TRAIN]
        last = self._evals[-1:] if state == TrialState.COMPLETE else ()
        reached = {
            name: getattr(point, name) for point in last for name in ("value", "sum", "count")
        }
        # A trial's end may show that the work after its last step was not training. No point of the
        # curve may then have more energy than the whole training.
        curve = tuple(at_most(point, train.total_kwh) for point in self._evals)
        measured = {
            **measured_fields(readings),
            "evals": curve,
            "quality": {**vars(self.so_far.quality), **reached},
        }
        if self._went_on is not None:
            measured |= self._went_on.with_measured(self.so_far, own_train_s)
        if state != TrialState.RUNNING:
            has_stages = bool(train.nodes)
            emissions = self.rules.emissions_kg_co2e(train.total_kwh)
            measured |= {
                "stages": self._with_earlier_stages(self._phases.stages) if has_stages else None,
                "after_reported": after_reported,
                "emissions_kg_co2e": emissions,
            }
        return TrialRecord(**vars(self.so_far) | measured)
