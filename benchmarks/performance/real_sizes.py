"""What a token costs at the sizes that people fine-tune: OPT-1.3B, Llama 7B and T5-large.

    python benchmarks/performance/real_sizes.py FOLDER MODEL [--gpus N] [--steps 20]
        [--set DIMENSION=VALUE,VALUE ...]

Trains random weights of the true shapes, which compute as trained ones do, on random bytes. Each
combination of the values is a trial. Energy is by the GPUs' own counters, over the steps after the
first. Prints a table: tokens (padding included) a second of all GPUs, energy a token, share of the
GPUs' dense bf16 peak, and memory, estimated and measured. The weights stay in FOLDER/MODEL, where
fsdp2.py can read them.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import yaml
from gpt2 import JOULES_PER_KWH, write_text

RANDOM_MODEL = Path(__file__).parents[2] / "studies" / "random_model.py"
MODELS = ("opt-1.3b", "llama-7b", "t5-large")
LENGTH = 512  # tokens in a sequence
PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 (SXM)
SOURCE_BYTES, TARGET_BYTES = 511, 127


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--gpus", type=common.at_least(1), default=1)
    parser.add_argument("--steps", type=common.at_least(2), default=20)
    parser.add_argument("--set", nargs="+", default=[], metavar="DIMENSION=VALUES")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    space = {
        "global_batch_size": 16 * options.gpus,
        "micro_batch_size_per_gpu": 16,
        "learning_rate": 1e-5,
        "zero_stage": 0,
        "precision": "bf16",
    }
    for assignment in options.set:
        name, _, values = assignment.partition("=")
        space[name] = [yaml.safe_load(value) for value in values.split(",")]
    measure(options, space)


def write_data(folder: Path, model: str, examples: int) -> dict[str, Any]:
    """Write the training and evaluation data, and return the workload's part that names them."""
    if model == "t5-large":
        row = {"source": "x" * SOURCE_BYTES, "target": "y" * TARGET_BYTES}
        for name, count in (("train.jsonl", examples), ("eval.jsonl", 8)):
            (folder / name).write_text((json.dumps(row) + "\n") * count)
        return {
            "task": "seq2seq",
            "dataset": {
                "train_files": ["train.jsonl"],
                "eval_files": ["eval.jsonl"],
                "source_column": "source",
                "target_column": "target",
            },
            "max_target_length": TARGET_BYTES + 1,
        }
    write_text(folder / "train.txt", examples * LENGTH + 1)
    write_text(folder / "eval.txt", 8 * LENGTH + 1)
    return {
        "task": "causal_lm",
        "dataset": {"train_files": ["train.txt"], "eval_files": ["eval.txt"]},
    }


def measure(options: argparse.Namespace, space: dict[str, Any]) -> None:
    batch = space["global_batch_size"]
    largest = max(batch) if isinstance(batch, list) else batch
    data = write_data(options.folder, options.model, options.steps * largest)
    weights = options.folder / options.model
    if not weights.exists():
        subprocess.run([sys.executable, str(RANDOM_MODEL), options.model, str(weights)], check=True)
    varied = {name: values for name, values in space.items() if isinstance(values, list)}
    study = {
        "name": options.model,
        "workload": {
            **data,
            "model": {"name_or_path": options.model},
            "tokenizer": {"kind": "byte"},
            "sequence_length": LENGTH,
            "evaluations": 1,
            "eval_batch_size_per_gpu": 8,
        },
        "target": {"perplexity": 1e9},
        "search": {
            "space": {
                **{name: {"choices": v} if name in varied else v for name, v in space.items()},
                "epochs": 1,
            },
            "sampler": "grid",
            "pruning": {"target": False, "cap": False},
        },
        "budget": {"trials": math.prod(map(len, varied.values()))},
        "carbon": {"intensity_g_co2e_per_kwh": 200, "objective": "gpu"},
        "launch": {"kind": "local", "gpus": list(range(options.gpus))},
    }
    run = options.folder / f"{options.model}-{options.gpus}-gpus"
    common.run(study, run.with_suffix(".yaml"), run)
    report = json.loads((run / "report" / "data" / "report.json").read_text())
    estimates = {
        trial: row["estimate"]["peak_gib"]
        for row in report["memory"] or ()
        for trial in row["trials"]
        if row["estimate"]
    }
    print(
        f"\n| {options.model}, {options.gpus} GPUs: {', '.join(varied)} | state | tokens/s |"
        " mJ a token | share of peak | W a GPU | s a micro batch | memory measured (GiB) |"
        " estimated | other stages (s) |"
    )
    print("| --- | --- " + "| ---: " * 8 + "|")
    for record in common.records(run):
        print(of_trial(options, record, varied, estimates), flush=True)


def of_trial(
    options: argparse.Namespace, record: dict[str, Any], varied: Any, estimates: dict[int, float]
) -> str:
    settings = ", ".join(str(record["params"][name]) for name in varied)
    if record["state"] != "complete":
        return f"| {settings} | {record['state']}: {record.get('failure')!s:.200} |"
    steps, stages = record["stages"]["steps"], record["stages"]
    length = LENGTH + (TARGET_BYTES + 1 if options.model == "t5-large" else 0)
    made, params = record["steps_done"] - 1, record["params"]
    tokens = made * params["global_batch_size"] * length
    energy_j, second = steps["energy_kwh"] * JOULES_PER_KWH, steps["duration_s"]
    micro = made * params["gradient_accumulation_steps"]
    per_token = 4 if params.get("lora_rank") else 6
    checkpointed = bool(params.get("gradient_checkpointing"))
    flops = per_token * parameters(options.model) * tokens / second
    return (
        f"| {settings} | complete | {tokens / second:,.0f} | {energy_j / tokens * 1000:.2f} |"
        f" {100 * flops / (PEAK_FLOPS * options.gpus):.1f} %{' + recomputed' * checkpointed} |"
        f" {energy_j / second / options.gpus:.0f} | {second / micro:.3f} |"
        f" {record['peak_memory_gib']:.1f} |"
        f" {estimates.get(record['trial'], math.nan):.1f} |"
        f" {sum(s['duration_s'] for name, s in stages.items() if name != 'steps'):.0f} |"
    )


def parameters(model: str) -> float:
    """Return the number of parameters that take part in products, in round numbers."""
    return {"opt-1.3b": 1.316e9, "llama-7b": 6.607e9, "t5-large": 0.738e9}[model]


if __name__ == "__main__":
    main()
