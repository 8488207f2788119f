"""Whether a configuration's energy depends on the place of its trial in the study: one-off costs, such as compiling.

    python benchmarks/performance/orders.py STUDY.yaml FOLDER [--orders 10] [--epochs 0.05] [--batches 16 32] [--gpus 0]

The study's workload is trained with each batch, with `torch_compile` and without, in studies by the grid that differ by
the order of their trials alone, each with an empty cache of compiled kernels; once with probes, once without them.
Prints, for each configuration, the energy of its training where it was the first to compile its kernels, or simply the
first, and where it was not; and in how many orders the ranking of all was that of their means.
"""

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

J_PER_KWH = 3.6e6
RATES = (1e-3, 1.01e-3)  # of two trials of each configuration, which take the same energy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--orders", type=common.at_least(2), default=10)
    parser.add_argument("--epochs", type=float, default=0.05)
    parser.add_argument("--batches", type=common.at_least(1), nargs="+", default=[16, 32])
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    options = parser.parse_args()
    raw = common.read(options.study)
    print("| probes | configuration | J, first of its kernels | J, later | first ÷ later | spread of the later |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for probes in (True, False):
        studies = [of_order(raw, options, probes, seed) for seed in range(options.orders)]
        for line in table(studies, "with" if probes else "without"):
            print(line)


Trials = list[tuple[str, float]]  # configuration and joules, in their order


def of_order(raw: dict[str, Any], options: argparse.Namespace, probes: bool, seed: int) -> Trials:
    space: dict[str, Any] = {
        **common.fixed(raw),
        "global_batch_size": {"choices": options.batches},
        "learning_rate": {"choices": list(RATES)},
        "epochs": options.epochs,
        "zero_stage": 0,
        "torch_compile": {"choices": [False, True]},
    }
    search = {"space": space, "sampler": "grid", "seed": seed, "probes": probes}
    search["pruning"] = {"target": False, "cap": False}
    made = {**raw, "search": search, "budget": {"trials": 4 * len(options.batches)}, "launch": {"gpus": options.gpus}}
    made["workload"] = {**raw["workload"], "evaluations": 1}
    made.pop("confirm", None)
    if options.gpus:
        made["carbon"] = {**raw["carbon"], "objective": "gpu"}
    folder = options.folder / f"{'probes' if probes else 'none'}-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute().with_suffix(".cache"))
    common.run(made, options.study, folder, quiet=True)
    records = common.records(folder)
    return [(configuration(record), record["energy_kwh"]["train"] * J_PER_KWH) for record in records]


def configuration(record: dict[str, Any]) -> str:
    params = record["params"]
    return f"batch {params['global_batch_size']}{', compiled' if params['torch_compile'] else ''}"


def table(studies: Sequence[Trials], probes: str) -> list[str]:
    first, later = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for trials in studies:
        seen = set()
        for name, joules in trials:
            (later if name in seen else first)[name].append(joules)
            seen.add(name)
    lines = []
    for name in sorted(first):
        mean, rest = statistics.fmean(first[name]), statistics.fmean(later[name])
        spread = statistics.stdev(later[name]) / rest
        figures = f"{mean:.3g} | {rest:.3g} | {mean / rest:.3f} | {spread:.1%}"
        lines.append(f"| {probes} | {name} | {figures} |")
    whole = {name: statistics.fmean(first[name] + later[name]) for name in first}
    expected = sorted(whole, key=lambda name: whole[name])
    alike = 0
    for trials in studies:
        by_first: dict[str, float] = {}
        for name, joules in trials:
            by_first.setdefault(name, joules)
        alike += sorted(by_first, key=lambda name: by_first[name]) == expected
    lines.append(f"| {probes} | ranked as by their means | {alike} of {len(studies)} orders | | | |")
    return lines


if __name__ == "__main__":
    main()
