"""The study loop: choose a worker's next trial, probe or repeat, until the study ends.

`trial_runner` runs what is chosen, and `trial_watch` watches it. A study ends by its budget,
because its trials all fail alike, or because nothing is left that is worth a trial (see
`_begin_next`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import optuna

from carbonopt.analysis.concurrency import most_concurrent_trials
from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.trial import TrialRecord, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import InputFile, PlannedStart, StudyData, wall_clock_s
from carbonopt.spec.trial_spec import Prepared, TrialCheckpoints, TrialSpec
from carbonopt.storage.study_storage import (
    REPEAT_OF,
    SEED,
    Snapshot,
    StudyStorage,
)
from carbonopt.storage.workers import Lease
from carbonopt.study.account import SessionAccount
from carbonopt.study.hopeless_studies import always_the_same_failure, check_job_is_long_enough
from carbonopt.study.repeats import next_repeat, prefers_new, with_confirmation
from carbonopt.study.script_outputs import remove_outputs
from carbonopt.study.session import Session
from carbonopt.study.start_schedule import StartSchedule, first_call, now_in_utc
from carbonopt.study.study_budget import StudyBudget, budget_used
from carbonopt.study.trial_checkpoint import remove_checkpoints
from carbonopt.study.trial_runner import TrialRunner, interruption, stored_checkpoint
from carbonopt.study.trial_watch import begun_record
from carbonopt.study_file.input_files import check_unchanged, input_files, may_write
from carbonopt.train.tasks.task import task_for

if TYPE_CHECKING:
    from carbonopt.search.strategy import TrialPlan

# Seconds of steps in a probe. The GPUs' counters tick every 0.1 s; the uncertainty of their energy
# (tick × power ÷ √6, see docs/measuring.md) is then 2 %.
PROBE_S = 2.0
PLAN_AGAIN_S = 60.0  # interval for planning a waiting study's start again
STORE_WAIT_S = 5.0  # interval for storing what a waiting study uses
LOOK_AGAIN_S = 0.2  # interval for checking whether other workers have finished
_END_TOGETHER_S = 10.0  # longest wait after the last trial for the other workers' last reading
Done = TypeVar("Done")


@dataclass
class TrialLoop:
    """One worker's loop over the trials of a study, which it begins in turn with other workers.

    The engine has begun and is prepared.
    """

    session: Session  # with the space that was chosen in the preparation
    lease: Lease
    account: SessionAccount
    storage: StudyStorage
    prepared: Prepared | None
    inputs: tuple[InputFile, ...]  # as they are stored

    def __post_init__(self) -> None:
        # It imports SciPy, which can wait until the trials' processes have been started.
        from carbonopt.search.strategy import Strategy

        self.checked = self.session.checked
        self.config = self.checked.config
        self.engine = self.checked.engine
        self.paths = self.session.paths
        self.display = self.session.display
        self.local_workers = self.session.local_workers
        self.shown = set[int]()  # finished trials that the display knows of
        hardware = self.engine.hardware
        self.strategy = Strategy(
            self.config,
            self.checked.space,
            None if hardware is None else hardware.gpu_memory_gib,
            self.checked.earlier,
            self.checked.advised(self.prepared),
            None if self.prepared is None else self.prepared.memory,
        )
        now = datetime.fromisoformat(self.account.started_at)
        data = self.storage.read()
        self.hours_before = wall_clock_s(data.sessions) / 3600
        self.budget = StudyBudget(self.checked, self.account, self.hours_before)
        self.schedule = StartSchedule(self.checked, first_call(data, now), self.display.warn)
        self.runner = TrialRunner(self.session, self.storage, self.lease, self.account, self.budget)

    def run(self) -> StudyData:
        """Run trials until the study ends, wait for the other workers, and return the study."""
        data = self._in_turn(self._begin_study)
        self.local_workers.study_began()
        self.session.trackers.study_began(data)
        if self.session.notifications is not None:
            self.session.notifications.study_began(data)
        self.display.study_started(data, self.hours_before)
        self.shown = {record.trial for record in data.records if record.has_finished}
        while True:
            self.lease.renew()
            if (not_free := self.engine.await_free(self.session.interrupted)) is not None:
                self.display.warn(not_free)
            data, run_next = self._in_turn(self._choose)
            self._tell_of_others(data)
            if run_next is None:
                break
            self.display.used(self.budget.used_hours, data.spent_kwh())
            run_next()  # a trial, a probe, or a wait for other workers or a planned start
        while self.local_workers.is_working:  # the local workers have nothing left to do either
            self._wait()
            self._tell_of_others(self.storage.read())
        self.account.store(self.storage)
        self._await_others()
        return self.storage.read()

    def _choose(self, seen: Snapshot) -> tuple[StudyData, Callable[[], None] | None]:
        """Return the study, and the function that does what this worker begins (`_begin_next`)."""
        self._check_and_store_inputs(seen.data)
        return seen.data, self._begin_next(seen)

    def _check_and_store_inputs(self, data: StudyData) -> None:
        """Check a script's inputs for changes, and store them.

        Each trial of a script reads them anew. Other data was read once, in the preparation. It is
        called in this worker's turn.

        Raises:
            CarbonoptError: If they have changed.
        """
        writers = may_write(data)
        if not writers:
            return
        try:
            where, found = str(self.paths.root), input_files(self.config)
            noted = check_unchanged(self.inputs, found, where, self.session.interrupted, writers)
        except BadInput as error:  # not raised as BadInput, since trials have run
            raise CarbonoptError(str(error)) from error
        for file in noted:
            if file.changed_by_trials and file not in self.inputs:
                what = f"{file.path} was changed while a trial ran"
                self.display.warn(
                    f"{what}: it is taken for what trials write, and not compared from now on."
                )
        if noted != self.inputs:
            self.storage.set_inputs(noted)
        self.inputs = noted

    def _tell_of_others(self, data: StudyData) -> None:
        """Show what other workers have done.

        Only the leading worker and a command with local workers show finished trials of others.
        """
        for record in data.records if self.local_workers.is_working or not self.lease.joins else ():
            if record.trial not in self.shown and record.has_finished:
                self.shown.add(record.trial)
                self.display.trial_ended(record)
                if self.session.notifications is not None:
                    self.session.notifications.trial_ended(record)
        for worker in self.local_workers.ended():
            if worker.code != 0:
                what = f"local worker {worker.slot} ended with code {worker.code}"
                self.display.warn(f"{what}; the others go on: {self.paths.workers} has its log.")

    def _await_others(self) -> None:
        """Let a leading worker wait until the other workers have ended, for a short time.

        They store the energy that they used while they ended, which belongs in the report. One of
        them may still run a trial of a study that was interrupted.
        """
        deadline = time.monotonic() + (0.0 if self.lease.joins else _END_TOGETHER_S)
        while (
            time.monotonic() < deadline
            and self.lease.has_others()
            and not self.session.interrupted()
        ):
            time.sleep(LOOK_AGAIN_S)

    def _begin_study(self, seen: Snapshot) -> StudyData:
        """Store that the study goes on, and queue its start configuration."""
        self.storage.set_ended(None)
        self.account.store(self.storage)
        if self.checked.start is not None and not seen.data.records:
            # It may be queued already: an earlier call can have been killed right after that.
            self.storage.study.enqueue_trial(self.checked.start, skip_if_exists=True)
        return seen.data

    def _in_turn(self, act: Callable[[Snapshot], Done], *, runs: bool = False) -> Done:
        """Do something in this worker's turn: no other worker begins anything meanwhile.

        Args:
            act: what to do with the study as it is now, with the trials of dead workers put back.
                It is done again from its beginning if the turn was lost with the connection.
            runs: whether this worker runs a trial, which is left alone. If not, a trial that it
                began in a turn that was lost is put back, as dead workers' are.
        """
        self._stop_if_interrupted()
        own = frozenset() if runs else {self.lease.worker.id}

        def recover_and_act() -> Done:
            return act(self.storage.recover(self.lease.remove_dead() - own))

        return self.lease.in_turn(self._stop_if_interrupted, recover_and_act)

    def _stop_if_interrupted(self) -> None:
        """Store what this session has used and raise StudyInterrupted, if it was interrupted."""
        if self.session.interrupted():
            self.account.store(self.storage)
            raise interruption(self.paths)

    def _begin_next(self, seen: Snapshot) -> Callable[[], None] | None:
        """Begin this worker's next trial or probe in the storage; return the function that runs it.

        It is called in this worker's turn, after which the caller calls the function.

        Returns:
            `_wait` if there is nothing to begin while other workers' runs go on; `_await_start` if
            the schedule has the next trial begin later. None: the study has ended.
        """
        storage, budget_used = self.storage, self._budget_used(seen)
        plan = self._plan(seen, in_budget=budget_used is None)
        ended = budget_used or always_the_same_failure(seen.data) or plan.why_ended
        if ended and not self._tries_another(seen.data, plan):
            if not self._queue_repeat(seen.data):
                return self._end(seen.data, ended, by_budget=budget_used is not None)
            seen = storage.snapshot(self.lease.living)  # now has the repeat
            plan = self._plan(seen)
        elif not ended and not self._may_begin(seen):
            return self._wait
        if (planned := self._plan_start(seen.data)) is not None:
            return partial(self._await_start, planned)
        if plan.probe is not None:
            return self._begin_probe(plan.probe, PROBE_S, seen)
        storage.study.sampler = plan.sampler
        asked = storage.study.ask(self.strategy.distributions)
        return self._begin_trial(asked, seen, plan)

    def _end(self, data: StudyData, why: str, *, by_budget: bool) -> Callable[[], None] | None:
        """Store the study's end, and remove what nobody needs any more; return None.

        Returns `_wait` instead, and ends nothing, while other workers still run something.
        """
        if any(run.state is TrialState.RUNNING for run in (*data.records, *data.probes)):
            return self._wait
        limit = self.budget.limit_reached(data.spent_kwh())
        why = with_confirmation(why, data, self.engine, limit)
        self.storage.set_ended(why, by_budget=by_budget)
        remove_outputs(data, self.paths, self.display.warn, ended=True)
        remove_checkpoints(data, self.paths, self.display.warn)
        return None

    def _plan_start(self, data: StudyData) -> PlannedStart | None:
        """Plan the next trial's start, store the plan, and return it; None: it begins now.

        A Slurm job begins when its study is due. Inside it nothing waits, which would hold GPUs.
        """
        if self.config.schedule is None or self.config.launch.kind == "slurm":
            return None
        waits = self.account.waits or data.planned_start is not None
        remaining = self.budget.remaining(data, len(self.lease.living))
        planned = self.schedule.plan(data.records, remaining, now_in_utc(), waits=waits)
        if planned != data.planned_start:
            self.storage.set_planned_start(planned)
        if planned is None:
            self.account.end_wait(self.storage)
        return planned

    def _await_start(self, planned: PlannedStart) -> None:
        """Wait for a planned start, but not for long: it is planned again then.

        Nothing runs meanwhile, and no process of a next trial holds a GPU.
        """
        if not self.account.waits:
            self.engine.drop_next()
            self.account.begin_wait(self.storage, planned.expected_saving)
            self.display.waiting(planned)
            if self.session.notifications is not None:
                self.session.notifications.waiting(planned)
        begins, plan_again = datetime.fromisoformat(planned.at), time.monotonic() + PLAN_AGAIN_S

        def goes_on(until_s: float) -> bool:
            return time.monotonic() < min(until_s, plan_again) and now_in_utc() < begins

        while goes_on(plan_again):
            store_again = time.monotonic() + STORE_WAIT_S
            while goes_on(store_again):
                self._stop_if_interrupted()
                self.lease.renew()
                time.sleep(LOOK_AGAIN_S / 10)
            self.account.store(self.storage)

    def _plan(self, seen: Snapshot, *, in_budget: bool = True) -> "TrialPlan":
        """Plan the next trial, which may be one that was queued or interrupted.

        A new one beyond the budget takes the place of a repeat.
        """
        number = seen.next_number()
        if (earlier := seen.earlier_record(number)) is not None:
            replaces_repeat = earlier.replaces_repeat
        else:
            replaces_repeat = not in_budget and number == len(seen.trials)
        return self.strategy.plan(
            seen.trials, number, seen.data.probes, replaces_repeat=replaces_repeat
        )

    def _may_begin(self, seen: Snapshot) -> bool:
        """Return whether the search may start another trial beside those of other workers."""
        config, ended, running = self.config, seen.finished_count(), seen.running_count()
        if config.budget.trials is not None and ended + running >= config.budget.trials:
            return False  # the last trials of the budget are running
        return running < most_concurrent_trials(config, ended)

    def _wait(self) -> None:
        deadline = time.monotonic() + LOOK_AGAIN_S
        while time.monotonic() < deadline:
            self._stop_if_interrupted()
            time.sleep(LOOK_AGAIN_S / 10)

    def _spec(self, number: int, folder: Path, params: TrialParams, **more: Any) -> TrialSpec:
        config = self.config
        own: dict[str, Any] = {
            "number": number,
            "attempt": 1,
            "seed": self.engine.seed(config.search.seed, params),
            "params": params,
            "workload": {} if config.workload is None else config.workload.model_dump(mode="json"),
            "prepared_dir": str(self.paths.prepared.resolve()),
            "trial_dir": str(folder.resolve()),
        }
        return TrialSpec(**own | more)

    def _begin_probe(
        self, params: TrialParams, steps_s: float, seen: Snapshot
    ) -> Callable[[], None]:
        """Store a new probe, and return the function that runs it.

        A probe makes a first step, and then further ones for `steps_s` seconds. It is called in
        this worker's turn.
        """
        number = len(seen.data.probes)
        spec = self._spec(number, self.paths.probe(number), params, probe_s=steps_s)
        record = begun_record(spec, self.config.quality, self.lease.worker.id)
        self.storage.set_probe(record)
        return partial(self.runner.run_probe, spec, record, seen.data)

    def _begin_trial(
        self, optuna_trial: optuna.Trial, seen: Snapshot, plan: "TrialPlan"
    ) -> Callable[[], None]:
        """Store that a trial begins, and return the function that runs it.

        It is called in this worker's turn.
        """
        config, number = self.config, optuna_trial.number
        params = self.checked.space.params(optuna_trial.params)
        own_attrs = optuna_trial.user_attrs
        repeat_of = own_attrs.get(REPEAT_OF)
        earlier, checkpoint = seen.earlier_record(number), stored_checkpoint(seen, number)
        check_job_is_long_enough(earlier, checkpoint, seen.data, config)
        spec = self._spec(
            number,
            self.paths.trial(number),
            params,
            attempt=1 if earlier is None else earlier.attempt + 1,
            repeat_of=repeat_of,
            replaces_repeat=plan.replaces_repeat,
            saves_model=self.session.as_step is not None
            and self.session.as_step.hands_on > 0
            and repeat_of is not None,
            **({} if own_attrs.get(SEED) is None else {"seed": own_attrs[SEED]}),
        )
        if config.workload is not None and config.launch.trains:
            task = task_for(config.workload.model_dump(mode="json"))
            spec = spec.model_copy(update={"program": task.program(spec, config.quality)})
        if config.checkpoint is not None:
            checkpoints = TrialCheckpoints(
                folder=spec.checkpoint_dir,
                every_s=config.checkpoint.every_minutes * 60,
                continue_from=None if checkpoint is None else checkpoint.step,
            )
            spec = spec.model_copy(update={"checkpoints": checkpoints})
        record = begun_record(spec, self.config.quality, self.lease.worker.id, earlier)
        self.storage.save_progress(optuna_trial, record)
        return partial(self._run_trial, optuna_trial, spec, record, seen, plan)

    def _run_trial(
        self,
        optuna_trial: optuna.Trial,
        spec: TrialSpec,
        record: TrialRecord,
        seen: Snapshot,
        plan: "TrialPlan",
    ) -> None:
        if _compiles_first(self.config, spec.params, seen.data):
            # 0 s: only the first step, which compiles; the trial measures what a step takes.
            begin = partial(self._begin_probe, spec.params, 0.0)
            self._in_turn(begin, runs=True)()
            seen = self.storage.snapshot(self.lease.living)
            plan = self.strategy.plan(
                seen.trials, spec.number, seen.data.probes, replaces_repeat=plan.replaces_repeat
            )
        self.shown.add(spec.number)
        self.runner.run_trial(optuna_trial, spec, record, seen, plan)

    def _budget_used(self, seen: Snapshot) -> str | None:
        """Return which part of the budget is used up, in words; None: there is some left."""
        limit = self.budget.limit_reached(seen.data.spent_kwh())
        return budget_used(self.config.budget.trials, seen, limit)

    def _tries_another(self, data: StudyData, plan: "TrialPlan") -> bool:
        """Return whether a trial beyond those of the budget is begun for the confirmation."""
        return (
            self.budget.limit_reached(data.spent_kwh()) is None
            and always_the_same_failure(data) is None
            and prefers_new(data, self.engine)
            and plan.why_ended is None
        )

    def _queue_repeat(self, data: StudyData) -> bool:
        """Queue the next repeat that confirms the search's answer; return whether one is due."""
        if self.budget.limit_reached(data.spent_kwh()) is not None:
            return False
        if (due := next_repeat(data, self.engine, self.paths, self.session.as_step)) is None:
            return False
        self.storage.queue_repeat(due.trial, due.seed)
        return True


def _compiles_first(config: StudyConfig, params: TrialParams, data: StudyData) -> bool:
    """Return whether a trial would compile kernels that no run has compiled yet.

    Compiled kernels are kept. Their energy counts for the study, not for a training, so that it
    does not matter which of the trials comes first.
    """
    key = attrgetter(*affecting("kernels"))
    if not config.probes or not config.compiles(params):
        return False
    return all(
        key(record.params) != key(params)
        for record in (*data.records, *data.probes)
        if record.kernels
    )
