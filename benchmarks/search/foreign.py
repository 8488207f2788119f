"""What a search spends on tables that others recorded, in spaces that nobody tuned it for.

    python benchmarks/search/foreign.py TABLE.jsonl [TABLE.jsonl ...] [--seeds 20] [--samplers carbon random ...]
        [--learn-from FIRST.jsonl] [--json OUT]

A table is a list of runs, not a grid; each of its lines is

    {"params": {...}, "fixed": {...}, "total_steps": n, "joules_per_step": x, "evals": [{"step": s, "nll": y}, ...]}

where `fixed` is what a study file would state beside the dimensions, and a run that diverged ends with null. Further
keys count for nothing; of runs that differ by their `seed` alone the one of the lowest is taken. Of accuracies nll is
-ln(accuracy), so that perplexity is 1 ÷ accuracy.

The targets are those that 10, 3 and 1 % of the
runs meet. Counted is the training energy of all trials, up to and with the first complete one within 5 % of the
cheapest run that meets the target, divided by that run's energy: adding hopeless runs to a table flatters no search. A
search that has stopped all such runs has not found it. All strategies have the same cap: a trial ends where it can't
become cheaper than the cheapest complete one that met the target.
"""

import itertools
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import optuna
from compare import NEAR, arguments, grouped, run_all
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, ValidationError, model_validator
from scipy.stats import binom

from carbonopt.core.arrays import Array
from carbonopt.core.errors import BadInput, first_fault
from carbonopt.core.files import read_text
from carbonopt.core.values import Frozen, Given
from carbonopt.engines.replay import PROGRESS_REPORTS
from carbonopt.search.cap import passes_cap
from carbonopt.search.observation import COST_PER_STEP, CURVE, TOTAL_STEPS
from carbonopt.search.sampler import CarbonSampler
from carbonopt.search.strategy import INNER

MOST_MIB = 256
FIRST_SEED = 1000  # added to a search's, of the one that it learns from
SHARES = (0.10, 0.03, 0.01)  # of the runs, that meet the target
Curve = tuple[tuple[int, float], ...]  # step, nll; infinite where it diverged


@dataclass(frozen=True)
class Run:
    """One line of a table."""

    params: dict[str, Any]
    fixed: dict[str, Any]
    total_steps: int
    joules_per_step: float
    curve: Curve

    @property
    def energy_j(self) -> float:
        return self.total_steps * self.joules_per_step

    @property
    def nll(self) -> float:
        return self.curve[-1][1]


@dataclass(frozen=True)
class Trial:
    """What became of a run in a search."""

    run: Run
    spent_j: float
    curve: Curve  # as far as it came
    state: str  # complete, diverged, target or cap

    def feasible_j(self, target_nll: float) -> float:
        """Its energy, where it is complete and meets the target; else infinite."""
        return self.run.energy_j if self.state == "complete" and self.run.nll <= target_nll else math.inf


class _Eval(Frozen, extra="ignore"):
    step: int = Field(ge=0, le=10**15)
    nll: float | None = Field(ge=0, le=700, allow_inf_nan=False)  # None: it diverged; beyond, exp(nll) is no number


class _Line(Frozen, extra="ignore"):
    """Of a table; those that carbonopt replays have further keys."""

    seed: int = 0
    params: dict[str, Given] = Field(min_length=1)
    fixed: dict[str, Given] = Field(default_factory=dict)
    total_steps: int = Field(gt=0, le=10**15)
    joules_per_step: float = Field(gt=0, le=1e15, allow_inf_nan=False)
    evals: list[_Eval] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_one_training(self) -> Self:
        steps = [point.step for point in self.evals]
        if any(step <= before for before, step in itertools.pairwise(steps)):
            raise ValueError("evals: the steps must rise")
        if any(point.nll is None for point in self.evals[:-1]):
            raise ValueError("evals: only the last nll may be null, where the run diverged")
        if steps[-1] > self.total_steps:
            raise ValueError(
                f"evals: the last step must be at most {self.total_steps}, total_steps, but is {steps[-1]}"
            )
        if both := self.params.keys() & self.fixed.keys():
            raise ValueError(f"{', '.join(sorted(both))} can't be in params and in fixed")
        return self


class Table:
    """Dimensions that have one value in all of it count as fixed. Raises BadInput for anything but such a table."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        lines = _read_lines(path)
        constant = [name for name in lines[0].params if len({line.params[name] for line in lines}) == 1]
        if len({(_key(line.params), line.seed) for line in lines}) < len(lines):
            raise BadInput(f"{path} must have no run twice, but has two or more of the same params and seed.")
        lines.sort(key=lambda line: -line.seed)  # of repeats with other seeds that with the lowest one counts
        self.by_key = {_key(run.params): run for run in (_run(line, constant) for line in lines)}
        self.runs = list(self.by_key.values())
        if len(self.runs) < 2:
            raise BadInput(f"{path} must have two runs or more of different params, but has one.")
        if all(math.isinf(run.nll) for run in self.runs):
            raise BadInput(f"{path}: all runs have diverged; no target can be met.")

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """By the values that each dimension has: words as choices, a range of a hundred and more by its logarithm."""
        columns = {name: [run.params[name] for run in self.runs] for name in self.runs[0].params}
        return {name: _distribution(values) for name, values in columns.items()}

    def target_nll(self, share: float) -> float:
        """That so many of the runs meet, or all that have not diverged."""
        ends = sorted(run.nll for run in self.runs if math.isfinite(run.nll))
        return ends[min(len(ends), max(1, math.ceil(share * len(self.runs)))) - 1]

    def place(self, values: dict[str, Any]) -> Array:
        """Between 0 and 1 in each dimension; words by one column each."""
        return np.array([number for name, dist in self.distributions.items() for number in _place(dist, values[name])])

    def told(self, run: Run, target_nll: float) -> FrozenTrial:
        """A complete run, as one of Optuna's samplers learns of it."""
        trial = optuna.create_trial(
            params=run.params,
            distributions=self.distributions,
            values=[math.log(run.energy_j), run.nll],
        )
        trial.set_constraint("nll above the target", run.nll - target_nll)
        return trial

    def fixed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Nothing of a run of another table, which has it among its params."""
        run = self.by_key.get(_key(values))
        return {} if run is None else run.fixed


def _read_lines(path: Path) -> list[_Line]:
    lines: list[_Line] = []
    for number, text in enumerate(read_text(path, "the table", MOST_MIB).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: {first_fault(error)}") from error
        if lines and line.params.keys() != lines[0].params.keys():
            raise BadInput(f"{path}, line {number}: params must be {', '.join(lines[0].params)}, as in the first line.")
        lines.append(line)
    if not lines:
        raise BadInput(f"{path} must have a line for each run, but has none.")
    return lines


def _run(line: _Line, constant: Sequence[str]) -> Run:
    curve = tuple((point.step, math.inf if point.nll is None else point.nll) for point in line.evals)
    params = {name: value for name, value in line.params.items() if name not in constant}
    fixed = line.fixed | {name: line.params[name] for name in constant}
    return Run(params, fixed, line.total_steps, line.joules_per_step, curve)


def _key(values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(values.items()))


def _place(distribution: BaseDistribution, value: Any) -> list[float]:
    if isinstance(distribution, CategoricalDistribution):
        return [float(value == choice) for choice in distribution.choices]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    ends = (distribution.low, distribution.high, value)
    low, high, here = map(math.log, ends) if distribution.log else ends
    return [(here - low) / (high - low) if high > low else 0.0]


def _distribution(values: list[Any]) -> BaseDistribution:
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return CategoricalDistribution(sorted(set(values), key=str))
    low, high = min(values), max(values)
    by_logarithm = low > 0 and high / low >= 100
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, log=by_logarithm)
    return FloatDistribution(float(low), float(high), log=by_logarithm)


Prunes = Callable[[Curve], bool]  # by the curve so far


def never(curve: Curve) -> bool:
    return False


def played(run: Run, cap_j: float, prunes: Prunes) -> Trial:
    """A run as far as a search lets it go."""
    before, seen = 0, []
    for step, nll in run.curve:
        for part in range(1, PROGRESS_REPORTS + 1):
            done = before + round((step - before) * part / PROGRESS_REPORTS)
            if done < run.total_steps and passes_cap(
                cap_j if math.isfinite(cap_j) else None,
                done * run.joules_per_step,
                done / run.total_steps,
                run.energy_j,
            ):
                return Trial(run, done * run.joules_per_step, tuple(seen), "cap")
        before = step
        seen.append((step, nll))
        spent_j = step * run.joules_per_step
        if not math.isfinite(nll):
            return Trial(run, spent_j, tuple(seen), "diverged")
        if step < run.total_steps and prunes(tuple(seen)):
            return Trial(run, spent_j, tuple(seen), "target")
    return Trial(run, run.energy_j, tuple(seen), "complete")


Step = tuple[Trial, float]  # a trial, and how many seconds its proposal took
Search = Callable[[Table, float, int], Iterator[Step]]  # by the nll to reach, and the seed


def carbon(
    table: Table, target_nll: float, seed: int, *, prune: bool = True, earlier: Sequence[FrozenTrial] = ()
) -> Iterator[Step]:
    """carbonopt's sampler in a study of Optuna's, and its pruning."""
    sampler = CarbonSampler(
        "perplexity",
        math.exp(target_nll),
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
        run = table.by_key[_key(trial.params)]

        def told(curve: Curve, trial: optuna.Trial = trial, run: Run = run) -> None:
            trial.set_user_attr(CURVE, [[step, nll] for step, nll in curve])
            trial.set_user_attr(TOTAL_STEPS, run.total_steps)
            trial.set_user_attr(COST_PER_STEP, run.joules_per_step)

        def prunes(curve: Curve, trial: optuna.Trial = trial, told: Callable[[Curve], None] = told) -> bool:
            told(curve)
            return sampler.should_prune(study, trial)

        ended = played(run, cap_j, prunes if prune else never)
        told(ended.curve)
        if ended.state == "complete":
            study.tell(trial, [run.energy_j, math.exp(run.nll)])
        else:
            study.tell(trial, state=TrialState.PRUNED)
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


def in_order(
    table: Table, target_nll: float, order: Sequence[int], prunes: Callable[[Run], Prunes] = lambda run: never
) -> Iterator[Step]:
    """`prunes`: makes each run's rule."""
    cap_j = math.inf
    for index in order:
        ended = played(table.runs[index], cap_j, prunes(table.runs[index]))
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, 0.0


def random(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    return in_order(table, target_nll, np.random.default_rng(seed).permutation(len(table.runs)).tolist())


def by_cost(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """Cheapest first, knowing what each will cost; runs of one cost by chance."""
    chance = np.random.default_rng(seed).random(len(table.runs))
    return in_order(table, target_nll, np.lexsort((chance, [run.energy_j for run in table.runs])).tolist())


def asha(table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """ASHA (Li et al. 2020, arXiv 1810.05934) of reduction 3: a trial goes on past a ninth and a third of its steps
    where it is among the best third of those that came there. Stopping variant: what it has trained is kept."""
    rungs: dict[float, list[float]] = {1 / 9: [], 1 / 3: []}

    def rule(run: Run) -> Prunes:
        passed: set[float] = set()

        def prunes(curve: Curve) -> bool:
            share, nll = curve[-1][0] / run.total_steps, curve[-1][1]
            for rung, seen in rungs.items():
                if share >= rung and rung not in passed:
                    passed.add(rung)
                    seen.append(nll)
                    if nll > sorted(seen)[(len(seen) - 1) // 3]:
                        return True
            return False

        return prunes

    return in_order(table, target_nll, np.random.default_rng(seed).permutation(len(table.runs)).tolist(), rule)


def optunas(name: str, table: Table, target_nll: float, seed: int) -> Iterator[Step]:
    """One of Optuna's samplers, the target as a constraint. It proposes any values; the nearest run that is left stands
    in for them. Runs that end early are told as failed."""
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=INNER[name](seed=seed))
    rows, left = np.array([table.place(run.params) for run in table.runs]), list(range(len(table.runs)))
    cap_j = math.inf
    while left:
        began = time.perf_counter()
        asked = study.ask(table.distributions)
        seconds = time.perf_counter() - began
        index = left.pop(int(((rows[left] - table.place(asked.params)) ** 2).sum(1).argmin()))
        study.tell(asked, state=TrialState.FAIL)
        run = table.runs[index]
        ended = played(run, cap_j, never)
        if ended.state == "complete":
            study.add_trial(table.told(run, target_nll))
        cap_j = min(cap_j, ended.feasible_j(target_nll))
        yield ended, seconds


SEARCHES: dict[str, Search] = {
    "carbon": carbon,
    "carbon-whole": partial(carbon, prune=False),
    "random": random,
    "cost-order": by_cost,
    "asha": asha,
    "tpe": partial(optunas, "tpe"),
    "gp": partial(optunas, "gp"),
}


def until_found(table: Table, target_nll: float, steps: Iterator[Step]) -> Iterator[Step]:
    """Up to the trial that counts, or until there is no such run left."""
    limit_j = NEAR * min(run.energy_j for run in table.runs if run.nll <= target_nll)
    left = sum(run.nll <= target_nll and run.energy_j <= limit_j for run in table.runs)
    for trial, seconds in steps:
        yield trial, seconds
        left -= trial.run.nll <= target_nll and trial.run.energy_j <= limit_j
        if trial.feasible_j(target_nll) <= limit_j or not left:
            return


def learned(path: Path, share: float, seed: int) -> list[FrozenTrial]:
    """The trials of carbon's search on another table, with what was fixed in them among their params."""
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


def searched(path: Path, share: float, name: str, seed: int, learn_from: Path | None) -> dict[str, Any]:
    """One search, until it has found what counts or has no run left."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(path)
    target_nll = table.target_nll(share)
    cheapest_j = min(run.energy_j for run in table.runs if run.nll <= target_nll)
    if learn_from is None:
        steps, what = SEARCHES[name](table, target_nll, seed), name
    else:
        earlier = learned(learn_from, share, seed + FIRST_SEED)
        steps, what = carbon(table, target_nll, seed, earlier=earlier), f"{name} after {learn_from.stem}"
    states: Counter[str] = Counter()
    spent_j, longest_s, found = 0.0, 0.0, False
    for trial, seconds in until_found(table, target_nll, steps):
        near = trial.run.energy_j <= NEAR * cheapest_j
        spent_j, longest_s = spent_j + trial.spent_j, max(longest_s, seconds)
        states.update(["trials", trial.state])
        if trial.run.nll <= target_nll and trial.state != "cap":
            stopped = trial.state == "target"
            states.update(good=1, good_stopped=stopped, cheapest_stopped=stopped and near)
        found = trial.feasible_j(target_nll) <= NEAR * cheapest_j
    return {
        **{"table": table.name, "met_by": share, "sampler": what, "seed": seed, **dict.fromkeys(_SUMMED, 0), **states},
        **{"times_cheapest": spent_j / cheapest_j if found else math.inf, "longest_proposal_s": longest_s},
    }


def summary(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| table | met by | sampler | × the cheapest, median (95 % interval) | 90th percentile | found | trials "
        "| diverged | good ones stopped | cheapest stopped |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (table, share, name), group in grouped(results, "table", "met_by", "sampler").items():
        times = sorted(result["times_cheapest"] for result in group)
        low, high = _median_interval(times)
        total = {key: sum(result.get(key, 0) for result in group) for key in _SUMMED}
        lines.append(
            f"| {table} | {share:.0%} | {name} | {statistics.median(times):.1f} ({low:.1f} to {high:.1f}) "
            f"| {times[math.ceil(0.9 * len(times)) - 1]:.1f} | {sum(map(math.isfinite, times))} of {len(times)} "
            f"| {total['trials'] / len(group):.0f} | {total['diverged'] / len(group):.0f} "
            f"| {total['good_stopped']} of {total['good']} | {total['cheapest_stopped']} |"
        )
    return lines


_SUMMED = ("trials", "diverged", "good", "good_stopped", "cheapest_stopped")


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Of at least 95 % confidence, between two of the values (order statistics, by the binomial distribution)."""
    count = len(ordered)
    outside = int(binom.ppf(0.025, count, 0.5))  # so many may lie below the interval
    return ordered[max(0, outside - 1)], ordered[min(count - 1, count - outside)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samplers", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--learn-from", type=Path, metavar="TABLE", help="that carbon has searched with the same share")
    parser.add_argument("--met-by", type=float, nargs="+", default=SHARES, help="share of the runs that meets a target")
    options = parser.parse_args()
    if not all(0 < share <= 1 for share in options.met_by) or min(options.seeds, options.jobs) < 1:
        parser.error("--met-by must be above 0 and at most 1, --seeds and --jobs at least 1")
    try:
        for path in (*options.tables, *filter(None, [options.learn_from])):
            Table(path)
    except BadInput as error:
        parser.error(str(error))
    if options.learn_from is not None and options.samplers != ["carbon"]:
        parser.error("--learn-from goes with --samplers carbon")
    axes = options.tables, options.met_by, options.samplers, range(options.seeds), [options.learn_from]
    jobs = list(itertools.product(*axes))
    run_all(searched, jobs, summary, options)


if __name__ == "__main__":
    main()
