"""Starts a study as a command of its own, and looks at it while it runs."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from carbonopt.storage.paths import StudyPaths
from carbonopt.storage.study_storage import StudyStorage
from carbonopt.storage.url import connect, storage_url

# Tests that wait for something read a study ten times a second, and connecting takes ten times as
# long as reading.
connected = functools.lru_cache(maxsize=4)(connect)


def open_study(folder: Path) -> StudyStorage:
    paths = StudyPaths(folder)
    return StudyStorage.of_folder(connected(storage_url(paths, None)), paths)


def read(folder: Path):
    return open_study(folder).read()


def start(study: Path, folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "carbonopt", "run", str(study), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def workers(folder: Path) -> list[int]:
    """Processes that work for the study of this folder, its command not counted."""
    pids = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if (
            str(folder) in command
            and "carbonopt run" not in command
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            pids.append(process.pid)
    return pids


def ranks(folder: Path) -> list[int]:
    return [pid for pid in workers(folder) if psutil.Process(pid).name().startswith("rank ")]


def wait_for(condition, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
