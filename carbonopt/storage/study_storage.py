"""A study in its Optuna storage.

The storage is the only source: everything that a report needs is written and read here.
"""

import json
import time
import uuid
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, Trial
from optuna.trial import TrialState as OptunaState
from sqlalchemy import Connection, select, text

from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.format import count_text
from carbonopt.core.quality import Target
from carbonopt.core.trial import StopReason, TrialRecord, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import (
    CarbonTrace,
    InputFile,
    PlannedStart,
    Provenance,
    SessionLedger,
    StudyData,
)
from carbonopt.spec.trial_spec import Prepared
from carbonopt.storage import workers
from carbonopt.storage.folder import is_locked
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.reconnecting_storage import ReconnectingStorage, UnfinishedTrials
from carbonopt.storage.storage_errors import readable
from carbonopt.storage.stored_records import (
    COST,
    PROBE,
    input_files,
    parsed_record,
    probes,
    sessions,
    with_records,
    with_stored_evaluations,
)
from carbonopt.storage.url import RESTORE, stored_pointer
from carbonopt.storage.workers import KnownWorker

CONSTRAINT = "shortfall of the target"  # feasible at 0 and below (see `Target.shortfall`)
# Attributes of a trial that repeats another trial's configuration.
REPEAT_OF, SEED = "repeat of", "seed"
_ID = "id"  # a study's attribute
_CHECKPOINT = "checkpoint"  # a trial's attribute
# Violation of a trial whose quality is unknown: 10 on the quality's scale, which is logarithmic for
# a perplexity, so that e^10 times the target violates it as much.
WORST_VIOLATION = 10.0
_LOOK_AGAIN_S = 0.2  # interval for checking whether another command has begun a study


@dataclass(frozen=True)
class Snapshot:
    """The state of a study at one moment."""

    data: StudyData
    trials: list[FrozenTrial]  # Optuna's trials, by number
    unfinished: UnfinishedTrials | None = None  # only of `StudyStorage.snapshot_after`

    def finished_count(self) -> int:
        """Count the finished trials that `budget.trials` counts (`TrialRecord`)."""
        return self._count(lambda state: state.is_finished())

    def running_count(self) -> int:
        """Count the running trials that `budget.trials` counts (`TrialRecord`)."""
        return self._count(lambda state: state == OptunaState.RUNNING)

    def _count(self, of: Callable[[OptunaState], bool]) -> int:
        beyond = {record.trial for record in self.data.records if not record.counts_for_budget}
        return sum(
            of(trial.state) and REPEAT_OF not in trial.user_attrs and trial.number not in beyond
            for trial in self.trials
        )

    def next_number(self) -> int:
        """Return the number that the next proposal will have."""
        return min(
            (trial.number for trial in self.trials if trial.state == OptunaState.WAITING),
            default=len(self.trials),
        )

    def earlier_record(self, number: int) -> TrialRecord | None:
        """Return the record of a trial's earlier attempts; None before its first attempt."""
        attribute = (
            self.trials[number].user_attrs.get("record") if number < len(self.trials) else None
        )
        return None if attribute is None else TrialRecord.from_json(attribute)

    def checkpoint(self, number: int) -> str | None:
        """Return a trial's last checkpoint as `StudyStorage.set_checkpoint` got it, or None."""
        attributes = self.trials[number].user_attrs if number < len(self.trials) else {}
        text: str | None = attributes.get(_CHECKPOINT)
        return text


class StudyStorage:
    """One study in its storage. The `study` attribute is the Optuna study, for proposals."""

    def __init__(self, storage: ReconnectingStorage, name: str) -> None:
        self.study, self._storage = optuna.load_study(study_name=name, storage=storage), storage
        # Records of finished trials, which nobody changes any more.
        self._ended: dict[int, TrialRecord] = {}
        self._connection: Connection | None = None  # that of `version`

    @classmethod
    def load(cls, storage: ReconnectingStorage, name: str) -> "StudyStorage | None":
        """Load a study by its name; return None if there is none, or `create` was killed in it."""
        with readable(f"study {name!r}"):
            if name not in optuna.get_all_study_names(storage):
                return None
            study = cls(storage, name)
            return None if study._is_half_made else study

    @classmethod
    def await_begun(
        cls, storage: ReconnectingStorage, name: str, interrupted: Callable[[], bool]
    ) -> None:
        """Wait until the storage holds a study.

        Raises:
            StudyInterrupted: Soon after `interrupted` returned True.
        """
        while cls.load(storage, name) is None:
            if interrupted():
                raise StudyInterrupted(BEFORE_A_TRIAL)
            time.sleep(_LOOK_AGAIN_S)

    @property
    def _is_half_made(self) -> bool:
        is_ours = (self.study.metric_names or [""])[0] == COST
        return is_ours and not self._trials and "provenance" not in self.study.user_attrs

    @classmethod
    def of_folder(cls, storage: ReconnectingStorage, paths: StudyPaths) -> "StudyStorage":
        """Load the study of a folder.

        Raises BadInput if the storage is damaged, or doesn't hold the study, or holds several and
        the folder doesn't say which.
        """
        names = cls._names(storage, paths)
        if len(names) == 1:
            return cls(storage, names[0])
        must = f"the storage of {paths.root} must hold one study of carbonopt's, but holds"
        if names:
            raise BadInput(f"{must} {len(names)}.")
        if is_locked(paths):
            raise BadInput(
                f"{must} none yet: the command that works on it prepares its first trial; try again"
                " later."
            )
        if not paths.trial(0).exists() and cls._is_new(storage):
            raise BadInput(
                f"{must} none yet: its run ended before the first trial; type the same `carbonopt"
                " run` again."
            )
        raise BadInput(f"{must} none; {RESTORE}, as it is damaged.")

    @classmethod
    def begun_in(cls, storage: ReconnectingStorage, paths: StudyPaths) -> "StudyStorage | None":
        """Load the study of a folder as `of_folder` does; return None if it holds none yet.

        Unlike `of_folder` it never touches the lock of a folder without a study.
        """
        return cls.of_folder(storage, paths) if cls._names(storage, paths) else None

    @staticmethod
    def _is_new(storage: ReconnectingStorage) -> bool:
        """Return whether no study of a storage has begun, as where a call ended before that."""
        with readable("the storage"):
            return not any(
                storage.get_n_trials(study._study_id) for study in storage.get_all_studies()
            )

    @staticmethod
    def _names(storage: ReconnectingStorage, paths: StudyPaths) -> list[str]:
        """Return the names of carbonopt's studies that a folder's storage holds for it."""
        pointer = stored_pointer(paths)
        with readable(str(paths.root)):
            studies = [study for study in storage.get_all_studies() if "config" in study.user_attrs]
        return [
            study.study_name
            for study in studies
            if pointer is None or study.study_name == pointer["study"]
        ]

    @classmethod
    def create(
        cls, storage: ReconnectingStorage, config: StudyConfig, provenance: Provenance
    ) -> "StudyStorage":
        quality = config.quality
        study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            directions=["minimize", quality.direction],
            load_if_exists=True,
        )
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            study.set_metric_names([COST, quality.name])
        created = cls(storage, config.name)
        created.set_id()
        created.refresh(config, provenance)
        return created

    def set_id(self) -> None:
        """Give the study an identity, by which trackers find its runs, if it has none."""
        if _ID not in self.study.user_attrs:
            self.study.set_user_attr(_ID, uuid.uuid4().hex)

    def refresh(self, config: StudyConfig, provenance: Provenance) -> None:
        """Store the present study file, whose budget may have grown, and the provenance."""
        self.study.set_user_attr("config", config.model_dump(mode="json"))
        self.study.set_user_attr("provenance", provenance.model_dump(mode="json"))

    def check_same_settings(self, config: StudyConfig, where: str, *, joins: bool) -> None:
        """Raise BadInput if the storage holds another study, naming the first key that differs.

        With `joins`, `launch` may differ, for a worker that brings devices of its own, but not the
        number of a trial's ranks.
        """
        with readable(f"study {config.name!r}"):
            is_ours = "config" in self.study.user_attrs
        if not is_ours:
            raise BadInput(
                f"{where} holds a study {config.name!r} that carbonopt did not make; rename yours."
            )
        before = self.read().config
        stored, given = before.identity(), config.identity()
        if joins:
            stored, given = ({**identity, "launch": None} for identity in (stored, given))
        if (difference := _first_difference(stored, given)) is not None:
            advice = "Give another folder (or another name), or restore the study file"
            if difference.is_of_place:
                advice += (
                    " (if it was moved, move it back with its files: its relative paths, and by"
                    " default workload.folder, begin at its own folder)"
                )
            raise BadInput(
                f"{where} holds another study: {difference}. {advice}; only"
                f" {config.may_change} may change."
            )
        theirs, own = before.launch.world_size, config.launch.world_size
        if joins and theirs != own:
            rule = (
                "the workers of a study must give a trial as many ranks, because trials are"
                " compared"
            )
            raise BadInput(f"--worker: {rule}, but this one has {own}, not {theirs}.")

    def check_same_devices(self, own: Provenance, *, joins: bool) -> None:
        """Raise BadInput if this call's trials would not be comparable with the study's.

        Args:
            own: this call's provenance.
            joins: whether this call joins others, which may be about to measure their first trial.
        """
        stored = self.read()
        before, has_measured = stored.provenance.hardware, bool(stored.records or stored.probes)
        if before is None or own.hardware is None or not (joins or has_measured):
            return
        theirs, ours = (
            f"{', '.join(hardware.gpus) or hardware.cpu} on {count_text(hardware.nodes, 'machine')}"
            for hardware in (before, own.hardware)
        )
        if theirs != ours:
            rule = (
                "all calls of a study must have the same devices, because their trials' energy is"
                " compared"
            )
            raise BadInput(
                f"{rule}, but this one has {ours} and the study {theirs}; run it there, or give a"
                " study here a folder of its own."
            )

    def set_prepared(self, prepared: Prepared) -> None:
        self.study.set_user_attr("prepared", prepared.model_dump(mode="json"))

    def set_inputs(self, files: tuple[InputFile, ...]) -> None:
        """Store the input files as one text, for the same reason as the trace in `set_trace`."""
        self.study.set_user_attr("inputs", json.dumps([file.model_dump() for file in files]))

    def set_trace(self, trace: CarbonTrace | None) -> None:
        """Store the trace as one text.

        If it were a list, Optuna would copy a year of hours each time that the study is read.
        """
        self.study.set_user_attr("trace", None if trace is None else trace.model_dump_json())

    def set_planned_start(self, plan: PlannedStart | None) -> None:
        """Store the start that the study waits for; None: it no longer waits."""
        self.study.set_user_attr(
            "planned start", None if plan is None else plan.model_dump(mode="json")
        )

    def set_ended(self, why: str | None, *, by_budget: bool = False) -> None:
        """Store why the study ended, in words (None: it goes on), and whether its budget did."""
        self.study.set_user_attr("ended by budget", by_budget)
        self.study.set_user_attr("ended", why)

    def set_end_said(self, records: int) -> None:
        """Store that a message has said the end of the study with this number of records."""
        self.study.set_user_attr("end said", records)

    def set_session(self, ledger: SessionLedger) -> None:
        """Store a session's ledger under its worker, so that it overwrites no other session's."""
        self.study.set_user_attr(f"session {ledger.worker}", ledger.model_dump(mode="json"))

    def set_probe(self, record: TrialRecord) -> None:
        """Store a probe's record under its number; called repeatedly while the probe runs."""
        self.study.set_user_attr(f"{PROBE}{record.trial}", record.as_json())

    def workers(self) -> frozenset[str]:
        """Return the names of the live workers."""
        return frozenset(worker.id for worker in self.living_workers())

    def living_workers(self) -> tuple[KnownWorker, ...]:
        """Return the live workers, without changing the storage."""
        with readable(f"study {self.study.study_name!r}"):
            return workers.living(self._storage, self.study.study_name)

    def version(self) -> int | None:
        """Return a number that changes when another connection has changed the storage.

        None: the database has no such number. It takes no lock that a writer would wait for.
        """
        engine = self._storage.engine
        if engine.dialect.name != "sqlite":
            return None
        with readable(f"study {self.study.study_name!r}"):
            if self._connection is None:  # the number is that of one connection
                self._connection = engine.connect()
            return int(self._connection.execute(text("PRAGMA data_version")).scalar_one())

    def read(self) -> StudyData:
        """Read the whole study; raise BadInput if the stored data is not what carbonopt writes."""
        return self.snapshot().data

    def read_checked(self) -> StudyData:
        """Read the whole study as `read` does, but refuse a record that has a key twice.

        Optuna, which parses the records for `read`, takes the last of equal keys.
        """
        return self._read_records(parsed_record)

    def read_for_answer(self) -> StudyData:
        """Read the study for a few questions.

        The evaluations of a trial are parsed when they are first asked for; only then a damaged one
        is found. Everything else is as `read_checked` says.
        """
        return self._read_records(
            lambda text, number: with_stored_evaluations(text, number, self.study.study_name)
        )

    def _read_records(self, parse: Callable[[str, int], Any]) -> StudyData:
        with readable(f"study {self.study.study_name!r}"):
            trials = self._storage.trials_with(self.study._study_id, "record", parse)
        return self.snapshot(trials=trials).data

    def snapshot(
        self, living: Collection[str] | None = None, trials: list[FrozenTrial] | None = None
    ) -> Snapshot:
        """Read the whole study with Optuna's trials.

        Args:
            living: the live workers, which may run trials; None: they are read from the storage.
            trials: Optuna's trials, by number, where they have been read; None: they are read.

        Raises:
            BadInput: if the stored data is not what carbonopt writes.
        """
        with readable(f"study {self.study.study_name!r}"):
            living = self.workers() if living is None else living
            known = self._ended if trials is None else {}
            attributes, trials = self.study.user_attrs, self._trials if trials is None else trials
            prepared, trace, inputs = (
                attributes.get(key) for key in ("prepared", "trace", "inputs")
            )
            data = StudyData(
                config=StudyConfig.model_validate(attributes["config"]),
                id=attributes.get(_ID),
                records=(),
                sessions=sessions(attributes),
                probes=probes(attributes, living),
                provenance=Provenance.model_validate(attributes["provenance"]),
                prepared=None if prepared is None else Prepared(**prepared),
                trace=None if trace is None else CarbonTrace.model_validate_json(trace),
                inputs=None if inputs is None else input_files(inputs),
                planned_start=attributes.get("planned start"),
                ended=attributes.get("ended"),
                ended_by_budget=attributes.get("ended by budget", False),
                end_said_records=attributes.get("end said"),
            )
            return Snapshot(with_records(data, trials, living, known), trials)

    def snapshot_after(self, last: Snapshot | None, living: Collection[str]) -> Snapshot:
        """Read the study as `snapshot` does; within a trial, only the records of those that run.

        Args:
            last: what the last call has returned, whose `trials` change; None: it is the first
                call. It is returned if nothing has changed.
            living: the live workers; the same as in the last call, unless `last` is None.

        Raises:
            BadInput: if the stored data is not what carbonopt writes.
        """
        with readable(f"study {self.study.study_name!r}"):
            found = self._storage.unfinished(self.study._study_id, "record")
            before = None if last is None else last.unfinished
            if last is None or before is None or not found.differs_in_texts_alone(before):
                return replace(self.snapshot(living), unfinished=found)
            if found.texts == before.texts:
                return last
            # No trial has begun or ended, so that only its record can have changed.
            for number, text in found.texts.items():
                if text is not None and text != before.texts[number]:
                    last.trials[number].set_user_attr("record", json.loads(text))
            data = with_records(last.data, last.trials, living, self._ended)
            return Snapshot(data, last.trials, found)

    @property
    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def queue_repeat(self, number: int, seed: int) -> None:
        """Queue a repeat of a trial's configuration, unless a repeat is waiting already."""
        trials = self._trials
        if not any(
            trial.state == OptunaState.WAITING and REPEAT_OF in trial.user_attrs for trial in trials
        ):
            self.study.enqueue_trial(
                dict(trials[number].params), user_attrs={REPEAT_OF: number, SEED: seed}
            )

    def save_progress(self, trial: Trial, record: TrialRecord) -> None:
        """Store a running trial's record so far, in case this process dies."""
        trial.set_user_attr("record", record.as_json())

    def set_checkpoint(self, trial: Trial, text: str) -> None:
        """Store what a trial had done and used when it was last saved.

        It is one text, for the same reason as the trace in `set_trace`. The record has to be stored
        first: if the trial is cut off, the energy in its record minus that in its checkpoint counts
        as lost.
        """
        trial.set_user_attr(_CHECKPOINT, text)

    def tell(self, trial: Trial, record: TrialRecord, target: Target) -> None:
        """Finish a trial in Optuna.

        Only a complete trial has values; from others the sampler learns by the constraint. Optuna's
        state FAIL is not used, since its samplers propose failed trials again (optuna #332, #2864);
        the state in the record counts.
        """
        self.save_progress(trial, record)
        trial.set_user_attr("state", record.state.value)
        trial.set_user_attr(
            "configuration", ", ".join(f"{k}={v}" for k, v in record.params.as_record().items())
        )
        if record.stop_reason:
            trial.set_user_attr("stop reason", record.stop_reason.value)
        trial.set_constraint(CONSTRAINT, violation(record, target))
        if record.state == TrialState.COMPLETE:
            assert record.emissions_kg_co2e is not None and record.value is not None
            self.study.tell(trial, [record.emissions_kg_co2e, record.value])
        else:
            self.study.tell(trial, state=OptunaState.PRUNED)

    def requeue(self, trial: Trial, record: TrialRecord) -> None:
        """Queue an interrupted trial again: the next run repeats it under its number."""
        self.save_progress(trial, record)
        self._storage.put_back(trial._trial_id)

    def recover(self, living: Collection[str]) -> Snapshot:
        """Queue the trials that dead workers left running, end their probes, and read the study.

        Their records keep the energy that was stored. The caller has its turn (see
        `Lease.in_turn`), in which a worker that begins a trial also stores that it runs it.
        """
        seen = self.snapshot(living)
        records = {record.trial: record for record in seen.data.records}
        left = [trial for trial in seen.trials if trial.state == OptunaState.RUNNING]
        left = [
            trial
            for trial in left
            if (record := records.get(trial.number)) is None or record.worker not in living
        ]
        for trial in left:
            if (record := records.get(trial.number)) is not None:
                self._storage.set_trial_user_attr(trial._trial_id, "record", record.as_json())
            self._storage.put_back(trial._trial_id)
        interrupted = [
            probe for probe in seen.data.probes if probe.stop_reason is StopReason.INTERRUPTED
        ]
        stored = self.study.user_attrs if interrupted else {}
        for probe in interrupted:
            if probe.as_json() != stored[f"{PROBE}{probe.trial}"]:
                self.set_probe(probe)
        return self.snapshot(living) if left else seen


def check_folder_is_free(
    storage: ReconnectingStorage, paths: StudyPaths, name: str, noted_study: str | None
) -> None:
    """Raise BadInput if a folder holds another study.

    Studies with different names can have the same default folder.

    Args:
        storage: the folder's storage.
        paths: the folder.
        name: the study's name.
        noted_study: the study that the folder has noted, as `storage_place` returns it.
    """
    with readable(str(paths.root)):
        held = optuna.get_all_study_names(storage)
    there = [noted_study] if noted_study is not None else held if paths.storage.exists() else []
    if there and name not in there:
        raise BadInput(
            f"{paths.root} holds the study {there[0]!r}; give {name!r} a folder of its own."
        )
    if name in held:
        return
    left = [path.name for path in (paths.trials, paths.probes, paths.report) if path.exists()]
    if left:
        lost = f"{paths.root} holds {left[0]} of a study, but its storage has no study {name!r}"
        raise BadInput(f"{lost}; restore the storage from a copy, or give another folder.")
    with readable(str(paths.root)):
        _check_studies_are_whole(storage)


def _check_studies_are_whole(storage: ReconnectingStorage) -> None:
    """Raise BadInput if a storage holds parts of a study that is not there.

    A new study could get that one's number, and with it its trials.
    """
    studies = select(models.StudyModel.study_id)
    parts = (models.StudyDirectionModel, models.TrialModel, models.StudyUserAttributeModel)
    with storage.engine.connect() as connection:
        for part in parts:
            left = select(part.study_id).where(part.study_id.not_in(studies)).limit(1)
            if connection.execute(left).first() is not None:
                raise BadInput(f"{part.__tablename__} has rows of a study that is not there")


def violation(record: TrialRecord, target: Target) -> float:
    """Return by how much a trial's last known quality misses the target (`Target.shortfall`).

    It is at most WORST_VIOLATION.
    """
    if record.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return WORST_VIOLATION
    if record.evals == () and record.value is None:
        # The cap stopped it before its first evaluation, so that nothing speaks against its
        # quality.
        return 0.0
    last = record.evals[-1].value if record.evals else record.value
    shortfall = WORST_VIOLATION if last is None else target.shortfall(last)
    if record.stop_reason == StopReason.TARGET:
        shortfall = max(shortfall, 1e-6)
    return min(shortfall, WORST_VIOLATION)


class _Difference(NamedTuple):
    """A setting that two study files have otherwise."""

    key: str
    stored: Any
    given: Any

    @property
    def is_of_place(self) -> bool:
        """Whether the values are paths, so that they may differ because files were moved."""
        lists = [
            value if isinstance(value, list) else [value] for value in (self.stored, self.given)
        ]
        paths = [path for values in lists for path in values]
        return all(isinstance(path, str) and Path(path).is_absolute() for path in paths)

    def __str__(self) -> str:
        key, stored, given = self
        if isinstance(stored, str) and isinstance(given, str) and "\n" in stored + given:
            both = zip_longest(given.split("\n"), stored.split("\n"))
            place, (now, before) = next(
                (n, two) for n, two in enumerate(both, 1) if two[0] != two[1]
            )
            key, given, stored = f"line {place} of {key}", now, before
        return f"{key} is {given!r} now, but {stored!r} in the study that is there"


def _first_difference(stored: Any, given: Any, key: str = "") -> _Difference | None:
    if isinstance(stored, dict) and isinstance(given, dict):
        names = sorted(stored.keys() | given.keys())
        differences = (
            _first_difference(stored.get(name), given.get(name), f"{key}.{name}" if key else name)
            for name in names
        )
        return next(filter(None, differences), None)
    # As texts, in which 0 and false differ, and 1 and 1.0: a trial's command has one or the other.
    if json.dumps(stored, sort_keys=True) == json.dumps(given, sort_keys=True):
        return None
    return _Difference(key, stored, given)
