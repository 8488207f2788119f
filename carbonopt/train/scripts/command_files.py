"""Find the user's own files that a command runs or names, without running it.

They are found in the words of the command, in the import statements and plain texts of Python
files, and in the words of shell scripts. Files of installed packages are left out, because package
versions identify them.
"""

import ast
import contextlib
import glob
import os
import re
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

from carbonopt.core.files import is_file, is_folder, opened_unnoted, parsed_json
from carbonopt.train.scripts.command import CODE_OPTION, SHELL_NAME
from carbonopt.train.scripts.own_files import (
    LONGEST_NAME,
    UNREADABLE,
    extensions,
    has_module,
    is_installed,
    linked_folders,
    linked_modules,
    matches,
    may_be_name,
    own_sites,
    sites_of,
)
from carbonopt.train.scripts.python_source import (
    added_paths,
    calls,
    config_folder,
    imported,
    imported_packages,
    known_names,
    last_name,
    names_in,
    path_text,
    paths_made,
    values_of_loops,
)

_SHELLS = re.compile(rb"#!.*\b(ba|da|z|k)?sh\b")
_SHELL_WORD = re.compile(r"[^\s;|&<>()'\"`]+")
_SUBSTITUTED = re.compile(r"\$\([^()]*\)")  # $(dirname "$0")
# The number of characters between braces has a limit, and \w++ gives none back: otherwise the time
# would grow as the square of a damaged script's length.
_VARIABLE = r"\$(?:\w++|\{[^}]{0,256}\})"
_QUOTED_VARIABLE = re.compile(rf'"({_VARIABLE}[^"\s]*)"')  # "$DIR" of "$DIR"/train.py
_PYTHONPATH = re.compile(r"\bPYTHONPATH=[\"']?([^\s;|&<>()'\"`]+)")
_BRACED = re.compile(r"\$\{[^}]{0,256}\}")
_PYTHONS = re.compile(rb"#!.*\bpython")
_VARIABLE_FOLDER = re.compile(rf"^.*{_VARIABLE}/")  # $ROOT/ or ${ROOT}/
_PYTHON = re.compile(r"(.*/)?(python|pypy)[0-9.]*")
# options that take the next word
_OF_SHELLS_WITH_VALUE = ("-o", "-O")
_OF_PYTHON_WITH_VALUE = ("-W", "-X")
_MODULE_OPTION = re.compile("-[A-Za-z]*m|--module")  # python -um, accelerate launch --module
# Files that can name others in any syntax: configurations, notebooks, programs in other languages.
_SOURCES = {".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".pxd"}
_PROGRAMS = _SOURCES | {
    *(".R", ".r", ".jl", ".js", ".mjs", ".cjs", ".ts", ".lua", ".pl", ".rb", ".m", ".go", ".ipynb")
}
_SETTINGS = {".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".gin", ".args", ".env"}
_LISTS = {".txt", ".lst", ".list"}  # options or names of files, a line each
_TEXTS = _PROGRAMS | _SETTINGS | _LISTS
_LONGEST_TEXT = 2**18  # bytes of such a file, or of a shell script; longer ones have data
_LONGEST_CODE = 2**23  # bytes of a program; Python's and torch's longest have below 2**21
_MOST_FOLDERS = 32  # folders to which a shell script changes, where its words are looked up
_OF_THE_SYSTEM = ("/proc", "/sys")  # where a read may wait for ever
_TEXT_WORD = re.compile(r"[^\s'\"`,;:=()\[\]{}<>\\]+")
_MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
# Files that say what programs run, by the program.
_RUN_BY = {
    "make": _MAKEFILES,
    "gmake": _MAKEFILES,
    "just": ("justfile", "Justfile", ".justfile"),
    "task": ("Taskfile.yml", "Taskfile.yaml"),
    "invoke": ("tasks.py",),
    "inv": ("tasks.py",),
    "nox": ("noxfile.py",),
    "dvc": ("dvc.yaml",),
    "pixi": ("pixi.toml", "pyproject.toml"),
    "poe": ("pyproject.toml",),
    "snakemake": ("Snakefile", "workflow/Snakefile"),
    "npm": ("package.json",),
}
_RUN_FILES = (*_MAKEFILES, "justfile", "Justfile", ".justfile", "Snakefile")
_MOST_BEFORE = 4  # words of launchers before the program that trains, as in `uv run train`
# file: of sqlite3 and fsspec, sqlite:/// of SQLAlchemy, zip://x.csv::rows.zip of fsspec
_SCHEME = re.compile(r"^(?:.*::)?(?:file:(?://)?|[a-z][a-z0-9+]*://)?")
_ASSIGNED = re.compile(
    r"(?:^|[\s;])([A-Za-z_]\w*+)=(\"[^\"\n]{0,1024}\"|'[^'\n]{0,1024}'|[^\s;|&<>()'\"`]{0,1024})"
)
_USED = re.compile(r"\$(\w++)|\$\{(\w++)(?::?[-=]([^}]{0,256}))?\}")
_LONGEST_SHELL = 2**18  # characters of a shell script whose variables are replaced
# Import statements in a text that may be no Python as a whole, such as the code in a shell script.
_IMPORT = re.compile(r"\b(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+\(?\s*([\w.*]+[\w.*, \t]*)")
_IMPORT_CALL = re.compile(r"\b(?:import_module|__import__|run_module)\(\s*['\"](\w[\w.]*)")
_SETTING = re.compile(r"[\"']?([\w.-]{1,100}+)[\"']?\s*[:=]\s*[\"']?([^\s\"',#]{1,1024})")
_WRITTEN = re.compile("out|save|check|ckpt|log|run|tmp|temp|cache|result", re.I)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_STARTERS = {"system", "popen", "Popen", "run", "call", "check_call", "check_output", "getoutput"}
# Functions that read all files of a folder.
_READERS = {"listdir", "scandir", "walk", "iterdir", "rglob", "ImageFolder", "DatasetFolder"}
_READERS |= {"load_dataset", "load_from_disk", "from_pretrained"}
_MOST_VARIANTS = 2000  # paths of a file that are made with the values of its loops
# Too large to look for what trials have written there.
_SHARED = ("/dev", "/etc", "/usr", "/var", "/opt", "/bin", "/lib")


@dataclass
class CommandFiles:
    """The files of a command, found by following each file to those that it names.

    Args:
        folder: The folder in which the command runs.
    """

    folder: Path
    # folders in which Python also looks for modules, by the command
    python_path: tuple[Path, ...] = ()
    # folders of its Python's installed packages
    sites: tuple[Path, ...] = ()
    # code: scripts and the modules that they import
    program: list[Path] = field(default_factory=list)
    # other files, and folders, that a word or a program names
    named: list[Path] = field(default_factory=list)
    # all folders that a word or a text names, also those to which programs write
    folders: list[Path] = field(default_factory=list)
    # texts that names in the user's modules stand for
    _known: dict[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        commands: Iterable[Sequence[str]],
        folder: Path,
        python_path: Sequence[str] = (),
        documents: Iterable[str] = (),
    ) -> "CommandFiles":
        """Find the files of commands that run in a folder.

        Words that are not known before a trial are empty. `python_path` has the folders of the
        command's own PYTHONPATH. `documents` are texts in the command that programs have as their
        input, such as code for Python.
        """
        commands = list(commands)
        archives = [folder / path for path in python_path if is_file(folder / path)]
        pythons = (word for words in commands for word in words if _is_python([word]))
        sites = tuple(site for word in pythons for site in sites_of(folder / word))
        own_path = tuple(Path(os.path.normpath(folder / path)) for path in python_path)
        found = cls(folder, own_path, sites or own_sites())
        found.named += archives
        for words in commands:
            code = _code_in(words)
            for word in words[:_MOST_BEFORE]:
                names = _RUN_BY.get(word.rpartition("/")[2], ())
                found._add(next((name for name in names if is_file(folder / name)), ""), [folder])
                found._add_entry_point(word)
            found._add_imports(" ".join(words), [folder])
            script = _script_in(words)
            for place, (before, word) in enumerate(zip(("", *words), words, strict=False)):
                if place == code:
                    found._add_code(word, is_shell=not _is_python(words[:place]))
                elif place == script and is_file(folder / word):
                    found._add_python(Path(os.path.normpath(folder / word)))
                elif place == script and is_file(folder / word / "__main__.py"):
                    found._add_python(Path(os.path.normpath(folder / word / "__main__.py")))
                    found._add_word(word)
                else:
                    module = _module_in(before, word)
                    if module is not None:
                        found._add_module(module, found._search_path(folder))
                    if module is None or is_file(folder / word):  # an option -m of the script
                        found._add_word(word)
                    if re.search(r"\s", word):  # eval 'python train.py', flock lock -c '...'
                        found._add_shell_words(word, [folder])
        for document in documents:
            found._add_code(document, is_shell=False)
            found._add_shell_words(document, [folder])
            found.add_text(document, folder)
        return found

    def _add_word(self, word: str) -> None:
        """Add the files that a word of the command names, also by a pattern such as rows/*.csv."""
        for text in _paths_in(word):
            self._add(text, [self.folder], with_folders=True)
            if _DOTTED.fullmatch(text):
                self._add_module(text, self._search_path(self.folder))
            if glob.has_magic(text):
                for name in matches(text, self.folder):
                    self._add(name, [self.folder], with_folders=True)

    def _add_entry_point(self, word: str) -> None:
        """Add the modules of a program that pip has made from a package's entry points."""
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", word):
            return
        roots = self._search_path(None)
        own = [str(self.folder / ".venv" / "bin"), str(Path(sys.executable).parent)]
        path = os.pathsep.join([*own, os.environ.get("PATH", os.defpath)])
        program = shutil.which(word, path=path)
        if program is not None and not _is_python([word]) and _begins_with(Path(program), _PYTHONS):
            linked = linked_folders(tuple(sites_of(Path(program))))
            with contextlib.suppress(*UNREADABLE):
                for node in ast.walk(ast.parse(code_of(Path(program)) or b"")):
                    for name in imported(node):
                        self._add_module(name, [*roots, *linked])
        try:
            project = tomllib.loads((self.folder / "pyproject.toml").read_text())
            entry = project["project"]["scripts"][word]
            self._add_module(entry.partition(":")[0], [self.folder, self.folder / "src", *roots])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # the project has no such program

    def _add_code(self, code: str, *, is_shell: bool) -> None:
        """Add the files that code names which is a word of the command, as with `bash -c`."""
        if is_shell:
            self._add_shell_words(code, [self.folder])
        else:
            roots = self._search_path(self.folder)
            self._follow(_parseable(code), self.folder / "-c", roots)

    def _add_imports(self, text: str, bases: Iterable[Path]) -> None:
        """Add the modules that code within a text imports, where the text is no Python itself."""
        places = [*bases, *self._search_path(None)]
        for package, names in _IMPORT.findall(text):
            for name in names.split(","):
                parts = [package, *name.split()[:1]]
                if module := ".".join(parts).strip("."):
                    self._add_module(module, places)
        for name in _IMPORT_CALL.findall(text):
            self._add_module(name, places)

    def _add(self, text: str, bases: Iterable[Path], *, with_folders: bool = False) -> None:
        """Add the file of that name from the first of these folders that has it."""
        if not may_be_name(text):
            return
        text = _without_scheme(os.path.expandvars(text))
        text = os.path.expanduser(text)  # noqa: PTH111
        for base in bases:
            path = Path(os.path.normpath(base / text))
            if any(map(path.is_relative_to, _OF_THE_SYSTEM)):
                continue
            if is_folder(path):
                self._note_folder(path)
            if is_file(path):
                if path.suffix == ".py" or (not path.suffix and _begins_with(path, _PYTHONS)):
                    self._add_python(path)
                elif is_shell_script(path):
                    self._add_shell(path)
                elif path.suffix in _PROGRAMS:
                    if self._is_new(path):
                        self._add_texts(path)
                elif path not in self.named and not is_installed(path):
                    self.named.append(path)
                    if path.suffix in _TEXTS or path.name.startswith(".env"):
                        self._add_texts(path)
                return
            # A command might read anything in the folder in which it runs, but that isn't naming
            # it.
            if with_folders and is_folder(path) and not self.folder.is_relative_to(path):
                if path not in self.named:
                    self.named.append(path)
                return

    def _note_folder(self, path: Path) -> None:
        """Note a folder that a text names, unless it holds much beside what programs write."""
        shared = (*_SHARED, tempfile.gettempdir(), str(Path.home()))
        if path not in self.folders and not (
            self.folder.is_relative_to(path)
            or any(Path(each).is_relative_to(path) for each in shared)
            or any(map(path.is_relative_to, _SHARED[1:]))
        ):
            self.folders.append(path)

    def _add_texts(self, path: Path) -> None:
        """Add the files that a configuration or a program in another language names."""
        try:
            with opened_unnoted(path) as file:
                is_long = os.fstat(file.fileno()).st_size > _LONGEST_TEXT
                source = b"" if is_long else file.read()
        except OSError:
            return
        if path.suffix == ".ipynb":
            code, lines = _notebook_code(source)
            self._follow(code, path, self._search_path(path.parent))
            self._add_shell_words(lines, [self.folder, path.parent])
        else:
            is_list = path.suffix in _LISTS
            self.add_text(source.decode(errors="replace"), path.parent, has_settings=not is_list)

    def add_text(self, text: str, folder: Path, *, has_settings: bool = True) -> None:
        """Add the files that a text names, relative to the command's folder or to this one.

        With settings, such as `data_dir: rows`, their folders are added, too.
        """
        for word in dict.fromkeys(_TEXT_WORD.findall(text)):
            if "." in word or "/" in word:
                self._add(word, (self.folder, folder))
            if _DOTTED.fullmatch(word):
                self._add_module(word, self._search_path(self.folder))
        for line in text.splitlines() if has_settings else ():
            for name, value in _SETTING.findall(line[:LONGEST_NAME]):
                if not _WRITTEN.search(name):
                    self._add(value, (self.folder, folder), with_folders=True)

    def _is_new(self, path: Path) -> bool:
        if path in self.program or is_installed(path):
            return False
        self.program.append(path)
        return True

    def _add_python(self, path: Path, roots: Sequence[Path] = ()) -> None:
        """Add a Python file, the modules that it imports and the files that its texts name.

        Args:
            path: The file.
            roots: Folders in which its imports are looked for; none for a script, whose own folder
                is the first.
        """
        if not self._is_new(path):
            return
        if (source := code_of(path)) is None:
            return
        if not roots:
            # Python looks beside the file that a link leads to.
            beside = Path(os.path.realpath(path)).parent
            roots = self._search_path(path.parent)
            roots = roots if beside == path.parent else [roots[0], beside, *roots[1:]]
        self._follow(source, path, roots)

    def add_template(self, text: str) -> None:
        """Add the modules and files of a Python file that each trial gets a copy of.

        The copy is in the trial's folder, where Python finds no module beside the template.
        """
        self._follow(text, self.folder / "config.py", self._search_path(None))

    def _search_path(self, folder: Path | None) -> list[Path]:
        """Return the folders in which imports are looked for, without installed packages.

        `folder` is the script's own, the first.
        """
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [
            *([] if folder is None else [folder]),
            *self.python_path,
            *(Path(path).absolute() for path in given if path),
            *linked_folders(self.sites),
        ]

    def _follow(self, source: str | bytes, path: Path, roots: Sequence[Path]) -> None:
        """Add the modules that a Python file's source imports and the files that its texts name."""
        try:
            found = list(ast.walk(ast.parse(source)))
        except UNREADABLE:
            return  # it imports nothing; whether it has to run is not checked here
        known = known_names(found, path)
        added = (self.folder / text for text in added_paths(found, known))
        roots = [*roots, *(Path(os.path.normpath(folder)) for folder in added)]
        for node in found:
            self._follow_imports(node, path, roots)
        # What the modules that it imports have defined is known by now.
        known = {**self._known, **known}
        self._note_names(known)
        entered = (path_text(call.args[0], known) for call in calls(found, "chdir"))
        bases = (self.folder, path.parent, *(self.folder / text for text in entered if text))
        left = iter(range(_MOST_VARIANTS))
        values = values_of_loops(found)
        for node in found:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._add(node.value, bases)
                if _DOTTED.fullmatch(name := node.value.partition(":")[0]):
                    self._add_module(name, roots)
            elif isinstance(node, ast.BinOp | ast.Call | ast.JoinedStr):
                for text in paths_made(node, known, self.folder):
                    self._add(text, bases)
                for name in names_in(node) & values.keys() if values else ():
                    for value, _ in zip(values[name], left, strict=False):
                        for text in paths_made(node, {**known, name: value}, self.folder):
                            self._add(text, bases)
            if isinstance(node, ast.Call):
                self._follow_call(node, bases, known, roots)
            folder_text = config_folder(node, known)
            if folder_text:
                folder = Path(os.path.normpath(path.parent / folder_text))
                if folder != path.parent and is_folder(folder) and folder not in self.named:
                    self.named.append(folder)

    def _follow_imports(self, node: ast.AST, path: Path, roots: Sequence[Path]) -> None:
        for name in imported(node):
            self._add_module(name, roots)
        for package in imported_packages(node):
            self._add_package(package, path, roots)
        if isinstance(node, ast.ImportFrom) and node.level:
            self._add_relative(node, path, roots)

    def _note_names(self, known: Mapping[str, ast.expr]) -> None:
        """Note what a module's names stand for, for the modules that import it."""
        for name, value in known.items():
            if name in ("__file__", "__package__") or name in self._known:
                continue
            if (text := path_text(value, known)) is not None and len(text) <= LONGEST_NAME:
                self._known[name] = ast.Constant(text)
                if name not in (".parent", ".parents") and not name.startswith("."):
                    self._known.setdefault(f".{name}", ast.Constant(text))

    def _follow_call(
        self,
        node: ast.Call,
        bases: Sequence[Path],
        known: Mapping[str, ast.expr],
        roots: Sequence[Path],
    ) -> None:
        """Add what a call starts as a program of its own, and the folders that it reads."""
        called = last_name(node.func)
        if called in _STARTERS and node.args:
            match node.args[0]:
                case ast.Constant(value=str() as line):
                    self._add_shell_words(line, list(bases))
                case ast.List(elts=words) | ast.Tuple(elts=words):
                    texts = [getattr(word, "value", "") for word in words]
                    for before, word in pairwise(map(str, texts)):
                        if (module := _module_in(before, word)) is not None:
                            self._add_module(module, roots)
        elif called == "load_dotenv":
            self._add(".env", (bases[1], bases[0]))
        elif called in _READERS:
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            given = node.args if called not in ("iterdir", "rglob") else inner
            for value in (*given, *(each.value for each in node.keywords)):
                if _WRITTEN.search(ast.unparse(value)):
                    continue  # what a trial itself has written
                for part in ast.walk(value):
                    text = path_text(part, known) if isinstance(part, ast.expr) else None
                    if text and glob.has_magic(text) and "/" in text and "**" not in text:
                        for name in matches(text, self.folder):
                            self._add(name, bases)
                    elif text:
                        self._add(text, bases[:1], with_folders=True)

    def _add_package(self, name: str, path: Path, roots: Sequence[Path]) -> None:
        """Add all modules of a package, of which a file imports one by a name that it computes.

        Without a name it is the file's own package.
        """
        folders = [root.joinpath(*name.split(".")) for root in roots] if name else [path.parent]
        package = next((folder for folder in folders if is_folder(folder)), None)
        if package is None or is_installed(package):
            return
        for module in sorted([*package.glob("*.py"), *package.glob("*/__init__.py")]):
            self._add_python(module, roots)

    def _add_relative(self, node: ast.ImportFrom, path: Path, roots: Sequence[Path]) -> None:
        package = path.parents[node.level - 1] if node.level <= len(path.parents) else path.parent
        self._add_python_if_there(package / "__init__.py", roots)
        below = [node.module] if node.module else []
        for alias in node.names:
            self._add_module(".".join([*below, alias.name]), [package], roots)

    def _add_python_if_there(self, path: Path, roots: Sequence[Path]) -> None:
        if is_file(path):
            self._add_python(path, roots)

    def _add_module(self, name: str, places: Sequence[Path], roots: Sequence[Path] = ()) -> None:
        """Add a module's file and those of its parent packages, if they are the user's own.

        The last part of a name may also be something in a module.
        """
        parts = name.split(".")
        linked = linked_modules(self.sites).get(parts[0])
        places = places if linked is None else [*places, linked]
        # Python takes a folder without __init__.py only if it finds no module of that name.
        modules = (place for place in places if has_module(place, parts[0]))
        folders = (place for place in places if is_folder(place / parts[0]))
        place = next(chain(modules, folders), None)
        if place is None:
            return
        for extension in extensions(place, parts[0]):
            self._is_new(extension)
        folder = place
        for part in parts:
            self._add_python_if_there(folder / part / "__init__.py", roots or places)
            self._add_python_if_there(folder / f"{part}.py", roots or places)
            folder = folder / part
        self._add_python_if_there(folder / "__main__.py", roots or places)

    def _add_shell(self, path: Path) -> None:
        """Add a shell script and the files that its words name.

        Names are looked up where the script runs, in its own folder, and where it changes to.
        """
        if self._is_new(path) and (source := code_of(path)) is not None:
            # What follows may be an archive that the script unpacks.
            text = source[:_LONGEST_TEXT].decode(errors="replace")
            self._add_shell_words(text, [self.folder, path.parent])

    def _add_shell_words(self, text: str, bases: list[Path]) -> None:
        """Add the files that the words of a shell script name; see `_add_shell`."""
        text = _QUOTED_VARIABLE.sub(r"\1", _SUBSTITUTED.sub("$HERE", text))
        text = _with_values(text)
        for value in _PYTHONPATH.findall(_BRACED.sub("$V", text)):
            for entry in value.split(":"):
                below = _VARIABLE_FOLDER.sub("", entry)
                folders = (
                    Path(os.path.normpath(base / below)) for base in bases if below[:1] != "$"
                )
                self.python_path += tuple(folder for folder in folders if is_folder(folder))
        words = _SHELL_WORD.findall(text)
        looked_up: set[tuple[str, bool, int]] = set()  # with the number of folders
        for before, word in zip(("", *words), words, strict=False):
            if before == "cd":
                below = _VARIABLE_FOLDER.sub("", word)
                reached = dict.fromkeys(Path(os.path.normpath(base / below)) for base in bases)
                new = [folder for folder in reached if folder not in bases and is_folder(folder)]
                bases += new[: _MOST_FOLDERS - len(bases)]
            elif (module := _module_in(before, word)) is not None:
                self._add_module(module, [*bases, *self.python_path])
            name = word if "=" in word else before
            reads = name.startswith("--") and not _WRITTEN.search(name.partition("=")[0])
            if (word, reads, len(bases)) not in looked_up:
                looked_up.add((word, reads, len(bases)))
                for part in _paths_in(word):
                    self._add(part, bases[:1])  # its variables may be those of the environment
                    self._add(_VARIABLE_FOLDER.sub("", part), bases, with_folders=reads)
        self._add_imports(text, bases)


def code_of(path: Path) -> bytes | None:
    """Return a program's source; None if it can't be read, or is longer than programs are."""
    try:
        return path.read_bytes() if path.stat().st_size <= _LONGEST_CODE else None
    except OSError:
        return None


def _parseable(code: str) -> bytes:
    """Return a command's Python code, with 0 for a shell's variables if it is no Python else."""
    code = textwrap.dedent(code)
    try:
        ast.parse(code)
    except UNREADABLE:
        code = re.sub(_VARIABLE, "0", _SUBSTITUTED.sub("0", code))
    return code.encode(errors="replace")


def _without_scheme(text: str) -> str:
    """Return the path in a URL of this machine, such as sqlite:///rows.db or file:rows?mode=ro."""
    scheme = _SCHEME.match(text)
    if scheme is None or not scheme[0] or scheme[0].endswith(("http://", "https://")):
        return text
    path = text[scheme.end() :].partition("?")[0]
    return path.removeprefix("/") if scheme[0].startswith("sqlite") else path


def _with_values(text: str) -> str:
    """Replace a shell script's variables by what it has assigned to them, or their defaults."""
    if len(text) > _LONGEST_SHELL:
        return text
    assigned: dict[str, str] = {}

    def value_of(used: re.Match[str]) -> str:
        name = used[1] or used[2]
        value = assigned.get(name, used[3] if name not in os.environ else None)
        return used[0] if value is None else value

    lines = []
    for line in text.split("\n"):
        replaced = _USED.sub(value_of, line)
        lines.append(replaced if len(replaced) <= _LONGEST_SHELL else line)
        for name, value in _ASSIGNED.findall(lines[-1]):
            if not name.endswith("PATH") and len(value) <= LONGEST_NAME:
                assigned[name] = value.strip("\"'")
    return "\n".join(lines)


def _paths_in(word: str) -> Iterator[str]:
    """Yield the parts of a word that may be paths.

    They are the whole word, the text after the name of an option or a variable, the entries of a
    list such as train.csv,eval.csv, and the file after an @ whose lines are further options.
    """
    yield word
    name, equals, value = word.partition("=")
    if equals:
        yield value
    has_name = equals and not re.search("[,:]", name)
    yield from re.split("[,:=]", value if has_name else word)
    yield (value or word).lstrip("@+")


def _module_in(before: str, word: str) -> str | None:
    """Return the module that a word names after an option, as in `-m NAME`; None: it names none."""
    if _MODULE_OPTION.fullmatch(before):
        return word
    return word.removeprefix("-m") if re.fullmatch(r"-m[A-Za-z_][\w.]*", word) else None


def _script_in(words: Sequence[str]) -> int | None:
    """Return the place of the file that Python is to run; None: no word says so."""
    pythons = (place for place, word in enumerate(words) if _PYTHON.fullmatch(word))
    if (place := next(pythons, None)) is None:
        return None
    while (place := place + 1) < len(words) and words[place].startswith("-"):
        if CODE_OPTION.fullmatch(words[place]) or _module_in(words[place], "") is not None:
            return None
        if words[place] in _OF_PYTHON_WITH_VALUE:
            place += 1
    return place


def _notebook_code(source: bytes) -> tuple[str, str]:
    """Return the Python code of a notebook and its other lines; empty if it can't be read."""
    try:
        cells = parsed_json(source)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError):
        return "", ""
    python, others = [], []
    for cell in code:
        is_shell = cell.startswith(("%%bash", "%%sh", "%%script"))
        for line in cell.splitlines():
            is_other = is_shell or line.lstrip().startswith(("%", "!", "?"))
            python.append("" if is_other else line)
            others.append(line.lstrip("%!? \t") if is_other else "")
    return "\n".join(python), "\n".join(others)


def _code_in(words: Sequence[str]) -> int | None:
    """Return the place of the word that is code, as after `bash -c` and `python -c`; None: none."""
    programs = (place for place, word in enumerate(words) if _runs_code(word))
    if (place := next(programs, None)) is None:
        return None
    with_value = _OF_PYTHON_WITH_VALUE if _is_python([words[place]]) else _OF_SHELLS_WITH_VALUE
    while (place := place + 1) < len(words) - 1 and words[place].startswith("-"):
        if CODE_OPTION.fullmatch(words[place]):
            return place + 1
        if words[place] in with_value:
            place += 1
    return None


def _runs_code(word: str) -> bool:
    return SHELL_NAME.fullmatch(word.rpartition("/")[2]) is not None or _is_python([word])


def _is_python(words: Sequence[str]) -> bool:
    return any(map(_PYTHON.fullmatch, words))


def is_shell_script(path: Path) -> bool:
    """Return whether a shell or make runs a file, by its name or its first line."""
    if path.suffix in (".sh", ".bash", ".zsh", ".mk", ".just") or path.name in _RUN_FILES:
        return True
    return _begins_with(path, _SHELLS)


def _begins_with(path: Path, line: re.Pattern[bytes]) -> bool:
    """Return whether the first line of a file matches a pattern; False if it can't be read."""
    try:
        with opened_unnoted(path) as file:
            return line.match(file.readline(200)) is not None
    except OSError:
        return False
