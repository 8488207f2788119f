"""Find files by their names, and tell the user's own from those of installed packages."""

import ast
import glob
import os
import site
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path

import carbonopt
from carbonopt.core.files import is_file, is_folder

LONGEST_NAME = 1024  # characters of a text that may be a path; longer ones are documents
_MOST_MATCHES = 10_000  # files of one pattern
# What reading the source of a program raises, however it is damaged.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_INSTALLED = ("site-packages", "dist-packages")
# folders of Python's and carbonopt's own files
_OWN_FOLDERS = (Path(os.__file__).parent, Path(carbonopt.__file__).parent)


def may_be_name(text: str) -> bool:
    """Return whether a text may be the name of a file."""
    if not 0 < len(text) <= LONGEST_NAME or "\0" in text or "\n" in text:
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a character, as "\ud800" is
        return False
    return True


def matches(pattern: str, folder: Path) -> list[str]:
    """Return the names that match a pattern, unless it would search the whole machine."""
    from_root = Path(pattern).parts[1] if pattern[:1] == "/" and len(pattern) > 1 else ""
    if not may_be_name(pattern) or glob.has_magic(from_root):
        return []
    return sorted(islice(glob.iglob(pattern, root_dir=folder), _MOST_MATCHES))  # noqa: PTH207


def has_module(folder: Path, name: str) -> bool:
    """Return whether Python finds a module or a package of that name in a folder."""
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    return any(map(is_file, files)) or bool(extensions(folder, name))


def extensions(folder: Path, name: str) -> list[Path]:
    """Return the compiled modules of that name in a folder."""
    paths = [folder / f"{name}{suffix}" for suffix in (*EXTENSION_SUFFIXES, ".pyx")]
    return [path for path in paths if is_file(path)]


def own_sites() -> tuple[Path, ...]:
    """Return the folders of packages that this Python has."""
    return tuple(map(Path, (*site.getsitepackages(), site.getusersitepackages())))


def sites_of(python: Path) -> list[Path]:
    """Return the folders of packages in the environment of a Python."""
    return sorted(python.parent.parent.glob("lib/python3*/site-packages"))


@cache
def linked_folders(sites: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the folders that `pip install -e` has put on Python's path, by .pth files."""
    files = (file for folder in sites for file in sorted(folder.glob("*.pth")))
    lines = (line.strip() for file in files for line in _text_of(file).splitlines())
    return tuple(Path(line) for line in lines if line.startswith("/") and is_folder(Path(line)))


@cache
def linked_modules(sites: tuple[Path, ...]) -> dict[str, Path]:
    """Return the folders of modules that `pip install -e` has linked by name."""
    places: dict[str, Path] = {}
    for file in (
        file for folder in sites for file in sorted(folder.glob("__editable__*_finder.py"))
    ):
        try:
            found = ast.walk(ast.parse(_text_of(file)))
        except UNREADABLE:
            continue
        for node in found:
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(node.value, ast.Dict)
                and ast.unparse(node).startswith("MAPPING")
            ):
                linked = ast.literal_eval(node.value)
                places |= {str(name): Path(path).parent for name, path in linked.items()}
    return places


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to a package, to Python, to carbonopt or to an environment."""
    return (
        any(part in path.parts for part in _INSTALLED)
        or any(map(path.is_relative_to, _OWN_FOLDERS))
        or any(map(_has_packages, path.parents))
        # a virtual environment's program, such as its Python
        or (path.parent.name == "bin" and is_file(path.parent.parent / "pyvenv.cfg"))
    )


@cache
def _has_packages(folder: Path) -> bool:
    """Return whether pip has installed packages into a folder, as `pip install --target` does."""
    try:
        return any(folder.glob("*.dist-info/RECORD"))
    except OSError:  # a folder that may not be read
        return False
