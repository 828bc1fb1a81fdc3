"""Listens for HTTP and shuts down gracefully: running requests are finished first."""

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
from runtime.serving.service import GenerationService, ServiceState

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1000
"""Systems allow a process 1024 open files; uvicorn answers further connections with 503."""
HEADER_SECONDS = 20.0
"""Timeout for a request's headers: slow clients must not hold all connections."""
IDLE_SECONDS = 30
"""Time after which a connection without requests is closed."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's line and headers."""
ENGINE_SECONDS = 1.0
"""Timeout for the engine thread to end; most forward passes take less."""
FLUSH_SECONDS = 5
"""Time for complete answers to reach their clients; less if `grace` is shorter."""


class HttpServer(uvicorn.Server):
    """Leaves signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HeaderTimeoutProtocol(H11Protocol):
    """Closes connections whose request headers do not arrive in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listen(host: str, port: int) -> socket.socket:
    """Bind the port, so that one that is taken is an error before the model is loaded.

    Raises:
        MoecastError: the address is invalid, or the port is taken.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise MoecastError(
            f"host={host} port={port}: cannot listen there ({error.strerror or error}); "
            "choose another port, or port=0 for a free one"
        ) from error
    # Connections inherit the option; asyncio sets it only on sockets that name their protocol.
    # Without it the second part of a response waits 40 ms for the first one's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def server_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ShutdownRequest:
    """Asks the server to shut down; a second call of `request` skips the grace period."""

    def __init__(self) -> None:
        self.is_requested = asyncio.Event()
        self.is_immediate = asyncio.Event()
        self.reason = ""
        """The first call's."""

    def request(self, reason: str) -> None:
        if self.is_requested.is_set():
            self.is_immediate.set()
        else:
            self.reason = reason
            self.is_requested.set()


async def serve(
    app: ASGIApp,
    service: GenerationService,
    listener: socket.socket,
    *,
    grace_seconds: float,
    on_listening: Callable[[], None] = lambda: None,
    handle_signals: bool = True,
    shutdown: ShutdownRequest | None = None,
) -> str:
    """Serve until a signal (SIGTERM, Ctrl-C) or until the service fails; returns the reason.

    Then new requests are rejected, and running ones get `grace_seconds` to finish; a second signal
    cancels them.
    """
    shutdown = shutdown or ShutdownRequest()
    loop = asyncio.get_running_loop()
    if handle_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request, signal.Signals(number).name)
    server = HttpServer(
        uvicorn.Config(
            app,
            http=HeaderTimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=round(max(1, min(FLUSH_SECONDS, grace_seconds))),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: shutdown.request("the HTTP server ended"))

    def end_on_failure(state: ServiceState) -> None:
        if state is ServiceState.FAILED:
            loop.call_soon_threadsafe(shutdown.request, "the engine failed")

    service.on_state_change(end_on_failure)
    service.start()
    on_listening()
    await shutdown.is_requested.wait()
    log.info("shutting down", extra={"fields": {"reason": shutdown.reason, "grace": grace_seconds}})
    service.drain()
    idle = asyncio.create_task(asyncio.to_thread(service.wait_idle, grace_seconds))
    immediate = asyncio.create_task(shutdown.is_immediate.wait())
    await asyncio.wait({idle, immediate}, return_when=asyncio.FIRST_COMPLETED)
    immediate.cancel()
    await asyncio.to_thread(service.close, timeout_seconds=ENGINE_SECONDS)
    server.should_exit = True
    await serving
    return shutdown.reason
