"""Parallel work in several processes."""

import ctypes
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from carbonopt.core.errors import CarbonoptError

Part = TypeVar("Part")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_MOST = 16  # more forks take longer to start than they save


def processes() -> int:
    """Return the number of processes that are worth their while.

    It is one for each core that this process may use, up to a limit.
    """
    return min(_MOST, len(os.sched_getaffinity(0)))


def in_forks(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Return the results of `work` for each part, in their order.

    The last part is done here, each other one in a fork of this process. A fork has all imports and
    data already, and ends with its part, or with this process.

    Workers of a multiprocessing.Pool would wait for ever for a part whose worker was killed;
    joblib's (loky) import everything again, and outlive a killed parent by minutes.

    Raises:
        Exception: the first exception that `work` raised; one that can't be sent from a fork is a
            CarbonoptError with its type and text.
        CarbonoptError: if a fork died.
        BlockingIOError: if no further process can be started.
    """
    context = multiprocessing.get_context("fork")
    forks = []
    for part in parts[:-1]:
        here, there = context.Pipe(duplex=False)
        fork = context.Process(target=_do, args=(work, part, there, os.getpid()), daemon=True)
        fork.start()
        there.close()
        forks.append((fork, here))
    last = [work(part) for part in parts[-1:]]
    results = []
    for fork, here in forks:
        try:
            result, error = here.recv()
        except EOFError:
            fork.join()
            advice = (
                " The kernel may have killed it because memory was short; type the same command"
                " again."
                if fork.exitcode == -signal.SIGKILL
                else ""
            )
            raise CarbonoptError(
                f"a process that did part of the work ended with code {fork.exitcode}.{advice}"
            ) from None
        fork.join()
        if error is not None:
            raise error
        results.append(result)
    return results + last


def _do(work: Callable[[Part], Result], part: Part, there: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its forks
    # The parent ends its forks by SIGTERM, whatever it does itself at one.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before
        return
    try:
        there.send((work(part), None))
    except Exception as error:  # noqa: BLE001, the parent raises it
        there.send((None, _as_sent(error)))


def _as_sent(error: Exception) -> Exception:
    """Return an exception as the parent can read it: some of others' libraries can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301, it was made here
    except Exception:  # noqa: BLE001, whatever an exception's own class raises
        return CarbonoptError(f"{type(error).__name__}: {error}")
    return error
