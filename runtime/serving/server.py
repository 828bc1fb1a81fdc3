"""Listens for HTTP and shuts down gracefully: running requests are finished first.

The server's state is reported to systemd, as sd_notify(3) says: Type=notify and WatchdogSec=.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from predictors.errors import MoecastError
from runtime.serving.edge.connections import (
    IDLE_SECONDS,
    ConnectionLimits,
    RepeatFilter,
    connection_limit,
)
from runtime.serving.service import GenerationService, ServiceState

log = logging.getLogger(__name__)

MESSAGES = {
    ServiceState.READY: "READY=1\nSTATUS=serving",
    ServiceState.DRAINING: "STOPPING=1\nSTATUS=finishing running requests",
}
LOADING = "STATUS=loading the model"
ALIVE = "WATCHDOG=1"
SHARE = 0.4
"""A sign of life is sent after this share of the time after which systemd ends the server."""


class ServiceManager:
    """systemd, if it started this process and asked for messages; otherwise nothing is sent."""

    def __init__(self, environment: Mapping[str, str]):
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = f"\0{self._address[1:]}"
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit_us = environment.get("WATCHDOG_USEC", "0") if is_ours else "0"
        self._interval = float(limit_us) / 1e6 * SHARE
        self._sent_at = 0.0
        self._send(LOADING)

    def on_state(self, state: ServiceState) -> None:
        if state in MESSAGES:
            self._send(MESSAGES[state])

    def tick(self, is_alive: Callable[[], bool]) -> None:
        """Send a sign of life if it is time for one; call this often from the server's loop.

        Args:
            is_alive: whether the engine's thread runs. Without it, systemd ends the server.
        """
        if not self._interval or time.monotonic() - self._sent_at < self._interval:
            return
        if is_alive():
            self._sent_at = time.monotonic()
            self._send(ALIVE)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
                client.connect(self._address)
                client.sendall(message.encode())
        except OSError as error:
            log.warning("systemd was not notified (%s): %s", message.partition("\n")[0], error)


ACCEPT_QUEUE = 2048
"""Connections that may wait in the kernel."""
ACCEPT_BATCH = 16
"""Connections that are accepted before those beyond the limit are closed."""
LOADING_SHARE = 0.5
"""Share of the free descriptors that a model's files may take."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request's line and headers."""
ENGINE_SECONDS = 1.0
"""Timeout for the engine thread to end; most forward passes take less."""
FLUSH_SECONDS = 5
"""Time for complete answers to reach their clients; less if `grace` is shorter."""

LIMITED_LOGGERS = ("asyncio", "runtime.serving.edge.connections")
"""Loggers that clients without a key could fill."""


class HttpServer(uvicorn.Server):
    """Leaves signals to `serve`, and accepts few connections at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio accepts as many connections at once as its argument for the kernel's queue says.
        for listener in sockets or ():
            listener.listen(ACCEPT_QUEUE)


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
            "choose another port (port=0: a free one), or another host"
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
    shutdown: ShutdownRequest | None = None,
    manager: ServiceManager | None = None,
) -> str:
    """Serve until a signal (SIGTERM, Ctrl-C) or until the service fails; returns the reason.

    Then new requests are rejected, and running ones get `grace_seconds` to finish; a second signal
    cancels them.

    Args:
        shutdown: takes the place of the signals, which are then the caller's.
        manager: reports to systemd when the model is loaded, that the server lives, and when it
            ends.
    """
    manager = manager or ServiceManager({})
    loop = asyncio.get_running_loop()
    if shutdown is None:
        shutdown = ShutdownRequest()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request, signal.Signals(number).name)
    limits = ConnectionLimits(connection_limit(reserved=LOADING_SHARE))
    repeats = RepeatFilter()
    for name in LIMITED_LOGGERS:
        logging.getLogger(name).addFilter(repeats)

    async def check_every_second() -> None:
        reserved = LOADING_SHARE if service.state is ServiceState.LOADING else 0.0
        limits.limit = connection_limit(num_connections=len(limits), reserved=reserved)
        limits.check()
        manager.tick(lambda: service.is_alive)

    server = HttpServer(
        uvicorn.Config(
            app,
            http=limits.make_protocol,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            # Its warnings are about single requests, as many as clients send.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPT_BATCH,
            timeout_keep_alive=round(IDLE_SECONDS),
            timeout_graceful_shutdown=round(max(1, min(FLUSH_SECONDS, grace_seconds))),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            callback_notify=check_every_second,
            timeout_notify=0,
        )
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
    longest = min(grace_seconds, threading.TIMEOUT_MAX)
    idle = asyncio.create_task(asyncio.to_thread(service.wait_idle, longest))
    immediate = asyncio.create_task(shutdown.is_immediate.wait())
    await asyncio.wait({idle, immediate}, return_when=asyncio.FIRST_COMPLETED)
    immediate.cancel()
    await asyncio.to_thread(service.close, timeout_seconds=ENGINE_SECONDS)
    server.should_exit = True
    await serving
    for name in LIMITED_LOGGERS:
        logging.getLogger(name).removeFilter(repeats)
    return shutdown.reason
