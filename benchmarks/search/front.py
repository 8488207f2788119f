"""How much of the trade-off between energy and perplexity search strategies find for the energy
they spend.

    python benchmarks/search/front.py TABLE.jsonl [TABLE.jsonl ...] [--seeds 10] [--samplers carbon
        ...] [--json OUT]

On recorded runs, as compare.py, with `search.goal: front`. Counted is the hypervolume of the
complete trials' front after 2, 5, 10 and 20 % of the whole grid's training energy, and after 25
trials, as a share of that of the table's own front; over the logarithms of energy and NLL, each
scaled to the range of the table's front, up to a reference point a tenth of it beyond both ends.
Shares are means over the seeds, the lowest in brackets; the last column is how far the lowest
perplexity in 25 trials is above the table's, the median. `carbon` stops trials that can't be on the
front; the others are Optuna's and run whole trials. Each seed of each sampler is one search.
"""

import statistics
import warnings
from pathlib import Path

import numpy as np
import optuna
from compare import (
    OTHERS,
    Table,
    arguments,
    carbon,
    grouped,
    print_longest,
    run_all,
    training_j,
    whole,
)

from carbonopt.engines.replay import RecordedRun
from carbonopt.search.hypervolume import front, hypervolume

SHARES = (0.02, 0.05, 0.10, 0.20)  # of the grid's training energy
TRIALS = 25
MARGIN = 0.1


class Measure:
    """The share of a table's front that runs have found."""

    def __init__(self, table: Table) -> None:
        front_points = self._front(list(table.runs.values()))
        self._low, self._high = front_points.min(0), front_points.max(0)
        self._all = self._area(front_points)

    def share(self, runs: list[RecordedRun]) -> float:
        return self._area(self._front(runs)) / self._all

    def _area(self, front_points: np.ndarray) -> float:
        scaled = (front_points - self._low) / (self._high - self._low)
        return hypervolume(scaled, np.full(2, 1 + MARGIN))

    @staticmethod
    def _front(runs: list[RecordedRun]) -> np.ndarray:
        points = np.log([[training_j(run), run.evals[-1].nll] for run in runs]).reshape(-1, 2)
        return points[front(points)]


def search(path: Path, sampler: str, seed: int) -> dict:
    """One search, until both its energy and its trials have passed what is counted."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(path)
    if sampler == "carbon":
        steps = carbon(table, sampler, table.target(0.0), seed, goal="front")
    else:
        steps = whole(table, sampler, None, seed)
    measure = Measure(table)
    completed_runs: list[RecordedRun] = []
    by_share: dict[float, float] = {}
    spent_j, trials, longest_s, on_front = 0.0, 0, 0.0, {}
    for run, trial_j, complete, _, seconds in steps:
        before = measure.share(completed_runs)
        spent_j += trial_j
        trials += 1
        longest_s = max(longest_s, seconds)
        by_share |= {
            share: before
            for share in SHARES
            if share not in by_share and spent_j > share * table.grid_j
        }
        if complete:
            completed_runs.append(run)
        if trials == TRIALS:
            on_front = {
                "by_trials": measure.share(completed_runs),
                "energy_share": spent_j / table.grid_j,
                "over_lowest": min(map(table.value, completed_runs)) / table.best - 1,
            }
        if trials >= TRIALS and len(by_share) == len(SHARES):
            break
    last = measure.share(completed_runs)
    return {
        "table": path.stem,
        "sampler": sampler,
        "seed": seed,
        "by_share": [by_share.get(share, last) for share in SHARES],
        **on_front,
        "trials": trials,
        "longest_proposal_s": longest_s,
    }


def summary(results: list[dict]) -> list[str]:
    names = [f"{share:.0%} of the grid" for share in SHARES]
    lines = [
        (
            f"| table | sampler | {' | '.join(names)} | {TRIALS} trials | energy of these | lowest"
            " perplexity of these |"
        ),
        "| --- | --- |" + " ---: |" * (len(SHARES) + 3),
    ]
    for (table, sampler), group in grouped(results, "table", "sampler").items():
        shares = [
            _spread([result["by_share"][index] for result in group]) for index in range(len(SHARES))
        ]
        energy = statistics.mean(result["energy_share"] for result in group)
        over = statistics.median(result["over_lowest"] for result in group)
        lines.append(
            f"| {table} | {sampler} | {' | '.join(shares)} |"
            f" {_spread([result['by_trials'] for result in group])} | {energy:.1%} | +{over:.1%} |"
        )
    return lines


def _spread(values: list[float]) -> str:
    """Mean and lowest, as percentages."""
    return f"{100 * statistics.mean(values):.1f} ({100 * min(values):.1f})"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--samplers",
        nargs="+",
        choices=["carbon", *OTHERS],
        default=["carbon", "random", "nsga2", "tpe"],
    )
    options = parser.parse_args()
    jobs = [
        (table, sampler, seed)
        for table in options.tables
        for sampler in options.samplers
        for seed in range(options.seeds)
    ]
    print_longest(run_all(search, jobs, summary, options))


if __name__ == "__main__":
    main()
