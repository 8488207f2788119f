"""How often the target rule is right on recorded runs.

    python benchmarks/target_rule.py TABLE.jsonl [TABLE.jsonl ...]

Plays every run of a replay table against targets 3, 10, 20 and 50 % above the table's best perplexity, and counts the
runs that would have met the target and were stopped, and those that would not have and were.
"""

import math
import sys
from pathlib import Path

from carbonopt.launch.replay import RecordedRun, read_table
from carbonopt.search.pruning import cannot_reach
from carbonopt.trial import EvalPoint

ABOVE_BEST = (0.03, 0.10, 0.20, 0.50)


def stopped_at(run: RecordedRun, target: float) -> int | None:
    """The step at which the rule ends the run; None if it never does."""
    points: list[EvalPoint] = []
    for recorded in run.evals[:-1]:
        points.append(EvalPoint(step=recorded.step, tokens=None, nll_sum=recorded.nll, eval_tokens=1))
        if cannot_reach(points, run.total_steps, target):
            return recorded.step
    return None


def main(tables: list[str]) -> None:
    runs = [run for table in tables for run in read_table(Path(table))]
    best = min(math.exp(run.evals[-1].nll) for run in runs)
    print("| target above best | meet it | of these stopped | miss it | of these stopped | training energy saved |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for above in ABOVE_BEST:
        target = best * (1 + above)
        meets = [run for run in runs if math.exp(run.evals[-1].nll) <= target]
        misses = [run for run in runs if math.exp(run.evals[-1].nll) > target]
        wrong = sum(stopped_at(run, target) is not None for run in meets)
        right = sum(stopped_at(run, target) is not None for run in misses)
        whole_j = sum(run.total_steps * run.joules_per_step for run in runs)
        saved_j = sum(
            (run.total_steps - step) * run.joules_per_step
            for run in runs
            if (step := stopped_at(run, target)) is not None
        )
        print(f"| {above:.0%} | {len(meets)} | {wrong} | {len(misses)} | {right} | {saved_j / whole_j:.0%} |")


if __name__ == "__main__":
    main(sys.argv[1:])
