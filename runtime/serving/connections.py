"""Connections of the server: their number, their deadlines, and which are closed for new ones.

Nothing here depends on a key: clients without one must not keep those with one from the server.
"""

import errno
import ipaddress
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1000
"""Most open connections, if the limit of open files allows as many."""
MIN_CONNECTIONS = 8
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
SPARE_FILES = 48
"""Descriptors for everything else: new connections, reads, imports."""
MAX_REFUSALS = 16
"""Connections beyond the limit that may wait for their 503; more are closed without an answer."""
SHED_AT_ONCE = 16
"""Idle connections that are closed together, so that a flood does not need a search for each."""
ADDRESS_SHARE = 2
"""One address other than loopback may have this fraction (1 / N) of all connections."""
OWNED_NETWORK_BITS = 64
"""Leading bits of an IPv6 address that name a site; it chooses the others freely."""

HEADER_SECONDS = 20.0
"""Timeout for a request's headers: slow clients must not hold all connections."""
LINGER_SECONDS = 2.0
"""Time for a client to read an answer that came before the end of its request."""
WRITE_SECONDS = 60.0
"""Within this time a client must read everything that waits for it, or `WRITE_BYTES`."""
WRITE_BYTES = 64 << 10
LOG_SECONDS = 30.0
"""Shortest time between two lines about the same trouble."""


class ConnectionPhase(IntEnum):
    """State of a connection; of two, the one with the lower number is closed first."""

    CLOSING = 0
    """The last answer is on its way."""
    IDLE = 1
    """Between two requests."""
    HEADERS = 2
    """Before the first request, or in the middle of its headers."""
    UNREAD = 3
    """An answer waits until the client reads what was sent before."""
    BODY = 4
    """The headers are complete, the body is not."""
    RUNNING = 5
    """The request is complete, its answer is not; such a connection is never closed for another."""


class EndReason(StrEnum):
    """Why the server ended a connection that its client had not finished."""

    FULL = "full"
    """All places were taken by requests: it got 503, or no answer."""
    SHED = "shed"
    """It had no complete request, and its place was needed."""
    HEADERS = "headers"
    """Its headers took longer than `HEADER_SECONDS`."""
    UNREAD = "unread"
    """The client did not read what was sent."""
    INVALID = "invalid"
    """It sent something else than HTTP."""


class ServerConnection(Protocol):
    """One connection, as `ConnectionTable` sees it."""

    address: str
    """The client's address, from `client_group`."""
    phase: ConnectionPhase
    since: float
    """Start of the phase, in seconds of the monotonic clock."""

    def unsent_bytes(self) -> int: ...

    def sent_bytes(self) -> int: ...

    def abort(self) -> None:
        """Close the connection at once."""

    def close(self) -> None:
        """Close the connection once everything is sent."""


class LimitedLog:
    """Logs the first of many equal events, and later only their number.

    Args:
        message: text of the line; its field `count` is the number of events since the last line.
    """

    def __init__(
        self,
        message: str,
        *,
        interval_seconds: float = LOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._message, self._interval, self._clock = message, interval_seconds, clock
        self._next_line = float("-inf")
        self._count = 0

    def add(self, **fields: object) -> None:
        """Count an event, and log a line if the last one is long enough ago."""
        self._count += 1
        now = self._clock()
        if now >= self._next_line:
            log.warning(self._message, extra={"fields": {"count": self._count, **fields}})
            self._next_line, self._count = now + self._interval, 0


class WriteProgress:
    """Whether a client reads what is written to it."""

    def __init__(self, now: float):
        self._start, self._sent = now, 0

    def is_stalled(self, now: float, *, unsent: int, sent: int) -> bool:
        """True once `WRITE_SECONDS` passed in which less than `WRITE_BYTES` left a full buffer."""
        if not unsent or sent - self._sent >= WRITE_BYTES:
            self._start, self._sent = now, sent
        return now - self._start > WRITE_SECONDS


class ConnectionTable:
    """All open connections of a server. Used within the event loop only.

    Args:
        limit: most connections; a larger number of open files than the system allows would end
            reads and imports.
    """

    def __init__(self, limit: int = MAX_CONNECTIONS):
        self._limit = limit
        self.on_end: Callable[[EndReason], None] = lambda _: None
        """Called for each connection that the server ends."""
        self._open: dict[ServerConnection, WriteProgress] = {}
        self._addresses: Counter[str] = Counter()
        self._shed_log = LimitedLog("too many connections: some without a request were closed")
        self._refusal_log = LimitedLog("too many connections with requests: new ones get 503")
        self._stall_log = LimitedLog("a client reads nothing: its connection was closed")
        self._invalid_log = LimitedLog("a client sent something else than HTTP: it got an error")

    def __len__(self) -> int:
        return len(self._open)

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._shed(self._open, len(self._open) - limit, exempt=None)

    def admit(self, connection: ServerConnection, now: float) -> bool:
        """Add a connection; False if it has to be refused, as others' requests need all places.

        Closes connections without a complete request for it: idle ones first, of the address that
        has most.
        """
        address = connection.address
        self._open[connection] = WriteProgress(now)
        self._addresses[address] += 1
        if not is_loopback_group(address):
            share = max(MIN_CONNECTIONS, self._limit // ADDRESS_SHARE)
            excess = self._addresses[address] - share
            same = [other for other in self._open if other.address == address] if excess > 0 else ()
            if not self._shed(same, excess, exempt=connection):
                return self._refuse()
        if not self._shed(self._open, len(self._open) - self._limit, exempt=connection):
            return self._refuse()
        return True

    def remove(self, connection: ServerConnection) -> None:
        if self._open.pop(connection, None) is not None:
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]

    def check(self, now: float) -> None:
        """Close the connections whose deadline has passed."""
        for connection, progress in list(self._open.items()):
            unsent = connection.unsent_bytes()
            if progress.is_stalled(now, unsent=unsent, sent=connection.sent_bytes()):
                self._stall_log.add(client=connection.address)
                self.on_end(EndReason.UNREAD)
                connection.abort()
                self.remove(connection)
                continue
            age = now - connection.since
            if connection.phase is ConnectionPhase.HEADERS and age > HEADER_SECONDS:
                self.on_end(EndReason.HEADERS)
                connection.close()
            has_lingered = connection.phase is ConnectionPhase.CLOSING and age > LINGER_SECONDS
            if has_lingered and not unsent:
                connection.abort()
                self.remove(connection)

    def may_answer_refusal(self) -> bool:
        """Whether one more connection beyond the limit may wait for its 503."""
        return len(self._open) <= self._limit + MAX_REFUSALS

    def add_invalid(self, connection: ServerConnection) -> None:
        """Count a connection that is closed because what it sent is not HTTP."""
        self._invalid_log.add(client=connection.address)
        self.on_end(EndReason.INVALID)

    def _refuse(self) -> bool:
        self.on_end(EndReason.FULL)
        self._refusal_log.add(connections=len(self._open))
        return False

    def _shed(
        self, among: Iterable[ServerConnection], excess: int, *, exempt: ServerConnection | None
    ) -> bool:
        """Close at least `excess` connections without a complete request; False if too few."""
        if excess <= 0:
            return True
        running = ConnectionPhase.RUNNING
        candidates = [
            connection
            for connection in among
            if connection.phase is not running and connection is not exempt
        ]
        candidates.sort(
            key=lambda connection: (
                connection.phase,
                -self._addresses[connection.address],
                connection.since,
            )
        )
        # Bodies and answers may be an honest client's: no more of them than needed.
        num_waiting = sum(connection.phase < ConnectionPhase.UNREAD for connection in candidates)
        chosen = candidates[: max(excess, min(SHED_AT_ONCE, num_waiting, self._limit // 8))]
        for connection in chosen:
            self._shed_log.add(connections=len(self._open))
            self.on_end(EndReason.SHED)
            connection.abort()
            self.remove(connection)
        return len(chosen) >= excess


def client_group(address: str | None) -> str:
    """The part of a client's address that a client cannot change."""
    if address is None:
        return ""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if isinstance(parsed, ipaddress.IPv6Address) and not parsed.is_loopback:
        return str(ipaddress.ip_network((int(parsed), OWNED_NETWORK_BITS), strict=False))
    return str(parsed)


def is_loopback_group(group: str) -> bool:
    """Whether it is this machine's: a proxy on it has many clients."""
    return group == "::1" or group.startswith("127.")


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
        num_files = count_open_files()
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        num_files = most  # counting takes a descriptor itself
    free = most - (num_files - num_connections) - SPARE_FILES
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, int(free * (1 - reserved))))


def count_open_files() -> int:
    """Open descriptors of this process."""
    return sum(1 for _ in Path("/dev/fd").iterdir())
