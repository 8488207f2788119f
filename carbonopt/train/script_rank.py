"""A rank that runs a user's script, forked from a process that has imported what the script imports: the module of the
fork server for scripts, whose forks call `run`. The script itself is run as it is, from its first line."""

import ast
import importlib
import importlib.util
import json
import multiprocessing.process
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from carbonopt.core.events import CRASH_EXIT, GATE_FD, SPEC_FD, WORKLOAD
from carbonopt.core.trial import TrialSpec
from carbonopt.train.tasks.script import Script, ScriptWorkload

# What Hugging Face's Trainer imports when it is made; transformers itself imports it late.
_LATE = {"transformers": ("transformers.trainer", "accelerate", "transformers.models.auto.modeling_auto")}


def import_ahead(script: Path) -> None:
    """What a script imports at its top. What lies beside it is its user's own, and left to each trial."""
    os.chdir(script.parent)
    for module, names in _imports(ast.parse(script.read_bytes())):
        root = module.partition(".")[0]
        if (script.parent / root).exists() or (script.parent / f"{root}.py").exists():
            continue
        try:
            imported = importlib.import_module(module)
            for name in names:
                if name != "*" and not hasattr(imported, name):  # a module in a package, or nothing
                    importlib.import_module(f"{module}.{name}")
            for late in _LATE.get(module, ()):
                importlib.import_module(late)
        except ImportError:  # the script may see to it itself; if not, each trial says so
            traceback.print_exc()


def _imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Modules that statements outside of functions and classes import, and what of each."""
    waiting: list[ast.AST] = [*reversed(tree.body)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += reversed(list(ast.iter_child_nodes(node)))


_TASK = Script(ScriptWorkload(**json.loads(os.environ[WORKLOAD])))
_KIND, _NAME = _TASK.script or ("", "")
if _KIND == "file":
    import_ahead(Path(_NAME))
elif (_FOUND := importlib.util.find_spec(_NAME)) is not None and _FOUND.origin is not None:
    import_ahead(Path(_FOUND.origin))


def unfit() -> str | None:
    """Why forks of this process can't train; None: they can."""
    torch = sys.modules.get("torch")
    opened = torch is not None and torch.cuda.is_initialized()
    return "importing what the script imports has opened a GPU already" if opened else None


def run() -> int:
    """Waits to be told the trial, then runs the script as its command would; returns the exit code."""
    os.read(int(os.environ[GATE_FD]), 1)  # nothing is ever written: it returns when the gate is opened
    told = int(os.environ[SPEC_FD])
    text = os.pread(told, os.fstat(told).st_size, 0)
    if not text:
        return CRASH_EXIT  # the study has ended without another trial
    program = TrialSpec.model_validate_json(text).program
    assert program is not None
    os.environ.update(program.environment)
    os.chdir(program.folder)
    # From where the processes that it spawns find it.
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    sys.path[0] = str(Path(_NAME).parent) if _KIND == "file" else program.folder
    sys.argv = [*program.argv[1 if _KIND == "file" else 2 :]]
    try:
        if _KIND == "file":
            runpy.run_path(program.argv[1], run_name="__main__")
        else:
            runpy.run_module(_NAME, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return CRASH_EXIT
    return 0
