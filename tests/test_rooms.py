"""The rules about imports and names that import-linter's contracts in pyproject.toml can't express."""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "carbonopt"
FILES = sorted(PACKAGE.rglob("*.py"))

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
# For each room and each heavy library, the rooms that may import it.
IMPORTERS = {
    name.removeprefix("carbonopt."): {
        room.removeprefix("carbonopt.") for room in contract["allowed_importers"]
    }
    for contract in CONTRACTS
    for name in contract.get("protected_modules", ())
}


def test_no_file_imports_itself_through_others() -> None:
    """Imports within functions count, too; those for types alone don't."""
    graph = grimp.build_graph("carbonopt", exclude_type_checking_imports=True, cache_dir=None)
    imported = {file: graph.find_modules_directly_imported_by(file) for file in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()


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
    assert set(loaded) & IMPORTERS.keys() == set()


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
        if isinstance(node, ast.ClassDef)
    ]
    for names in ([path.name for path in files], classes):
        assert [name for name, count in Counter(names).items() if count > 1] == []
