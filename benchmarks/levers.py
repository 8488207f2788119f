"""What each lever gives beside a base configuration, with the same seeds and the same number of
steps.

    python benchmarks/levers.py STUDY.yaml FOLDER [--data FILE] [--seeds 0 1 2] [--rates 0.5 1 2]
        [--levers NAME ...]

The base is the study's `search.start`, and what its space fixes, with ZeRO 0, which Muon needs. For
each lever and seed FOLDER gets a study of its own, by the grid, nothing stopped; what is there
already is not run again. Each configuration is tried at the base's learning rate times each of
--rates, and has the row of the rate with the best mean. Prints a Markdown table: quality as mean
(lowest to highest), time and energy of training as medians.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from performance import common

from carbonopt.core.quality import quality_of

# Beside the base, as search.space has them; of a list each value is tried.
LEVERS: dict[str, dict[str, Any]] = {
    "base": {},
    "muon": {"optimizer": "muon", "weight_averaging": [0.0, 0.01]},
    "dropout": {"dropout": [0.1, 0.2]},
    "decay": {"lr_scheduler": "warmup_stable_decay", "decay_ratio": [0.2, 0.5]},
    "averaging": {"weight_averaging": [0.01, 0.05, 0.2]},
    "constant": {"lr_scheduler": "constant_with_warmup", "weight_averaging": [0.0, 0.05, 0.2]},
}
J_PER_KWH = 3.6e6

Params = dict[str, Any]
Records = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--data", type=Path, nargs="+", help="text files in the place of the study's data set"
    )
    parser.add_argument("--seeds", type=common.at_least(0), nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0], help="factors of the base's learning rate"
    )
    parser.add_argument("--levers", choices=LEVERS, nargs="+", default=list(LEVERS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    raw = common.read(options.study)
    base = base_of(raw)
    if options.data:
        raw["workload"]["dataset"] = {"train_files": [str(path.resolve()) for path in options.data]}
    rates = [base["learning_rate"] * factor for factor in options.rates]
    names = ["base", *(name for name in options.levers if name != "base")]
    records: dict[str, Records] = {name: [] for name in names}
    for seed, name in itertools.product(options.seeds, names):
        made = study_of(raw, {**base, "learning_rate": rates}, LEVERS[name], seed)
        folder = options.folder / f"{name}-{seed}"
        common.run(made, options.study, folder, quiet=True)
        records[name] += common.records(folder)
    print("\n".join(table(records, base, rates, raw["target"])))


def base_of(raw: Params) -> Params:
    """One value of each dimension."""
    start = raw["search"].get("start") or {}
    base = {**raw["search"]["space"], **start, "zero_stage": 0}
    if free := [name for name, value in base.items() if isinstance(value, dict)]:
        raise SystemExit(
            "the base needs one value of each dimension: fix it, or name it in search.start:"
            f" {free}"
        )
    return base


def study_of(raw: Params, base: Params, lever: Params, seed: int) -> Params:
    """A study of all its configurations."""
    space = {
        name: {"choices": value} if isinstance(value, list) else value
        for name, value in {**base, **lever}.items()
    }
    search = {
        "space": space,
        "sampler": "grid",
        "seed": seed,
        "pruning": {"target": False, "cap": False},
    }
    trials = len(base["learning_rate"]) * len(list(configurations(lever)))
    made = {**raw, "search": search, "budget": {"trials": trials}}
    made.pop("confirm", None)
    return made


def configurations(lever: Params) -> Iterator[Params]:
    values = [value if isinstance(value, list) else [value] for value in lever.values()]
    for combination in itertools.product(*values):
        yield dict(zip(lever, combination, strict=True))


def table(
    records: dict[str, Records], base: Params, rates: list[float], target: Params
) -> Iterator[str]:
    """Each configuration at its best rate; what failed, by its state, at all of them."""
    (name, bound), *_ = target.items()
    quality = quality_of(name, "minimize")
    yield (
        f"| | lr | {name} | reached {bound:g} | steps | s | of the base's | J | of the base's |"
        " failed |"
    )
    yield f"| ---{' | ---:' * 9} |"
    of_base: Records = []
    rows = [
        (name, configuration) for name in records for configuration in configurations(LEVERS[name])
    ]
    for lever, configuration in rows:
        tried = [
            record for record in records[lever] if configuration.items() <= record["params"].items()
        ]
        failed = [
            f"{record['state']} at {record['params']['learning_rate']:g}"
            for record in tried
            if not ended(record)
        ]
        by_rate = [
            [r for r in tried if r["params"]["learning_rate"] == rate and ended(r)]
            for rate in rates
        ]
        most = max(map(len, by_rate))  # a rate with which some seed fails is none
        best = min(
            (runs for runs in by_rate if runs and len(runs) == most),
            key=lambda runs: quality.rank(statistics.fmean(map(value_of, runs))),
            default=[],
        )
        of_base = of_base or best
        label = ", ".join(f"`{key}: {value}`" for key, value in configuration.items()) or "base"
        cells = row(best, of_base, quality.rank(bound), quality.rank) if best else ["–"] * 8
        yield f"| {label} | {' | '.join(cells)} | {', '.join(failed) or '–'} |"


def ended(record: dict[str, Any]) -> bool:
    return bool(record["state"] == "complete")


def value_of(record: dict[str, Any]) -> float:
    return float(record["quality"]["value"])


def row(runs: Records, of_base: Records, bound: float, rank: Any) -> list[str]:
    values = [value_of(run) for run in runs]
    reached = sum(rank(value) <= bound for value in values)
    spread = f"{statistics.fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})"
    steps = sorted({str(run["total_steps"]) for run in runs})
    cells = [
        f"{runs[0]['params']['learning_rate']:g}",
        spread,
        f"{reached} of {len(runs)}",
        ", ".join(steps),
    ]
    for measure in (training_s, training_j):
        own, base = (statistics.median(map(measure, each)) for each in (runs, of_base))
        cells += [f"{own:.4g}", f"{own / base:.3f}"]
    return cells


def training_s(record: dict[str, Any]) -> float:
    return float(record["duration_s"]["train"])


def training_j(record: dict[str, Any]) -> float:
    """The GPUs' own, by their counters; where there is none, of CPU and RAM as CodeCarbon models
    it.
    """
    energy = record["energy_kwh"]
    kwh = energy["train"] if energy.get("train_gpu") is None else energy["train_gpu"]
    return float(kwh) * J_PER_KWH


if __name__ == "__main__":
    main()
