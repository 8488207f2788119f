"""What a proposal and `carbonopt recommend` take in studies of many trials. Nothing is trained.

    python benchmarks/search/sizes.py [--trials 200 500 1000 5000 20000] [--repeats 3]
        [--recommend 60x10000 ...] [--json OUT]

A proposal is made by the search of a study, from the records of its trials, as after each trial of
`carbonopt run`. Two spaces: `usual` has batches, a continuous learning rate and epochs; `own` has
further dimensions, two of which are continuous and change what a step costs, diverged trials, and
measured memory, so that every model of the search has as many different points as there are trials.
`recommend` is the command, on a study stored in SQLite; 60x10000 is 60 trials of 10,000 evaluations
each.

Each figure is from a process of its own: wall time and CPU time of the proposal (of the whole
command for `recommend`), and the process's peak of memory, with its imports and the trials.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from compare import writable
from optuna.trial import FrozenTrial

from carbonopt.core.dimensions import TrialParams
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.quality import PERPLEXITY
from carbonopt.core.trial import (
    Durations,
    Energy,
    QualityResult,
    Stage,
    StageCost,
    TrialRecord,
    TrialState,
)
from carbonopt.core.units import emissions_kg_co2e
from carbonopt.search.strategy import Strategy
from carbonopt.space.search_space import SearchSpace
from carbonopt.spec.study_config import StudyConfig
from carbonopt.spec.study_data import Intensity, Provenance
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect
from carbonopt.study_file.reader import parse_study

EXAMPLES, TOKENS, EVALUATIONS, INTENSITY_G_PER_KWH = 64_000, 10_000, 10, 300.0
USUAL = {
    "global_batch_size": {"choices": [8, 16, 32, 64, 128]},
    "learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "epochs": {"choices": [1, 2, 4, 8]},
}
OWN = {
    **USUAL,
    "width": {"low": 0.1, "high": 10.0, "log": True},
    "depth": {"low": 1.0, "high": 8.0},
    "kind": {"choices": ["a", "b", "c"]},
}
SPACES = {"usual": USUAL, "own": OWN}
TARGET = 14.0  # perplexity; some 4 % of the trials of either space meet it
DIVERGED_FROM = 5e-2  # learning rate, in the space `own`


def config(space: str, trials: int) -> StudyConfig:
    command = "python train.py " + " ".join(f"--{name} {{{name}}}" for name in SPACES[space])
    return parse_study(
        {
            "name": "sizes",
            "workload": {"task": "script", "command": command},
            "target": {"perplexity": TARGET},
            "search": {"space": SPACES[space]},
            "budget": {"trials": trials + 1},
            "carbon": {"intensity_g_co2e_per_kwh": INTENSITY_G_PER_KWH, "pue": 1.0},
            "launch": {"kind": "local", "gpus": []},
        },
        "here",
    )


def drawn(space: str, rng: np.random.Generator) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, domain in SPACES[space].items():
        if "choices" in domain:
            values[name] = domain["choices"][rng.integers(len(domain["choices"]))]
        elif domain.get("log"):
            values[name] = math.exp(rng.uniform(math.log(domain["low"]), math.log(domain["high"])))
        else:
            values[name] = rng.uniform(domain["low"], domain["high"])
    return values


def record(
    number: int, values: dict[str, Any], evaluations: int, rng: np.random.Generator
) -> TrialRecord:
    batch, rate, epochs = (
        values[name] for name in ("global_batch_size", "learning_rate", "epochs")
    )
    width, depth = values.get("width", 1.0), values.get("depth", 4.0)
    steps = max(evaluations, int(EXAMPLES * epochs / batch))
    diverged = "width" in values and rate > DIVERGED_FROM
    step_kwh = 1e-8 * batch**0.7 * (width + 0.2 * depth) * math.exp(0.02 * rng.standard_normal())
    best_rate = 3e-3 * (batch / 32) ** 0.5
    offset = 0.01 * rng.standard_normal()
    evals = []
    for part in range(1, evaluations + 1):
        step = steps * part // evaluations
        nll = 2.2 + 4.0 * (step * batch**0.5) ** -0.25 + 0.05 * math.log(rate / best_rate) ** 2
        nll += 0.02 * math.log(width) ** 2 + offset + 0.003 * rng.standard_normal()
        total = math.nan if diverged and part == evaluations else nll * TOKENS
        point = EvalPoint.of(PERPLEXITY, total, TOKENS, step=step, tokens=None)
        evals.append(point.model_copy(update={"train_energy_kwh": step * step_kwh}))
    kwh = steps * step_kwh
    return TrialRecord(
        trial=number,
        state=TrialState.DIVERGED if diverged else TrialState.COMPLETE,
        seed=0,
        params=TrialParams(**values, zero_stage=None, offload=None, world_size=1),
        quality=QualityResult(
            name=PERPLEXITY.name, value=None if diverged else evals[-1].value,
            sum=None if diverged else evals[-1].sum, count=None if diverged else TOKENS,
        ),
        emissions_kg_co2e=emissions_kg_co2e(kwh, INTENSITY_G_PER_KWH, 1.0),
        energy_kwh=Energy(train=kwh, setup=1e-6, eval=1e-6, total=kwh + 2e-6),
        duration_s=Durations(train=60.0, setup=1.0, eval=1.0, total=62.0),
        stages={
            Stage.COMPILE: StageCost(duration_s=1.0, energy_kwh=2 * step_kwh),
            Stage.STEPS: StageCost(duration_s=59.0, energy_kwh=(steps - 1) * step_kwh),
        },
        evals=tuple(evals),
        peak_memory_gib=1.0 + width * depth if "width" in values else None,
        total_steps=steps,
        steps_done=steps,
    )  # fmt: skip


def trials(
    space: str, count: int, evaluations: int, strategy: Strategy
) -> list[tuple[FrozenTrial, TrialRecord]]:
    rng, made = np.random.default_rng(0), []
    for number in range(count):
        values = drawn(space, rng)
        own = record(number, values, evaluations, rng)
        complete = own.state is TrialState.COMPLETE
        trial = optuna.create_trial(
            state=optuna.trial.TrialState.COMPLETE if complete else optuna.trial.TrialState.PRUNED,
            values=[own.emissions_kg_co2e, own.value] if complete else None,
            params=values,
            distributions=strategy.distributions,
            user_attrs={"record": own.as_json()},
        )
        trial.number = number
        made.append((trial, own))
    return made


def strategy_of(space: str, count: int) -> Strategy:
    study = config(space, count)
    return Strategy(
        study, SearchSpace(study.search.space, 1, on_gpu=False, own_dimensions=True), 80.0
    )


def propose(space: str, count: int) -> dict[str, Any]:
    """Measure one proposal in this process, after one of few trials, which imports the models."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    strategy = strategy_of(space, count)
    made = [trial for trial, _ in trials(space, count, EVALUATIONS, strategy)]
    _ = strategy.plan(made[:30], 30).why_ended
    began, began_cpu = time.perf_counter(), time.process_time()
    plan = strategy.plan(made, count)
    ended, values = plan.why_ended, plan.sampler
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    proposed = vars(values).get("_values") if ended is None else ended
    return {"wall_s": wall_s, "cpu_s": cpu_s, "mb": _peak_mb(resource.RUSAGE_SELF),
            "proposed": str(proposed)}  # fmt: skip


def store(folder: Path, count: int, evaluations: int) -> None:
    """Store a study, as `carbonopt run` leaves it in its folder."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    strategy = strategy_of("usual", count)
    source = Intensity(g_co2e_per_kwh=INTENSITY_G_PER_KWH, source="given in the study file")
    provenance = Provenance(
        hardware=None, versions={}, intensity=source, energy_source={"cpu": "modelled"},
        study_file="name: sizes\n",
    )  # fmt: skip
    stored = StudyStorage.create(
        connect(f"sqlite:///{folder / 'study.db'}"), strategy.config, provenance
    )
    for trial, _ in trials("usual", count, evaluations, strategy):
        stored.study.add_trial(trial)
    stored.set_ended("all trials done")


def recommend(folder: Path) -> dict[str, Any]:
    """Measure the command, its process and all of its children."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "carbonopt", "recommend", str(folder), "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    wall_s = time.perf_counter() - began
    assert done.returncode in (0, 3), done.stderr
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime,
        "mb": _peak_mb(resource.RUSAGE_CHILDREN), "proposed": json.loads(done.stdout)["trial"],
    }  # fmt: skip


def _peak_mb(who: int) -> float:
    return resource.getrusage(who).ru_maxrss * 1024 / 1e6


def in_own_process(*what: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", *what], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def summary(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: medians, and the largest value in brackets."""
    lines = [
        "| what | trials | evaluations of each | wall (s) | CPU (s) | peak memory (MB) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        figures = [
            f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"
            for key, digits in (("wall_s", 2), ("cpu_s", 2), ("mb", 0))
            for values in [[run[key] for run in result["runs"]]]
        ]
        what = f"{result['what']} | {result['trials']:,} | {result['evaluations']:,}"
        lines.append(f"| {what} | {' | '.join(figures)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, nargs="*", default=[200, 500, 1000, 5000, 20_000])
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--recommend", nargs="*", default=["60x100", "60x10000"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=writable)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        what, of = options.one
        print(json.dumps(recommend(Path(of)) if what == "recommend" else propose(what, int(of))))
        return
    results = []
    for space in options.spaces:
        for count in options.trials:
            runs = [in_own_process(space, str(count)) for _ in range(options.repeats)]
            what = f"a proposal, {space} space"
            results.append(
                {"what": what, "trials": count, "evaluations": EVALUATIONS, "runs": runs}
            )
            print(results[-1], file=sys.stderr, flush=True)
    for size in options.recommend:
        count, evaluations = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            # In a process of its own, since the memory of children is the most of any.
            subprocess.run(
                [sys.executable, "-c", f"import sizes; from pathlib import Path;"
                 f" sizes.store(Path({folder!r}), {count}, {evaluations})"],
                check=True, cwd=Path(__file__).parent,
            )  # fmt: skip
            runs = [in_own_process("recommend", folder) for _ in range(options.repeats)]
        results.append(
            {"what": "`recommend`", "trials": count, "evaluations": evaluations, "runs": runs}
        )
        print(results[-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
