"""Turns Ctrl-C and similar signals into a request that a study checks where it can end cleanly."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carbonopt.core.errors import StudyInterrupted


class StopRequest:
    """The user's request, by Ctrl-C, SIGTERM or SIGHUP, that a command ends.

    The command calls it to find out, and ends cleanly. A second Ctrl-C ends the command at once.
    """

    def __init__(self) -> None:
        self._wished = self._at_once = False

    def __call__(self) -> bool:
        return self._wished

    def raise_on_signal(self) -> None:
        """Raise KeyboardInterrupt if the end was requested, and from now on at each signal.

        It is called when the command no longer checks for a request.
        """
        self._at_once = True
        if self._wished:
            raise KeyboardInterrupt

    def on_signal(self, signum: int, frame: Any) -> None:
        if self._at_once or (self._wished and signum == signal.SIGINT):
            raise KeyboardInterrupt
        self._wished = True


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    """Handle signals as requests to end while the body runs.

    Raises:
        StudyInterrupted: If a request ends the body at once.
    """
    wish = StopRequest()
    # nohup ignores SIGHUP, and so it stays.
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    before = {
        number: signal.signal(number, wish.on_signal)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup)
    }
    try:
        yield wish
    except KeyboardInterrupt as error:
        raise StudyInterrupted("interrupted; the same command goes on with the study.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
