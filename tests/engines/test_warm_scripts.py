"""A warm trial is the program that its command names, in the same environment: nothing tells that
it was forked.
"""

import json
import shutil
import sys
import venv
from pathlib import Path

import pytest
from test_script import study_of

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.events import Exited, Failed
from carbonopt.engines.process.launcher import ProcessLauncher
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.paths import StudyPaths
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import check
from carbonopt.train.tasks.task import task_for

PARAMS = TrialParams(learning_rate=0.5, my_width=3, zero_stage=None, offload=None)
TELLS = """
import atexit, json, multiprocessing, os, subprocess, sys, threading, time
import mylib

def inside(queue):
    queue.put([sys.executable, sys.path, sys.argv, sys.flags.safe_path, os.getcwd(), __name__])

class Here:
    pass

def late():
    time.sleep(0.3)
    print("LATE", flush=True)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    spawned = multiprocessing.get_context("spawn")
    queue = spawned.Queue()
    child = spawned.Process(target=inside, args=(queue,))
    child.start()
    told = {
        "executable": sys.executable, "prefix": sys.prefix, "path": sys.path, "argv": sys.argv, "cwd": os.getcwd(),
        "flags": list(sys.flags), "hash": sys.hash_info.algorithm, "encoding": [sys.stdout.encoding, sys.stderr.errors],
        "environment": {name: value for name, value in os.environ.items() if name != "CARBONOPT_CHANNEL"},
        "main": sorted(vars(main)), "file": __file__, "spec": getattr(main.__spec__, "origin", None),
        "package": main.__package__,
        "loader": type(main.__loader__).__name__, "here": Here.__module__, "mylib": mylib.__file__,
        "spawned": queue.get(timeout=60), "method": multiprocessing.get_start_method(),
        "ran": subprocess.check_output([sys.executable, "-c", "import mylib; print(mylib.__file__)"], text=True),
        "stdin": sys.stdin.read(), "threads": threading.active_count(),
    }
    child.join()
    print("TOLD", json.dumps(told), flush=True)
    atexit.register(print, "AT EXIT", flush=True)
    threading.Thread(target=late).start()
"""


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, warm: bool, command: str, script: str = TELLS
) -> tuple[str, int]:
    """Run one trial of a study in another folder; return its log and exit code."""
    inner = folder / "scripts"
    inner.mkdir(exist_ok=True)
    (inner / "train.py").write_text(script)
    (inner / "lib").mkdir(exist_ok=True)
    (inner / "lib" / "mylib.py").write_text("x = 1\n")
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setenv("FOO", "1")
    study = study_of(folder, command=command, workload={"warm": warm, "folder": "scripts"})
    config = load_study(study)
    task = task_for(config.workload.model_dump(mode="json"))
    paths = StudyPaths(folder / f"out-{warm}")
    paths.root.mkdir()
    spec = TrialSpec(
        number=0, attempt=1, seed=7, params=PARAMS, workload=config.workload.model_dump(mode="json"),
        prepared_dir="", trial_dir=str(folder / f"trial-{warm}"),
    )  # fmt: skip
    spec = spec.model_copy(update={"program": task.program(spec, config.quality)})
    notes: list[str] = []
    launcher = ProcessLauncher(config.launch, (), notes.append)
    try:
        launcher.begin(config, paths, "", 1, prepares=True)
        launcher.prepare(lambda: False)
        trial = launcher.start(spec, folder / f"log-{warm}.txt")
        while not isinstance(event := trial.receive(30.0), Exited):
            assert event is not None and not isinstance(event, Failed), event
        trial.end()
    finally:
        launcher.close()
    assert not notes
    return (folder / f"log-{warm}.txt").read_text(), event.code


def told(log: str) -> dict:
    return json.loads(
        next(line for line in log.splitlines() if line.startswith("TOLD ")).removeprefix("TOLD ")
    )


@pytest.mark.parametrize(
    "command", ["python train.py", "python -m train", "python3 ../scripts/train.py"]
)
def test_a_warm_script_is_the_cold_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command += " {learning_rate} {my_width}"
    cold, cold_code = run(tmp_path, monkeypatch, warm=False, command=command)
    warm, warm_code = run(tmp_path, monkeypatch, warm=True, command=command)
    assert cold_code == warm_code == 0, warm
    seen, expected = told(warm), told(cold)
    for entries in (seen["environment"], expected["environment"]):
        entries["PYTHONPATH"] = entries["PYTHONPATH"].partition(":")[
            0
        ]  # then carbonopt's own, in a folder of each
    for each in (seen, expected):
        each["path"] = [entry for entry in each["path"] if "/carbonopt-" not in entry]
        each["spawned"][1] = [entry for entry in each["spawned"][1] if "/carbonopt-" not in entry]
    assert seen == expected
    assert seen["mylib"].endswith("scripts/lib/mylib.py") and seen["ran"].strip().endswith(
        "mylib.py"
    )
    assert warm.splitlines()[-2:] == cold.splitlines()[-2:] == ["LATE", "AT EXIT"]


def test_a_warm_script_fails_as_the_cold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import mylib\ndef train():\n    raise KeyError('labels')\ntrain()\n"
    command = "python train.py {learning_rate} {my_width}"
    ends = [
        run(tmp_path, monkeypatch, warm=warm, script=script, command=command)
        for warm in (False, True)
    ]
    assert ends[0] == ends[1] and ends[0][1] == 1


def test_forks_draw_other_numbers_without_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import numpy as np, random\nprint(np.random.rand(), random.random())\n"
    command = "python train.py {learning_rate} {my_width}"
    logs = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        logs.append(
            run(tmp_path / place, monkeypatch, warm=True, script=script, command=command)[0]
        )
    assert logs[0] != logs[1]


def test_another_python_is_refused_for_a_warm_start(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    command = "{}/bin/python train.py {{learning_rate}} {{my_width}}"
    study = study_of(tmp_path, command=command.format(tmp_path / "other"), workload={"warm": True})
    with pytest.raises(BadInput, match=r"warm.*other/bin/python"):
        check(load_study(study))
    assert check(load_study(study_of(tmp_path, command=command.format(tmp_path / "other"))))
    own = shutil.which("python", path=str(Path(sys.executable).parent))
    study = study_of(
        tmp_path, command=f"{own} train.py {{learning_rate}} {{my_width}}", workload={"warm": True}
    )
    assert check(load_study(study))


def test_a_module_that_stands_for_a_library_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "yaml.py").write_text("print('own yaml')\n")
    command = "python train.py {learning_rate} {my_width}"
    with pytest.raises(
        AssertionError, match=r"yaml\.py"
    ):  # the launcher notes that it starts each trial anew
        run(tmp_path, monkeypatch, warm=True, script="import yaml\n", command=command)
    assert "own yaml" in (tmp_path / "log-True.txt").read_text()
