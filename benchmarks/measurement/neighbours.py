"""The first demo beside none, one and two busy processes: is the answer the same, and what is a
trial charged?

    python benchmarks/measurement/neighbours.py OUT.json [--runs 5] [--busy 0 1 2] [--study
        STUDY.yaml] [--trials N]

Runs the study (default: studies/quickstart.yaml) --runs times beside each number of busy processes,
in turn, with its own command and in a folder of its own. Each run is added to OUT.json as it ends:
the same command goes on after an interruption. Before each run it waits until other work leaves the
machine's cores idle (--idle, a share of them, for ten seconds; 0 doesn't wait).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common
import psutil

from carbonopt.analysis.footprint import footprint
from carbonopt.analysis.recommend import recommend
from carbonopt.core.trial import TrialRecord
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

QUICKSTART = common.HERE.parent.parent / "studies" / "quickstart.yaml"
LOOK_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file for the results")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes"
    )
    parser.add_argument("--study", type=Path, default=QUICKSTART)
    parser.add_argument("--trials", type=int, help="fewer than the study's budget, for a rehearsal")
    parser.add_argument("--idle", type=float, default=0.9)
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for number in range(options.runs):
        for busy in options.busy:
            if any((run["number"], run["busy"]) == (number, busy) for run in runs):
                continue
            wait_until_idle(options.idle)
            runs.append(
                {"number": number, "busy": busy, **demo(options.study, busy, options.trials)}
            )
            common.write(options.out, [], {"study": options.study.name, "runs": runs})
            print({name: value for name, value in runs[-1].items() if name != "trials"}, flush=True)


def wait_until_idle(share: float) -> None:
    while share and (busy_percent := psutil.cpu_percent(LOOK_S)) > 100 * (1 - share):
        print(f"other work has {busy_percent:.0f} % of the cores; waiting", flush=True)


def demo(study: Path, busy: int, trials: int | None) -> dict:
    """One run of the command, with what it says."""
    with tempfile.TemporaryDirectory() as folder, neighbours(busy):
        paths = StudyPaths(Path(folder) / "study")
        command = [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(paths.root)]
        began_s = time.monotonic()
        code = subprocess.run([*command, *(["--trials", str(trials)] if trials else [])]).returncode
        took_s = time.monotonic() - began_s
        data = StudyStorage.of_folder(
            connect(storage_url(paths, None), must_exist=True), paths
        ).read()
    return {"exit_code": code, "seconds": took_s, **answer(data)}


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def answer(data: StudyData) -> dict:
    told, spent = recommend(data).as_json(), footprint(data)
    return {
        **{
            name: told[name]
            for name in ("met", "trial", "params", "quality", "energy_kwh", "saving_fraction")
        },
        "ended": data.ended,
        "spent_kwh": spent.energy_kwh,
        "other_kwh": spent.other_kwh,
        "closure": spent.closure,
        "trials": [trial(record) for record in data.records],
    }


def trial(record: TrialRecord) -> dict:
    """What the page looks at."""
    told = record.as_json()
    names = (
        "trial",
        "state",
        "stop_reason",
        "params",
        "quality",
        "energy_kwh",
        "duration_s",
        "cpu_wait_fraction",
    )
    return {
        **{name: told[name] for name in names},
        "steps_done": record.steps_done,
        "total_steps": record.total_steps,
    }


if __name__ == "__main__":
    main()
