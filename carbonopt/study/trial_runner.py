"""Runs one trial or probe, and stores what it uses meanwhile."""

import dataclasses
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from carbonopt.core.errors import StudyInterrupted
from carbonopt.core.trial import TRIAL_PHASES, Phase, StopReason, TrialRecord
from carbonopt.search.cap import cap
from carbonopt.spec.study_data import StudyData
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.locked_storage import unless_held
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import Snapshot, StudyStorage
from carbonopt.storage.workers import Lease
from carbonopt.study.account import SessionAccount, StudyBudget
from carbonopt.study.inherited_files import inherited_files
from carbonopt.study.outputs import remove_outputs
from carbonopt.study.session import Session
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
    # Energy that the study has used, without the trial running here.
    _elsewhere_kwh: float = 0.0

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
            observer.trial_started(spec)
        log = self.session.paths.trial_log(spec.number, spec.attempt)
        inherited = inherited_files(spec, seen.data)
        rules, store = (
            self._rules_of_trial(seen, spec, plan),
            partial(self._store_trial, optuna_trial),
        )
        record = self._watched(spec, record, log, rules, self._observers, store)
        if inherited is not None:
            record = record.model_copy(update={"inherited_files": inherited.read()})
        self.lease.renew()
        if record.stop_reason is StopReason.INTERRUPTED:
            self.storage.requeue(optuna_trial, record)
        else:
            self.storage.tell(optuna_trial, record, self.session.checked.config.target.at())
            if spec.program is not None:
                data = self.storage.snapshot(self.lease.living).data
                remove_outputs(data, self.session.paths, self.session.display.warn, ended=False)
        self.account.store(self.storage)
        for observer in self._observers:
            observer.trial_ended(record)
        if record.stop_reason is StopReason.INTERRUPTED:
            raise interruption(self.session.paths)

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
            self._look_at_others(record)

        def store_meanwhile(record: TrialRecord) -> None:
            with unless_held():
                store(record)

        self._elsewhere_kwh = before.spent_kwh()
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
    ) -> TrialRecord:
        """Run a trial or a probe from its start to its end."""

        def progress(step: int, total_steps: int, train_kwh: float) -> None:
            self.session.display.progress(step, total_steps, train_kwh)
            self._engine.prepare_next()

        program = spec.program
        source = None if program is None else program.quality_from
        self._engine.meter.enter(Phase.SETUP)
        self._engine.meter.use(spec.params.world_size)
        quality_file = source.state(Path(program.folder)) if source and program else None
        return TrialWatch(
            spec=spec,
            so_far=record,
            trial=self._engine.start(spec, log.resolve()),
            meter=self._engine.meter,
            rules=rules,
            observers=observers,
            progress=progress,
            store=store,
            still_running=self.session.display.still_running,
            quality_file=quality_file,
        ).run()

    def _store_trial(self, optuna_trial: optuna.Trial, record: TrialRecord) -> None:
        """Store what a trial has used so far.

        If another program has locked the storage, the trial goes on: all that it has used is
        stored when it has finished.
        """
        with unless_held():
            self.lease.renew()
            self.account.store(self.storage)  # first, as for a probe
            self.storage.save_progress(optuna_trial, record)
            self._look_at_others(record)

    def _look_at_others(self, running: TrialRecord) -> None:
        """Update the energy that other workers have used, which counts towards the budget, too."""
        if len(self.lease.living) > 1 and self.budget.limits_energy:
            own_kwh = running.energy_kwh.total if running.energy_kwh else 0.0
            spent_kwh = self.storage.snapshot(self.lease.living).data.spent_kwh()
            self._elsewhere_kwh = spent_kwh - own_kwh

    def _rules_of_trial(self, seen: Snapshot, spec: TrialSpec, plan: "TrialPlan") -> Rules:
        """Return the rules that may end this trial, with its cap."""
        self._elsewhere_kwh = seen.data.spent_kwh()
        search = self.session.checked.config.search
        # The start configuration is the baseline, and a repeat shows how much runs differ: both
        # need complete runs to compare.
        is_baseline = spec.number == 0 and self.session.checked.start is not None
        to_its_end = spec.repeat_of is not None or is_baseline
        has_cap = search.pruning.cap and search.goal == "recommend" and not to_its_end
        prunes = search.pruning.target and not to_its_end
        return self._rules(
            should_prune=plan.pruning_rule(spec.params) if prunes else None,
            audit=plan.audits,
            cap_kg_co2e=cap(seen.data.records, plan.meeting) if has_cap else None,
        )

    def _rules(self, **of_trial: Any) -> Rules:
        """Return the rules that may end any run, a probe as well as a trial, and a trial's own."""

        def budget_spent() -> bool:
            running = sum(self._engine.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
            return self.budget.limit_reached(self._elsewhere_kwh + running) is not None

        launch = self.session.checked.config.launch
        return Rules(
            emissions_kg_co2e=self.session.checked.emissions_kg_co2e,
            budget_spent=budget_spent,
            interrupted=self.session.interrupted,
            timeout_s=launch.timeout_s,
            time_limit_s=launch.trial_time_limit_s,
            **of_trial,
        )


def interruption(paths: StudyPaths) -> StudyInterrupted:
    """Return the error of an interrupted study."""
    report = f"`carbonopt report {shlex.quote(str(paths.root))}`"
    return StudyInterrupted(
        f"interrupted; run the same command again to resume. {report} reports what there is."
    )
