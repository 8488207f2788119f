"""The part of carbonopt that trains, to be run where carbonopt is not installed: verbatim copies of its files.

Which files those are is found in their imports, so that no list has to be kept.
"""

import ast
import sys
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

PACKAGE = "carbonopt"


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


def _imported(text: str) -> Iterator[str]:
    """What a file's import statements name; for `from a import b`, b may be a module or not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "carbonopt's imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path(module: str) -> str | None:
    """A module's file; None if it is no module, but something in one."""
    stem = module.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if _file(path).is_file()), None)


def _file(path: str) -> "resources.abc.Traversable":
    return resources.files(PACKAGE).joinpath(*path.split("/")[1:])
