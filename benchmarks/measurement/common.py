"""What the measurement benchmarks share: a study file on other devices, and results as JSON."""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from carbonopt.core.trial import Phase, TrialRecord
from carbonopt.core.units import JOULES_PER_KWH
from carbonopt.energy.hardware import describe_hardware
from carbonopt.engines.local import LocalEngine
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.launch_settings import LocalLaunch
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record
from carbonopt.study_file.reader import load_study

HERE = Path(__file__).parent


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--gpus", type=int, nargs="*", default=[0], help="NVML indices; none: the CPU"
    )
    parser.add_argument(
        "--study", type=Path, default=HERE / "study.yaml", help="a study file of one configuration"
    )
    return parser


def study(file: Path, gpus: list[int]) -> StudyConfig:
    """A study file, on these GPUs."""
    return load_study(file).model_copy(update={"launch": LocalLaunch(gpus=tuple(gpus))})


class Observer:
    def warn(self, text: str) -> None:
        print(text, flush=True)

    def preparing(self, anything: bool) -> None:
        print("preparing" if anything else "starting", flush=True)


class Run(NamedTuple):
    values: dict[str, Any]  # of the space's free dimensions
    seed: int
    probe_s: float | None = None  # as a TrialSpec's


def trained(config: StudyConfig, runs: Iterable[Run]) -> Iterator[tuple[TrialRecord, list[Any]]]:
    """Trains configurations of the study's space one after the other, each in a trial's own fresh
    processes and to its end. Yields each record, and the idle power of each GPU.
    """
    space = SearchSpace(config.search.space, config.launch.world_size, bool(config.launch.gpus))
    rules = Rules(
        emissions_kg_co2e=lambda energy_kwh: energy_kwh,
        budget_spent=lambda: False,
        interrupted=lambda: False,
        timeout_s=300.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = StudyPaths(Path(folder))
        engine = LocalEngine(config)
        try:
            engine.begin(paths, "benchmark", Observer(), lambda: False)
            engine.prepare(lambda: False)
            for number, run in enumerate(runs):
                spec = TrialSpec(
                    number=number,
                    attempt=1,
                    seed=run.seed,
                    params=space.params(run.values),
                    workload=config.workload.model_dump(mode="json"),
                    prepared_dir=str(paths.prepared),
                    trial_dir=str(paths.trial(number)),
                    probe_s=run.probe_s,
                )
                engine.meter.enter(Phase.SETUP)
                trial = engine.start(spec, paths.trial_log(number, 1))
                watch = TrialWatch(
                    spec,
                    begun_record(spec, config.quality, "", None),
                    trial,
                    engine.meter,
                    rules,
                    [],
                    lambda *_: engine.prepare_next(),
                    lambda record: None,
                )
                yield watch.run(), [idle_power.model_dump() for idle_power in engine.meter.idle]
        finally:
            engine.close()


def train_joules(record: TrialRecord) -> float:
    """By the GPUs' own counters, where there are any; else as modelled."""
    counted = record.gpu_energy_kwh
    return JOULES_PER_KWH * (
        record.energy_kwh.train if counted is None else counted["train"].counter
    )


def write(out: Path, gpus: list[int], results: dict) -> None:
    """The results with what they were measured on."""
    versions = {
        name: version(name) for name in ("torch", "deepspeed", "transformers", "codecarbon")
    }
    head = {"hardware": describe_hardware(gpus).model_dump(), "versions": versions}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**head, **results}, indent=1) + "\n")
