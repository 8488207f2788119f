"""A script's command as its user writes it: words or a line of shell, with placeholders."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.expression import Expression
from carbonopt.core.values import Scalar

_PARTS = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{([^{}]*)\}|[{}]")
# a placeholder's number, in the text that is split into words
_MARKED = re.compile("\ue000([0-9]+)\ue001")
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<comment>\#[^\n]*)|"""
    r"""(?P<redirection>[0-9]*(?:>>|>&|>\||<<<|<<-?|<&|>|<)|&>>?)
    |(?P<operator>&&|\|\||\|&|[|&;()\n])|"""
    r"""(?P<word>(?:[^\s|&;<>()'"\\`]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|`[^`]*`)+)""",
    re.VERBOSE | re.DOTALL,
)
# Words that only a shell knows as the first word of a command.
_OF_SHELLS = (
    *(
        "cd",
        "source",
        ".",
        "export",
        "exec",
        "eval",
        "set",
        "unset",
        "ulimit",
        "umask",
        "time",
        "trap",
        "wait",
    ),
    *("if", "for", "while", "until", "case", "function", "[[", "!"),
)
# Programs whose last words are another program, which they start.
_STARTERS = (
    *("env", "nice", "ionice", "nohup", "time", "exec", "command", "timeout", "stdbuf", "setsid"),
    *("taskset", "numactl", "chrt", "systemd-run", "sudo", "perf", "nsys", "script"),
    *("conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "hatch", "rye"),
    *("apptainer", "singularity"),
)
# Options of programs that change to a folder before they start another one.
_FOLDER_OPTIONS = {
    "env": ("-C", "--chdir"),
    "sudo": ("-D", "--chdir"),
    "systemd-run": ("--working-directory",),
    "srun": ("-D", "--chdir"),
    "mpirun": ("-wdir", "--wdir", "-wd"),
    "make": ("-C", "--directory"),
    "gmake": ("-C", "--directory"),
    "uv": ("--directory",),
    "poetry": ("-C", "--directory"),
    **dict.fromkeys(("conda", "mamba", "micromamba"), ("--cwd",)),
}
# Programs that a command may end with, and that print no quality.
_NO_TRAINING = (
    *("echo", "printf", "date", "touch", "hostname", "nvidia-smi", "ls", "rm", "cp", "mv", "sync"),
    *("cd", "pushd", "popd", "deactivate", "kill", "wait", "exit", "true"),
)
_EXPORTS = ("export", "declare", "typeset")
# before the name of an environment, a user or a variable
_WITH_NAMES = ("-n", "--name", "-e", "--environment", "-u", "--unset")
_WITH_PATHS = ("-p", "--prefix")  # before an environment's path
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_ARGUMENTS = re.compile(r"\$\{?[@*1-9]")  # what a shell's script was given
# Programs, and modules of `python -m`, that start the ranks themselves.
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_MODULE = re.compile("-[A-Za-z]*m")  # python -m, python -um
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_DOCUMENT = re.compile("(?<!<)<<(?!<)")
_DOCUMENT_BEGINS = re.compile("[0-9]*<<-?")
# what a # follows where it begins a comment
_BEFORE_COMMENTS = (*" \t\r\n;&|()", "\\\n")
SHELL_NAME = re.compile("(?:ba|da|z|k)?sh")
CODE_OPTION = re.compile("-[A-Za-z]*c")  # bash -c, bash -lc, python -c
_SPLITS = re.compile("--split-string(?:=|$)|-[iv0]*S")  # env -S 'python train.py'
_FORM = re.compile(r"[-+#0-9,_.]*[deEfFgG%]")
# Names of files such as rows[0-9].csv, but no lists such as +layers=[1,2] and [1,2].
_NAMES_BY_BRACKETS = re.compile(r"[^=\[]*(?:[\w./-]\[[^\]]+\]|\[[^\]]+\][\w./-])[^=]*")
# text that a shell leaves unchanged, within quotes and without
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+@%-]+")
SHELL = ("bash", "-o", "pipefail", "-c")  # with pipefail, a failure in a pipe fails the whole


class Variable(str):
    """The name of a shell variable in place of a value that is known only when the command runs."""


@dataclass(frozen=True)
class Placeholder:
    """An expression in braces and the format of its value, such as `{learning_rate / 10:.2e}`."""

    expression: Expression
    form: str

    @classmethod
    def parse(cls, text: str) -> "Placeholder":
        """Read the text between the braces. Raises BadInput."""
        expression, colon, form = text.partition(":")
        if colon and not _FORM.fullmatch(form):
            must = "a format must be of digits, a dot and one of d e f g %, such as .2e"
            raise BadInput(f"{{{text}}}: {must}, but got {form!r}.")
        return cls(Expression.parse(expression), form)

    @property
    def as_written(self) -> str:
        return f"{{{self.expression.text}{':' if self.form else ''}{self.form}}}"

    def text(self, values: Mapping[str, Scalar]) -> str:
        """Return the expression's value as it stands in a command.

        Raises:
            BadInput: It has no value, or its value can't be written in this format.
        """
        value = self.expression.value(values)
        try:
            return format(value, self.form) if self.form else as_text(value)
        except ValueError as error:
            place = f"{{{self.expression.text}:{self.form}}}"
            raise BadInput(f"{place} can't be written for {value!r}: {error}.") from error


def as_text(value: Scalar) -> str:
    """Return a value as it stands in a command; a boolean is written as in YAML."""
    if isinstance(value, Variable):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Simple:
    """A program that the command runs: what stands between two operators of a shell."""

    words: tuple[str, ...]  # words without its assignments, placeholders marked
    # names and values of the variables that are assigned before it
    assignments: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]  # files that it has as its standard input
    outputs: tuple[str, ...]  # files to which its standard output goes
    documents: tuple[str, ...]  # texts in the command that it has as its input: <<EOF, <<< 'text'
    subshells: tuple[int, ...] = ()  # numbers of the brackets around it, the outermost first

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.assignments)

    @property
    def started(self) -> tuple[str, ...]:
        """The words without those of a program that starts another one, such as `nice -n 10`."""
        if not self.words or _name(self.words[0]) not in _STARTERS:
            return self.words
        for place, word in enumerate(self.words[1:], start=1):
            is_program = _name(word) in LAUNCHERS or _PYTHON.fullmatch(_name(word)) is not None
            last = self.words[place - 1]
            is_value = last in _WITH_NAMES or (last in _WITH_PATHS and "/" in word)
            if is_program and not is_value:
                return self.words[place:]
        return self.words

    @property
    def launcher(self) -> str:
        """The name of the program that is started at last, or the module of `python -m`.

        It is empty if it only assigns variables.
        """
        words = self.started or ("",)
        if _PYTHON.fullmatch(_name(words[0])):
            place = 1
            while place < len(words) - 1 and words[place].startswith("-"):
                if _MODULE.fullmatch(words[place]):
                    return words[place + 1]
                place += 2 if words[place] in ("-W", "-X") else 1
        return _name(words[0])

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that its starters change to, one after the other, as `env -C sub` does."""
        found: list[str] = []
        options: tuple[str, ...] = ()
        for place, word in enumerate(self.words):
            if _PYTHON.fullmatch(_name(word)):
                break
            if _name(word) in (*_FOLDER_OPTIONS, *_STARTERS):  # others use -C for something else
                options = _FOLDER_OPTIONS.get(_name(word), ())
            name, equals, value = word.partition("=")
            if word in options and place < len(self.words) - 1:
                found.append(self.words[place + 1])
            elif equals and name in options:
                found.append(value)
            elif word[:2] in options and word[1:2] != "-":  # -Csub
                found.append(word[2:])
        return tuple(found)

    @property
    def before(self) -> tuple[str, ...]:
        """The words that may change the environment, as those of `export` and `env` do."""
        name = _name(self.words[0]) if self.words else ""
        if name in (*_EXPORTS, "unset"):
            return self.words[1:]
        if name not in _STARTERS:
            return ()
        count = len(self.words) - len(self.started)
        return self.words[1 : count or len(self.words)]

    def changes(self, variable: str) -> bool:
        """Return whether it sets a variable of the environment, or removes it."""
        if variable in self.variables:
            return True
        removed = (variable, f"-u{variable}", f"--unset={variable}")
        is_export = bool(self.words) and self.words[0] in _EXPORTS  # exporting a name changes none
        return any(
            word.startswith(f"{variable}=") or (word in removed and not is_export)
            for word in self.before
        )


@dataclass(frozen=True)
class Command:
    """A parsed command; `Command.parse` makes one from its text."""

    marked: str  # text with a mark in place of each placeholder
    placeholders: tuple[Placeholder, ...]
    variables: tuple[str, ...]  # shell variables that the command has in ${}

    @classmethod
    def of_shell(cls, text: str) -> "Command":
        """Read a command for a shell, without its comments. Raises BadInput, as `parse` does."""
        return cls.parse(without_comments(text))

    @classmethod
    def of_shell_script(cls, text: str) -> "Command":
        """Read a script of a shell, in which braces make no placeholders."""
        return cls(re.sub(r"\\\r?\n", " ", without_comments(text)).strip(), (), ())

    @classmethod
    def parse(cls, text: str) -> "Command":
        """Read a command, or a path with placeholders, in which # begins no comment.

        Raises:
            BadInput: for unmatched braces or quotes and wrong placeholders.
        """
        placeholders: list[Placeholder] = []
        variables: list[str] = []

        def marked(part: re.Match[str]) -> str:
            if part[0] in ("{{", "}}"):
                return part[0][0]
            if part[0].startswith("$"):
                variables.append(part[0][2:-1])
                return part[0]
            if part[1] is None:
                raise BadInput(f"{text!r} has braces that don't match; write {{{{ for a brace.")
            try:
                placeholders.append(Placeholder.parse(part[1]))
            except BadInput as error:
                raise BadInput(
                    f"{error} For braces that hold no placeholder, write {{{{ and }}}}."
                ) from error
            return f"\ue000{len(placeholders) - 1}\ue001"

        if "\ue000" in text or "\ue001" in text:
            raise BadInput(f"{text!r} must have no characters U+E000 and U+E001.")
        joined = re.sub(r"\\\r?\n", " ", text).strip()  # join lines that end with a backslash
        command = cls(_PARTS.sub(marked, joined), tuple(placeholders), tuple(variables))
        _ = command.words  # raises BadInput for unmatched quotes
        return command

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all values that the command needs."""
        return tuple(
            dict.fromkeys(name for each in self.placeholders for name in each.expression.names)
        )

    @cached_property
    def needs_shell(self) -> bool:
        """True if only a shell can run it, for a redirection, pipe, variable, glob or the like."""
        first = self.simple[0] if self.simple else None
        if first is not None and (
            first.variables or (first.words[:1] and first.words[0] in _OF_SHELLS)
        ):
            return True
        if any(
            token.lastgroup in ("redirection", "operator", "comment") and token[0] != "\n"
            for token in self._tokens()
        ):
            return True
        # shlex keeps these backslashes, a shell does not
        if re.search(r'"[^"]*\\[$`]', self.marked):
            return True
        words = [token[0] for token in self._tokens() if token.lastgroup == "word"]
        return any(
            word.startswith("~")
            or re.search("[$`*?]", _unquoted(word))
            or _NAMES_BY_BRACKETS.fullmatch(_unquoted(word))
            for word in words
        )

    def argv(self, values: Mapping[str, Scalar]) -> list[str]:
        """Return the words that are started for these values: the command's own, or a shell's.

        A word that consists only of empty placeholders is left out.

        Raises:
            BadInput: A placeholder can't be written.
        """
        texts = [placeholder.text(values) for placeholder in self.placeholders]
        if self.needs_shell:
            return [*SHELL, self._for_shell(texts)]
        filled = [(word, _with_texts(word, texts)) for word in self.words]
        return [text for word, text in filled if text or _MARKED.sub("", word) or word == ""]

    def filled(self, texts: Sequence[str]) -> str:
        """Return the command's text as it is, with these texts in place of its placeholders."""
        return _with_texts(self.marked, texts)

    @cached_property
    def words(self) -> list[str]:
        """The command split as a shell would, placeholders marked. Raises BadInput."""
        text = self.marked
        if _DOCUMENT.search(text):  # what stands in a document need not be a shell's words
            text = "".join(each[0] for each in self._tokens() if each.lastgroup != "document")
        try:
            return shlex.split(text)
        except ValueError as error:
            reason = str(error).removesuffix(".").lower()
            split = "it can't be split into words as a shell would"
            raise BadInput(
                f"{split} ({reason} in {shortened(self._as_written())}); close each quote."
            ) from error

    @cached_property
    def simple(self) -> tuple[Simple, ...]:
        """The programs that the command runs, in order."""
        groups: list[list[re.Match[str]]] = [[]]
        subshells: list[tuple[int, ...]] = [()]  # of each group
        waiting: list[list[re.Match[str]]] = []  # those whose documents are still to come
        for token in self._tokens():
            if token.lastgroup == "operator" and (token[0] != "\n" or self._is_of_lines):
                groups.append([])
                around = subshells[-1][:-1] if token[0] == ")" else subshells[-1]
                subshells.append((*around, len(groups)) if token[0] == "(" else around)
            elif token.lastgroup == "document":
                waiting.pop(0).append(token)
            elif token.lastgroup in ("word", "redirection"):
                groups[-1].append(token)
                if _DOCUMENT_BEGINS.fullmatch(token[0]):
                    waiting.append(groups[-1])
        return tuple(
            _simple(group, within) for group, within in zip(groups, subshells, strict=True) if group
        )

    @cached_property
    def programs(self) -> tuple[Simple, ...]:
        """The programs that the command runs, with those in the code of its shells."""
        found: list[Simple] = []
        for each in self.simple:
            found.append(each)
            for code in _shell_code(each):
                with suppress(BadInput):
                    found += Command(code, self.placeholders, self.variables).programs
        return tuple(found)

    @property
    def redirected(self) -> tuple[Simple, str] | None:
        """The program whose output, the command's last, goes to a file, with that file's name.

        None: it goes where the command's own output goes.
        """
        return self._redirected(lambda last: last.launcher not in _NO_TRAINING)

    @property
    def redirected_training(self) -> tuple[Simple, str] | None:
        """The same of code that a shell reads, in which anything may follow the training."""
        return self._redirected(self._may_train)

    def _may_train(self, program: Simple) -> bool:
        """Return whether a program is Python or a launcher, or is given values of the trial."""
        return any(
            _PYTHON.fullmatch(_name(word))
            or _name(word) in LAUNCHERS
            or self.of(word)
            or _ARGUMENTS.search(word)
            for word in program.words
        )

    def _redirected(self, counts: Callable[[Simple], bool]) -> tuple[Simple, str] | None:
        """Return the last program whose output goes to a file, if it counts, and that file."""
        if not self.simple:
            return None
        last = self.simple[-1]
        if last.outputs and counts(last):
            return last, last.outputs[-1]
        for code in _shell_code(last):
            with suppress(BadInput):
                return Command(code, self.placeholders, self.variables).redirected_training
        # exec > log.txt sends there what follows it
        calls = [
            each
            for each in self.simple
            if each.words == ("exec",) and each.subshells == last.subshells[: len(each.subshells)]
        ]
        return next(((each, each.outputs[-1]) for each in calls[-1:] if each.outputs), None)

    def check_lines(self) -> None:
        """Raise BadInput for a line that a shell would run by itself although it continues another.

        A line that begins with - or + continues the line before, which must then end with a
        backslash. A command that ends with &, or whose last line has no program, is refused
        as well.
        """
        if not self._is_of_lines:
            return
        for line in self.marked.splitlines()[1:]:
            if line.strip().startswith(("-", "+")):
                raise BadInput(
                    "lines that go on must end with a backslash in a command with a shell's signs;"
                    " add them."
                )
        signs = [
            token[0]
            for token in self._tokens()
            if token[0].strip() and token.lastgroup != "comment"
        ]
        if signs[-1:] == ["&"]:
            raise BadInput(
                "it must not end with &: a trial ends when its command does; leave the & out."
            )
        ends = [token[0] for token in self._tokens() if token.lastgroup == "operator"]
        # (one; two) > log.txt
        is_of_brackets = ends[-1:] == [")"]
        if self.simple and not self.simple[-1].words and not is_of_brackets:
            raise BadInput(
                "its last line must have a program; end the line before it with a backslash."
            )

    def of(self, word: str) -> list[Placeholder]:
        """Return the placeholders in one of the command's words."""
        return [self.placeholders[int(mark[1])] for mark in _MARKED.finditer(word)]

    def literal(self, word: str) -> bool:
        """Return whether a word has no placeholder and nothing that a shell replaces.

        A command without a shell has nothing that is replaced.
        """
        return not _MARKED.search(word) and not (self.needs_shell and re.search("[$`*?]", word))

    def known_text(self, word: str) -> str:
        """Return a word as far as it is known before a trial, for the search of files in it.

        It is empty if a placeholder or an unknown variable makes it another word, but not if it is
        the code that `bash -c` or `python -c` runs: there a placeholder is 0.
        """
        if re.search(r"\s", word):
            return _MARKED.sub("0", word)
        if self.needs_shell and "PATH" not in word:  # a search path names no inputs
            word = os.path.expandvars(word)
        is_known = not _MARKED.search(word) and not (self.needs_shell and re.search("[$`]", word))
        return word if is_known else ""

    @property
    def _is_of_lines(self) -> bool:
        """True if the end of a line ends a command, as it does if anything else needs a shell.

        Otherwise a line break is no more than a space.
        """
        first = self.marked.split(maxsplit=1)[0] if self.marked else ""
        if first in _OF_SHELLS or _ASSIGNMENT.match(first):
            return True
        kinds = {token.lastgroup for token in self._tokens() if token[0] != "\n"}
        return not kinds.isdisjoint(("redirection", "operator"))

    def _as_written(self, place: int = 0) -> str:
        """Return the text from a place on, for errors."""
        return _with_texts(self.marked[place:], [each.as_written for each in self.placeholders])

    def _tokens(self) -> Iterator[re.Match[str]]:
        """Yield the parts of the text; a document comes after the line that begins it."""
        place, before = 0, ""
        ends: list[str] = []  # last lines of the documents that begin below
        while place < len(self.marked):
            token = _TOKEN.match(self.marked, place)
            if token is None:
                raise BadInput(
                    "it can't be split into words as a shell would, from"
                    f" {self._as_written(place)[:40]!r} on."
                )
            yield token
            place = token.end()
            if token.lastgroup == "word" and _DOCUMENT_BEGINS.fullmatch(before):
                ends.append("".join(shlex.split(token[0])))
            if token.lastgroup != "space":
                before = token[0]
            while token[0] == "\n" and ends:
                document = _document(ends.pop(0), self.marked, place)
                yield document
                place = document.end()

    def _for_shell(self, texts: Sequence[str]) -> str:
        """Return the line of shell with each text in its place, quoted as the place needs it."""
        nests = re.search(r"\$\(|`|<<", self.marked) is not None
        filled, quote, place = [], "", 0
        while place < len(self.marked):
            sign = self.marked[place]
            if (mark := _MARKED.match(self.marked, place)) is not None:
                filled.append(_quoted(texts[int(mark[1])], quote, nests))
                place = mark.end()
                continue
            if sign == "\\" and quote != "'":
                filled.append(self.marked[place : place + 2])
                place += 2
                continue
            if sign in "'\"" and quote in ("", sign):
                quote = "" if quote else sign
            filled.append(" " if sign == "\n" and not quote and not self._is_of_lines else sign)
            place += 1
        return "".join(filled)


def without_comments(text: str) -> str:
    """Return a command without a shell's comments.

    A placeholder in one has no effect, and where lines are joined, one would hide the lines after
    it. A document in the command (<<EOF) has no comments of the shell's.
    """
    if _DOCUMENT.search(text):
        return text
    kept: list[str] = []
    quote, place = "", 0
    while place < len(text):
        sign = text[place]
        if sign == "\\" and quote != "'":
            kept.append(text[place : place + 2])
            place += 2
            continue
        if sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
        if sign == "#" and not quote and (not kept or kept[-1] in _BEFORE_COMMENTS):
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
            continue
        kept.append(sign)
        place += 1
    return "".join(kept)


def _document(end: str, text: str, place: int) -> re.Match[str]:
    """Return the match of a document from a place on, up to the line that ends it."""
    pattern = rf"(?P<document>.*?)(?:^\t*{re.escape(end)}(?:\n|\Z)|\Z)"
    found = re.compile(pattern, re.DOTALL | re.MULTILINE).match(text, place)
    assert found is not None  # without its last line, the rest of the text is the document
    return found


def _shell_code(each: Simple) -> Iterator[str]:
    """Yield the code that a program gives to a shell: the word after -c, or its input."""
    shells = (at for at, word in enumerate(each.words) if SHELL_NAME.fullmatch(_name(word)))
    if (shell := next(shells, None)) is None:
        return
    options = range(shell + 1, len(each.words) - 1)
    place = next((at for at in options if CODE_OPTION.fullmatch(each.words[at])), None)
    if place is None:
        yield from each.documents
    else:
        yield each.words[place + 1]


def _name(word: str) -> str:
    """Return a program's name without its folder."""
    return word.rpartition("/")[2]


def _with_texts(marked: str, texts: Sequence[str]) -> str:
    return _MARKED.sub(lambda mark: texts[int(mark[1])], marked)


def _simple(tokens: Sequence[re.Match[str]], subshells: tuple[int, ...]) -> Simple:
    words: list[str] = []
    assignments: list[tuple[str, str]] = []
    inputs: list[str] = []
    outputs: list[str] = []
    documents: list[str] = []
    redirection = ""
    for token in tokens:
        if token.lastgroup == "document":
            documents.append(token["document"])
            continue
        if token.lastgroup == "redirection":
            redirection = token[0]
            continue
        text = "".join(shlex.split(token[0])) if token[0] not in ("''", '""') else ""
        if redirection:
            if redirection in (">", ">>", ">|", "1>", "1>>", "&>", "&>>") or (
                redirection == ">&" and not re.fullmatch("[0-9]+|-", text)
            ):
                outputs += [text] if text not in ("/dev/stdout", "/dev/stderr") else []
            elif redirection in ("<", "0<"):
                inputs.append(text)
            elif redirection in ("<<<", "0<<<"):
                documents.append(text)
            redirection = ""
        elif not words and (assigned := _ASSIGNMENT.match(text)):
            assignments.append((assigned[0].rstrip("+="), text[assigned.end() :]))
        else:
            words.append(text)
    files = tuple(inputs), tuple(outputs)
    words = _split_by_env(words)
    return Simple(tuple(words), tuple(assignments), *files, tuple(documents), subshells)


def _split_by_env(words: list[str]) -> list[str]:
    """Return a program's words as `env -S 'python train.py'` starts them, which splits one."""
    env = next((place for place, word in enumerate(words[:3]) if _name(word) == "env"), None)
    if env is None:
        return words
    for place, word in enumerate(words[env + 1 :], start=env + 1):
        if not word.startswith("-") and not _ASSIGNMENT.match(word):
            break
        split = _SPLITS.match(word)
        if split is None:
            continue
        text, rest = word[split.end() :], words[place + 1 :]
        if not text and rest:
            text, rest = rest[0], rest[1:]
        with suppress(ValueError):  # quotes that don't match: env says so
            return [*words[:place], *shlex.split(text), *rest]
    return words


def _unquoted(word: str) -> str:
    """Return the part of a word that a shell interprets.

    It interprets nothing in single quotes, and `$` and backticks in double quotes.
    """
    word = re.sub(r"'[^']*'|\\.", "", word)
    return re.sub(r'"((?:[^"\\]|\\.)*)"', lambda quoted: re.sub("[*?]", "", quoted[1]), word)


def _quoted(text: str, quote: str, nests: bool) -> str:
    """Return a text quoted for a shell, to stand within the given kind of quotes or without any."""
    if isinstance(text, Variable):
        return {"": f'"${{{text}}}"', '"': f"${{{text}}}", "'": f"'\"${{{text}}}\"'"}[quote]
    if not text or _PLAIN.fullmatch(text):
        return text
    if nests:
        raise BadInput(
            f"{text!r} can't stand in a command with $(), backticks or <<; use letters, digits and"
            " _ alone."
        )
    if quote == "'":
        return text.replace("'", "'\\''")
    return re.sub(r'(["$`\\])', r"\\\1", text) if quote == '"' else shlex.quote(text)
