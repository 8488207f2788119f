"""The recommended configuration as a study file, and as the settings that transformers, DeepSpeed, accelerate and
train.py read."""

import json
from pathlib import Path
from typing import Any

import yaml

from carbonopt.config import LocalLaunch, StudyConfig, Workload
from carbonopt.study_file import with_relative_paths
from carbonopt.train.arguments import max_grad_norm
from carbonopt.train.deepspeed_config import deepspeed_config
from carbonopt.trial import Prepared, TrialParams, TrialRecord

DEEPSPEED_CONFIG = "ds_config.json"

_SUFFIX = " (winner)"
_NAME_LENGTH = 200  # what a study's name may have
_SMALLEST_EVAL_BATCH = 8  # sequences; as in a trial

_WORKLOAD_HEAD = """\
# What train.py trains, how it is judged, and what the trial reached. Paths lead from this folder.
"""
_ACCELERATE_HEAD = f"""\
# accelerate launch --config_file accelerate.yaml train.py
# The ZeRO stage, offload and mixed precision are in {DEEPSPEED_CONFIG}, for accelerate and the Trainer alike.
"""
_SCRIPT = """\
#!/bin/sh
# Trains the recommended configuration once more, without carbonopt. Needs an environment with torch, transformers,
# datasets, deepspeed and accelerate (and peft for LoRA); writes the model and result.json into output/ beside it.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")"
command -v accelerate >/dev/null || {{ echo "accelerate is not on PATH: activate its environment" >&2; exit 127; }}
export TOKENIZERS_PARALLELISM=false{device}
threads=$(($(nproc) / {ranks}))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"
exec accelerate launch --config_file accelerate.yaml train.py
"""
_ON_CPU = """
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES='' OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}\""""


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A study file reads 1e-3 as a number, plain YAML as text; quotes keep a text that looks like one a text.
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


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


def training_arguments(config: StudyConfig, record: TrialRecord) -> dict[str, Any]:
    """The configuration in the names of `transformers.TrainingArguments`; what the trial left to its default is absent.

    Attention and LoRA are settings of the model, not of the training: they are in workload.yaml. The device's settings
    and DeepSpeed's file are absent of a replay, whose runs are not known to have had them.
    """
    params = record.params
    given = config.workload.training_arguments if config.workload else {}
    arguments: dict[str, Any] = {
        **(_device_defaults(config.launch, params) if isinstance(config.launch, LocalLaunch) else {}),
        **given,
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
    return arguments | {name: value for name, value in optional.items() if value is not None}


def _device_defaults(launch: LocalLaunch, params: TrialParams) -> dict[str, Any]:
    """What a trial has unless the study says otherwise. Without `optim` train.py takes what a trial takes for optimizer
    states that leave a GPU: DeepSpeed's AdamW, which no TrainingArguments can name."""
    if not launch.gpus:
        on_cpu = {"use_cpu": True, "dataloader_pin_memory": False, "optim": "adamw_torch"}
        return {"deepspeed": DEEPSPEED_CONFIG, **on_cpu}
    return {"deepspeed": DEEPSPEED_CONFIG, **({"optim": "adamw_torch_fused"} if params.offload == "none" else {})}


def _warmup_steps(record: TrialRecord) -> float | int | None:
    """As transformers 5 takes it: below 1 a share of the steps, from 1 on a number of steps."""
    ratio = record.params.warmup_ratio
    return record.total_steps if ratio == 1.0 else ratio


def deepspeed_settings(workload: Workload, record: TrialRecord, *, on_gpu: bool) -> str:
    settings = deepspeed_config(record.params, workload, on_gpu, max_grad_norm(workload))
    return json.dumps(settings, indent=2) + "\n"


def workload(workload: Workload, record: TrialRecord, prepared: Prepared | None, folder: Path) -> str:
    """workload.yaml: the study's own workload, what the configuration sets of the model, and the trial's figures."""
    params = record.params
    study = {"workload": workload.model_dump(mode="json", exclude_none=True)}
    relative = with_relative_paths(study, folder)["workload"]
    settings = {key: relative[key] for key in ("model", "tokenizer", "dataset", "sequence_length") if key in relative}
    settings["eval_batch_size_per_gpu"] = workload.eval_batch_size_per_gpu or max(
        params.micro_batch_size_per_gpu, _SMALLEST_EVAL_BATCH
    )
    if params.attention_implementation is not None:
        settings["attention_implementation"] = params.attention_implementation
    if params.lora_rank:
        settings["lora_rank"] = params.lora_rank
    settings["recorded"] = {"trial": record.trial, "perplexity": record.perplexity}
    if prepared is not None:
        settings["recorded"] |= {"train_tokens": prepared.train_tokens, "eval_tokens": prepared.eval_tokens}
    return _WORKLOAD_HEAD + as_yaml(settings)


def accelerate_settings(params: TrialParams) -> str:
    """accelerate.yaml. On a CPU, too, it is DeepSpeed's launcher that starts the ranks: accelerate's own for CPUs
    (`use_cpu`) needs MPI for more than one. TrainingArguments and the environment then choose the device."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": DEEPSPEED_CONFIG, "zero3_init_flag": params.zero_stage == 3},
        "num_machines": 1,
        "num_processes": params.world_size,
        "main_process_port": 0,  # any that is free
        "use_cpu": False,
    }
    return _ACCELERATE_HEAD + as_yaml(settings)


def script(launch: LocalLaunch) -> str:
    """run.sh. The threads of a rank are as many as in a trial: sums on a CPU depend on their number."""
    return _SCRIPT.format(device="" if launch.gpus else _ON_CPU, ranks=launch.world_size)
