"""The server of the live page: on 127.0.0.1 alone, and it answers nothing but reads.

The page is a small shell whose script gets its content as a stream of events. Every answer forbids
the browser to load anything from elsewhere. A Host header that does not name this machine is
refused: a site elsewhere could else have its own name point here and read the study.
"""

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from types import FrameType

import uvicorn
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carbonopt.core.errors import BadInput
from carbonopt.report.render.html import live_scripts, plotly_script, style_sheet
from carbonopt.watch.patches import Board
from carbonopt.watch.watcher import Parts, Watcher

ADDRESS = "127.0.0.1"
# A page hears something at least this often, so that it knows a connection that has died.
_ALIVE_EVERY_S = 10.0
_ALIVE = ServerSentEvent(data="", event="alive").encode()
_SEND_TIMEOUT_S = 60.0  # a page that takes nothing for so long has to connect again
_TICK_S = 0.5  # how often the server looks whether it shall end
_LAST_WORDS_S = 2  # how long streams may take to end
_DRAWN_WITHIN_S = 1.0  # longest wait at the end for what is being drawn
_DRAWN_AT_LAST_S = 10.0  # the same before an error is raised, after which Python itself ends
_MOST_CONNECTIONS = 500
_NEVER_S = 10**9
_MISDIRECTED = 421
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
        " img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none';"
        " frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class LivePage:
    """The content of the page and those who read it; used in the server's loop alone."""

    def __init__(self) -> None:
        self.board = Board()
        self.pages = 0
        self._has_ended = False
        self._woken = asyncio.Event()

    def publish(self, parts: Parts) -> None:
        if self.board.publish(parts):
            self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def keep_alive(self) -> None:
        """Wake all pages' streams regularly, by one timer."""
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            self._wake()

    def end(self) -> None:
        """End every page's stream, so that the server can end, too."""
        self._has_ended = True
        self._woken.set()

    async def messages(self, version: str) -> AsyncIterator[bytes]:
        """Yield what a page of this version misses, and from then on every change."""
        while not self._has_ended:
            woken = self._woken  # set meanwhile if it changes while the page takes a message
            missed = self.board.since(version)
            for message in missed:
                version = message.version
                yield message.event
            if not missed:
                yield _ALIVE
            await woken.wait()


class Guarded:
    """Refuses requests that name another host, and adds the headers of every answer.

    Args:
        app: what answers.
        port: the server's port.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        names = (ADDRESS, "localhost")
        # A browser leaves out the port of http itself.
        self._hosts = {f"{name}:{port}" for name in names} | (set(names) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) == 1 and hosts[0].lower() in self._hosts:
            await self._app(scope, receive, with_headers)
            return
        named = " or ".join(sorted(self._hosts))
        refusal = PlainTextResponse(f"Ask for {named}.\n", _MISDIRECTED)
        await refusal(scope, receive, with_headers)


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1.

    Raises:
        BadInput: if the port is taken or may not be used.
    """
    listener = socket.socket()
    # A port that this command had a minute ago is free for it again.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
        raise BadInput(f"--port {port} {why}; give another, such as --port {port + 1}.") from error
    return listener


def serve(watcher: Watcher, listener: socket.socket) -> None:
    """Serve the page until Ctrl-C or SIGTERM, which both are its regular end.

    An error in the watcher's threads ends it, too, and is raised: a page that no longer changes
    would look like a study that stands still.
    """
    port: int = listener.getsockname()[1]
    page = LivePage()
    config = uvicorn.Config(
        application(port, watcher, page),
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=_most_connections() + 1,  # which uvicorn's own count must stay below
        timeout_graceful_shutdown=2 * _LAST_WORDS_S,
    )
    # uvicorn ends its connections, then passes the signal on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _Server(config, page, watcher).run(sockets=[listener])
    watcher.end()
    has_ended = watcher.join(_DRAWN_WITHIN_S)
    if watcher.error is not None:
        watcher.join(_DRAWN_AT_LAST_S)
        raise watcher.error
    if not has_ended:
        # A thread that still draws by a library in C++ when Python ends would abort the process.
        # Nothing is lost: this process only reads.
        sys.stdout.flush()
        os._exit(0)


def _most_connections() -> int:
    """Return how many connections are served at once: half of the files that may be open.

    The next one gets 503. Without a limit, connections would take what the storage needs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = soft == resource.RLIM_INFINITY
    return _MOST_CONNECTIONS if is_unlimited else min(soft // 2, _MOST_CONNECTIONS)


class _Server(uvicorn.Server):
    """A server whose end ends the streams first: else it would wait for its pages to go."""

    def __init__(self, config: uvicorn.Config, page: LivePage, watcher: Watcher) -> None:
        super().__init__(config)
        self._page, self._watcher = page, watcher

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._page.end()
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        # uvicorn's own ticks ten times a second, for 0.1 % of a core.
        while not await self.on_tick(0):
            await asyncio.sleep(_TICK_S)

    async def on_tick(self, counter: int) -> bool:
        if self._watcher.error is not None:
            self._page.end()
            return True
        return await super().on_tick(counter)


def application(port: int, watcher: Watcher, page: LivePage) -> ASGIApp:
    """Return the application that serves a watched folder on a port."""

    @asynccontextmanager
    async def watching(_: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        watcher.start(lambda parts: _published(loop, page, parts))
        alive = asyncio.create_task(page.keep_alive())
        yield
        alive.cancel()
        watcher.end()

    async def events(request: Request) -> Response:
        version = request.headers.get("last-event-id") or request.query_params.get("since", "")

        async def counted() -> AsyncIterator[bytes]:
            page.pages += 1
            watcher.want(True)
            try:
                async for message in page.messages(version):
                    yield message
            finally:
                page.pages -= 1
                watcher.want(page.pages > 0)

        return EventSourceResponse(
            counted(),
            ping=_NEVER_S,  # the stream itself says that it is alive
            send_timeout=_SEND_TIMEOUT_S,
            shutdown_grace_period=_LAST_WORDS_S,
        )

    routes = [
        _static("/", _template("shell.html"), "text/html"),
        _static("/style.css", style_sheet() + _template("live.css"), "text/css"),
        _static("/page.js", live_scripts() + _template("live.js"), "text/javascript"),
        _static("/plotly.js", plotly_script(), "text/javascript"),
        Route("/events", events, methods=["GET"]),
    ]
    return Guarded(Starlette(routes=routes, lifespan=watching), port)


def _published(loop: asyncio.AbstractEventLoop, page: LivePage, parts: Parts) -> None:
    """Pass parts from a thread to the server's loop; they are lost where it has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(page.publish, parts)


def _template(name: str) -> str:
    return (files("carbonopt.watch") / "templates" / name).read_text(encoding="utf-8")


def _static(path: str, text: str, media_type: str) -> Route:
    content = text.encode()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(path, answer, methods=["GET"])
