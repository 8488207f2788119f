"""Interruption at any moment: the same command goes on to the configured total, and nothing is left
behind.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import within
from running_studies import ranks, read, start, wait_for, workers
from small_studies import study as small_study
from small_studies import trial

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import recommend
from carbonopt.cli.display import not_ended
from carbonopt.core.errors import BEFORE_A_TRIAL, BadInput, StudyInterrupted
from carbonopt.core.trial import StopReason, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import PlannedStart, SessionLedger
from carbonopt.storage.paths import StudyPaths
from carbonopt.study_file.input_files import check_unchanged, input_files, with_sha256
from carbonopt.study_file.reader import parse_study


def training_in(folder: Path, number: int) -> bool:
    """Whether a trial has spent energy on training and said so to the storage."""
    if (
        not StudyPaths(folder).trial(number).exists()
    ):  # before the first trial the storage may be half made
        return False
    records = {record.trial: record for record in read(folder).records}
    record = records.get(number)
    return record is not None and record.energy_kwh is not None and record.energy_kwh.train > 0


@pytest.fixture
def slow_study(tiny_study: dict) -> dict:
    """Two trials of some seconds of training each."""
    tiny_study["search"]["space"]["epochs"] = 1
    tiny_study["search"]["space"]["global_batch_size"] = {"choices": [8, 16]}
    tiny_study["search"]["pruning"] = {"target": False, "cap": False}
    tiny_study["budget"] = {"trials": 2}
    return tiny_study


@pytest.mark.slow
def test_killed_terminated_and_finished(slow_study: dict, write_study, tmp_path: Path) -> None:
    """SIGKILL of the command, then SIGTERM of all processes of its second try, as Slurm requeues a
    job, then a third that reaches the total, though the ranks of its first trial are killed.
    """
    study, folder = write_study(slow_study), tmp_path / "out"

    command = start(study, folder)
    wait_for(lambda: training_in(folder, 0))
    command.kill()
    command.wait()
    wait_for(lambda: workers(folder) == [], 15)
    (killed,) = read(folder).records
    assert (killed.state, killed.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)
    used = killed.energy_kwh.total
    assert used > 0
    StudyPaths(folder).prepare_log.unlink()

    command = start(study, folder)
    wait_for(lambda: training_in(folder, 0) and read(folder).records[0].attempt == 2)
    for pid in (*workers(folder), command.pid):  # the ranks first
        os.kill(pid, signal.SIGTERM)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert f"`carbonopt report {folder}`" in errors
    assert "starting …" in errors and "preparing" not in errors, "an earlier call has prepared"
    assert "trial   0  interrupted, will be run again" in errors
    assert workers(folder) == []
    (terminated,) = read(folder).records
    assert terminated.attempt == 2
    assert terminated.earlier_attempts_energy_kwh == pytest.approx(used)

    said = within("recommend", folder)
    assert (
        "has not ended: it was interrupted; the same `carbonopt run` goes on with it" in said.stdout
    )
    assert "Left: at most 2 of 2 trials." in said.stdout

    command = start(study, folder)
    wait_for(lambda: read(folder).records[0].attempt == 3 and ranks(folder))
    pids = ranks(folder)  # before it trains: looking for them takes long where much else runs
    wait_for(lambda: training_in(folder, 0))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _, errors = command.communicate(timeout=240)
    assert command.returncode in (0, 3), errors
    data = read(folder)
    first = data.records[0]
    assert [record.state for record in data.records] == [TrialState.FAILED, TrialState.COMPLETE]
    assert [record.attempt for record in data.records] == [3, 1]
    assert first.stop_reason is None and "signal 9" in first.failure.text
    assert first.energy_kwh.total > 0
    assert first.params == killed.params
    assert workers(folder) == []
    assert first.earlier_attempts_energy_kwh > used
    assert len(data.sessions) == 3
    assert not StudyPaths(folder).prepare_log.exists(), "prepared once, for all three"

    # Nothing is lost: phases make up their trial, and trials, gaps and preparation the study.
    for record in data.records:
        energy = record.energy_kwh
        assert energy.train + energy.setup + energy.eval == pytest.approx(energy.total, rel=1e-9)
        assert energy.train_cpu + energy.train_ram == pytest.approx(energy.train, rel=1e-9)
    assert footprint(data).closure == pytest.approx(1.0, abs=0.01)
    # A rank may have been killed in the middle of a file of its own.
    assert {part.parent for part in folder.rglob("*.part")} <= {StudyPaths(folder).trial(0)}
    report = json.loads((folder / "report" / "data" / "report.json").read_text())
    assert report


# Its first attempt lasts until it is interrupted, its second one, in a folder of its own, a second.
SPINNING = """
import sys, time
import carbonopt.script as carbon
steps = 10 if sys.argv[1].endswith("output-2") else 10_000
run = carbon.run(total_steps=steps)
for step in range(steps):
    end_s = time.monotonic() + 0.1
    while time.monotonic() < end_s:
        pass
    run.step()
run.report(accuracy=0.9, count=100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "second"), [(0.02, signal.SIGINT), (0.1, signal.SIGTERM)])
def test_repeated_signals_lose_nothing_that_was_measured(
    pause_s: float, second: signal.Signals, tiny_study: dict, write_study, tmp_path: Path
) -> None:
    """The signals come as late as can be after the trial was last stored: a record that ended there
    would lack these seconds, and so would the reading of the whole, so that the closure alone would
    not show it.

    The only configuration is run again, also where it is the study's start: it has been chosen, so
    that no other is left, but has not been run.
    """
    (tmp_path / "train.py").write_text(SPINNING)
    tiny_study["workload"] = {
        "task": "script",
        "command": f"{sys.executable} train.py {{output_dir}} {{my_width}}",
    }
    tiny_study["target"] = {"accuracy": 0.5}
    tiny_study["search"] = {"space": {"my_width": {"choices": [1]}}, "start": {"my_width": 1}}
    tiny_study["budget"] = {"trials": 2}
    study, folder, unstored_s = write_study(tiny_study), tmp_path / "out", 1.5

    command = start(study, folder)
    wait_for(lambda: training_in(folder, 0))
    stored = read(folder)
    time.sleep(unstored_s)
    os.killpg(command.pid, signal.SIGINT)
    for number in (second, signal.SIGINT):
        time.sleep(pause_s)
        os.killpg(command.pid, number)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130 and "Traceback" not in errors
    assert workers(folder) == []

    data = read(folder)
    (record,), (before,) = data.records, stored.records
    assert (record.state, record.stop_reason) == (TrialState.FAILED, StopReason.INTERRUPTED)
    assert record.duration_s.total >= before.duration_s.total + unstored_s
    assert data.sessions[0].duration_s >= stored.sessions[0].duration_s + unstored_s
    stages_kwh = sum(stage.energy_kwh for stage in record.stages.values())
    assert stages_kwh == pytest.approx(record.energy_kwh.total, rel=1e-6)
    assert footprint(data).closure == pytest.approx(1.0, abs=1e-5)

    done = go_on(study, folder, 2)
    assert done.returncode == 0, done.stderr
    data = read(folder)
    assert data.ended == "every configuration of the search space has been run"
    (again,) = data.records
    assert (again.state, again.attempt) == (TrialState.COMPLETE, 2)
    assert again.earlier_attempts_energy_kwh == pytest.approx(record.energy_kwh.total)
    assert footprint(data).closure == pytest.approx(1.0, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6])
def test_a_ctrl_c_while_the_meter_begins(
    after_s: float, tiny_study: dict, write_study, tmp_path: Path
) -> None:
    """It also ends the programs that CodeCarbon starts, without which it fails."""
    folder = tmp_path / "out"
    command = start(write_study(tiny_study), folder)
    wait_for(lambda: workers(folder))  # the template is begun just before
    time.sleep(after_s)
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors.splitlines()[-1]) == (
        130,
        f"carbonopt: {BEFORE_A_TRIAL}",
    )
    wait_for(lambda: workers(folder) == [], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_while_operators_are_compiled(
    number: int, tiny_study: dict, write_study, tmp_path: Path
) -> None:
    """Neither compilers, nor the lock that would make everyone wait for ever, nor half a prepared
    folder is left.
    """
    study, folder, extensions = write_study(tiny_study), tmp_path / "out", tmp_path / "extensions"
    lock = extensions / "deepspeed_shm_comm" / "lock"

    def compilers() -> list[int]:
        return [
            process.pid
            for process in psutil.process_iter(["cwd", "status"])
            if process.info["cwd"] == str(lock.parent)
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    command = start(study, folder, TORCH_EXTENSIONS_DIR=str(extensions))
    wait_for(lambda: lock.exists() and len(compilers()) > 1)  # ninja and what it runs
    assert list(folder.glob(".prepared.*"))
    os.kill(command.pid, number)
    _, errors = command.communicate(timeout=60)
    if number == signal.SIGINT:
        assert command.returncode == 130
        assert errors.endswith(f"carbonopt: {BEFORE_A_TRIAL}\n")
    wait_for(lambda: workers(folder) == [], 15 if number == signal.SIGKILL else 0.1)
    assert compilers() == []
    wait_for(
        lambda: not lock.exists() and not list(folder.glob(".prepared.*")),
        5 if number == signal.SIGKILL else 0.1,
    )


# ---------------------------------------------------------------------------------------------- the
# files that it reads


def go_on(study: Path, folder: Path, trials: int) -> subprocess.CompletedProcess:
    return within("run", study, "--out", folder, "--trials", trials)


@pytest.mark.slow
def test_a_study_goes_on_with_its_own_text_only(
    tiny_study: dict, write_study, tmp_path: Path
) -> None:
    text, folder = tmp_path / "train.txt", tmp_path / "out"
    text.write_text("a cat sat on a mat. " * 1000)
    tiny_study["workload"]["dataset"] = {"train_files": [str(text)]}
    tiny_study["search"]["space"]["epochs"] = 1
    study = write_study(tiny_study)
    done = go_on(study, folder, 1)
    assert done.returncode in (0, 3), done.stderr

    os.utime(text, (1, 1))
    StudyPaths(folder).prepare_log.unlink()
    done = go_on(study, folder, 2)
    assert done.returncode in (0, 3), done.stderr
    assert len(read(folder).records) == 2
    assert not StudyPaths(folder).prepare_log.exists(), "the same text: prepared already"

    text.write_text("a dog sat on a mat. " * 1000)
    refused = go_on(study, folder, 3)
    assert refused.returncode == 2
    assert (
        f"{text} has another content now" in refused.stderr
        and "Put back what was there" in refused.stderr
    )
    assert "Traceback" not in refused.stderr and refused.stderr.count("\n") == 1
    assert go_on(study, folder, 2).returncode == done.returncode, (
        "nothing is left to run, so nothing is mixed"
    )


@pytest.mark.slow
def test_a_replay_goes_on_with_its_own_table_only(
    replay_study: dict, table: Path, write_study, tmp_path: Path
) -> None:
    study, folder = write_study(replay_study), tmp_path / "out"
    assert go_on(study, folder, 2).returncode in (0, 3)
    rows = table.read_text()
    table.write_text(rows + "\n")
    refused = go_on(study, folder, 4)
    assert refused.returncode == 2
    assert f"{table} has {len(rows) + 1:,} bytes now, and had {len(rows):,}" in refused.stderr

    with sqlite3.connect(
        StudyPaths(folder).storage
    ) as database:  # a study from before files were noted
        assert (
            database.execute("DELETE FROM study_user_attributes WHERE key = 'inputs'").rowcount == 1
        )
    assert go_on(study, folder, 4).returncode in (0, 3)
    assert len(read(folder).records) == 4
    table.write_text(rows)
    assert go_on(study, folder, 5).returncode == 2, "noted from then on"


def never() -> bool:
    return False


@pytest.fixture
def of_folder(tiny_study: dict, tmp_path: Path) -> StudyConfig:
    """A study of a model in a folder that has large weights."""
    model = tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    (model / "checkpoint-1").mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as weights:
        weights.truncate(100 * 2**20)
    tiny_study["workload"]["model"] = {"name_or_path": str(model)}
    return parse_study(tiny_study, "here")


def test_what_no_trial_reads_may_change(of_folder: StudyConfig, tmp_path: Path) -> None:
    noted = with_sha256(input_files(of_folder), never)
    model = tmp_path / "model"
    for name in (".cache/x", "README.md", "checkpoint-1/model.safetensors"):
        (model / name).write_text("new")
    for name in ("config.json", "model.safetensors"):
        os.utime(model / name, (1, 1))
    assert [Path(file.path).name for file in noted] == ["config.json", "model.safetensors"]
    assert input_files(of_folder) != tuple(
        file.model_copy(update={"sha256": None}) for file in noted
    )
    check_unchanged(noted, input_files(of_folder), "out", never)


@pytest.mark.parametrize("change", ["small", "weights", "new", "gone"])
def test_another_model_in_the_folder_is_refused(
    change: str, of_folder: StudyConfig, tmp_path: Path
) -> None:
    noted = with_sha256(input_files(of_folder), never)
    config, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    match change:
        case "small":
            config.write_text("[]")
            expected = f"{config} has another content now"
        case "weights":  # of the same size, such as another training's
            weights.write_bytes(b"\1" * weights.stat().st_size)
            expected = f"{weights} has another content now"
        case "new":
            new = config.with_name("adapter_config.json")
            new.write_text("{}")
            expected = f"{new} was not there"
        case "gone":
            weights.unlink()
            expected = f"{weights} is gone"
    with pytest.raises(BadInput, match=re.escape(expected)):
        check_unchanged(noted, input_files(of_folder), "out", never)


def test_reading_large_files_can_be_interrupted(of_folder: StudyConfig) -> None:
    with pytest.raises(StudyInterrupted):
        with_sha256(input_files(of_folder), lambda: True)


# -------------------------------------------------------------------------------------------------
# what is left to do


def left(
    *numbers: int,
    running: bool = False,
    confirm: bool = False,
    planned: PlannedStart | None = None,
    **repeat: object,
) -> str:
    raw = {"confirm": {"seeds": 2, "runners_up": 0}} if confirm else {}
    repeats = [trial(len(numbers), **repeat)] if repeat else []
    data = small_study(*map(trial, numbers), *repeats, ended=None, raw=raw, planned_start=planned)
    return not_ended(data, recommend(data), running)


def test_an_answer_says_what_its_study_has_still_to_do() -> None:
    assert (
        left(0, 1)
        == "The study has not ended: it was interrupted; the same `carbonopt run` goes on with it. "
        "Left: at most 3 of 5 trials. Until then the recommendation may change."
    )
    assert left(0, running=True).startswith(
        "The study has not ended: it still runs. Left: at most 4 of 5 trials."
    )
    assert "Left: at most 4 of 5 trials, then the repeats with other seeds." in left(
        0, confirm=True
    )
    whole = left(0, 1, 2, 3, 4, confirm=True)
    assert whole.endswith(
        "Left: repeats with other seeds, the next of trial 0. Until then the recommendation is not"
        " confirmed."
    )
    stopped = {
        "repeat_of": 0,
        "state": TrialState.FAILED,
        "stop_reason": StopReason.INTERRUPTED,
        "perplexity": None,
    }
    assert left(0, 1, 2, 3, 4, confirm=True, **stopped) == whole, (
        "an interrupted repeat is run again"
    )


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ({"hours": 8}, "Left: trials, in at most 5 h 00 min of 8 hours."),
        ({"energy_kwh": 1}, "Left: trials, in at most 0.998 kWh of 1 kWh."),
        ({"trials": 3, "hours": 8}, "Left: at most 1 of 3 trials, in at most 5 h 00 min of 8"),
        ({"hours": 2, "energy_kwh": 1}, "Left: nothing, as the budget of 2 hours is used up."),
        ({"emissions_kg_co2e": 1e-5}, "Left: nothing, as the budget of 1e-05 kg CO2e is used up."),
        ({"until": "converged"}, "Left: trials until another one does not pay."),
    ],
)
def test_an_answer_says_what_is_left_of_the_budget(budget: dict, says: str) -> None:
    session = SessionLedger(started_at="2026-01-01T00:00:00Z", duration_s=3 * 3600, gap_kwh=0)
    data = small_study(trial(0), trial(1), ended=None, sessions=(session,), raw={"budget": budget})
    said = not_ended(data, recommend(data), running=False)
    assert says in said
    assert ("Until then" in said) is ("nothing" not in said)


def test_an_answer_says_when_a_waiting_study_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        planned = PlannedStart(
            at="2026-12-01T22:00:00+00:00",
            finish_by="2026-12-02T09:00+01:00",
            expected_saving=0.2,
            rule="",
        )
        assert "2026-12-02 03:30+05:30" in left(0, running=True, planned=planned)
        assert "planned" not in left(0, running=False, planned=planned), "the next call plans anew"
    finally:
        monkeypatch.undo()
        time.tzset()
