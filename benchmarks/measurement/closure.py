"""A study of ten trials, some too large for the memory, one killed from outside: do its parts add
up to the whole?

python benchmarks/measurement/closure.py OUT.json [--gpus 0 1] [--kill 3] [--folder DIR]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import psutil
import yaml

from carbonopt.analysis.footprint import footprint
from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

KILL_AFTER_S = (
    4.0  # of a trial: it sets itself up then, where the trials before it took 5 to 9 s for that
)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--kill", type=int, default=3, help="number of the trial to kill")
    options = parser.parse_args()
    study = yaml.safe_load((common.HERE / "closure.yaml").read_text())
    study["launch"]["gpus"] = options.gpus
    data = study["workload"]["dataset"]
    data["train_files"] = [str((common.HERE / name).resolve()) for name in data["train_files"]]
    with tempfile.TemporaryDirectory() as folder:
        paths = StudyPaths(Path(folder) / "study")
        file = Path(folder) / "study.yaml"
        file.write_text(yaml.safe_dump(study))
        run = subprocess.Popen(
            [sys.executable, "-m", "carbonopt", "run", str(file), "--out", str(paths.root)]
        )
        log = paths.trial_log(options.kill, 1)
        while not log.exists():
            if run.poll() is not None:
                sys.exit(
                    f"the study ended before its trial {options.kill} began, with exit code"
                    f" {run.returncode}"
                )
            time.sleep(0.1)
        time.sleep(KILL_AFTER_S)
        for process in psutil.Process(run.pid).children(recursive=True):
            if process.name().startswith("rank "):  # and the next trial's, which waits already
                process.kill()
        run.wait()
        study_data = StudyStorage.of_folder(
            connect(storage_url(paths, None), must_exist=True), paths
        ).read()
    results = {
        "exit_code": run.returncode,
        "footprint": footprint(study_data).model_dump(mode="json"),
        "sessions": [session.model_dump() for session in study_data.sessions],
        "trials": [
            {**record.as_json(), "failure": record.failure and record.failure.kind}
            for record in study_data.records
        ],
    }
    if results["trials"][options.kill]["failure"] is None:
        sys.exit(
            f"trial {options.kill} had ended before it was killed; kill another one, or earlier"
        )
    common.write(options.out, options.gpus, results)


if __name__ == "__main__":
    main()
