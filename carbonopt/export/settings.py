"""The recommended configuration as a study file, as what train.py reads, and in the names of transformers, DeepSpeed
and accelerate."""

import json
import math
from contextlib import suppress
from importlib import resources
from typing import Any

import yaml

from carbonopt.core.config import StudyConfig
from carbonopt.core.dimensions import TrainingParams, TrialParams, scheduler_arguments
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Prepared, TrialRecord
from carbonopt.export import recorded
from carbonopt.train.deepspeed_config import deepspeed_config
from carbonopt.train.rerun import DATA_COUNTS, RECORDED

DEEPSPEED_CONFIG = "ds_config.json"
_OWN_STEP = """\
# The optimizer step of bf16 without ZeRO is carbonopt/train/fast_step.py's. DeepSpeed's own took more time and energy.
"""
_MUON = """\
# The optimizer is carbonopt/train/muon.py's Muon, with AdamW for all but the hidden layers' matrices.
"""
_DROPOUT = """\
# The model's configuration has this dropout in all its places: {dropout:g}. TrainingArguments has no such name.
"""
_AVERAGED = """\
# The weights that were evaluated and saved are averages over training: carbonopt/train/averaging.py.
"""

_SUFFIX = " (winner)"
_NAME_LENGTH = 200  # what a study's name may have

STUDY_HEAD = "# carbonopt run rerun.yaml\n"
_WORKLOAD_HEAD = """\
# What train.py trains, how it is judged, and what the trial reached with its seed; another seed reaches another
# quality. The trial's parameters are in params.json; train.py reads no other settings.
"""
_TRAINING_HEAD = """\
# transformers.TrainingArguments, with the names of transformers {version}, for a training script of your own; train.py
# makes its own from params.json and workload.yaml.
"""

TRAIN = '''\
"""Trains the recommended configuration once more and says which quality it reaches: ./run.sh [--data FOLDER]

The folder carbonopt/ beside this file has all that is needed of carbonopt, as it was when this was written; params.json
and workload.yaml say what is trained. What inputs.json lists, if there is one, has to lie in data/ or in FOLDER.
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
    # All is written. DeepSpeed holds on to groups, and so to Gloo's threads; one that still drops a tensor while the
    # interpreter is taken down aborts the process, and with it the others: github.com/pytorch/pytorch/issues/190489
    os._exit(0)
'''


class _Dumper(yaml.SafeDumper):
    """With texts that a study file's reader takes for texts."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A study file reads 1e-3 as a number, plain YAML as text; quotes keep a text that looks like one a text.
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def rerun(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """The study file for this configuration alone: each dimension of the space fixed, one trial that runs to its end.
    Dimensions that the space lacks keep the defaults that the trial had, too."""
    study, values = config.model_dump(mode="json", exclude_none=True), record.params.as_record()
    study |= {"name": config.name[: _NAME_LENGTH - len(_SUFFIX)] + _SUFFIX, "budget": {"trials": 1}}
    space = {name: values[name] for name in study["search"]["space"]}
    study["search"] |= {"space": space, "pruning": {"target": False, "cap": False}, "seed": record.seed}
    for searched in ("start", "learn_from"):
        study["search"].pop(searched, None)
    study.pop("confirm", None)
    if config.workload is not None and config.workload.is_script:
        for key in ("training_arguments", "deepspeed"):  # which a script's study can't have
            del study["workload"][key]
    return study


def training_settings(config: StudyConfig, record: TrialRecord, versions: dict[str, str]) -> str:
    """training_args.yaml."""
    head = _TRAINING_HEAD.format(version=versions.get("transformers", "5"))
    ratio = _warmup_ratio(config, record)
    if ratio is not None and record.total_steps is not None:
        head += f"# warmup_steps is {100 * ratio:.4g} % of the trial's {record.total_steps} steps, rounded up.\n"
    if has_own_step(config, record.params):
        head += _OWN_STEP
    if record.params.optimizer == "muon":
        head += _MUON
    if record.params.dropout is not None:
        head += _DROPOUT.format(dropout=record.params.dropout)
    if record.params.weight_averaging:
        head += _AVERAGED
    return head + as_yaml(training_arguments(config, record))


def has_own_step(config: StudyConfig, params: TrialParams) -> bool:
    """Whether its optimizer steps are not DeepSpeed's (see `carbonopt.train.fast_step`)."""
    if config.workload is None or not config.launch.trains:
        return False
    given = config.workload.deepspeed.get("bf16")
    keeps_deepspeeds = isinstance(given, dict) and bool(given.get("check_grad_overflow"))
    return params.zero_stage == 0 and params.precision == "bf16" and not keeps_deepspeeds


def training_arguments(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """The configuration in the names of `transformers.TrainingArguments`; what the trial left to its default is absent.
    So are the device's settings and DeepSpeed's file of a replay, whose runs are not known to have had them."""
    params = record.params
    arguments: dict[str, Any] = {}
    if config.launch.trains:
        arguments["deepspeed"] = DEEPSPEED_CONFIG
        if not config.launch.gpus:
            arguments |= {"use_cpu": True, "dataloader_pin_memory": False}
        # Without it train.py takes what a trial takes for optimizer states that leave a GPU: DeepSpeed's AdamW, which
        # no TrainingArguments can name.
        if not config.launch.gpus or params.offload == "none":
            arguments["optim"] = "adamw_torch_fused"
    arguments |= config.workload.training_arguments if config.workload else {}
    arguments |= params.arguments(record.total_steps or 1)
    arguments |= {"gradient_accumulation_steps": params.gradient_accumulation_steps, "seed": record.seed}
    if params.optimizer == "muon":
        del arguments["optim"]  # which has no name for it
    scheduler = arguments.get("lr_scheduler_type")
    if needed := scheduler_arguments(scheduler, params.decay_ratio, record.total_steps or 1):
        arguments["lr_scheduler_kwargs"] = needed | (arguments.get("lr_scheduler_kwargs") or {})
    ratio, steps = _warmup_ratio(config, record), record.total_steps
    if ratio is not None and (steps is None or params.warmup_ratio is None):
        # A number of steps where it is known: the only thing that every transformers takes for the same.
        arguments["warmup_steps"] = ratio if steps is None else math.ceil(ratio * steps)
    if params.precision is not None:
        arguments |= {"bf16": params.precision == "bf16", "fp16": params.precision == "fp16"}
    return arguments


def _warmup_ratio(config: StudyConfig, record: TrialRecord) -> float | None:
    """The share of the steps, whether searched or given to transformers as one; None: no warmup, or a number of steps.
    Below 1 transformers 5 takes `warmup_steps` for a share; from 1 on, and always before 5, for a number of steps."""
    if record.params.warmup_ratio is not None:
        return record.params.warmup_ratio
    given = config.workload.training_arguments.get("warmup_steps", 0) if config.workload else 0
    return given if 0 < given < 1 else None


def deepspeed_settings(config: StudyConfig, record: TrialRecord, own: str | None) -> str:
    """ds_config.json: the trial's `own`, as it is; one made from its parameters where that is gone. Raises BadInput if
    it isn't what DeepSpeed reads; a disk that was full or a copy that broke off can have cut it."""
    if own is None:
        assert config.workload is not None
        made = deepspeed_config(TrainingParams.of(record.params), config.workload, bool(config.launch.gpus))
        return json.dumps(made, indent=2) + "\n"
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(own), dict):
            return own
    damaged = f"trials/{record.trial:04d}/{DEEPSPEED_CONFIG} is damaged: it must be a JSON object, but isn't"
    raise BadInput(f"{damaged}; remove it, and the report makes its own.")


def workload(study: dict[str, Any], record: TrialRecord, prepared: Prepared | None, files: recorded.Files) -> str:
    """workload.yaml: the study's own workload, and the trial's figures. `study` is as rerun.yaml has it, where the
    files, those of `files`, have their names."""
    settings, quality = dict(study["workload"]), record.quality
    if prepared is not None and prepared.eval_batch_size_per_gpu is not None:
        # By that GPU's memory; another one's would give another, and sums that differ in their last digits.
        settings.setdefault("eval_batch_size_per_gpu", prepared.eval_batch_size_per_gpu)
    reached = {"trial": record.trial, "seed": record.seed, "quality": quality.name, "value": quality.value}
    if prepared is not None:
        counts = {name: getattr(prepared, name) for name in DATA_COUNTS}
        reached |= {name: count for name, count in counts.items() if count is not None}
    settings[RECORDED] = reached
    return _WORKLOAD_HEAD + recorded.comment(files) + as_yaml(settings)


def filled(name: str, **values: object) -> str:
    """A file that lies beside this one, with each value in the place of its `@NAME@`."""
    text = resources.files("carbonopt.export").joinpath(name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text
