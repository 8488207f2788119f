"""What a search spends on tables that others recorded, in spaces that nobody tuned it for.

    python benchmarks/search/foreign.py TABLE.jsonl [TABLE.jsonl ...] [--seeds 20] [--samplers
        carbon random ...] [--learn-from FIRST.jsonl] [--json OUT]

A table is a list of runs, not a grid; each of its lines is

    {"params": {...}, "fixed": {...}, "total_steps": n, "joules_per_step": x, "evals": [{"step": s,
    "nll": y}, ...]}

where `fixed` is what a study file would state beside the dimensions, and a run that diverged ends
with null. Further keys count for nothing; of runs that differ by their `seed` alone the one of the
lowest is taken. Of accuracies nll is -ln(accuracy), so that perplexity is 1 ÷ accuracy.

The targets are those that 10, 3 and 1 % of the runs meet. Counted is the training energy of all
trials, up to and with the first complete one within 5 % of the cheapest run that meets the target,
divided by that run's energy: adding hopeless runs to a table flatters no search. A search that has
stopped all such runs has not found it. All strategies have the same cap: a trial ends where it
can't become cheaper than the cheapest complete one that met the target.
"""

import itertools
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
import rivals
from compare import NEAR, arguments, grouped, run_all
from listed import Curve, Run, Search, Step, Table, never, played
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import binom

from carbonopt.core.errors import BadInput
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS
from carbonopt.search.sampler import CarbonSampler

FIRST_SEED = 1000  # added to a search's, of the one that it learns from
SHARES = (0.10, 0.03, 0.01)  # of the runs, that meet the target


def carbon(
    table: Table,
    target_nll: float,
    seed: int,
    *,
    prune: bool = True,
    earlier: Sequence[FrozenTrial] = (),
    goal: Literal["recommend", "front"] = "recommend",
) -> Iterator[Step]:
    """carbonopt's sampler in a study of Optuna's, and its pruning; no cap for the whole front."""
    sampler = CarbonSampler(
        "perplexity",
        math.exp(target_nll),
        goal=goal,
        listed=[run.params for run in table.runs],
        complete=table.fixed,
        learn_from=[earlier] if earlier else (),
        search_space=table.distributions,
        seed=seed,
    )
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    cap_j = math.inf
    for _ in table.runs:
        began = time.perf_counter()
        trial = study.ask(table.distributions)
        seconds = time.perf_counter() - began
        run = table.run(trial.params)

        def told(curve: Curve, trial: optuna.Trial = trial, run: Run = run) -> None:
            trial.set_user_attr(CURVE, [[step, nll] for step, nll in curve])
            trial.set_user_attr(TOTAL_STEPS, run.total_steps)
            trial.set_user_attr(COST_PER_STEP, run.joules_per_step)

        def prunes(
            curve: Curve, trial: optuna.Trial = trial, told: Callable[[Curve], None] = told
        ) -> bool:
            told(curve)
            return sampler.should_prune(study, trial)

        ended = played(run, cap_j, prunes if prune else never)
        told(ended.curve)
        if ended.state == "complete":
            study.tell(trial, [run.energy_j, math.exp(run.nll)])
        else:
            study.tell(trial, state=TrialState.PRUNED)
        if goal == "recommend":
            cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


SEARCHES: dict[str, Search] = {
    "carbon": carbon,
    "carbon-whole": partial(carbon, prune=False),
    **rivals.SEARCHES,
}
ALL_SEARCHES = {**SEARCHES, **rivals.WITH_BOTORCH, **rivals.MULTI_FIDELITY}


def until_found(table: Table, target_nll: float, steps: Iterator[Step]) -> Iterator[Step]:
    """Up to the trial that counts, or until there is no such run left."""
    limit_j = NEAR * min(run.energy_j for run in table.runs if run.nll <= target_nll)
    left = sum(run.nll <= target_nll and run.energy_j <= limit_j for run in table.runs)
    for trial, seconds in steps:
        yield trial, seconds
        if trial.state != "paused":
            left -= trial.run.nll <= target_nll and trial.run.energy_j <= limit_j
        if trial.feasible_j(target_nll) <= limit_j or not left:
            return


def learned(path: Path, share: float, seed: int) -> list[FrozenTrial]:
    """The trials of carbon's search on another table, with what was fixed in them among their
    params.
    """
    table = Table(path)
    target_nll = table.target_nll(share)
    trials = []
    for trial, _ in until_found(table, target_nll, carbon(table, target_nll, seed)):
        run, complete = trial.run, trial.state == "complete"
        fixed = {name: CategoricalDistribution([value]) for name, value in run.fixed.items()}
        told = {CURVE: [list(point) for point in trial.curve], TOTAL_STEPS: run.total_steps}
        trials.append(
            optuna.create_trial(
                state=TrialState.COMPLETE if complete else TrialState.PRUNED,
                params={**run.params, **run.fixed},
                distributions={**table.distributions, **fixed},
                values=[run.energy_j, math.exp(run.nll)] if complete else None,
                user_attrs={**told, COST_PER_STEP: run.joules_per_step},
            )
        )
    return trials


def searched(
    path: Path, share: float, name: str, seed: int, learn_from: Path | None
) -> dict[str, Any]:
    """One search, until it has found what counts or has no run left."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(path)
    target_nll = table.target_nll(share)
    cheapest_j = min(run.energy_j for run in table.runs if run.nll <= target_nll)
    if learn_from is None:
        steps, what = ALL_SEARCHES[name](table, target_nll, seed), name
    else:
        earlier = learned(learn_from, share, seed + FIRST_SEED)
        steps, what = (
            carbon(table, target_nll, seed, earlier=earlier),
            f"{name} after {learn_from.stem}",
        )
    states: Counter[str] = Counter()
    begun: set[int] = set()  # a run that was paused comes several times
    spent_j, longest_s, found = 0.0, 0.0, False
    for trial, seconds in until_found(table, target_nll, steps):
        near = trial.run.energy_j <= NEAR * cheapest_j
        spent_j, longest_s = spent_j + trial.spent_j, max(longest_s, seconds)
        begun.add(id(trial.run))
        states[trial.state] += 1
        if trial.run.nll <= target_nll and trial.state not in ("cap", "paused"):
            stopped = trial.state == "target"
            states.update(good=1, good_stopped=stopped, cheapest_stopped=stopped and near)
        found = trial.feasible_j(target_nll) <= NEAR * cheapest_j
    return {
        **{
            "table": table.name,
            "met_by": share,
            "sampler": what,
            "seed": seed,
            **dict.fromkeys(_SUMMED, 0),
            **states,
            "trials": len(begun),
        },
        **{
            "times_cheapest": spent_j / cheapest_j if found else math.inf,
            "longest_proposal_s": longest_s,
        },
    }


def summary(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "| table | met by | sampler | × the cheapest, median (95 % interval) | 90th percentile"
            " | found | trials | diverged | good ones stopped | cheapest stopped |"
        ),
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (table, share, name), group in grouped(results, "table", "met_by", "sampler").items():
        times = sorted(result["times_cheapest"] for result in group)
        low, high = _median_interval(times)
        total = {key: sum(result.get(key, 0) for result in group) for key in _SUMMED}
        lines.append(
            f"| {table} | {share:.0%} | {name} | {statistics.median(times):.1f} ({low:.1f} to"
            f" {high:.1f}) | {times[math.ceil(0.9 * len(times)) - 1]:.1f} |"
            f" {sum(map(math.isfinite, times))} of {len(times)} |"
            f" {total['trials'] / len(group):.0f} | {total['diverged'] / len(group):.0f} |"
            f" {total['good_stopped']} of {total['good']} | {total['cheapest_stopped']} |"
        )
    return lines


_SUMMED = ("trials", "diverged", "good", "good_stopped", "cheapest_stopped")


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Of at least 95 % confidence, between two of the values (order statistics, by the binomial
    distribution).
    """
    count = len(ordered)
    outside = int(binom.ppf(0.025, count, 0.5))  # so many may lie below the interval
    return ordered[max(0, outside - 1)], ordered[min(count - 1, count - outside)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", choices=ALL_SEARCHES, default=list(SEARCHES))
    parser.add_argument(
        "--learn-from",
        type=Path,
        metavar="TABLE",
        help="that carbon has searched with the same share",
    )
    parser.add_argument(
        "--met-by",
        type=float,
        nargs="+",
        default=SHARES,
        help="share of the runs that meets a target",
    )
    options = parser.parse_args()
    if not all(0 < share <= 1 for share in options.met_by) or min(options.seeds, options.jobs) < 1:
        parser.error("--met-by must be above 0 and at most 1, --seeds and --jobs at least 1")
    if (needed := rivals.missing(options.samplers)) is not None:
        parser.error(needed)
    try:
        for path in (*options.tables, *filter(None, [options.learn_from])):
            Table(path)
    except BadInput as error:
        parser.error(str(error))
    if options.learn_from is not None and options.samplers != ["carbon"]:
        parser.error("--learn-from goes with --samplers carbon")
    axes = (
        options.tables,
        options.met_by,
        options.samplers,
        range(options.seeds),
        [options.learn_from],
    )
    jobs = list(itertools.product(*axes))
    run_all(searched, jobs, summary, options)


if __name__ == "__main__":
    main()
