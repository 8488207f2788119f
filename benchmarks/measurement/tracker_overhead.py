"""The time of trials with a tracker ÷ without one, by pairs of the same study in turns.

    python benchmarks/measurement/tracker_overhead.py OUT.json STUDY.yaml TRACK [--pairs N]

TRACK is the key `track` of a study file, such as '{trackio: {project: overhead}}'. A pair runs the
study twice, each time anew; which of the two has the tracker first alternates. The ratio is that of
the training windows' seconds, and of the seconds of whole trials. The time in which the study's own
thread is in a tracker's call is counted as well, because a busy machine's noise does not hide it.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

# Runs the command, and prints the seconds of its main thread in the trackers' methods but `close`.
_COUNTED = """
import sys, time
from carbonopt.study.trackers import Trackers
spent = []
def counted(method):
    def call(self, *arguments):
        began = time.perf_counter()
        method(self, *arguments)
        spent.append(time.perf_counter() - began)
    return call
for name in ("study_began", "trial_started", "evaluated", "trial_ended"):
    setattr(Trackers, name, counted(getattr(Trackers, name)))
from carbonopt.cli.app import main
try:
    main()
finally:
    print("SPENT", sum(spent), len(spent))
"""


def measure(study: dict, folder: Path) -> dict[str, float]:
    """Run a study anew; return its seconds."""
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    out = folder / "out"
    run = [sys.executable, "-c", _COUNTED, "run", str(file), "--out", str(out)]
    done = subprocess.run(run, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(done.stderr)
    if "switched off" in done.stderr + done.stdout:
        sys.exit("the tracker failed, so that its cost is not measured")
    export = [sys.executable, "-m", "carbonopt", "export", str(out), "--format", "jsonl"]
    lines = subprocess.run(export, capture_output=True, text=True, check=True).stdout.splitlines()
    durations = [json.loads(line)["duration_s"] for line in lines]
    called_s = float(done.stdout.rpartition("SPENT")[2].split()[0])
    sums = {name: sum(trial[name] for trial in durations) for name in ("train", "total")}
    return {**sums, "called": called_s, "trials": len(durations)}


def interval(ratios: list[float]) -> dict[str, float]:
    """Return the geometric mean of ratios, its standard error and their median."""
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    mean = math.exp(statistics.fmean(logs))
    return {"mean": mean, "standard_error": mean * error, "median": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("study", type=Path)
    parser.add_argument("track")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    without = yaml.safe_load(options.study.read_text()) | {"track": {}}
    both = {False: without, True: without | {"track": yaml.safe_load(options.track)}}
    pairs = []
    for number in range(options.pairs):
        measured = {}
        for tracked in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                measured[tracked] = measure(both[tracked], Path(folder))
        pairs.append({"without": measured[False], "with": measured[True]})
        print(json.dumps(pairs[-1]), flush=True)
    ratios = {
        name: interval([pair["with"][name] / pair["without"][name] for pair in pairs])
        for name in ("train", "total")
    }
    called = [pair["with"]["called"] / pair["with"]["total"] for pair in pairs]
    result = {"ratios": ratios, "called_fraction": max(called), "pairs": pairs}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"]), max(called))


if __name__ == "__main__":
    main()
