"""Trials side by side against one after another: what do wall time, energy and a trial's own
figures become?

python benchmarks/scale/side_by_side.py OUT.json [--gpus 0 1] [--workers 2] [--study FILE]
    [--repeats 2]

The same study runs with one trial at a time on the first GPU, and with one on each. All GPUs and
the machine are read from outside meanwhile. Without GPUs: on the CPU, with so many workers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from carbonopt.analysis.footprint import footprint
from carbonopt.core.units import joules_from_kwh
from carbonopt.energy.codecarbon import CodeCarbonTotals
from carbonopt.energy.counter import EnergyCounters
from carbonopt.energy.hardware import describe_hardware
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

HERE = Path(__file__).parent


class Outside:
    """What the machine has used since this was made, read by instruments of its own."""

    def __init__(self, gpus: list[int]) -> None:
        self._counters, self._totals = EnergyCounters(gpus), CodeCarbonTotals(gpus)
        self._began_j, self._began, self._began_s = (
            self._counters.read(),
            self._totals.read(),
            time.monotonic(),
        )

    def end(self) -> dict[str, float]:
        gpus_j, totals = self._counters.read(), self._totals.read()
        used = {
            "seconds": time.monotonic() - self._began_s,
            "gpu_j": sum(gpus_j) - sum(self._began_j),
        }
        for part in ("cpu", "ram"):
            used[f"{part}_j"] = joules_from_kwh(
                getattr(totals, f"{part}_energy") - getattr(self._began, f"{part}_energy")
            )
        self._counters.close()
        self._totals.close()
        return used


def measured(data: StudyData) -> dict:
    whole = footprint(data)
    trials = {
        str(sorted(record.params.as_record().items())): {
            "train_j": joules_from_kwh(record.energy_kwh.train),
            "train_gpu_j": record.energy_kwh.train_gpu
            and joules_from_kwh(record.energy_kwh.train_gpu),
            "train_s": record.duration_s.train,
            "total_s": record.duration_s.total,
            "quality": record.value,
        }
        for record in data.records
    }
    sessions = [
        {
            name: joules_from_kwh(getattr(session, f"{name}_kwh"))
            for name in ("prepare", "gap", "outer")
        }
        | {"duration_s": session.duration_s}
        for session in data.sessions
    ]
    energies = {
        "energy_j": joules_from_kwh(whole.energy_kwh),
        "outer_j": joules_from_kwh(whole.outer_kwh),
    }
    closures = {"closure": whole.closure, "gpu_closure": whole.gpu_closure}
    return {**energies, **closures, "sessions": sessions, "trials": trials}


def run(study: dict, launch: dict, gpus: list[int]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        paths, file = StudyPaths(Path(folder) / "study"), Path(folder) / "study.yaml"
        file.write_text(yaml.safe_dump({**study, "launch": {"kind": "local", **launch}}))
        outside, began = Outside(gpus), time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", "carbonopt", "run", str(file), "--out", str(paths.root)]
        ).returncode
        wall_s = time.monotonic() - began
        from_outside = outside.end()
        data = StudyStorage.of_folder(
            connect(storage_url(paths, None), must_exist=True), paths
        ).read()
    return {
        "launch": launch,
        "exit_code": code,
        "wall_s": wall_s,
        "outside": from_outside,
        **measured(data),
    }


def compared(alone: list[dict], beside: list[dict]) -> dict:
    """Side by side ÷ one after another: of each configuration, and of the whole."""
    ratios = {
        name: [
            statistics.mean(run["trials"][key][name] for run in beside)
            / statistics.mean(run["trials"][key][name] for run in alone)
            for key in alone[0]["trials"]
        ]
        for name in ("train_j", "train_gpu_j", "train_s", "quality")
        if all(
            trial[name] is not None for run in (*alone, *beside) for trial in run["trials"].values()
        )
    }
    told = {
        name: {"mean": statistics.mean(each), "sd": statistics.stdev(each)}
        for name, each in ratios.items()
    }
    for name in ("wall_s", "energy_j"):
        told[name] = statistics.mean(run[name] for run in beside) / statistics.mean(
            run[name] for run in alone
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--study", type=Path, default=HERE / "side-by-side.yaml")
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text())
    dataset = study["workload"]["dataset"]
    if "train_files" in dataset:
        dataset["train_files"] = [
            str((options.study.parent / name).resolve()) for name in dataset["train_files"]
        ]
    one = {"gpus": options.gpus[:1]}
    many = (
        {"gpus": options.gpus, "gpus_per_trial": 1}
        if options.gpus
        else {"gpus": [], "workers": options.workers}
    )
    runs: dict[str, list[dict]] = {"alone": [], "beside": []}
    for _ in range(options.repeats):
        runs["alone"].append(run(study, one, options.gpus))
        runs["beside"].append(run(study, many, options.gpus))
        ratios = compared(runs["alone"], runs["beside"])
        results = {
            "hardware": describe_hardware(options.gpus).model_dump(),
            "beside ÷ alone": ratios,
            **runs,
        }
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(ratios), flush=True)


if __name__ == "__main__":
    main()
