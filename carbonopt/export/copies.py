"""The part of carbonopt that trains, to be run where carbonopt is not installed: verbatim copies of its files, and what
they import. Which files those are is found in their imports, so that no list has to be kept."""

import ast
import re
import sys
from collections.abc import Collection
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from carbonopt.core.config import Launch, Workload
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import CANONICAL_MATCH

PACKAGE = "carbonopt"
_HEAD = "# What train.py imports, in the versions that the study's trials ran on: pip install -r requirements.txt\n"
# Of those whose name is not the module's.
_DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic", "PIL": "pillow", "sklearn": "scikit-learn"}
_PYTORCH_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+")


class Copies(NamedTuple):
    files: dict[str, str]  # text by path, which begins with the package's name
    libraries: frozenset[str]  # that they import: names of top-level modules that are not Python's own


def copies(*modules: str) -> Copies:
    """These modules of carbonopt, the packages that they are in, and all that these import from carbonopt, at their
    top or inside a function."""
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
    """What a file's import statements name; for `from a import b`, b may be a module or not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "carbonopt's imports are absolute"
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def _path(module: str) -> str | None:
    """A module's file; None if it is no module, but something in one."""
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if _file(path).is_file()), None)


def _file(path: str) -> "resources.abc.Traversable":
    return resources.files(PACKAGE).joinpath(*path.split("/")[1:])


def requirements(
    workload: Workload, launch: Launch, params: TrialParams, versions: dict[str, str], libraries: Collection[str]
) -> str:
    """requirements.txt, in the versions that the trials ran on. `libraries`: the modules that the copy of carbonopt
    imports, those among them that only some trainings need."""
    ran_on = [f"{label} {versions[key]}" for key, label in (("python", "Python"), ("cuda", "CUDA")) if key in versions]
    lines = [f"# They ran on {' and '.join(ran_on)}.\n"] if ran_on else []
    # DeepSpeed's operators for CPUs, by the first training on a machine, or what torch.compile makes.
    given = any(value for key, value in workload.training_arguments.items() if key.startswith("torch_compile"))
    by_torch = bool(params.torch_compile) or given or params.has_fused_output_layer
    if not launch.gpus or params.offload != "none" or by_torch:
        lines.append("# It also compiles: a C and a C++ compiler (g++) have to be on PATH.\n")
    needed = {  # of what is imported only where it is needed
        "datasets": "dataset" in workload.names_or_paths,
        "sklearn": workload.dataset is not None and workload.dataset.builtin == "digits",
        "pyarrow": any(Path(file).suffix.lower() == ".parquet" for file in workload.data_files),
        "peft": bool(params.lora_rank),
        "sqlglot": workload.quality == CANONICAL_MATCH.name,
    }
    names = {_DISTRIBUTIONS.get(library, library) for library in libraries if needed.get(library, True)}
    lines += [_line(name, versions.get(name)) for name in sorted({"accelerate", *names})]  # the launcher, too
    return _HEAD + "".join(lines)


def _line(name: str, version: str | None) -> str:
    """A local version (after the +) names a build that package indexes don't have under it: it is in a comment."""
    if version is None:
        return f"{name}  # its version was not recorded\n"
    public, _, local = version.partition("+")
    if not local:
        return f"{name}=={public}\n"
    is_wheel = name == "torch" and _PYTORCH_BUILD.fullmatch(local)
    index = f": pip install torch=={public} --index-url https://download.pytorch.org/whl/{local}" if is_wheel else ""
    return f"{name}=={public}  # recorded: {version}{index}\n"
