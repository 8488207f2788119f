"""Runs one trial or probe, and stores what it uses meanwhile."""

import dataclasses
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from carbonopt.core.errors import INTERRUPTED, BadInput, StudyInterrupted
from carbonopt.core.files import kind_of
from carbonopt.core.trial import START_TRIAL, TRIAL_PHASES, Phase, StopReason, TrialRecord
from carbonopt.search.cap import cap, may_stop_early
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.locked_storage import without_waiting
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import Snapshot, StudyStorage
from carbonopt.storage.workers import Lease
from carbonopt.study.account import SessionAccount
from carbonopt.study.inherited_files import inherited_files
from carbonopt.study.script_outputs import remove_outputs
from carbonopt.study.session import Session
from carbonopt.study.study_budget import StudyBudget
from carbonopt.study.trial_checkpoint import Checkpoint, keep_only, remove_checkpoints
from carbonopt.study.trial_observer import TrialObserver
from carbonopt.study.trial_watch import Rules, TrialWatch

if TYPE_CHECKING:
    from carbonopt.search.strategy import TrialPlan


@dataclasses.dataclass
class TrialRunner:
    """Runs trials and probes for one worker, one at a time."""

    session: Session
    storage: StudyStorage
    lease: Lease
    account: SessionAccount
    budget: StudyBudget
    # Energy of the whole study so far but for the trial or probe that runs here, as last looked up.
    _spent_elsewhere_kwh: float = 0.0

    def __post_init__(self) -> None:
        self._engine = self.session.checked.engine
        session = self.session
        self._observers: list[TrialObserver] = [session.display, session.trackers]
        if session.notifications is not None:
            self._observers.append(session.notifications)

    def run_trial(
        self,
        optuna_trial: optuna.Trial,
        spec: TrialSpec,
        record: TrialRecord,
        seen: Snapshot,
        plan: "TrialPlan",
    ) -> None:
        """Run a trial that the storage knows of, and store its result.

        Args:
            optuna_trial: Optuna's trial, which gets the result.
            spec: What its processes are to do.
            record: Its record, as it begins.
            seen: The study before the trial.
            plan: What the search says of the trial: its cap, and when to prune it.

        Raises:
            StudyInterrupted: If the session was interrupted; the trial will be run again.
        """
        for observer in self._observers:
            observer.trial_started(spec, record.started_at)
        log = self.session.paths.trial_log(spec.number, spec.attempt)
        inherited = inherited_files(spec, seen.data, self.session.paths)
        self._spent_elsewhere_kwh = seen.data.spent_kwh()
        rules = self._trial_rules(seen, spec, plan)
        store = partial(self._store_trial, optuna_trial)
        saves = self._saves(optuna_trial, spec, seen)
        record = self._watched(spec, record, log, rules, self._observers, store, **saves)
        if inherited is not None:
            record = record.model_copy(update={"inherited_files": inherited.read()})
        self.lease.renew()
        if record.stop_reason is StopReason.INTERRUPTED:
            self.storage.requeue(optuna_trial, record)
        else:
            self.storage.tell(optuna_trial, record, self.session.checked.config.target.at())
            if spec.program is not None or spec.checkpoints is not None:
                data = self.storage.snapshot(self.lease.living).data
                remove_outputs(data, self.session.paths, self.session.display.warn, ended=False)
                remove_checkpoints(data, self.session.paths, self.session.display.warn)
        self.account.store(self.storage)
        for observer in self._observers:
            observer.trial_ended(record)
        if record.stop_reason is StopReason.INTERRUPTED:
            if record.failure is None:
                raise interruption(self.session.paths)
            text = f"trial {record.trial} goes on from its last checkpoint: it crashed"
            self.session.display.warn(f"{text} ({record.failure.sentence}).")

    def _saves(self, optuna_trial: optuna.Trial, spec: TrialSpec, seen: Snapshot) -> dict[str, Any]:
        """Return what a watch needs for a trial that is saved, and tidy its folder.

        Only the study removes checkpoints of carbonopt's own trainings: each time that it has
        stored a new one, it removes all others. A script's folder is left to the script.

        Raises:
            BadInput: If something else is in the folder's place, or the checkpoint is damaged.
        """
        if spec.checkpoints is None and not (spec.program and spec.program.keeps_checkpoints):
            return {}
        checkpoint = stored_checkpoint(seen, spec.number)
        folder = Path(spec.checkpoint_dir)
        if (kind := kind_of(folder)) is not None and (folder.is_symlink() or not folder.is_dir()):
            raise BadInput(f"{folder} has to be a folder, but is {kind}; move it.")
        folder.mkdir(parents=True, exist_ok=True)

        def tidy(step: int | None) -> None:
            if spec.program is not None:
                return  # what is in the folder is the script's
            try:
                keep_only(folder, step)
            except OSError as error:
                self.session.display.warn(f"{folder} can't be tidied: {error.strerror}.")

        def store_checkpoint(checkpoint: Checkpoint) -> bool:
            with without_waiting():
                self.storage.set_checkpoint(optuna_trial, checkpoint.as_text())
                tidy(checkpoint.step)
                return True
            return False

        tidy(None if checkpoint is None else checkpoint.step)
        return {"checkpoint": checkpoint, "store_checkpoint": store_checkpoint}

    def run_probe(self, spec: TrialSpec, record: TrialRecord, before: StudyData) -> None:
        """Run a probe; its energy is stored while it runs, apart from that of trials.

        Args:
            spec: What its processes are to do.
            record: Its record, as it begins.
            before: The study before the probe.

        Raises:
            StudyInterrupted: If the session was interrupted.
        """
        self.session.display.probe_started(spec)

        def store(record: TrialRecord) -> None:
            self.lease.renew()
            # First the account: if the command is killed between the two, no part is larger than
            # the reading of the whole.
            self.account.store(self.storage)
            self.storage.set_probe(record)
            self._look_at_others()

        def store_meanwhile(record: TrialRecord) -> None:
            with without_waiting():
                store(record)

        self._spent_elsewhere_kwh = before.spent_kwh()
        log = self.session.paths.probe_log(spec.number)
        record = self._watched(spec, record, log, self._rules(), [], store_meanwhile)
        store(record)
        self.session.display.probe_ended(record)
        if record.stop_reason is StopReason.INTERRUPTED:
            raise interruption(self.session.paths)

    def _watched(
        self,
        spec: TrialSpec,
        record: TrialRecord,
        log: Path,
        rules: Rules,
        observers: list[TrialObserver],
        store: Callable[[TrialRecord], None],
        **saves: Any,
    ) -> TrialRecord:
        """Run a trial or a probe from its start to its end.

        `saves` are the fields of the watch that `_saves` returns.
        """

        def progress(step: int, total_steps: int, train_kwh: float) -> None:
            self.session.display.still_running(self._running_kwh)
            self.session.display.progress(step, total_steps, train_kwh)
            self._engine.prepare_next()

        compiles = self.session.checked.config.compiles(spec.params)

        def still_running(spent_kwh: float) -> None:
            self.session.display.still_running(spent_kwh)
            # A probe that compiles ends soon after its first step, too soon to hide the start of
            # the next trial's processes: two seconds in which the GPUs would idle.
            if spec.probe_s is not None and compiles and self._trains_now:
                self._engine.prepare_next()

        program = spec.program
        source = None if program is None else program.quality_from
        self._engine.meter.enter(Phase.SETUP)
        self._engine.meter.use(spec.params.world_size)
        own = Path(spec.trial_dir)
        quality_file = source.state(Path(program.folder), own) if source and program else None
        return TrialWatch(
            spec=spec,
            so_far=record,
            trial=self._engine.start(spec, log.resolve()),
            meter=self._engine.meter,
            rules=rules,
            observers=observers,
            progress=progress,
            store=store,
            still_running=still_running,
            quality_file=quality_file,
            warn=self.session.display.warn,
            **saves,
        ).run()

    def _store_trial(self, optuna_trial: optuna.Trial, record: TrialRecord) -> None:
        """Store what a trial has used so far.

        If the storage can't be used now, the trial goes on: all that it has used is stored when it
        has finished.
        """
        with without_waiting():
            self.lease.renew()
            self.account.store(self.storage)  # first, as for a probe
            self.storage.save_progress(optuna_trial, record)
            self._look_at_others()

    @property
    def _trains_now(self) -> bool:
        """Whether the trial or probe that runs here has begun its training in this attempt."""
        return self._engine.meter.running(Phase.TRAIN).total_kwh > 0

    @property
    def _running_kwh(self) -> float:
        """The energy that the trial or probe which runs here has used in this attempt."""
        return sum(self._engine.meter.running(phase).total_kwh for phase in TRIAL_PHASES)

    def _look_at_others(self) -> None:
        """Update the energy that other workers have used, which counts towards the budget, too."""
        if len(self.lease.living) > 1 and self.budget.limits_energy:
            # The record of a trial that goes on from a checkpoint has more: earlier attempts'.
            own_kwh = self._running_kwh
            spent_kwh = self.storage.snapshot(self.lease.living).data.spent_kwh()
            self._spent_elsewhere_kwh = spent_kwh - own_kwh

    def _trial_rules(self, seen: Snapshot, spec: TrialSpec, plan: "TrialPlan") -> Rules:
        """Return the rules that may end this trial, with its cap."""
        search = self.session.checked.config.search
        # The start configuration is the baseline, and a repeat shows how much runs differ: both
        # need complete runs to compare.
        is_baseline = spec.number == START_TRIAL and self.session.checked.start is not None
        to_its_end = spec.repeat_of is not None or is_baseline
        has_cap = search.pruning.cap and search.goal == "recommend" and not to_its_end
        prunes = search.pruning.target and not to_its_end
        return self._rules(
            should_prune=plan.pruning_rule(spec.params) if prunes else None,
            audit=plan.audits,
            cap_kg_co2e=cap(seen.data.records, plan.meeting) if has_cap else None,
            projects_cost=not may_stop_early(seen.data.records),
        )

    def _rules(self, **of_trial: Any) -> Rules:
        """Return the rules that may end any run, a probe as well as a trial, and a trial's own."""

        def budget_spent() -> bool:
            return (
                self.budget.limit_reached(self._spent_elsewhere_kwh + self._running_kwh) is not None
            )

        launch = self.session.checked.config.launch
        return Rules(
            emissions_kg_co2e=self.session.checked.emissions_kg_co2e,
            budget_spent=budget_spent,
            interrupted=self.session.interrupted,
            timeout_s=launch.timeout_s,
            time_limit_s=launch.trial_time_limit_s,
            **of_trial,
        )


def stored_checkpoint(seen: Snapshot, number: int) -> Checkpoint | None:
    """Return a trial's last checkpoint; None if it was never saved.

    Raises:
        BadInput: If the stored one is damaged.
    """
    text = seen.checkpoint(number)
    return None if text is None else Checkpoint.from_text(text, number)


def interruption(paths: StudyPaths) -> StudyInterrupted:
    """Return the error of an interrupted study."""
    report = f"`carbonopt report {shlex.quote(str(paths.root))}`"
    return StudyInterrupted(f"{INTERRUPTED} {report} reports what there is.", is_stored=True)
