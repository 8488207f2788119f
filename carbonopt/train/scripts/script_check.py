"""Checks of a script's command before anything is started, and notes for its user."""

import ast
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import is_file, is_folder, is_there
from carbonopt.core.quality import Quality
from carbonopt.core.refusals import hint
from carbonopt.core.values import Scalar
from carbonopt.spec.launch_settings import Launch
from carbonopt.spec.space_settings import Range, Space, values_of
from carbonopt.train.scripts.command import Command, as_text
from carbonopt.train.scripts.config_template import ConfigTemplate
from carbonopt.train.scripts.script_sources import (
    has_lines,
    missing_modules,
    options_of_bool,
    python_paths,
    shell_script,
    variables_of_bool,
    working_folder,
)
from carbonopt.train.scripts.script_values import BATCHES, PLACEHOLDERS, derived, points

if TYPE_CHECKING:
    from carbonopt.train.tasks.script import Script

# bytes: Linux's MAX_ARG_STRLEN, less the end of the string
_LONGEST_ARGUMENT = 2**17 - 1
# Last words of qualities' names that say which direction is better.
_LESS_IS_BETTER = {"loss", "nll", "error", "err", "ppl", "wer", "cer", "mse", "rmse", "mae", "fid"}
_MORE_IS_BETTER = {"accuracy", "accuracies", "acc", "f1", "auc", "bleu", "precision", "recall"}
_LARGEST_LOOKED_AT = 2**20  # bytes of a file that is searched for placeholders
_OF_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_RANK_OPTIONS = {
    "torchrun": ("--nproc_per_node", "--nproc-per-node"),
    "torch.distributed.run": ("--nproc_per_node", "--nproc-per-node"),
    "torch.distributed.launch": ("--nproc_per_node", "--nproc-per-node"),
    "accelerate": ("--num_processes", "--num-processes", "-n"),
    "accelerate.commands.launch": ("--num_processes", "--num-processes", "-n"),
    "deepspeed": ("--num_gpus",),
    "mpirun": ("-n", "-np"),
    "srun": ("-n", "--ntasks"),
}
_OUTPUT_OPTION = re.compile(
    r"--?(?:(?:save|checkpoint|ckpt|logging|log)[-_]?(?P<path>dir|folder|path)?"
    r"|(?P<output>out|output)[-_]?(?:dir|folder|path)?)|(?P<hydra>hydra\.run\.dir)"
)
# What such an option has where it names no path: a level, a truth value, a format, a number.
_NO_PATH = re.compile(
    r"trace|debug|info|warn(ing)?|error|critical|true|false|yes|no|on|off|none|null|best|last|all"
    r"|jsonl?|csv|tsv|ya?ml|text|table|[0-9.]*",
    re.IGNORECASE,
)
_NO_TEXT = "\0"
_MOST_PARSED = 200  # times that a template is parsed, with other texts in it
# values of the placeholders that are no dimensions
_OTHERS: dict[str, Scalar] = {
    "seed": 0,
    "trial": 0,
    "output_dir": "output",
    "checkpoint_dir": "checkpoints",
    "config": "config",
}
# Programs that have another process start a program, which is no child of theirs.
_ELSEWHERE = (
    *("ssh", "docker", "podman", "kubectl", "tmux", "screen"),
    *("sbatch", "qsub", "bsub", "condor_submit"),
)
_SHELL_ENDS = ("fi", "done", "esac", "}")  # ends of a shell's compound commands


def check(task: "Script", space: Space, launch: Launch) -> None:
    """Raise BadInput for anything that would make every trial fail or train something unintended.

    A trial must train what its configuration says.
    """
    folder = Path(task.workload.folder)
    if not is_folder(folder):
        raise BadInput(
            f"workload.folder: no folder {folder}; give the one in which the command runs."
        )
    _check_dimensions(space)
    known = _known(space)
    template = task.template(dict.fromkeys(known, 0))
    _check_names(task, space, template, known)
    _check_values(task, space, template, launch.world_size)
    _check_apart(task, space, template, launch.world_size)
    _check_arguments(task, space)
    _check_program(task, folder)
    _check_ranks(task, launch)
    _check_output(task)
    _check_booleans(task, space)
    if task.workload.warm and task.script is None:
        must = (
            "workload.warm: true needs a command that begins with `python FILE` or `python -m"
            " MODULE`, without a shell"
        )
        raise BadInput(f"{must}, but it is {task.workload.command!r}; leave warm out.")
    if task.workload.warm:
        _check_same_python(task, folder)
    for file in task.workload.files:
        if not is_there(Path(file)):
            raise BadInput(f"workload.files: there is no {file}; give existing files or folders.")


def _known(space: Space) -> list[str]:
    """Return the names that placeholders may have."""
    of_all = (name for name in PLACEHOLDERS if name != "gradient_accumulation_steps")
    return list(dict.fromkeys([*space.domains(), *derived(space), *of_all]))


def _check_dimensions(space: Space) -> None:
    for name in space.own:
        if name == "gradient_accumulation_steps":
            must = "search.space.gradient_accumulation_steps is derived from the batch sizes"
            raise BadInput(
                f"{must}: give global_batch_size and micro_batch_size_per_gpu in its place."
            )
        if not name.isidentifier() or name in PLACEHOLDERS:
            raise BadInput(
                f"search.space.{name}: a dimension's name must be a word of letters, digits and _,"
                f" and none of {', '.join(PLACEHOLDERS)}, which carbonopt fills in."
            )


def _check_names(
    task: "Script", space: Space, template: ConfigTemplate | None, known: Sequence[str]
) -> None:
    """Raise BadInput unless placeholders are known and each dimension is in a placeholder."""
    command = task.command
    for name in command.variables:
        if name in known:
            raise BadInput(
                f"workload.command: ${{{name}}} is a variable of the shell; write {{{name}}}."
            )
    named = set(command.names) | set(template.names if template else ())
    for name in sorted(named - set(known)):
        if name in (*BATCHES, "gradient_accumulation_steps"):
            must = f"workload.command: {{{name}}} needs a batch size in search.space"
            raise BadInput(
                f"{must}: add {BATCHES[0]} (of all ranks and passes) or {BATCHES[1]}, or both."
            )
        raise BadInput(f"workload.command: unknown placeholder {{{name}}}; {hint(name, known)}")
    if ("config" in command.names) != (template is not None):
        must = (
            "workload.config_template, a file with placeholders, and {config} in workload.command"
            " go together"
        )
        raise BadInput(f"{must}, but only one of them is there; add the other.")
    used = named | {part for name in named for part in derived(space).get(name, ())}
    for name in space.domains():
        if name not in used:
            must = "workload.command must have a placeholder for each dimension of search.space"
            instead = f"put {{{name}}} into it, or leave it out there"
            if (file := _file_with_placeholder(task, name)) is not None:
                instead = (
                    f"{file} has one: give it as workload.config_template, and {{config}} in its"
                    " place"
                )
            elif name == BATCHES[0] and BATCHES[1] in named:
                instead += "; {gradient_accumulation_steps} is made of it, too"
            raise BadInput(f"{must}, but has none for {name}; {instead}.")


def _file_with_placeholder(task: "Script", name: str) -> str | None:
    """Return the name of a file of the command that has this placeholder, as a template would."""
    files = task.command_files
    for file in (*files.program, *files.named):
        if is_file(file) and file.stat().st_size <= _LARGEST_LOOKED_AT:
            text = file.read_bytes().decode(errors="replace")
            if (
                name in ConfigTemplate(file.name, text, frozenset((name,))).names
                and file.suffix != ".py"
            ):
                return file.name
    return None


def _check_values(
    task: "Script", space: Space, template: ConfigTemplate | None, world_size: int
) -> None:
    """Raise BadInput unless all choices give values for placeholders and a valid template."""
    placeholders = [
        each for each in task.command.placeholders if not each.expression.is_name or each.form
    ]
    names = {name for each in placeholders for name in each.expression.names} | set(
        template.names if template else ()
    )
    if names & {*derived(space), *BATCHES}:
        names |= {*BATCHES, "world_size"}
    checked: set[tuple[Scalar, ...]] = set()  # the texts with which the template was parsed
    for point in points(space, names, world_size):
        values = point | _OTHERS
        for placeholder in placeholders:
            placeholder.text(values)
        if template is not None:
            template.filled(values)
            texts = tuple(value for value in point.values() if isinstance(value, str))
            if texts not in checked and len(checked) < _MOST_PARSED:
                template.check(values)
                checked.add(texts)


def _check_apart(
    task: "Script", space: Space, template: ConfigTemplate | None, world_size: int
) -> None:
    """Raise BadInput if two choices of a dimension, or all of a range, are written alike.

    A format such as `:.0e` or arithmetic can make one text of them, which then trains alike.
    """
    placeholders = (*task.command.placeholders, *(template.placeholders if template else ()))
    for name, domain in space.free().items():
        # Others may hide it, as 0 does in {dropout * use_it}: it has to be alike with all of them.
        beside = {part for each in placeholders for part in each.expression.names}
        beside = {*BATCHES, name} if name in BATCHES else beside & set(space.domains()) | {name}
        texts: dict[Scalar, dict[tuple[Scalar, ...], tuple[str, ...]]] = {}
        for point in points(space, beside, world_size):
            others = tuple(value for key, value in point.items() if key in beside - {name})
            values = point | _OTHERS
            written = (*task.command.argv(values), template.filled(values) if template else "")
            texts.setdefault(point[name], {})[others] = written
        first: dict[str, Scalar] = {}
        for value, written_by_others in texts.items():
            other = first.setdefault(repr(written_by_others), value)
            if other != value and not isinstance(domain, Range):
                raise BadInput(
                    f"search.space.{name}: choices must differ in the command, but {other} and"
                    f" {value} are written alike; give the placeholder more digits, or leave one of"
                    " them out."
                )
        if len(texts) > 1 and len(first) == 1:
            raise BadInput(
                f"search.space.{name}: values must differ in the command, but those from"
                f" {min(texts)} to {max(texts)} are written alike; give the placeholder more"
                " digits."
            )


def _rounded(task: "Script", space: Space, template: ConfigTemplate | None) -> Iterator[str]:
    """Yield notes on formats that write other values of a range than the record has."""
    placeholders = (*task.command.placeholders, *(template.placeholders if template else ()))
    for each in dict.fromkeys(placeholders):
        name = each.expression.text
        domain = space.domains().get(name)
        if not isinstance(domain, Range) or each.form[-1:] not in ("e", "E", "f", "F", "g", "G"):
            continue
        for place in (0.137, 0.463, 0.811):
            value = domain.low + place * (domain.high - domain.low)
            if domain.step is not None:
                value = domain.low + domain.step * round((value - domain.low) / domain.step)
            text = each.text({name: value})
            if abs(float(text.replace(",", "").replace("_", "")) - value) > 0.01 * abs(value):
                yield (
                    f"{each.as_written} writes {value:.4g} as {text}, with which the trial trains;"
                    " the record has the value itself, so give it more digits"
                )
                break


def _check_arguments(task: "Script", space: Space) -> None:
    """Raise BadInput for words that the operating system refuses, and values of several words."""
    values = {f"search.space.{name}": values_of(domain) for name, domain in space.domains().items()}
    for key, texts in {"workload.command": task.command.words, **values}.items():
        for text in map(str, texts):
            if _NO_TEXT in text or len(text.encode()) > _LONGEST_ARGUMENT:
                must = f"a word of a command must have no NUL and at most {_LONGEST_ARGUMENT} bytes"
                raise BadInput(
                    f"{key}: {must}, but is {shortened(text)} ({len(text.encode())} bytes)."
                )
    for key, choices in values.items():
        for choice in choices:
            if isinstance(choice, str) and re.match(r"--?[A-Za-z]\S*\s+\S", choice):
                must = (
                    f"{key}: a value is one word of the command, but {choice!r} has an option and"
                    " more"
                )
                raise BadInput(
                    f"{must}; give it as --option=value, or each option a dimension of its own."
                )


def _check_program(task: "Script", base: Path) -> None:
    command, words = task.command, task.main.words
    if command.needs_shell:
        _check_shell(task)
    folder = working_folder(task, base)
    if not command.literal(words[0]) or words[0].startswith("~") or folder is None:
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    named = str(folder / words[0]) if "/" in words[0] else words[0]
    if (program := shutil.which(named, path=path)) is None:
        if words[0] in ("source", ".", "eval", "exec", "export", "time"):
            return
        why = f"no program {words[0]} is on PATH or, as a path, in {folder}"
        if is_there(Path(named)):
            why = f"{named} can't be executed"
        raise BadInput(
            f"workload.command: {why}; give the name or path of one, such as `python FILE`."
        )
    # The first one is the script; others are values of options, which the script may make or look
    # for elsewhere.
    script = next(
        (word for word in words[1:] if word.endswith(".py") and not word.startswith("-")), ""
    )
    if script and "=" not in script and command.literal(script) and not is_file(folder / script):
        raise BadInput(
            f"workload.command: no file {folder / script}; give an existing one, or"
            " workload.folder."
        )
    # It isn't known what another Python than this one can run.
    if task.script is None or Path(program).resolve() != Path(sys.executable).resolve():
        return
    kind, name = task.script
    if (
        kind == "module"
        and PathFinder.find_spec(name.partition(".")[0], [str(folder), *sys.path]) is None
    ):
        why = f"this Python finds no module {name}"
        raise BadInput(f"workload.command: {why}; install it, or give workload.folder.")
    if kind == "file" and command.literal(words[1]):
        _check_source(Path(name))


def _check_shell(task: "Script") -> None:
    """Raise BadInput for a shell's command that no trial can run, or whose program is unseen."""
    command, words = task.command, task.main.words
    if shutil.which("bash") is None:
        raise BadInput(
            "workload.command has a shell's signs, but no bash is on PATH; leave them out, or"
            " install it."
        )
    try:
        command.check_lines()
    except BadInput as error:
        raise BadInput(f"workload.command: {error}") from error
    if words[0] in _SHELL_ENDS:
        raise BadInput(
            "workload.command must have its program outside if, for, while and braces, but it"
            f" ends with {words[0]}; put it into a script, and write `bash run.sh`."
        )
    if re.search(rf"(?<!\S){re.escape(words[0])}\s*\(\s*\)", task.workload.command):
        raise BadInput(
            "workload.command must have its program outside a shell's functions, but it ends"
            f" with the function {words[0]}; put it into a script, and write `bash run.sh`."
        )
    if any(each.words[:2] == ("conda", "activate") for each in command.simple):
        raise BadInput(
            "workload.command: conda activate needs your own shell; write "
            "`conda run --no-capture-output -n NAME python ...`."
        )


def _check_source(source: Path) -> None:
    """Raise BadInput unless Python can run a file, or the __main__.py of a folder."""
    if is_folder(source):
        source = source / "__main__.py"
        if not is_file(source):
            raise BadInput(
                f"workload.command: {source.parent} is a folder without a __main__.py; give the"
                " path of a script."
            )
    if not is_file(source):
        raise BadInput(
            f"workload.command: no file {source}; give an existing one, or workload.folder."
        )
    if source.suffix == ".pyc" or zipfile.is_zipfile(source):
        return  # Python runs it without a source
    try:
        ast.parse(source.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise BadInput(
            f"workload.command: {source} is no Python that runs: {error}; mend it."
        ) from error


def _check_same_python(task: "Script", folder: Path) -> None:
    """Raise BadInput unless the command's Python is this one.

    A warm trial is a fork of a process that needs carbonopt's own libraries.
    """
    word = task.command.words[0]
    named = str(folder / word) if "/" in word else word
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = Path(shutil.which(named, path=path) or named)
    # Pythons of two environments may be links to the same file, so compare folders as well.
    places = [
        (python.parent.resolve(), python.resolve()) for python in (program, Path(sys.executable))
    ]
    if places[0] != places[1]:
        must = f"workload.warm: true forks trials from carbonopt's own Python, {sys.executable}"
        raise BadInput(f"{must}, but the command names another one, {program}; leave warm out.")


def _check_ranks(task: "Script", launch: Launch) -> None:
    """Raise BadInput unless a launcher starts as many ranks as the launch has, on its GPUs."""
    for name in _OF_GPUS:
        if any(each.changes(name) for each in task.command.programs):
            must = (
                f"workload.command must not set or remove {name}: the GPUs that are measured are"
                " those of launch.gpus"
            )
            raise BadInput(f"{must}; leave it out, and give launch.gpus.")
    if task.launcher is None:
        return
    words = task.launcher.started
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    for option in _RANK_OPTIONS.get(task.launcher.launcher, ()):
        for place, word in enumerate(words[:script]):
            given = word.removeprefix(f"{option}=") if word.startswith(f"{option}=") else None
            given = words[place + 1] if word == option and place + 1 < len(words) else given
            here = max(launch.ranks_of_nodes)
            if (
                given is not None
                and given.isdigit()
                and int(given) not in (here, launch.world_size)
            ):
                must = (
                    f"workload.command: {option} must be the ranks of a trial, {launch.world_size},"
                    f" but is {given}"
                )
                raise BadInput(
                    f"{must}; write {option} {{world_size}}, or change launch.gpus and"
                    " gpus_per_trial."
                )


def _check_output(task: "Script") -> None:
    """Raise BadInput if the quality is read in an output that is redirected to a file."""
    source = task.workload.quality_from
    if (source is not None and source.file is not None) or has_lines(task):
        return
    name, redirected = "the command", task.command.redirected
    if redirected is None:
        script = shell_script(task)
        if script is None:
            return
        name, text = script
        with suppress(BadInput):
            redirected = Command.of_shell_script(text).redirected_training
    if redirected is None:
        return
    program, file = redirected
    where = f"{name}'s output goes to {file}, so that the study can't read the quality in it"
    log = "each trial's output is kept in its folder anyway"
    # tee has its own file; nobody reads /dev/null
    copies = program.launcher == "tee" or file.startswith("/dev/")
    other = "" if copies else f", write `2>&1 | tee {file}`,"
    raise BadInput(
        f"workload.command: {where}; leave the redirection out ({log}){other} or give"
        " workload.quality_from with file."
    )


def _check_booleans(task: "Script", space: Space) -> None:
    """Raise BadInput for a dimension whose option argparse reads with type=bool.

    argparse then takes every word but the empty one for true, 0 and "False" as well. fire takes
    every word but "False" and 0 for true.
    """
    for name, domain in space.free().items():
        values = values_of(domain)
        option, texts = _option_of(task, name, values)
        if sum(map(bool, texts)) < 2:
            continue
        alike = f"search.space.{name}: all values train alike"
        is_boolean = all(isinstance(value, bool) for value in values)
        reads_as_false = {"False", "0"} & set(texts)
        if is_boolean and not reads_as_false and any("fire" in each for each in task.imported):
            raise BadInput(
                f"{alike}. fire reads {texts[-1]!r} as text, which counts as true; give the choices"
                ' ["True", "False"], with quotes.'
            )
        for file, names in options_of_bool(task, option) if option else ():
            said = (
                f"{file}: {option} has type=bool, for which every word is true, {texts[-1]!r} as"
                " well"
            )
            long = next((each for each in names if each.startswith("--")), None)
            better = f'action="store_true" and the choices ["{names[0]}", ""]'
            if long is not None:
                choices = f"[{long}, --no-{long[2:]}]"
                better = f"action=argparse.BooleanOptionalAction and the choices {choices}"
            raise BadInput(f"{alike}. {said}; give it {better}, and put {{{name}}} alone.")
        for variable in _variables_of(task, name):
            for file in variables_of_bool(task, variable):
                raise BadInput(
                    f"{alike}. {file} reads {variable} by bool(...), for which every text but the"
                    f" empty one is true, {texts[-1]!r} as well; compare it with a text, or give"
                    ' the choices ["1", ""].'
                )


def _variables_of(task: "Script", name: str) -> Iterator[str]:
    """Yield the variables of the environment that the command sets to a dimension alone."""
    for simple in task.command.simple:
        for variable, value in simple.assignments:
            expressions = [each.expression.names for each in task.command.of(value)]
            if expressions == [(name,)]:
                yield variable


def _option_of(task: "Script", name: str, values: Sequence[Scalar]) -> tuple[str | None, list[str]]:
    """Return the option before a dimension's placeholder, and the texts of the values there.

    It is `--shuffle` for both `--shuffle {shuffle}` and `--shuffle={shuffle}`.
    """
    for each in task.command.programs:
        for place, word in enumerate(each.words):
            for placeholder in task.command.of(word):
                is_code = re.search(r"\s", word)  # its words are those of a program of its own
                if is_code or placeholder.expression.names != (name,):
                    continue
                texts = [placeholder.text({name: value}) for value in values]
                if not word.startswith("-"):
                    return each.words[place - 1] if place else None, texts
                option = word.partition("=")[0] if word.startswith("--") else word[:2]
                return option, texts
    return None, [as_text(value) for value in values]


def notes(task: "Script", space: Space, quality: Quality) -> tuple[str, ...]:
    """Return notes on what doesn't make trials fail but may not be what the user meant."""
    said: list[str] = []
    template = task.template(dict.fromkeys(_known(space), 0))
    if template is not None and template.unknown:
        kept = ", ".join(f"{{{name}}}" for name in template.unknown[:10])
        said.append(
            f"{template.name}: {kept} is kept as it is, because search.space has no such dimension"
        )
    said += _rounded(task, space, template)
    last_word = re.split(r"[\W_]+", quality.name.lower())[-1]
    if last_word in (_LESS_IS_BETTER if quality.direction == "maximize" else _MORE_IS_BETTER):
        bound = "at_most" if quality.direction == "maximize" else "at_least"
        said.append(
            f"target.quality {quality.name} is to be {quality.bound_word} a value, so that"
            f" {'more' if quality.direction == 'maximize' else 'less'} of it is better; if that is"
            f" wrong, write {bound}"
        )
    if "output_dir" not in (*task.command.names, *(template.names if template else ())):
        said += [
            f"{option}: all trials write into the same folder; {{output_dir}} is a folder of each"
            " one's own"
            for option in _fixed_outputs(task)[:1]
        ]
    if (other := _other_python(task)) is not None:
        said.append(
            f"python is {sys.executable} in a trial, not {other}, which your shell finds; name that"
            " to run it"
        )
    said += [
        f"{name} has another process start the program, perhaps elsewhere: its CPU time and other"
        " machines are not measured, and the study may not hear its reports; start the program"
        " itself in the command"
        for name in _starting_elsewhere(task)
    ]
    if not has_lines(task):
        prints = f'it has to print {{"{quality.name}": VALUE}} as a line of JSON, '
        said.append(
            "the script has no lines of carbonopt:"
            f" {'' if task.workload.quality_from else prints}all its energy counts as training, its"
            " imports and evaluations too, and no trial is stopped early"
        )
        # with the lines, each rank compares its GPU with those that are measured
        said += [
            f"{file.name} has {name}: a trial must train on the GPUs that are measured, so leave it"
            " as the study sets it"
            for file, name in _choosing_gpus(task)
        ]
    hides = [value for value in python_paths(task) if "PYTHONPATH" not in value]
    if hides and has_lines(task):
        said.append(
            f"PYTHONPATH={hides[0]} replaces the path by which a Python that lacks carbonopt finds"
            f" it; write PYTHONPATH={hides[0]}:$PYTHONPATH"
        )
    missing = missing_modules(task)
    if missing:
        said.append(f"this Python finds no module {', '.join(missing)}, which the script imports")
    return tuple(said)


def _fixed_outputs(task: "Script") -> list[str]:
    """Return the options for output whose value is a path that all trials have in common.

    The same names are used for flags, levels of a log and files to read. A value without a slash or
    a suffix is a path only if the option is called one, or output.
    """
    found = []
    for word, following in zip(task.main.words, (*task.main.words[1:], "-"), strict=True):
        option, has_value, value = word.partition("=")
        value = value if has_value else following
        named = _OUTPUT_OPTION.fullmatch(option)
        if named is None or value.startswith("-"):
            continue
        if named.lastgroup is None and not re.search(r"/|\.[a-z]\w*$", value):
            continue
        if _NO_PATH.fullmatch(value) or any(task.command.of(value)):
            continue
        if not is_file(Path(task.workload.folder, value)):
            found.append(word)
    return found


def _starting_elsewhere(task: "Script") -> list[str]:
    """Return the command's programs that have another process start a program."""
    words = [word for each in task.command.programs for word in (*each.words[:1], *each.before)]
    names = [word.rpartition("/")[2] for word in words]
    return list(dict.fromkeys(name for name in names if name in _ELSEWHERE))


def _choosing_gpus(task: "Script") -> Iterator[tuple[Path, str]]:
    """Yield the files of the program that set or remove a variable which chooses the GPUs."""
    for file in task.command_files.program:
        if is_file(file) and file.stat().st_size <= _LARGEST_LOOKED_AT:
            text = file.read_bytes().decode(errors="replace")
            yield from ((file, name) for name in _OF_GPUS if _set_in(text, name))


def _set_in(text: str, name: str) -> bool:
    """Return whether a line of Python or shell sets or removes a variable."""
    quoted = rf"""["']?{name}["']?"""
    of_python = rf"environ(?:\[{quoted}\]\s*=(?!=)|\.(?:pop|update)\(\{{?{quoted}\s*[,:=)])"
    of_shell = rf"(?:^|[\s;&|('\"]){name}=|\bunset\s+{name}\b"
    pattern = rf"^[^#\n]*?(?:{of_python}|{of_shell}|putenv\({quoted})"
    return re.search(pattern, text, re.MULTILINE) is not None


def _other_python(task: "Script") -> str | None:
    """Return the python that the user's shell finds if it differs from a trial's, else None."""
    if task.main.words[0] not in ("python", "python3"):
        return None
    of_shell = shutil.which(task.main.words[0])
    ours = shutil.which(task.main.words[0], path=str(Path(sys.executable).parent))
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if (
        of_shell is None
        or ours is None
        or active is None
        or Path(of_shell).parent.samefile(Path(ours).parent)
    ):
        return None
    return of_shell
