"""Find the files that a script's command names, and what its Python files import."""

import ast
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.core.errors import BadInput
from carbonopt.core.files import is_folder
from carbonopt.train.scripts.command import Simple
from carbonopt.train.scripts.command_files import CommandFiles, code_of, is_shell_script
from carbonopt.train.scripts.own_files import UNREADABLE

_LINES = re.compile(r"carbonopt\.script|from carbonopt import")
_WRITE = ("tee", "mkdir", "touch", "rm")  # programs whose words name the files that they write

if TYPE_CHECKING:
    from carbonopt.train.tasks.script import Script


def command_files(task: "Script") -> CommandFiles:
    """Find the files that the command runs and names, without those that it writes.

    Names are relative to the folder in which its main program runs.
    """
    folder = Path(task.workload.folder).absolute()
    try:
        inside = working_folder(task, folder) or folder
    except BadInput:
        inside = folder
    written = {file for each in task.command.programs for file in each.outputs}
    programs = [
        [
            task.command.known_text(word) if word not in written else ""
            for word in (*each.words, *each.inputs, *_assigned_values(each))
        ]
        for each in task.command.programs
        if each.launcher not in _WRITE
    ]
    documents = [
        task.command.known_text(text) for each in task.command.simple for text in each.documents
    ]
    own = [path for value in python_paths(task) for path in value.split(os.pathsep)]
    found = CommandFiles.of(
        programs,
        Path(os.path.normpath(inside)),
        [path for path in own if path and "$" not in path],
        documents,
    )
    template = task.workload.config_template
    if template is not None and template.name.endswith(".py"):
        found.add_template(template.text)
    elif template is not None:
        found.add_text(template.text, found.folder)
    return found


def _assigned_values(each: Simple) -> list[str]:
    """Return the values of a command's variables, but not its search paths."""
    return [value for name, value in each.assignments if not name.endswith("PATH")]


def python_paths(task: "Script") -> list[str]:
    """Return the values that the command gives to PYTHONPATH."""
    given: list[tuple[str, str]] = []
    for each in task.command.programs:
        given += each.assignments
        given += [(word.partition("=")[0], word.partition("=")[2]) for word in each.before]
    return [value for name, value in given if name == "PYTHONPATH"]


def working_folder(task: "Script", folder: Path) -> Path | None:
    """Return the folder in which the main program runs, or None if it isn't known.

    Raises:
        BadInput: if the command changes to a folder that is not there.
    """
    folders = [folder]  # the last one is entered; pushd keeps those before
    for each in task.command.simple:
        if each is task.main:
            break
        # A subshell changes to a folder for itself alone.
        if each.subshells != task.main.subshells[: len(each.subshells)]:
            continue
        match each.words:
            case ("cd" | "pushd" as how, *words):
                given = [word for word in words if word not in ("-L", "-P", "-e", "--")]
                name = given[0] if len(given) == 1 else "~"  # cd alone goes home
                if (entered := _entered(task, how, name, folders[-1])) is None:
                    return None
                folders = [*(folders if how == "pushd" else folders[:-1]), entered]
            case ("popd",) if len(folders) > 1:
                folders.pop()
            case ("popd", *_):
                return None
    inside: Path | None = folders[-1]
    for name in task.main.folders:
        inside = None if inside is None else _entered(task, task.main.words[0], name, inside)
    return inside


def _entered(task: "Script", how: str, name: str, folder: Path) -> Path | None:
    """Return a folder that the command changes to from another one; None: it isn't known.

    Raises:
        BadInput: if there is no such folder.
    """
    if not task.command.literal(name) or name[:1] in ("~", "-", "+"):
        return None
    inside = folder / name
    if not is_folder(inside):
        raise BadInput(f"workload.command: {how} {name}: no folder {inside}; give an existing one.")
    return inside


def shell_script(task: "Script") -> tuple[str, str] | None:
    """Return the name and the text of the shell script that the command ends with, as run.sh.

    None: it ends with something else, or the script can't be read.
    """
    last = task.command.simple[-1]
    scripts = (path for path in task.command_files.program if is_shell_script(path))
    for path in scripts:
        for word in last.started[:2]:
            if Path(os.path.normpath(task.command_files.folder / word)) == path:
                source = code_of(path)
                return None if source is None else (path.name, source.decode(errors="replace"))
    return None


def _sources(task: "Script") -> Iterator[tuple[Path, ast.Module]]:
    """Yield the command's Python files and those of the user's that they import, if readable.

    A template of a Python file is one of them.
    """
    template = task.workload.config_template
    if template is not None and template.name.endswith(".py"):
        with contextlib.suppress(*UNREADABLE):
            yield Path(template.name), ast.parse(template.text)
    for path in task.command_files.program:
        if path.suffix == ".py":
            # `check` reports it for the script itself; another Python may read it.
            with contextlib.suppress(*UNREADABLE):
                if (source := code_of(path)) is not None:
                    yield path, ast.parse(source)


def imported(task: "Script") -> Iterator[set[str]]:
    """Yield the top-level names of the modules that each of the command's Python files imports."""
    for _, tree in _sources(task):
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
        yield names


def options_of_bool(task: "Script", option: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of the files in which argparse reads an option with type=bool.

    Each comes with all names that the option has there. It may be shortened, as --shuf.
    """
    for file, tree in _sources(task):
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ]
        converts = {
            node.name: node.body[-1]
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and len(node.body) == 1
        }
        named = [[str(getattr(each, "value", "")) for each in call.args] for call in calls]
        full = [names for names in named if option in names]
        if not full and option.startswith("--"):
            full = [names for names in named if any(name.startswith(option) for name in names)]
        for call, names in zip(calls, named, strict=True):
            types = (each.value for each in call.keywords if each.arg == "type")
            if names in full and any(_is_bool(each, converts) for each in types):
                yield file.name, names


def variables_of_bool(task: "Script", variable: str) -> Iterator[str]:
    """Yield the names of the files that read a variable of the environment by bool(text)."""
    for file, tree in _sources(task):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="bool"), args=[read]) if _reads(read, variable):
                    yield file.name


def _reads(node: ast.AST, variable: str) -> bool:
    """Return whether an expression is os.environ[variable], environ.get or getenv of it."""
    match node:
        case ast.Subscript(value=source, slice=ast.Constant(value=name)):
            return name == variable and ast.unparse(source).endswith("environ")
        case ast.Call(func=source, args=[ast.Constant(value=name), *_]):
            said = ast.unparse(source)
            return name == variable and said.endswith(("environ.get", "getenv"))
    return False


def _is_bool(node: ast.AST | None, converts: Mapping[str, ast.stmt]) -> bool:
    """Return whether an expression is bool, or a function of one line that returns bool(text)."""
    match node:
        case ast.Name(id="bool") | ast.Attribute(attr="bool"):
            return True
        # bool(text) is meant, but bool(int(text)) reads the text.
        case (
            ast.Lambda(body=ast.Call(func=func, args=[ast.Name()]))
            | ast.Return(value=ast.Call(func=func, args=[ast.Name()]))
        ):
            return _is_bool(func, {})
        case ast.Name(id=name) if name in converts:
            return _is_bool(converts[name], {})
    return False


def has_lines(task: "Script") -> bool:
    """Return whether the script uses carbonopt, or may do so because it can't be read."""
    return surely_has_lines(task) or not task.imported


def surely_has_lines(task: "Script") -> bool:
    """Return whether the script imports carbonopt, or is given a name of it, as Hydra is."""
    template = task.workload.config_template
    given = [text for each in task.command.simple for text in (*each.words, *each.documents)]
    given += [] if template is None else [template.text]
    return any(_LINES.search(text) for text in given) or any(
        "carbonopt" in modules for modules in task.imported
    )


def uses_deepspeed(task: "Script") -> bool:
    """Return whether the script imports DeepSpeed or is given a DeepSpeed configuration."""
    if any(
        word.partition("=")[0] in ("--deepspeed", "--deepspeed_config") for word in task.main.words
    ):
        return True
    if any("deepspeed" in modules for modules in task.imported):
        return True
    # as in TrainingArguments(deepspeed="zero.json")
    given = (
        keyword.value
        for _, tree in _sources(task)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "deepspeed"
    )
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)


def missing_modules(task: "Script") -> list[str]:
    """Return the modules that a script imports at its top and this Python lacks."""
    if (
        task.script is None
        or task.script[0] != "file"
        or task.main.words[0] not in ("python", "python3")
    ):
        return []
    tops: dict[str, None] = {}
    for path, tree in _sources(task):
        for node in tree.body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += (
                [node.module]
                if isinstance(node, ast.ImportFrom) and node.module and not node.level
                else []
            )
            tops |= dict.fromkeys(
                module.partition(".")[0]
                for module in modules
                if not (path.parent / module).exists()
            )
    # Python looks beside the file that a link leads to.
    own = [task.workload.folder, str(Path(os.path.realpath(task.script[1])).parent)]
    return [
        name
        for name in tops
        if name not in sys.stdlib_module_names
        and PathFinder.find_spec(name, [*own, *sys.path]) is None
        and not _is_found_by_others(name)
    ]


def _is_found_by_others(name: str) -> bool:
    """Return whether a finder of an editable installation knows the module."""
    return any(
        finder is not PathFinder
        and hasattr(finder, "find_spec")
        and finder.find_spec(name, None) is not None
        for finder in sys.meta_path
    )
