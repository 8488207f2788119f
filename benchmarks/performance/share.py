"""What share of a study's time and energy goes to something else than training and evaluation.

    python benchmarks/performance/share.py STUDY.yaml FOLDER [--trials 30] [--epochs 48] [--batch
        256]

Runs the study in FOLDER, or goes on with it, with a random search of the learning rate, one batch,
a fixed number of epochs, and nothing stopped early. Called again with more trials it goes on; the
calls' wall times are added up in FOLDER.wall-s.json. Time is the whole command's, its start, the
preparation and the report included; energy is what the study counts, the preparation and the gaps
included.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import common

TRAINING = ("compile", "steps", "evaluation")  # stages; the first is the first optimizer step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=common.at_least(1), default=30)
    parser.add_argument(
        "--epochs", type=float, default=48, help="48: 30 s of shakespeare-char on an H200"
    )
    parser.add_argument("--batch", type=common.at_least(1), default=256)
    options = parser.parse_args()
    began, began_s = datetime.now(UTC), time.monotonic()
    common.run(the_study(options), options.study, options.folder)
    calls = options.folder.with_name(f"{options.folder.name}.wall-s.json")
    walls = [*(json.loads(calls.read_text()) if calls.exists() else []), time.monotonic() - began_s]
    calls.write_text(json.dumps(walls) + "\n")
    records = common.records(options.folder)
    print(table(records, options.folder, walls))
    if len(walls) == 1:
        print(where(records, began, walls[0]))


def the_study(options: argparse.Namespace) -> dict:
    raw = common.read(options.study)
    raw.pop("confirm", None)
    raw["budget"] = {"trials": options.trials}
    raw["search"] |= {"sampler": "random", "pruning": {"target": False, "cap": False}}
    raw["search"].pop("start", None)
    raw["search"]["space"] |= {
        "global_batch_size": options.batch,
        "micro_batch_size_per_gpu": options.batch,
        "epochs": options.epochs,
    }
    return raw


def table(records: list[dict], folder: Path, walls: list[float]) -> str:
    training_s = sum(
        record["stages"][name]["duration_s"] for record in records for name in TRAINING
    )
    spent = json.loads((folder / "report" / "data" / "report.json").read_text())["spent"]
    parts = spent["gpu_parts_kwh"] if spent["gpu_kwh"] is not None else spent["by_phase_kwh"]
    training_kwh, all_kwh = parts["train"] + parts["eval"], sum(parts.values())
    lasted = sorted(record["duration_s"]["total"] for record in records)
    return "\n".join(
        [
            (
                f"{len(records)} trials of {lasted[0]:.1f} to {lasted[-1]:.1f} s; calls of the"
                f" command: {len(walls)}"
            ),
            "| | all | training and evaluation | anything else |",
            "| --- | ---: | ---: | ---: |",
            (
                f"| wall time (s) | {sum(walls):.1f} | {training_s:.1f} |"
                f" {1 - training_s / sum(walls):.1%} |"
            ),
            (
                f"| energy (Wh) | {all_kwh * 1000:.3f} | {training_kwh * 1000:.3f} |"
                f" {1 - training_kwh / all_kwh:.1%} |"
            ),
        ]
    )


def where(records: list[dict], began: datetime, wall_s: float) -> str:
    """What else the wall time of one call went to."""
    starts = [
        (datetime.fromisoformat(record["started_at"]) - began).total_seconds() for record in records
    ]
    lasted = [sum(stage["duration_s"] for stage in record["stages"].values()) for record in records]
    trained = [sum(record["stages"][name]["duration_s"] for name in TRAINING) for record in records]
    ended = starts[-1] + lasted[-1]
    parts = {
        "before the first trial": starts[0],
        "set-up and end of trials": sum(lasted) - sum(trained),
        "between trials": ended - starts[0] - sum(lasted),
        "after the last": wall_s - ended,
    }
    return "\n".join(
        f"| ... {name} (s) | | | {lasts_s:.1f}, {lasts_s / wall_s:.1%} |"
        for name, lasts_s in parts.items()
    )


if __name__ == "__main__":
    main()
