"""When `budget.until: converged` ends a search, and what that leaves unfound.

    python benchmarks/search/converged.py TABLE.jsonl [TABLE.jsonl ...] [--seeds 20] [--reuses 10
        1000] [--json OUT]

On recorded runs, as compare.py, but each search goes on until it ends itself: for targets that runs
meet, how much more the recommended run takes than the cheapest; for one that none meets (5 % below
the lowest perplexity), when it gives up.
"""

import math
import statistics
import warnings
from pathlib import Path

import optuna
from compare import TARGETS, Table, arguments, carbon, grouped, run_all, training_j

UNREACHABLE = -0.05


def search(path: Path, worse: float, reuses: int, seed: int) -> dict:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(path)
    target = table.target(worse)
    steps = list(carbon(table, "carbon", target, seed, until="converged", reuses=reuses))
    met = [
        training_j(run)
        for run, _, complete, _, _ in steps
        if complete and target.is_met_by(table.value(run))
    ]
    meeting = [run for run in table.runs.values() if target.is_met_by(table.value(run))]
    cheapest = min(map(training_j, meeting), default=math.nan)
    return {
        "table": path.stem,
        "worse": worse,
        "reuses": reuses,
        "seed": seed,
        "trials": len(steps),
        "share": sum(trial_j for _, trial_j, _, _, _ in steps) / table.grid_j,
        "over_cheapest": min(met) / cheapest - 1 if met else None,
    }


def summary(results: list[dict]) -> list[str]:
    lines = [
        (
            "| table | worse than best | runs to come | trials | grid energy spent, median (%) |"
            " most (%) | found any | over the cheapest, median (%) | most (%) |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (table, worse, reuses), group in grouped(results, "table", "worse", "reuses").items():
        shares = [100 * result["share"] for result in group]
        over = [
            100 * result["over_cheapest"] for result in group if result["over_cheapest"] is not None
        ]
        far = f"{statistics.median(over):.1f} | {max(over):.1f}" if over else "– | –"
        lines.append(
            f"| {table} | {worse:.0%} | {reuses} |"
            f" {statistics.mean(result['trials'] for result in group):.1f} |"
            f" {statistics.median(shares):.1f} | {max(shares):.1f} | {len(over)} of {len(group)} |"
            f" {far} |"
        )
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--reuses", type=int, nargs="+", default=[10, 1000])
    options = parser.parse_args()
    jobs = [
        (table, worse, reuses, seed)
        for table in options.tables
        for worse in (*TARGETS, UNREACHABLE)
        for reuses in options.reuses
        for seed in range(options.seeds)
    ]
    run_all(search, jobs, summary, options)


if __name__ == "__main__":
    main()
