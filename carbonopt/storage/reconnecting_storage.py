"""Optuna's storage, which waits for its database when the connection is lost.

A restart of PostgreSQL or a cut network ends a call in the middle. The call is made again until the
server answers, for a limited time. Whether its transaction was committed before the cut is unknown
then, so what must not be done twice is first looked for.
"""

import copy
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState
from sqlalchemy import event, false, func, select, update
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, with_loader_criteria

from carbonopt.core.errors import CarbonoptError, StudyInterrupted
from carbonopt.core.units import human_duration
from carbonopt.storage.locked_storage import (
    INTERRUPTED_S,
    Patience,
    StorageUnavailable,
    may_wait,
)

Done = TypeVar("Done")

_MARK = "carbonopt:made by"  # a trial's system attribute: the call that made the trial
# PostgreSQL's codes for the end of a connection: the server ends, has crashed or starts, or the
# session was idle for too long.
_ENDED = {"57P01", "57P02", "57P03", "25P03"}
# Its codes for other errors after which the same transaction can succeed: a deadlock, a
# serialization failure, too many connections.
_PASSING = {"40P01", "40001", "53300"}
_SHORTEST_S, _LONGEST_S = 0.1, 5.0  # pause between two attempts
_PAUSE_SHARE = 0.1  # a pause, as a share of the time since the connection was lost
_SAY_AFTER_S = 1.0
_STALLED_S = 60.0  # time after which a message is sent
# A call that must not wait may hold up a running trial for a fifth of its time at most: an attempt
# to reach a host that doesn't answer takes as long as the connection's time limit.
_PAUSES_PER_ATTEMPT = 4.0


class ConnectionLost(CarbonoptError):
    """Error: the connection to the database was lost; the same call may succeed later."""


class StorageUnreachable(StorageUnavailable):
    """Error: the database could not be reached for too long, or the caller must not wait."""


@dataclass(frozen=True)
class _Loss:
    """A lost connection that has not come back."""

    at: datetime
    at_s: float  # by the monotonic clock


class Reconnection:
    """The rule by which the calls of one storage wait for its database.

    Args:
        patience: the longest wait, and who is told.
        shown: the storage's URL without its password.
    """

    def __init__(self, patience: Patience, shown: str) -> None:
        self._patience, self._shown = patience, shown
        self._loss: _Loss | None = None
        self._said = set[str]()  # messages about this loss
        self._back_s: float | None = None
        self._try_at_s = 0.0  # when a call that must not wait may try again

    def in_contact_s(self) -> float:
        """Return for how long the connection has been there; infinite if it was never lost."""
        return float("inf") if self._back_s is None else time.monotonic() - self._back_s

    def check_due(self) -> None:
        """Raise StorageUnreachable for a call that must not wait, too soon after the last one."""
        if not may_wait() and time.monotonic() < self._try_at_s:
            raise StorageUnreachable(f"the storage {self._shown} can't be reached.")

    def reached(self) -> None:
        """Note that a call has succeeded."""
        if self._loss is None:
            return
        now_s = time.monotonic()
        if self._said:
            lost_for = human_duration(now_s - self._loss.at_s)
            self._patience.warn(f"the storage {self._shown} is reached again, after {lost_for}.")
        self._loss, self._back_s, self._try_at_s = None, now_s, 0.0
        self._said.clear()

    def pause(self, error: ConnectionLost, attempted_s: float, failing_s: float) -> None:
        """Pause before a call is made again, or raise why it isn't.

        Args:
            error: the error of the last attempt.
            attempted_s: when that attempt began, by the monotonic clock.
            failing_s: when the call's first attempt failed.

        Raises:
            StorageUnreachable: if the call has waited for too long, or must not wait.
            StudyInterrupted: if it has waited for some seconds and the command is asked to end.
        """
        now_s = time.monotonic()
        if self._loss is None:
            self._loss = _Loss(datetime.now(), now_s)
        lost_s = now_s - self._loss.at_s
        since = f"the storage {self._shown} can't be reached since {self._loss.at:%H:%M:%S}"
        if lost_s > _STALLED_S:
            self._say("stalled", self._patience.stalled, f"{since} ({error}).")
        if not may_wait():
            goes_on = "the trial goes on, and is stored when it can be reached again"
            if lost_s > _SAY_AFTER_S:
                self._say("runs", self._patience.warn, f"{since} ({error}); {goes_on}.")
            took_s = now_s - attempted_s
            self._try_at_s = now_s + max(_SAY_AFTER_S, _PAUSES_PER_ATTEMPT * took_s)
            raise StorageUnreachable(f"{since} ({error}).") from error
        until = datetime.now() + timedelta(seconds=self._patience.limit_s - (now_s - failing_s))
        if lost_s > _SAY_AFTER_S:
            tries = f"trying again until {until:%H:%M:%S}, nothing is lost"
            self._say("waits", self._patience.warn, f"{since} ({error}); {tries}.")
        if now_s - failing_s > INTERRUPTED_S and self._patience.interrupted():
            raise StudyInterrupted(
                f"interrupted: {since}; what was stored before counts; run the same command again"
                " to resume."
            ) from error
        if now_s - failing_s > self._patience.limit_s:
            raise StorageUnreachable(
                f"{since} ({error}), for longer than {human_duration(self._patience.limit_s)}; when"
                " it can, type the same command again, which goes on."
            ) from error
        # Workers that lost their connections together don't come back in the same instant.
        pause_s = min(max(_PAUSE_SHARE * lost_s, _SHORTEST_S), _LONGEST_S)
        time.sleep(pause_s * secrets.SystemRandom().uniform(0.5, 1.5))

    def _say(self, which: str, say: Callable[[str], None], text: str) -> None:
        if which not in self._said:
            self._said.add(which)
            say(text)


class UnfinishedTrials(NamedTuple):
    """The unfinished trials of a study, by number, and what belongs to the whole study."""

    begun: int  # number of all trials, the finished ones included
    attributes: dict[str, str]  # the study's user attributes, as JSON
    states: dict[int, OptunaState]
    texts: dict[int, str | None]  # one user attribute of each trial, as JSON; None: not there

    def differs_in_texts_alone(self, other: "UnfinishedTrials") -> bool:
        """Return whether nothing but the trials' attribute has changed, if anything has."""
        return self[:-1] == other[:-1]


class ReconnectingStorage(RDBStorage):
    """Optuna's storage, whose calls wait for the database and do nothing twice.

    Args:
        url: the SQLAlchemy URL, as Optuna takes it.
        engine_kwargs: arguments of SQLAlchemy's `create_engine`.
        patience: the longest wait, and who is told.
        shown: the URL without its password.
        read_only: whether tables that are missing are not made.
    """

    def __init__(
        self,
        url: str,
        engine_kwargs: dict[str, Any],
        patience: Patience,
        shown: str,
        read_only: bool = False,
    ) -> None:
        super().__init__(url, engine_kwargs=engine_kwargs, skip_table_creation=read_only)
        self.reconnection = Reconnection(patience, shown)
        self._is_read_only = read_only
        # Lost connections are waited for only from now on, after the first one was made above: if
        # that one can't be made, the URL may be wrong.
        event.listen(self.engine, "handle_error", _as_lost)

    def patiently(self, call: Callable[[], Done], again: Callable[[], Done] | None = None) -> Done:
        """Make a call until the database answers it.

        Args:
            call: what to do, in transactions of its own.
            again: what to do after a lost connection, by which `call` may have been committed; None
                for a call that may be made twice.

        Raises:
            StorageUnreachable: if the database can't be reached for too long.
            StudyInterrupted: if the command is asked to end meanwhile.
        """
        self.reconnection.check_due()
        attempted_s = time.monotonic()
        try:
            done = call()
        except ConnectionLost:
            # It may have been ended while it was idle. The pool's other ones are not used again.
            done = self._patiently_again(again or call, attempted_s)
        self.reconnection.reached()
        return done

    def _patiently_again(self, call: Callable[[], Done], attempted_s: float) -> Done:
        failing_s = time.monotonic()
        while True:
            try:
                done = call()
                self.update_nothing()
            except ConnectionLost as error:
                self.reconnection.pause(error, attempted_s, failing_s)
                attempted_s = time.monotonic()
            else:
                return done

    def update_nothing(self) -> None:
        """Make an update that changes no row, with which listeners check the worker's turn.

        A call that is made again may find stored what it would store, and write nothing. What it
        found may be another worker's, if the turn was lost with the connection.
        """
        if not self._is_read_only:
            nothing = update(models.StudyModel).where(false()).values(study_name="")
            with self.engine.begin() as connection:
                connection.execute(nothing)

    def _create_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None = None
    ) -> FrozenTrial:
        """Create a trial that carries a mark, by which it is found after a lost connection."""
        mark = secrets.token_hex(8)
        marked = _begun_trial() if template_trial is None else copy.copy(template_trial)
        marked.system_attrs = {**marked.system_attrs, _MARK: mark}

        def create() -> FrozenTrial:
            return RDBStorage._create_new_trial(self, study_id, marked)

        def find_or_create() -> FrozenTrial:
            made = self._marked(study_id, mark)
            return create() if made is None else RDBStorage.get_trial(self, made)

        return self.patiently(create, find_or_create)

    def _marked(self, study_id: int, mark: str) -> int | None:
        """Return the id of the trial with a mark, if it was created."""
        attribute, trial = models.TrialSystemAttributeModel, models.TrialModel
        study = models.StudyModel.study_id
        with self.engine.begin() as connection:
            # A transaction that creates a trial locks its study: one that is still being committed
            # has ended when this lock is granted.
            connection.execute(select(study).where(study == study_id).with_for_update())
            found = (
                select(trial.trial_id)
                .join(attribute)
                .where(
                    trial.study_id == study_id,
                    attribute.key == _MARK,
                    attribute.value_json == f'"{mark}"',
                )
            )
            return connection.execute(found).scalar_one_or_none()

    def trials_with(
        self, study_id: int, key: str, parse: Callable[[str, int], Any]
    ) -> list[FrozenTrial]:
        """Return a study's trials, by number, with one user attribute parsed by a function.

        Optuna parses the JSON of all attributes, and holds all of it at once.

        Args:
            key: the attribute's name.
            parse: returns the attribute's value from its JSON and the trial's number.
        """
        trial, attribute = models.TrialModel, models.TrialUserAttributeModel
        others = with_loader_criteria(attribute, attribute.key != key)
        of_study = select(trial).where(trial.study_id == study_id).order_by(trial.number)
        texts = (
            select(trial.number, attribute.value_json)
            .join(attribute, attribute.trial_id == trial.trial_id)
            .where(trial.study_id == study_id, attribute.key == key)
            .execution_options(yield_per=1)
        )

        def read() -> list[FrozenTrial]:
            with Session(self.engine) as session:
                found = session.scalars(of_study.options(others)).all()
                built = {
                    model.number: self._build_frozen_trial_from_trial_model(model)
                    for model in found
                }
                for number, text in session.execute(texts):
                    if number in built:  # or it was begun since the trials were read
                        built[number].set_user_attr(key, parse(text, number))
            return list(built.values())

        return self.patiently(read)

    def unfinished(self, study_id: int, key: str) -> UnfinishedTrials:
        """Read what can change in a study without a trial that begins or ends.

        Args:
            key: the name of the user attribute that is read of the trials.
        """
        trial, own = models.TrialModel, models.TrialUserAttributeModel
        of_study = models.StudyUserAttributeModel
        finished = [state for state in OptunaState if state.is_finished()]
        all_trials = select(func.count()).where(trial.study_id == study_id)
        of_whole = select(of_study.key, of_study.value_json).where(of_study.study_id == study_id)
        has_key = (own.trial_id == trial.trial_id) & (own.key == key)
        trials = (
            select(trial.number, trial.state, own.value_json)
            .outerjoin(own, has_key)
            .where(trial.study_id == study_id, trial.state.not_in(finished))
        )

        def read() -> UnfinishedTrials:
            with self.engine.connect() as connection:
                begun = connection.execute(all_trials).scalar_one()
                attributes = dict(connection.execute(of_whole).all())
                rows = connection.execute(trials).all()
            states = {number: state for number, state, _ in rows}
            texts = {number: text for number, _, text in rows}
            return UnfinishedTrials(begun, attributes, states, texts)

        return self.patiently(read)

    def set_trial_state_values(
        self, trial_id: int, state: OptunaState, values: Sequence[float] | None = None
    ) -> bool:
        """Set a trial's state, and its values if it is complete.

        The caller is the only worker that changes this trial: it runs it, or has the workers' lock.
        """

        def store() -> bool:
            return RDBStorage.set_trial_state_values(self, trial_id, state, values)

        def store_unless_stored() -> bool:
            try:
                if store():
                    return True
            except UpdateFinishedTrialError:
                if not is_stored():
                    raise
                return True
            return is_stored()

        def is_stored() -> bool:
            stored = RDBStorage.get_trial(self, trial_id)
            return stored.state == state and (values is None or stored.values == list(values))

        return self.patiently(store, store_unless_stored)

    def put_back(self, trial_id: int) -> None:
        """Queue a running trial again.

        After a lost connection, it isn't queued a second time if another worker has begun it since.
        """
        trial = models.TrialModel
        begun = select(trial._datetime_start_utc).where(trial.trial_id == trial_id)

        def read() -> Any:
            with self.engine.begin() as connection:
                return connection.execute(begun).scalar_one()

        begun_at = self.patiently(read)
        is_same_run = (trial.state == OptunaState.RUNNING) & (trial._datetime_start_utc == begun_at)
        queue = update(trial).where(trial.trial_id == trial_id, is_same_run)

        def store() -> None:
            with self.engine.begin() as connection:
                connection.execute(queue.values(state=OptunaState.WAITING))

        self.patiently(store)


def _repeatable(method: Callable[..., Done]) -> Callable[..., Done]:
    """Return a method of Optuna's storage that is called again after a lost connection."""

    @wraps(method)
    def patient(self: ReconnectingStorage, *arguments: Any, **named: Any) -> Done:
        return self.patiently(partial(method, self, *arguments, **named))

    return patient


# Methods that read, or that store the same if they are called twice. A second `create_new_study`
# raises that the study exists, which `optuna.create_study(load_if_exists=True)` expects. A value of
# a parameter that is there already is kept.
_REPEATABLE = (
    "create_new_study", "get_all_studies", "get_study_directions", "get_study_id_from_name",
    "get_study_name_from_id", "get_study_system_attrs", "get_study_user_attrs",
    "set_study_system_attr", "set_study_user_attr",
    "_get_trials", "_set_trial_param", "get_trial", "get_trial_id_from_study_id_trial_number",
    "get_trial_param", "get_trial_system_attrs", "get_trial_user_attrs",
    "set_trial_system_attr", "set_trial_user_attr",
)  # fmt: skip
for _name in _REPEATABLE:
    setattr(ReconnectingStorage, _name, _repeatable(getattr(RDBStorage, _name)))


def _as_lost(context: ExceptionContext) -> ConnectionLost | None:
    """Return the error that SQLAlchemy raises instead of a driver's; None: it raises its own.

    It isn't one of SQLAlchemy's, which Optuna would turn into others, or answer by trying again
    itself.
    """
    error = context.original_exception
    if not isinstance(context.sqlalchemy_exception, DBAPIError):
        return None
    if context.dialect.name == "sqlite":
        # The file was changed after this transaction had read it.
        passes = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT
    else:
        state = sql_state(error)
        # Where the server has said why, the driver may not have noticed the end yet.
        context.is_disconnect = context.is_disconnect or state in _ENDED
        is_gone = context.is_disconnect or context.connection is None
        passes = is_gone or state in _PASSING
    return ConnectionLost(" ".join(str(error).split())) if passes else None


def sql_state(error: BaseException | None) -> str | None:
    """Return PostgreSQL's code of a driver's error."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def _begun_trial() -> FrozenTrial:
    """Return a trial as Optuna begins it."""
    return FrozenTrial(
        number=-1,
        state=OptunaState.RUNNING,
        value=None,
        datetime_start=datetime.now(),
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=-1,
    )
