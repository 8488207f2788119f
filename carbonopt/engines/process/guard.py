"""The guard: a process that runs a trial's ranks and ends them when the study is gone.

The guard leads the trial's session. It holds the reading end of a pipe whose writing end only the
study has. When the study closes it or dies, even by SIGKILL or while a rank holds Python's lock,
the guard kills the whole session, compilers and data loaders included, and all that these started
in sessions of their own. Then it removes the files that the killed processes can't remove any more.
It does the same when the ranks have ended by themselves.

Run as a program (standard library only: it starts in 30 ms) it starts its ranks as programs; forked
from the fork server, as forks (see `fork_server`).

    python guard.py LIFELINE_FD CHANNEL_FD CPU_REPORT_FD '{"argv": [...], "ranks": [{"RANK": "0",
        ...}, ...], "extensions": "/folder", "scratch": ["/folder", ".pattern*"] or [], "folder":
        "/where/it/runs" or null, "keeps_channel": false}'

It exits with the first non-zero exit code of a rank (a signal as 128 + its number), else 0. Before,
it writes the CPU seconds of itself and all its descendants to the CPU report.
"""

import contextlib
import ctypes
import json
import os
import resource
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
GRACE_S = 5.0  # time for the other ranks to report why, once one has failed
PATIENCE_S = 20.0  # time for a process that survives SIGKILL, stuck in a driver
FREEZE_S = 1.0
REAP_S = 1.0  # time for the killed processes to be waited for
LOCK = "lock"  # torch's name for the file that it holds open while it compiles an operator


def main(
    lifeline: int,
    channel: int,
    cpu_report: int,
    job: dict[str, Any],
    work: Callable[[dict[str, str]], int],
) -> int:
    """Run the ranks until all have ended or the study is gone, and return the guard's exit code.

    Only the first rank has the channel. With `keeps_channel`, the guard keeps it instead, and its
    closing shows that all ranks have ended: where the trial connects to a socket of the study, or
    rank 0 is on another machine.

    Args:
        lifeline: the descriptor that is closed when the study is gone.
        channel: the descriptor on which rank 0 reports.
        cpu_report: the descriptor to which the CPU seconds are written.
        job: the ranks and their settings, as in this module's docstring.
        work: called in a process of its own with the variables of one rank; returns the rank's exit
            code.
    """
    guard = os.getpid()
    # Slurm and systemd often end a job by signalling all its processes; the study decides then how
    # the ranks end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A process that a rank started in a session of its own becomes this process's child when the
    # rank has ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ranks = _fork_ranks(lifeline, channel, cpu_report, job, work)
    if not job["keeps_channel"]:
        os.close(channel)
    ended, reporting = os.pipe()
    reaper = threading.Thread(target=_reap, args=(ranks, reporting), daemon=True)
    reaper.start()
    failure = _await_end(len(ranks), ended, lifeline)
    end_session(guard, job["extensions"], job["scratch"], PATIENCE_S)
    reaper.join(REAP_S)  # processes that were not waited for are in nobody's CPU time
    with contextlib.suppress(BrokenPipeError):  # the study was killed: nobody reads it
        os.write(cpu_report, str(_cpu_s()).encode())
    return failure


def _fork_ranks(
    lifeline: int,
    channel: int,
    cpu_report: int,
    job: dict[str, Any],
    work: Callable[[dict[str, str]], int],
) -> set[int]:
    """Fork the ranks, which do the work of `main`, and return their process ids."""
    guard, ranks = os.getpid(), set()
    for index, environment in enumerate(job["ranks"]):
        if (rank := os.fork()) == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            # A rank may end its own children with SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(lifeline)
            os.close(cpu_report)
            if index > 0 or job["keeps_channel"]:
                os.close(channel)
            live(work, environment)
        ranks.add(rank)
    return ranks


def _await_end(alive: int, ended: int, lifeline: int) -> int:
    """Wait until all ranks have ended or the study is gone; return the first failure's exit code.

    Args:
        alive: the number of ranks that run.
        ended: the descriptor from which the ranks' exit codes are read, a byte each.
        lifeline: the descriptor that is closed when the study is gone.
    """
    failure, deadline = 0, None
    while alive:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select([lifeline, ended], [], [], timeout_s)[0]
        # The lifeline is ready only when it is closed, since nothing is ever written to it. Nothing
        # is ready when the other ranks have had their time.
        if lifeline in ready or not ready:
            break
        codes = os.read(ended, 256)
        alive -= len(codes)
        if not failure and any(codes):
            failure, deadline = next(filter(None, codes)), time.monotonic() + GRACE_S
    return failure


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants that have been waited for."""
    usages = (
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def live(work: Callable[..., int], *arguments: Any) -> NoReturn:
    """Do a fork's work and exit, so that it never returns into the code that forked it."""
    code = 1
    try:
        code = work(*arguments)
    except BaseException as error:  # noqa: BLE001 – a fork reports whatever ended it
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def _reap(ranks: set[int], reporting: int) -> None:
    """Write one byte for each rank that has ended: its exit code, a signal as 128 + its number."""
    with contextlib.suppress(ChildProcessError):  # all children have ended
        while True:
            pid, status = os.wait()
            if pid in ranks:
                code = os.waitstatus_to_exitcode(status)
                os.write(reporting, bytes([128 - code if code < 0 else code]))


def end_session(session: int, extensions: str, scratch: list[str], patience_s: float) -> list[int]:
    """Kill a session's processes but this one, and clean up after them.

    Their descendants in other sessions are killed, too. A process group would not do: ninja gives
    each compiler a group of its own. Then the files are removed that only the killed processes
    would have removed.

    Args:
        session: the id of the session.
        extensions: the folder of torch's operators; the locks in it that the killed processes held
            are removed.
        scratch: a folder and a pattern of names in it to be removed; or nothing.
        patience_s: the time after which it gives up.

    Returns:
        The processes that survive SIGKILL for `patience_s`.
    """
    locks = {
        lock
        for pid in _freeze(session)
        for lock in open_locks(pid)
        if lock.is_relative_to(extensions)
    }
    deadline = time.monotonic() + patience_s
    while left := [pid for pid, _ in _processes_of(session)]:
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
    """Stop a session's processes and return their ids.

    A stopped process can't take or release a lock before it is looked at and killed.
    """
    deadline = time.monotonic() + FREEZE_S
    while True:
        processes = list(_processes_of(session))
        moving = [pid for pid, state in processes if state not in "tT"]
        if not moving or time.monotonic() > deadline:
            return [pid for pid, _ in processes]
        _send(moving, signal.SIGSTOP)
        time.sleep(0.002)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes_of(session: int) -> Iterator[tuple[int, str]]:
    """Yield the id and the state of a session's processes other than this one.

    Descendants of the session's processes in sessions of their own are included. Zombies aren't: a
    container whose first process reaps nobody keeps them for ever, and they hold no memory.
    """
    states, parents, sessions = {}, {}, {}
    for pid in all_processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            # See proc(5); the name before the parenthesis may hold any character.
            fields = stat.rpartition(")")[2].split()
            states[pid], parents[pid], sessions[pid] = fields[0], int(fields[1]), int(fields[3])
    for pid, state in states.items():
        ancestor: int | None = pid
        while ancestor is not None and ancestor != session and sessions.get(ancestor) != session:
            ancestor = parents.get(ancestor)
        if ancestor is not None and pid != os.getpid() and state not in "ZX":
            yield pid, state


def all_processes() -> Iterator[int]:
    # Only names are needed.
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def open_locks(pid: int) -> set[Path]:
    """Return the locks that a process holds; none for a process that we may not look at."""
    held = set()
    # The process may be gone, or another user's.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for number in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                held.add(number.readlink())
    return {path for path in held if path.name == LOCK}


if __name__ == "__main__":
    job = json.loads(sys.argv[4])

    def program(environment: dict[str, str]) -> int:
        if job["folder"] is not None:
            os.chdir(job["folder"])
        # It shall be no shell's.
        os.execvpe(job["argv"][0], job["argv"], {**os.environ, **environment})  # noqa: S606

    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), job, program))
