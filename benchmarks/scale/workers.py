"""Many workers on one replayed study: does each configuration run once, is all energy counted, what
does a trial take?

python benchmarks/scale/workers.py OUT.json [--workers 32] [--trials 1000] [--kills 30] [--storage
    URL] [--cuts 5 --cut COMMAND] [--seed 0]

A table of 1,200 made-up runs is searched at random, so that nothing but the storage and the workers
takes time. Workers killed by SIGKILL at random moments, the leading one among them, are started
again. COMMAND, such as `pg_ctlcluster 15 main restart`, cuts the connections to the storage, at
random moments spread over the trials.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import yaml

from carbonopt.analysis.footprint import footprint
from carbonopt.core.trial import TrialState
from carbonopt.core.units import joules_from_kwh
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

SPACE = {
    "global_batch_size": [8, 16, 32, 64, 128],
    "learning_rate": [round(1e-4 * 1.3**power, 8) for power in range(20)],
    "epochs": [1, 2, 3, 4, 6, 8],
    "zero_stage": [0, 1],
}
EVALS, J_PER_EVAL, TEXTS = 4, 3.0, 4000


def recorded(batch: int, rate: float, epochs: int, stage: int) -> dict:
    steps = epochs * TEXTS // batch
    loss = 1.4 + 2 / math.sqrt(epochs) + 0.15 * math.log(rate / (1e-3 * math.sqrt(batch / 32))) ** 2
    evals = [
        {"step": steps * n // EVALS, "nll": loss + 0.6 * (1 - n / EVALS)}
        for n in range(1, EVALS + 1)
    ]
    params = dict(zip(SPACE, (batch, rate, epochs, stage), strict=True))
    costs = {"joules_per_step": 0.5 + 0.02 * batch + 0.2 * stage, "seconds_per_step": 0.01}
    return {
        "params": params,
        "total_steps": steps,
        **costs,
        "joules_per_eval": J_PER_EVAL,
        "evals": evals,
    }


def study_of(table: Path, trials: int, seed: int) -> dict:
    space = {name: {"choices": choices} for name, choices in SPACE.items()}
    search = {
        "sampler": "random",
        "pruning": {"target": False, "cap": False},
        "space": space,
        "seed": seed,
    }
    launch = {"kind": "replay", "table": str(table)}
    return {
        "name": "many-workers",
        "target": {"perplexity": 12},
        "search": search,
        "budget": {"trials": trials},
        "carbon": {"intensity_g_co2e_per_kwh": 200},
        "launch": launch,
    }


class Crew:
    """The workers of a study; the first leads."""

    def __init__(self, command: list[str], workers: int, paths: StudyPaths) -> None:
        self._command, self._paths = command, paths
        self._processes = [self._started(0)]
        while not (paths.storage_pointer.exists() or paths.storage.exists()):
            time.sleep(0.1)
        self._processes += [self._started(index) for index in range(1, workers)]
        self.refused = 0  # of those that wanted to join before the first one had begun

    def _started(self, index: int) -> subprocess.Popen:
        command = [*self._command, "--worker"] if index else self._command
        # A file: the one that leads tells of all trials, and a pipe that nobody reads would be full
        # of them.
        with self._log(index).open("w") as log:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def _log(self, index: int) -> Path:
        return self._paths.root.with_name(f"worker-{index}.txt")

    def kill_one(self, rng: np.random.Generator) -> None:
        index = int(rng.integers(len(self._processes)))
        self._processes[index].kill()
        self._processes[index].wait()
        self._processes[index] = self._started(index)

    def is_working(self) -> bool:
        """Starts those again that came too early."""
        for index, process in enumerate(self._processes):
            if process.poll() == 2:
                if "--worker joins a study" not in (said := self._log(index).read_text()):
                    raise SystemExit(said)
                self.refused += 1
                self._processes[index] = self._started(index)
        return any(process.poll() is None for process in self._processes)

    def exit_codes(self) -> list[int]:
        return [process.returncode for process in self._processes]

    def errors(self) -> dict[int, str]:
        """The end of the log of each worker that failed."""
        failed = [index for index, code in enumerate(self.exit_codes()) if code not in (0, 3)]
        return {index: self._log(index).read_text()[-3000:] for index in failed}


def cut_if_due(stored: StudyStorage, command: str, done: int, options: argparse.Namespace) -> int:
    """Cut the connections when enough trials have finished; return how often it was done.

    The cuts are spread evenly over the trials, and the last one comes before the last trials.
    """
    if done >= options.cuts:
        return done
    finished = stored.snapshot().finished_count()
    if finished < options.trials * (done + 0.5) / options.cuts:
        return done
    subprocess.run(shlex.split(command), check=True)
    return done + 1


def results(data: StudyData, table: list[dict], joined: float) -> dict:
    """`joined`: when all workers had, in seconds since 1970."""
    key = lambda params: tuple(params[name] for name in SPACE)  # noqa: E731
    own = [key(record.params.as_record()) for record in data.records]
    rows = {key(row["params"]): row for row in table}
    expected_j = math.fsum(
        row["joules_per_step"] * row["total_steps"] + EVALS * J_PER_EVAL
        for row in map(rows.get, own)
    )
    measured_j = joules_from_kwh(math.fsum(record.energy_kwh.total for record in data.records))
    began = sorted(datetime.fromisoformat(record.started_at).timestamp() for record in data.records)
    apart_ms = [1000 * (after - before) for before, after in pairwise(began) if before > joined]
    return {
        "trials": len(own),
        "complete": sum(record.state is TrialState.COMPLETE for record in data.records),
        "duplicates": len(own) - len(set(own)),
        "second_attempts": sum(record.attempt > 1 for record in data.records),
        "energy_j": measured_j,
        "energy_of_the_table_j": expected_j,
        "spent_j": joules_from_kwh(data.spent_kwh()),
        "closure": footprint(data).closure,
        "ms_a_trial": statistics.mean(apart_ms),
        "trials_since_all_joined": len(apart_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    numbers = (("workers", 32), ("trials", 1000), ("kills", 0), ("cuts", 0), ("seed", 0))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--storage")
    parser.add_argument("--cut", metavar="COMMAND")
    options = parser.parse_args()
    table = [recorded(*values) for values in product(*SPACE.values())]
    rng, began = np.random.default_rng(options.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths, lines = StudyPaths(Path(folder) / "study"), Path(folder) / "table.jsonl"
        lines.write_text("".join(json.dumps(row) + "\n" for row in table))
        study = Path(folder) / "study.yaml"
        study.write_text(yaml.safe_dump(study_of(lines, options.trials, options.seed)))
        command = [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(paths.root)]
        crew = Crew(
            command + (["--storage", options.storage] if options.storage else []),
            options.workers,
            paths,
        )
        storage = connect(options.storage or storage_url(paths, None), must_exist=True)
        while (stored := StudyStorage.load(storage, "many-workers")) is None or len(
            stored.workers()
        ) < options.workers:
            crew.is_working()
            time.sleep(0.5)
        joined, kills, cuts = time.time(), 0, 0
        while crew.is_working():
            time.sleep(rng.uniform(0.2, 2.0) if options.kills else rng.uniform(0.0, 0.2))
            if options.cut is not None:
                cuts = cut_if_due(stored, options.cut, cuts, options)
            if kills < options.kills and crew.is_working():
                crew.kill_one(rng)
                kills += 1
        told = results(stored.read(), table, joined)
    told |= {
        "workers": options.workers,
        "kills": kills,
        "cuts": cuts,
        "exit_codes": crew.exit_codes(),
        "errors": crew.errors(),
        "early": crew.refused,
    }
    options.out.write_text(json.dumps(told | {"wall_s": time.monotonic() - began}, indent=1) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
