"""Runs a trial's ranks and ends them when the study is gone, however it went.

A process of its own, started by the study as the leader of the trial's process group. It holds the reading end of a
pipe whose writing end only the study has: when the study dies, even by SIGKILL or while a rank holds Python's lock, the
pipe closes and the guard kills the whole group, compilers and data loaders included. Standard library only, so that it
starts in 30 ms.

    python guard.py LIFELINE_FD CHANNEL_FD '{"argv": [...], "ranks": [{"RANK": "0", ...}, ...]}'

Exits with the first non-zero exit code of a rank (a signal as 128 + its number), else 0.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0  # for the other ranks to report why, once one has failed


def main(lifeline: int, channel: int, job: dict) -> int:
    libc = ctypes.CDLL(None)
    guard = os.getpid()

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    ranks = [
        subprocess.Popen(
            job["argv"],
            env={**os.environ, **environment},
            pass_fds=(channel,) if index == 0 else (),
            preexec_fn=die_with_guard,
        )
        for index, environment in enumerate(job["ranks"])
    ]
    os.close(channel)

    ended_read, ended_write = os.pipe()
    for index, rank in enumerate(ranks):

        def wait(rank: subprocess.Popen = rank, index: int = index) -> None:
            rank.wait()
            os.write(ended_write, bytes([index % 256]))

        threading.Thread(target=wait, daemon=True).start()

    alive = len(ranks)
    failed_at: float | None = None
    first_failure = 0
    while alive:
        timeout = None if failed_at is None else max(0.0, failed_at + GRACE_S - time.monotonic())
        ready = select.select([lifeline, ended_read], [], [], timeout)[0]
        if lifeline in ready:  # nothing is ever written: readable means closed
            os.killpg(0, signal.SIGKILL)
        if ended_read in ready:
            alive -= len(os.read(ended_read, 256))
            codes = [rank.returncode for rank in ranks if rank.returncode]
            if codes and not first_failure:
                failed_at, first_failure = time.monotonic(), codes[0]
        elif not ready:
            for rank in ranks:
                rank.kill()
            failed_at = None  # they are dying; wait for their ends without a limit
    return 128 - first_failure if first_failure < 0 else first_failure


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
