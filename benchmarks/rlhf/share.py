"""What share of its trials' training generating takes, in time and energy, from the records of
studies that have run.

python benchmarks/rlhf/share.py FOLDER...
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

TRAINING = ("compile", "generation", "steps")  # stages; the first is the first optimizer step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    lines = [
        "| study | trials | of training's time | of its energy | of the trials' time |",
        "| --- |" + " ---: |" * 4,
    ]
    for folder in parser.parse_args().folders:
        trials = [record["stages"] for record in records(folder) if record["state"] == "complete"]
        cells = [
            shares(trials, "duration_s", TRAINING),
            shares(trials, "energy_kwh", TRAINING),
            shares(trials, "duration_s", tuple(trials[0])),
        ]
        lines.append(f"| {folder.name} | {len(trials)} | {' | '.join(cells)} |")
    print("\n".join(lines))


def records(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "carbonopt", "export", str(folder), "--format", "jsonl"]
    exported = subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in exported.stdout.splitlines()]


def shares(trials: list[dict[str, dict[str, float]]], of: str, stages: tuple[str, ...]) -> str:
    """Median (lowest to highest)."""
    found = [
        trial["generation"][of] / sum(trial[name][of] for name in stages if name in trial)
        for trial in trials
    ]
    return f"{median(found):.1%} ({min(found):.1%} to {max(found):.1%})"


if __name__ == "__main__":
    main()
