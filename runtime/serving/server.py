"""Listens, serves, and ends as it is told: what was accepted is completed first."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from predictors.errors import MoecastError
from runtime.serving.service import Service, State

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1000
"""Of which most wait or idle; systems allow a process 1024 open files. Beyond, 503 (uvicorn's)."""
HEADER_SECONDS = 20.0
"""Time in which a request's headers must have come: connections are few enough to be held up."""
IDLE_SECONDS = 30
"""A connection on which nothing is asked for so long is closed."""
LARGEST_HEADERS = 64 << 10
"""Bytes of a request's line and headers."""
ENGINE_SECONDS = 1.0
"""Time in which the engine thread ends by itself: most forward passes are over by then."""
FLUSH_SECONDS = 5
"""Time in which answers that are complete reach their clients; less where no grace is given."""


class HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class TimedProtocol(H11Protocol):
    """Closes connections whose request does not begin, or whose headers do not end."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def listen(host: str, port: int) -> socket.socket:
    """Binds at once, so that a port that is taken is known before a model is loaded.

    Raises:
        MoecastError: it can not listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise MoecastError(
            f"host={host} port={port}: cannot listen there ({error.strerror or error}); "
            "choose another port, or port=0 for one that is free"
        ) from error
    # Connections inherit it; asyncio sets it only on sockets that name their protocol. Without it
    # the second part of an answer waits for the first one's acknowledgement: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_server(app: ASGIApp, *, grace_seconds: float) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=round(max(1, min(FLUSH_SECONDS, grace_seconds))),
            h11_max_incomplete_event_size=LARGEST_HEADERS,
        )
    )


class Ending:
    """Why and how fast the server ends; the first reason counts, the second one hurries."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        if self.begun.is_set():
            self.hurried.set()
        else:
            self.reason = reason
            self.begun.set()


async def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    *,
    grace_seconds: float,
    on_listening: Callable[[], None] = lambda: None,
    handle_signals: bool = True,
    ending: Ending | None = None,
) -> str:
    """Serves until a signal (SIGTERM, Ctrl-C) comes or the service fails; returns which it was.

    Then nothing new is accepted, while what was accepted is given `grace_seconds` to end; a second
    signal takes them back.
    """
    ending = ending or Ending()
    loop = asyncio.get_running_loop()
    if handle_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.ask, signal.Signals(number).name)
    server = uvicorn_server(app, grace_seconds=grace_seconds)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: ending.ask("the HTTP server ended"))

    def heed(state: State) -> None:
        if state is State.FAILED:
            loop.call_soon_threadsafe(ending.ask, "the engine failed")

    service.on_change(heed)
    service.start()
    on_listening()
    await ending.begun.wait()
    log.info("ending", extra={"fields": {"reason": ending.reason, "grace": grace_seconds}})
    service.drain()
    idle = asyncio.create_task(asyncio.to_thread(service.wait_idle, grace_seconds))
    hurry = asyncio.create_task(ending.hurried.wait())
    await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    await asyncio.to_thread(service.close, timeout_seconds=ENGINE_SECONDS)
    server.should_exit = True
    await serving
    return ending.reason
