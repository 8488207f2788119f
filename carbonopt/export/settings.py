"""The recommended configuration in the forms that others read.

It is written as a study file, as what train.py reads, and in the names of transformers, DeepSpeed
and accelerate.
"""

import json
import math
from contextlib import suppress
from importlib import resources
from typing import Any

import yaml

from carbonopt.core.dimensions import TrainingParams, TrialParams, scheduler_arguments
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import TrialRecord
from carbonopt.export import recorded
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import Prepared
from carbonopt.train.optim.deepspeed_config import deepspeed_config
from carbonopt.train.rerun import DATA_COUNTS, RECORDED

DEEPSPEED_CONFIG = "ds_config.json"
_OWN_STEP = """\
# The optimizer step of bf16 without ZeRO is carbonopt/train/speed/fast_step.py's. \
DeepSpeed's own took more time and energy.
"""
_MUON = """\
# The optimizer is carbonopt/train/optim/muon.py's Muon, with AdamW for all but \
the hidden layers' matrices.
"""
_DROPOUT = """\
# The model's configuration has this dropout in all its places: {dropout:g}. \
TrainingArguments has no such name.
"""
_FLOAT8 = """\
# The blocks' linear layers train in float8: carbonopt/train/speed/float8_layers.py.
"""
_AVERAGED = """\
# The weights that were evaluated and saved are averages over training: \
carbonopt/train/optim/averaging.py.
"""

_SUFFIX = " (winner)"
_NAME_LENGTH = 200  # the longest name that a study may have

STUDY_HEAD = "# carbonopt run rerun.yaml\n"
_WORKLOAD_HEAD = """\
# What train.py trains, how it is judged, and what the trial reached with its seed; \
another seed reaches another
# quality. The trial's parameters are in params.json; train.py reads no other settings.
"""
_TRAINING_HEAD = """\
# transformers.TrainingArguments, with the names of transformers {version}, for a training script \
of your own; train.py
# makes its own from params.json and workload.yaml.
"""

TRAIN = '''\
"""Trains the recommended configuration once more and says which quality it reaches: \
./run.sh [--data FOLDER]

The folder carbonopt/ beside this file has all that is needed of carbonopt, as it was \
when this was written; params.json
and workload.yaml say what is trained. What inputs.json lists, if there is one, \
has to lie in data/ or in FOLDER.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


if __name__ == "__main__":
    places = {}
    if (FOLDER / "inputs.json").exists():
        import inputs  # inputs.py, beside this file

        # The ranks but the first needn't read all of it, too.
        places = inputs.places(contents=os.environ.get("RANK", "0") == "0")
    from carbonopt.train.rerun import rerun

    rerun(FOLDER, places)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. DeepSpeed holds on to groups, and so to Gloo's threads; \
one that still drops a tensor while the
    # interpreter is taken down aborts the process, and with it the others: \
github.com/pytorch/pytorch/issues/190489
    os._exit(0)
'''


class _SettingsDumper(yaml.SafeDumper):
    """A YAML dumper that quotes texts which a study file's reader would take for numbers."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A study file reads 1e-3 as a number, plain YAML as a text; quotes keep such a text a text.
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_SettingsDumper.add_representer(str, _text)


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_SettingsDumper, sort_keys=False, allow_unicode=True, width=120)


def rerun(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """Return the study file for this configuration alone.

    Each dimension of the space is fixed, and one trial runs to its end. Dimensions that the space
    lacks keep the defaults that the trial had, too.
    """
    study, values = config.model_dump(mode="json", exclude_none=True), record.params.as_record()
    study |= {"name": config.name[: _NAME_LENGTH - len(_SUFFIX)] + _SUFFIX, "budget": {"trials": 1}}
    space = {name: values[name] for name in study["search"]["space"]}
    study["search"] |= {
        "space": space,
        "pruning": {"target": False, "cap": False},
        "seed": record.seed,
    }
    for searched in ("start", "learn_from"):
        study["search"].pop(searched, None)
    study.pop("confirm", None)
    if config.is_script:
        for key in ("training_arguments", "deepspeed"):  # a script's study can't have these
            del study["workload"][key]
    return study


def training_settings(config: StudyConfig, record: TrialRecord, versions: dict[str, str]) -> str:
    """Return the text of training_args.yaml."""
    head = _TRAINING_HEAD.format(version=versions.get("transformers", "5"))
    ratio = _warmup_ratio(config, record)
    if ratio is not None and record.total_steps is not None:
        head += (
            f"# warmup_steps is {100 * ratio:.4g} % of the trial's {record.total_steps} steps,"
            " rounded up.\n"
        )
    if has_own_step(config, record.params):
        head += _OWN_STEP
    if record.params.optimizer == "muon":
        head += _MUON
    if record.params.dropout is not None:
        head += _DROPOUT.format(dropout=record.params.dropout)
    if record.params.trains_in_float8:
        head += _FLOAT8
    if record.params.weight_averaging:
        head += _AVERAGED
    return head + as_yaml(hugging_face_arguments(config, record))


def has_own_step(config: StudyConfig, params: TrialParams) -> bool:
    """Return whether a trial's optimizer steps are carbonopt's own, not DeepSpeed's.

    See `carbonopt.train.speed.fast_step`.
    """
    if config.workload is None or not config.launch.trains:
        return False
    given = config.workload.deepspeed.get("bf16")
    keeps_deepspeeds = isinstance(given, dict) and bool(given.get("check_grad_overflow"))
    return params.zero_stage == 0 and params.precision == "bf16" and not keeps_deepspeeds


def hugging_face_arguments(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """Return the configuration in the names of `transformers.TrainingArguments`.

    Arguments that the trial left to their defaults are absent. A replay also lacks the settings of
    the device and DeepSpeed's file, as its runs are not known to have had them.
    """
    params = record.params
    arguments: dict[str, Any] = {}
    if config.launch.trains:
        arguments["deepspeed"] = DEEPSPEED_CONFIG
        if not config.launch.gpus:
            arguments |= {"use_cpu": True, "dataloader_pin_memory": False}
        # Without `optim`, train.py takes what a trial takes for optimizer states that are
        # offloaded: DeepSpeed's AdamW, which TrainingArguments can't name.
        if not config.launch.gpus or params.offload == "none":
            arguments["optim"] = "adamw_torch_fused"
    arguments |= config.workload.training_arguments if config.workload else {}
    arguments |= params.arguments(record.total_steps or 1)
    arguments |= {
        "gradient_accumulation_steps": params.gradient_accumulation_steps,
        "seed": record.seed,
    }
    if params.optimizer == "muon":
        del arguments["optim"]  # TrainingArguments has no name for Muon
    scheduler = arguments.get("lr_scheduler_type")
    if needed := scheduler_arguments(scheduler, params.decay_ratio, record.total_steps or 1):
        arguments["lr_scheduler_kwargs"] = needed | (arguments.get("lr_scheduler_kwargs") or {})
    ratio, steps = _warmup_ratio(config, record), record.total_steps
    if ratio is not None and (steps is None or params.warmup_ratio is None):
        # Give a number of steps where it is known: every version of transformers takes that alike.
        arguments["warmup_steps"] = ratio if steps is None else math.ceil(ratio * steps)
    if params.precision is not None:
        arguments |= {"bf16": params.precision == "bf16", "fp16": params.precision == "fp16"}
    return arguments


def _warmup_ratio(config: StudyConfig, record: TrialRecord) -> float | None:
    """Return the warm-up as a share of the steps, searched or given to transformers as one.

    It is None without a warm-up, or where a number of steps is given. Below 1, transformers 5 takes
    `warmup_steps` for a share; from 1 on, and always before 5, for a number of steps.
    """
    if record.params.warmup_ratio is not None:
        return record.params.warmup_ratio
    given = config.workload.training_arguments.get("warmup_steps", 0) if config.workload else 0
    return given if 0 < given < 1 else None


def deepspeed_settings(
    config: StudyConfig, record: TrialRecord, prepared: Prepared | None, own: str | None
) -> str:
    """Return ds_config.json: the trial's own, or one made from its parameters.

    Args:
        prepared: what the preparation found, which includes the model's blocks for ZeRO 3.
        own: the text of the trial's own file; None: it is gone.

    Raises:
        BadInput: if DeepSpeed can't read the own file; a full disk or an interrupted copy can have
            cut it.
    """
    if own is None:
        assert config.workload is not None
        made = deepspeed_config(
            TrainingParams.of(record.params),
            config.workload,
            bool(config.launch.gpus),
            None if prepared is None else prepared.zero_leaves,
        )
        return json.dumps(made, indent=2) + "\n"
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(own), dict):
            return own
    damaged = (
        f"trials/{record.trial:04d}/{DEEPSPEED_CONFIG} is damaged: it must be a JSON object, but"
        " isn't"
    )
    raise BadInput(f"{damaged}; remove it, and the report makes its own.")


def workload(
    study: dict[str, Any], record: TrialRecord, prepared: Prepared | None, files: recorded.Files
) -> str:
    """Return workload.yaml: the study's own workload, and the trial's figures.

    Args:
        study: the study as in rerun.yaml, where files have the names of `files`.
        files: the files of the workload.
    """
    settings, quality = dict(study["workload"]), record.quality
    if prepared is not None and prepared.eval_batch_size_per_gpu is not None:
        # It was chosen by that GPU's memory. Another GPU would give another one, and sums that
        # differ in their last digits.
        settings.setdefault("eval_batch_size_per_gpu", prepared.eval_batch_size_per_gpu)
    reached = {
        "trial": record.trial,
        "seed": record.seed,
        "quality": quality.name,
        "value": quality.value,
    }
    if prepared is not None:
        counts = {name: getattr(prepared, name) for name in DATA_COUNTS}
        reached |= {name: count for name, count in counts.items() if count is not None}
    settings[RECORDED] = reached
    return _WORKLOAD_HEAD + recorded.comment(files) + as_yaml(settings)


def filled(name: str, **values: object) -> str:
    """Return a file that lies beside this module, with each value in the place of its `@NAME@`."""
    text = resources.files("carbonopt.export").joinpath(name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text
