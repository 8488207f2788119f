"""Several workers on one search, replayed: how much sooner is the answer found, and at how much
more energy?

python benchmarks/scale/concurrency.py TABLE.jsonl OUT.json [--workers 1 2 4 8] [--seeds 10]
    [--schedules auto all]

The clock is the table's: a trial takes its recorded seconds, and its worker then begins the next
one, by what is known at that moment. A search ends when a whole run has met the target for at most
5 % more energy than the cheapest one.
"""

import argparse
import heapq
import json
import math
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import optuna

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from compare import NEAR, RecordedSpace, Table, replayed_spec, training_j, writable

from carbonopt.analysis.concurrency import frugal
from carbonopt.core.errors import BadInput
from carbonopt.core.trial import Phase, TrialRecord, TrialState
from carbonopt.core.units import joules_from_kwh
from carbonopt.engines.replay import ReplayEngine
from carbonopt.search.strategy import Strategy
from carbonopt.study.trial_watch import Rules, TrialWatch, begun_record

TARGETS = (0.03, 0.10, 0.20)  # the share of the best quality by which they are worse
RAMPS = {  # how many trials may run, by how many have ended
    "auto": frugal,
    "1 + ended / 3": lambda ended: 1 + ended // 3,
    "1 + ended / 2": lambda ended: 1 + ended // 2,
    "1 + ended": lambda ended: 1 + ended,
    "2 + ended / 8": lambda ended: 2 + ended // 8,
    "2 + ended / 4": lambda ended: 2 + ended // 4,
    "2 + ended / 3": lambda ended: 2 + ended // 3,
    "2 + ended / 2": lambda ended: 2 + ended // 2,
    "3": lambda ended: 3,
    "1, then 3": lambda ended: 3 if ended else 1,
    "2, from 4 ended on 3": lambda ended: 3 if ended >= 4 else 2,
    "2, from 3 ended on 4": lambda ended: 4 if ended >= 3 else 2,
    "all": lambda ended: math.inf,
}


class Running:
    """A trial from its begin to its end; what it will have been is known at once, and told as its
    time passes.
    """

    def __init__(
        self, trial: optuna.Trial, record: TrialRecord, began_s: float, table: Table
    ) -> None:
        self.trial, self.record, self.began_s = trial, record, began_s
        self.run = table.run(trial.params)
        self.ends_s = began_s + record.duration_s.total
        self.joules = joules_from_kwh(record.energy_kwh.total)

    def __lt__(self, other: "Running") -> bool:
        return self.ends_s < other.ends_s

    def at(self, now_s: float) -> TrialRecord:
        done = (now_s - self.began_s) / self.run.seconds_per_step
        evals = tuple(point for point in self.record.evals if point.step <= done)
        unknown = {
            "state": TrialState.RUNNING,
            "stop_reason": None,
            "emissions_kg_co2e": None,
            "failure": None,
        }
        quality = self.record.quality.model_copy(update={"value": None, "sum": None, "count": None})
        return self.record.model_copy(
            update={**unknown, "evals": evals, "steps_done": int(done), "quality": quality}
        )

    def joules_at(self, now_s: float) -> float:
        seconds = self.record.duration_s.total
        return self.joules * min(1.0, (now_s - self.began_s) / seconds) if seconds else self.joules


class Search:
    """Of one table, by so many workers."""

    def __init__(self, path: Path, worse: float, seed: int) -> None:
        self.table = Table(path)
        target = self.table.target(worse)
        self.config = self.table.config(target, seed, {}, "recommend")
        self.space = RecordedSpace(self.config.search.space, 1, on_gpu=False, table=self.table)
        self.strategy = Strategy(self.config, self.space, None)
        self.study = optuna.create_study(directions=["minimize", "minimize"])
        self.engine = ReplayEngine(self.config)
        self.target = target
        meeting = [
            run for run in self.table.runs.values() if target.is_met_by(self.table.value(run))
        ]
        self.enough_j = NEAR * min(map(training_j, meeting))

    def begin(self, now_s: float, running: list[Running]) -> Running | None:
        for other in running:
            other.trial.set_user_attr("record", other.at(now_s).as_json())
        trials, number = self.study.trials, len(self.study.trials)
        plan = self.strategy.plan(trials, number)
        if plan.why_ended is not None:
            return None
        self.study.sampler = plan.sampler
        trial = self.study.ask(self.strategy.distributions)
        params = self.space.params(trial.params)
        caps = [trials[other].user_attrs["record"]["emissions_kg_co2e"] for other in plan.meeting]
        rules = Rules(
            should_prune=plan.pruning_rule(params),
            audit=False,
            cap_kg_co2e=min((cap for cap in caps if cap is not None), default=None),
            emissions_kg_co2e=lambda kwh: kwh,
            budget_spent=lambda: False,
            interrupted=lambda: False,
            timeout_s=math.inf,
        )
        spec = replayed_spec(number, params)
        self.engine.meter.enter(Phase.SETUP)
        so_far = begun_record(spec, self.config.quality, "", None)
        watch = TrialWatch(
            *(spec, so_far, self.engine.start(spec, Path()), self.engine.meter, rules),
            *([], lambda *_: None, lambda _: None),
        )
        return Running(trial, watch.run(), now_s, self.table)

    def end(self, ended: Running) -> bool:
        """Tells it; whether it is the answer."""
        record = ended.record
        ended.trial.set_user_attr("record", record.as_json())
        if record.state is not TrialState.COMPLETE:
            self.study.tell(ended.trial, state=optuna.trial.TrialState.PRUNED)
            return False
        self.study.tell(ended.trial, [record.emissions_kg_co2e, record.value])
        return record.meets(self.target) and training_j(ended.run) <= self.enough_j

    def found(self, workers: int, schedule: str) -> tuple[float, float, int]:
        """Energy in joules and seconds until the answer is found, and trials; infinite where it
        isn't.
        """
        now_s, spent_j, ended = 0.0, 0.0, 0
        running: list[Running] = []
        while True:
            while len(running) < min(workers, RAMPS[schedule](ended)):
                if (begun_now := self.begin(now_s, running)) is None:
                    break
                heapq.heappush(running, begun_now)
            if not running:
                return math.inf, math.inf, ended
            first = heapq.heappop(running)
            now_s, ended, spent_j = first.ends_s, ended + 1, spent_j + first.joules
            if self.end(first):
                return spent_j + sum(other.joules_at(now_s) for other in running), now_s, ended


def one(path: Path, worse: float, workers: int, schedule: str, seed: int) -> dict:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")
    search = Search(path, worse, seed)
    joules, seconds, trials = search.found(workers, schedule)
    share = joules / search.table.grid_j
    case = {
        "table": path.stem,
        "worse": worse,
        "workers": workers,
        "schedule": schedule,
        "seed": seed,
    }
    return {**case, "share": share, "seconds": seconds, "trials": trials}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("out", type=writable)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--schedules", nargs="+", choices=RAMPS, default=["auto", "all"])
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    if min(*options.workers, options.seeds) < 1:
        parser.error("--workers and --seeds must be 1 or more")
    try:
        Table(options.table)
    except BadInput as error:
        parser.error(str(error))
    options.workers = sorted({1, *options.workers})  # what the others are held against
    cases = [
        (options.table, worse, workers, schedule, seed)
        for worse, workers, schedule, seed in product(
            TARGETS, options.workers, options.schedules, range(options.seeds)
        )
        if workers > 1 or schedule == options.schedules[0]
    ]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(one, *zip(*cases, strict=True)))
    options.out.write_text(json.dumps(results, indent=1, allow_nan=True) + "\n")
    print(
        "| schedule | workers | energy, % of the grid's | seconds | energy ÷ one worker's | times"
        " faster |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    medians: dict[tuple, tuple[list, list]] = {}
    for schedule, workers in product(options.schedules, options.workers):
        mine = [
            r
            for r in results
            if r["workers"] == workers and (r["schedule"] == schedule or workers == 1)
        ]
        of = {worse: [r for r in mine if r["worse"] == worse] for worse in TARGETS}
        if not all(of.values()):
            continue
        shares = [statistics.median(r["share"] for r in of[worse]) for worse in TARGETS]
        seconds = [statistics.median(r["seconds"] for r in of[worse]) for worse in TARGETS]
        medians[schedule, workers] = shares, seconds
        alone_shares, alone_s = medians[options.schedules[0], options.workers[0]]
        dearer = statistics.geometric_mean(a / b for a, b in zip(shares, alone_shares, strict=True))
        faster = statistics.geometric_mean(b / a for a, b in zip(seconds, alone_s, strict=True))
        told = (
            " / ".join(f"{100 * share:.1f}" for share in shares),
            " / ".join(f"{s:.0f}" for s in seconds),
        )
        print(f"| {schedule} | {workers} | {told[0]} | {told[1]} | {dearer:.2f} | {faster:.2f} |")


if __name__ == "__main__":
    main()
