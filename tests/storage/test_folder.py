"""A study's folder: what was measured stays in it, whatever goes wrong, and what else lies there is
left alone.
"""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import refusal, within

from carbonopt.report import writing
from carbonopt.spec.study_data import StudyData

SABOTEUR = """
import json, os, pathlib, sqlite3, sys
rate = sys.argv[1]
folder = pathlib.Path(__file__).parent / "out"
(folder.parent / "began.txt").open("a").write(rate + "\\n")
if len((folder.parent / "began.txt").read_text().splitlines()) == 2:
    exec((folder.parent / "act.py").read_text())
print(json.dumps({"accuracy": float(rate)}))
"""


@pytest.fixture
def sabotaged(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a study of two trials in out/, the second of which does something to that folder."""

    def run(act: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(SABOTEUR)
        (tmp_path / "act.py").write_text(act)
        study = {
            "name": "sabotaged",
            "workload": {"task": "script", "command": "python train.py {learning_rate}"},
            "target": {"accuracy": 0.4},
            "search": {"space": {"learning_rate": {"choices": [0.5, 0.6]}}, "sampler": "grid"},
            "budget": {"trials": 2},
            "carbon": {"intensity_g_co2e_per_kwh": 500},
            "launch": {"gpus": []},
        }
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
        return within("run", tmp_path / "study.yaml", "--out", tmp_path / "out")

    return run


def kept_trials(folder: Path) -> int:
    return len(within("export", folder).stdout.splitlines())


@pytest.mark.slow
def test_a_storage_that_is_removed_during_a_trial_is_said_to_be_gone(
    sabotaged: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = sabotaged("(folder / 'study.db').unlink()")
    assert done.returncode == 1
    assert f"{tmp_path / 'out'} was moved or removed" in done.stderr
    assert "readonly" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("act", "names"),
    [
        ("os.mkfifo(folder / 'report')", "report is a file"),
        (
            "os.makedirs(folder / 'report/data'); (folder / 'report/data/report.json').write_text("
            + "json.dumps(dict(study=dict(name='other', began=None))))",
            "report of another study ('other'",
        ),
    ],
)
@pytest.mark.slow
def test_a_report_that_cannot_be_written_leaves_the_study(
    act: str,
    names: str,
    sabotaged: Callable[[str], subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    done = sabotaged(act)
    assert done.returncode == 1
    assert names in done.stderr and "Traceback" not in done.stderr
    assert f"carbonopt report {tmp_path / 'out'} --out" in done.stderr
    assert "Recommended" in done.stdout, "the answer is shown at least"
    assert kept_trials(tmp_path / "out") == 2
    assert within("report", tmp_path / "out", "--out", tmp_path / "elsewhere").returncode == 0


def test_values_damaged_while_trials_run_remove_nothing(
    sabotaged: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    statement = "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'provenance'"
    act = f"base = sqlite3.connect(folder / 'study.db'); base.execute({statement!r}); base.commit()"
    done = sabotaged(act)
    assert done.returncode == 1
    assert (
        "damaged" in done.stderr
        and str(tmp_path / "out") in done.stderr
        and "Traceback" not in done.stderr
    )
    assert (tmp_path / "out" / "study.db").stat().st_size > 0
    assert list((tmp_path / "out" / "trials").glob("*/log-1.txt")), "the logs stay, too"


@pytest.mark.parametrize(
    "number",
    [
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.EROFS,
        errno.EACCES,
        errno.ENOSPC,
        errno.ENOMEM,
    ],
)
def test_each_reason_why_a_report_is_not_written_leaves_the_study(
    number: int, replay_study: dict, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotas, dying disks and servers can't be had in a test; the real limit of a file's size is
    tested below.
    """

    def fail(data: StudyData, folder: Path, **_: object) -> Path:
        raise OSError(number, os.strerror(number), str(folder / "index.html"))

    monkeypatch.setattr(writing, "write_report", fail)
    replay_study["budget"]["trials"] = 2
    done = within("run", write_study(replay_study), "--out", tmp_path / "out")
    assert done.returncode == 1
    assert os.strerror(number) in done.stderr and "carbonopt report" in done.stderr
    assert kept_trials(tmp_path / "out") == 2
    again = within("report", tmp_path / "out", "--out", tmp_path / "elsewhere")
    assert again.returncode == (2 if number in (errno.EROFS, errno.EACCES) else 1)
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_a_limit_of_a_files_size_leaves_the_study(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    replay_study["budget"]["trials"] = 3
    limit_bytes = 300_000  # the study's file has 200 kB, a report's page more
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "carbonopt",
            "run",
            write_study(replay_study),
            "--out",
            tmp_path / "out",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert kept_trials(tmp_path / "out") == 3


def test_what_is_refused_before_it_began_leaves_other_files_alone(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    study, out = write_study(replay_study), tmp_path / "deep" / "out"
    assert refusal(
        "run", study, "--out", out, "--storage", f"sqlite:///{tmp_path}/no/such/folder.db"
    )
    assert refusal("run", study, "--out", out, "--worker")
    assert not (tmp_path / "deep").exists()


KINDS = {
    "link": lambda path, victim: path.symlink_to(victim),
    "loop": lambda path, victim: path.symlink_to(path),
    "dangling link": lambda path, victim: path.symlink_to(victim.parent / "nowhere"),
    "folder": lambda path, victim: path.mkdir(),
    "pipe": lambda path, victim: os.mkfifo(path),
    "socket": lambda path, victim: bind(path),
}


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


@pytest.mark.parametrize(
    "name", [".lock", "study.db-turn", "prepare-log.txt", "storage.json", "slurm.json"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_where_a_file_of_ours_has_to_be_is_named_and_left_alone(
    name: str,
    kind: str,
    replay_study: dict,
    write_study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    (tmp_path / "out").mkdir()
    KINDS[kind](tmp_path / "out" / name, victim)
    assert f"{tmp_path / 'out' / name} has to be a file, but is" in refusal(
        "run", write_study(replay_study), "--out", tmp_path / "out"
    )
    assert victim.read_text() == "years of work"
    assert os.path.lexists(tmp_path / "out" / name)


# SQLite makes the file that a dangling link names.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dangling link"])
def test_a_storage_file_of_another_kind_is_refused(
    kind: str, replay_study: dict, write_study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    KINDS[kind](tmp_path / "shared.db", victim)
    url = f"sqlite:///{tmp_path}/shared.db"
    assert str(tmp_path) in refusal(
        "run", write_study(replay_study), "--out", tmp_path / "out", "--storage", url
    )
    assert victim.read_text() == "years of work"
    assert not (tmp_path / "out").exists()


def test_a_turn_file_beside_a_storage_elsewhere_is_not_followed(
    replay_study: dict, write_study, tmp_path: Path
) -> None:
    victim = tmp_path / "thesis.tex"
    victim.write_text("years of work")
    (tmp_path / "shared.db-turn").symlink_to(victim)
    url = f"sqlite:///{tmp_path}/shared.db"
    sentence = refusal(
        "run", write_study(replay_study), "--out", tmp_path / "out", "--storage", url
    )
    assert f"{tmp_path}/shared.db-turn has to be a file" in sentence
    assert victim.read_text() == "years of work"


def test_readers_bear_any_lock(finished: Path, tmp_path: Path) -> None:
    for kind in KINDS.values():
        lock = finished / ".lock"
        lock.unlink(missing_ok=True)
        kind(lock, tmp_path / "victim")
        assert within("recommend", finished).returncode == 0
        if lock.is_dir() and not lock.is_symlink():
            shutil.rmtree(lock)


@pytest.mark.slow
def test_a_damaged_study_that_goes_on_is_refused_and_kept(finished: Path) -> None:
    (finished / "report" / "index.html").unlink()
    (finished / "report" / "index.html").mkdir()
    done = within("run", finished.parent / "study.yaml", "--out", finished)
    assert done.returncode == 1 and "index.html" in done.stderr
    assert kept_trials(finished) == 12
