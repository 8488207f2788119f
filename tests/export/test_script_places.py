"""The winner of a script whose files lie anywhere runs from its folder alone."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_studies import script_run, script_study

from carbonopt.analysis.recommend import recommend
from carbonopt.export.script_places import ScriptPlaces
from carbonopt.export.winner import winner_files
from carbonopt.spec.study_data import InputFile
from carbonopt.study_file.input_files import input_files, with_sha256

TRAIN = (
    "import base, sys, pathlib; print(base.width, [pathlib.Path(name).read_text() for name in"
    " sys.argv[2:]])"
)
PYTHON = shlex.quote(sys.executable)


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# By what is special: the command, {here} being a folder of this machine; the script's folder;
# files; workload.files. They print width and the texts of what the command names.
MODULES = {"train.py": TRAIN, "base.py": "width=1"}


def below(folder: str, files: dict[str, str] = MODULES) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


ADDING = {
    "p/w/train.py": f"import sys; sys.path.append('../lib')\n{TRAIN}",
    "p/lib/base.py": "width=1",
}
CASES = {
    "all in its folder": ("train.py {lr} rows.csv", "w", below("w") | {"w/rows.csv": "r"}, ()),
    "a script above": (
        "../lib/train.py {lr} rows.csv",
        "w",
        below("lib") | {"w/rows.csv": "r"},
        (),
    ),
    "a script by its path": (
        "{here}/lib/train.py {lr} rows.csv",
        "w",
        below("lib") | {"w/rows.csv": "r"},
        (),
    ),
    "data by its path": (
        "train.py {lr} {here}/far/rows.csv",
        "w",
        below("w") | {"far/rows.csv": "r"},
        (),
    ),
    "a module above": ("train.py {lr} ../d/rows.csv", "p/w", ADDING | {"p/d/rows.csv": "r"}, ()),
    "far away": (
        "{here}/a/b/c/train.py {lr} {here}/rows.csv",
        "x/y/z/w",
        below("a/b/c") | {"rows.csv": "r", "x/y/z/w/.keep": ""},
        (),
    ),
    "two of one name": (
        "train.py {lr} {here}/rows.csv",
        "x/y/z/w",
        below("x/y/z/w") | {"rows.csv": "r", "x/y/z/w/rows.csv": "other"},
        ("x/y/z/w/rows.csv",),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("given", ["data", "folder", "script's folder"])
def test_it_runs_elsewhere(name: str, given: str, tmp_path: Path) -> None:
    command, folder, files, named = CASES[name]
    here, winner = tmp_path / "here", tmp_path / "winner"
    written(here, files)
    command = command.replace("{here}", str(here)).replace("{lr}", "{learning_rate}")
    workload = {
        "command": f"{PYTHON} {command}",
        "folder": str(here / folder),
        "files": [str(here / file) for file in named],
    }
    data = script_study(script_run(0, 25.0), workload=workload)
    data = data.model_copy(update={"inputs": with_sha256(input_files(data.config), lambda: False)})
    texts = winner_files(data, recommend(data))
    assert not [
        file
        for file, text in texts.items()
        if file in ("run.sh", "rerun.yaml", "inputs.json") and str(here) in text
    ]
    written(winner, texts)
    (winner / "run.sh").chmod(0o755)
    places = ScriptPlaces(here / folder, f"{PYTHON} {command}", workload["files"], data.inputs)
    copied = winner / "data" if given == "data" else tmp_path / "moved"
    for place, file in places.listed.items():
        (copied / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.path, copied / place)
    (copied / places.inside).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(here)
    option = {
        "data": [],
        "folder": ["--data", "moved"],
        "script's folder": ["--data", f"moved/{places.inside}"],
    }[given]
    done = subprocess.run(
        [winner / "run.sh", *option], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "1 ['r']\n", done.stderr


def test_what_the_code_finds_by_itself_is_said_and_not_asked_for(tmp_path: Path) -> None:
    data = script_study(script_run(0, 25.0))
    inputs = (
        InputFile(path="/srv/trainings/train.py", bytes=1, mtime_ns=0, sha256="a"),
        InputFile(path="/mnt/corpus/rows.csv", bytes=2, mtime_ns=0, sha256="b"),
        InputFile(path="/srv/trainings/log.txt", bytes=3, mtime_ns=0, changed_by_trials=True),
    )
    texts = winner_files(data.model_copy(update={"inputs": inputs}), recommend(data))
    assert [*json.loads(texts["inputs.json"])] == ["data/train.py"]
    for name in ("run.sh", "rerun.yaml"):
        assert "#   rows.csv: 2 bytes, sha256 b\n" in texts[name] and "/mnt" not in texts[name]
