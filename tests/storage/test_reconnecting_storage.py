"""A server that restarts, or a connection that is cut, costs a study nothing: no trial is lost, and
none is made or run twice.
"""

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import optuna
import pytest
from commands import within
from optuna.study import StudyDirection
from optuna.trial import TrialState as OptunaState
from postgresql import Server, end_connections
from replays import study_over, write_table
from sqlalchemy import event
from storage.test_workers import begun, check_shared, command, joining
from study.test_resume import wait_for

from carbonopt.analysis.footprint import footprint
from carbonopt.core.errors import StudyInterrupted
from carbonopt.storage import reconnecting_storage, workers
from carbonopt.storage.locked_storage import Patience, without_waiting
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.reconnecting_storage import ReconnectingStorage, StorageUnreachable
from carbonopt.storage.url import connect
from carbonopt.storage.workers import leased

NAME = "the study"


@contextmanager
def cut_at(storage: ReconnectingStorage, url: str, which: str) -> Iterator[list[str]]:
    """End all connections once, when a transaction that has written is about to be committed, or
    when it has just been committed and its client hasn't heard of it.
    """
    done: list[str] = []
    wrote = [False]

    def executed(*arguments: object) -> None:
        context = arguments[4]
        wrote[0] = wrote[0] or context.isinsert or context.isupdate

    def committing(connection: object) -> None:
        if not wrote[0] or done:
            return
        done.append(which)
        if which == "after":
            connection.connection.dbapi_connection.commit()
        end_connections(url)

    event.listen(storage.engine, "after_cursor_execute", executed)
    event.listen(storage.engine, "commit", committing)
    try:
        yield done
    finally:
        event.remove(storage.engine, "after_cursor_execute", executed)
        event.remove(storage.engine, "commit", committing)


@pytest.fixture
def storage(postgresql_url: str) -> ReconnectingStorage:
    return connect(postgresql_url, patience=Patience(60))


@pytest.fixture
def study(storage: ReconnectingStorage) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=NAME)


@pytest.mark.parametrize("which", ["before", "after"])
def test_each_call_that_stores_is_done_once(
    which: str, storage: ReconnectingStorage, study: optuna.Study, postgresql_url: str
) -> None:
    """Whether its transaction was committed when the connection was cut or not."""

    def cut_in(call: Callable[[], object]) -> object:
        with cut_at(storage, postgresql_url, which) as done:
            returned = call()
        assert done == [which]
        return returned

    cut_in(lambda: study.set_user_attr("config", 1))
    cut_in(lambda: study.enqueue_trial({"x": 0.5}))
    popped = cut_in(study.ask)
    made = cut_in(study.ask)
    assert [popped.number, made.number] == [0, 1]
    assert cut_in(lambda: popped.suggest_float("x", 0, 1)) == 0.5
    cut_in(lambda: popped.set_user_attr("record", 2))
    cut_in(lambda: storage.set_trial_state_values(popped._trial_id, OptunaState.COMPLETE, [3.0]))
    cut_in(lambda: storage.put_back(made._trial_id))
    first, second = optuna.load_study(storage=postgresql_url, study_name=NAME).trials
    assert (first.state, first.values, first.params) == (OptunaState.COMPLETE, [3.0], {"x": 0.5})
    assert (first.user_attrs, second.state) == ({"record": 2}, OptunaState.WAITING)
    assert study.user_attrs == {"config": 1}


def test_a_trial_that_another_worker_has_begun_since_is_not_queued_again(
    storage: ReconnectingStorage, study: optuna.Study, postgresql_url: str
) -> None:
    trial, another = study.ask(), optuna.load_study(storage=postgresql_url, study_name=NAME)
    taken: list[optuna.Trial] = []

    def cut_and_take(connection: object) -> None:
        if not taken:
            connection.connection.dbapi_connection.commit()
            taken.append(another.ask())
            end_connections(postgresql_url)

    def listen(*arguments: object) -> None:
        if arguments[4].isupdate and not event.contains(storage.engine, "commit", cut_and_take):
            event.listen(storage.engine, "commit", cut_and_take)

    event.listen(storage.engine, "after_cursor_execute", listen)
    storage.put_back(trial._trial_id)
    assert [run.number for run in taken] == [trial.number]
    assert study.trials[0].state == OptunaState.RUNNING


def test_a_trial_that_was_finished_by_another_call_stays_finished(
    storage: ReconnectingStorage, study: optuna.Study
) -> None:
    trial = study.ask()
    study.tell(trial, 1.0)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        storage.set_trial_state_values(trial._trial_id, OptunaState.COMPLETE, [1.0])


def test_what_may_not_wait_is_left_and_a_caller_that_may_gives_up_in_time(
    mortal_postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    stalls: list[str] = []
    monkeypatch.setattr(reconnecting_storage, "_STALLED_S", 0.0)
    patience = Patience(1.5, said.append, stalled=stalls.append)
    storage = connect(mortal_postgresql.new_database(), patience=patience)
    number = storage.create_new_study([StudyDirection.MINIMIZE], NAME)
    mortal_postgresql.stop()
    began_s = time.monotonic()
    for _ in range(1000):
        with without_waiting():
            storage.set_study_user_attr(number, "mine", 1)
    assert time.monotonic() - began_s < 15, "a thousand times 1.5 s if each waited"
    began_s = time.monotonic()
    with pytest.raises(StorageUnreachable, match="type the same command again"):
        storage.set_study_user_attr(number, "mine", 1)
    assert 1.4 < time.monotonic() - began_s < 15
    assert len(stalls) == 1
    assert len(said) == 1
    assert "s3cret" not in f"{said} {stalls}" and "postgresql+psycopg://me@127.0.0.1" in said[0]
    mortal_postgresql.start()
    storage.set_study_user_attr(number, "mine", 2)
    assert len(said) == 2
    assert storage.get_study_user_attrs(number) == {"mine": 2}
    assert storage.reconnection.in_contact_s() < 5.0


def test_who_waits_for_a_server_can_be_interrupted(
    mortal_postgresql: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting_storage, "INTERRUPTED_S", 0.3)
    patience = Patience(60, interrupted=lambda: True)
    storage = connect(mortal_postgresql.new_database(), patience=patience)
    mortal_postgresql.stop("immediate")
    with pytest.raises(StudyInterrupted):
        storage.get_all_studies()


# ------------------------------------------------------------------------------------------------------
# turns


def test_a_turn_that_was_lost_stores_nothing_and_is_taken_again(postgresql_url: str) -> None:
    """Another worker had its turn in between, and the first one's is done anew after it."""
    ours, theirs = (connect(postgresql_url, patience=Patience(60)) for _ in range(2))
    number = ours.create_new_study([StudyDirection.MINIMIZE], NAME)
    seen: list[tuple[str, object]] = []

    def note(storage: ReconnectingStorage, who: str) -> None:
        before = storage.get_study_user_attrs(number).get("latest")
        seen.append((who, before))
        storage.set_study_user_attr(number, "latest", who)

    with leased(ours, NAME) as first, leased(theirs, NAME, joins=True) as second:

        def act() -> None:
            if not seen:
                ours.set_study_user_attr(number, "latest", "half")
                end_connections(postgresql_url)
                second.in_turn(lambda: None, lambda: note(theirs, "second"))
            note(ours, "first")

        first.in_turn(lambda: None, act)
    # The first one's read in its lost turn, which was made again, is refused already.
    assert seen == [("second", "half"), ("first", "second")]
    assert ours.get_study_user_attrs(number) == {"latest": "first"}


def test_a_trial_that_another_worker_ran_in_a_lost_turn_is_not_this_workers(
    postgresql_url: str,
) -> None:
    ours, theirs = (connect(postgresql_url, patience=Patience(60)) for _ in range(2))
    number = ours.create_new_study([StudyDirection.MINIMIZE], NAME)
    begun: list[int] = []

    with leased(ours, NAME) as first, leased(theirs, NAME, joins=True) as second:

        def act() -> None:
            begun.append(ours.create_new_trial(number))
            if len(begun) == 1:
                end_connections(postgresql_url)
                second.in_turn(
                    lambda: None,
                    lambda: theirs.set_trial_state_values(begun[0], OptunaState.COMPLETE, [1.0]),
                )
            ours.set_trial_user_attr(begun[-1], "record", "first")

        first.in_turn(lambda: None, act)
    assert len(begun) == 2
    assert "record" not in ours.get_trial(begun[0]).user_attrs
    assert ours.get_trial(begun[1]).user_attrs["record"] == "first"


def test_a_turn_that_no_other_worker_took_goes_on(postgresql_url: str) -> None:
    storage = connect(postgresql_url, patience=Patience(60))
    number = storage.create_new_study([StudyDirection.MINIMIZE], NAME)
    calls = []

    def act() -> None:
        calls.append(1)
        end_connections(postgresql_url)
        storage.set_study_user_attr(number, "mine", len(calls))

    with leased(storage, NAME) as lease:
        lease.in_turn(lambda: None, act)
    assert calls == [1] and storage.get_study_user_attrs(number) == {"mine": 1}


def test_one_worker_at_a_time_has_its_turn_however_often_connections_end(
    postgresql_url: str,
) -> None:
    """A counter that each turn reads and writes: no turn is lost, and none counts twice."""
    storages = [connect(postgresql_url, patience=Patience(60)) for _ in range(3)]
    number = storages[0].create_new_study([StudyDirection.MINIMIZE], NAME)
    turns, ended = 12, threading.Event()

    def count(storage: ReconnectingStorage) -> list[int]:
        mine: list[int] = []

        def add() -> int:
            before, _ = storage.get_study_user_attrs(number).get("count", (0, ""))
            # Whoever counts writes something new, as a worker that begins a trial does: what is
            # stored already is written by nobody, and so no turn is checked.
            storage.set_study_user_attr(number, "count", (before + 1, secrets.token_hex(8)))
            return before + 1

        with leased(storage, NAME, joins=True) as lease:
            for _ in range(turns):
                mine.append(lease.in_turn(lambda: None, add))
        return mine

    def cut() -> None:
        while not ended.wait(0.15):
            end_connections(postgresql_url)

    with ThreadPoolExecutor(4) as aside:
        cutting = aside.submit(cut)
        counts = [job.result() for job in [aside.submit(count, storage) for storage in storages]]
        ended.set()
        cutting.result()
    numbers = sorted(value for own in counts for value in own)
    # A turn whose storing was committed but not heard of is taken again, and its number is left out.
    assert len(numbers) == len(set(numbers)) == 3 * turns


# ------------------------------------------------------------------------------------------------------
# whole studies


def begun_study(study: Path, folder: Path, url: str, workers: int = 3) -> list[subprocess.Popen]:
    """The processes of a study's workers, the leading one first."""
    lead = subprocess.Popen(command(study, folder, url), stdout=subprocess.DEVNULL, stderr=PIPE)
    wait_for(lambda: StudyPaths(folder).storage_pointer.exists() or lead.poll() is not None, 60)
    return [
        lead,
        *(
            subprocess.Popen(joining(study, folder, url), stdout=subprocess.DEVNULL, stderr=PIPE)
            for _ in range(workers - 1)
        ),
    ]


@pytest.fixture
def long_replay(tmp_path: Path) -> dict:
    """120 of 180 recorded configurations: workers join while others are left."""
    rates = [round(1e-4 * 1.2**power, 8) for power in range(20)]
    study = study_over(write_table(tmp_path, rates), rates)
    study["search"] |= {"sampler": "random", "pruning": {"target": False, "cap": False}}
    return study | {"budget": {"trials": 120}}


@pytest.mark.slow
def test_a_restarted_server_costs_no_trial_and_no_worker(
    mortal_postgresql: Server, long_replay: dict, write_study, tmp_path: Path
) -> None:
    study, folder = write_study(long_replay), tmp_path / "shared"
    url = mortal_postgresql.new_database()
    watching = connect(url, patience=Patience(60))
    processes = begun_study(study, folder, url, workers=6)
    try:
        wait_for(lambda: len(workers.living(watching, "replayed")) == 6, 120)
        for mode in ("fast", "immediate", "fast", "immediate", "fast"):
            trials = finished(watching) + 5
            wait_for(lambda trials=trials: finished(watching) >= trials, 60)
            mortal_postgresql.stop(mode)
            time.sleep(2)
            mortal_postgresql.start()
        assert finished(watching) < 120
        errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [text for process, text in zip(processes, errors, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    data = check_shared(folder, url, 120)
    assert footprint(data).closure == pytest.approx(1.0, abs=1e-6)
    assert any("reached again" in text for text in errors)


def finished(storage: ReconnectingStorage) -> int:
    """How many trials have finished; the study may be just being made."""
    trials = [
        trial
        for study in storage.get_all_studies()
        for trial in storage.get_all_trials(study._study_id)
    ]
    return sum(trial.state.is_finished() for trial in trials)


# The command, which waits for a second only.
IMPATIENT = """
from carbonopt.cli import app
from carbonopt.study import run_study
run_study.STUDY_S = 1.0
app.main()
"""


@pytest.mark.slow
def test_a_study_goes_on_after_a_cut_that_outlasts_its_patience(
    mortal_postgresql: Server, wide_replay: dict, write_study, tmp_path: Path
) -> None:
    """It ends with 1 and says so; the same command goes on."""
    study, folder = write_study(wide_replay), tmp_path / "shared"
    url = mortal_postgresql.new_database()
    watching = connect(url, patience=Patience(60))
    arguments = ("run", str(study), "--out", str(folder), "--storage", url)
    with begun([sys.executable, "-c", IMPATIENT, *arguments]) as process:
        wait_for(lambda: finished(watching) >= 3 or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        mortal_postgresql.stop()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "type the same command again" in errors and "Traceback" not in errors
    assert "s3cret" not in errors
    mortal_postgresql.start()
    assert within(*arguments).returncode == 0
    check_shared(folder, url, 25)
