"""How much of the trade-off between energy and perplexity search strategies find for the energy
they spend.

    python benchmarks/search/front.py TABLE.jsonl [TABLE.jsonl ...] [--seeds 10] [--samplers carbon
        ...] [--json OUT]

On recorded runs, as compare.py, with `search.goal: front`, or on a table in list form, as
foreign.py. Counted is the hypervolume of the complete trials' front after 2, 5, 10 and 20 % of the
whole table's training energy, and after 25 trials, as a share of that of the table's own front;
over the logarithms of energy and NLL, each scaled to the range of the table's front, up to a
reference point a tenth of it beyond both ends. Shares are means over the seeds, the lowest in
brackets; the last column is how far the lowest perplexity in 25 trials is above the table's, the
median. `carbon` stops trials that can't be on the front; the others run whole trials: Optuna's, and
`qlognehvi` (`pip install botorch`), which chooses among the runs themselves. On a table in list
form, the nearest run that is left stands in for what Optuna's propose. Each seed of each sampler is
one search.
"""

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import compare
import foreign
import listed
import numpy as np
import optuna
import rivals
from compare import OTHERS, arguments, grouped, print_longest, run_all, training_j
from listed import START

from carbonopt.core.arrays import Array
from carbonopt.core.errors import BadInput
from carbonopt.search.hypervolume import front, hypervolume

SHARES = (0.02, 0.05, 0.10, 0.20)  # of the table's training energy
TRIALS = 25
MARGIN = 0.1
SAMPLES = 128  # of the posterior, as BoTorch's tutorials have it


class Trial(NamedTuple):
    """A trial of a search, and how many seconds its proposal took."""

    energy_j: float  # of the whole run
    nll: float  # at its end
    spent_j: float
    complete: bool
    seconds: float


class Measure:
    """The share of a table's front that runs have found; runs are rows of energy (J) and NLL."""

    def __init__(self, runs: Array) -> None:
        front_points = self._front(runs[np.isfinite(runs[:, 1])])
        self._low, self._high = front_points.min(0), front_points.max(0)
        self._all = self._area(front_points)

    def share(self, runs: list[tuple[float, float]]) -> float:
        return self._area(self._front(np.array(runs).reshape(-1, 2))) / self._all

    def _area(self, front_points: Array) -> float:
        scaled = (front_points - self._low) / (self._high - self._low)
        return hypervolume(scaled, np.full(2, 1 + MARGIN))

    @staticmethod
    def _front(runs: Array) -> Array:
        points = np.log(runs)
        return points[front(points)]


def on_grid(table: compare.Table, sampler: str, seed: int) -> Iterator[Trial]:
    if sampler == "carbon":
        steps = compare.carbon(table, sampler, table.target(0.0), seed, goal="front")
    else:
        steps = compare.whole(table, sampler, None, seed)
    for run, spent_j, complete, _, seconds in steps:
        yield Trial(training_j(run), run.evals[-1].nll, spent_j, complete, seconds)


def on_list(table: listed.Table, sampler: str, seed: int) -> Iterator[Trial]:
    if sampler == "carbon":
        steps = foreign.carbon(table, table.target_nll(0.0), seed, goal="front")
    elif sampler == "qlognehvi":
        steps = qlognehvi(table, seed)
    else:
        steps = optunas(sampler, table, seed)
    for trial, seconds in steps:
        run, complete = trial.run, trial.state == "complete"
        yield Trial(run.energy_j, run.nll, trial.spent_j, complete, seconds)


def optunas(name: str, table: listed.Table, seed: int) -> Iterator[listed.Step]:
    """One of Optuna's samplers, see `listed.asked`. Runs that diverge are told as failed."""
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=OTHERS[name](seed))
    for run, seconds, attributes in listed.asked(study, table):
        ended = listed.played(run, math.inf, listed.never)
        if ended.state == "complete":
            study.add_trial(
                optuna.create_trial(
                    params=ended.run.params,
                    distributions=table.distributions,
                    values=[math.log(ended.run.energy_j), ended.run.nll],
                    system_attrs=attributes,
                )
            )
        yield ended, seconds


def qlognehvi(table: listed.Table, seed: int) -> Iterator[listed.Step]:
    """BoTorch's qLogNoisyExpectedHypervolumeImprovement (Daulton et al. 2021, arXiv 2105.08195; of
    its logarithm Ament et al. 2023, arXiv 2310.20708) over the runs that are left, after START
    random ones. Two independent Gaussian processes, botorch's with its priors, of the logarithms of
    energy and NLL, the scales that the measure has; the reference point is botorch's by the front
    so far. A run that diverged is told as the worst one that didn't.
    """
    rows = np.array([table.place(run.params) for run in table.runs])
    left = np.random.default_rng(seed).permutation(len(rows)).tolist()
    told: dict[int, tuple[float, float]] = {}
    while left:
        began = time.perf_counter()
        values = np.array(list(told.values())).reshape(-1, 2)
        finite = values[np.isfinite(values[:, 1]), 1]
        if len(told) >= START and len(set(finite)) > 1:
            values[:, 1] = np.minimum(values[:, 1], finite.max())
            index = left.pop(_most_improving(rows[list(told)], values, rows[left], seed))
        else:
            index = left.pop()
        seconds = time.perf_counter() - began
        ended = listed.played(table.runs[index], math.inf, listed.never)
        nll = max(ended.run.nll, np.finfo(float).tiny)
        told[index] = math.log(ended.run.energy_j), math.log(nll)
        yield ended, seconds


def _most_improving(known: Array, values: Array, rows: Array, seed: int) -> int:
    """Which of the rows is expected to add most to the hypervolume of values that are minimized."""
    import torch
    from botorch.acquisition.multi_objective.logei import (
        qLogNoisyExpectedHypervolumeImprovement,
    )
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import ModelListGP, SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler
    from botorch.utils.multi_objective.hypervolume import infer_reference_point
    from botorch.utils.multi_objective.pareto import is_non_dominated
    from gpytorch.mlls import SumMarginalLogLikelihood

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    baseline, objectives = torch.as_tensor(known), -torch.as_tensor(values)
    model = ModelListGP(
        *(SingleTaskGP(baseline, objectives[:, [column]]) for column in range(objectives.shape[1]))
    )
    fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
    improvement = qLogNoisyExpectedHypervolumeImprovement(
        model,
        infer_reference_point(objectives[is_non_dominated(objectives)]),
        baseline,
        sampler=SobolQMCNormalSampler(torch.Size([SAMPLES]), seed=seed),
        prune_baseline=True,
    )
    with torch.no_grad():
        parts = torch.as_tensor(rows)[:, None].split(SAMPLES)
        return int(torch.cat([improvement(part) for part in parts]).argmax())


def begun(path: Path, sampler: str, seed: int) -> tuple[Array, Iterator[Trial]]:
    """All of a table's runs, rows of energy (J) and NLL, and a search among them."""
    try:
        grid = compare.Table(path)
    except BadInput:
        grid = None
    if grid is None or sampler == "qlognehvi":
        table = listed.Table(path)
        runs = [(run.energy_j, run.nll) for run in table.runs]
        return np.array(runs), on_list(table, sampler, seed)
    runs = [(training_j(run), run.evals[-1].nll) for run in grid.runs.values()]
    return np.array(runs), on_grid(grid, sampler, seed)


def search(path: Path, sampler: str, seed: int) -> dict:
    """One search, until both its energy and its trials have passed what is counted."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    runs, steps = begun(path, sampler, seed)
    measure, table_j, lowest_nll = Measure(runs), runs[:, 0].sum(), runs[:, 1].min()
    completed: list[tuple[float, float]] = []
    by_share: dict[float, float] = {}
    spent_j, trials, longest_s, on_front = 0.0, 0, 0.0, {}
    for trial in steps:
        before = measure.share(completed)
        spent_j += trial.spent_j
        trials += 1
        longest_s = max(longest_s, trial.seconds)
        by_share |= {
            share: before for share in SHARES if share not in by_share and spent_j > share * table_j
        }
        if trial.complete:
            completed.append((trial.energy_j, trial.nll))
        if trials <= TRIALS:
            on_front = {
                "by_trials": measure.share(completed),
                "energy_share": spent_j / table_j,
                "over_lowest": math.exp(min(nll for _, nll in completed) - lowest_nll) - 1
                if completed
                else math.inf,
            }
        if trials >= TRIALS and len(by_share) == len(SHARES):
            break
    last = measure.share(completed)
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
    names = [f"{share:.0%} of the table" for share in SHARES]
    lines = [
        (
            f"| table | sampler | seeds | {' | '.join(names)} | {TRIALS} trials | energy of these | lowest"
            " perplexity of these |"
        ),
        "| --- | --- |" + " ---: |" * (len(SHARES) + 4),
    ]
    for (table, sampler), group in grouped(results, "table", "sampler").items():
        shares = [
            _spread([result["by_share"][index] for result in group]) for index in range(len(SHARES))
        ]
        energy = statistics.mean(result["energy_share"] for result in group)
        over = statistics.median(result["over_lowest"] for result in group)
        lines.append(
            f"| {table} | {sampler} | {len(group)} | {' | '.join(shares)} |"
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
        choices=["carbon", *OTHERS, "qlognehvi"],
        default=["carbon", "random", "nsga2", "tpe"],
    )
    options = parser.parse_args()
    if (needed := rivals.missing(options.samplers)) is not None:
        parser.error(needed)
    jobs = [
        (table, sampler, seed)
        for table in options.tables
        for sampler in options.samplers
        for seed in range(options.seeds)
    ]
    print_longest(run_all(search, jobs, summary, options))


if __name__ == "__main__":
    main()
