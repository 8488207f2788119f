"""Which files a study of a script notes, and when it refuses to go on."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from small_studies import trial

from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Durations, TrialRecord, TrialState
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import InputFile
from carbonopt.study_file.input_files import (
    check_unchanged,
    input_files,
    with_sha256,
    workload_fingerprint,
)
from carbonopt.study_file.reader import parse_study


def never() -> bool:
    return False


def study_of(
    folder: Path, command: str = "python train.py {learning_rate}", *files: str
) -> StudyConfig:
    """A study of a script train.py that imports base.py and reads rows.csv."""
    (folder / "train.py").write_text("import base\nrows = open('rows.csv').read()\n")
    (folder / "base.py").write_text("width = 1\n")
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    raw = {
        "name": "inputs",
        "workload": {
            "task": "script",
            "command": command,
            "folder": str(folder),
            "files": [str(folder / name) for name in files],
        },
        "target": {"accuracy": 0.5},
        "search": {"space": {"learning_rate": {"choices": [0.1, 0.2]}}},
        "budget": {"trials": 2},
        "carbon": {"intensity_g_co2e_per_kwh": 500},
        "launch": {"kind": "local", "gpus": []},
    }
    return parse_study(raw, "here")


def names(files: tuple[InputFile, ...], folder: Path) -> list[str]:
    return sorted(str(Path(file.path).relative_to(folder)) for file in files)


def ran(began_s: float, took_s: float, state: TrialState = TrialState.COMPLETE) -> TrialRecord:
    started = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="milliseconds")
    return trial(
        0,
        state=state,
        started_at=started,
        duration_s=Durations(train=took_s, setup=0, eval=0, total=took_s),
    )


def test_what_python_studies_trackers_and_caches_write_is_no_input(tmp_path: Path) -> None:
    written = (
        "__pycache__/base.cpython-311.pyc",
        "old.pyc",
        ".pytest_cache/x",
        ".hidden",
        "runs/inputs/study.db",
        "runs/inputs/trials/0000/log-1.txt",
        "runs/elsewhere/storage.json",
        "wandb/run-1/files/config.yaml",
        "mlruns/0/meta.yaml",
        "logs/events.out.tfevents.1",
        "venv/pyvenv.cfg",
        "venv/lib/python3.11/site.py",
        "mine.egg-info/PKG-INFO",
    )
    for name in written:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "runs/notes.txt").write_text("the user's own")
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    assert names(input_files(config), tmp_path) == [
        "base.py",
        "rows.csv",
        "runs/notes.txt",
        "train.py",
    ]


def test_an_environments_python_is_no_input(tmp_path: Path) -> None:
    for venv in ("venv", "far/venv"):
        (tmp_path / venv / "bin").mkdir(parents=True)
        (tmp_path / venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
        for program in ("python", "tool"):
            (tmp_path / venv / "bin" / program).write_bytes(b"\x7fELF")
    config = study_of(tmp_path, f"{tmp_path}/venv/bin/python train.py {{learning_rate}}")
    (tmp_path / "train.py").write_text("print('far/venv/bin/tool')\n")
    assert names(input_files(config), tmp_path) == ["train.py"]


def test_an_input_whose_name_no_record_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / os.fsdecode(b"\xff.csv")).write_text("1")
    with pytest.raises(BadInput):
        input_files(study_of(tmp_path, "python train.py {learning_rate}", "data"))


def test_a_folder_is_read_through_links_once(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/rows.csv").write_text("1")
    (tmp_path / "far/itself").symlink_to("../far")
    (tmp_path / "near").mkdir()
    (tmp_path / "near/data").symlink_to("../far")
    found = names(
        input_files(study_of(tmp_path, "python train.py {learning_rate}", "near")), tmp_path
    )
    assert "near/data/rows.csv" in found and not any("itself" in name for name in found)


@pytest.mark.parametrize("name", ["train.py", "base.py", "rows.csv"])
@pytest.mark.parametrize("keeps_time", [False, True])
def test_an_edit_between_two_calls_is_refused(name: str, keeps_time: bool, tmp_path: Path) -> None:
    config, edited = study_of(tmp_path), tmp_path / name
    noted, began_s = with_sha256(input_files(config), never), time.time() - 100
    status = edited.stat()
    edited.write_bytes(bytes(reversed(edited.read_bytes())))
    if keeps_time:  # as cp -p and rsync -a do
        os.utime(edited, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(BadInput, match=f"{name} has another content"):
        check_unchanged(noted, input_files(config), "out", never, [ran(began_s, 10.0)])


def test_the_same_content_goes_on_whatever_its_time(tmp_path: Path) -> None:
    config = study_of(tmp_path)
    noted = with_sha256(input_files(config), never)
    (tmp_path / "base.py").write_bytes((tmp_path / "base.py").read_bytes())
    os.utime(tmp_path / "rows.csv", (1, 1))
    assert check_unchanged(noted, input_files(config), "out", never) == noted


@pytest.mark.parametrize("state", [TrialState.COMPLETE, TrialState.RUNNING])
def test_what_trials_write_is_theirs_and_not_compared_again(
    state: TrialState, tmp_path: Path
) -> None:
    (tmp_path / "log.txt").write_text("old\n")
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    noted, trials = with_sha256(input_files(config), never), [ran(time.time() - 10, 10.0, state)]
    (tmp_path / "log.txt").write_text("old\nnew\n")
    (tmp_path / "last.npz").write_text("weights")
    noted = check_unchanged(noted, input_files(config), "out", never, trials)
    assert {Path(file.path).name for file in noted if file.changed_by_trials} == {
        "log.txt",
        "last.npz",
    }
    (tmp_path / "log.txt").unlink()
    (tmp_path / "last.npz").write_text("other weights")
    assert check_unchanged(noted, input_files(config), "out", never) == noted


def test_what_trials_remove_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "old.ckpt").write_text("of an earlier training")
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    noted, began_s = with_sha256(input_files(config), never), time.time()
    (tmp_path / "old.ckpt").unlink()
    noted = check_unchanged(noted, input_files(config), "out", never, [ran(began_s, 10.0)])
    assert [Path(file.path).name for file in noted if file.changed_by_trials] == ["old.ckpt"]
    (tmp_path / "rows.csv").unlink()
    with pytest.raises(BadInput, match=r"rows\.csv is gone"):
        check_unchanged(noted, input_files(config), "out", never, [ran(began_s - 100, 10.0)])


def test_a_folder_with_another_database_of_that_name_is_an_input(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("study.db", "rows.csv"):
        (tmp_path / "data" / name).write_text("")
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    assert "data/rows.csv" in names(input_files(config), tmp_path)


@pytest.mark.parametrize("name", ["base.py", "new.py"])
def test_code_is_never_what_trials_write(name: str, tmp_path: Path) -> None:
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    noted, trials = with_sha256(input_files(config), never), [ran(time.time() - 10, 10.0)]
    (tmp_path / name).write_text("width = 2\n")
    with pytest.raises(BadInput, match=name):
        check_unchanged(noted, input_files(config), "out", never, trials)


def test_a_file_that_is_new_between_two_calls_is_refused(tmp_path: Path) -> None:
    config = study_of(tmp_path, "python train.py {learning_rate}", ".")
    noted, trials = with_sha256(input_files(config), never), [ran(time.time() - 100, 10.0)]
    (tmp_path / "more.csv").write_text("3,4\n")
    with pytest.raises(BadInput, match=r"more\.csv was not there"):
        check_unchanged(noted, input_files(config), "out", never, trials)


def test_data_replaced_with_its_time_kept_is_prepared_again(tmp_path: Path) -> None:
    config, rows = study_of(tmp_path), tmp_path / "rows.csv"
    before, status = workload_fingerprint(config, input_files(config), auto=False), rows.stat()
    rows.write_bytes(bytes(reversed(rows.read_bytes())))
    os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert workload_fingerprint(config, input_files(config), auto=False) != before
