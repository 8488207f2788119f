"""The task of running a user's own training script, unchanged.

The script is started by a command with placeholders for the dimensions of the search.
"""

import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carbonopt.core import channel
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.errors import BadInput
from carbonopt.core.quality import Quality
from carbonopt.core.values import Frozen, Scalar
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.quality_source import QualitySource
from carbonopt.spec.space_settings import Space
from carbonopt.spec.trial_spec import Program, TrialSpec
from carbonopt.spec.workload_settings import Workload
from carbonopt.train.scripts import script_check, script_sources
from carbonopt.train.scripts.command import LAUNCHERS, Command, Simple
from carbonopt.train.scripts.command_files import CommandFiles
from carbonopt.train.scripts.config_template import ConfigTemplate
from carbonopt.train.scripts.script_values import PLACEHOLDERS, with_batches
from carbonopt.train.tasks.task import Card, Task

# Modules of `python -m` that start the ranks themselves.
_LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
)
# Launchers that are started on each machine; the others also start the ranks of other machines.
_ON_EACH_MACHINE = ("torchrun", "torch.distributed.run")
# Settings of other workloads that a script has to define by itself.
_NOT_A_SCRIPTS = ("model", "tokenizer", "dataset", "sequence_length", "eval_batch_size_per_gpu")


class TemplateFile(Frozen):
    """A configuration file with placeholders, read together with the study file that names it."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^/\x00]+$")]
    """A [configuration file](script.md#a-configuration-file) with placeholders; write
    `config_template: FILE`."""

    text: str = Field(max_length=2**20)
    """The text of that file, which the study reads itself."""


class ScriptWorkload(Workload, extra="forbid"):
    task: Literal["script"] = "script"
    command: Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
    """The command, with a [placeholder](script.md#the-command) for each dimension."""

    config_template: TemplateFile | None = None
    """A configuration file with placeholders; `{config}` in the command is the path of a trial's
    copy of it."""

    folder: str = "."
    """The folder in which the command runs."""

    files: tuple[str, ...] = ()
    """Files that the script reads, in addition to those that carbonopt [finds](script.md#files)."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of a trial, if the script doesn't report them."""

    warm: bool = False
    """Forks trials from a process that has already imported what the script imports."""

    quality_from: QualitySource | None = None
    """The place from which the quality is read, if the script doesn't report it."""

    keep_outputs: Literal["winner", "all", "none"] = "winner"
    """The trials whose `{output_dir}` is kept: `winner`, `all` or `none`."""

    def violations(self) -> dict[str, bool]:
        given = [name for name in _NOT_A_SCRIPTS if getattr(self, name) is not None]
        given += [name for name in ("training_arguments", "deepspeed") if getattr(self, name)]
        return {f"a script has no {', '.join(given)}: put it into the script": bool(given)}


class Script(Task):
    settings = ScriptWorkload
    workload: ScriptWorkload
    qualities = ()
    card = Card("other", "Other", "a model")
    own_dimensions = True

    def check(self, space: Space, launch: Launch) -> None:
        """Check that the files of the command exist and that it uses every dimension.

        Raises:
            BadInput: if something is missing or wrong.
        """
        script_check.check(self, space, launch)

    @property
    def tells_steps(self) -> bool:
        return script_sources.has_lines(self)

    def notes(self, space: Space, quality: Quality) -> tuple[str, ...]:
        return script_check.notes(self, space, quality)

    @cached_property
    def command_files(self) -> CommandFiles:
        """The files that the command runs and names, as they are when first asked for."""
        return script_sources.command_files(self)

    def program_files(self) -> tuple[str, ...]:
        return tuple(map(str, self.command_files.program))

    def watched_folders(self) -> tuple[str, ...]:
        """Return the folders in which trials may leave files for others.

        They are those of its programs, and all others that these or the command name.
        """
        files = self.command_files
        own = (path.parent for path in files.program)
        return tuple(dict.fromkeys(map(str, (*own, *files.folders))))

    def input_files(self) -> tuple[str, ...]:
        files = self.command_files
        return tuple(
            dict.fromkeys([*map(str, (*files.program, *files.named)), *self.workload.files])
        )

    def program(self, spec: TrialSpec, quality: Quality) -> Program:
        trial_dir = Path(spec.trial_dir)
        folders = spec.output_dir, spec.checkpoint_dir
        values = self.values(spec.params, spec.seed, spec.number, *folders)
        template = self.template(values)
        keeps_checkpoints = self.keeps_checkpoints
        if template is not None:
            values["config"] = str(trial_dir / template.copy_name)
        source = self.workload.quality_from
        if source is not None and source.file is not None:
            source = source.model_copy(update={"file": filled_path(source.file, values)})
        return Program(
            argv=tuple(self.command.argv(values)),
            folder=self.workload.folder,
            environment={
                channel.QUALITY: quality.name,
                channel.DIRECTION: quality.direction,
                channel.RANKS: str(spec.params.world_size),
                channel.TOTAL_STEPS: str(self.workload.steps or ""),
                **({channel.CONTINUES: "1"} if keeps_checkpoints and spec.attempt > 1 else {}),
            },
            files={} if template is None else {str(values["config"]): template.filled(values)},
            quality_from=source,
            starts_ranks=self.starts_ranks,
            on_each_machine=self.launcher is None or self.launcher.launcher in _ON_EACH_MACHINE,
            uses_deepspeed=self.uses_deepspeed,
            has_lines=script_sources.surely_has_lines(self),
            warm=self.workload.warm,
            keeps_checkpoints=keeps_checkpoints,
        )

    def shown(self, params: TrialParams, seed: int, trial: int) -> str:
        """Return the command with the values of a configuration, for people to read."""
        values = self.values(params, seed, trial, "output", "checkpoints") | {"config": "config"}
        argv = self.command.argv(values)
        return argv[-1] if self.command.needs_shell else shlex.join(argv)

    @staticmethod
    def values(
        params: TrialParams, seed: int, trial: int, output_dir: str, checkpoint_dir: str
    ) -> dict[str, Scalar]:
        """Return the value of each placeholder in a trial, except `{config}`.

        Raises:
            BadInput: if the batch sizes don't go with the number of ranks.
        """
        own: dict[str, Scalar] = {"seed": seed, "trial": trial}
        own |= {"output_dir": output_dir, "checkpoint_dir": checkpoint_dir}
        return with_batches(params.as_record()) | own

    def template(self, known: Mapping[str, Scalar]) -> ConfigTemplate | None:
        """Return the template of the configuration file, or None if there is no such file.

        Args:
            known: the placeholders that it may use.
        """
        file = self.workload.config_template
        return None if file is None else ConfigTemplate(file.name, file.text, frozenset(known))

    @cached_property
    def command(self) -> Command:
        """The parsed command.

        Raises:
            BadInput: if the command can't be parsed.
        """
        try:
            return Command.of_shell(self.workload.command)
        except BadInput as error:
            raise BadInput(f"workload.command: {error}") from error

    @property
    def takes_seed(self) -> bool:
        return "seed" in self._names

    @property
    def keeps_checkpoints(self) -> bool:
        """True if the script saves itself, and goes on from there when it is started again."""
        return "checkpoint_dir" in self._names

    @cached_property
    def _names(self) -> set[str]:
        """The names of the placeholders that the command and the configuration file have."""
        names = set(self.command.names)
        if (template := self.template(dict.fromkeys(PLACEHOLDERS, 0))) is not None:
            names |= set(template.names)
        return names

    @cached_property
    def imported(self) -> tuple[set[str], ...]:
        """The top-level modules that each of the command's Python files imports."""
        return tuple(script_sources.imported(self))

    @property
    def uses_deepspeed(self) -> bool:
        """True if the script trains with DeepSpeed, as far as its command and source show."""
        return script_sources.uses_deepspeed(self)

    @property
    def starts_ranks(self) -> bool:
        """True if the command is a launcher's, which starts a process for each rank itself."""
        return self.launcher is not None

    @property
    def launcher(self) -> Simple | None:
        """The command's launcher, also within the code of `bash -c`; None: it has none."""
        known = (*LAUNCHERS, *_LAUNCHER_MODULES)
        return next((each for each in self.command.programs if each.launcher in known), None)

    @property
    def main(self) -> Simple:
        """The program of the command that trains.

        It is the first launcher; without one, the first Python; without one, the last program.
        """
        programs = [each for each in self.command.simple if each.words]
        if not programs:
            raise BadInput(
                f"workload.command must have a program, but is {self.workload.command!r}."
            )
        launchers = (each for each in programs if each is self.launcher)
        pythons = (
            each for each in programs if each.started[0].rpartition("/")[2].startswith("python")
        )
        return next(launchers, None) or next(pythons, None) or programs[-1]

    @property
    def script(self) -> tuple[str, str] | None:
        """The script that Python runs: "file" and its path, or "module" and its name.

        None if the command needs a shell, starts the ranks itself or is not a plain call of Python.
        """
        words = self.command.words
        if (
            self.command.needs_shell
            or not Path(words[0]).name.startswith("python")
            or len(words) < 2
        ):
            return None
        if self.starts_ranks:
            return None
        if words[1] == "-m" and len(words) > 2:
            return "module", words[2]
        return (
            None
            if words[1].startswith("-")
            else ("file", str(Path(self.workload.folder, words[1])))
        )


def filled_path(path: str, values: Mapping[str, Scalar]) -> str:
    """Return a path with the values of its placeholders.

    Raises:
        BadInput: if the path can't be parsed, or a placeholder is unknown.
    """

    command = Command.parse(path)
    texts = [placeholder.text(values) for placeholder in command.placeholders]
    return command.filled(texts)
