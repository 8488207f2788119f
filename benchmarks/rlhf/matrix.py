"""What the tasks of preferences and rewards reach on the CPU, by ranks, ZeRO stage and LoRA: every
cell a real trial.

    python benchmarks/rlhf/matrix.py FOLDER [--rows reward dpo grpo rloo]

Each row is a shipped study, shortened, with one seed; its column "start" is a training at a
learning rate of nothing. Prints a Markdown table; a cell that failed has the reason beneath it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

STUDIES = Path(__file__).parents[2] / "studies"
COMMAND = [sys.executable, "-m", "carbonopt"]
PAIRS = {"global_batch_size": 16, "micro_batch_size_per_gpu": 8, "epochs": 0.2}
PROMPTS = {
    "global_batch_size": 64,
    "micro_batch_size_per_gpu": 32,
    "num_generations": 8,
    "epochs": 0.03,
}
ROWS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # study, of its workload, of its space
    "reward": ("reward", {}, {**PAIRS, "learning_rate": 1e-2}),
    "dpo": ("dpo", {}, {**PAIRS, "learning_rate": 5e-3, "beta": 0.1}),
    "grpo": (
        "rlhf",
        {"algorithm": "grpo"},
        {**PROMPTS, "learning_rate": 1e-3, "kl_coefficient": 0.04},
    ),
    "rloo": (
        "rlhf",
        {"algorithm": "rloo"},
        {**PROMPTS, "learning_rate": 1e-3, "kl_coefficient": 0.04},
    ),
}
RANKS, ZERO_STAGES, LORA_RANKS = (1, 2), (0, 2, 3), (0, 8)
BESIDE = ("mean_margin", "kl_nats")
UNTRAINED = {"learning_rate": 1e-12, "zero_stage": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, reasons = [], []
    for row in options.rows:
        start = trials(row, 1, UNTRAINED, options.folder / f"{row}-start")[0]
        cells = [row, quality(start)]
        for ranks in RANKS:
            grid = {
                "zero_stage": {"choices": list(ZERO_STAGES)},
                "lora_rank": {"choices": list(LORA_RANKS)},
            }
            records = trials(row, ranks, grid, options.folder / f"{row}-{ranks}")
            for lora_rank in LORA_RANKS:
                for stage in ZERO_STAGES:
                    wanted = {"zero_stage": stage, "lora_rank": lora_rank}
                    record = next(
                        record for record in records if wanted.items() <= record["params"].items()
                    )
                    cells.append(quality(record))
                    if record["failure"] is not None:
                        where = f"{row}, {ranks} ranks, ZeRO {stage}, LoRA {lora_rank}"
                        reasons.append(f"- {where}: {record['failure']['text']}")
        rows.append(f"| {' | '.join(cells)} |")
    heads = ["", "start"]
    for ranks in RANKS:
        heads += [
            f"{ranks}, {lora_rank}, ZeRO {stage}"
            for lora_rank in LORA_RANKS
            for stage in ZERO_STAGES
        ]
    print(
        "\n".join(
            [f"| {' | '.join(heads)} |", f"| ---{' | ---:' * (len(heads) - 1)} |", *rows, *reasons]
        )
    )


def trials(row: str, ranks: int, space: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The records of a study of a row's trials; what is there already is not run again."""
    name, workload, own = ROWS[row]
    raw = yaml.safe_load((STUDIES / f"{name}.yaml").read_text(encoding="utf-8"))
    raw["workload"] |= {**workload, "evaluations": 1}
    keeps = {key: raw["search"]["space"][key] for key in ("lr_scheduler", "warmup_ratio")}
    search = {"sampler": "grid", "seed": 0, "pruning": {"target": False, "cap": False}}
    raw["search"] = search | {"space": {**keeps, **own, **space}}
    raw["budget"] = {"trials": 12}
    raw["launch"] |= {"cpu_ranks": ranks}
    study = STUDIES / f".{row}-matrix.yaml"  # its paths are relative to its folder
    study.write_text(yaml.safe_dump(raw), encoding="utf-8")
    try:
        subprocess.run(
            [*COMMAND, "run", study, "--out", folder], check=False, stdout=subprocess.DEVNULL
        )
    finally:
        study.unlink()
    exported = subprocess.run(
        [*COMMAND, "export", folder, "--format", "jsonl"], check=True, capture_output=True
    )
    return [json.loads(line) for line in exported.stdout.splitlines()]


def quality(record: dict[str, Any]) -> str:
    """At the end; in brackets the mean margin of pairs, or the divergence from the start in nats."""
    if record["state"] != "complete":
        return "failed"
    point = record["evals"][-1]
    others = [point["other_qualities"][name] for name in BESIDE if name in point["other_qualities"]]
    return " ".join([f"{point['value']:.4f}", *(f"({value:.4f})" for value in others)])


if __name__ == "__main__":
    main()
