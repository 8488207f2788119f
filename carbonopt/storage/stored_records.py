"""Parse and check what a study's storage holds of trials, probes and calls."""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from pydantic import ValidationError

from carbonopt.core.errors import BadInput
from carbonopt.core.evaluations import StoredEvaluations
from carbonopt.core.files import parsed_json
from carbonopt.core.trial import QualityResult, StopReason, TrialRecord, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import InputFile, SessionLedger, StudyData
from carbonopt.storage.storage_errors import reason_of_damage
from carbonopt.storage.url import first_line

COST = "emissions_kg_co2e"  # the first objective; the second one is the target's quality
PROBE = "probe "  # prefix of a study's attributes for probes, followed by the probe's number
# The evaluations in a record's JSON, as Optuna writes it. Within a text, a quotation mark would
# follow a backslash; so the list is that of the record's key, and ends before its next key.
_EVALUATIONS = re.compile(
    r', "evals": (\[[^\]]*(?:\](?!, "[a-z0-9_]+": |\}$)[^\]]*)*\])(?=, "[a-z0-9_]+": |\}$)'
)


def parsed_record(text: str, number: int) -> Any:
    """Parse a record's JSON; raise BadInput if it is none, or has a key twice."""
    try:
        return parsed_json(text)
    except ValueError as error:
        raise BadInput(f"trial {number}: its record can't be read: {first_line(error)}") from error


def with_stored_evaluations(text: str, number: int, study: str) -> Any:
    """Return a trial's record from its JSON, whose evaluations are parsed when they are asked for.

    Args:
        text: The record, as Optuna stores it.
        number: The trial's number.
        study: The study's name.

    Raises:
        BadInput: As `parsed_record`.
    """
    evaluations = _EVALUATIONS.search(text)
    if evaluations is None:  # written by another program
        return parsed_record(text, number)
    record = parsed_record(f"{text[: evaluations.start(1)]}[]{text[evaluations.end(1) :]}", number)
    whose = f"the storage of study {study!r}, trial {number},"
    quality = QualityResult(**record["quality"])
    is_complete = record.get("state") == TrialState.COMPLETE
    end = quality.known_end(record.get("total_steps")) if is_complete else None
    stored = StoredEvaluations(evaluations.group(1), quality.of, whose, end)
    return {**record, "evals": stored}


@functools.lru_cache(maxsize=1)
def input_files(noted: str) -> tuple[InputFile, ...]:
    """Parse the stored input files, once for all reads of the study: a folder can have many."""
    return tuple(InputFile(**file) for file in json.loads(noted))


def with_records(
    data: StudyData,
    trials: Sequence[FrozenTrial],
    living: Collection[str],
    known: dict[int, TrialRecord],
) -> StudyData:
    """Return a study with the records of its trials.

    Those of finished trials are taken from `known`, by number, and put there when all are checked.
    """
    records = _records(trials, data.config, living, known)
    read_now = tuple(own for own in records if own is not known.get(own.trial))
    StudyData(**{**dict(data), "records": read_now})  # checks them, once
    known.update((own.trial, own) for own in read_now if trials[own.trial].state.is_finished())
    return data.model_copy(update={"records": records})


def _records(
    trials: Sequence[FrozenTrial],
    config: StudyConfig,
    living: Collection[str],
    known: Mapping[int, TrialRecord],
) -> tuple[TrialRecord, ...]:
    """Return the records of all trials that were begun; those in `known`, by number, from there.

    Raises BadInput if a trial is missing, without which another one may be recommended, or if a
    trial's parameters are missing.
    """
    if missing := sorted(set(range(len(trials))) - {trial.number for trial in trials}):
        raise BadInput(f"trial {missing[0]} is missing")
    records, free = [], config.search.space.free().keys()
    for trial in trials:
        if (record := known.get(trial.number)) is None:
            if trial.state.is_finished() and not free <= trial.params.keys():
                raise BadInput(f"trial {trial.number} has lost its parameters")
            if (record := _record(trial, living)) is None:
                continue
            if record.repeat_of is not None and record.repeat_of >= len(trials):
                raise BadInput(
                    f"trial {record.trial} repeats trial {record.repeat_of}, which is not there"
                )
        records.append(record)
    return tuple(records)


def _record(trial: FrozenTrial, living: Collection[str]) -> TrialRecord | None:
    """Return the record of a trial; None if it is queued, or has only just begun."""
    attribute = trial.user_attrs.get("record")
    if attribute is None:
        if trial.state.is_finished():
            raise BadInput(f"trial {trial.number} has ended, but has no record")
        return None
    try:
        record = TrialRecord.from_json(attribute)
    except ValidationError as error:
        raise BadInput(f"trial {trial.number}: {reason_of_damage(error)}") from error
    if record.trial != trial.number:
        raise BadInput(f"trial {trial.number} has the record of trial {record.trial}")
    for name, value in trial.params.items():
        if (recorded := record.params.value(name)) != value:
            raise BadInput(
                f"trial {trial.number} ran {name} {value}, but its record says {recorded}"
            )
    if trial.state.is_finished():
        _check_ended(record, trial)
    return _as_ended(record, living)


def sessions(attributes: Mapping[str, Any]) -> tuple[SessionLedger, ...]:
    """Return the sessions' ledgers in the order in which the sessions began."""
    ledgers = (
        SessionLedger(**ledger)
        for key, ledger in sorted(attributes.items())
        if key.startswith("session ")
    )
    return tuple(sorted(ledgers, key=lambda ledger: ledger.started_at))


def probes(attributes: Mapping[str, Any], living: Collection[str]) -> tuple[TrialRecord, ...]:
    """Return the probes' records by number; raise BadInput for a damaged record."""
    stored = {key: record for key, record in attributes.items() if key.startswith(PROBE)}
    probes = (_as_ended(_probe(key, record), living) for key, record in stored.items())
    return tuple(sorted(probes, key=lambda record: record.trial))


def _probe(key: str, stored: Any) -> TrialRecord:
    try:
        record = TrialRecord.from_json(stored)
    except (ValidationError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(f"{key}: {reason_of_damage(error)}") from error
    if key != f"{PROBE}{record.trial}":
        raise BadInput(f"{key} has the record of probe {record.trial}")
    if record.state is TrialState.COMPLETE or (
        record.stop_reason is StopReason.PROBE and record.energy_kwh is None
    ):
        raise BadInput(
            f"{key} can't have ended as its record says ({record.state.value}, without energy_kwh)"
        )
    return record


def _as_ended(record: TrialRecord, living: Collection[str]) -> TrialRecord:
    """Return a record, changed to interrupted if its trial runs but its worker doesn't."""
    if record.state == TrialState.RUNNING and record.worker not in living:
        return record.model_copy(
            update={"state": TrialState.FAILED, "stop_reason": StopReason.INTERRUPTED}
        )
    return record


def _check_ended(record: TrialRecord, trial: FrozenTrial) -> None:
    """Raise BadInput if a finished trial's record and Optuna's trial don't agree.

    They must have the same final state, and for a complete trial the same values to rank it by.
    """
    complete = trial.state == OptunaState.COMPLETE
    if record.state == TrialState.RUNNING or complete != (record.state == TrialState.COMPLETE):
        raise BadInput(
            f"trial {record.trial} has ended otherwise than its record says ({record.state.value})"
        )
    if complete and trial.values is None:
        raise BadInput(f"trial {record.trial} has lost its values")
    if complete and record.energy_kwh is None:
        raise BadInput(f"trial {record.trial} is complete, but its record has no energy_kwh")
    if complete:
        _check_last_evaluation(record)
    if record.stop_reason is StopReason.TARGET and not record.evals:
        raise BadInput(f"trial {record.trial} was stopped for its target, but has no evals")
    recorded = ((COST, record.emissions_kg_co2e), (record.quality.name, record.value))
    for (name, value), ranked_by in zip(recorded, trial.values or (), strict=False):
        if value != ranked_by:
            raise BadInput(
                f"trial {record.trial} was ranked by {name} {ranked_by}, but its record has {value}"
            )


def _check_last_evaluation(record: TrialRecord) -> None:
    """Raise BadInput if a complete trial's last evaluation isn't the one of its quality.

    StoredEvaluations are checked when they are read.
    """
    if not record.evals:
        raise BadInput(f"trial {record.trial} is complete, but its record has no evals")
    if not isinstance(record.evals, StoredEvaluations):
        try:
            record.quality.known_end(record.total_steps).check(record.evals[-1])
        except ValueError as error:
            raise BadInput(f"trial {record.trial}: {error}") from error
