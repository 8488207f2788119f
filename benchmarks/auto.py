"""What `space: auto` finds of a fine-tuning, beside a space that was written by hand, for the same
study energy.

    python benchmarks/auto.py FOLDER --pretrain TEXT... --tune TEXT [--seeds 0 1 2] [--trials 12]
        [--gpus 0]

A GPT-2 of bytes is pretrained on some text and fine-tuned on another. The first fine-tuning, with
what BERT's authors advise, sets the target: its perplexity. Then, for each seed, a study of the
hand-written space runs --trials trials; one of `space: auto` may run as many, and spend as much.
Prints a Markdown table; what is in FOLDER already is not run again.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import yaml
from performance import common

from carbonopt.core.units import JOULES_PER_KWH

ADVISED = {
    "global_batch_size": 32,
    "learning_rate": 5e-5,
    "epochs": 3,
}  # Devlin et al. 2018, arXiv 1810.04805
HAND_WRITTEN = {
    "global_batch_size": {"choices": [8, 16, 32, 64]},
    "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
    "epochs": {"choices": [0.5, 1, 2, 3, 4]},
    "zero_stage": {"choices": [0, 1, 2]},
}

Raw = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pretrain", type=Path, nargs="+", required=True)
    parser.add_argument("--tune", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--epochs", type=float, default=4.0, help="of the pretraining")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, target = pretrained(options)
    print(f"target: perplexity {target}")
    print(
        "| seed | space | recommended, J of training | of the hand-written one's | study, kJ |"
        " trials | settings |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | --- |")
    ratios = []
    for seed in options.seeds:
        hand = searched(options, model, target, HAND_WRITTEN, {}, seed)
        auto = searched(
            options, model, target, "auto", {"energy_kwh": hand["study"]["energy_kwh"]}, seed
        )
        ratio = None
        if hand["energy_kwh"] and auto["energy_kwh"]:
            ratios.append(ratio := auto["energy_kwh"] / hand["energy_kwh"])
        print(row(seed, "by hand", hand, None))
        print(row(seed, "auto", auto, ratio), flush=True)
    if ratios:
        spread = f"mean of {len(ratios)}; {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"\nauto ÷ by hand: {statistics.fmean(ratios):.3f} ({spread})")


def study(
    options: argparse.Namespace, name: str, texts: list[Path], space: Any, **more: Any
) -> Raw:
    precision = {"precision": "bf16"} if options.gpus and space != "auto" else {}
    return {
        "name": name,
        "workload": {
            "task": "causal_lm",
            "dataset": {
                "train_files": [str(path.resolve()) for path in texts],
                "eval_fraction": 0.1,
            },
            "sequence_length": options.length,
            "evaluations": 8,
        },
        "target": {"perplexity": 1e3},
        "search": {"space": space if space == "auto" else {**space, **precision}},
        "budget": {"trials": 1},
        "carbon": {
            "country": "USA",
            "region": "california",
            **({"objective": "gpu"} if options.gpus else {}),
        },
        "launch": {"gpus": options.gpus},
        **more,
    }


def pretrained(options: argparse.Namespace) -> tuple[Path, float]:
    """The model's folder, and the perplexity of the advised fine-tuning."""
    sizes = {"n_layer": options.layers, "n_head": options.width // 64, "n_embd": options.width}
    config = {"model_type": "gpt2", "n_positions": options.length, **sizes}
    scratch = {
        "global_batch_size": 32,
        "learning_rate": 1e-3,
        "epochs": options.epochs,
        "warmup_ratio": 0.05,
    }
    first = study(options, "pretrain", options.pretrain, scratch)
    first["workload"] |= {"model": {"from_config": config}, "tokenizer": {"kind": "byte"}}
    advised = study(options, "advised", [options.tune], ADVISED)
    advised["workload"] |= {"model": {"from_config": config}, "tokenizer": {"kind": "byte"}}
    for name, raw in (("pretrain", first), ("advised", advised)):
        (options.folder / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    steps = [
        {"step": "pretrain", "study": "pretrain.yaml"},
        {"step": "advised", "study": "advised.yaml", "needs": {"model": "pretrain"}},
    ]
    pipeline = {"name": "first", "pipeline": steps}
    common.run(pipeline, options.folder / "first.yaml", options.folder / "first", quiet=True)
    (model,) = (options.folder / "first" / "pretrain" / "trials").glob("*/model")
    best = recommended(options.folder / "first" / "advised")["quality"]["value"]
    return model, float(f"{best:.4g}")


def searched(
    options: argparse.Namespace, model: Path, target: float, space: Any, budget: Raw, seed: int
) -> Raw:
    name = f"{'auto' if space == 'auto' else 'hand'}-{seed}"
    raw = study(options, name, [options.tune], space, target={"perplexity": target})
    raw["workload"]["model"] = {"name_or_path": str(model.resolve())}
    raw["search"]["seed"] = seed
    if space != "auto":
        raw["search"]["start"] = {**ADVISED, "zero_stage": 0}
    raw["budget"] = {"trials": options.trials, **budget}
    common.run(raw, options.folder / f"{name}.yaml", options.folder / name, quiet=True)
    return recommended(options.folder / name)


def recommended(folder: Path) -> Raw:
    command = [*common.COMMAND, "recommend", str(folder), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    answer: Raw = json.loads(done.stdout)
    return answer


def row(seed: int, name: str, answer: Raw, ratio: float | None) -> str:
    joules = (
        "–" if answer["energy_kwh"] is None else f"{answer['energy_kwh'] * JOULES_PER_KWH:,.0f}"
    )
    study_kj, trials = (
        answer["study"]["energy_kwh"] * JOULES_PER_KWH / 1e3,
        sum(answer["study"]["trials"].values()),
    )
    params = answer["params"] or {}
    names = ("global_batch_size", "learning_rate", "epochs", "zero_stage", "torch_compile")
    settings = ", ".join(f"{key} {params[key]:.3g}" for key in names if key in params)
    of_hand = "" if ratio is None else f"{ratio:.3f}"
    return f"| {seed} | {name} | {joules} | {of_hand} | {study_kj:.1f} | {trials} | {settings} |"


if __name__ == "__main__":
    main()
