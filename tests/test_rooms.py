"""The rooms' order: data flows one way, and heavy libraries stay in the rooms that need them."""

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "carbonopt"
FILES = sorted(PACKAGE.rglob("*.py"))

# What a room may import beside itself.
ALLOWED = {
    "core": set(),
    "spec": {"core"},
    "space": {"core", "spec"},
    "carbon": {"core", "spec"},
    "energy": {"core", "spec"},
    "storage": {"core", "spec"},
    "train": {"core", "spec", "space"},
    # for the users' own training scripts
    "script": {"core", "train"},
    "engines": {"core", "spec", "space", "energy", "storage"},
    "analysis": {"core", "spec", "space"},
    "search": {"core", "spec", "space", "analysis"},
    "study": {
        "core",
        "spec",
        "space",
        "carbon",
        "energy",
        "storage",
        "train",
        "engines",
        "analysis",
        "search",
    },
    # the winner's settings and files are a trial's own
    "export": {"core", "spec", "train", "analysis"},
    # carbon: other grids' intensities, for the same joules
    "report": {"core", "spec", "space", "carbon", "analysis", "export"},
    "doctor": {"core", "spec", "energy", "train", "engines", "study"},
    "cli": {
        "core",
        "spec",
        "space",
        "energy",
        "storage",
        "engines",
        "analysis",
        "study",
        "report",
        "doctor",
    },
}

HEAVY = {
    "torch": {"train"},
    "transformers": {
        "train",
        "script",
    },  # for its callback alone, where the user's script has imported it
    "deepspeed": {"train"},
    "datasets": {"train"},
    "peft": {"train"},
    "optuna": {"storage", "study", "search"},
    "PIL": {"train"},
    "sklearn": {"search", "analysis", "train"},  # train: its images of digits
    "codecarbon": {"energy", "carbon"},  # carbon: its tables of intensities
    "pynvml": {"energy"},
    "wandb": {"study"},
    "tensorboard": {"study"},
    "plotly": {"report"},
    "matplotlib": {"report"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, types: bool = True) -> set[str]:
    """Return all names that a file imports; without `types`, but for those that only a type
    checker reads.
    """
    tree, imported_names = ast.parse(path.read_text()), set()
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types and not types:
            continue
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


def test_no_file_imports_itself_through_others() -> None:
    """Imports within functions count, too; those for types alone don't."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        names = imports(path, types=False)
        graph[module] = {
            name if name in modules else name.rpartition(".")[0] for name in names
        } & modules.keys()
    graphlib.TopologicalSorter(graph).prepare()


def test_every_room_is_listed() -> None:
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} == ALLOWED.keys()


@pytest.mark.slow
def test_no_function_is_longer_than_60_lines() -> None:
    functions = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {
        f"{path.relative_to(PACKAGE)}: {node.name}" for path, node in functions if length(node) > 60
    }
    assert long == set()


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines from its first statement on, without its docstring."""
    statements = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or node.lineno) - statements[0].lineno + 1


def test_help_loads_nothing_heavy() -> None:
    script = "import sys, carbonopt.cli.app; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(loaded) & set(HEAVY) == set()


def test_a_study_starts_its_processes_before_it_loads_what_takes_a_second() -> None:
    script = "import sys, carbonopt.study.run_study; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "optuna" in loaded
    assert (
        set(loaded) & {"scipy", "sklearn", "pandas", "matplotlib", "torch", "codecarbon"} == set()
    )


def test_no_name_of_a_file_or_a_class_occurs_twice() -> None:
    files = [path for path in FILES if not path.name.startswith("__")]
    classes = [
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for names in ([path.name for path in files], classes):
        assert [name for name, count in Counter(names).items() if count > 1] == []
