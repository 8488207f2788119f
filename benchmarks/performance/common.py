"""What the performance benchmarks share: a study, run as a user runs it, and its trials' records."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

COMMAND = [sys.executable, "-m", "carbonopt"]
FINISHED = (0, 3)  # with a recommendation or without


def at_least(least: int) -> Any:
    """A type for arguments: whole numbers from `least` on."""

    def whole(text: str) -> int:
        if (number := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but got {number}")
        return number

    return whole


def read(study: Path) -> dict[str, Any]:
    raw = yaml.safe_load(study.read_text(encoding="utf-8"))
    if (
        not isinstance(raw, dict)
        or not isinstance(raw.get("search"), dict)
        or "space" not in raw["search"]
    ):
        raise SystemExit(f"{study} must be a study file with a search.space, but is not.")
    return raw


def run(raw: dict[str, Any], study: Path, folder: Path, *, quiet: bool = False) -> None:
    """Runs the study `raw` in `folder`. `study` is the file that it came from, or goes to: its
    paths are relative to that file's folder.

    Raises:
        SystemExit: if the study does not come to its end.
    """
    changed = study.with_name(f".{study.stem}-benchmark.yaml")
    changed.write_text(yaml.safe_dump(raw), encoding="utf-8")
    try:
        done = subprocess.run(
            [*COMMAND, "run", str(changed), "--out", str(folder)],
            check=False,
            capture_output=quiet,
            text=True,
        )
    finally:
        changed.unlink()
    if done.returncode not in FINISHED:
        raise SystemExit(f"{done.stderr or ''}the study ended with code {done.returncode}")


def records(folder: Path) -> list[dict[str, Any]]:
    """Of a study's trials, in their order."""
    exported = subprocess.run(
        [*COMMAND, "export", str(folder), "--format", "jsonl"], check=True, capture_output=True
    )
    return [json.loads(line) for line in exported.stdout.splitlines()]
