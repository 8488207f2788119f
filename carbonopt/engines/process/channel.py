"""The study's end of the channel (see `carbonopt.core.events`)."""

import json
import selectors
import socket
import time

from carbonopt.core.events import SPOKEN, Event
from carbonopt.core.trial import StopReason


class Listener:
    """The parent's end. It never blocks for longer than it was told to."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = bytearray()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None: nothing came in time, or the other end is closed (see `closed`)."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._closed:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            try:
                data = self._connection.recv(65536)
            except ConnectionError:
                data = b""
            if data:
                self._buffer += data
            else:
                self._closed = True
        if b"\n" not in self._buffer:
            return None
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        message = json.loads(line)
        return SPOKEN[message.pop("event")].model_validate(message)  # type: ignore[return-value]

    @property
    def closed(self) -> bool:
        return self._closed and b"\n" not in self._buffer

    def answer(self, stop: StopReason | None = None) -> None:
        """Go on, or stop and why. A trial that died meanwhile can't hear it; its exit is the next event."""
        try:
            self._connection.sendall(json.dumps({"stop": stop}).encode() + b"\n")
        except ConnectionError:
            self._closed = True

    def close(self) -> None:
        self._selector.close()
        self._connection.close()
