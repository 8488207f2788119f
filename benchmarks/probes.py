"""What probes are worth: the energy of studies with them and without, and of what they recommend.

    python benchmarks/probes.py STUDY.yaml FOLDER [--seeds 0 1 2] [--trials 12] [--gpus 0]

The study runs with `search.probes: true` and `false` for each seed, as many trials each. Prints a
Markdown table: energy of the study, of it the probes', and of all probes and the trials up to the
one that is recommended; of a run of the recommendation; and of the study and `budget.reuses` (10)
such runs. What is in FOLDER already is not run again.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from performance import common

from carbonopt.core.units import JOULES_PER_KWH

REUSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=common.at_least(0), nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=common.at_least(1), default=12)
    parser.add_argument("--gpus", type=common.at_least(0), nargs="*", default=[])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    raw = common.read(options.study)
    raw |= {"budget": {"trials": options.trials}, "launch": {"gpus": options.gpus}}
    raw.pop("confirm", None)
    print(
        "| probes | seed | study, kJ | probes, kJ | until the answer, kJ | a run of it, J | study"
        " and runs, kJ |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    together: dict[bool, list[float]] = {True: [], False: []}
    for seed in options.seeds:
        for probes in (True, False):
            folder = options.folder / f"{'with' if probes else 'without'}-{seed}"
            made = {**raw, "search": {**raw["search"], "seed": seed, "probes": probes}}
            common.run(made, options.study, folder, quiet=True)
            study_kj, probes_kj, until_kj, run_j = energies(folder)
            both_kj = None if run_j is None else study_kj + REUSES * run_j / 1e3
            if both_kj is not None:
                together[probes].append(both_kj)
            cells = [
                "with" if probes else "without",
                str(seed),
                f"{study_kj:.1f}",
                f"{probes_kj:.2f}",
            ]
            cells += [
                "–" if number is None else f"{number:,.4g}" for number in (until_kj, run_j, both_kj)
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    if all(together.values()):
        ratio = statistics.fmean(together[True]) / statistics.fmean(together[False])
        print(f"\nstudy and {REUSES} runs, with probes ÷ without: {ratio:.3f}")


def energies(folder: Path) -> tuple[float, float, float | None, float | None]:
    """kJ of a study, of its probes, of these and its trials up to the one that it recommends; J of
    a run of that.
    """
    report: dict[str, Any] = json.loads(
        (folder / "report/data/report.json").read_text(encoding="utf-8")
    )
    kj_per_kwh = JOULES_PER_KWH / 1e3
    spent, answer = report["spent"], report["recommendation"]
    study_kj, probes_kj = spent["energy_kwh"] * kj_per_kwh, spent["probes_kwh"] * kj_per_kwh
    if not answer["met"]:
        return study_kj, probes_kj, None, None
    of_trials = [
        record["energy_kwh"]["total"] for record in common.records(folder)[: answer["trial"] + 1]
    ]
    until_kj = probes_kj + math.fsum(of_trials) * kj_per_kwh
    return study_kj, probes_kj, until_kj, answer["energy_kwh"] * JOULES_PER_KWH


if __name__ == "__main__":
    main()
