"""One live worker has a study: a second one is refused, a dead one replaced, and no ledger
overwrites another.
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import optuna
import psutil
import pytest
from commands import within
from lasting_trials import lasting
from storage.test_study import ran
from study.test_resume import read, training_in, wait_for, workers

from carbonopt.analysis.footprint import footprint
from carbonopt.core.errors import CarbonoptError
from carbonopt.core.trial import TrialState
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect
from carbonopt.storage.workers import _WORKERS, leased


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shared.db'}"
    return request.getfixturevalue("postgresql_url")


TAKES = """
import sys
from carbonopt.core.errors import CarbonoptError
from carbonopt.storage import workers
from carbonopt.storage.url import connect
workers.HEARTBEAT_S, workers.DEAD_AFTER_S = 0.2, float(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    with workers.leased(connect(sys.argv[1]), "the study") as lease:
        print("has it", flush=True)
        sys.stdin.readline()
        lease.renew()
        print("still has it", flush=True)
except CarbonoptError as error:
    print(error, flush=True)
"""


class Rival:
    """A process that takes a study when it is told to, and looks whether it still has it when it is
    told to.
    """

    def __init__(self, url: str, *before: str, dead_after_s: float = 60.0) -> None:
        command = [*before, sys.executable, "-c", TAKES, url, str(dead_after_s)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def tell(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self) -> str:
        return self.process.stdout.readline().strip()

    def takes(self) -> str:
        self.tell()
        return self.said()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def rival(url: str) -> Iterator[Callable[..., Rival]]:
    made: list[Rival] = []

    def make(*before: str, **more: float) -> Rival:
        made.append(Rival(url, *before, **more))
        return made[-1]

    yield make
    for contender in made:
        contender.end()


@pytest.mark.slow
def test_of_workers_that_start_in_the_same_instant_one_has_the_study(
    rival: Callable[..., Rival],
) -> None:
    """Also where they make the database's tables in that instant."""
    rivals = [rival() for _ in range(6)]
    for contender in rivals:
        contender.tell()
    said = [contender.said() for contender in rivals]
    (holder,) = (
        contender.process for contender, text in zip(rivals, said, strict=True) if text == "has it"
    )
    refusals = [text for text in said if text != "has it"]
    assert len(refusals) == 5
    assert all(
        f"process {holder.pid} on " in text and f"(kill {holder.pid})" in text for text in refusals
    )
    holder.communicate("\n", timeout=60)
    assert rival().takes() == "has it", "it was given back"


@pytest.mark.slow
def test_a_worker_of_this_machine_is_dead_when_its_process_is(rival: Callable[..., Rival]) -> None:
    first = rival()
    assert first.takes() == "has it"
    os.kill(first.process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    refusal = rival(dead_after_s=1.0).takes()
    assert f"let it go on (kill -CONT {first.process.pid})" in refusal, (
        "it is only stopped, however long"
    )
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.takes() == "still has it"
    second = rival()
    assert second.takes() == "has it"
    second.process.kill()
    third = rival()
    wait_for(lambda: psutil.Process(second.process.pid).status() == psutil.STATUS_ZOMBIE)
    assert third.takes() == "has it"


CONTAINED = [
    "unshare",
    "--pid",
    "--mount-proc",
    "--fork",
    "--kill-child",
]  # sees nobody's processes
can_contain = pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0,
    reason="needs root for processes that see no others",
)


@pytest.mark.slow
@can_contain
def test_a_worker_elsewhere_is_dead_when_it_is_not_heard(rival: Callable[..., Rival]) -> None:
    """By the clock of the database."""
    first = rival(*CONTAINED)
    assert first.takes() == "has it"
    time.sleep(1.5)
    assert "if it is dead already, this command works 60 s after it was heard" in rival().takes()
    second = rival(dead_after_s=1.0)
    assert second.takes() == "has it"
    assert first.takes().startswith(
        "the study 'the study' was taken over by another worker, because this one was not"
    )
    assert second.takes() == "still has it"


def test_what_a_worker_was_storing_when_it_lost_the_study_is_not_stored(url: str) -> None:
    """Just heard, so that it has no reason to ask: it was stopped between asking and storing."""
    storage, another = connect(url), connect(url)
    study = optuna.create_study(storage=storage, study_name="the study")
    trial = study.ask()
    with leased(storage, "the study") as lease:
        trial.set_user_attr("record", 1)
        with another.engine.begin() as connection:
            connection.execute(_WORKERS.delete())
        lease.renew()
        with pytest.raises(
            CarbonoptError, match="the study 'the study' was taken over by another worker"
        ):
            trial.set_user_attr("record", 2)
        with pytest.raises(CarbonoptError, match="taken over"):
            study.tell(trial, 3.0)
    (stored,) = optuna.load_study(storage=another, study_name="the study").trials
    assert (stored.user_attrs, stored.state) == ({"record": 1}, optuna.trial.TrialState.RUNNING)
    trial.set_user_attr("record", 4)  # who has no study is not asked


# ------------------------------------------------------------------------------------------------------
# whole studies

# The command with another limit for workers elsewhere.
COMMAND = """
import sys
from carbonopt.cli import app
from carbonopt.storage import workers
workers.HEARTBEAT_S, workers.DEAD_AFTER_S = 0.5, float(sys.argv.pop(1))
app.main()
"""


def command(study: Path, folder: Path, url: str, dead_after_s: float = 60.0) -> list[str]:
    arguments = ["run", str(study), "--out", str(folder), "--storage", url]
    return [sys.executable, "-c", COMMAND, str(dead_after_s), *arguments]


@contextmanager
def begun(command: list[str]) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def done(
    study: Path, folder: Path, url: str, *options: str, dead_after_s: float = 60.0
) -> subprocess.CompletedProcess:
    """The same command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carbonopt.storage.workers.HEARTBEAT_S", 0.5)
        patch.setattr("carbonopt.storage.workers.DEAD_AFTER_S", dead_after_s)
        return within("run", study, "--out", folder, "--storage", url, *options)


@pytest.fixture
def slow_study(tiny_study: dict) -> dict:
    tiny_study["search"]["space"]["epochs"] = 1
    tiny_study["search"]["space"]["global_batch_size"] = {"choices": [8, 16]}
    tiny_study["search"]["pruning"] = {"target": False, "cap": False}
    tiny_study["budget"] = {"trials": 2}
    return tiny_study


def closes(folder: Path) -> bool:
    """Whether what is stored is of one moment: a trial's part and the rest of its session are
    stored in turn.
    """
    closure = footprint(read(folder)).closure
    return closure is not None and abs(closure - 1) < 0.005


def trains(folder: Path) -> bool:
    return (
        folder.exists() and StudyPaths(folder).storage_pointer.exists() and training_in(folder, 0)
    )


def check_whole(folder: Path) -> None:
    """The configured trials, none twice, one of them begun by the first worker and ended by the
    second; two sessions; every joule counted.
    """
    data = read(folder)
    assert [record.state for record in data.records] == [TrialState.COMPLETE] * 2
    assert len({tuple(record.params.as_record().items()) for record in data.records}) == 2
    first, second = (session.worker for session in data.sessions)
    assert first != second
    assert {record.attempt: record.worker for record in data.records} in (
        {1: first, 2: second},
        {1: second, 2: second},
    )
    assert all(session.outer_kwh > 0 for session in data.sessions)
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_a_second_worker_is_refused_and_a_dead_ones_trials_are_taken_over(
    slow_study: dict, write_study, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    study, first, second = write_study(slow_study), tmp_path / "first", tmp_path / "second"
    with begun(command(study, first, url)) as worker:
        wait_for(lambda: trains(first))
        wait_for(lambda: closes(first))
        refused = done(study, second, url)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert (
            f"process {worker.pid} on {os.uname().nodename} works on the study 'tiny'"
            in refused.stderr
        )
        assert f"end it (kill {worker.pid})" in refused.stderr
        assert not second.exists()
        worker.kill()
        worker.communicate()
    taken_over = done(study, second, url)
    assert taken_over.returncode in (0, 3), taken_over.stderr
    check_whole(second)
    record = read(second).records[0]
    (node,) = record.nodes
    assert (node.name, node.devices) == (os.uname().nodename, ("cpu",))
    assert node.readings == record.energy_kwh


@pytest.mark.slow
@can_contain
def test_a_worker_that_was_not_heard_stores_nothing_more(
    tiny_study: dict, write_study, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    study = write_study(
        {**lasting(tiny_study, tmp_path, brief="/second/"), "budget": {"trials": 2}}
    )
    first, second = tmp_path / "first", tmp_path / "second"
    with begun([*CONTAINED, *command(study, first, url)]) as container:
        wait_for(lambda: trains(first))
        wait_for(lambda: closes(first))
        (inner,) = (child.pid for child in psutil.Process(container.pid).children())
        os.kill(inner, signal.SIGSTOP)
        time.sleep(3)
        taken_over = done(study, second, url, dead_after_s=2)
        assert taken_over.returncode in (0, 3), taken_over.stderr
        before = read(second)
        os.kill(inner, signal.SIGCONT)
        _, errors = container.communicate(timeout=60)
        assert container.returncode == 1
        assert (
            "was taken over by another worker, because this one was not heard for"
            in errors.splitlines()[-1]
        )
        assert read(second) == before, "it stored nothing more"
        wait_for(lambda: workers(first) == [], 15)
    check_whole(second)


@pytest.mark.slow
def test_sessions_of_studies_from_before_workers_are_kept(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    study, folder = write_study(replay_study), tmp_path / "out"
    ran(study, folder, trials=2)
    with closing(sqlite3.connect(StudyPaths(folder).storage)) as database, database:
        ((key, ledger),) = database.execute(
            "SELECT key, value_json FROM study_user_attributes WHERE key LIKE 'session %'"
        )
        old = {name: value for name, value in json.loads(ledger).items() if name != "worker"}
        database.execute(
            "UPDATE study_user_attributes SET key = 'session 0', value_json = ? WHERE key = ?",
            (json.dumps(old), key),
        )
    ran(study, folder, trials=4)
    storage = connect(f"sqlite:///{StudyPaths(folder).storage}")
    first, second = StudyStorage.load(storage, "replayed").read().sessions
    assert first.worker is None and first.started_at == old["started_at"]
    assert second.worker is not None and second.started_at >= first.started_at


# ------------------------------------------------------------------------------------------------------
# several at once


def joining(study: Path, folder: Path, url: str) -> list[str]:
    return [*command(study, folder, url), "--worker"]


def check_shared(folder: Path, url: str, trials: int, kills: int = 0) -> StudyData:
    """Assert that the configured trials ran, none of them twice, and that all that was spent is
    there.

    A worker stores what a trial has used, and then its own reading of the whole. Killed in between,
    it leaves a report of a trial, a third of it here, that its reading doesn't hold.
    """
    data = StudyStorage.of_folder(connect(url), StudyPaths(folder)).read()
    own = [record for record in data.records if record.repeat_of is None]
    assert [record.state for record in own] == [TrialState.COMPLETE] * trials
    assert len({tuple(record.params.as_record().items()) for record in own}) == trials
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01 + kills / (3 * trials))
    assert {record.worker for record in data.records} <= {
        session.worker for session in data.sessions
    }
    return data


@pytest.mark.slow
def test_workers_share_a_study_whenever_one_dies(
    url: str, wide_replay: dict, write_study, tmp_path: Path
) -> None:
    """Also in their turn."""
    study, folder, chance = write_study(wide_replay), tmp_path / "shared", random.Random(0)

    @contextmanager
    def shared() -> Iterator[list[subprocess.Popen]]:
        with begun(command(study, folder, url)) as lead:
            wait_for(
                lambda: StudyPaths(folder).storage_pointer.exists() or lead.poll() is not None, 60
            )
            yield [
                lead,
                *(
                    subprocess.Popen(joining(study, folder, url), stdout=subprocess.DEVNULL)
                    for _ in range(2)
                ),
            ]

    for _ in range(2):
        with shared() as processes:
            time.sleep(chance.uniform(3, 6))
            for process in chance.sample(processes, 3):
                process.kill()
                process.wait()
    with shared() as processes:
        assert [process.wait(240) for process in processes] == [0] * 3
    data = check_shared(folder, url, 25, kills=6)
    # The leading command's report has what the others used while they ended.
    reported = json.loads((folder / "report" / "data" / "report.json").read_text())["spent"][
        "outer_kwh"
    ]
    assert reported == pytest.approx(sum(session.outer_kwh for session in data.sessions), rel=1e-9)


def test_a_worker_joins_nothing_that_has_not_begun(
    wide_replay: dict, write_study, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'none.db'}"
    refused = done(write_study(wide_replay), tmp_path / "shared", url, "--worker")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "shared").exists() and not (tmp_path / "none.db").exists()
