"""What one trunk for every length could save of a search: an upper bound, on recorded runs.

    python benchmarks/search/trunk.py TABLE.jsonl [TABLE.jsonl ...] [--quality accuracy] [--seeds 5]
        [--json OUT]

With a schedule that is constant and decays at its end (Hägele et al. 2024, arXiv 2405.18392), runs
that differ by their length alone share a trunk: a later one branches off it or goes on with it,
with a decay of its own. Each search of `carbon` is counted twice, trial by trial: as it is, and as
if each trial began at the end of the trunk that earlier ones with the same settings have trained.
The bound is generous: to keep and to load a trunk costs nothing, and the runs' own schedules, which
decay all along, are taken to lead to the same choices.
"""

import math
import statistics
from collections import defaultdict
from pathlib import Path

from compare import NEAR, TARGETS, Table, arguments, carbon, grouped, run_all, training_j

from carbonopt.core.dimensions import DEFAULT_DECAY_RATIO
from carbonopt.core.quality import PERPLEXITY, QUALITIES


def search(path: Path, quality: str, worse: float, seed: int) -> dict:
    """One search, until it has found a run within 5 % of the cheapest that meets the target."""
    table = Table(path, quality)
    target = table.target(worse)
    meeting = [run for run in table.runs.values() if target.is_met_by(table.value(run))]
    enough_j = NEAR * min(map(training_j, meeting))
    trunks: dict[tuple, float] = defaultdict(float)  # steps, by all settings but the length
    spent_j = with_trunks_j = 0.0
    trials = branches = 0
    for run, trial_j, complete, _, _ in carbon(table, "carbon", target, seed):
        key = tuple((name, value) for name, value in run.params.items() if name != "epochs")
        done = trial_j / run.joules_per_step
        stable = min(done, (1 - DEFAULT_DECAY_RATIO) * run.total_steps)
        shared = min(stable, trunks[key])
        trunks[key] = max(trunks[key], stable)
        trials, branches = trials + 1, branches + (shared > 0)
        spent_j += trial_j
        with_trunks_j += trial_j - shared * run.joules_per_step
        if complete and target.is_met_by(table.value(run)) and training_j(run) <= enough_j:
            break
    names = {"table": path.stem, "worse": worse, "seed": seed}
    counts = {"trials": trials, "branches": branches}
    return names | counts | {"share": spent_j / table.grid_j, "saved": 1 - with_trunks_j / spent_j}


def summary(results: list[dict]) -> list[str]:
    lines = [
        (
            "| table | worse than best | searches | trials | of them branches | energy saved,"
            " median (lowest to highest) |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (table, worse), group in grouped(results, "table", "worse").items():
        saved = [result["saved"] for result in group]
        trials, branches = (
            sum(result[name] for result in group) for name in ("trials", "branches")
        )
        spread = f"{statistics.median(saved):.1%} ({min(saved):.1%} to {max(saved):.1%})"
        lines.append(f"| {table} | {worse:.0%} | {len(group)} | {trials} | {branches} | {spread} |")
    assert all(math.isfinite(result["saved"]) for result in results)
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--quality", choices=QUALITIES, default=PERPLEXITY.name, help="of all the tables"
    )
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    jobs = [
        (table, options.quality, worse, seed)
        for table in options.tables
        for worse in TARGETS
        for seed in range(options.seeds)
    ]
    run_all(search, jobs, summary, options)


if __name__ == "__main__":
    main()
