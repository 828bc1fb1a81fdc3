"""Listens for HTTP and shuts down gracefully: running requests are finished first."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from predictors.errors import MoecastError
from runtime.serving.connections import ConnectionTable, LimitedLog, connection_limit
from runtime.serving.protocol import ServerProtocol, is_about_the_server
from runtime.serving.service import GenerationService, ServiceState
from runtime.serving.service_manager import ServiceManager

log = logging.getLogger(__name__)

ACCEPT_QUEUE = 2048
"""Connections that may wait in the kernel."""
ACCEPT_BATCH = 16
"""Connections that are accepted before the limit is applied to them."""
CHECK_TICKS = 5
"""Tenths of a second between two looks at the connections' deadlines, and two reports."""
LIMIT_TICKS = 10
"""Tenths of a second between two looks at the number of open files."""
LOADING_SHARE = 0.5
"""Share of the free descriptors that a model's files may take."""
IDLE_SECONDS = 30
"""Time after which a connection without requests is closed."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's line and headers."""
ENGINE_SECONDS = 1.0
"""Timeout for the engine thread to end; most forward passes take less."""
ACCEPT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that last until something is closed."""
FLUSH_SECONDS = 5
"""Time for complete answers to reach their clients; less if `grace` is shorter."""


class HttpServer(uvicorn.Server):
    """Leaves signals to `serve`, and keeps the deadlines and the limit of `table`.

    Args:
        update_limit: sets the table's limit anew. A model's files are opened when they are first
            read.
        report: is called twice a second.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        table: ConnectionTable,
        *,
        update_limit: Callable[[], None],
        report: Callable[[], None],
    ):
        super().__init__(config)
        self._table, self._update_limit, self._report = table, update_limit, report

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many connections at once as its argument for the kernel's queue says.
        for listener in sockets or ():
            listener.listen(ACCEPT_QUEUE)

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_TICKS == 0:
            self._table.check(asyncio.get_running_loop().time())
            self._report()
        if counter % LIMIT_TICKS == 0:
            self._update_limit()
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Bind the port, so that one that is taken is an error before the model is loaded.

    Raises:
        MoecastError: the address is invalid, or the port is taken.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=ACCEPT_QUEUE)
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


def limit_accept_errors(
    loop: asyncio.AbstractEventLoop,
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a handler of the loop's errors that logs few of those of accepted connections.

    Without descriptors, the loop reports each attempt to accept one of the waiting connections.
    """
    limited = LimitedLog("no connection could be accepted")

    def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in ACCEPT_ERRORS and "socket" in context:
            limited.add(cause=str(error))
        else:
            loop.default_exception_handler(context)

    return handle


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
    table: ConnectionTable | None = None,
    manager: ServiceManager | None = None,
) -> str:
    """Serve until a signal (SIGTERM, Ctrl-C) or until the service fails; returns the reason.

    Then new requests are rejected, and running ones get `grace_seconds` to finish; a second signal
    cancels them.

    Args:
        table: holds the connections; the metrics may watch it.
        manager: reports to systemd when the model is loaded, that the server lives, and when it
            ends.
    """
    manager = manager or ServiceManager({})
    shutdown = shutdown or ShutdownRequest()
    loop = asyncio.get_running_loop()
    if handle_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request, signal.Signals(number).name)
    table = table or ConnectionTable()
    table.limit = connection_limit(reserved=LOADING_SHARE)
    logging.getLogger("uvicorn.error").addFilter(is_about_the_server)
    loop.set_exception_handler(limit_accept_errors(loop))

    def update_limit() -> None:
        reserved = LOADING_SHARE if service.state is ServiceState.LOADING else 0.0
        table.limit = connection_limit(num_connections=len(table), reserved=reserved)

    server = HttpServer(
        uvicorn.Config(
            app,
            http=partial(ServerProtocol, table=table),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPT_BATCH,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=round(max(1, min(FLUSH_SECONDS, grace_seconds))),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ),
        table,
        update_limit=update_limit,
        report=lambda: manager.tick(lambda: service.is_alive),
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: shutdown.request("the HTTP server ended"))

    def on_state(state: ServiceState) -> None:
        if state is ServiceState.FAILED:
            loop.call_soon_threadsafe(shutdown.request, "the engine failed")

    service.on_state_change(on_state)
    service.on_state_change(manager.on_state)
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
