"""A rank that runs a user's script, forked from a process with the script's imports.

This is the fork server's module for scripts; forks call `run`. The script itself is run unchanged,
from its first line.
"""

import ast
import atexit
import builtins
import contextlib
import importlib
import importlib.util
import json
import multiprocessing.process
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

from carbonopt.core.channel import CRASH_EXIT, GATE_FD, SPEC_FD, WORKLOAD
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.train.tasks.script import Script, ScriptWorkload

# modules that Hugging Face's Trainer imports when it is made, since transformers imports them late
_LATE = {
    "transformers": ("transformers.trainer", "accelerate", "transformers.models.auto.modeling_auto")
}


def import_ahead(script: Path) -> None:
    """Import what a script imports at its top.

    Modules beside the script are the user's own and left to each trial.
    """
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
        except ImportError:  # the script may handle it itself; if not, each trial reports it
            traceback.print_exc()


def _imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield modules imported outside of functions and classes, and the names imported from each."""
    waiting: list[ast.AST] = [*reversed(tree.body)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += reversed(list(ast.iter_child_nodes(node)))


_TASK = Script(ScriptWorkload(**json.loads(os.environ.pop(WORKLOAD))))
_KIND, _NAME = _TASK.script or ("", "")
_FOLDER = Path(_NAME).parent if _KIND == "file" else Path(_TASK.workload.folder)
if _KIND == "file":
    import_ahead(Path(_NAME))
elif (_FOUND := importlib.util.find_spec(_NAME)) is not None and _FOUND.origin is not None:
    import_ahead(Path(_FOUND.origin))


def unfit() -> str | None:
    """Return why forks of this process can't train as the command would, or None if they can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing what the script imports has opened a GPU already"
    for path in _FOLDER.iterdir():
        imported = sys.modules.get(path.stem if path.suffix == ".py" else path.name)
        if imported is not None and (path.suffix == ".py" or (path / "__init__.py").exists()):
            return (
                f"{path.name} beside the script has the name of a library that is imported already"
            )
    return None


def run() -> int:
    """Wait for the trial, then run the script as its command would, and return the exit code."""
    # nothing is ever written: it returns when the gate is opened
    os.read(int(os.environ.pop(GATE_FD)), 1)
    spec_file = int(os.environ.pop(SPEC_FD))
    text = os.pread(spec_file, os.fstat(spec_file).st_size, 0)
    if not text:
        return CRASH_EXIT  # the study has ended without another trial
    program = TrialSpec.model_validate_json(text).program
    assert program is not None
    os.environ.update(program.environment)
    os.chdir(program.folder)
    # Spawned processes find the script from here.
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # otherwise all forks draw the same numbers where the script sets no seed
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        code = _code_of(_run_file if _KIND == "file" else _run_module, list(program.argv))
    finally:
        # Python does this before a process ends, but not in a fork.
        threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # each error is printed
            atexit._run_exitfuncs()
    return code


def _code_of(script: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run a script and return the exit code that Python would have."""
    try:
        script(argv)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return CRASH_EXIT
    except BaseException as error:  # noqa: BLE001, the process ends as Python does
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next  # skip the frames of the code that stands in for Python
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return CRASH_EXIT
    return 0


def _run_file(argv: list[str]) -> None:
    """Run a script as `python FILE` does."""
    sys.argv = argv[1:]
    # `resolve` would replace links and .. in the path that the script sees
    path = os.path.join(os.getcwd(), argv[1])  # noqa: PTH109, PTH118
    _find_first(str(Path(path).resolve().parent))
    main = sys.modules["__main__"].__dict__
    loader = SourceFileLoader("__main__", path)
    main |= {"__file__": path, "__cached__": None, "__loader__": loader}
    # it is the user's script
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main)  # noqa: S102


def _run_module(argv: list[str]) -> None:
    """Run a module as `python -m MODULE` does."""
    sys.argv = ["-m", *argv[3:]]
    _find_first(str(Path.cwd()))
    runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]


def _find_first(folder: str) -> None:
    """Let modules be found in this folder first, as Python does unless told not to."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
