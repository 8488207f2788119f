"""A new study file, made of a few answers and a look at the user's data."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import is_folder
from carbonopt.core.format import quoted_names
from carbonopt.core.quality import QUALITIES
from carbonopt.study_file.reader import load_study
from carbonopt.study_file.study_checks import CheckedStudy, check
from carbonopt.train.data.data_look import DataLook, DataSource

FROM_CONFIG = "from_config"
_LONGEST, _SHORTEST = 1024, 16  # tokens of a proposed sequence
_CHARACTERS_PER_TOKEN = 3  # few enough that hardly any text is longer than proposed
_SEQUENCES = 64  # of a text, at least, that the proposed length leaves
_COMPLETION = 64  # tokens
# Small models with random weights, which train on a CPU.
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
}
# So small a model learns faster from larger weights than its class begins with.
_SPREAD = {"initializer_range": 0.1}
_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **_SPREAD}
_SMALL: dict[str, dict[str, Any]] = {
    "causal_lm": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, **_SPREAD},
    "seq2seq": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    },
    "classification": {"model_type": "bert", **_LAYERS, "intermediate_size": 128},
}
_VIT = {"model_type": "vit", **_LAYERS, "intermediate_size": 128}
_POSITIONS = {"gpt2": "n_positions", "llama": "max_position_embeddings"}
_BERT_POSITIONS = 512
# The space of the task rlhf, which `auto` doesn't know: by whether the model is new.
_RLHF_RATES = {True: (1e-3, 2e-2), False: (1e-6, 1e-4)}


@dataclass(frozen=True)
class ModelChoice:
    """The model of a new study."""

    keys: dict[str, Any]  # of `workload.model`; paths are absolute
    is_new: bool = False  # True: it gets random weights
    positions: int | None = None  # the most tokens that it takes; None: not known


@dataclass(frozen=True)
class UsersData:
    """A data set that was found, and what was seen in it."""

    source: DataSource
    look: DataLook


@dataclass(frozen=True)
class NewStudy:
    """The answers from which a study file is written."""

    name: str
    task: str
    target: dict[str, Any]
    gpus: tuple[int, ...]
    country: str
    budget: dict[str, Any]
    data: UsersData | None = None  # None: a script's
    model: ModelChoice | None = None  # None: a script's
    reward: dict[str, str] | None = None  # of the task rlhf; paths are absolute
    command: str = ""  # of the task script
    values: dict[str, Any] = field(default_factory=dict)  # of a script's dimensions

    @property
    def hub_names(self) -> tuple[str, ...]:
        """The names that are of a hub, because no folder here is called so."""
        parts = (
            self.data.source.keys if self.data else {},
            self.model.keys if self.model else {},
            self.reward or {},
        )
        names = (part.get("name_or_path") or part.get("model") for part in parts)
        return tuple(name for name in names if name and not name.startswith("/"))


def study_text(new: NewStudy, folder: Path) -> str:
    """Return the text of a study file.

    Args:
        new: the answers.
        folder: the folder of the file, from which its paths are relative where they lead into it.

    Raises:
        BadInput: if the data can't be used with the model.
    """
    lines = [
        "# Written by `carbonopt init`; `carbonopt schema` has every key.",
        f"name: {flow(new.name)}",
        "workload:",
        f"  task: {new.task}",
        *(_script_lines(new, folder) if new.task == "script" else _workload_lines(new, folder)),
        _commented(f"target: {flow(new.target)}", _target_comment(new)),
        *_search_lines(new),
        _commented(
            f"budget: {flow({**new.budget, 'until': 'converged'})}",
            "the study ends when it is used up, or when no trial is expected to pay",
        ),
        _commented(
            f"carbon: {flow({'country': new.country})}",
            "where the electricity is from; add region, pue",
        ),
        _commented(
            f"launch: {flow(_launch(new))}", "" if new.gpus else "the CPU; [0] is the first GPU"
        ),
    ]
    return "\n".join(lines) + "\n"


def _script_lines(new: NewStudy, folder: Path) -> list[str]:
    lines = [f"  command: {flow(new.command)}"]
    if folder != Path.cwd():
        lines.append(f"  folder: {flow(_path(str(Path.cwd()), folder))}")
    return lines


def _workload_lines(new: NewStudy, folder: Path) -> list[str]:
    assert new.data is not None
    assert new.model is not None
    look = new.data.look
    if new.model.is_new and look.has_messages:
        raise BadInput(
            "--model must be a pretrained one, whose tokenizer has a chat template, because the"
            f" data holds messages, but is {FROM_CONFIG}."
        )
    length, images = _sequence_length(new), _has_images(new)
    if look.most_tokens is not None and look.most_tokens <= length:
        raise BadInput(
            f"--data: the training text must have at least one sequence of {length} tokens and one"
            f" token more, but can have at most {look.most_tokens}; give more text."
        )
    model = _model_keys(new, length)
    dataset = {**_with_paths(new.data.source.keys, folder), **_column_keys(new.data)}
    lines = [f"  model: {flow(_with_paths(model, folder))}"]
    if new.model.is_new and not images:
        lines.append(f"  tokenizer: {flow({'train_bpe': _vocabulary(look)})}")
    lines.append(_commented(f"  dataset: {flow(dataset)}", _data_comment(look)))
    if not images:
        lines.append(_commented(f"  sequence_length: {length}", "tokens"))
    if new.task == "rlhf":
        assert new.reward is not None
        lines.append(_commented(f"  max_completion_length: {_completion(new)}", "tokens"))
        lines.append(f"  reward: {flow(_with_paths(new.reward, folder))}")
    return lines


def _has_images(new: NewStudy) -> bool:
    assert new.data is not None
    keys = {**new.data.source.keys, **new.data.look.columns}
    return new.task == "classification" and ("image_column" in keys or "builtin" in keys)


def _model_keys(new: NewStudy, length: int) -> dict[str, Any]:
    assert new.model is not None
    assert new.data is not None
    if not new.model.is_new:
        return new.model.keys
    if _has_images(new):
        is_digits = "builtin" in new.data.source.keys
        size = (8, 2, 1) if is_digits else (64, 8, 3)
        shape = dict(zip(("image_size", "patch_size", "num_channels"), size, strict=True))
        return {FROM_CONFIG: {**_VIT, **shape}}
    config = _SMALL.get(new.task, _LLAMA)
    key = _POSITIONS.get(config["model_type"])
    positions = length + (_COMPLETION if new.task == "rlhf" else 0)
    return {FROM_CONFIG: {**config, **({} if key is None else {key: positions})}}


def _column_keys(data: UsersData) -> dict[str, Any]:
    """Return the columns as keys of the data set; one that it lacks is `null`."""
    return {key: name for key, name in data.look.columns.items() if key not in data.source.keys}


def _sequence_length(new: NewStudy) -> int:
    """Return the proposed length in tokens, a power of two."""
    assert new.model is not None
    assert new.data is not None
    look = new.data.look
    most = new.model.positions or _LONGEST
    if new.model.is_new and new.task == "classification":
        most = _BERT_POSITIONS
    if new.task == "rlhf":
        most -= min(_COMPLETION, most // 2)
    if look.long_row is not None and new.task != "causal_lm":
        wanted = 1 << math.ceil(math.log2(look.long_row / _CHARACTERS_PER_TOKEN + 8))
    elif look.characters is not None:
        tokens = look.characters / _CHARACTERS_PER_TOKEN / _SEQUENCES
        wanted = min(512, 1 << math.floor(math.log2(max(1, tokens))))
    else:
        wanted = 128
    return min(max(wanted, _SHORTEST), _LONGEST, most)


def _completion(new: NewStudy) -> int:
    assert new.model is not None
    most = new.model.positions
    return _COMPLETION if most is None else min(_COMPLETION, most // 2)


def _vocabulary(look: DataLook) -> int:
    """Return the proposed number of tokens of a trained tokenizer: more for more text."""
    wanted = (look.characters or 0) // 200
    return min(max(512, 1 << wanted.bit_length()), 8192)


def _launch(new: NewStudy) -> dict[str, Any]:
    several = {"gpus_per_trial": 1} if len(new.gpus) > 1 else {}
    return {"gpus": list(new.gpus), **several}


def _search_lines(new: NewStudy) -> list[str]:
    if new.task == "script":
        space = [f"    {flow(name)}: {flow(values)}" for name, values in new.values.items()]
        return ["search:", "  space:", *space]
    if new.task != "rlhf":
        return [
            _commented(
                "search: {space: auto}", "carbonopt chooses the dimensions; `check` shows them"
            )
        ]
    assert new.model is not None
    low, high = _RLHF_RATES[new.model.is_new]
    dimensions = {
        "global_batch_size": {"choices": [32, 64]},
        "micro_batch_size_per_gpu": 32,
        "num_generations": {"choices": [4, 8]},
        "learning_rate": {"low": low, "high": high, "log": True},
        "epochs": {"choices": [0.25, 0.5, 1]},
        "zero_stage": 0,
    }
    return ["search:", "  space:", *(f"    {name}: {flow(it)}" for name, it in dimensions.items())]


def _target_comment(new: NewStudy) -> str:
    bound = "at least" if "at_least" in new.target else "at most"
    for name in new.target:
        bound = QUALITIES[name].bound_word if name in QUALITIES else bound
    return f"{bound}; `recommend --target` answers for another one later"


def _data_comment(look: DataLook) -> str:
    parts = []
    if look.rows is not None:
        parts.append(f"{look.rows:,} rows" + ("" if look.is_whole else " and more"))
    elif look.characters is not None:
        parts.append(f"{look.characters:,} characters")
    if look.classes:
        parts.append(f"{len(look.classes)} classes")
    if look.unread:
        parts.append(f"not read: {quoted_names(look.unread)}")
    return ", ".join(parts)


def _commented(line: str, comment: str) -> str:
    return f"{line}  # {comment}" if comment else line


def _with_paths(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return keys with paths from the study file's folder where they lead into it."""
    return {key: _relative(value, folder) for key, value in keys.items()}


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_relative(each, folder) for each in value]
    is_path = isinstance(value, str) and value.startswith("/")
    return _path(value, folder) if is_path else value


def _path(path: str, folder: Path) -> str:
    """Return a path from the study file's folder, if it leads into it, else the absolute one.

    A folder's begins with `./`, or it could be taken for a name on a hub. A name that begins with ~
    would be taken for a home.
    """
    relative = os.path.relpath(path, folder)
    if not Path(path).is_relative_to(folder) or relative.startswith("~"):
        return path
    return f"./{relative}" if is_folder(Path(path)) else relative


# Words that no reader of YAML takes for anything else than text.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_NO_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", ".inf", ".nan", ".", "..")


def flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line.

    Raises:
        BadInput: if a text in it holds what a line can't.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(key)}: {flow(it)}" for key, it in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if not value.isprintable():
        raise BadInput(
            f"a study file's texts must be printable, but got {shortened(value)}; rename it."
        )
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def check_free(path: Path) -> None:
    """Raise BadInput if a new study file can't be written at a path, or something is there."""
    folder = path.absolute().parent
    if os.path.lexists(path):
        raise BadInput(
            f"--out {path} is there already, and init overwrites nothing; remove it, or give"
            " another --out."
        )
    if not is_folder(folder):
        raise BadInput(
            f"--out {path}: there is no folder {folder}; make it, or give another --out."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(
            f"--out {path}: the folder {folder} can't be written to; give another --out."
        )


def write_checked(path: Path, text: str) -> CheckedStudy:
    """Write a study file that `carbonopt check` takes, and return the checked study.

    Raises:
        BadInput: if the study is not valid, or the file can't be written. No file is left then.
    """
    _write_new(path, text)
    try:
        return check(load_study(path))
    except BaseException as error:
        path.unlink()
        if isinstance(error, BadInput):
            raise BadInput(
                f"these answers make no valid study, so {path} was not written: {error}"
            ) from error
        raise


def _write_new(path: Path, text: str) -> None:
    try:
        file = path.open("x", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write {path}: {error.strerror}; give another --out.") from error
    try:
        with file:
            file.write(text)
    except (OSError, UnicodeError) as error:
        path.unlink()
        reason = error.strerror if isinstance(error, OSError) else "it must be UTF-8"
        raise BadInput(f"can't write {path}: {reason}; give another --out.") from error
