"""The rooms' order: data flows one way, and heavy libraries stay in the rooms that need them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "carbonopt"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up: a room may import those before it.
ORDER = [
    ["errors", "units"],
    ["interruption", "trial"],
    ["config"],
    ["channel", "paths", "record", "study_file"],
    ["analysis"],
    ["confirm", "space"],
    ["launch", "train"],
    ["energy"],
    ["search"],
    ["folder", "storage_url"],
    ["checked", "inputs", "storage", "watch"],
    ["study"],
    ["estimate"],
    ["report"],
    ["trackers", "live"],
    ["doctor"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}

HEAVY = {
    "torch": {"train"},
    "transformers": {"train"},
    "deepspeed": {"train"},
    "datasets": {"train"},
    "peft": {"train"},
    "optuna": {"storage", "storage_url", "study", "search"},
    "sklearn": {"search", "analysis"},
    "codecarbon": {"energy"},
    "pynvml": {"energy"},
    "wandb": {"trackers"},
    "tensorboard": {"trackers"},
    "plotly": {"report"},
    "matplotlib": {"report"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "carbonopt" and len(parts) > 1 and parts[1] in FLOOR and parts[1] != room:
            assert FLOOR[parts[1]] < FLOOR[room], f"{room} must not import {parts[1]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    for name in imports(path):
        library = name.split(".")[0]
        if library in HEAVY:
            assert room_of(path) in HEAVY[library], f"{path} must not import {library}"


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == set(FLOOR)


def test_no_room_has_grown_past_400_lines() -> None:
    long = {str(path): count for path in FILES if (count := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_help_loads_nothing_heavy() -> None:
    script = "import sys, carbonopt.cli; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & set(HEAVY) == set()


def test_a_study_starts_its_processes_before_it_loads_what_takes_a_second() -> None:
    script = "import sys, carbonopt.study; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "optuna" in loaded
    assert set(loaded) & {"scipy", "sklearn", "pandas", "matplotlib", "torch", "codecarbon"} == set()
