"""The rooms' order: data flows one way, and heavy libraries stay in the rooms that need them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "carbonopt"
FILES = sorted(PACKAGE.rglob("*.py"))

# What a room may import beside itself.
ALLOWED = {
    "core": set(),
    "energy": {"core"},
    "storage": {"core"},
    "train": {"core"},
    "script": {"core", "train"},  # for the users' own training scripts
    "engines": {"core", "storage", "energy"},
    "analysis": {"core"},
    "search": {"core", "analysis"},
    "study": {"core", "storage", "energy", "train", "engines", "analysis", "search"},
    "export": {"core", "analysis", "train"},  # the winner's settings and files are a trial's own
    "report": {"core", "analysis", "export", "energy"},  # energy: other grids' intensities, for the same joules
    "doctor": {"core", "energy", "engines", "study", "train"},
    "cli": {"core", "storage", "energy", "engines", "analysis", "study", "report", "doctor"},
}

HEAVY = {
    "torch": {"train"},
    "transformers": {"train", "script"},  # for its callback alone, where the user's script has imported it
    "deepspeed": {"train"},
    "datasets": {"train"},
    "peft": {"train"},
    "optuna": {"storage", "study", "search"},
    "PIL": {"train"},
    "sklearn": {"search", "analysis", "train"},  # train: its images of digits
    "codecarbon": {"energy"},
    "pynvml": {"energy"},
    "wandb": {"study"},
    "tensorboard": {"study"},
    "plotly": {"report"},
    "matplotlib": {"report"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    imported_names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported_names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported_names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported_names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("carbonopt.")}
    assert (rooms & ALLOWED.keys()) - {room} <= ALLOWED[room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    for name in imports(path):
        library = name.split(".")[0]
        if library in HEAVY:
            assert room_of(path) in HEAVY[library], f"{path} must not import {library}"


def test_every_room_is_listed() -> None:
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == ALLOWED.keys()


def test_no_function_is_longer_than_60_lines() -> None:
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f"{path.relative_to(PACKAGE)}: {node.name}" for path, node in functions if length(node) > 60}
    assert long == set()


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_help_loads_nothing_heavy() -> None:
    script = "import sys, carbonopt.cli.app; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & set(HEAVY) == set()


def test_a_study_starts_its_processes_before_it_loads_what_takes_a_second() -> None:
    script = "import sys, carbonopt.study.loop; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "optuna" in loaded
    assert set(loaded) & {"scipy", "sklearn", "pandas", "matplotlib", "torch", "codecarbon"} == set()
