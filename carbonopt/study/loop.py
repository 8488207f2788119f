"""A study: ask → launch → watch → tell, until the budget is used up; resumable after any interruption."""

import contextlib
import dataclasses
import platform
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import optuna
from optuna.storages import RDBStorage

import carbonopt
from carbonopt.analysis import confirmation as confirm
from carbonopt.analysis.haste import at_once
from carbonopt.analysis.pipeline import handed_on
from carbonopt.core.config import SlurmLaunch, StudyConfig
from carbonopt.core.dimensions import TrialParams, affecting
from carbonopt.core.errors import BEFORE_FIRST_TRIAL, BadInput, CarbonoptError, StudyInterrupted
from carbonopt.core.format import count_text
from carbonopt.core.study import InputFile, Provenance, SessionLedger, StudyData, wall_clock_s
from carbonopt.core.trial import (
    TRIAL_PHASES,
    Phase,
    Prepared,
    StopReason,
    TrialRecord,
    TrialSpec,
    TrialState,
)
from carbonopt.core.units import emissions_kg_co2e, now_utc
from carbonopt.engines.base import Engine, EngineObserver, LendMeter, own_meter
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study import REPEAT_OF, SEED, Snapshot, StudyStorage, check_folder_is_free
from carbonopt.storage.url import connect, has_storage, remember_storage, storage_url
from carbonopt.storage.workers import Lease, leased, living
from carbonopt.study.check import Checked, as_prepared
from carbonopt.study.crew import Crew, Member
from carbonopt.study.inputs import check_unchanged, input_files, with_sha256, workload_fingerprint
from carbonopt.study.supervisor import Rules, TrialObserver, TrialWatch, begun
from carbonopt.train.tasks.base import task_for

if TYPE_CHECKING:
    from carbonopt.search.strategy import Strategy


_NOT_ENDED = (StopReason.INTERRUPTED, StopReason.BUDGET)
PROBE_S = 2.0  # of steps: the GPUs' counters tick in 0.1 s, which is then 2 % of them
_FAILURES = 3  # of the first trials, all alike, after which a study ends
_NEARLY_ALL = 0.9
_END_TOGETHER_S = 10.0  # after the last trial, for the others' last reading
_LOOK_AGAIN_S = 0.2  # whether other workers have ended what there is to wait for
_LEAD = "start it by `carbonopt run` without --worker and join it when its first trial has begun"


@dataclass(frozen=True)
class AsStep:
    """What a pipeline asks of a study."""

    hands_on: int  # of how many configurations the weights are needed
    lend: LendMeter  # the meter of the whole pipeline


class StudyDisplay(TrialObserver, EngineObserver, Protocol):
    """Who shows a study while it runs."""

    def progress(self, step: int, total_steps: int, train_kwh: float) -> None: ...
    def study_started(self, data: StudyData, hours_before: float) -> None: ...
    def probe_started(self, spec: TrialSpec) -> None: ...
    def probe_ended(self, record: TrialRecord) -> None: ...


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
    as_step: AsStep | None = None,
    *,
    joins: bool = False,
    crew: Crew | None = None,
    member: Member | None = None,
) -> StudyData:
    """Runs a study to the end of its budget, or goes on with it. The caller holds the folder's lock.

    Args:
        url: of the storage; None: the one that the folder already has, else a file in it.
        interrupted: asked a few times a second; True ends the study, resumable.
        begins: called when there is something left to run.
        meanwhile: called in a thread of its own while processes import; over before the first trial.
        as_step: what a pipeline asks of it; None: it stands alone.
        joins: whether this call helps another one that leads the study, or has led it.
        crew: in the launch's other slots; `member`: as which one this call does, in another one's crew.

    Raises:
        BadInput: before anything was started; also where another worker leads it, or there is none to join.
        StudyInterrupted: after `interrupted` said so; the running trial has been put back.
        MeasurementError: if no energy can be measured.
    """
    if joins and member is None and not has_storage(paths, url):
        raise BadInput(f"--worker joins a study, but {paths.root} has none yet: {_LEAD}.")
    database = connect(storage_url(paths, url), must_exist=joins)
    check_folder_is_free(database, paths, checked.config.name)
    where = str(paths.root) if url is None else "the storage"
    with leased(database, checked.config.name, joins=joins) as lease, contextlib.closing(checked.engine):
        heard = partial(_heard_of, lease, interrupted)
        call = _Call(checked, paths, lease, display, [display, trackers], heard, as_step, crew or Crew())
        inputs = input_files(checked.config)
        if waits := member is not None or (joins and checked.config.launch.kind == "slurm"):
            call.begin(inputs, prepares=False)  # what its devices take is the study's, also while it waits
            _await_study(database, checked.config.name, member, heard)
        stored, call.checked = _load(database, checked, paths, where, joins=joins)
        if stored is not None and (data := _already_done(stored, call.checked, paths, as_step)) is not None:
            return data
        inputs = _as_begun(inputs, stored, where, heard)
        begins()
        if not waits:
            call.begin(inputs, prepares=not joins)
        prepared, inputs = call.prepare(inputs, meanwhile)
        provenance = _provenance(call.checked, prepared, study_file)
        remember_storage(paths, url, checked.config.name)
        if stored is not None and joins:
            _check_alike(stored.read().provenance, provenance)
        else:
            stored = _noted(database, stored, call.checked, provenance, prepared, inputs)
        call.run_trials(stored, inputs, prepared)
        return _read_after_others(database, stored, lease, heard)


def _await_study(database: RDBStorage, name: str, member: Member | None, interrupted: Callable[[], bool]) -> None:
    """Until there is a study to join: of a crew, its command says so; a job may begin before the one that leads."""
    if member is not None:
        member.await_study(interrupted)
    while StudyStorage.load(database, name) is None:
        if interrupted():
            raise StudyInterrupted(BEFORE_FIRST_TRIAL)
        time.sleep(_LOOK_AGAIN_S)


def _read_after_others(
    database: RDBStorage, stored: StudyStorage, lease: Lease, interrupted: Callable[[], bool]
) -> StudyData:
    """Where this worker leads, when the others have stored what they used while they ended: it belongs into the report.
    Not for long: one may still have a trial, of a study that was interrupted."""
    deadline = time.monotonic() + (0.0 if lease.joins else _END_TOGETHER_S)
    study = stored.study.study_name
    while time.monotonic() < deadline and living(database, study) - {lease.worker.id} and not interrupted():
        time.sleep(_LOOK_AGAIN_S)
    return stored.read()


def _heard_of(lease: Lease, interrupted: Callable[[], bool]) -> bool:
    """As `interrupted`; the other workers know then that this one lives."""
    lease.renew()
    return interrupted()


def _load(
    database: RDBStorage, checked: Checked, paths: StudyPaths, where: str, *, joins: bool
) -> tuple[StudyStorage | None, Checked]:
    """The study, if it has begun, and what is checked, as it goes on with it. Raises BadInput for another study, or
    where a worker would join none."""
    stored = StudyStorage.load(database, checked.config.name)
    if joins and stored is None:
        raise BadInput(f"--worker joins a study, but {where} has none called {checked.config.name!r} yet: {_LEAD}.")
    checked = _as_stored(checked, stored, paths)
    if stored is not None:
        stored.check_same(checked.config, where, joins=joins)
        if joins:
            checked = _as_led(checked, stored)
    return stored, checked


def _as_begun(
    inputs: tuple[InputFile, ...], stored: StudyStorage | None, where: str, interrupted: Callable[[], bool]
) -> tuple[InputFile, ...]:
    """The files as a study that has trials noted them. Raises BadInput if they have changed since."""
    if stored is None or not (before := stored.read()).records or before.inputs is None:
        return inputs
    check_unchanged(before.inputs, inputs, where, interrupted)
    return before.inputs


def _as_stored(checked: Checked, stored: StudyStorage | None, paths: StudyPaths) -> Checked:
    """With the space that an earlier call has chosen, by which a study goes on."""
    if checked.is_settled or stored is None:
        return checked
    prepared = stored.read().prepared
    if prepared is None:  # killed as soon as there was a study
        return as_prepared(checked, paths.prepared)
    return checked if prepared.auto is None else checked.settled(prepared.auto)


def _as_led(checked: Checked, stored: StudyStorage) -> Checked:
    """With how far the study goes as the call says that leads it."""
    led, own = stored.read().config, checked.config
    if led.launch.world_size != own.launch.world_size:
        rule = "the workers of a study must give a trial as many ranks, because trials are compared"
        raise BadInput(f"--worker: {rule}, but this one has {own.launch.world_size}, not {led.launch.world_size}.")
    update = {"budget": led.budget, "confirm": led.confirm}
    return dataclasses.replace(checked, config=checked.config.model_copy(update=update))


def _check_alike(stored: Provenance, own: Provenance) -> None:
    """Raises BadInput where a joining worker's trials could not be compared with those of the study."""
    if stored.hardware is None or own.hardware is None:
        return
    theirs, ours = (
        f"{', '.join(hardware.gpus) or hardware.cpu} on {count_text(hardware.nodes, 'machine')}"
        for hardware in (stored.hardware, own.hardware)
    )
    if theirs != ours:
        rule = "the workers of a study must have the same devices, because their trials' energy is compared"
        raise BadInput(f"--worker: {rule}, but this one has {ours} and the study {theirs}.")


def _noted(
    database: RDBStorage,
    stored: StudyStorage | None,
    checked: Checked,
    provenance: Provenance,
    prepared: Prepared | None,
    inputs: tuple[InputFile, ...],
) -> StudyStorage:
    """The study, made where it had not begun, with what is known before the first trial."""
    if stored is not None:
        stored.refresh(checked.config, provenance)
    storage = stored or StudyStorage.create(database, checked.config, provenance)
    if prepared is not None:
        storage.set_prepared(prepared)
    storage.set_inputs(inputs)
    storage.set_trace(checked.trace)
    return storage


def _already_done(
    stored: StudyStorage, checked: Checked, paths: StudyPaths, as_step: AsStep | None
) -> StudyData | None:
    """The study, if nothing is left to do; nothing is spent on finding that out."""
    config, trials = checked.config, checked.config.budget.trials
    if trials is None or (seen := stored.snapshot()).finished_count() < trials:
        return None
    data = seen.data.model_copy(update={"config": config})
    if _next_repeat(data, checked.engine, paths, as_step) is not None:
        return None
    stored.set_trace(checked.trace)
    if data.ended is None:  # killed before it said so, or interrupted and now given fewer trials
        stored.refresh(config, data.provenance)
        stored.set_ended(_with_confirmation(_all_run(trials), data, checked.engine))
    return stored.read()


@dataclass
class _Call:
    """One call of the command that has something left to run. What its trials don't spend is in the ledger."""

    checked: Checked
    paths: StudyPaths
    lease: Lease
    display: StudyDisplay
    observers: list[TrialObserver]
    interrupted: Callable[[], bool]
    as_step: AsStep | None
    crew: Crew
    storage: StudyStorage = field(init=False)
    strategy: "Strategy" = field(init=False)
    ledger: SessionLedger = field(init=False)
    began_s: float = field(init=False)  # by the monotonic clock: when its meter did
    hours_before: float = field(init=False)  # in which others worked before this call, for the budget
    living: frozenset[str] = field(init=False)  # the study's workers, as of the last turn
    elsewhere_kwh: float = 0.0  # what the study has spent without what runs here
    told: set[int] = field(default_factory=set)  # trials of whose end the display knows

    def __post_init__(self) -> None:
        self.engine: Engine = self.checked.engine

    def begin(self, inputs: tuple[InputFile, ...], *, prepares: bool) -> None:
        """Starts the engine and its meter. `prepares`: as the engine has it."""
        fingerprint = workload_fingerprint(self.checked.config, inputs, auto=self.checked.auto is not None)
        lend = own_meter if self.as_step is None else self.as_step.lend
        self.engine.begin(self.paths, fingerprint, self.display, self.interrupted, lend, prepares=prepares)
        self.began_s = time.monotonic()
        share = self.engine.machine_share
        self.ledger = SessionLedger(started_at=now_utc(), worker=self.lease.worker.id, machine_share=share)

    def prepare(
        self, inputs: tuple[InputFile, ...], meanwhile: Callable[[], None]
    ) -> tuple[Prepared | None, tuple[InputFile, ...]]:
        """What `begin` has begun, until trials can be started; returns with the files' sha256."""
        engine = self.engine
        inputs = with_sha256(inputs, self.interrupted)  # here, where what it takes is measured as preparation
        with ThreadPoolExecutor(1) as aside:
            done = aside.submit(meanwhile)
            prepared = engine.prepare(self.interrupted)
            if prepared is not None:
                if not self.checked.is_settled:
                    assert prepared.auto is not None
                    self.checked = self.checked.settled(prepared.auto)
                self.checked.space.check_fits(prepared.train_examples)
            engine.meter.enter(Phase.GAP)
        done.result()
        self.lease.renew()
        return prepared, inputs

    def run_trials(self, storage: StudyStorage, inputs: tuple[InputFile, ...], prepared: Prepared | None) -> None:
        from carbonopt.search.strategy import Strategy  # with SciPy: now that the trials' processes have been started

        memory_gib = None if self.engine.hardware is None else self.engine.hardware.gpu_memory_gib
        self.storage = storage
        self.strategy = Strategy(
            self.checked.config,
            self.checked.space,
            memory_gib,
            self.checked.earlier,
            self.checked.advised(prepared),
        )
        now = datetime.fromisoformat(self.ledger.started_at)
        with self._turn() as seen:
            data = seen.data
            self.hours_before = wall_clock_s(data.sessions, until=now) / 3600
            storage.set_ended(None)
            self._store_ledger()
            if self.checked.start is not None and not data.records:
                # It may wait already: this command can have been killed right after queueing it.
                storage.study.enqueue_trial(self.checked.start, skip_if_exists=True)
        self.crew.study_began()
        self.display.study_started(data, self.hours_before)
        self.told = {record.trial for record in data.records if _has_ended(record)}
        while True:
            self.lease.renew()
            if (not_free := self.engine.await_free(self.interrupted)) is not None:
                self.display.warn(not_free)
            if (workload := self.checked.config.workload) is not None and workload.dataset is None:
                # What a script reads each trial reads anew; other data was read once, in the preparation.
                try:
                    check_unchanged(inputs, input_files(self.checked.config), str(self.paths.root), self.interrupted)
                except BadInput as error:  # not before anything was started
                    raise CarbonoptError(str(error)) from error
            with self._turn() as seen:
                work = self._begin_next(seen)
            self._tell_of_others(seen.data)
            if work is None:
                break
            work()
        while self.crew.is_working:  # for whom there is nothing left to do either
            self._wait()
            self._tell_of_others(self.storage.read())
        self._store_ledger()

    def _tell_of_others(self, data: StudyData) -> None:
        """The display, of what other workers have done: the leading one's, and that of a command with a crew."""
        for record in data.records if self.crew.is_working or not self.lease.joins else ():
            if record.trial not in self.told and _has_ended(record):
                self.told.add(record.trial)
                self.display.trial_ended(record)
        for member in self.crew.ended():
            if member.code != 0:
                what = f"the worker in slot {member.slot} ended with code {member.code}"
                self.display.warn(f"{what}; the others go on: {self.paths.workers} has its log.")

    @contextmanager
    def _turn(self) -> Iterator[Snapshot]:
        """This worker's turn: what others have done is known, and nobody begins anything meanwhile."""
        self._raise_if_interrupted()
        with self.lease.turn(self._raise_if_interrupted):
            self.living = self.lease.others() | {self.lease.worker.id}
            seen = self.storage.recover(self.living)
            self.strategy.learn(seen.data.probes)
            yield seen

    def _raise_if_interrupted(self) -> None:
        if self.interrupted():
            raise self._interruption()

    def _begin_next(self, seen: Snapshot) -> Callable[[], None] | None:
        """What this worker does next, begun in the storage already; None: the study has ended. In its turn."""
        storage = self.storage
        if ended := self._why_ended(seen):
            if not self._queue_repeat(seen.data):
                if any(run.state is TrialState.RUNNING for run in (*seen.data.records, *seen.data.probes)):
                    return self._wait  # for what other workers run
                storage.set_ended(_with_confirmation(ended, seen.data, self.engine))
                return None
            seen = storage.snapshot(self.living)  # with the repeat
        elif not self._may_begin(seen):
            return self._wait
        number = seen.next_number()
        if (probed := self.strategy.probe(seen.trials, number)) is not None:
            return self._begin_probe(probed, PROBE_S, seen)
        storage.study.sampler = self.strategy.sampler(seen.trials, number)
        return self._begin_trial(storage.study.ask(self.strategy.distributions), seen)

    def _may_begin(self, seen: Snapshot) -> bool:
        """Whether the search may have one more trial beside those that other workers run."""
        config, ended, running = self.checked.config, seen.finished_count(), seen.running_count()
        if config.budget.trials is not None and ended + running >= config.budget.trials:
            return False  # the last of the budget run
        return running < at_once(config, ended)

    def _wait(self) -> None:
        deadline = time.monotonic() + _LOOK_AGAIN_S
        while time.monotonic() < deadline:
            self._raise_if_interrupted()
            time.sleep(_LOOK_AGAIN_S / 10)

    def _spec(self, number: int, folder: Path, params: TrialParams, **more: Any) -> TrialSpec:
        config = self.checked.config
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

    def _begin_probe(self, params: TrialParams, steps_s: float, seen: Snapshot) -> Callable[[], None]:
        """A first step, and others for so long. In this worker's turn."""
        number = len(seen.data.probes)
        spec = self._spec(number, self.paths.probe(number), params, probe_s=steps_s)
        record = self._begun(spec)
        self.storage.set_probe(record)
        return partial(self._run_probe, spec, record, seen.data)

    def _run_probe(self, spec: TrialSpec, record: TrialRecord, before: StudyData) -> None:
        """What it takes is a part of the study of its own, stored while it runs."""
        self.display.probe_started(spec)

        def store(record: TrialRecord) -> None:
            self.lease.renew()
            self.storage.set_probe(record)
            self._store_ledger()
            self._look_at_others(record)

        self.elsewhere_kwh = before.spent_kwh()
        record = self._watched(spec, record, self.paths.probe_log(spec.number), self._limits(), [], store)
        store(record)
        self.display.probe_ended(record)
        if record.stop_reason is StopReason.INTERRUPTED:
            raise self._interruption()

    def _compiles_first(self, params: TrialParams, data: StudyData) -> bool:
        """Whether a trial would compile what no run has yet. Compiled kernels are kept: what they take is the study's,
        and no part of what a training takes, whichever of the trials comes first."""
        config, key = self.checked.config, attrgetter(*affecting("kernels"))
        if not config.probes or not config.compiles(params):
            return False
        return all(key(record.params) != key(params) for record in (*data.records, *data.probes) if record.kernels)

    def _begun(self, spec: TrialSpec, earlier: TrialRecord | None = None) -> TrialRecord:
        return begun(spec, self.checked.config.quality, self.lease.worker.id, earlier)

    def _begin_trial(self, trial: optuna.Trial, seen: Snapshot) -> Callable[[], None]:
        """In this worker's turn."""
        config, number = self.checked.config, trial.number
        params, repeat_of = self.checked.space.params(trial.params), trial.user_attrs.get(REPEAT_OF)
        earlier = seen.interrupted(number)
        _check_it_can_end(earlier, config)
        spec = self._spec(
            number,
            self.paths.trial(number),
            params,
            attempt=1 if earlier is None else earlier.attempt + 1,
            repeat_of=repeat_of,
            saves_model=self.as_step is not None and self.as_step.hands_on > 0 and repeat_of is not None,
            **({"seed": seed} if (seed := trial.user_attrs.get(SEED)) is not None else {}),
        )
        if config.workload is not None and config.launch.trains:
            task = task_for(config.workload.model_dump(mode="json"))
            spec = spec.model_copy(update={"program": task.program(spec, config.quality)})
        record = self._begun(spec, earlier)
        self.storage.save_progress(trial, record)
        return partial(self._run_trial, trial, spec, record, seen)

    def _run_trial(self, trial: optuna.Trial, spec: TrialSpec, record: TrialRecord, seen: Snapshot) -> None:
        config, storage, number, params = self.checked.config, self.storage, trial.number, spec.params
        if self._compiles_first(params, seen.data):
            with self._turn() as seen:
                probe = self._begin_probe(params, 0.0, seen)  # its trial tells what a step takes
            probe()
            seen = storage.snapshot(self.living)
        for observer in self.observers:
            observer.trial_started(spec)
        # The start is the baseline, a repeat says how far runs differ: only whole ones can be compared.
        to_its_end = spec.repeat_of is not None or (number == 0 and self.checked.start is not None)
        rules = self._rules(seen, number, params, to_its_end=to_its_end)
        log, store = self.paths.trial_log(number, spec.attempt), partial(self._store, trial)
        record = self._watched(spec, record, log, rules, self.observers, store)
        self.lease.renew()
        if interrupted := record.stop_reason == StopReason.INTERRUPTED:
            storage.requeue(trial, record)
        else:
            storage.tell(trial, record, config.target.at())
        self._store_ledger()
        self.told.add(number)
        for observer in self.observers:
            observer.trial_ended(record)
        if interrupted:
            raise self._interruption()

    def _watched(
        self,
        spec: TrialSpec,
        record: TrialRecord,
        log: Path,
        rules: Rules,
        observers: list[TrialObserver],
        store: Callable[[TrialRecord], None],
    ) -> TrialRecord:
        """Runs a trial or a probe from its start to its end."""

        def progress(step: int, total_steps: int, train_kwh: float) -> None:
            self.display.progress(step, total_steps, train_kwh)
            self.engine.prepare_next()

        self.engine.meter.enter(Phase.SETUP)
        self.engine.meter.use(spec.params.world_size)
        return TrialWatch(
            spec=spec,
            so_far=record,
            trial=self.engine.start(spec, log.resolve()),
            meter=self.engine.meter,
            rules=rules,
            observers=observers,
            progress=progress,
            store=store,
        ).run()

    def _store(self, trial: optuna.Trial, record: TrialRecord) -> None:
        self.lease.renew()
        self.storage.save_progress(trial, record)
        self._store_ledger()
        self._look_at_others(record)

    def _look_at_others(self, running: TrialRecord) -> None:
        """What they have spent meanwhile counts for the budget, too."""
        budget = self.checked.config.budget
        if len(self.living) > 1 and (budget.energy_kwh, budget.emissions_kg_co2e) != (None, None):
            own_kwh = running.energy_kwh.total if running.energy_kwh else 0.0
            self.elsewhere_kwh = self.storage.snapshot(self.living).data.spent_kwh() - own_kwh

    def _store_ledger(self) -> None:
        """As it stands. Called while the meter is in GAP or in a trial's phases."""
        meter = self.engine.meter
        parts, outer = meter.account(Phase.PREPARE, Phase.GAP)
        readings = {"prepare": parts[Phase.PREPARE], "gap": parts[Phase.GAP], "outer": outer}
        spent = {f"{name}_kwh": reading.total_kwh for name, reading in readings.items()}
        spent_gpu = {f"{name}_gpu_kwh": reading.gpu_kwh for name, reading in readings.items()}
        update = {"duration_s": time.monotonic() - self.began_s, **spent, **spent_gpu, "idle": meter.idle}
        update["slurm_kwh"] = outer.slurm_kwh
        self.ledger = self.ledger.model_copy(update=update)
        self.storage.set_session(self.ledger)

    def _rules(self, seen: Snapshot, number: int, params: TrialParams, *, to_its_end: bool) -> Rules:
        pruning, cap_kg_co2e = self.checked.config.search.pruning, None
        if pruning.cap and self.checked.config.search.goal == "recommend" and not to_its_end:
            meeting = self.strategy.meeting(seen.trials, number)
            emissions = (record.emissions_kg_co2e for record in seen.data.records if record.trial in meeting)
            cap_kg_co2e = min((kg_co2e for kg_co2e in emissions if kg_co2e is not None), default=None)
        prunes = bool(pruning.target) and not to_its_end
        self.elsewhere_kwh = seen.data.spent_kwh()
        return dataclasses.replace(
            self._limits(),
            should_prune=self.strategy.should_prune(seen.trials, number, params) if prunes else None,
            audit=self.strategy.audits(number),
            cap_kg_co2e=cap_kg_co2e,
        )

    def _limits(self) -> Rules:
        """What may end anything that runs."""

        def budget_spent() -> bool:
            running = sum(self.engine.meter.running(phase).total_kwh for phase in TRIAL_PHASES)
            return self._spent(self.elsewhere_kwh + running) is not None

        return Rules(
            should_prune=None,
            audit=False,
            cap_kg_co2e=None,
            emissions_kg_co2e=self._emissions,
            budget_spent=budget_spent,
            interrupted=self.interrupted,
            timeout_s=self.checked.config.launch.timeout_s,
        )

    def _why_ended(self, seen: Snapshot) -> str | None:
        """Why the study is over, in words; None while it goes on."""
        trials = self.checked.config.budget.trials
        if trials is not None and seen.finished_count() >= trials:
            return _all_run(trials)
        spent = self._spent(seen.data.spent_kwh()) or _always_the_same_failure(seen.data)
        return spent or self.strategy.why_ended(seen.trials, seen.next_number())

    def _queue_repeat(self, data: StudyData) -> bool:
        """Whether the ended search's answer is still to be confirmed; the run that is due is in the queue then."""
        if self._spent(data.spent_kwh()) is not None:
            return False
        if (due := _next_repeat(data, self.engine, self.paths, self.as_step)) is None:
            return False
        self.storage.queue_repeat(due.trial, due.seed)
        return True

    def _spent(self, energy_kwh: float) -> str | None:
        """Which of the budget's limits, but for the number of trials, is used up."""
        budget = self.checked.config.budget
        hours = self.hours_before + (time.monotonic() - self.began_s) / 3600
        limits = {"hours": budget.hours, "kWh": budget.energy_kwh, "kg CO2e": budget.emissions_kg_co2e}
        for (unit, limit), used in zip(limits.items(), (hours, energy_kwh, self._emissions(energy_kwh)), strict=True):
            if limit is not None and used >= limit:
                return f"the budget of {limit:g} {unit} is used up"
        return None

    def _interruption(self) -> StudyInterrupted:
        self._store_ledger()
        reports = f"`carbonopt report {shlex.quote(str(self.paths.root))}` reports what there is"
        return StudyInterrupted(f"interrupted; the same command goes on with the study, and {reports}.")

    def _emissions(self, energy_kwh: float) -> float:
        return emissions_kg_co2e(energy_kwh, self.checked.intensity.g_co2e_per_kwh, self.checked.config.carbon.pue)


def _provenance(checked: Checked, prepared: Prepared | None, study_file: str) -> Provenance:
    # Of what decides proposals and figures in this process; the trials' packages come from the preparation.
    versions = {"carbonopt": carbonopt.__version__, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("optuna", "codecarbon")}
    return Provenance(
        hardware=checked.engine.hardware,
        versions=versions | (prepared.versions if prepared else {}),
        intensity=checked.intensity,
        energy_source=checked.engine.meter.energy_source,
        models=checked.engine.meter.models,
        study_file=study_file,
    )


def _available(engine: Engine) -> confirm.Available:
    return lambda seed, params: engine.seed(seed, params) == seed


def _next_repeat(data: StudyData, engine: Engine, paths: StudyPaths, as_step: AsStep | None) -> confirm.Repeat | None:
    due = None if data.config.confirm is None else confirm.plan(data, _available(engine)).next
    if due is not None or as_step is None:
        return due
    for trial in handed_on(data, as_step.hands_on):  # each is run once more at least, for its weights
        own = [record for record in data.records if trial in (record.trial, record.repeat_of)]
        repeats = [record for record in own if record.repeat_of == trial and record.stop_reason not in _NOT_ENDED]
        failed = any(record.state is not TrialState.COMPLETE for record in repeats)
        if not failed and not any(paths.trial_model(record.trial).is_dir() for record in repeats):
            return confirm.Repeat(trial=trial, seed=1 + max(record.seed for record in own))
    return None


def _always_the_same_failure(data: StudyData) -> str | None:
    """Why a study ends whose trials all failed in one and the same way: the next one would, too."""
    for runs, name in ((data.records, "trials"), ((*data.probes, *data.records), "probes and trials")):
        over = [record for record in runs if record.state is not TrialState.RUNNING]
        failures = [record.failure for record in over if record.state is TrialState.FAILED and record.failure]
        reasons = {(failure.kind, failure.text.partition("\n")[0]) for failure in failures}
        if len(over) >= _FAILURES and len(failures) == len(over) and len(reasons) == 1:
            ((_, text),) = reasons
            return f"all {len(failures)} {name} failed in the same way ({text.rstrip('.')}): mend that first"
    return None


def _check_it_can_end(earlier: TrialRecord | None, config: StudyConfig) -> None:
    """Raises CarbonoptError for a trial that had nearly a whole job of Slurm and was cut off: it would be for ever."""
    launch = config.launch
    if not isinstance(launch, SlurmLaunch) or earlier is None or earlier.duration_s is None:
        return
    if (took_s := earlier.duration_s.total) > _NEARLY_ALL * launch.usable_s:
        had = f"trial {earlier.trial} was cut off after {took_s:.0f} s, nearly all that a job of {launch.time} min has"
        raise CarbonoptError(f"a job must be long enough for a trial, but {had}; give a longer launch.time.")


def _has_ended(record: TrialRecord) -> bool:
    return record.state is not TrialState.RUNNING and not _goes_on(record)


def _goes_on(record: TrialRecord) -> bool:
    """Whether it was interrupted, and will be run again."""
    return record.stop_reason is StopReason.INTERRUPTED


def _all_run(trials: int) -> str:
    return f"{'the one trial of the budget has' if trials == 1 else f'all {trials} trials of the budget have'} been run"


def _with_confirmation(ended: str, data: StudyData, engine: Engine) -> str:
    return ended if data.config.confirm is None else f"{ended}; {confirm.outcome(data, _available(engine))}"
