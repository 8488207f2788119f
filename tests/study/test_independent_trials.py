"""A script's trial begins clean: without what an interrupted attempt or another trial has left."""

import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace as Having

import pytest
from commands import within
from small_studies import script_run, script_study, study, trial
from test_script import exported, study_of

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import quality_of
from carbonopt.core.trial import TrialState
from carbonopt.report.sections.trial_conduct_section import caveats
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import headline
from carbonopt.spec.trial_spec import Program, TrialSpec
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.inherited_files import InheritedFiles, inherited_files
from carbonopt.train.tasks.script import Script, ScriptWorkload


def began(folder: Path) -> float:
    """When a study's first trial began; what is written from now on is later, whatever the file
    system's clock.
    """
    time.sleep(0.02)
    now_s = time.time()
    time.sleep(0.02)
    return now_s


def inherited(folder: Path, since_s: float, *, trial) -> tuple[str, ...]:
    """The files that are inherited by a trial that does this."""
    found = InheritedFiles([folder], [(since_s, math.inf)])
    time.sleep(0.02)
    trial()
    return found.read()


def test_an_inherited_file_of_any_name_can_be_stored(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    file = tmp_path / os.fsdecode(b"\xff.txt")
    file.write_text("of trial 0")
    assert inherited(tmp_path, since_s, trial=file.read_text) == ("\\xff.txt",)


def test_a_file_that_a_trial_changed_and_another_reads_is_inherited(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("before the study")
    since_s = began(tmp_path)
    (tmp_path / "ckpt").mkdir()
    weights, log = tmp_path / "ckpt" / "last.bin", tmp_path / "log.txt"
    weights.write_text("of trial 0")
    log.write_text("trial 0\n")

    def resumes() -> None:
        (tmp_path / "data.csv").read_text()
        weights.read_text()
        weights.write_text("of trial 1")
        with log.open("a") as file:
            file.write("trial 1\n")

    assert inherited(tmp_path, since_s, trial=resumes) == ("ckpt/last.bin",)


@pytest.mark.parametrize("place", ["{folder}/elsewhere/last.bin", "{folder}/.saved/last.bin"])
def test_a_file_that_a_script_names_outside_its_folder_is_inherited(
    place: str, tmp_path: Path
) -> None:
    weights = Path(place.format(folder=tmp_path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        f"folder = {str(weights.parent)!r}\nread(os.path.join(folder, 'last.bin'))"
    )
    results = tmp_path / "results.json"  # written by each trial, and read by nobody
    (tmp_path / "code" / "train.py").open("a").write(f"\nwrite({str(results)!r})")
    os.utime(tmp_path / "code" / "train.py", (0, 0))
    since_s = began(tmp_path)
    results.write_text("{}")
    weights.parent.mkdir()
    weights.write_text("of trial 0")
    workload = {"folder": str(tmp_path / "code"), "command": "python train.py {learning_rate}"}
    began_at = datetime.fromtimestamp(since_s, UTC).isoformat()
    data = script_study(script_run(0, 30.0, started_at=began_at), workload=workload)
    program = Program(argv=("python", "train.py"), folder=str(tmp_path / "code"), environment={})
    spec = Having(number=1, attempt=1, program=program, output_dir="output")
    found = inherited_files(spec, data, StudyPaths(tmp_path / "none"))  # type: ignore[arg-type]
    assert found is not None
    time.sleep(0.02)
    weights.read_text()
    assert found.read() == (str(weights),)


@pytest.mark.parametrize(
    ("command", "files", "place"),
    [
        ("python t.py", {"t.py": "Path('~/.cache/own/x.pt').expanduser()"}, "home/.cache/own/x.pt"),
        ("python t.py", {"t.py": "Path.home() / 'own' / f'{name}.pt'"}, "home/own/x.pt"),
        ("python t.py", {"t.py": "os.path.join(os.environ['HOME'], 'x.pt')"}, "home/x.pt"),
        ("python t.py", {"t.py": "save(f'../saved/{name}.pt')"}, "saved/x.pt"),
        ("python t.py c.yaml", {"t.py": "", "c.yaml": "ckpt_dir: ../saved"}, "saved/x.pt"),
        ("python t.py --ckpt=$HOME/x.pt", {"t.py": ""}, "home/x.pt"),
        ("CKPT=../saved python t.py", {"t.py": ""}, "saved/x.pt"),
        ("cd ../other && python t.py", {"../other/t.py": ""}, "other/x.pt"),
        ("bash r.sh", {"r.sh": "cd ../other\npython t.py", "../other/t.py": ""}, "other/x.pt"),
        ("env PYTHONPATH=../src python -m own", {"../src/own/__main__.py": ""}, "src/own/x.pt"),
        ("python t.py", {"t.py": "", "study.db": "of the script's own Optuna"}, "code/x.pt"),
        ("python t.py", {"t.py": ""}, "code/.saved/x.pt"),
        (
            "python t.py",
            {"t.py": "", **{f"images/{number}.png": "" for number in range(10_001)}},
            "code/saved/x.pt",
        ),
    ],
)
def test_what_trials_leave_anywhere_is_inherited(
    command: str, files: dict, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # Folders that are in every pytest's temporary folder are none that a user names.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    code = tmp_path / "code"
    for name, text in files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text)
        os.utime(code / name, (0, 0))
    since_s = began(tmp_path)
    weights = tmp_path / place
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_text("of trial 0")
    workload = {"folder": str(code), "command": command + " # {learning_rate}"}
    began_at = datetime.fromtimestamp(since_s, UTC).isoformat()
    data = script_study(script_run(0, 30.0, started_at=began_at), workload=workload)
    program = Program(argv=tuple(command.split()), folder=str(code), environment={})
    spec = Having(number=1, attempt=1, program=program, output_dir="output")
    found = inherited_files(spec, data, StudyPaths(tmp_path / "none"))  # type: ignore[arg-type]
    assert found is not None
    time.sleep(0.02)
    weights.read_text()
    assert [Path(name).name for name in found.read()] == ["x.pt"]


def test_a_shared_file_of_results_is_not_inherited(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    results, weights = tmp_path / "log.jsonl", tmp_path / "last.bin"
    for file in (results, weights):
        file.write_text("of trial 0")
    found = InheritedFiles([tmp_path], [(since_s, math.inf)], quality_file=results.resolve())
    time.sleep(0.02)
    for file in (results, weights):
        file.read_text()
    assert found.read() == ("last.bin",)


def test_a_file_behind_links_is_inherited(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "script").mkdir()
    weights, other = tmp_path / "disk" / "last.bin", tmp_path / "other.bin"
    weights.write_text("of trial 0")
    other.write_text("of trial 0")
    (tmp_path / "script" / "ckpt").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "round").symlink_to(tmp_path / "script")
    (tmp_path / "script" / "other.bin").symlink_to(other)
    (tmp_path / "script" / "itself").symlink_to("itself")

    def resumes() -> None:
        (tmp_path / "script" / "ckpt" / "last.bin").read_text()
        (tmp_path / "script" / "other.bin").read_text()

    names = inherited(tmp_path / "script", since_s, trial=resumes)
    assert names == ("ckpt/last.bin", "other.bin")


def test_what_its_user_changed_between_two_trials_is_not_inherited(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    (tmp_path / "last.bin").write_text("of trial 0")
    until_s = began(tmp_path)
    (tmp_path / "study.yaml").write_text("budget: {trials: 9}")
    found = InheritedFiles([tmp_path], [(since_s, until_s)])
    time.sleep(0.02)
    for name in ("last.bin", "study.yaml"):
        (tmp_path / name).read_text()
    assert found.read() == ("last.bin",)


@pytest.mark.parametrize("command", ["CODE > log.txt", "CODE | tee log.txt | cat > other.txt"])
def test_the_output_of_the_study_itself_is_not_inherited(command: str, tmp_path: Path) -> None:
    code = f"""
import math, pathlib, sys, time
from carbonopt.study.command_outputs import command_outputs
from carbonopt.study.inherited_files import InheritedFiles, inherited_files
folder = pathlib.Path({str(tmp_path)!r})
(folder / "last.bin").write_text("of trial 0")
print("trial 0", flush=True)
time.sleep(0.3)
found = InheritedFiles([folder], [(0.0, math.inf)])
time.sleep(0.02)
for name in ("log.txt", "last.bin"):
    (folder / name).read_text()
print(found.read(), file=sys.stderr)
print(sorted(pathlib.Path(path).name for path in command_outputs().values()), file=sys.stderr)
"""
    (tmp_path / ".code.py").write_text(code)
    command = command.replace("CODE", f"{sys.executable} .code.py")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    logs = sorted({"log.txt", "other.txt"} & {*command.split()})
    assert done.stderr == f"('last.bin',)\n{logs}\n"


def test_the_output_of_an_earlier_command_is_not_inherited(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    night, weights = tmp_path / "night1.log", tmp_path / "last.bin"
    for file in (night, weights):
        file.write_text("of trial 0")
    found = InheritedFiles([tmp_path], [(since_s, math.inf)], logs={str(night.resolve())})
    time.sleep(0.02)
    for file in (night, weights):
        file.read_text()
    assert found.read() == ("last.bin",)


@pytest.mark.parametrize("is_read_again", [False, True])
def test_what_a_user_has_read_before_a_trial_is_inherited_if_the_trial_reads_it(
    is_read_again: bool, tmp_path: Path
) -> None:
    since_s = began(tmp_path)
    file = tmp_path / "last.bin"
    file.write_text("of trial 0")
    time.sleep(0.02)
    file.read_text()
    names = inherited(tmp_path, since_s, trial=file.read_text if is_read_again else lambda: None)
    assert names == (("last.bin",) if is_read_again else ())


def test_what_a_trials_folder_links_to_is_not_the_trials(tmp_path: Path) -> None:
    script, data, output = (tmp_path / name for name in ("script", "data", "output"))
    for folder in (script, data, output):
        folder.mkdir()
    (data / "train.txt").write_text("of the user")
    (output / "weights.bin").write_text("of trial 0")
    (output / "data").symlink_to(data)
    (output / "one.txt").symlink_to(data / "train.txt")
    changed_ns = (data / "train.txt").stat().st_ctime_ns
    found = InheritedFiles([script], [], outputs=[output])
    time.sleep(0.02)
    for file in (output / "data" / "train.txt", output / "one.txt", output / "weights.bin"):
        file.read_text()
    assert found.read() == (str(output / "weights.bin"),)
    assert (data / "train.txt").stat().st_ctime_ns == changed_ns


def test_what_is_written_and_not_read_is_not_inherited(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    (tmp_path / "last.bin").write_text("of trial 0")
    assert (
        inherited(tmp_path, since_s, trial=lambda: (tmp_path / "last.bin").write_text("of trial 1"))
        == ()
    )
    assert (
        inherited(tmp_path, since_s, trial=lambda: (tmp_path / "new.bin").write_text("of trial 1"))
        == ()
    )


@pytest.mark.parametrize(
    ("name", "trial", "attempt", "is_said"),
    [
        ("0000/output/best.pt", 1, 1, True),
        ("0000/output-2/run/best.pt", 1, 1, True),
        ("0000/checkpoints/best.pt", 1, 1, True),
        ("0000/output/events.out.tfevents.1", 1, 1, False),  # TensorBoard reads it
        ("0001/output/best.pt", 1, 2, True),  # of an earlier attempt
        ("0001/output-2/best.pt", 1, 2, False),
        ("0001/checkpoints/best.pt", 1, 2, False),
        ("0002/output/best.pt", 1, 1, False),  # it runs, and may read its own
    ],
)
def test_what_is_read_in_other_trials_folders_is_inherited(
    name: str, trial: int, attempt: int, is_said: bool, tmp_path: Path
) -> None:
    paths = StudyPaths(tmp_path / "code" / "runs" / "own")
    weights = paths.trials / name
    weights.parent.mkdir(parents=True)
    paths.storage.touch()
    weights.write_text("best weights")
    time.sleep(0.02)
    weights.read_text()  # by the trial that saved it, for its last evaluation
    time.sleep(0.02)
    code = tmp_path / "code"
    workload = {"folder": str(code), "command": "python train.py {learning_rate}"}
    states = TrialState.COMPLETE, TrialState.COMPLETE, TrialState.RUNNING
    runs = [
        script_run(number, 30.0, started_at="2026-01-01T00:00:00+00:00", state=state)
        for number, state in enumerate(states)
    ]
    data = script_study(*runs, workload=workload)
    program = Program(argv=("python", "train.py"), folder=str(code), environment={})
    output = "output" if attempt == 1 else f"output-{attempt}"
    spec = Having(number=trial, attempt=attempt, program=program, output_dir=output)
    untouched = inherited_files(spec, data, paths)  # type: ignore[arg-type]
    found = inherited_files(spec, data, paths)  # type: ignore[arg-type]
    assert untouched is not None and untouched.read() == ()
    assert found is not None
    time.sleep(0.02)
    weights.read_text()
    # Another worker's trial begins before this one ends.
    inherited_files(spec, data, paths)  # type: ignore[arg-type]
    assert found.read() == ((f"runs/own/trials/{name}",) if is_said else ())
    weights.unlink()  # as workload.keep_outputs asks
    assert found.read() == ()


@pytest.mark.parametrize("leaves", ["read by its own trial", "replaced", "removed"])
def test_what_cannot_be_known_counts_as_read(leaves: str, tmp_path: Path) -> None:
    since_s = began(tmp_path)
    weights = tmp_path / "last.bin"
    weights.write_text("of trial 0")
    if leaves == "read by its own trial":
        status = weights.stat()
        os.utime(weights, ns=(status.st_ctime_ns + 10**9, status.st_mtime_ns))

    def trial() -> None:
        if leaves == "replaced":
            (tmp_path / "made").write_text("of trial 1")
            (tmp_path / "made").replace(weights)
        elif leaves == "removed":
            weights.unlink()

    assert inherited(tmp_path, since_s, trial=trial) == ("last.bin",)


def test_caches_hidden_files_and_studies_are_not_looked_at(tmp_path: Path) -> None:
    since_s = began(tmp_path)
    for name in (
        "__pycache__/train.pyc",
        ".cache/x",
        "runs/own/study.db",
        "runs/own/trials/0000/output/last.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    def reads_all() -> None:
        for file in tmp_path.rglob("*"):
            if file.is_file():
                file.read_bytes()

    assert inherited(tmp_path, since_s, trial=reads_all) == ()


def test_each_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    task = Script(ScriptWorkload(command="python train.py {output_dir}", folder=str(tmp_path)))
    folders = []
    for attempt in (1, 2, 3):
        spec = TrialSpec(
            number=0,
            attempt=attempt,
            seed=0,
            params=TrialParams(),
            workload={},
            prepared_dir="",
            trial_dir="/study/0",
        )
        folders.append(task.program(spec, quality_of("accuracy", "maximize")).argv[-1])
    assert folders == ["/study/0/output", "/study/0/output-2", "/study/0/output-3"]


def test_inherited_files_are_said_before_the_recommendation() -> None:
    clean = StudyView(study(trial(0), trial(1)))
    assert not list(caveats(clean)) and "clean" not in headline(clean)
    unclean = StudyView(study(trial(0), trial(1, inherited_files=("ckpt/last.npz",))))
    (caveat,) = caveats(unclean)
    assert (caveat.key, caveat.level.name) == ("inherited_files", "CRITICAL")
    assert "ckpt/last.npz" in caveat.text and "{output_dir}" in caveat.text
    assert "did not begin clean" in headline(unclean)


RESUMES = """
import os, time
import carbonopt.script as carbon
run = carbon.run(total_steps=6)
begin = 0.5
if os.path.exists("last.txt"):
    begin = float(open("last.txt").read())
for step in range(6):
    time.sleep(0.05)
    run.step()
open("last.txt", "w").write(str(begin + 0.1))
run.report(accuracy=begin)
"""


@pytest.mark.slow
def test_a_study_of_a_script_that_resumes_from_a_fixed_folder_says_so(tmp_path: Path) -> None:
    within("run", study_of(tmp_path, RESUMES), "--out", tmp_path / "out")
    assert [record["inherited_files"] for record in exported(tmp_path / "out")] == [
        [],
        ["last.txt"],
    ]
