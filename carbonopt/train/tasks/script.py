"""A training script of the user's own, run as it is: a command with placeholders for the dimensions of the search."""

import ast
import os
import shlex
import shutil
import string
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from carbonopt.core import events
from carbonopt.core.config import Space, Workload, values_of
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput, hint, shortened
from carbonopt.core.quality import Quality
from carbonopt.core.trial import Program, TrialSpec
from carbonopt.train.tasks.base import Card, Task

# What a command may name beside the dimensions, and what stands there in a trial.
_PLACEHOLDERS = ("seed", "trial", "world_size", "gradient_accumulation_steps", "output_dir")
# Programs, and modules of `python -m`, that start the ranks themselves.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ON_EACH_MACHINE = ("torchrun", "torch.distributed.run")  # of those; the others start ranks on other machines, too
_LONGEST_ARGUMENT = 2**17 - 1  # bytes: MAX_ARG_STRLEN of Linux, with its end
_NOT_A_SCRIPTS = ("model", "tokenizer", "dataset", "sequence_length", "eval_batch_size_per_gpu")


class ScriptWorkload(Workload, extra="forbid"):
    task: Literal["script"] = "script"
    command: Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
    folder: str = "."  # in which it runs; the study file's, unless that says another one
    files: tuple[str, ...] = ()  # that it reads, beside those that the command names; files and folders
    steps: int | None = Field(default=None, ge=1)  # of a training, where the script doesn't say
    warm: bool = False  # trials are forked from a process that has imported what the script imports

    def faults(self) -> dict[str, bool]:
        given = [name for name in _NOT_A_SCRIPTS if getattr(self, name) is not None]
        given += [name for name in ("training_arguments", "deepspeed") if getattr(self, name)]
        return {f"a script has no {', '.join(given)}: put it into the script": bool(given)}


class Script(Task):
    settings = ScriptWorkload
    workload: ScriptWorkload
    qualities = ()
    card = Card("other", "Other", "a model")
    own_dimensions = True

    def check(self, space: Space) -> None:
        """What the command names has to be there, and every dimension has to be in it."""
        folder, words = Path(self.workload.folder), self._words()
        if not folder.is_dir():
            raise BadInput(f"workload.folder: no folder {folder}; give the one in which the command runs.")
        for name in space.own:
            if not name.isidentifier() or name in _PLACEHOLDERS:
                raise BadInput(
                    f"search.space.{name}: a dimension's name must be a word of letters, digits and _, and none of "
                    f"{', '.join(_PLACEHOLDERS)}, which carbonopt fills in."
                )
        named = {name for word in words for name in placeholders(word)}
        known = [*space.domains(), *_PLACEHOLDERS]
        if unknown := sorted(named - set(known)):
            raise BadInput(f"workload.command: unknown placeholder {{{unknown[0]}}}; {hint(unknown[0], known)}")
        if unused := [name for name in space.domains() if name not in named]:
            must = "workload.command must have a placeholder for each dimension of search.space"
            raise BadInput(f"{must}, but has none for {unused[0]}; put {{{unused[0]}}} into it, or leave it out there.")
        batches = ("global_batch_size", "micro_batch_size_per_gpu")
        if "gradient_accumulation_steps" in named and any(space[name] is None for name in batches):
            must = "workload.command: {gradient_accumulation_steps} needs both batch sizes in search.space"
            raise BadInput(f"{must}; add {' and '.join(name for name in batches if space[name] is None)} there.")
        self._check_arguments(space, words)
        self._check_program(folder, words)
        if self.workload.warm and self.script is None:
            must = "workload.warm: true needs a command that begins with `python FILE` or `python -m MODULE`"
            raise BadInput(f"{must}, but it is {self.workload.command!r}; leave warm out.")
        for file in self.workload.files:
            if not Path(file).exists():
                raise BadInput(f"workload.files: there is no {file}; give existing files or folders.")

    @staticmethod
    def _check_arguments(space: Space, words: list[str]) -> None:
        """The operating system has to take them."""
        values = {f"search.space.{name}": values_of(domain) for name, domain in space.domains().items()}
        for key, texts in {"workload.command": words, **values}.items():
            for text in map(str, texts):
                if "\0" in text or len(text.encode()) > _LONGEST_ARGUMENT:
                    must = f"a word of a command must have no NUL and at most {_LONGEST_ARGUMENT} bytes"
                    raise BadInput(f"{key}: {must}, but is {shortened(text)} ({len(text.encode())} bytes).")

    def _check_program(self, folder: Path, words: list[str]) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        named = str(folder / words[0]) if "/" in words[0] else words[0]
        if (program := shutil.which(named, path=path)) is None:
            why = f"no program {words[0]} is on PATH or, as a path, in {folder}"
            if Path(named).exists():
                why = f"{named} can't be executed"
            raise BadInput(f"workload.command: {why}; give one that can be, such as `python FILE`.")
        for word in words:
            if word.endswith(".py") and not placeholders(word) and not (folder / word).is_file():
                raise BadInput(f"workload.command: no file {folder / word}; give an existing one, or workload.folder.")
        # Of another Python than this one it isn't known what it can run.
        if self.script is None or Path(program).resolve() != Path(sys.executable).resolve():
            return
        kind, name = self.script
        if kind == "module" and PathFinder.find_spec(name.partition(".")[0], [str(folder), *sys.path]) is None:
            why = f"this Python finds no module {name}"
            raise BadInput(f"workload.command: {why}; install it, or give workload.folder.")
        if kind == "file" and not placeholders(words[1]):
            try:
                ast.parse(Path(name).read_bytes())
            except (SyntaxError, ValueError) as error:
                raise BadInput(f"workload.command: {name} is no Python that runs: {error}; mend it.") from error

    def input_files(self) -> tuple[str, ...]:
        named = (str(Path(self.workload.folder, word)) for word in self._words() if not placeholders(word))
        return tuple(dict.fromkeys([*(file for file in named if Path(file).is_file()), *self.workload.files]))

    def program(self, spec: TrialSpec, quality: Quality) -> Program:
        output_dir = str(Path(spec.trial_dir) / "output")
        return Program(
            argv=tuple(self.argv(spec.params, spec.seed, spec.number, output_dir)),
            folder=self.workload.folder,
            environment={
                events.QUALITY: quality.name,
                events.DIRECTION: quality.direction,
                events.RANKS: str(spec.params.world_size),
                events.TOTAL_STEPS: str(self.workload.steps or ""),
            },
            starts_ranks=self.starts_ranks,
            on_each_machine=not self.starts_ranks or self._launcher in _ON_EACH_MACHINE,
            warm=self.workload.warm,
        )

    def argv(self, params: TrialParams, seed: int, trial: int, output_dir: str) -> list[str]:
        """The command's words for one configuration."""
        values = {**params.as_record(), "seed": seed, "trial": trial, "output_dir": output_dir}
        texts = {name: _text(value) for name, value in values.items()}
        return [word.format_map(texts) for word in self._words()]

    @property
    def takes_seed(self) -> bool:
        return any("seed" in placeholders(word) for word in self._words())

    @property
    def starts_ranks(self) -> bool:
        """Whether the command is a launcher's, which starts a process for each rank itself."""
        return self._launcher in (*_LAUNCHERS, *_LAUNCHER_MODULES)

    @property
    def _launcher(self) -> str:
        """The program, or the module of `python -m`."""
        words = self._words()
        return words[2] if len(words) > 2 and words[1] == "-m" else Path(words[0]).name

    @property
    def script(self) -> tuple[str, str] | None:
        """Of a command that Python runs: "file" and its path, or "module" and its name; None: of another."""
        words = self._words()
        if not Path(words[0]).name.startswith("python") or len(words) < 2 or self.starts_ranks:
            return None
        if words[1] == "-m" and len(words) > 2:
            return "module", words[2]
        return None if words[1].startswith("-") else ("file", str(Path(self.workload.folder, words[1])))

    def _words(self) -> list[str]:
        try:
            return shlex.split(self.workload.command)
        except ValueError as error:
            raise BadInput(f"workload.command can't be split into words as a shell would: {error}.") from error


def placeholders(word: str) -> list[str]:
    """The names in braces; `{{` and `}}` are braces. Raises BadInput for what is no plain name."""
    try:
        parts = list(string.Formatter().parse(word))
    except ValueError as error:
        raise BadInput(f"workload.command: {word!r} has braces that don't match; write {{{{ for a brace.") from error
    named = [(name, form, conversion) for _, name, form, conversion in parts if name is not None]
    if any(not name.isidentifier() or form or conversion for name, form, conversion in named):
        raise BadInput(f"workload.command: {word!r} must have plain names in braces; write {{{{ for a brace.")
    return [name for name, _, _ in named]


def _text(value: Any) -> str:
    """A value as it stands in a command; of a flag as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
