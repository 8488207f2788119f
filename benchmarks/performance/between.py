"""How long a study takes from the end of one trial to the first optimizer step of the next, warm
and cold.

    python benchmarks/performance/between.py STUDY.yaml [--trials N] [--ways warm cold] [--out
        FILE.json]

Runs the study in empty folders, with the warm start and without. All times are those of the trials'
own records.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from datetime import datetime
from pathlib import Path

import common

BEFORE_STEPS = ("imports", "data", "model", "engine", "compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--trials", type=common.at_least(2), default=8)
    parser.add_argument("--ways", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--out", type=Path, help="JSON file for every single time")
    options = parser.parse_args()
    times_by_way = {}
    for name in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}:", flush=True)
            run = Path(folder) / "run"
            common.run(the_study(options.study, options.trials, name == "warm"), options.study, run)
            records = common.records(run)
        times_by_way[name] = [times(before, after) for before, after in itertools.pairwise(records)]
        if options.out is not None:
            options.out.write_text(json.dumps(times_by_way, indent=1) + "\n")
    print(table(times_by_way))


def the_study(study: Path, trials: int, warm: bool) -> dict:
    """The study with so many trials."""
    raw = common.read(study)
    raw["launch"] = {**raw.get("launch", {}), "warm_start": warm}
    raw["budget"] = {"trials": trials}
    raw["search"]["sampler"] = (
        "random"  # it proposes the same trials for both ways: it learns from no measurement
    )
    raw["search"]["pruning"] = {"target": False, "cap": False}
    raw.pop("confirm", None)
    return raw


def times(before: dict, after: dict) -> dict[str, float]:
    """Seconds between two trials, by what they go to."""

    def stage(record: dict, name: str) -> float:
        return record["stages"].get(name, {"duration_s": 0.0})["duration_s"]

    lasted_s = sum(stage_cost["duration_s"] for stage_cost in before["stages"].values())
    pause = datetime.fromisoformat(after["started_at"]) - datetime.fromisoformat(
        before["started_at"]
    )
    parts = {
        "teardown": stage(before, "teardown"),
        "record, propose, start": pause.total_seconds() - lasted_s + stage(after, "imports"),
        "device and data": stage(after, "data"),
        "model": stage(after, "model"),
        "engine": stage(after, "engine"),
        "first step": stage(after, "compile"),
    }
    return {"end to first step": sum(parts.values()), **parts}


def table(times_by_way: dict[str, list[dict[str, float]]]) -> str:
    """Median (lowest to highest) of each part, in Markdown."""
    names = list(next(iter(times_by_way.values()))[0])
    lines = [
        "| seconds |"
        f" {' | '.join(f'{name}, n = {len(rows)}' for name, rows in times_by_way.items())} |"
    ]
    lines.append("| --- |" + " ---: |" * len(times_by_way))
    for part in names:
        cells = []
        for rows in times_by_way.values():
            values = [row[part] for row in rows]
            cells.append(
                f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            )
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
