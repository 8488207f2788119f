"""How much energy search strategies spend until they have made a run that is nearly the cheapest
one.

    python benchmarks/search/compare.py TABLE.jsonl [TABLE.jsonl ...] [--quality accuracy] [--seeds
        20] [--samplers carbon ...] [--json OUT]

On recorded runs, every strategy searches for the cheapest run that meets a target 3, 10 and 20 %
worse than the table's best quality, such as above its lowest perplexity. Counted is the training
energy of all its trials, up to and with the first complete one within 5 % of the cheapest run that
meets the target, as a share of the training energy of the whole grid. `carbon` is carbonopt's search with its
pruning, trial by trial through the launcher and the watch of real studies; `carbon-whole` is the
same without `pruning.target`. The others are Optuna's, with the target as a constraint, and run
whole trials: Optuna has no pruning for two objectives. Each seed of each strategy is one search.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import optuna

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.quality import PERPLEXITY, QUALITIES, Target
from carbonopt.core.trial import Phase, StopReason, TrialState
from carbonopt.core.units import joules_from_kwh
from carbonopt.engines.replay import RecordedRun, ReplayEngine, read_table
from carbonopt.search.strategy import Strategy
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.trial_spec import TrialSpec
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record

TARGETS = (0.03, 0.10, 0.20)  # the share of the best quality by which they are worse
NEAR = 1.05  # of the energy of the cheapest run that meets the target
OTHERS = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "nsga2": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=10),
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=10),
}
# How often a sampler is asked, for each configuration of the table; it may repeat itself. What it
# has not found by then counts as not found. A Gaussian process takes a minute for so many answers
# as it is.
ASKS = {"random": 20, "nsga2": 20, "tpe": 20, "gp": 3}


def replayed_spec(number: int, params: TrialParams) -> TrialSpec:
    """Return what a replay reads of a trial; it has no workload and no folders."""
    return TrialSpec(
        number=number,
        attempt=1,
        seed=0,
        params=params,
        workload={},
        prepared_dir="",
        trial_dir="",
    )


class Table:
    """The runs of a table, one for each configuration: the one of the lowest seed."""

    def __init__(self, path: Path, quality: str = PERPLEXITY.name) -> None:
        self.path, self.quality = path, QUALITIES[quality]
        self.runs: dict[tuple, RecordedRun] = {}
        for run in sorted(read_table(path, self.quality), key=lambda run: run.seed):
            self.runs.setdefault(tuple(run.params.items()), run)
        self.names = [name for name, _ in next(iter(self.runs))]
        self.choices = {
            name: sorted({run.params[name] for run in self.runs.values()}) for name in self.names
        }
        self.grid_j = sum(map(training_j, self.runs.values()))
        self.best = min(map(self.value, self.runs.values()), key=self.quality.rank)

    def value(self, run: RecordedRun) -> float:
        """Of the quality, at the run's end."""
        last = run.evals[-1]
        return self.quality.value(last.total, last.count)

    def target(self, worse: float) -> Target:
        return Target(self.quality, self.quality.relaxed(self.best, worse))

    def run(self, values: dict) -> RecordedRun | None:
        """None: was not recorded."""
        return self.runs.get(tuple((name, values[name]) for name in self.names))

    def config(self, target: Target, seed: int, budget: dict, goal: str) -> StudyConfig:
        return StudyConfig.model_validate(
            {
                "name": "comparison",
                "target": {self.quality.name: target.value},
                "search": {
                    "space": {name: {"choices": choices} for name, choices in self.choices.items()},
                    "seed": seed,
                    "goal": goal,
                },
                "budget": {"trials": len(self.runs), **budget},
                "carbon": {"intensity_g_co2e_per_kwh": 1.0},
                "launch": {"kind": "replay", "table": str(self.path)},
            }
        )


@dataclass(frozen=True)
class RecordedSpace(SearchSpace):
    """In which a configuration that was not recorded can't exist: a grid whose recording was cut
    short has some.
    """

    table: Table | None = None

    def rule_broken(self, values: dict) -> str | None:
        return super().rule_broken(values) or (
            None if self.table.run(self._filled(values)) else "was not recorded"
        )


def training_j(run: RecordedRun) -> float:
    return run.total_steps * run.joules_per_step


def search(path: Path, quality: str, sampler: str, worse: float, seed: int, limit: int) -> dict:
    """One search, until it has found what counts, or has no trial left."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(path, quality)
    target = table.target(worse)
    meeting = [run for run in table.runs.values() if target.is_met_by(table.value(run))]
    enough_j = NEAR * min(map(training_j, meeting))
    step = (carbon if sampler.startswith("carbon") else whole)(table, sampler, target, seed)
    spent_j, mistakes, proposing_s = 0.0, [], []
    trials = 0
    for run, trial_j, complete, stopped, seconds in step:
        trials += 1
        spent_j += trial_j
        proposing_s.append(seconds)
        met = target.is_met_by(table.value(run))
        if stopped == StopReason.TARGET and met:
            mistakes.append(training_j(run) <= enough_j)
        if complete and met and training_j(run) <= enough_j:
            break
        if trials >= limit:
            spent_j = math.inf
            break
    else:
        spent_j = math.inf
    return {
        "table": path.stem,
        "sampler": sampler,
        "worse": worse,
        "seed": seed,
        "share": spent_j / table.grid_j,
        "trials": trials,
        "stopped_by_mistake": len(mistakes),
        "cheapest_stopped": sum(mistakes),
        "longest_proposal_s": max(proposing_s),
    }


def whole(table: Table, sampler: str, target: Target | None, seed: int):
    """Whole trials, proposed by one of Optuna's samplers as they come: repeats cost nothing here.

    Args:
        target: None: the search is for the whole front.
    """
    study = optuna.create_study(
        directions=["minimize", table.quality.direction], sampler=OTHERS[sampler](seed)
    )
    space = {
        name: optuna.distributions.CategoricalDistribution(choices)
        for name, choices in table.choices.items()
    }
    seen = set()
    for _ in range(ASKS[sampler] * len(table.runs)):
        began = time.perf_counter()
        trial = study.ask(space)
        seconds = time.perf_counter() - began
        run = table.run(trial.params)
        if run is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        if target is not None:
            trial.set_constraint("short of the target", target.shortfall(table.value(run)))
        study.tell(trial, [training_j(run), table.value(run)])
        key = tuple(run.params.items())
        if key not in seen:
            seen.add(key)
            yield run, training_j(run), True, None, seconds


def carbon(
    table: Table,
    sampler: str,
    target: Target,
    seed: int,
    goal: str = "recommend",
    **budget: str | int,
):
    """carbonopt's search: its proposals, its pruning, its trials' watch."""
    config = table.config(target, seed, budget, goal)
    space = RecordedSpace(config.search.space, 1, False, table=table)
    strategy = Strategy(config, space, None)
    quality = config.quality
    engine = ReplayEngine(config)
    study = optuna.create_study(directions=["minimize", quality.direction])
    best_kwh = None
    while True:
        number = len(study.get_trials(deepcopy=False))
        began = time.perf_counter()
        plan = strategy.plan(study.trials, number)
        if plan.why_ended is not None:
            return
        study.sampler = plan.sampler
        trial = study.ask(strategy.distributions)
        seconds = time.perf_counter() - began
        params = space.params(trial.params)
        spec = replayed_spec(number, params)
        rules = Rules(
            should_prune=plan.pruning_rule(params) if sampler == "carbon" else None,
            audit=False,
            cap_kg_co2e=best_kwh if goal == "recommend" else None,
            emissions_kg_co2e=lambda kwh: kwh,
            budget_spent=lambda: False,
            interrupted=lambda: False,
            timeout_s=math.inf,
        )
        engine.meter.enter(Phase.SETUP)
        watch = TrialWatch(
            *(
                spec,
                begun_record(spec, quality, "", None),
                engine.start(spec, Path()),
                engine.meter,
                rules,
            ),
            *([], lambda *_: None, lambda _: None),
        )
        record = watch.run()
        trial.set_user_attr("record", record.as_json())
        complete = record.state == TrialState.COMPLETE
        if complete:
            study.tell(trial, [record.emissions_kg_co2e, record.value])
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        if record.meets(target) and (best_kwh is None or record.energy_kwh.train < best_kwh):
            best_kwh = record.energy_kwh.train
        yield (
            table.run(trial.params),
            joules_from_kwh(record.energy_kwh.train),
            complete,
            record.stop_reason,
            seconds,
        )


def grouped(results: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Results that have the same values of these names, in the order that they come in."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in names), []).append(result)
    return groups


def summary(results: list[dict]) -> list[str]:
    lines = [
        (
            "| table | worse than best | sampler | median (%) | 90th percentile (%) | worst (%) |"
            " found | trials | good ones stopped | cheapest stopped |"
        ),
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (table, worse, sampler), group in grouped(results, "table", "worse", "sampler").items():
        shares = sorted(100 * result["share"] for result in group)
        ninetieth = shares[math.ceil(0.9 * len(shares)) - 1]
        trials = sum(result["trials"] for result in group)
        lines.append(
            f"| {table} | {worse:.0%} | {sampler} | {statistics.median(shares):.2f} |"
            f" {ninetieth:.2f} | {shares[-1]:.2f} | {sum(map(math.isfinite, shares))} of"
            f" {len(group)} | {trials / len(group):.1f} |"
            f" {sum(result['stopped_by_mistake'] for result in group)} of {trials} |"
            f" {sum(result['cheapest_stopped'] for result in group)} |"
        )
    return lines


def arguments(about: str) -> argparse.ArgumentParser:
    """What every benchmark of searches takes."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=writable)
    return parser


def writable(text: str) -> Path:
    """A file for the results, checked before hours of searches."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, but is {text!r}")
    return path


def run_all(
    search: Callable[..., dict],
    jobs: list[tuple],
    summary: Callable[[list[dict]], list[str]],
    options: argparse.Namespace,
) -> list[dict]:
    """Runs every search in processes of its own, writes what they found and prints the summary."""
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(search, *zip(*jobs, strict=True)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(results)))
    return results


def print_longest(results: list[dict]) -> None:
    longest = max(
        (result["longest_proposal_s"] for result in results if result["sampler"] == "carbon"),
        default=math.nan,
    )
    print(
        f"\nlongest proposal of carbon: {longest:.2f} s, at most"
        f" {max(result['trials'] for result in results)} trials"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--quality", choices=QUALITIES, default=PERPLEXITY.name, help="of all the tables"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--samplers",
        nargs="+",
        choices=["carbon", "carbon-whole", *OTHERS],
        default=["carbon", *OTHERS],
    )
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS)
    parser.add_argument("--limit", type=int, default=10_000, help="trials of a search")
    options = parser.parse_args()
    jobs = [
        (table, options.quality, sampler, worse, seed, options.limit)
        for table in options.tables
        for sampler in options.samplers
        for worse in options.targets
        for seed in range(options.seeds)
    ]
    print_longest(run_all(search, jobs, summary, options))


if __name__ == "__main__":
    main()
