"""Work in several processes at once."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from carbonopt.core.errors import CarbonoptError

Part = TypeVar("Part")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1
_MOST = 16  # more forks take longer to begin than they save


def processes() -> int:
    """How many are worth their while: one for each core that this process may use."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def in_forks(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """What `work` makes of each part, in their order: of the last one here, of each other in a fork of this process,
    which has all imports and data already and ends with its part, or with this process.

    Workers of a multiprocessing.Pool would wait for ever for a part whose worker was killed; joblib's (loky) import
    everything again, and outlive a killed parent by minutes. Raises the first exception that `work` raised,
    CarbonoptError if a fork died, BlockingIOError if no further process can be started."""
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
            raise CarbonoptError(
                f"a process that had part of the work ended with code {fork.exitcode}, as one does that the kernel "
                "kills where memory is short; type the same command again."
            ) from None
        fork.join()
        if error is not None:
            raise error
        results.append(result)
    return results + last


def _do(work: Callable[[Part], Result], part: Part, there: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's, which ends its forks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that is how it ends them, whatever it does itself at a SIGTERM
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        return
    try:
        there.send((work(part), None))
    except Exception as error:  # noqa: BLE001, the parent raises it
        there.send((None, error))
