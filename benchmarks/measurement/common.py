"""What the measurement benchmarks share: a study file on other devices, and results as JSON."""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from carbonopt.core.config import LocalLaunch, StudyConfig
from carbonopt.energy.hardware import describe_hardware
from carbonopt.study.file import load_study

HERE = Path(__file__).parent


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file for the results")
    parser.add_argument("--gpus", type=int, nargs="*", default=[0], help="NVML indices; none: the CPU")
    parser.add_argument("--study", type=Path, default=HERE / "study.yaml", help="a study file of one configuration")
    return parser


def study(file: Path, gpus: list[int]) -> StudyConfig:
    """A study file, on these GPUs."""
    return load_study(file).model_copy(update={"launch": LocalLaunch(gpus=tuple(gpus))})


def write(out: Path, gpus: list[int], results: dict) -> None:
    """The results with what they were measured on."""
    versions = {name: version(name) for name in ("torch", "deepspeed", "transformers", "codecarbon")}
    head = {"hardware": describe_hardware(gpus).model_dump(), "versions": versions}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**head, **results}, indent=1) + "\n")
