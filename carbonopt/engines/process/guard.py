"""Runs a trial's ranks and ends them when the study is gone, however it went.

The leader of the trial's session. It holds the reading end of a pipe whose writing end only the study has: when the
study closes it or dies, even by SIGKILL or while a rank holds Python's lock, the guard kills the whole session,
compilers and data loaders included, and what they started in sessions of their own, and takes away what they can't any
more. So it does when the ranks have ended themselves.

As a program (standard library only: it starts in 30 ms) it starts programs; as a fork, forks (see `fork_server`).

    python guard.py LIFELINE_FD CHANNEL_FD '{"argv": [...], "ranks": [{"RANK": "0", ...}, ...],
                                             "extensions": "/folder", "scratch": ["/folder", ".pattern*"] or [],
                                             "folder": "/where/it/runs" or null, "keeps_channel": false}'

Exits with the first non-zero exit code of a rank (a signal as 128 + its number), else 0.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0  # for the other ranks to report why, once one has failed
PATIENCE_S = 20.0  # with a process that survives SIGKILL, stuck in a driver
FREEZE_S = 1.0
LOCK = "lock"  # torch's name for the file that it holds open while it compiles an operator


def main(lifeline: int, channel: int, job: dict[str, Any], work: Callable[[dict[str, str]], int]) -> int:
    """Until all ranks have ended or the study is gone; returns what this program's exit code is to be. `work`, in a
    process of its own, takes what a rank has in its environment for itself, and returns the rank's exit code. Only the
    first rank has the channel; none where the guard keeps it, and so says when all have ended: where the study invites
    whoever speaks for the trial, or hears rank 0 from another machine."""
    guard, ranks = os.getpid(), set()
    # Who ends a job often signals all its processes (Slurm, systemd): the study says then how the ranks end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What a rank starts in a session of its own becomes this process's child when the rank has ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for index, environment in enumerate(job["ranks"]):
        if (rank := os.fork()) == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which a rank may end its own children
            os.close(lifeline)
            if index > 0 or job["keeps_channel"]:
                os.close(channel)
            live(work, environment)
        ranks.add(rank)
    if not job["keeps_channel"]:
        os.close(channel)

    alive, failure, deadline = len(ranks), 0, None
    ended, told = os.pipe()
    threading.Thread(target=_reap, args=(ranks, told), daemon=True).start()
    while alive:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select([lifeline, ended], [], [], timeout_s)[0]
        if lifeline in ready or not ready:  # closed: nothing is ever written to it. Or the others have had their time
            break
        codes = os.read(ended, 256)
        alive -= len(codes)
        if not failure and any(codes):
            failure, deadline = next(filter(None, codes)), time.monotonic() + GRACE_S
    end_session(guard, job["extensions"], job["scratch"], PATIENCE_S)
    return failure


def live(work: Callable[..., int], *arguments: Any) -> NoReturn:
    """A fork's whole life: nothing of its work reaches what it was forked from, however that ends."""
    code = 1
    try:
        code = work(*arguments)
    except BaseException as error:  # noqa: BLE001, as above
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def _reap(ranks: set[int], told: int) -> None:
    """Writes a byte for each rank that has ended: its exit code, a signal as 128 + its number."""
    with contextlib.suppress(ChildProcessError):  # all children have ended
        while True:
            pid, status = os.wait()
            if pid in ranks:
                code = os.waitstatus_to_exitcode(status)
                os.write(told, bytes([128 - code if code < 0 else code]))


def end_session(session: int, extensions: str, scratch: list[str], patience_s: float) -> list[int]:
    """Kills every process of a session but this one, and what descends from its leader; returns those that survive
    SIGKILL for `patience_s`. A session and not a process group: ninja gives each compiler a group of its own. Then it
    removes what only they could have.

    Args:
        extensions: the folder of torch's operators; of the locks in it, those that the killed held.
        scratch: a folder and a pattern of names in it; or nothing.
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
    for path in Path(scratch[0]).glob(scratch[1]) if scratch else ():
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
    """A session's other processes, what its leader's descendants are in sessions of their own, and their states.
    Zombies don't count: a container whose first process reaps nobody keeps them for ever, and they hold no memory."""
    states, parents, sessions = {}, {}, {}
    for pid in all_processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()  # proc(5); the name before may hold anything
            states[pid], parents[pid], sessions[pid] = fields[0], int(fields[1]), int(fields[3])
    for pid, state in states.items():
        ancestor: int | None = pid
        while ancestor is not None and ancestor != session and sessions.get(ancestor) != session:
            ancestor = parents.get(ancestor)
        if ancestor is not None and pid != os.getpid() and state not in "ZX":
            yield pid, state


def all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208, only names are needed


def open_locks(pid: int) -> set[Path]:
    """The locks that a process holds; none of a process that isn't ours to look at."""
    held = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
        for number in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                held.add(number.readlink())
    return {path for path in held if path.name == LOCK}


if __name__ == "__main__":
    job = json.loads(sys.argv[3])

    def program(environment: dict[str, str]) -> int:
        if job["folder"] is not None:
            os.chdir(job["folder"])
        os.execvpe(job["argv"][0], job["argv"], {**os.environ, **environment})  # noqa: S606, it shall be no shell's

    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), job, program))
