"""What one needs to train with the recommended configuration: a study of one trial, and the same for other scripts."""

import json
from pathlib import Path
from typing import Any

import yaml

from carbonopt.analysis.recommend import Recommendation
from carbonopt.config import StudyConfig
from carbonopt.record import StudyData
from carbonopt.study_file import with_relative_paths
from carbonopt.trial import TrialRecord

DEEPSPEED_CONFIG = "ds_config.json"
PARAMS = "params.json"
STUDY = "rerun.yaml"
SCRIPT = "run.sh"
TRAINING_ARGUMENTS = "training_args.yaml"
NAMES = (PARAMS, STUDY, SCRIPT, TRAINING_ARGUMENTS, DEEPSPEED_CONFIG)

_SUFFIX = " (winner)"
_NAME_LENGTH = 200  # what a study's name may have
_RUN = f"""#!/bin/sh
# Trains once more with the recommended configuration; takes the options of `carbonopt run`.
command -v carbonopt >/dev/null || {{ echo "carbonopt is not on PATH: activate its environment" >&2; exit 127; }}
exec carbonopt run "$(dirname "$0")/{STUDY}" "$@"
"""


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A study file reads 1e-3 as a number, plain YAML as text; quotes keep a text that looks like one a text.
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def winner_files(
    data: StudyData, recommendation: Recommendation, folder: Path, given: dict[str, str] | None = None
) -> dict[str, str]:
    """Texts by file name, for `folder`; empty without a recommendation. `given` is added: the trial's own
    `ds_config.json`."""
    record = next((record for record in data.records if record.trial == recommendation.trial), None)
    if record is None:
        return {}
    given = given or {}
    return {
        PARAMS: json.dumps(record.params.as_record(), indent=2) + "\n",
        STUDY: _yaml(with_relative_paths(rerun(data.config, record), folder)),
        SCRIPT: _RUN,
        TRAINING_ARGUMENTS: _yaml(training_arguments(data.config, record, with_deepspeed=DEEPSPEED_CONFIG in given)),
        **given,
    }


def rerun(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """The study file for this configuration alone: each dimension of the space fixed, one trial that runs to its end.

    Only dimensions that the space has: the others keep the defaults that the trial had, too.
    """
    study = config.model_dump(mode="json", exclude_none=True)
    values = record.params.as_record()
    study["name"] = config.name[: _NAME_LENGTH - len(_SUFFIX)] + _SUFFIX
    study["search"] |= {
        "space": {name: values[name] for name in study["search"]["space"]},
        "pruning": {"target": False, "cap": False},
        "seed": record.seed,
    }
    study["search"].pop("start", None)
    study.pop("confirm", None)
    study["budget"] = {"trials": 1}
    return study


def training_arguments(config: StudyConfig, record: TrialRecord, *, with_deepspeed: bool) -> dict[str, Any]:
    """The configuration in the names of `transformers.TrainingArguments`; what the trial left to its default is absent.

    Attention and LoRA are settings of the model, not of the training: they are in params.json.
    """
    params = record.params
    arguments: dict[str, Any] = {
        **(config.workload.training_arguments if config.workload else {}),
        "per_device_train_batch_size": params.micro_batch_size_per_gpu,
        "gradient_accumulation_steps": params.gradient_accumulation_steps,
        "learning_rate": params.learning_rate,
        "num_train_epochs": params.epochs,
        "seed": record.seed,
    }
    if params.precision is not None:
        arguments |= {"bf16": params.precision == "bf16", "fp16": params.precision == "fp16"}
    optional = {
        "weight_decay": params.weight_decay,
        "lr_scheduler_type": params.lr_scheduler,
        "warmup_steps": _warmup_steps(record),
        "gradient_checkpointing": params.gradient_checkpointing,
        "torch_compile": params.torch_compile,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | ({"deepspeed": DEEPSPEED_CONFIG} if with_deepspeed else {})


def _warmup_steps(record: TrialRecord) -> float | int | None:
    """As transformers 5 takes it: below 1 a share of the steps, from 1 on a number of steps."""
    ratio = record.params.warmup_ratio
    return record.total_steps if ratio == 1.0 else ratio


def _yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
