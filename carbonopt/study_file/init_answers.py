"""The answers from which a new study file is made: what they may be, and what is proposed."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from symtable import symtable
from typing import Any

from pydantic import ValidationError

from carbonopt.carbon.intensity import country_code, reference_intensity
from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import is_file, is_folder, is_there, parsed_json, read_text, user_path
from carbonopt.core.quality import QUALITIES
from carbonopt.core.refusals import first_error, hint
from carbonopt.core.values import Scalar
from carbonopt.spec.carbon_settings import Carbon
from carbonopt.spec.target_settings import TargetSettings
from carbonopt.study_file.new_study import FROM_CONFIG, ModelChoice, UsersData, flow
from carbonopt.train.data.data_look import (
    HUB_NAME,
    ColumnUnknown,
    choose_columns,
    data_files_in,
    find_data,
    likely_task,
    look_at,
    picture_folder_in,
    possible_inputs,
)
from carbonopt.train.data.opened_files import data_suffix
from carbonopt.train.data.rows import READERS
from carbonopt.train.scripts.command import Command
from carbonopt.train.scripts.script_values import PLACEHOLDERS
from carbonopt.train.tasks.task import TASKS, task_class

_BUILTINS = {"classification": ("digits",), "seq2seq": (), "script": ()}
_TARGET = re.compile(r"(?:(?P<name>[^\s<>=]+)\s*(?P<sign><=|>=|=)\s*)?(?P<value>\S+)")
_RANGE = re.compile(r"(?P<low>[^\s,]+?)\.\.(?P<high>[^\s,]+)")
_BUDGET = re.compile(r"(?P<number>.+?)(?P<unit>h|hours?|trials?)?")
_MOST_PROPOSED = 20  # files that are looked at for a proposal
_MAX_CONFIG_MIB = 4
_MAX_REWARD_MIB = 4
# Proposals of targets that do not come from the user's data.
_PERPLEXITY_NEW, _PERPLEXITY_PRETRAINED, _PREFERENCE_ACCURACY = 60.0, 20.0, 0.7
# The share of the mistakes of always guessing the commonest class that a proposed target removes.
_MISTAKES_REMOVED = 0.8
# Values of a script's dimensions that are proposed, where the dimension has no choices of its own.
_USUAL = {
    "global_batch_size": "8,16,32",
    "micro_batch_size_per_gpu": "4,8,16",
    "learning_rate": "1e-5..1e-3",
    "epochs": "1,2,3",
    "weight_decay": "0.0,0.01,0.1",
    "warmup_ratio": "0.0,0.1",
    "dropout": "0.0,0.1",
    "lora_rank": "8,16,32",
}


def builtins_of(task: str) -> tuple[str, ...]:
    """Return the names of a task's built-in data sets."""
    return _BUILTINS.get(task, ("python-docs",))


def look_at_data(
    answer: str,
    task: str,
    columns: Mapping[str, str],
    ask_column: Callable[[str, Sequence[str], str | None], str] | None = None,
) -> UsersData:
    """Find a data set and look at its first rows.

    Args:
        answer: the user's words: a file, a folder, a built-in data set or a hub's.
        task: the task that is to be trained.
        columns: the columns that the user has named, by their keys.
        ask_column: asks for the column of a key, given the columns that it could be and a proposal
            or None; None: it is not asked.

    Raises:
        BadInput: if there is no such data, a column is missing, or the task can't use what it
            holds.
    """
    source, named = find_data(answer, builtins_of(task)), dict(columns)
    while True:
        try:
            chosen = choose_columns(task, source, named)
        except ColumnUnknown as unknown:
            if ask_column is None:
                raise
            named[unknown.role.key] = ask_column(unknown.role.key, unknown.columns, None)
            continue
        several = None if ask_column is None else possible_inputs(task, source, chosen, named)
        if ask_column is None or several is None:
            return UsersData(source, look_at(task, source, chosen))
        key, possible = several
        named[key] = ask_column(key, possible, possible[0])


def proposed_data(folder: Path, task: str | None = None) -> str | None:
    """Return the data in a folder that is likely meant, from there; None: it has none.

    It is the first file whose columns are known to a task, or else the first. A folder of pictures
    by class comes before plain text and before columns that are not known.

    Args:
        folder: The folder; its folder `data` counts if it has no data file itself.
        task: The task; None: any.
    """
    files = data_files_in(folder) or data_files_in(folder / "data")
    known = next((file for file in files[:_MOST_PROPOSED] if _has_known_columns(file, task)), None)
    is_table = known is not None and data_suffix(known) in READERS
    pictures = None
    if not is_table and task in (None, "classification"):
        pictures = picture_folder_in(folder) or picture_folder_in(folder / "data")
    likely = pictures or known or next(iter(files), None)
    return None if likely is None else typed(likely.relative_to(folder))


def _has_known_columns(file: Path, task: str | None) -> bool:
    try:
        source = find_data(str(file), ())
        if task is None:
            return source.is_plain_text or likely_task(source) is not None
        choose_columns(task, source, {})
    except BadInput:
        return False
    return True


def proposed_task(answer: str | None) -> str:
    """Return the task whose columns some data has; without such data, `causal_lm`."""
    if answer is None:
        return "causal_lm"
    every = sorted({name for task in TASKS for name in builtins_of(task)})
    source = find_data(answer, every)
    if source.keys.get("builtin") == "digits":
        return "classification"
    return likely_task(source) or "causal_lm"


def proposed_model(folder: Path) -> str:
    """Return the model's folder below a folder that is likely meant, or `from_config`."""
    found = (*folder.glob("*/config.json"), *folder.glob("*/*/config.json"))
    return typed(min(found).parent.relative_to(folder)) if found else FROM_CONFIG


def typed(path: Path) -> str:
    """Return a path as a user has to type it, so that it is neither a home nor an option."""
    text = str(path)
    return f"./{text}" if text.startswith(("~", "-")) else text


def check_task(answer: str) -> str:
    """Return a task's name; raises BadInput for another word."""
    if answer not in TASKS:
        raise BadInput(
            f"--task must be a task, but got {shortened(answer)}; {hint(answer, list(TASKS))}"
        )
    return answer


def find_model(answer: str, task: str, option: str = "--model") -> ModelChoice:
    """Find the model that a user means: a folder, a hub's, or a new one (`from_config`).

    Args:
        answer: the user's words.
        task: the task that is to be trained.
        option: the option that the answer is of, for errors.

    Raises:
        BadInput: if there is no such folder, or its model is of another kind than the task's.
    """
    path = user_path(answer, option)
    if answer == FROM_CONFIG and not is_there(path):
        return ModelChoice({}, is_new=True)
    if not is_folder(path):
        if is_there(path) or not HUB_NAME.fullmatch(answer):
            raise BadInput(
                f"{option} must be a folder, a name on the Hugging Face hub or {FROM_CONFIG}, but"
                f" {shortened(answer)} is none."
            )
        return ModelChoice({"name_or_path": answer})
    path = path.absolute()
    text = read_text(path / "config.json", "the model's configuration", _MAX_CONFIG_MIB)
    try:
        config = parsed_json(text)
    except ValueError as error:
        raise BadInput(f"{path / 'config.json'} must be JSON, but isn't: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput(f"{path / 'config.json'} must name a model_type, but names none.")
    is_encoder_decoder = bool(config.get("is_encoder_decoder"))
    if is_encoder_decoder != (task == "seq2seq") and task != "classification":
        kind = "an encoder-decoder" if is_encoder_decoder else "no encoder-decoder"
        raise BadInput(f"{option}: {config['model_type']} is {kind}, but the task is {task}.")
    given = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    positions = next((each for each in given if isinstance(each, int) and each > 0), None)
    return ModelChoice({"name_or_path": str(path)}, positions=positions)


def find_reward(answer: str) -> dict[str, str]:
    """Find what rates completions: FILE.py:FUNCTION, a model's folder or a hub's model.

    Raises:
        BadInput: if there is no such file, function or folder.
    """
    file, colon, function = answer.rpartition(":")
    if colon:
        path = user_path(file, "--reward")
        if not is_file(path) or not function.isidentifier():
            raise BadInput(
                f"--reward must be FILE.py:FUNCTION or a model, but {shortened(answer)} names no"
                " file and function."
            )
        _check_function(path, function)
        return {"python": f"{path.absolute()}:{function}"}
    found = find_model(answer, "classification", "--reward")
    return {"model": str(found.keys.get("name_or_path", answer))}


def _check_function(path: Path, function: str) -> None:
    """Check that a file of Python has a function, without running it.

    Raises:
        BadInput: if it is no Python, or nothing in it has the name.
    """
    text = read_text(path, "the file of --reward", _MAX_REWARD_MIB)
    try:
        names = symtable(text, str(path), "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadInput(f"--reward: {path} must be Python, but isn't: {error}.") from error
    symbols = [names.lookup(name) for name in names.get_identifiers()]
    has = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    if not {function, "__getattr__"} & has and "import *" not in text:
        known = sorted(each.get_name() for each in symbols if each.is_namespace())
        raise BadInput(
            f"--reward must be FILE.py:FUNCTION, but {path} has no function {function};"
            f" {hint(function, known)}"
        )


def parse_gpus(answer: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that an answer names; none for the CPU.

    Raises:
        BadInput: if it is neither `none` nor numbers that differ.
    """
    words = answer.replace(",", " ").split()
    if words in (["none"], ["cpu"], ["[]"]):
        return ()
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise BadInput(
            f"--gpus must be numbers, such as 0,1, or none, but got {shortened(answer)}."
        )
    gpus = tuple(map(int, words))
    if len(set(gpus)) < len(gpus):
        raise BadInput(f"--gpus must differ from each other, but got {shortened(answer)}.")
    return gpus


def check_country(answer: str) -> str:
    """Return a country's code by its code or English name, in any case.

    Raises:
        BadInput: If it is none, or its electricity is not known.
    """
    code = country_code(answer) or answer
    try:
        carbon = Carbon(country=code)
    except ValidationError as error:
        raise BadInput(f"--{first_error(error)}") from error
    reference_intensity(carbon)
    return code


def parse_budget(answer: str) -> dict[str, Any]:
    """Return the budget of an answer such as `20`, `8h`, `20 8h` or `20 trials, 8 hours`.

    Raises:
        BadInput: if it is none.
    """
    budget: dict[str, Any] = {}
    joined = re.sub(r"\s+(?=(?:h|hours?|trials?)\b)", "", answer.replace(",", " "))
    for word in joined.split():
        part = _BUDGET.fullmatch(word)
        key = "hours" if part is not None and (part["unit"] or "").startswith("h") else "trials"
        value = None if part is None else _number(part["number"])
        is_count = key == "hours" or isinstance(value, int)
        if key in budget or value is None or value <= 0 or not is_count:
            break
        budget[key] = value
    else:
        if budget:
            return budget
    raise BadInput(
        "--budget must be a number of trials, of hours, or both, such as 20, 8h or `20 8h`, but got"
        f" {shortened(answer)}."
    )


def proposed_target(task: str, data: UsersData | None, model: ModelChoice | None) -> str | None:
    """Return a target to begin with; None where only the user can say one."""
    if data is None or task == "rlhf":
        return None
    quality = task_class(task).qualities[0].name
    if quality == "perplexity":
        is_new = model is not None and model.is_new
        return f"perplexity={_PERPLEXITY_NEW if is_new else _PERPLEXITY_PRETRAINED:g}"
    if quality == "preference_accuracy":
        return f"{quality}={_PREFERENCE_ACCURACY:g}"
    classes = data.look.classes
    commonest = max(classes.values()) / sum(classes.values()) if classes else 0.5
    value = commonest + _MISTAKES_REMOVED * (1 - commonest)
    return f"{quality}={math.floor(100 * value) / 100:g}"


def parse_target(answer: str, task: str) -> dict[str, Any]:
    """Return the part `target` for an answer such as `0.9`, `accuracy=0.9` or `bleu>=30`.

    Raises:
        BadInput: if the task can't be judged by it.
    """
    match = _TARGET.fullmatch(answer.strip())
    value = None if match is None else _number(match["value"])
    names = [quality.name for quality in task_class(task).qualities]
    if match is None or value is None:
        example = f"{names[0]}=VALUE" if names else "accuracy=0.9 or bleu>=30"
        raise BadInput(f"--target must be like {example}, but got {shortened(answer)}.")
    name, sign = match["name"], match["sign"]
    if name is None:
        if not names:
            raise BadInput(f"--target needs a name, such as accuracy={answer} or bleu>={answer}.")
        name = names[0]
    if names and name not in names:
        raise BadInput(
            f"--target: {task} is judged by {' or '.join(names)}, not by {shortened(name)}."
        )
    if name not in QUALITIES and sign == "=":
        raise BadInput(
            f"--target: write {name}>={value:g} if more is better, else {name}<={value:g}."
        )
    if name in QUALITIES:
        meant = ">=" if QUALITIES[name].direction == "maximize" else "<="
        if sign not in (None, "=", meant):
            raise BadInput(
                f"--target: {name} has a bound {QUALITIES[name].bound_word}: {name}{meant}VALUE."
            )
        target: dict[str, Any] = {name: float(value)}
    else:
        target = {"quality": name, "at_least" if sign == ">=" else "at_most": float(value)}
    try:
        TargetSettings.model_validate(target, strict=True)
    except ValidationError as error:
        raise BadInput(f"--target: {first_error(error)}") from error
    return target


def dimensions_of(command: str) -> tuple[str, ...]:
    """Return the names of the placeholders of a command that stand for dimensions.

    Raises:
        BadInput: if there are none, or the command can't be read.
    """
    try:
        names = Command.of_shell(command).names
    except BadInput as error:
        raise BadInput(f"--command: {error}") from error
    found = tuple(name for name in names if name not in PLACEHOLDERS)
    if not found:
        raise BadInput(
            "--command must have a placeholder for each setting to be searched, such as"
            f" `--lr {{learning_rate}}`, but is {shortened(command)}."
        )
    return found


def proposed_values(name: str) -> str | None:
    """Return values of a script's dimension to begin with; None where only the user knows them."""
    if name not in DIMENSIONS:
        return None
    choices = DIMENSIONS[name].choices
    return _USUAL.get(name) or (",".join(map(flow, choices)) if choices else None)


def parse_values(name: str, answer: str) -> Any:
    """Return the values of a dimension for an answer such as `8,16,32`, `1e-5..1e-3` or `0.1`.

    A range over a factor of 10 or more is searched on a logarithmic scale.

    Raises:
        BadInput: if it is none of these.
    """
    if match := _RANGE.fullmatch(answer.strip()):
        low, high = _number(match["low"]), _number(match["high"])
        if low is None or high is None or low >= high:
            raise BadInput(
                f"{name}: a range must be LOW..HIGH, such as 1e-5..1e-3, but got"
                f" {shortened(answer)}."
            )
        is_log = low > 0 and high >= 10 * low
        return {"low": low, "high": high, **({"log": True} if is_log else {})}
    words = [word.strip() for word in answer.split(",")]
    if not all(words):
        raise BadInput(
            f"{name}: values must be like 8,16,32 or 1e-5..1e-3, but got {shortened(answer)}."
        )
    values = [_scalar(word) for word in words]
    return values[0] if len(values) == 1 else {"choices": values}


def _scalar(word: str) -> Scalar:
    if word in ("true", "false"):
        return word == "true"
    number = _number(word)
    return word if number is None else number


def _number(text: str) -> int | float | None:
    if re.match("[-+]?0[0-9]", text):  # a word such as 010, which is another one than 10
        return None
    try:
        value = int(text) if re.fullmatch("[-+]?[0-9]{1,18}", text) else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None
