"""Runs a trial's ranks and ends them when the study is gone, however it went.

A process of its own, the leader of the trial's session. It holds the reading end of a pipe whose writing end only the
study has: when the study closes it or dies, even by SIGKILL or while a rank holds Python's lock, the guard kills the
whole session, compilers and data loaders included, and takes away what they can't any more. So it does when the ranks
have ended themselves.

Its ranks are new programs where it is a program itself, started by the study (standard library only: it starts in
30 ms), or forks where it is one (see `fork_server`).

    python guard.py LIFELINE_FD CHANNEL_FD '{"argv": [...], "ranks": [{"RANK": "0", ...}, ...],
                                             "extensions": "/folder", "scratch": ["/folder", ".pattern*"] or []}'

Exits with the first non-zero exit code of a rank (a signal as 128 + its number), else 0.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0  # for the other ranks to report why, once one has failed
PATIENCE_S = 20.0  # with a process that survives SIGKILL, stuck in a driver
FREEZE_S = 1.0
LOCK = "lock"  # torch's name for the file that it holds open while it compiles an operator


class Rank(Protocol):
    """A process of a trial, as subprocess.Popen has it."""

    returncode: int | None  # of one that has been waited for; a signal as its negative number

    def wait(self) -> int: ...
    def kill(self) -> None: ...


Start = Callable[[list[str], dict[str, str], int | None, Callable[[], None]], Rank]


def start_program(argv: list[str], environment: dict[str, str], channel: int | None, begin: Callable[[], None]) -> Rank:
    """A rank: a new program with the channel's descriptor, if it gets one. It calls `begin` before anything else."""
    pass_fds = () if channel is None else (channel,)
    return subprocess.Popen(argv, env={**os.environ, **environment}, pass_fds=pass_fds, preexec_fn=begin)


def main(lifeline: int, channel: int, job: dict[str, Any], start: Start = start_program) -> int:
    """Until all ranks have ended or the study is gone; returns what this program's exit code is to be."""
    libc = ctypes.CDLL(None)
    guard = os.getpid()

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    ranks = [
        start(job["argv"], environment, channel if index == 0 else None, die_with_guard)
        for index, environment in enumerate(job["ranks"])
    ]
    os.close(channel)

    ended_read, ended_write = os.pipe()
    for index, rank in enumerate(ranks):

        def wait(rank: Rank = rank, index: int = index) -> None:
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
            break
        if ended_read in ready:
            alive -= len(os.read(ended_read, 256))
            codes = [rank.returncode for rank in ranks if rank.returncode]
            if codes and not first_failure:
                failed_at, first_failure = time.monotonic(), codes[0]
        elif not ready:
            for rank in ranks:
                rank.kill()
            failed_at = None  # they are dying; wait for their ends without a limit
    end_session(guard, job["extensions"], job["scratch"], PATIENCE_S)
    return 128 - first_failure if first_failure < 0 else first_failure


def end_session(session: int, extensions: str, scratch: list[str], patience_s: float) -> list[int]:
    """Kills every process of a session but this one, then removes what only they could have.

    A whole session and not a process group: ninja gives each compiler a group of its own.

    Args:
        session: the number of its first process.
        extensions: the folder of torch's operators; of the locks in it, those that the killed held are removed.
        scratch: a folder and a pattern of names in it, which are removed; or nothing.

    Returns:
        Those that survive SIGKILL for `patience_s`; nothing is removed then.
    """
    locks = {lock for pid in _freeze(session) for lock in open_locks(pid) if lock.is_relative_to(extensions)}
    deadline = time.monotonic() + patience_s
    while left := [pid for pid, _ in _members(session)]:
        if time.monotonic() > deadline:
            return left
        _send(left, signal.SIGKILL)
        time.sleep(0.01)
    for lock in locks:
        lock.unlink(missing_ok=True)
    if scratch:
        for path in Path(scratch[0]).glob(scratch[1]):
            shutil.rmtree(path, ignore_errors=True)
    return []


def _freeze(session: int) -> list[int]:
    """Stops a session's processes, so that none takes or gives back a lock between being looked at and killed."""
    deadline = time.monotonic() + FREEZE_S
    while True:
        members = list(_members(session))
        moving = [pid for pid, state in members if state not in "tT"]
        if not moving or time.monotonic() > deadline:
            return [pid for pid, _ in members]
        _send(moving, signal.SIGSTOP)
        time.sleep(0.002)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(session: int) -> Iterator[tuple[int, str]]:
    """A session's other processes and their states. Zombies don't count: a container whose first process reaps nobody
    keeps them for ever, and they hold no memory."""
    for process in all_processes():
        try:
            stat = (process / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, its_session = stat.rpartition(")")[2].split()[:4]  # proc(5); the name before may hold anything
        pid = int(process.name)
        if int(its_session) == session and pid != os.getpid() and state not in "ZX":
            yield pid, state


def all_processes() -> Iterator[Path]:
    """Their folders in /proc."""
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def open_locks(pid: int) -> set[Path]:
    """The locks that a process holds; none of a process that isn't ours to look at."""
    held = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
        for number in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                held.add(number.readlink())
    return {path for path in held if path.name == LOCK}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
