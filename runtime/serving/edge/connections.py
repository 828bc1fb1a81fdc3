"""Ends connections that hold a place and no complete request, which no server's settings do alone.

uvicorn limits the time between two requests, but neither that before the first one nor that of slow
headers; and what it limits by number are requests, also of those who were there first.
"""

import errno
import logging
import resource
import socket
import struct
import time
from enum import IntEnum
from typing import Any

import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1000
"""Most open connections, if the limit of open files allows as many."""
MIN_CONNECTIONS = 8
SPARE_FILES = 48
"""Descriptors for everything else: new connections, reads, imports."""
SHED_AT_ONCE = 16
"""Connections without a request that are ended together: a flood needs no search for each."""
IDLE_SECONDS = 30.0
"""Timeout for a request's line and headers, from the connection or the last answer on."""
WRITE_SECONDS = 60.0
"""Within this time a client must read everything that waits for it, or `WRITE_BYTES`."""
WRITE_BYTES = 64 << 10
LOG_SECONDS = 30.0
"""Shortest time between two lines about the same trouble."""
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})


class ConnectionPhase(IntEnum):
    """State of a connection; of two, the one with the lower number is ended first."""

    WAITING = 0
    """Before a request, or in the middle of its headers."""
    UNREAD = 1
    """An answer waits until the client reads what was sent before."""
    BODY = 2
    """The headers are complete, the body is not."""
    RUNNING = 3
    """The request is complete, its answer is not; such a connection is never ended for another."""


DEADLINES = {ConnectionPhase.WAITING: IDLE_SECONDS, ConnectionPhase.UNREAD: WRITE_SECONDS}
"""Bodies have theirs in `runtime.serving.edge.body_limit`."""


class ConnectionLimits:
    """Watches all connections of a server, within its event loop."""

    def __init__(self, limit: int = MAX_CONNECTIONS):
        self.limit = limit
        """Most connections: more open files than the system allows would end reads and imports."""
        self._states: dict[H11Protocol, tuple[tuple[Any, ...], float]] = {}
        """What each connection waits for, and since when."""

    def __len__(self) -> int:
        return len(self._states)

    def make_protocol(self, *arguments: Any, **options: Any) -> H11Protocol:
        """Called by uvicorn for each accepted connection."""
        protocol = H11Protocol(*arguments, **options)
        self._states[protocol] = (read_state(protocol), time.monotonic())
        if len(self._states) > self.limit:
            self.check()
        return protocol

    def check(self) -> None:
        """End the connections whose deadline has passed, then those beyond the limit."""
        now = time.monotonic()
        for protocol, (before, since) in list(self._states.items()):
            if is_lost(protocol):
                del self._states[protocol]
                continue
            state = read_state(protocol)
            if state != before:
                self._states[protocol] = state, now
            elif now - since > DEADLINES.get(state[0], float("inf")):
                self._end(protocol)
        excess = len(self._states) - self.limit
        if excess > 0:
            self._shed(excess)

    def _shed(self, excess: int) -> None:
        """End `excess` connections without a complete request, or as many as there are."""
        candidates = [
            (state[0], since, number, protocol)
            for number, (protocol, (state, since)) in enumerate(self._states.items())
            if state[0] is not ConnectionPhase.RUNNING and protocol.transport is not None
        ]
        candidates.sort(key=lambda candidate: candidate[:3])
        # Bodies and answers may be an honest client's: no more of them than needed.
        num_waiting = sum(phase is ConnectionPhase.WAITING for phase, *_ in candidates)
        number = max(excess, min(SHED_AT_ONCE, num_waiting, self.limit // 8))
        for *_, protocol in candidates[:number]:
            self._end(protocol)
        log.warning("too many connections: some without a request were closed")

    def _end(self, protocol: H11Protocol) -> None:
        """Close at once; what the client has not read is discarded in the kernel too."""
        connection: socket.socket = protocol.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        protocol.transport.abort()
        del self._states[protocol]


def read_state(protocol: H11Protocol) -> tuple[Any, ...]:
    """A mark of what a connection waits for; another value if there was progress."""
    cycle = protocol.cycle
    if protocol.transport is not None:
        num_unsent = protocol.transport.get_write_buffer_size()
        if num_unsent and (protocol.flow.write_paused or protocol.transport.is_closing()):
            return ConnectionPhase.UNREAD, num_unsent // WRITE_BYTES
    if cycle is None or cycle.response_complete:
        return ConnectionPhase.WAITING, id(cycle)
    return (ConnectionPhase.BODY if cycle.more_body else ConnectionPhase.RUNNING,)


def is_lost(protocol: H11Protocol) -> bool:
    return protocol.transport is not None and protocol not in protocol.connections


class RepeatFilter(logging.Filter):
    """Passes the first of equal messages, and others when `LOG_SECONDS` have passed.

    Without descriptors, asyncio logs each attempt to accept one of the waiting connections.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = str(record.msg)[:80]
        if record.created - self._passed.get(key, float("-inf")) < LOG_SECONDS:
            return False
        self._passed[key] = record.created
        return True


def connection_limit(*, num_connections: int = 0, reserved: float = 0.0) -> int:
    """Number of connections that the limit of open files (`ulimit -n`) leaves room for.

    Args:
        num_connections: connections that are open now.
        reserved: share of the free descriptors that something else will take, such as a model
            that is not loaded yet.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    try:
        num_files = psutil.Process().num_fds()
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        num_files = most  # counting takes a descriptor itself
    free = most - (num_files - num_connections) - SPARE_FILES
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, int(free * (1 - reserved))))
