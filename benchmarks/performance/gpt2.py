"""What a token costs: GPT-2 124M with the Trainer and DeepSpeed in each setting, beside a plain
compiled PyTorch loop.

    python benchmarks/performance/gpt2.py FOLDER [--lengths 512 1024] [--steps 12]

Trains on random bytes, in batches of 2^19 tokens as GPT-2's, for a few steps a setting: what a
token costs, not what is learned. The vocabulary is GPT-2's, so that the output layer and the loss
cost what they cost there. Energy is by the GPU's own counter, over the steps after the first.
Writes the studies into FOLDER and prints a table for each length.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import yaml

JOULES_PER_KWH = 3.6e6
BATCH_TOKENS = 2**19
EVAL_TOKENS = 2**13
SETTINGS = ("torch_compile", "output_layer", "zero_stage", "micro_batch_size_per_gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--lengths",
        type=common.at_least(1),
        nargs="+",
        default=[512, 1024],
        help="tokens in a sequence",
    )
    parser.add_argument("--steps", type=common.at_least(2), default=12)
    parser.add_argument(
        "--micro-batch-tokens", type=common.at_least(1), nargs="+", default=[2**16, 2**17]
    )
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[1])
    parser.add_argument("--compile", type=yaml.safe_load, nargs="+", default=[False, True])
    parser.add_argument("--output-layers", nargs="+", default=["standard", "fused", "fused_fp8"])
    parser.add_argument("--no-plain-loop", action="store_true")
    options = parser.parse_args()
    if any(
        tokens % length
        for tokens in (*options.micro_batch_tokens, BATCH_TOKENS)
        for length in options.lengths
    ):
        parser.error("--micro-batch-tokens and 2^19 must be multiples of --lengths")
    options.folder.mkdir(parents=True, exist_ok=True)
    write_text(options.folder / "train.txt", options.steps * BATCH_TOKENS + 1)
    write_text(options.folder / "eval.txt", EVAL_TOKENS)
    for length in options.lengths:
        measure(options, length)


def write_text(path: Path, characters: int) -> None:
    """Letters and signs at random, always the same."""
    drawn = np.random.default_rng(0).integers(32, 127, characters, np.uint8)
    path.write_bytes(drawn.tobytes())


def measure(options: argparse.Namespace, length: int) -> None:
    run = options.folder / f"gpt2-{length}"
    study = run.with_suffix(".yaml")
    common.run(the_study(options, length), study, run)
    print(
        f"\n| {length} tokens | {' | '.join(SETTINGS)} | mJ a token | tokens/s | W | first step (s)"
        " | memory (GiB) |"
    )
    print("| --- " * (1 + len(SETTINGS)) + "| ---: " * 5 + "|")
    for record in common.records(run):
        print(of_trial(record, length), flush=True)
    if not options.no_plain_loop:
        print(of_plain_loop(run, options.micro_batch_tokens[0] // length, length), flush=True)


def the_study(options: argparse.Namespace, length: int) -> dict[str, Any]:
    choices = (
        options.compile,
        options.output_layers,
        options.zero_stages,
        options.micro_batch_tokens,
    )
    model = {
        "model_type": "gpt2",
        "vocab_size": 50304,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return {
        "name": f"gpt2-{length}",
        "workload": {
            "task": "causal_lm",
            "model": {"from_config": model},
            "tokenizer": {"kind": "byte"},
            "dataset": {"train_files": ["train.txt"], "eval_files": ["eval.txt"]},
            "sequence_length": length,
            "evaluations": 1,
            "eval_batch_size_per_gpu": 8,
        },
        "target": {"perplexity": 1e6},
        "search": {
            "space": {
                "global_batch_size": BATCH_TOKENS // length,
                "micro_batch_size_per_gpu": {
                    "choices": [tokens // length for tokens in options.micro_batch_tokens]
                },
                "learning_rate": 1e-4,
                "epochs": 1,
                "zero_stage": {"choices": options.zero_stages},
                "precision": "bf16",
                "torch_compile": {"choices": options.compile},
                "output_layer": {"choices": options.output_layers},
            },
            "sampler": "grid",
            "pruning": {"target": False, "cap": False},
        },
        "budget": {"trials": math.prod(map(len, choices))},
        "carbon": {"intensity_g_co2e_per_kwh": 200, "objective": "gpu"},
        "launch": {"kind": "local", "gpus": [0]},
    }


def of_trial(record: dict[str, Any], length: int) -> str:
    settings = " | ".join(str(record["params"][name]) for name in SETTINGS)
    if record["state"] != "complete":
        return f"| Trainer, DeepSpeed | {settings} | {record['state']} | | | | |"
    steps = record["stages"]["steps"]
    tokens = (record["steps_done"] - 1) * record["params"]["global_batch_size"] * length
    energy_j = steps["energy_kwh"] * JOULES_PER_KWH
    return (
        f"| Trainer, DeepSpeed | {settings} | {energy_j / tokens * 1000:.3f} |"
        f" {tokens / steps['duration_s']:,.0f} | {energy_j / steps['duration_s']:.0f} |"
        f" {record['stages']['compile']['duration_s']:.1f} | {record['peak_memory_gib']:.1f} |"
    )


def of_plain_loop(run: Path, micro_batch: int, length: int) -> str:
    out = run.with_name(f"{run.name}-plain.json")
    plain = [sys.executable, str(Path(__file__).with_name("plain.py"))]
    model = str(run / "prepared" / "model")
    subprocess.run(
        [*plain, model, str(micro_batch), str(length), str(out)], check=True, capture_output=True
    )
    result = json.loads(out.read_text())
    return (
        f"| plain loop | True | | | {micro_batch} | {result['mj_per_token']:.3f} |"
        f" {result['tokens_per_s']:,.0f} | {result['power_w']:.0f} | {result['first_steps_s']:.1f}"
        f" (five) | {result['peak_memory_gib']:.1f} |"
    )


if __name__ == "__main__":
    main()
