"""The part of carbonopt that trains, for machines where carbonopt is not installed.

It is verbatim copies of files and of what they import. Their imports tell which files these are, so
that no list has to be kept.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import CANONICAL_MATCH
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.workload_settings import Workload

PACKAGE = "carbonopt"
_HEAD = (
    "# What train.py imports, in the versions that the study's trials ran on: pip install -r"
    " requirements.txt\n"
)
# Names of distributions that differ from the module's.
_DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "pydantic_core": "pydantic",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}
_PYTORCH_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+")


class Copies(NamedTuple):
    files: dict[str, str]  # texts by path; a path begins with the package's name
    # names of the top-level modules that they import and that are not Python's own
    libraries: frozenset[str]


def copies(*modules: str) -> Copies:
    """Return copies of these modules of carbonopt and of everything that they need of it.

    That is the packages that they are in, and all that these files import from carbonopt, at their
    top or inside a function.
    """
    files: dict[str, str] = {}
    libraries: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if path is None or path in files:
            continue
        files[path] = _file(path).read_bytes().decode("utf-8")
        for name in (module.rpartition(".")[0], *_imported(files[path])):
            if name.partition(".")[0] == PACKAGE:
                waiting.append(name)
            elif name:
                libraries.add(name.partition(".")[0])
    return Copies(dict(sorted(files.items())), frozenset(libraries - sys.stdlib_module_names))


@cache
def _imported(text: str) -> tuple[str, ...]:
    """Return the names in a file's import statements.

    For `from a import b`, b may be a module or not.
    """
    names: list[str] = []
    for node in _running(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "carbonopt's imports are absolute"
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without what stands under `if TYPE_CHECKING`."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        children = list(node.orelse)
    for child in children:
        yield from _running(child)


def _path(module: str) -> str | None:
    """Return a module's file; None if the name is no module, but something in one."""
    stem = module.replace(".", "/")
    return next(
        (path for path in (f"{stem}.py", f"{stem}/__init__.py") if _file(path).is_file()), None
    )


def _file(path: str) -> "resources.abc.Traversable":
    return resources.files(PACKAGE).joinpath(*path.split("/")[1:])


def requirements(
    workload: Workload,
    launch: Launch,
    params: TrialParams,
    versions: dict[str, str],
    libraries: Collection[str],
) -> str:
    """Return requirements.txt, in the versions that the trials ran on.

    Args:
        libraries: the modules that the copy of carbonopt imports, including those that only some
            trainings need.
    """
    ran_on = [
        f"{label} {versions[key]}"
        for key, label in (("python", "Python"), ("cuda", "CUDA"))
        if key in versions
    ]
    lines = [f"# They ran on {' and '.join(ran_on)}.\n"] if ran_on else []
    # The first training on a machine compiles DeepSpeed's operators for CPUs; torch.compile
    # compiles, too.
    given = any(
        value
        for key, value in workload.training_arguments.items()
        if key.startswith("torch_compile")
    )
    by_torch = bool(params.torch_compile) or given or params.has_fused_output_layer
    if not launch.gpus or params.offload != "none" or by_torch:
        lines.append("# It also compiles: a C and a C++ compiler (g++) have to be on PATH.\n")
    needed = {  # whether each library that only some trainings import is needed
        "datasets": "dataset" in workload.names_or_paths,
        "huggingface_hub": "dataset" in workload.names_or_paths,
        "sklearn": workload.dataset is not None and workload.dataset.builtin == "digits",
        "pyarrow": any(Path(file).suffix.lower() == ".parquet" for file in workload.data_files),
        "peft": bool(params.lora_rank),
        "torchao": params.trains_in_float8,
        "sqlglot": workload.quality == CANONICAL_MATCH.name,
    }
    names = {
        _DISTRIBUTIONS.get(library, library) for library in libraries if needed.get(library, True)
    }
    # accelerate is the launcher
    lines += [_line(name, versions.get(name)) for name in sorted({"accelerate", *names})]
    return _HEAD + "".join(lines)


def _line(name: str, version: str | None) -> str:
    """Return the line of a library in requirements.txt.

    A local version (after the +) names a build that package indexes don't have under that name, so
    it is in a comment.
    """
    if version is None:
        return f"{name}  # its version was not recorded\n"
    public, _, local = version.partition("+")
    if not local:
        return f"{name}=={public}\n"
    is_wheel = name == "torch" and _PYTORCH_BUILD.fullmatch(local)
    index = (
        f": pip install torch=={public} --index-url https://download.pytorch.org/whl/{local}"
        if is_wheel
        else ""
    )
    return f"{name}=={public}  # recorded: {version}{index}\n"
