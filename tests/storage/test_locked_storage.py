"""A program that holds the study's SQLite file makes every command wait, and nothing is lost."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from commands import within
from optuna.exceptions import StorageInternalError
from optuna.study import StudyDirection
from psycopg.errors import LockNotAvailable
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from carbonopt.core.errors import StudyInterrupted
from carbonopt.storage import locked_storage
from carbonopt.storage.locked_storage import Patience, StorageHeld, without_waiting
from carbonopt.storage.url import connect
from carbonopt.study import run_study

VIEWER = """
import sqlite3, sys, time
base = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
base.execute(sys.argv[3])
base.execute("SELECT count(*) FROM studies").fetchall()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def viewer(file: Path, hold_s: float, begin: str = "BEGIN EXCLUSIVE") -> Iterator[int]:
    """Another program that holds a database for some seconds; its process number."""
    with subprocess.Popen(
        [sys.executable, "-c", VIEWER, file, str(hold_s), begin], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process.pid
        finally:
            process.kill()


def stored_trials(folder: Path) -> int:
    return len(within("export", folder).stdout.splitlines())


@pytest.mark.parametrize("begin", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE", "BEGIN"])
@pytest.mark.slow
def test_statements_wait_and_it_is_said_once(begin: str, finished: Path) -> None:
    """A viewer that only reads holds what is written, not what is read."""
    said: list[str] = []
    storage = connect(f"sqlite:///{finished}/study.db", patience=Patience(60, said.append))
    (study,) = storage.get_all_studies()
    began_s = time.monotonic()
    with viewer(finished / "study.db", 7, begin) as pid:
        storage.set_study_user_attr(study._study_id, "mine", 1)
        assert time.monotonic() - began_s > 6
    assert storage.get_study_user_attrs(study._study_id)["mine"] == 1
    assert (
        len(said) == 1
        and f"process {pid} (python" in said[0]
        and str(finished / "study.db") in said[0]
    )


def test_what_can_be_stored_later_is_left(finished: Path) -> None:
    storage = connect(f"sqlite:///{finished}/study.db", patience=Patience(60))
    (study,) = storage.get_all_studies()
    with viewer(finished / "study.db", 60):
        began_s = time.monotonic()
        with without_waiting():
            storage.set_study_user_attr(study._study_id, "mine", 1)
        assert time.monotonic() - began_s < 30
    assert "mine" not in storage.get_study_user_attrs(study._study_id)


@pytest.mark.parametrize("command", ["recommend", "report", "export"])
def test_readers_wait_for_a_while_and_say_who_holds_it(
    command: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        locked_storage.Patience.__init__,
        "__defaults__",
        (0.5, lambda text: None, lambda: False, lambda text: None),
    )
    with viewer(finished / "study.db", 60) as pid:
        done = within(command, finished)
    assert done.returncode == 1
    assert f"process {pid}" in done.stderr and "Traceback" not in done.stderr
    assert within(command, finished).returncode == 0


@pytest.mark.slow
def test_a_study_waits_and_goes_on(finished: Path) -> None:
    with viewer(finished / "study.db", 7):
        done = within("run", finished.parent / "study.yaml", "--out", finished, "--trials", 14)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is held by process") == 1
    assert stored_trials(finished) == 14


def test_a_study_that_gives_up_is_kept_and_goes_on(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(within, "run", finished.parent / "study.yaml", "--out", finished, "--trials", 14)
    monkeypatch.setattr(run_study, "STUDY_S", 0.5)
    with viewer(finished / "study.db", 60) as pid:
        done = run()
    assert done.returncode == 1
    assert f"process {pid}" in done.stderr and "same command" in done.stderr
    assert stored_trials(finished) == 12
    assert run().returncode == 0
    assert stored_trials(finished) == 14


def test_who_waits_can_be_interrupted(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_storage, "INTERRUPTED_S", 0.3)
    storage = connect(
        f"sqlite:///{finished}/study.db", patience=Patience(60, interrupted=lambda: True)
    )
    with (
        viewer(finished / "study.db", 60),
        pytest.raises(StudyInterrupted, match="run the same command again"),
    ):
        storage.get_all_studies()


def test_a_reader_meets_no_lock_where_none_is(finished: Path) -> None:
    with sqlite3.connect(finished / "study.db") as base:
        assert base.execute("SELECT count(*) FROM trials").fetchone() == (12,)
    with viewer(finished / "study.db", 60, "BEGIN"):
        assert within("recommend", finished).returncode == 0


def test_a_locked_table_of_postgresql_is_waited_for_within_a_limit(postgresql_url: str) -> None:
    storage = connect(postgresql_url, patience=Patience(0.5))
    storage.create_new_study([StudyDirection.MINIMIZE], "mine")
    with create_engine(postgresql_url).begin() as other:
        other.execute(text("LOCK TABLE studies IN ACCESS EXCLUSIVE MODE"))
        began_s = time.monotonic()
        with pytest.raises(StorageInternalError) as refused:
            storage.get_all_studies()
        assert 0.5 <= time.monotonic() - began_s < 10
        assert isinstance(refused.value.__cause__, OperationalError)
        assert isinstance(refused.value.__cause__.orig, LockNotAvailable)
    assert [study.study_name for study in storage.get_all_studies()] == ["mine"]


def test_a_trial_goes_on_while_the_storage_is_held(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two statements in one transaction the second is not left half done."""
    storage = connect(f"sqlite:///{finished}/study.db", patience=Patience(0.2))
    (study,) = storage.get_all_studies()
    with viewer(finished / "study.db", 60), pytest.raises(StorageHeld):
        storage.set_study_user_attr(study._study_id, "mine", 2)
    storage.set_study_user_attr(study._study_id, "mine", 3)
    assert storage.get_study_user_attrs(study._study_id)["mine"] == 3


def test_ctrl_c_ends_a_study_that_waits(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_storage, "INTERRUPTED_S", 0.3)
    with viewer(finished / "study.db", 60):
        timer = threading.Timer(3, lambda: signal.raise_signal(signal.SIGTERM))
        timer.start()
        done = within("run", finished.parent / "study.yaml", "--out", finished, "--trials", 14)
        timer.join()
    assert done.returncode == 130, done.stderr
    assert stored_trials(finished) == 12
