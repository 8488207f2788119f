"""A study in its Optuna storage: the one truth. Everything that a report needs is read from here and written here."""

import functools
import json
import sqlite3
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial
from optuna.trial import TrialState as OptunaState
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from carbonopt.core.config import StudyConfig
from carbonopt.core.errors import RENAMED_KEYS, BadInput, CarbonoptError, first_fault
from carbonopt.core.quality import Target
from carbonopt.core.study import CarbonTrace, InputFile, Provenance, SessionLedger, StudyData
from carbonopt.core.trial import Prepared, StopReason, TrialRecord, TrialState
from carbonopt.storage import workers
from carbonopt.storage.paths import StudyPaths, is_locked
from carbonopt.storage.url import RESTORE, first_line, stored_pointer, what_is_wrong

COST = "emissions_kg_co2e"  # the first objective; the second one is the target's quality
CONSTRAINT = "shortfall of the target"  # feasible at 0 and below (see `Target.shortfall`)
REPEAT_OF, SEED = "repeat of", "seed"  # attributes of a trial that repeats another one's configuration
_PROBE = "probe "  # attributes of the study, with a probe's number
WORST_VIOLATION = 10.0  # for a trial that taught nothing about its quality; e^10 times a target perplexity


@dataclass(frozen=True)
class Snapshot:
    """A study at one moment."""

    data: StudyData
    trials: list[FrozenTrial]  # Optuna's, by number

    def finished_count(self) -> int:
        """Of the search's own trials."""
        return self._count(lambda state: state.is_finished())

    def running_count(self) -> int:
        """Likewise."""
        return self._count(lambda state: state == OptunaState.RUNNING)

    def _count(self, of: Callable[[OptunaState], bool]) -> int:
        return sum(of(trial.state) and REPEAT_OF not in trial.user_attrs for trial in self.trials)

    def next_number(self) -> int:
        """The number that the next proposal will have."""
        return min(
            (trial.number for trial in self.trials if trial.state == OptunaState.WAITING), default=len(self.trials)
        )

    def interrupted(self, number: int) -> TrialRecord | None:
        """What is known of the earlier attempts of a trial that is to run again; None for a first attempt."""
        attribute = self.trials[number].user_attrs.get("record") if number < len(self.trials) else None
        return None if attribute is None else TrialRecord.from_json(attribute)


class StudyStorage:
    """One study. The `study` attribute is Optuna's, for asking."""

    def __init__(self, storage: RDBStorage, name: str) -> None:
        self.study, self._storage = optuna.load_study(study_name=name, storage=storage), storage
        self._ended: dict[int, TrialRecord] = {}  # of trials that have, which nobody changes any more

    @classmethod
    def load(cls, storage: RDBStorage, name: str) -> "StudyStorage | None":
        """The study of that name, or None, also for one that `create` was killed in."""
        with _readable(f"study {name!r}"):
            if name not in optuna.get_all_study_names(storage):
                return None
            found = cls(storage, name)
            return None if found._is_half_made else found

    @property
    def _is_half_made(self) -> bool:
        own = (self.study.metric_names or [""])[0] == COST
        return own and not self._trials and "provenance" not in self.study.user_attrs

    @classmethod
    def of_folder(cls, storage: RDBStorage, paths: StudyPaths) -> "StudyStorage":
        """The study that a folder belongs to. Raises BadInput if the storage is damaged, or does not hold it, or holds
        several and the folder doesn't say which."""
        pointer = stored_pointer(paths)
        with _readable(str(paths.root)):
            studies = [study for study in storage.get_all_studies() if "config" in study.user_attrs]
            names = [study.study_name for study in studies if pointer is None or study.study_name == pointer["study"]]
            if len(names) == 1:
                return cls(storage, names[0])
        must = f"the storage of {paths.root} must hold one study of carbonopt's, but holds"
        if names:
            raise BadInput(f"{must} {len(names)}.")
        if is_locked(paths):
            raise BadInput(f"{must} none yet: the command that works on it prepares its first trial; try again later.")
        ended = "its run ended before the first trial (type the same command again)"
        raise BadInput(f"{must} none: it is damaged ({RESTORE}), or {ended}.")

    @classmethod
    def create(cls, storage: RDBStorage, config: StudyConfig, provenance: Provenance) -> "StudyStorage":
        quality = config.quality
        study = optuna.create_study(
            study_name=config.name, storage=storage, directions=["minimize", quality.direction], load_if_exists=True
        )
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            study.set_metric_names([COST, quality.name])
        made = cls(storage, config.name)
        made.refresh(config, provenance)
        return made

    def refresh(self, config: StudyConfig, provenance: Provenance) -> None:
        """Stores the study file as it is now (its budget may have grown) and where and how it runs."""
        self.study.set_user_attr("config", config.model_dump(mode="json"))
        self.study.set_user_attr("provenance", provenance.model_dump(mode="json"))

    def check_same(self, config: StudyConfig, where: str, *, joins: bool) -> None:
        """Refuses another study's storage: raises BadInput, naming the first key that differs. `joins`: for a worker
        that brings devices of its own."""
        with _readable(f"study {config.name!r}"):
            is_ours = "config" in self.study.user_attrs
        if not is_ours:
            raise BadInput(f"{where} holds a study {config.name!r} that carbonopt did not make; rename yours.")
        stored, given = self.read().config.identity(), config.identity()
        if joins:
            stored, given = ({**identity, "launch": None} for identity in (stored, given))
        if difference := _first_difference(stored, given):
            advice = "Give another --out (or another name), or restore the study file"
            keys = "budget, confirm, track, carbon.trace, search.learn_from, launch.warm_start and launch.haste"
            raise BadInput(f"{where} holds another study: {difference}. {advice}; only {keys} may change.")

    def set_prepared(self, prepared: Prepared) -> None:
        self.study.set_user_attr("prepared", prepared.model_dump(mode="json"))

    def set_inputs(self, files: tuple[InputFile, ...]) -> None:
        """As one text, for the trace's reason."""
        self.study.set_user_attr("inputs", json.dumps([file.model_dump() for file in files]))

    def set_trace(self, trace: CarbonTrace | None) -> None:
        """As one text: as a list, Optuna would copy a year of hours anew for each look at the study."""
        self.study.set_user_attr("trace", None if trace is None else trace.model_dump_json())

    def set_ended(self, why: str | None) -> None:
        self.study.set_user_attr("ended", why)

    def set_session(self, ledger: SessionLedger) -> None:
        """By its worker: no other session's ledger is overwritten."""
        self.study.set_user_attr(f"session {ledger.worker}", ledger.model_dump(mode="json"))

    def set_probe(self, record: TrialRecord) -> None:
        """Of a probe, by its own number; again and again while it runs."""
        self.study.set_user_attr(f"{_PROBE}{record.trial}", record.as_json())

    def workers(self) -> frozenset[str]:
        """The live ones, by their names."""
        return workers.living(self._storage, self.study.study_name)

    def read(self) -> StudyData:
        """The whole study. Raises BadInput if what is stored is not what carbonopt writes."""
        return self.snapshot().data

    def snapshot(self, living: Collection[str] | None = None) -> Snapshot:
        """The whole study. `living`: the live workers, which may run trials; None: the storage is asked. Raises
        BadInput if what is stored is not what carbonopt writes."""
        with _readable(f"study {self.study.study_name!r}"):
            living = self.workers() if living is None else living
            attributes, trials = self.study.user_attrs, self._trials
            prepared, trace, inputs = (attributes.get(key) for key in ("prepared", "trace", "inputs"))
            config = StudyConfig.model_validate(attributes["config"])
            data = StudyData(
                config=config,
                records=self._records(trials, config, living),
                sessions=_sessions(attributes),
                probes=_probes(attributes, living),
                provenance=Provenance.model_validate(attributes["provenance"]),
                prepared=None if prepared is None else Prepared(**prepared),
                trace=None if trace is None else CarbonTrace.model_validate_json(trace),
                inputs=None if inputs is None else _input_files(inputs),
                ended=attributes.get("ended"),
            )
        return Snapshot(data, trials)

    def _records(
        self, trials: Sequence[FrozenTrial], config: StudyConfig, living: Collection[str]
    ) -> tuple[TrialRecord, ...]:
        """Of all trials that were begun. Raises BadInput if a trial is missing (without it another one may be
        recommended), or what the search chose for it is."""
        if missing := sorted(set(range(len(trials))) - {trial.number for trial in trials}):
            raise BadInput(f"trial {missing[0]} is missing")
        records, free = [], config.search.space.free().keys()
        for trial in trials:
            if (record := self._ended.get(trial.number)) is None:
                if trial.state.is_finished() and not free <= trial.params.keys():
                    raise BadInput(f"trial {trial.number} has lost its parameters")
                if (record := _record(trial, living)) is None:
                    continue
                if record.repeat_of is not None and record.repeat_of >= len(trials):
                    raise BadInput(f"trial {record.trial} repeats trial {record.repeat_of}, which is not there")
                if trial.state.is_finished():
                    self._ended[trial.number] = record
            records.append(record)
        return tuple(records)

    @property
    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def queue_repeat(self, number: int, seed: int) -> None:
        """Puts a trial's configuration into the queue again, unless a repeat waits there already."""
        trials = self._trials
        if not any(trial.state == OptunaState.WAITING and REPEAT_OF in trial.user_attrs for trial in trials):
            self.study.enqueue_trial(dict(trials[number].params), user_attrs={REPEAT_OF: number, SEED: seed})

    def save_progress(self, trial: Trial, record: TrialRecord) -> None:
        """Stores what a running trial has used so far, for the case that this process dies."""
        trial.set_user_attr("record", record.as_json())

    def tell(self, trial: Trial, record: TrialRecord, target: Target) -> None:
        """Ends a trial. Only a complete one has values; the rest teach the sampler by the constraint. Optuna's FAIL is
        not used (the record's state counts): its samplers propose failed trials again (optuna #332, #2864)."""
        self.save_progress(trial, record)
        trial.set_user_attr("state", record.state.value)
        trial.set_user_attr("configuration", ", ".join(f"{k}={v}" for k, v in record.params.as_record().items()))
        if record.stop_reason:
            trial.set_user_attr("stop reason", record.stop_reason.value)
        trial.set_constraint(CONSTRAINT, violation(record, target))
        if record.state == TrialState.COMPLETE:
            assert record.emissions_kg_co2e is not None and record.value is not None
            self.study.tell(trial, [record.emissions_kg_co2e, record.value])
        else:
            self.study.tell(trial, state=OptunaState.PRUNED)

    def requeue(self, trial: Trial, record: TrialRecord) -> None:
        """Puts an interrupted trial back: the next run repeats it under its number."""
        self.save_progress(trial, record)
        self._storage.set_trial_state_values(trial._trial_id, OptunaState.WAITING)

    def recover(self, living: Collection[str]) -> Snapshot:
        """Puts back the trials that dead workers left running, and ends their probes, with what they had used as far as
        it was stored. In a worker's turn: whoever begins a trial says in its own that it runs it. Returns the study as
        it is then."""
        seen = self.snapshot(living)
        records = {record.trial: record for record in seen.data.records}
        left = [trial for trial in seen.trials if trial.state == OptunaState.RUNNING]
        left = [trial for trial in left if (own := records.get(trial.number)) is None or own.worker not in living]
        for trial in left:
            if (record := records.get(trial.number)) is not None:
                self._storage.set_trial_user_attr(trial._trial_id, "record", record.as_json())
            self._storage.set_trial_state_values(trial._trial_id, OptunaState.WAITING)
        interrupted = [probe for probe in seen.data.probes if probe.stop_reason is StopReason.INTERRUPTED]
        stored = self.study.user_attrs if interrupted else {}
        for probe in interrupted:
            if probe.as_json() != stored[f"{_PROBE}{probe.trial}"]:
                self.set_probe(probe)
        return self.snapshot(living) if left else seen


def check_folder_is_free(storage: RDBStorage, paths: StudyPaths, name: str) -> None:
    """Raises BadInput if a folder is another study's: names that differ can have the same folder by default."""
    pointer = stored_pointer(paths)
    with _readable(str(paths.root)):
        held = optuna.get_all_study_names(storage)
    there = [pointer["study"]] if pointer is not None else held if paths.storage.exists() else []
    if there and name not in there:
        raise BadInput(f"{paths.root} holds the study {there[0]!r}; give {name!r} a folder of its own: --out DIR.")
    if paths.trials.exists() and name not in held:
        lost = f"{paths.root} holds trials, but its storage has no study {name!r}"
        raise BadInput(f"{lost}; restore the storage from a copy, or give another --out.")


@contextmanager
def _readable(whose: str) -> Iterator[None]:
    """Whatever reading stumbles over is damage, and becomes a BadInput: SQLite, Optuna and pydantic have errors of
    their own for it."""
    try:
        yield
    except (
        optuna.exceptions.OptunaError, SQLAlchemyError, BadInput,
        ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError,
    ) as error:  # fmt: skip
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        if isinstance(cause, SQLAlchemyError):
            raise BadInput(f"the storage of {whose} {what_is_wrong(cause)}.") from error
        if (key := _renamed_key(error) or _renamed_key(error.__cause__)) is not None:
            why = f"was written by an earlier carbonopt: its key {key} is called {RENAMED_KEYS[key]} now"
            raise BadInput(f"the storage of {whose} {why}; go on with that version, or run it again.") from error
        raise BadInput(f"the storage of {whose} is damaged: {_reason(error)}; {RESTORE}.") from error


@contextmanager
def written(whose: str) -> Iterator[None]:
    """What a run stumbles over while it writes is no damage: the disk is full, or the server is gone. It becomes a
    CarbonoptError that says so. All that was stored before stays."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        said: BaseException = error
        while said.__cause__ is not None:  # down to what the database's driver says
            said = said.__cause__
        why = f"the storage of {whose} can't be written to ({' '.join(str(said).split())}); when it can,"
        if getattr(said, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            why = f"no space left for the storage of {whose}; make room and"
        raise CarbonoptError(f"{why} type the same command again.") from error


def _renamed_key(error: BaseException | None) -> str | None:
    """The first key that had another name before 0.1.0, where one is why this can't be read."""
    if not isinstance(error, ValidationError):
        return None
    unknown = (str(detail["loc"][-1]) for detail in error.errors() if detail["type"] == "extra_forbidden")
    return next((key for key in unknown if key in RENAMED_KEYS), None)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_fault(error).removesuffix(".")
    return first_line(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {first_line(error)}"


def violation(record: TrialRecord, target: Target) -> float:
    """By how much a trial's last known quality misses the target (`Target.shortfall`); at most WORST_VIOLATION."""
    if record.state not in (TrialState.COMPLETE, TrialState.PRUNED):
        return WORST_VIOLATION
    if record.evals == () and record.value is None:
        return 0.0  # stopped by the cap before its first evaluation: nothing speaks against its quality
    last = record.evals[-1].value if record.evals else record.value
    shortfall = WORST_VIOLATION if last is None else target.shortfall(last)
    if record.stop_reason == StopReason.TARGET:
        shortfall = max(shortfall, 1e-6)
    return min(shortfall, WORST_VIOLATION)


@functools.lru_cache(maxsize=1)
def _input_files(noted: str) -> tuple[InputFile, ...]:
    """Of a folder of many: read once, not at each look at the study between trials."""
    return tuple(InputFile(**file) for file in json.loads(noted))


def _record(trial: FrozenTrial, living: Collection[str]) -> TrialRecord | None:
    """The record of a trial; None for one that was put in the queue and never begun, or only just."""
    attribute = trial.user_attrs.get("record")
    if attribute is None:
        if trial.state.is_finished():
            raise BadInput(f"trial {trial.number} has ended, but has no record")
        return None
    try:
        record = TrialRecord.from_json(attribute)
    except ValidationError as error:
        raise BadInput(f"trial {trial.number}: {_reason(error)}") from error
    if record.trial != trial.number:
        raise BadInput(f"trial {trial.number} has the record of trial {record.trial}")
    for name, value in trial.params.items():
        if (recorded := record.params.value(name)) != value:
            raise BadInput(f"trial {trial.number} ran {name} {value}, but its record says {recorded}")
    if trial.state.is_finished():
        _check_ended(record, trial)
    return _as_ended(record, living)


def _sessions(attributes: Mapping[str, Any]) -> tuple[SessionLedger, ...]:
    """In the order in which they began."""
    ledgers = (SessionLedger(**ledger) for key, ledger in sorted(attributes.items()) if key.startswith("session "))
    return tuple(sorted(ledgers, key=lambda ledger: ledger.started_at))


def _probes(attributes: Mapping[str, Any], living: Collection[str]) -> tuple[TrialRecord, ...]:
    """By number. Raises BadInput for a record that is damaged."""
    told = {key: own for key, own in attributes.items() if key.startswith(_PROBE)}
    probes = (_as_ended(_probe(key, own), living) for key, own in told.items())
    return tuple(sorted(probes, key=lambda record: record.trial))


def _probe(key: str, own: Any) -> TrialRecord:
    try:
        record = TrialRecord.from_json(own)
    except (ValidationError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(f"{key}: {_reason(error)}") from error
    if key != f"{_PROBE}{record.trial}":
        raise BadInput(f"{key} has the record of probe {record.trial}")
    if record.state is TrialState.COMPLETE or (record.stop_reason is StopReason.PROBE and record.energy_kwh is None):
        raise BadInput(f"{key} can't have ended as its record says ({record.state.value}, without energy_kwh)")
    return record


def _as_ended(record: TrialRecord, living: Collection[str]) -> TrialRecord:
    """What runs while its worker doesn't was interrupted."""
    if record.state == TrialState.RUNNING and record.worker not in living:
        return record.model_copy(update={"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED})
    return record


def _check_ended(record: TrialRecord, trial: FrozenTrial) -> None:
    """A trial that has ended says how; a complete one has what it is ranked by, for Optuna, too. Else BadInput."""
    complete = trial.state == OptunaState.COMPLETE
    if record.state == TrialState.RUNNING or complete != (record.state == TrialState.COMPLETE):
        raise BadInput(f"trial {record.trial} has ended otherwise than its record says ({record.state.value})")
    if complete and trial.values is None:
        raise BadInput(f"trial {record.trial} has lost its values")
    if complete and record.energy_kwh is None:
        raise BadInput(f"trial {record.trial} is complete, but its record has no energy_kwh")
    recorded = ((COST, record.emissions_kg_co2e), (record.quality.name, record.value))
    for (name, value), ranked_by in zip(recorded, trial.values or (), strict=False):
        if value != ranked_by:
            raise BadInput(f"trial {record.trial} was ranked by {name} {ranked_by}, but its record has {value}")


def _first_difference(stored: Any, given: Any, path: str = "") -> str | None:
    if isinstance(stored, dict) and isinstance(given, dict):
        keys = sorted(stored.keys() | given.keys())
        differences = (_first_difference(stored.get(k), given.get(k), f"{path}.{k}" if path else k) for k in keys)
        return next(filter(None, differences), None)
    if stored == given:
        return None
    return f"{path} is {given!r} now, but {stored!r} in the study that is there"
