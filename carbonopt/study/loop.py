"""A study: ask → launch → watch → tell, until the budget is used up; resumable after any interruption."""

import contextlib
import platform
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

import optuna
from optuna.storages import RDBStorage

import carbonopt
from carbonopt.analysis import confirmation as confirm
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import StudyInterrupted
from carbonopt.core.study import InputFile, Provenance, SessionLedger, StudyData
from carbonopt.core.trial import TRIAL_PHASES, Phase, StopReason, TrialRecord, TrialSpec
from carbonopt.core.units import emissions_kg_co2e, now_utc
from carbonopt.energy.meter import Meter
from carbonopt.engines.base import Engine, EngineObserver
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study import REPEAT_OF, SEED, StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, remember_storage, storage_url
from carbonopt.storage.workers import Lease, Worker, leased
from carbonopt.study.check import Checked
from carbonopt.study.inputs import check_unchanged, input_files, with_sha256, workload_fingerprint
from carbonopt.study.supervisor import Rules, TrialObserver, TrialWatch

if TYPE_CHECKING:
    from carbonopt.search.strategy import Strategy


class StudyDisplay(TrialObserver, EngineObserver, Protocol):
    """Who shows a study while it runs."""

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None: ...
    def study_started(self, data: StudyData) -> None: ...


def run_study(
    checked: Checked,
    study_file: str,
    paths: StudyPaths,
    url: str | None,
    display: StudyDisplay,
    trackers: TrialObserver,
    interrupted: Callable[[], bool],
    begins: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> StudyData:
    """Runs a study to the end of its budget, or goes on with it. The caller holds the folder's lock.

    Args:
        study_file: the study file's text, kept for the report.
        url: of the storage; None: the one that the folder already has, else a file in it.
        interrupted: asked a few times a second; True ends the study, resumable.
        begins: called when there is something left to run, before it is.
        meanwhile: called in a thread of its own while processes import what trials need, which takes longer; over
            before the first trial.

    Raises:
        BadInput: before anything was started; also where another worker has the study.
        StudyInterrupted: after `interrupted` said so; the running trial has been put back.
        MeasurementError: if no energy can be measured.
    """
    storage = connect(storage_url(paths, url))
    check_folder_is_free(storage, paths, checked.config.name)
    with leased(storage, checked.config.name) as lease, contextlib.closing(checked.engine):

        def heard_and_interrupted() -> bool:
            lease.renew()
            return interrupted()

        call = _Call(checked, study_file, paths, url, storage, lease, display, heard_and_interrupted)
        found = StudyStorage.load(storage, checked.config.name)
        if found is not None:
            found.check_same(checked.config, call.where)
            if (data := call.already_done(found)) is not None:
                return data
        inputs = call.inputs(found)
        begins()
        loop = call.open(found, inputs, meanwhile, trackers)
        loop.run()
        return loop.storage.read(live=True)


@dataclass
class _Call:
    """One call of the command, up to its first trial."""

    checked: Checked
    study_file: str
    paths: StudyPaths
    url: str | None
    database: RDBStorage
    lease: Lease
    display: StudyDisplay
    interrupted: Callable[[], bool]

    @property
    def where(self) -> str:
        return str(self.paths.root) if self.url is None else "the storage"

    def already_done(self, found: StudyStorage) -> StudyData | None:
        """The study, if nothing is left to do; nothing is spent on finding that out."""
        checked, trials = self.checked, self.checked.config.budget.trials
        if trials is None or found.finished_count() < trials or not _is_confirmed(found, checked):
            return None
        found.set_trace(checked.trace)
        data = found.read(live=False)
        if data.ended is None:  # killed before it said so, or interrupted and now given fewer trials
            found.refresh(checked.config, data.provenance)
            confirmed = _with_confirmation(_all_run(trials), found.read(live=False), _available(checked.engine))
            found.set_ended(confirmed)
        return found.read(live=False)

    def inputs(self, found: StudyStorage | None) -> tuple[InputFile, ...]:
        """The files that trials read, as the study's first trial found them; else as they are now."""
        inputs = input_files(self.checked.config)
        noted = None if found is None else found.inputs()
        if noted is None:
            return inputs
        check_unchanged(noted, inputs, self.where, self.interrupted)
        return noted

    def open(
        self,
        found: StudyStorage | None,
        inputs: tuple[InputFile, ...],
        meanwhile: Callable[[], None],
        trackers: TrialObserver,
    ) -> "_Loop":
        """Starts the engine, prepares, and stores what the study is."""
        checked, config, engine = self.checked, self.checked.config, self.checked.engine
        engine.begin(self.paths, workload_fingerprint(config, inputs), self.display, self.interrupted)
        session = _Session(engine.meter, self.lease.worker)
        inputs = with_sha256(inputs, self.interrupted)  # here, where what it takes is measured as preparation
        with ThreadPoolExecutor(1) as aside:
            done = aside.submit(meanwhile)
            prepared = engine.prepare(self.interrupted)
            if prepared is not None:
                checked.space.check_fits(prepared.train_sequences)
            engine.meter.enter(Phase.GAP)
        done.result()
        self.lease.renew()
        provenance = Provenance(
            hardware=engine.hardware,
            versions={**_own_versions(), **(prepared.versions if prepared else {})},
            intensity=checked.intensity,
            energy_source=engine.meter.energy_source,
            models=engine.meter.models,
            study_file=self.study_file,
        )
        remember_storage(self.paths, self.url, config.name)
        if found is None:
            found = StudyStorage.create(self.database, config, provenance)
        else:
            found.refresh(config, provenance)
        if prepared is not None:
            found.set_prepared(prepared)
        found.set_inputs(inputs)
        found.set_trace(checked.trace)
        from carbonopt.search.strategy import Strategy  # with SciPy: now that the trials' processes have been started

        memory_gib = None if engine.hardware is None else engine.hardware.gpu_memory_gib
        strategy = Strategy(config, checked.space, memory_gib)
        return _Loop(
            checked, found, self.lease, self.paths, session, self.display, trackers, self.interrupted, strategy
        )


class _Session:
    """What this call of the command spends beside its trials."""

    def __init__(self, meter: Meter, worker: Worker) -> None:
        self._meter = meter
        self._began = time.monotonic()
        self._ledger = SessionLedger(started_at=now_utc(), worker=worker.id)
        self.hours_before = 0.0  # of earlier calls, for the budget

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._began

    def begin(self, storage: StudyStorage) -> None:
        self.hours_before = sum(session.duration_s for session in storage.sessions()) / 3600
        self.store(storage)

    def store(self, storage: StudyStorage) -> None:
        """Notes the ledger as it stands. Called while the meter is in GAP or in a trial's phases."""
        prepare, gap = self._meter.running(Phase.PREPARE), self._meter.running(Phase.GAP)
        outer = self._meter.outer()
        self._ledger = self._ledger.model_copy(
            update={
                "duration_s": self.duration_s,
                "prepare_kwh": prepare.total_kwh,
                "gap_kwh": gap.total_kwh,
                "outer_kwh": outer.total_kwh,
                "prepare_gpu_kwh": prepare.gpu_kwh,
                "gap_gpu_kwh": gap.gpu_kwh,
                "outer_gpu_kwh": outer.gpu_kwh,
                "idle": self._meter.idle,
            }
        )
        storage.set_session(self._ledger)


@dataclass
class _Loop:
    checked: Checked
    storage: StudyStorage
    lease: Lease
    paths: StudyPaths
    session: _Session
    display: StudyDisplay
    trackers: TrialObserver
    interrupted: Callable[[], bool]
    strategy: "Strategy"

    @property
    def engine(self) -> Engine:
        return self.checked.engine

    def run(self) -> None:
        storage = self.storage
        storage.recover()
        storage.set_ended(None)
        self.session.begin(storage)
        data = storage.read(live=True)
        self.display.study_started(data)
        if self.checked.start is not None and not data.records:
            # It may wait already: this command can have been killed right after queueing it.
            storage.study.enqueue_trial(self.checked.start, skip_if_exists=True)
        while True:
            self.lease.renew()
            ended = self._why_ended()
            if ended and not self._repeats():
                storage.set_ended(_with_confirmation(ended, storage.read(live=True), _available(self.engine)))
                self.session.store(storage)
                return
            not_free = self.engine.await_free(self.interrupted)
            if not_free is not None:
                self.display.warn(not_free)
            if self.interrupted():
                raise self._interruption()
            storage.study.sampler = self.strategy.sampler(storage.study, storage.next_number())
            self._run_trial(storage.study.ask(self.strategy.distributions))

    def _run_trial(self, trial: optuna.Trial) -> None:
        config, storage = self.checked.config, self.storage
        params = self.checked.space.params(trial.params)
        earlier = storage.interrupted(trial.number)
        repeat_of = trial.user_attrs.get(REPEAT_OF)
        spec = TrialSpec(
            number=trial.number,
            attempt=1 if earlier is None else earlier.attempt + 1,
            seed=trial.user_attrs.get(SEED, self.engine.seed(config.search.seed, params)),
            params=params,
            repeat_of=repeat_of,
            workload={} if config.workload is None else config.workload.model_dump(mode="json"),
            prepared_dir=str(self.paths.prepared.resolve()),
            trial_dir=str(self.paths.trial(trial.number).resolve()),
        )
        observers: list[TrialObserver] = [self.display, self.trackers]
        for observer in observers:
            observer.trial_started(spec)
        self.engine.meter.enter(Phase.SETUP)
        watch = TrialWatch(
            spec=spec,
            quality=config.target.quality.name,
            trial=self.engine.start(spec, self.paths.trial_log(spec.number, spec.attempt).resolve()),
            meter=self.engine.meter,
            # The start is the baseline, a repeat says how far runs differ: only whole ones can be compared.
            rules=self._rules(
                trial.number,
                params,
                to_its_end=repeat_of is not None or (trial.number == 0 and self.checked.start is not None),
            ),
            observers=observers,
            progress=self._progress,
            store=lambda record: self._store(trial, record),
            earlier=earlier,
            worker=self.lease.worker.id,
        )
        record = watch.run()
        self.lease.renew()
        if record.stop_reason == StopReason.INTERRUPTED:
            storage.requeue(trial, record)
        else:
            storage.tell(trial, record, config.target.at())
        self.session.store(storage)
        for observer in observers:
            observer.trial_ended(record)
        if record.stop_reason == StopReason.INTERRUPTED:
            raise self._interruption()

    def _progress(self, step: int, total_steps: int, train_kwh: float) -> None:
        self.display.progress(step, total_steps, train_kwh)
        self.engine.prepare_next()

    def _store(self, trial: optuna.Trial, record: TrialRecord) -> None:
        self.lease.renew()
        self.storage.save_progress(trial, record)
        self.session.store(self.storage)

    def _rules(self, number: int, params: TrialParams, *, to_its_end: bool) -> Rules:
        config = self.checked.config
        pruning = config.search.pruning
        data = self.storage.read(live=True)
        meeting = self.strategy.meeting(self.storage.study, number)
        feasible = (record for record in data.records if record.trial in meeting)
        costs = (record.emissions_kg_co2e for record in feasible if record.emissions_kg_co2e is not None)
        best = min(costs, default=None)
        spent_kwh = data.spent_kwh()
        prunes = pruning.target and not to_its_end

        def budget_spent() -> bool:
            running = sum(self.engine.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
            return self._spent(spent_kwh + running) is not None

        return Rules(
            should_prune=self.strategy.should_prune(self.storage.study, number, params) if prunes else None,
            audit=self.strategy.audits(number),
            cap_kg_co2e=best if pruning.cap and config.search.goal == "recommend" and not to_its_end else None,
            emissions_kg_co2e=self._emissions,
            budget_spent=budget_spent,
            interrupted=self.interrupted,
            timeout_s=config.launch.timeout_s,
        )

    def _why_ended(self) -> str | None:
        """Why the study is over, in words; None while it goes on."""
        trials = self.checked.config.budget.trials
        if trials is not None and self.storage.finished_count() >= trials:
            return _all_run(trials)
        spent = self._spent(self.storage.read(live=True).spent_kwh())
        return spent or self.strategy.why_ended(self.storage.study, self.storage.next_number())

    def _repeats(self) -> bool:
        """Whether the ended search's answer is still to be confirmed; the run that is due is in the queue then."""
        data = self.storage.read(live=True)
        if data.config.confirm is None or self._spent(data.spent_kwh()) is not None:
            return False
        due = confirm.plan(data, _available(self.engine)).next
        if due is not None:
            self.storage.queue_repeat(due.trial, due.seed)
        return due is not None

    def _spent(self, energy_kwh: float) -> str | None:
        """Which of the budget's limits, but for the number of trials, is used up."""
        budget = self.checked.config.budget
        hours = self.session.hours_before + self.session.duration_s / 3600
        if budget.hours is not None and hours >= budget.hours:
            return f"the budget of {budget.hours:g} hours is used up"
        if budget.energy_kwh is not None and energy_kwh >= budget.energy_kwh:
            return f"the budget of {budget.energy_kwh:g} kWh is used up"
        if budget.emissions_kg_co2e is not None and self._emissions(energy_kwh) >= budget.emissions_kg_co2e:
            return f"the budget of {budget.emissions_kg_co2e:g} kg CO2e is used up"
        return None

    def _interruption(self) -> StudyInterrupted:
        self.session.store(self.storage)
        report = f"carbonopt report {shlex.quote(str(self.paths.root))}"
        return StudyInterrupted(
            f"interrupted; the same command goes on with the study, and `{report}` reports what there is."
        )

    def _emissions(self, energy_kwh: float) -> float:
        return emissions_kg_co2e(energy_kwh, self.checked.intensity.g_co2e_per_kwh, self.checked.config.carbon.pue)


def _is_confirmed(found: StudyStorage, checked: Checked) -> bool:
    """Whether no repeat is left to run."""
    data = found.read(live=False).model_copy(update={"config": checked.config})
    return data.config.confirm is None or confirm.plan(data, _available(checked.engine)).next is None


def _available(engine: Engine) -> confirm.Available:
    """Whether a configuration can be trained with a seed."""
    return lambda seed, params: engine.seed(seed, params) == seed


def _all_run(trials: int) -> str:
    return f"{'the one trial of the budget has' if trials == 1 else f'all {trials} trials of the budget have'} been run"


def _with_confirmation(ended: str, data: StudyData, available: confirm.Available) -> str:
    return ended if data.config.confirm is None else f"{ended}; {confirm.outcome(data, available)}"


def _own_versions() -> dict[str, str]:
    """Of what decides proposals and figures in this process; the trials' packages come from the preparation."""
    return {
        "carbonopt": carbonopt.__version__,
        "python": platform.python_version(),
        "optuna": version("optuna"),
        "codecarbon": version("codecarbon"),
    }
