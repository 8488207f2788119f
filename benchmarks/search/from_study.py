"""A replay table of a study's complete trials, such as those of a grid without pruning.

    carbonopt export runs/grid --format jsonl | python benchmarks/search/from_study.py > table.jsonl

The settings that differ between trials are the table's params, and the batch, the rate and the epochs in any case.
"""

import json
import sys

from carbonopt.core.units import JOULES_PER_KWH

ALWAYS = ("global_batch_size", "learning_rate", "epochs")


def line(record: dict, names: list[str]) -> dict:
    evals, steps = record["evals"], record["total_steps"]
    joules = {phase: kwh * JOULES_PER_KWH for phase, kwh in record["energy_kwh"].items() if kwh is not None}
    exponential = record["quality"]["name"] == "perplexity"
    points = [
        {"step": point["step"], "nll": point["sum"] / point["count"]}
        if exponential
        else {"step": point["step"], "mean": point["sum"] / point["count"], "count": point["count"]}
        for point in evals
    ]
    return {
        "params": {name: record["params"][name] for name in names},
        "seed": record["seed"],
        "total_steps": steps,
        "joules_per_step": joules["train"] / steps,
        "seconds_per_step": record["duration_s"]["train"] / steps,
        "joules_per_eval": joules["eval"] / len(evals),
        "evals": points,
    }


if __name__ == "__main__":
    records = [record for record in map(json.loads, sys.stdin) if record["state"] == "complete"]
    settings = {name: {json.dumps(record["params"].get(name)) for record in records} for name in records[0]["params"]}
    derived = ("gradient_accumulation_steps", "world_size")
    names = [name for name, values in settings.items() if (name in ALWAYS or len(values) > 1) and name not in derived]
    for record in records:
        print(json.dumps(line(record, names)))
