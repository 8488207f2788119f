"""What a study with `confirm` answers, and spends, where a configuration's runs spread by seeds.

    python benchmarks/search/confirmed.py [TABLE.jsonl ...] [--studies 20] [--worse 0.05]
        [--trials 14] [--converged] [--jobs 2] [--json OUT]

Each study is a real one that replays a table of recorded runs; without a table, one that is made up
after the shipped study of a character GPT (studies/shakespeare-char.yaml). The table gets runs of further seeds
that were never made: the recorded losses, times a factor. It has a part that all configurations
with one batch size and seed share, and a part of each run's own (deviations SHARED and OWN, as the
seeds of a character GPT spread on an H200). The energy of runs spreads by the deviation ENERGY, as it
did there. What is recorded is the truth, by which a configuration does or doesn't meet the target.

The start is the table's best configuration.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from compare import Table, training_j

import carbonopt

SEEDS = 6
SHARED, OWN = 0.008, 0.006  # standard deviations of the losses' factor
ENERGY = 0.01  # standard deviation of the energy's factor; 0.005 to 0.018 in studies on H200s


def spread(rows: Sequence[dict[str, Any]], study: int) -> Iterator[dict[str, Any]]:
    """Yield the recorded runs, each with SEEDS seeds whose losses differ."""
    rng = np.random.default_rng(study)
    shared: dict[tuple[Any, int], float] = {}
    for row in rows:
        for seed in range(SEEDS):
            of_batch = row["params"].get("global_batch_size"), seed
            if of_batch not in shared:
                shared[of_batch] = rng.normal(0.0, SHARED)
            factor = math.exp(shared[of_batch] + rng.normal(0.0, OWN))
            evals = [{**point, "nll": point["nll"] * factor} for point in row["evals"]]
            joules = row["joules_per_step"] * math.exp(rng.normal(0.0, ENERGY))
            yield {**row, "seed": seed, "evals": evals, "joules_per_step": joules}


def made_up() -> Iterator[dict[str, Any]]:
    """Yield runs of a character GPT as studies on H200s had them, roughly, with short schedules.

    The loss falls with the epochs, more slowly for larger batches and AdamW, is lowest at a rate
    that grows with the batch, and rises with many epochs if the dropout is low.
    """
    rates = (1e-3, 1.3e-3, 1.7e-3, 2.2e-3, 2.8e-3, 3.6e-3, 4.6e-3, 6e-3)
    for batch, rate, epochs, optimizer, dropout in itertools.product(
        (16, 32, 64), rates, (5, 6, 8, 10, 13, 16, 20, 30), ("adamw", "muon"), (0.05, 0.2)
    ):
        nll_after = partial(made_up_nll, batch, rate, optimizer, dropout)
        steps = epochs * 3920 // batch
        mg_per_epoch = {16: 18.8, 32: 15.8, 64: 12.3}[batch] * (1.06 if optimizer == "muon" else 1)
        # during a run the rate is still high, unlike at the end of a shorter one
        evals = [
            {
                "step": max(1, steps * part // 8),
                "nll": round(nll_after(epochs * part / 8) + 0.25 * (1 - part / 8) ** 1.5, 5),
            }
            for part in range(1, 9)
        ]
        params = {"zero_stage": 0, "global_batch_size": batch, "learning_rate": rate}
        yield {
            "params": {**params, "epochs": epochs, "optimizer": optimizer, "dropout": dropout},
            "total_steps": steps,
            "joules_per_step": round(36 * mg_per_epoch * epochs / steps, 5),
            "seconds_per_step": 0.004,
            "joules_per_eval": 30.0,
            "evals": evals,
        }


def made_up_nll(batch: int, rate: float, optimizer: str, dropout: float, epochs: float) -> float:
    """Return the loss in nats at the end of a run."""
    larger, is_muon = math.sqrt(batch / 16), optimizer == "muon"
    from_best_rate = math.log(rate / ((1.7e-3 if is_muon else 1.2e-3) * larger))
    unstable = 0.8 if not is_muon and rate > 2.5e-3 * larger else 0.0
    to_learn = 0.078 * (5 / epochs) ** 1.2 * larger * (1 if is_muon else 1.9)
    of_dropout = (
        0.004 * max(0, epochs - 12) / larger if dropout < 0.1 else 0.02 * math.sqrt(10 / epochs)
    )
    return 1.40 + 0.03 * from_best_rate**2 + unstable + to_learn + of_dropout


def answer(path: Path, worse: float, trials: int, converged: bool, study: int) -> dict[str, Any]:
    table = Table(path)
    target = table.target(worse)
    meeting = [run for run in table.runs.values() if target.is_met_by(table.value(run))]
    start = min(meeting, key=lambda run: table.quality.rank(table.value(run)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row.get("seed", 0) == 0]
    names = rows[0]["params"]
    space = {name: {"choices": sorted({row["params"][name] for row in rows})} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        spread_table = Path(folder) / "table.jsonl"
        spread_table.write_text("".join(json.dumps(row) + "\n" for row in spread(rows, study)))
        result = carbonopt.run(
            {
                "name": "confirmed",
                "target": {target.quality.name: target.value},
                "search": {"space": space, "start": start.params},
                "budget": {"trials": trials} | ({"until": "converged"} if converged else {}),
                "confirm": {"seeds": SEEDS, "runners_up": 1},
                "carbon": {"intensity_g_co2e_per_kwh": 100},
                "launch": {"kind": "replay", "table": str(spread_table)},
            },
            Path(folder) / "study",
        )
        recommended = result.recommend()
        data = json.loads((Path(folder) / "study" / "report" / "data" / "report.json").read_text())
    truth = next(
        run
        for run in table.runs.values()
        if all(getattr(recommended.params, name) == value for name, value in run.params.items())
    )
    confidence = data["recommendation"]["confidence"]
    interval = data["recommendation"]["saving_interval"]
    is_confirmed = confidence is not None and confidence["confirmed"]
    saved_kwh = (training_j(start) - training_j(truth)) / 3.6e6
    return {
        "table": path.stem,
        "study": study,
        "confirmed": is_confirmed,
        "is_start": truth.params == start.params,
        "truly_meets": target.is_met_by(table.value(truth)),
        "over_cheapest": training_j(truth) / min(map(training_j, meeting)) - 1,
        "saving": 1 - training_j(truth) / training_j(start),
        # points between the ends of the saving's interval; None: it has none
        "interval_width": None if interval is None else interval[1] - interval[0],
        "study_kwh": (study_kwh := data["spent"]["energy_kwh"]),
        # None: nothing that saves is confirmed
        "break_even_runs": study_kwh / saved_kwh if is_confirmed and saved_kwh > 0 else None,
    }


def summary(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| table | studies | confirmed, cheaper than the start | of these truly above the target |"
        " saving, mean (%) | over the cheapest, median (%) | of the study, kWh |"
        " runs until it pays back, median | at most 10 | the saving's interval at most 2 points |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for table, group in groupby(results, key=lambda result: result["table"]):
        studies = list(group)
        sure = [each for each in studies if each["confirmed"] and not each["is_start"]]
        above = sum(not each["truly_meets"] for each in sure)
        saving = statistics.mean(each["saving"] if each in sure else 0.0 for each in studies)
        over = statistics.median(each["over_cheapest"] for each in studies)
        kwh = statistics.mean(each["study_kwh"] for each in studies)
        runs = [each["break_even_runs"] or math.inf for each in studies]
        narrow = sum((each["interval_width"] or math.inf) <= 0.02 for each in sure)
        yield (
            f"| {table} | {len(studies)} | {len(sure)} | {above} | {100 * saving:.0f} |"
            f" {100 * over:.0f} | {kwh:.4g} | {statistics.median(runs):.1f} |"
            f" {sum(each <= 10 for each in runs)} | {narrow} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="*")
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--worse", type=float, default=0.05)
    parser.add_argument("--trials", type=int, default=14)
    parser.add_argument(
        "--converged",
        action="store_true",
        help="end when nothing more is expected to pay",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs) as pool:
        own = Path(folder) / "made-up.jsonl"
        own.write_text("".join(json.dumps(row) + "\n" for row in made_up()))
        results = [
            result
            for table in options.tables or [own]
            for result in pool.map(
                partial(answer, table, options.worse, options.trials, options.converged),
                range(options.studies),
            )
        ]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
