"""Ctrl-C and its like, as a wish that a study asks for where it can end in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carbonopt.core.errors import StudyInterrupted


class StopRequest:
    """That a command ends, by Ctrl-C, SIGTERM or SIGHUP: it is asked for; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self._wished = self._at_once = False

    def __call__(self) -> bool:
        return self._wished

    def raise_on_signal(self) -> None:
        """From here on nobody asks: what was heard before ends the command, and so does what is heard later."""
        self._at_once = True
        if self._wished:
            raise KeyboardInterrupt

    def heard(self, signum: int, frame: Any) -> None:
        if self._at_once or (self._wished and signum == signal.SIGINT):
            raise KeyboardInterrupt
        self._wished = True


@contextmanager
def interruptible() -> Iterator[StopRequest]:
    """Raises StudyInterrupted where a wish ends the body at once."""
    wish = StopRequest()
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]  # ignored: nohup
    before = {number: signal.signal(number, wish.heard) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
    try:
        yield wish
    except KeyboardInterrupt as error:
        raise StudyInterrupted("interrupted; the same command goes on with the study.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
