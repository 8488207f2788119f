"""`carbonopt init`: ask six questions, or take options, and write a study file."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from carbonopt.core.errors import BadInput, CarbonoptError, printable, shortened
from carbonopt.core.files import user_path

if TYPE_CHECKING:
    from carbonopt.study_file.new_study import NewStudy, UsersData

Answer = TypeVar("Answer")
_OF_SCRIPTS = ("--command", "--values")
_OF_MODELS = ("--data", "--column", "--model", "--reward")
_COLUMN, _VALUES = "--column", "--values"


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


def init(
    task: Annotated[
        str | None, _option("--task", "TASK", "The kind of training, such as sft.")
    ] = None,
    data: Annotated[
        str | None, _option("--data", "DATA", "A file, a folder, a built-in data set or a hub's.")
    ] = None,
    column: Annotated[
        list[str] | None, _option(_COLUMN, "KEY=NAME", "Such as label_column=topic; repeatable.")
    ] = None,
    model: Annotated[
        str | None, _option("--model", "MODEL", "A folder, OWNER/NAME of a hub, or from_config.")
    ] = None,
    reward: Annotated[
        str | None, _option("--reward", "REWARD", "Task rlhf: FILE.py:FUNCTION or a model.")
    ] = None,
    command: Annotated[
        str | None, _option("--command", "COMMAND", "Task script: with {learning_rate} and so on.")
    ] = None,
    values: Annotated[
        list[str] | None,
        _option(_VALUES, "NAME=VALUES", "Task script: n=8,16 or lr=1e-5..1e-3; repeatable."),
    ] = None,
    target: Annotated[
        str | None, _option("--target", "TARGET", "Such as 0.9, accuracy=0.9 or bleu>=30.")
    ] = None,
    gpus: Annotated[str | None, _option("--gpus", "GPUS", "Such as 0,1, or none.")] = None,
    country: Annotated[
        str | None, _option("--country", "CODE", "Whose electricity: USA, DEU, ….")
    ] = None,
    budget: Annotated[
        str | None, _option("--budget", "BUDGET", "Such as 20 (trials) or 8h.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="STUDY.yaml", help="The new file.", parser=user_path)
    ] = Path("study.yaml"),
) -> None:
    """Write a study file from six answers and a look at your data and GPUs.

    At a terminal it asks for what no option gives, with a proposal for each answer.
    """
    from carbonopt.study_file.new_study import check_free, study_text, write_checked

    check_free(out)
    options = {
        "--task": task,
        "--data": data,
        "--model": model,
        "--reward": reward,
        "--command": command,
        "--target": target,
        "--gpus": gpus,
        "--country": country,
        "--budget": budget,
    }
    several = {_COLUMN: _by_name(_COLUMN, column), _VALUES: _by_name(_VALUES, values)}
    new = _Interview(options, several, sys.stdin.isatty()).new_study(out.stem)
    write_checked(out, study_text(new, out.absolute().parent))
    _say_written(new, out)


def _by_name(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Return the values of an option that is given as NAME=VALUE, by their names."""
    by_name: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip() or name.strip() in by_name:
            raise BadInput(f"{option} must be NAME=VALUE, each name once, but got {text!r}.")
        by_name[name.strip()] = value.strip()
    return by_name


def _say_written(new: "NewStudy", path: Path) -> None:
    from carbonopt.study_file.init_answers import typed

    shown = shlex.quote(typed(path))
    print(printable(f"{path} is written and valid: {new.task}."))
    if new.data is not None and new.data.look.unread:
        print(printable(f"note: {_unread_text(new.data)}"), file=sys.stderr)
    for name in new.hub_names:
        print(printable(f"  There is no folder {name} here, so it is taken for the hub's."))
    print(printable(f"Next:\n  carbonopt check {shown}\n  carbonopt run {shown}"))


def _unread_text(data: "UsersData") -> str:
    """Say which columns with text the study doesn't read, and what to do if it should."""
    from carbonopt.core.format import quoted_names

    look = data.look
    read = quoted_names([name for name in look.columns.values() if name])
    return (
        f"the columns {read} are read, but not {quoted_names(look.unread)}. If the model needs"
        " several columns as its input, write them into one, and give that one."
    )


@dataclass(frozen=True)
class _Interview:
    """The questions; an answer that an option gives is not asked for."""

    options: Mapping[str, str | None]
    several: Mapping[str, dict[str, str]]  # of options that are NAME=VALUE
    at_terminal: bool

    def new_study(self, name: str) -> "NewStudy":
        """Return the study that the answers describe, called by this name."""
        from carbonopt.study_file import init_answers as answers
        from carbonopt.study_file.new_study import NewStudy

        here = Path.cwd()
        if self.options["--task"] is None and not self.at_terminal:
            is_script = self.options["--command"] is not None
            self._check_none_missing(_OF_MODELS if is_script else (*_OF_SCRIPTS, "--reward"))
        data_here = answers.proposed_data(here)
        likely = self._likely_task(data_here)
        task = self._ask("--task", "1/6 Task", likely, answers.check_task)
        self._check_options(task)
        parts: dict[str, Any] = {}
        if task == "script":
            command = self._ask("--command", "2/6 Command", None, str)
            parts |= {"command": command, "values": self._values(command)}
        else:
            look = partial(
                answers.look_at_data,
                task=task,
                columns=self.several[_COLUMN],
                ask_column=self._ask_column if self.at_terminal else None,
            )
            proposal = answers.proposed_data(here, task) or next(
                iter(answers.builtins_of(task)), None
            )
            parts["data"] = self._ask("--data", "2/6 Data", proposal, look)
            find = partial(answers.find_model, task=task)
            question = "3/6 Model (a folder, OWNER/NAME of the hub, or from_config)"
            parts["model"] = self._ask("--model", question, answers.proposed_model(here), find)
        if task == "rlhf":
            question = "    its reward (FILE.py:FUNCTION or a model)"
            parts["reward"] = self._ask("--reward", question, None, answers.find_reward)
        target = answers.proposed_target(task, parts.get("data"), parts.get("model"))
        read_target = partial(answers.parse_target, task=task)
        question = "4/6 Target (what is proposed is a guess; the first trials show what is reached)"
        parts["target"] = self._ask("--target", question, target, read_target)
        return NewStudy(name=name, task=task, **parts, **self._where_and_how_long())

    def _where_and_how_long(self) -> dict[str, Any]:
        from carbonopt.study_file import init_answers as answers

        is_asked = self.at_terminal and self.options["--gpus"] is None
        seen = _gpus_here() if is_asked else None
        gpus = self._ask("--gpus", "5/6 GPUs (numbers, or none)", seen, answers.parse_gpus)
        question = "    country of their electricity (three letters, such as USA)"
        country = self._ask("--country", question, None, answers.check_country)
        question = "6/6 How long (trials such as 20, hours such as 8h, or both)"
        budget = self._ask("--budget", question, "20", answers.parse_budget)
        return {"gpus": gpus, "country": country, "budget": budget}

    def _likely_task(self, data_here: str | None) -> str:
        """Return the task to propose, by the columns of the data."""
        from carbonopt.study_file.init_answers import proposed_task

        if self.options["--command"] is not None:
            return "script"
        if self.options["--task"] is not None or not self.at_terminal:
            return proposed_task(None)
        try:
            return proposed_task(self.options["--data"] or data_here)
        except BadInput:  # the question about the data says what is wrong with it
            return proposed_task(None)

    def _check_options(self, task: str) -> None:
        """Check that the options go with the task and, without a terminal, that none is missing."""
        foreign = list(_OF_MODELS if task == "script" else _OF_SCRIPTS)
        if task not in ("script", "rlhf"):
            foreign.append("--reward")
        for option in foreign:
            if self.options.get(option) is not None or self.several.get(option):
                raise BadInput(f"{option} does not go with the task {task}; leave it out.")
        if not self.at_terminal:
            self._check_none_missing(foreign)

    def _check_none_missing(self, foreign: Sequence[str]) -> None:
        """Check that all options are given but those that do not go with the task."""
        missing = [
            option
            for option, given in self.options.items()
            if given is None and option not in foreign
        ]
        if missing:
            raise BadInput(
                f"without a terminal, options must answer all questions, but"
                f" {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; give"
                f" {'it' if len(missing) == 1 else 'them'}."
            )

    def _ask_column(self, key: str, columns: Sequence[str], proposal: str | None) -> str:
        def known(answer: str) -> str:
            if answer not in columns:
                raise BadInput(f"it must be one of these columns, but is {shortened(answer)}.")
            return answer

        of = f"{key.replace('_', ' ')}, one of: {', '.join(columns)}"
        option = f"{_COLUMN} {key}=NAME"
        if proposal is not None:
            return self._ask(option, f"    its {of}", proposal, known)
        question = f"    its {of}; or Enter for other data"
        return self._ask(option, question, None, known, back="Give other data.")

    def _values(self, command: str) -> dict[str, Any]:
        """Return the values of each dimension of a script."""
        from carbonopt.study_file import init_answers as answers

        names = answers.dimensions_of(command)
        for name in self.several[_VALUES]:
            if name not in names:
                raise BadInput(
                    f"{_VALUES} {name}=…: the command has no placeholder {{{name}}}, but"
                    f" {', '.join(names)}."
                )
        values_of = {}
        for number, name in enumerate(names):
            option = f"{_VALUES} {name}=VALUES"
            question = f"{'   ' if number else '3/6'} Values of {name} (8,16 or 1e-5..1e-3)"
            read = partial(answers.parse_values, name)
            given = self.several[_VALUES].get(name)
            values_of[name] = self._ask(
                option, question, answers.proposed_values(name), read, given
            )
        return values_of

    def _ask(
        self,
        option: str,
        question: str,
        proposal: str | None,
        read: Callable[[str], Answer],
        given: str | None = None,
        back: str | None = None,
    ) -> Answer:
        """Return an answer; at the terminal, a wrong one is asked for again.

        Args:
            back: for a question that belongs to another one: the error that an empty answer raises,
                so that the other question is asked again.

        Raises:
            BadInput: if a given answer is wrong, the option is missing, the input ends, or an
                empty answer asks for the question before.
        """
        given = self.options.get(option) if given is None else given
        if given is not None:
            return read(given)
        if not self.at_terminal:
            raise BadInput(f"{option} is missing, and there is no terminal to ask at; give it.")
        prompt = printable(question if proposal is None else f"{question} [{proposal}]")
        while True:
            try:
                answer = input(f"{prompt}: ").strip() or proposal
            except EOFError as error:
                print()
                raise _InputEnded(
                    f"the input ended at the question for {option}; no file was written."
                ) from error
            except UnicodeDecodeError:
                print("    An answer must be UTF-8.")
                continue
            if answer is None:
                if back is not None:
                    raise BadInput(back)
                print("    An answer is needed.")
                continue
            try:
                return read(answer)
            except _InputEnded:  # at a question that belongs to this one
                raise
            except BadInput as error:
                print(printable(f"    {error}"))


class _InputEnded(BadInput):
    """Error: nobody answers any more."""


def _gpus_here() -> str:
    """Return the numbers of this machine's GPUs, or `none`."""
    from carbonopt.energy.hardware import permitted_gpus

    try:
        gpus = permitted_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except CarbonoptError:
        print("    No GPU was found; `carbonopt doctor` says why.")
        return "none"
    return ",".join(map(str, gpus)) or "none"
