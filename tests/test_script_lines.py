"""The lines of `carbonopt.script` need nothing but Python, so that they work in a script's own
environment.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import within
from test_script import LOOP, SLOWLY, study_of

from carbonopt.core.quality import quality_of
from carbonopt.export.copies import copies
from carbonopt.spec.space_settings import Space
from carbonopt.train.scripts.script_sources import surely_has_lines
from carbonopt.train.tasks.script import Script, ScriptWorkload

OLDEST_PYTHON = (3, 10)  # of a script's own environment


def imported_at_the_top(module: str) -> dict[str, str]:
    """Return the texts of carbonopt's files that an import of this module runs, by their paths."""
    program = (
        f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items() if"
        " n.split('.')[0] == 'carbonopt'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {path: Path(path).read_text() for path in done.stdout.split()}


def test_only_the_standard_library_is_imported() -> None:
    for path, text in imported_at_the_top("carbonopt.script").items():
        statements = [
            node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in statements
        ]
        outside = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
        assert outside <= {"carbonopt"}, path


def test_an_older_python_can_read_them() -> None:
    for path, text in imported_at_the_top("carbonopt.script").items():
        ast.parse(text, filename=path, feature_version=OLDEST_PYTHON)


def test_a_winner_s_copy_has_no_library_but_those_that_the_script_uses_itself() -> None:
    assert copies("carbonopt.script").libraries <= {
        "torch",
        "transformers",
        "lightning",
        "pydantic",
    }


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of its own that has no package at all."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_python_without_any_package_runs_them(bare_python: Path, tmp_path: Path) -> None:
    script = (
        "import importlib.util, sys\nassert importlib.util.find_spec('pydantic') is None\n" + SLOWLY
    )
    study = study_of(tmp_path, script, f"{bare_python} train.py {{learning_rate}} {{my_width}}")
    assert within("check", study).returncode == 0
    done = within("run", study, "--out", tmp_path / "out", "--trials", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(
        within("export", tmp_path / "out", "--format", "jsonl").stdout.splitlines()[0]
    )
    assert [point["value"] for point in record["evals"]] == [0.25, 0.5, 0.75]


@pytest.mark.slow
def test_a_script_does_not_wait_for_the_lock_of_a_killed_build(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "py312_cu130" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    found = 'list(pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*/lock"))'
    study = study_of(tmp_path, f"import os, pathlib\nassert not {found}\n" + LOOP)
    extensions = str(tmp_path / "extensions")
    arguments = ("run", study, "--out", tmp_path / "out", "--trials", "1")
    done = within(*arguments, TORCH_EXTENSIONS_DIR=extensions)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_winner_runs_there_with_the_copy_beside_it(bare_python: Path, tmp_path: Path) -> None:
    for path, text in copies("carbonopt.script").files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "train.py").write_text(LOOP + "print(accuracy)\n")
    done = subprocess.run([bare_python, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.75\n"), done.stderr


# ------------------------------------------------------------------------------------------------------
# where the lines and the modules of a command are


@pytest.mark.parametrize(
    ("script", "command", "template", "has"),
    [
        ("import carbonopt.script", "python train.py {x}", None, True),
        ("pass", "python train.py {x}", None, False),
        (
            "pass",
            "python train.py x={x} +callbacks.c._target_=carbonopt.script.lightning_callback",
            None,
            True,
        ),
        ("pass", "python {config}", "from carbonopt import script\nx = {x}", True),
        ("pass", "python train.py {config}", "c: carbonopt.script.callback\nx: {x}", True),
        ("pass", "python {config}", "x = {x}", False),
    ],
)
def test_lines_are_found_in_script_command_and_template(
    script: str, command: str, template: str | None, has: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    workload: dict = {"command": command, "folder": str(tmp_path)}
    if template is not None:
        name = "own.yaml" if ": " in template else "own.py"
        workload["config_template"] = {"name": name, "text": template}
    task = Script(ScriptWorkload(**workload))
    assert (surely_has_lines(task), task.tells_steps) == (has, has)


def test_a_template_that_imports_deepspeed_uses_it(tmp_path: Path) -> None:
    template = {"name": "own.py", "text": "import deepspeed\nx = {x}"}
    workload = {"command": "python {config}", "folder": str(tmp_path), "config_template": template}
    assert Script(ScriptWorkload(**workload)).uses_deepspeed


@pytest.mark.parametrize(
    "command",
    [
        "PYTHONPATH=lib python train.py {x}",
        "export PYTHONPATH=lib:$PYTHONPATH; python train.py {x}",
        "env PYTHONPATH=lib python train.py {x}",
    ],
)
def test_modules_on_the_command_s_own_path_are_inputs(command: str, tmp_path: Path) -> None:
    (tmp_path / "lib" / "mine").mkdir(parents=True)
    (tmp_path / "lib" / "helper.py").write_text("import mine.inner\n")
    (tmp_path / "lib" / "mine" / "inner.py").write_text("")
    (tmp_path / "train.py").write_text("import helper\n")
    task = Script(ScriptWorkload(command=command, folder=str(tmp_path)))
    found = {Path(file).relative_to(tmp_path).as_posix() for file in task.program_files()}
    assert found == {"train.py", "lib/helper.py", "lib/mine/inner.py"}


def test_what_a_script_given_as_a_template_imports_and_names_is_an_input(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("lib/helper.py", "beside.py", "rows.csv"):
        (tmp_path / name).write_text("")
    text = "import helper\nimport beside\nrows = open('rows.csv')\nlr = {x}\n"
    command = "PYTHONPATH=lib:$PYTHONPATH python {config}"
    template = {"name": "train.py", "text": text}
    task = Script(ScriptWorkload(command=command, folder=str(tmp_path), config_template=template))
    found = {Path(file).relative_to(tmp_path).as_posix() for file in task.input_files()}
    assert found == {"lib/helper.py", "rows.csv"}  # the copy does not find what is beside


def test_packages_that_pip_put_into_a_folder_are_no_inputs(tmp_path: Path) -> None:
    site = tmp_path / "deps"
    for name in ("theirs", "theirs-1.0.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "theirs" / "__init__.py").write_text("")
    (site / "theirs-1.0.dist-info" / "RECORD").write_text("")
    (tmp_path / "train.py").write_text("import theirs\n")
    command = "PYTHONPATH=deps python train.py {x}"
    task = Script(ScriptWorkload(command=command, folder=str(tmp_path)))
    assert task.program_files() == (str(tmp_path / "train.py"),)


@pytest.mark.parametrize(
    ("path", "hides"), [("lib", True), ("lib:$PYTHONPATH", False), ("$PYTHONPATH:lib", False)]
)
def test_a_path_that_hides_carbonopt_is_noted(path: str, hides: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import carbonopt.script\n")
    command = f"PYTHONPATH={path} python train.py {{x}}"
    task = Script(ScriptWorkload(command=command, folder=str(tmp_path)))
    space = Space(x={"choices": [1, 2]})
    notes = [note for note in task.notes(space, quality_of("accuracy", "maximize")) if path in note]
    assert bool(notes) is hides
