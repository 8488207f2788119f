"""A study: ask → launch → watch → tell, until the budget is used up; resumable after any interruption."""

import contextlib
import platform
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import optuna

import carbonopt
from carbonopt.analysis import confirmation as confirm
from carbonopt.core.config import LocalLaunch, ReplayLaunch, StudyConfig
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, StudyInterrupted
from carbonopt.core.study import Hardware, Provenance, SessionLedger, StudyData
from carbonopt.core.trial import TRIAL_PHASES, Phase, StopReason, TrialRecord, TrialSpec
from carbonopt.core.units import emissions_kg_co2e, now_utc
from carbonopt.energy.hardware import describe_hardware, gpu_uuids
from carbonopt.energy.machine import MachineMeter
from carbonopt.energy.meter import Meter, ReplayMeter
from carbonopt.energy.occupancy import GpuMemory
from carbonopt.engines.local import LocalLauncher
from carbonopt.engines.replay import ReplayLauncher
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study import REPEAT_OF, SEED, StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, remember_storage, storage_url
from carbonopt.study.check import Checked
from carbonopt.study.inputs import check_unchanged, input_files, with_sha256, workload_fingerprint
from carbonopt.study.supervisor import Rules, TrialObserver, TrialProcesses, TrialWatch

if TYPE_CHECKING:
    from carbonopt.search.strategy import Strategy


class Launcher(Protocol):
    """Starts trials: on this machine, or from a table."""

    def seed(self, seed: int, params: TrialParams) -> int: ...
    def start(self, spec: TrialSpec, log: Path) -> TrialProcesses: ...
    def prepare_next(self) -> None: ...
    def close(self) -> None: ...


class StudyDisplay(TrialObserver, Protocol):
    """Who shows a study while it runs."""

    def warn(self, text: str) -> None: ...
    def progress(self, step: int, total_steps: int, train_kwh: float) -> None: ...
    def preparing(self, anything: bool) -> None: ...
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
        BadInput: before anything was started.
        StudyInterrupted: after `interrupted` said so; the running trial has been put back.
        MeasurementError: if no energy can be measured.
    """
    config = checked.config
    storage = connect(storage_url(paths, url))
    check_folder_is_free(storage, paths, config.name)
    found = StudyStorage.load(storage, config.name)
    where = str(paths.root) if url is None else "the storage"
    if found is not None:
        found.check_same(config, where)
        if (
            config.budget.trials is not None
            and found.finished_count() >= config.budget.trials
            and (config.confirm is None or _is_confirmed(found, config))
        ):
            found.set_trace(checked.trace)
            data = found.read(live=False)
            if data.ended is None:  # killed before it said so, or interrupted and now given fewer trials
                found.refresh(config, data.provenance)
                found.set_ended(_with_confirmation(_all_run(config.budget.trials), found.read(live=False), _any_seed))
            return found.read(live=False)  # nothing is left to do, and nothing shall be spent on finding that out
    inputs = input_files(config)
    noted = None if found is None else found.inputs()
    if noted is not None:
        check_unchanged(noted, inputs, where, interrupted)
        inputs = noted
    begins()
    fingerprint = workload_fingerprint(config, inputs)
    launcher, meter, memory, hardware = _open(config, paths, display, interrupted, fingerprint)
    try:
        session = _Session(meter, now_utc())
        prepared = None
        inputs = with_sha256(inputs, interrupted)  # here, where what it takes is measured as preparation
        with ThreadPoolExecutor(1) as aside:
            done = aside.submit(meanwhile)
            if isinstance(launcher, LocalLauncher):
                prepared = launcher.prepare(interrupted)
                checked.space.check_fits(prepared.train_sequences)
                meter.enter(Phase.GAP)
        done.result()
        provenance = Provenance(
            hardware=hardware,
            versions={**_own_versions(), **(prepared.versions if prepared else {})},
            intensity=checked.intensity,
            energy_source=meter.energy_source,
            models=meter.models,
            study_file=study_file,
        )
        remember_storage(paths, url, config.name)
        if found is None:
            found = StudyStorage.create(storage, config, provenance)
        else:
            found.refresh(config, provenance)
        if prepared is not None:
            found.set_prepared(prepared)
        found.set_inputs(inputs)
        found.set_trace(checked.trace)
        from carbonopt.search.strategy import Strategy  # with SciPy: now that the trials' processes have been started

        strategy = Strategy(config, checked.space, None if hardware is None else hardware.gpu_memory_gib)
        loop = _Loop(checked, found, launcher, meter, memory, paths, session, display, trackers, interrupted, strategy)
        loop.run()
        return found.read(live=True)
    finally:
        with contextlib.closing(memory), contextlib.closing(launcher):  # also if the meter can't read any more
            meter.close()


class _Session:
    """What this call of the command spends beside its trials."""

    def __init__(self, meter: Meter, started_at: str) -> None:
        self._meter = meter
        self._began = time.monotonic()
        self._index: int | None = None
        self._ledger = SessionLedger(started_at=started_at)
        self.hours_before = 0.0  # of earlier calls, for the budget

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._began

    def store(self, storage: StudyStorage) -> None:
        """Notes the ledger as it stands. Called while the meter is in GAP or in a trial's phases."""
        if self._index is None:
            earlier = storage.sessions()
            self._index = len(earlier)
            self.hours_before = sum(session.duration_s for session in earlier) / 3600
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
        storage.set_session(self._index, self._ledger)


@dataclass
class _Loop:
    checked: Checked
    storage: StudyStorage
    launcher: Launcher
    meter: Meter
    memory: GpuMemory
    paths: StudyPaths
    session: _Session
    display: StudyDisplay
    trackers: TrialObserver
    interrupted: Callable[[], bool]
    strategy: "Strategy"

    def run(self) -> None:
        storage = self.storage
        storage.recover()
        storage.set_ended(None)
        self.session.store(storage)
        data = storage.read(live=True)
        self.display.study_started(data)
        if self.checked.start is not None and not data.records:
            # It may wait already: this command can have been killed right after queueing it.
            storage.study.enqueue_trial(self.checked.start, skip_if_exists=True)
        while True:
            ended = self._why_ended()
            if ended and not self._repeats():
                storage.set_ended(_with_confirmation(ended, storage.read(live=True), self._available))
                self.session.store(storage)
                return
            not_free = self.memory.await_free(self.interrupted)
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
            seed=trial.user_attrs.get(SEED, self.launcher.seed(config.search.seed, params)),
            params=params,
            repeat_of=repeat_of,
            workload={} if config.workload is None else config.workload.model_dump(mode="json"),
            prepared_dir=str(self.paths.prepared.resolve()),
            trial_dir=str(self.paths.trial(trial.number).resolve()),
        )
        observers: list[TrialObserver] = [self.display, self.trackers]
        for observer in observers:
            observer.trial_started(spec)
        self.meter.enter(Phase.SETUP)
        watch = TrialWatch(
            spec=spec,
            quality=config.target.quality.name,
            processes=self.launcher.start(spec, self.paths.trial_log(spec.number, spec.attempt).resolve()),
            meter=self.meter,
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
        )
        record = watch.run()
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
        self.launcher.prepare_next()

    def _store(self, trial: optuna.Trial, record: TrialRecord) -> None:
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
        timeout_s = config.launch.timeout_s if isinstance(config.launch, LocalLaunch) else float("inf")
        spent_kwh = data.spent_kwh()
        prunes = pruning.target and not to_its_end

        def budget_spent() -> bool:
            running = sum(self.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
            return self._spent(spent_kwh + running) is not None

        return Rules(
            should_prune=self.strategy.should_prune(self.storage.study, number, params) if prunes else None,
            audit=self.strategy.audits(number),
            cap_kg_co2e=best if pruning.cap and config.search.goal == "recommend" and not to_its_end else None,
            emissions_kg_co2e=self._emissions,
            budget_spent=budget_spent,
            interrupted=self.interrupted,
            timeout_s=timeout_s,
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
        due = confirm.plan(data, self._available).next
        if due is not None:
            self.storage.queue_repeat(due.trial, due.seed)
        return due is not None

    def _available(self, seed: int, params: TrialParams) -> bool:
        return self.launcher.seed(seed, params) == seed

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


def _open(
    config: StudyConfig, paths: StudyPaths, display: StudyDisplay, interrupted: Callable[[], bool], fingerprint: str
) -> tuple[Launcher, Meter, GpuMemory, Hardware | None]:
    """Launcher, meter, the GPUs' memory, hardware: together, because a replay's energy comes from its table."""
    launch = config.launch
    if isinstance(launch, ReplayLaunch):
        replay_meter = ReplayMeter()
        replay = ReplayLauncher(Path(launch.table), config.search.space, config.target.quality, replay_meter.advance)
        return replay, replay_meter, GpuMemory(()), None
    hardware = describe_hardware(launch.gpus)
    with contextlib.ExitStack() as opened:
        memory = opened.enter_context(contextlib.closing(GpuMemory(launch.gpus)))
        launcher = LocalLauncher(launch, gpu_uuids(launch.gpus), display.warn)
        opened.enter_context(contextlib.closing(launcher))
        # It imports while the meter is set up, and leaves the GPUs alone, whose idle power is measured then.
        display.preparing(launcher.begin(config, paths, fingerprint))
        try:
            meter = MachineMeter(launch.gpus, config.carbon.objective, interrupted)
        except Exception as error:
            if interrupted():  # a Ctrl-C also ends the programs that CodeCarbon asks for the CPU, and it fails somehow
                raise StudyInterrupted(BEFORE_FIRST_TRIAL) from error
            raise
        opened.pop_all()
    return launcher, meter, memory, hardware


def _is_confirmed(found: StudyStorage, config: StudyConfig) -> bool:
    """Whether no repeat is left to run; a replay finds that out with its table, at no cost."""
    data = found.read(live=False).model_copy(update={"config": config})
    return isinstance(config.launch, LocalLaunch) and confirm.plan(data, _any_seed).next is None


def _any_seed(seed: int, params: TrialParams) -> bool:
    """For `confirm`: what is trained here can be trained with every seed."""
    return True


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
