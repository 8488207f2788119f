"""Tokens a second on the CPU: a trial, with the Trainer and DeepSpeed, and bare loops of the same
model.

    python benchmarks/performance/bare_loop.py [--repeats N] [--out FILE.json]

All train the quickstart's model with its starting configuration for one epoch, in turns, each in a
process of its own, so that what else the machine does falls on all. The bare loops have the same
batches, loss, clipping and optimizer; one as PyTorch has them by default, the other with a trial's
fused optimizer and its environment (OpenMP, memory).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

from carbonopt.engines.process.environment import work_environment
from carbonopt.spec.launch_settings import LocalLaunch

ROOT = Path(__file__).parents[2]
START = {
    "global_batch_size": 8,
    "micro_batch_size_per_gpu": 8,
    "learning_rate": 5.0e-3,
    "epochs": 1,
    "zero_stage": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=common.at_least(1), default=5)
    parser.add_argument("--out", type=Path, help="JSON file for every single figure")
    options = parser.parse_args()
    tokens_per_s: dict[str, list[float]] = {
        "carbonopt": [],
        "bare loop": [],
        "bare loop as a trial": [],
    }
    as_trials = work_environment(LocalLaunch(kind="local", gpus=[]), ())
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            run = Path(folder) / f"run-{repeat}"
            tokens_per_s["carbonopt"].append(of_a_trial(run))
            tokens_per_s["bare loop"].append(
                of_a_loop(run, fused=False, environment=dict(os.environ))
            )
            tokens_per_s["bare loop as a trial"].append(
                of_a_loop(run, fused=True, environment=as_trials)
            )
    print("| tokens/s | median | lowest | highest |\n| --- | ---: | ---: | ---: |")
    for name, values in tokens_per_s.items():
        print(
            f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} |"
            f" {max(values):,.0f} |"
        )
    for name in list(tokens_per_s)[1:]:
        ratios = [
            ours / bare
            for ours, bare in zip(tokens_per_s["carbonopt"], tokens_per_s[name], strict=True)
        ]
        print(
            f"\n{name}, pair by pair: {statistics.median(ratios):.3f} ({min(ratios):.3f} to"
            f" {max(ratios):.3f})"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(tokens_per_s, indent=1) + "\n")


def of_a_trial(folder: Path) -> float:
    """Tokens a second of a study's only trial, its first step left out."""
    raw = common.read(ROOT / "studies" / "quickstart.yaml")
    raw["search"]["start"] = START | {"offload": "none", "optimizer": "adamw"}
    raw["budget"] = {"trials": 1}
    raw["workload"]["evaluations"] = 1
    raw["search"]["space"]["epochs"] = {"choices": [1]}
    common.run(raw, folder.with_suffix(".yaml"), folder, quiet=True)
    (record,) = common.records(folder)
    tokens = (
        (record["steps_done"] - 1) * START["global_batch_size"] * raw["workload"]["sequence_length"]
    )
    return tokens / record["stages"]["steps"]["duration_s"]


def of_a_loop(folder: Path, *, fused: bool, environment: dict[str, str]) -> float:
    command = [
        sys.executable,
        __file__,
        "--bare",
        str(folder / "prepared"),
        *(["--fused"] if fused else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def bare(prepared: Path, *, fused: bool) -> None:
    """Prints the tokens a second of the bare loop, its first step left out."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM, get_linear_schedule_with_warmup

    from carbonopt.spec.prepared_folder import PreparedFolder
    from carbonopt.train.data.packing import Division, TextMicroBatches, open_tokens, total_steps

    folder = PreparedFolder(prepared)
    summary = folder.read_summary()
    batch = START["global_batch_size"]
    steps = total_steps(summary.train_examples, batch, START["epochs"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder.model_config), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=START["learning_rate"], fused=fused)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    data = TextMicroBatches(
        open_tokens(folder.train), summary.sequence_length, Division(batch, batch, steps, 0, 0, 1)
    )
    model.train()
    for index in range(steps):
        if index == 1:
            began = time.monotonic()
        inputs, labels = data[index]["input_ids"], data[index]["labels"]
        logits = model(input_ids=inputs).logits
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print((steps - 1) * batch * summary.sequence_length / (time.monotonic() - began))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        bare(Path(sys.argv[2]), fused="--fused" in sys.argv)
    else:
        main()
