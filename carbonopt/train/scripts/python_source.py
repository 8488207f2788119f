"""Find what the source of a Python file names: modules, folders of modules, and paths."""

import ast
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from pathlib import Path

from carbonopt.train.scripts.own_files import LONGEST_NAME, matches

_MOST_PARTS = 100  # expressions that make one path, those that names stand for included
# Options of Hydra's functions that name the folder of its configuration files.
_CONFIG_FOLDERS = ("config_path", "config_dir")
_PATH_FUNCTIONS: tuple[str, ...] = (
    "abspath",
    "realpath",
    "normpath",
    "fspath",
    "expanduser",
    "expandvars",
)
_PATH_FUNCTIONS += ("str", "Path", "PurePath")


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a node imports by absolute names.

    In `from a import b`, b may be a module or not; both names are yielded.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.Call) and node.args and isinstance(first := node.args[0], ast.Constant)
    ):
        called = (
            node.func.attr
            if isinstance(node.func, ast.Attribute)
            else getattr(node.func, "id", None)
        )
        if called in ("import_module", "__import__", "run_module") and isinstance(first.value, str):
            package = [*node.args[1:2], *(each.value for each in node.keywords)]
            match package:
                case [ast.Constant(value=str() as within), *_] if first.value.startswith("."):
                    yield within + first.value
                case _:
                    yield first.value


def imported_packages(node: ast.AST) -> Iterator[str]:
    """Yield the packages of which a node imports a module whose name it computes.

    An empty name is the package of the file itself.
    """
    if not isinstance(node, ast.Call):
        return
    called = last_name(node.func)
    if called in ("iter_modules", "walk_packages"):
        yield ""
    elif called in ("import_module", "__import__") and node.args:
        match node.args[0]:
            case ast.JoinedStr(values=[ast.Constant(value=str() as begin), *_]):
                pass
            case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=name)), *_]) if (
                name
                in (
                    "__name__",
                    "__package__",
                )
            ):
                begin = "."
            case ast.BinOp(left=ast.Constant(value=str() as begin)):
                begin = begin.partition("%")[0]
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as begin))):
                begin = begin.partition("{")[0]
            case _:
                return
        if "." in begin:
            yield begin.rpartition(".")[0].lstrip(".")


def known_names(nodes: Sequence[ast.AST], path: Path) -> dict[str, ast.expr]:
    """Return what names stand for in a file; those with a dot are attributes or options."""
    known: dict[str, ast.expr] = {}
    others: dict[str, ast.expr] = {}  # attributes and arguments, which known names hide
    for node in reversed(nodes):
        for target, value in _assigned(node):
            if isinstance(target, ast.Name):
                known[target.id] = value
            elif isinstance(target, ast.Attribute):
                others[f".{target.attr}"] = value
        if isinstance(node, ast.ClassDef):
            inside = chain.from_iterable(map(_assigned, node.body))
            others |= {
                f".{target.id}": value for target, value in inside if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.arguments):
            places = [*node.posonlyargs, *node.args]
            given = zip(places[len(places) - len(node.defaults) :], node.defaults, strict=True)
            others |= {argument.arg: value for argument, value in given}
            named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            others |= {argument.arg: value for argument, value in named if value is not None}
        elif isinstance(node, ast.Call) and last_name(node.func) in ("add_argument", "option"):
            defaults = [each.value for each in node.keywords if each.arg == "default"]
            for option in node.args if defaults else ():
                if isinstance(option, ast.Constant) and isinstance(option.value, str):
                    name = option.value.lstrip("-").replace("-", "_")
                    known[f".{name}"] = defaults[0]
                    others[name] = defaults[0]  # click gives it to a function
    here = {"__file__": ast.Constant(str(path)), "__package__": ast.Constant(path.parent.name)}
    return {**others, **known, **here}


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with what each of them gets."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            match target, node.value:
                case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                    yield from zip(targets, values, strict=True)
                case _:
                    yield target, node.value


def values_of_loops(nodes: Sequence[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return the texts that a name has one after the other.

    They are those of a loop over a list, and those by which a function of the file is called.
    """
    values: dict[str, list[ast.expr]] = {}
    arguments: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            if isinstance(node.iter, ast.List | ast.Tuple | ast.Set):
                values.setdefault(node.target.id, []).extend(filter(_is_text, node.iter.elts))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            arguments[node.name] = names[1:] if names[:1] in (["self"], ["cls"]) else names
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            begins = (part for part in node.body if getattr(part, "name", "") == "__init__")
            for begin in begins:
                if isinstance(begin, ast.FunctionDef):
                    arguments[node.name] = [each.arg for each in begin.args.args[1:]]
    for node in nodes:
        if isinstance(node, ast.Call) and (of_call := arguments.get(last_name(node.func))):
            given = [*zip(of_call, node.args, strict=False)]
            given += [(each.arg, each.value) for each in node.keywords if each.arg in of_call]
            for name, value in given:
                if _is_text(value):
                    values.setdefault(name, []).append(value)
    return {name: texts for name, texts in values.items() if texts}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names_in(node: ast.AST) -> set[str]:
    """Return the names that an expression uses."""
    return {each.id for each in islice(ast.walk(node), _MOST_PARTS) if isinstance(each, ast.Name)}


def config_folder(node: ast.AST, known: Mapping[str, ast.expr]) -> str | None:
    """Return the folder of Hydra's configuration files, if a node names it."""
    if isinstance(node, ast.keyword) and node.arg in _CONFIG_FOLDERS:
        return path_text(node.value, known)
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func) if isinstance(node.func, ast.Attribute | ast.Name) else ""
        if called in ("hydra.main", "hydra.initialize", "initialize", "initialize_config_dir"):
            return path_text(node.args[0], known)
    return None


def paths_made(node: ast.expr, known: Mapping[str, ast.expr], folder: Path) -> Iterator[str]:
    """Yield the paths that an expression makes of several parts, also by a pattern."""
    if isinstance(node, ast.Call) and last_name(node.func) in (
        "glob",
        "iglob",
    ):
        pattern = path_text(node.args[0], known) if node.args else None
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        below = None if inner is None else path_text(inner, known)
        text = pattern if below is None else _joined([below, pattern])
        # Without a folder, it may match what else lies there, such as the study file. A folder that
        # the environment names may be a cache.
        if "environ" in ast.unparse(node):
            return
        if text is not None and "/" in text and "**" not in text:
            yield from matches(text, folder)
    elif (text := path_text(node, known)) is not None:
        yield text


def added_paths(nodes: Sequence[ast.AST], known: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield the folders that a file adds to sys.path, as far as it says which."""
    for node in nodes:
        added: list[ast.expr] = []
        if isinstance(node, ast.Call) and (
            _is_of_sys_path(node.func) or last_name(node.func) == "addsitedir"
        ):
            added = node.args
        elif isinstance(node, ast.AugAssign) and _is_sys_path(node.target):
            added = [node.value]
        for value in added:
            for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
                if (text := path_text(each, known)) is not None:
                    yield text


def calls(nodes: Sequence[ast.AST], name: str) -> Iterator[ast.Call]:
    """Yield the calls of functions of that name that have an argument."""
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and last_name(node.func) == name:
            yield node


def _is_of_sys_path(called: ast.expr) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and called.attr in ("append", "insert", "extend")
        and _is_sys_path(called.value)
    )


def _is_sys_path(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
            return True
    return False


def last_name(called: ast.expr) -> str:
    """Return the last part of the name of what is called: `join` of os.path.join."""
    return str(getattr(called, "attr", getattr(called, "id", "")))


def path_text(
    node: ast.expr, known: Mapping[str, ast.expr], counted: Iterator[int] | None = None
) -> str | None:
    """Return the path that an expression makes, such as `Path(__file__).parent / "lib"`.

    Args:
        node: the expression.
        known: the expressions that names stand for.
        counted: counts the expressions of one path, of which this one is a part; None: it is whole.

    Returns:
        None if it is not known before the file runs, or has more than _MOST_PARTS expressions.
    """
    counted = count() if counted is None else counted

    def text_of(part: ast.expr) -> str | None:
        return path_text(part, known, counted)

    if next(counted) >= _MOST_PARTS:
        return None
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name) if name in known:
            return text_of(known[name])
        case ast.Attribute(attr=name) if f".{name}" in known:
            return text_of(known[f".{name}"])
        case ast.Attribute(value=inner, attr="parent"):
            return _parent(text_of(inner), 1)
        case ast.Subscript(
            value=ast.Attribute(value=inner, attr="parents"), slice=ast.Constant(value=int() as up)
        ):
            return _parent(text_of(inner), up + 1)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _joined([text_of(left), text_of(right)])
        case ast.BinOp(left=ast.Constant(value=str() as form), op=ast.Mod(), right=right):
            given = right.elts if isinstance(right, ast.Tuple) else [right]
            return _filled(form, "%s", map(text_of, given))
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((made for value in values if (made := text_of(value)) is not None), None)
        case ast.Subscript(
            value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str() as variable)
        ):
            return os.environ.get(variable)
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(attr="split"), args=[inner]),
            slice=ast.Constant(value=0),
        ):
            return _parent(text_of(inner), 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _concatenated(map(text_of, (left, right)))
        case ast.JoinedStr(values=values):
            return _concatenated(map(text_of, values))
        case ast.FormattedValue(value=inner, format_spec=None):
            return text_of(inner)
        case ast.Call():
            return _called_path(node, text_of)
    return None


def _called_path(node: ast.Call, text_of: Callable[[ast.expr], str | None]) -> str | None:
    """Return the path that a call makes of others; see `path_text`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="resolve" | "absolute" | "expanduser")
        ) if last_name(inner) != "path":
            return text_of(inner)
        case ast.Call(
            func=ast.Attribute(value=inner, attr="with_name" | "with_suffix" as how), args=[end]
        ):
            return _renamed(text_of(inner), how, text_of(end))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as form), attr="format")):
            return _filled(form, "{}", map(text_of, node.args))
        case (
            ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"),
                args=[ast.Constant(value=str() as variable), *rest],
            )
            | ast.Call(
                func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"),
                args=[ast.Constant(value=str() as variable), *rest],
            )
        ):
            return os.environ.get(variable) or (text_of(rest[0]) if rest else None)
        case ast.Call(func=called, keywords=[*_, ast.keyword(arg="default", value=value)]) if (
            last_name(called) in ("field", "Field")
        ):
            return text_of(value)
        case ast.Call(func=ast.Attribute(value=inner, attr="joinpath"), args=args):
            return _joined([text_of(inner), *map(text_of, args)])
        case ast.Call(func=called, args=args):
            name = last_name(called)
            if name in ("getcwd", "cwd"):
                return "."
            if name == "home":
                return "~"
            if name == "gettempdir":
                return tempfile.gettempdir()
            if name == "files" and args:  # of importlib.resources
                package = text_of(args[0])
                return None if package is None else package.replace(".", "/")
            if name == "dirname" and args:
                return _parent(text_of(args[0]), 1)
            if name in _PATH_FUNCTIONS and args:
                return _joined([text_of(each) for each in args])
            return _joined([text_of(each) for each in args]) if name == "join" else None
    return None


def _filled(form: str, sign: str, parts: Iterable[str | None]) -> str | None:
    """Return a text whose signs, such as %s, are replaced by the parts."""
    pieces = form.split(sign)
    given = list(parts)
    if (
        len(given) != len(pieces) - 1
        or "%" in form.replace("%s", "")
        or "{" in form.replace("{}", "")
    ):
        return None
    return _concatenated(chain(*zip(pieces, given, strict=False), pieces[-1:]))


def _renamed(text: str | None, how: str, end: str | None) -> str | None:
    """Return a path with another name, or with another end of its name."""
    if text is None or end is None:
        return None
    path = Path(text)
    return f"{path.parent / path.stem}{end}" if how == "with_suffix" else str(path.parent / end)


def _joined(parts: Sequence[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return os.path.join(*known) if known and len(known) == len(parts) else None  # noqa: PTH118


def _concatenated(parts: Iterable[str | None]) -> str | None:
    text = ""
    for part in parts:
        # A name that stands for itself twice would double with each depth.
        if part is None or len(text) > LONGEST_NAME:
            return None
        text += part
    return text


def _parent(text: str | None, levels: int) -> str | None:
    if text is None or levels > len(Path(text).parts):
        return None
    for _ in range(levels):
        text = os.path.dirname(text)  # noqa: PTH120
    return text
