"""The study's end of a connection: of the channel (see `carbonopt.core.events`), or of a forked guard's."""

import json
import select
import socket
import time

from carbonopt.core.events import SPOKEN, Event
from carbonopt.core.trial import StopReason


class Listener:
    """Reads lines, and answers. It never blocks for longer than it was told to."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._buffer, self._ended = connection, b"", False

    def read(self, timeout_s: float) -> bytes | None:
        """The next line, or None: none came in time, or the other end is closed (see `closed`)."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._ended:
            if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            try:
                data = self._connection.recv(65536)
            except ConnectionError:
                data = b""
            self._buffer += data
            self._ended = not data
        if self.closed:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @property
    def closed(self) -> bool:
        return self._ended and b"\n" not in self._buffer

    def receive(self, timeout_s: float) -> Event | None:
        """The next line of a channel; None as `read` has it."""
        line = self.read(timeout_s)
        if line is None:
            return None
        message = json.loads(line)
        return SPOKEN[message.pop("event")].model_validate(message)  # type: ignore[return-value]

    def answer(self, stop: StopReason | None = None) -> None:
        """Go on, or stop and why. A trial that died meanwhile can't hear it; its exit is the next event."""
        try:
            self._connection.sendall(json.dumps({"stop": stop}).encode() + b"\n")
        except ConnectionError:
            self._ended = True

    def close(self) -> None:
        self._connection.close()
