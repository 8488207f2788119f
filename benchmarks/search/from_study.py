"""A replay table of a study's complete trials, such as those of a grid without pruning.

    carbonopt export runs/grid > trials.jsonl
    python benchmarks/search/from_study.py [--mean-over learning_rate] < trials.jsonl > table.jsonl

The settings that differ between trials are the table's params, and the batch, the rate and the
epochs in any case. A step takes what those after the first one do: a table has no place for the
first one's excess, for warming up. With `--mean-over` it is the mean over the trials that differ in
these settings alone: a learning rate changes no energy, but a GPU's counter ticks every 100 ms,
which is a fifth of a run of half a second.
"""

import argparse
import json
import statistics
import sys

from carbonopt.core.units import JOULES_PER_KWH

ALWAYS = ("global_batch_size", "learning_rate", "epochs")


def line(record: dict, names: list[str]) -> dict:
    evals, steps, later = record["evals"], record["total_steps"], record["stages"]["steps"]
    joules = {
        phase: kwh * JOULES_PER_KWH
        for phase, kwh in record["energy_kwh"].items()
        if kwh is not None
    }
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
        "joules_per_step": later["energy_kwh"] * JOULES_PER_KWH / (steps - 1),
        "seconds_per_step": later["duration_s"] / (steps - 1),
        "joules_per_eval": joules["eval"] / len(evals),
        "evals": points,
    }


def average(lines: list[dict], over: list[str]) -> None:
    groups: dict[tuple, list[dict]] = {}
    for entry in lines:
        alike = tuple(value for name, value in entry["params"].items() if name not in over)
        groups.setdefault(alike, []).append(entry)
    for group in groups.values():
        for name in ("joules_per_step", "seconds_per_step", "joules_per_eval"):
            mean = statistics.fmean(entry[name] for entry in group)
            for entry in group:
                entry[name] = mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mean-over", nargs="+", default=[])
    options = parser.parse_args()
    records = [record for record in map(json.loads, sys.stdin) if record["state"] == "complete"]
    settings = {
        name: {json.dumps(record["params"].get(name)) for record in records}
        for name in records[0]["params"]
    }
    derived = {"gradient_accumulation_steps", "world_size"}
    if all(record["params"].get("gradient_accumulation_steps") == 1 for record in records):
        derived.add("micro_batch_size_per_gpu")
    names = [
        name
        for name, values in settings.items()
        if (name in ALWAYS or len(values) > 1) and name not in derived
    ]
    lines = [line(record, names) for record in records]
    average(lines, options.mean_over)
    for entry in lines:
        print(json.dumps(entry))
