"""Turns Ctrl-C and similar signals into a request that a study checks where it can end cleanly."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from carbonopt.core.errors import INTERRUPTED, StudyInterrupted

# Time that a study has to end its trial and to store what was measured, before another Ctrl-C ends
# the command at once. Storing alone may wait 10 s for a program that holds the storage.
TIME_TO_STORE_S = 20.0


class StopRequest:
    """The user's request, by Ctrl-C, SIGTERM or SIGHUP, that a command ends.

    The command calls it to find out, and ends cleanly. A second Ctrl-C ends the command at once,
    unless there are measurements to store (see `let_signals_wait`).

    Args:
        asked: Returns True if the user asked for the end in another way than by a signal.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        self._asked = asked
        self.signum: int | None = None  # the latest signal
        self._requested_at_s: float | None = None  # monotonic time of the first signal
        self._time_to_store_s = 0.0
        self._at_once = False

    def __call__(self) -> bool:
        return self._requested_at_s is not None or self._asked()

    def let_signals_wait(self) -> None:
        """Let no further Ctrl-C end the command for TIME_TO_STORE_S after the first signal.

        It is called when the command has measurements to store. An exception at any line would lose
        what a trial has used since it was last stored, or break off a reading of the meter.
        """
        self._time_to_store_s = TIME_TO_STORE_S

    def raise_on_signal(self) -> None:
        """Raise KeyboardInterrupt if the end was requested, and from now on at each signal.

        It is called when the command no longer checks for a request.
        """
        self._at_once = True
        if self():
            raise KeyboardInterrupt

    def on_signal(self, signum: int, frame: Any) -> None:
        self.signum = signum
        if self._at_once or (signum == signal.SIGINT and self._had_time):
            raise KeyboardInterrupt
        if self._requested_at_s is None:
            self._requested_at_s = time.monotonic()

    @property
    def _had_time(self) -> bool:
        """True if the end was requested and the time to store is over."""
        if self._requested_at_s is None:
            return False
        return time.monotonic() - self._requested_at_s >= self._time_to_store_s


@contextmanager
def interruptible(
    asked: Callable[[], bool] = lambda: False, *, passes_on: bool = False
) -> Iterator[StopRequest]:
    """Handle signals as requests to end while the body runs.

    Python handles signals in its main thread alone, so in another thread only `asked` counts.

    Args:
        asked: Returns True if the user asked for the end in another way than by a signal.
        passes_on: Whether the handler that was there before gets the signal at the end of the body,
            as if it came then: for a body that is a part of another program.

    Raises:
        StudyInterrupted: If a request ends the body at once.
        KeyboardInterrupt: If `passes_on` is set, after a Ctrl-C that Python itself handles.
    """
    request = StopRequest(asked)
    before = _handled_by(request) if threading.current_thread() is threading.main_thread() else {}
    try:
        yield request
    except KeyboardInterrupt as error:
        raise StudyInterrupted(INTERRUPTED) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if passes_on and request.signum is not None:
            signal.raise_signal(request.signum)


def _handled_by(request: StopRequest) -> dict[int, Any]:
    """Let a request handle the signals, and return the handlers that they had before."""
    # nohup ignores SIGHUP, and so it stays.
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return {
        number: signal.signal(number, request.on_signal)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup)
        # None: of a program around Python, which Python could not put back
        if signal.getsignal(number) is not None
    }
