"""Bounds how many requests are parsed, checked and encoded at once.

Parsing JSON and validating it hold the event loop, and threads that encode texts compete for the
same processors: many requests that arrive together would delay the answer of `/health`. With a
bound, the event loop gets to everything else between two of them.
"""

import asyncio

from starlette.types import Receive

from runtime.serving.errors import ServerBusy

SMALL_BYTES = 64 << 10
"""Bodies of more bytes are large."""
SMALL_SLOTS = 4
"""Requests with a small body that are parsed at once, and requests without one."""
LARGE_SLOTS = 1
MAX_LARGE_BODIES = 32
"""Large bodies in memory at once, while they arrive or wait; further ones get 503."""


class ParseSlots:
    """The slots of one server, used within its event loop.

    Requests without a body, with a small and with a large one have slots of their own, so that none
    waits for another kind.
    """

    def __init__(self) -> None:
        self.bodiless = asyncio.Semaphore(SMALL_SLOTS)
        self.small = asyncio.Semaphore(SMALL_SLOTS)
        self.large = asyncio.Semaphore(LARGE_SLOTS)
        self.num_large_bodies = 0


class ParseSlot:
    """One request's slot: grows with the body, waits for its turn, and is released."""

    def __init__(self, slots: ParseSlots):
        self._slots = slots
        self._num_bytes = 0
        self._taken: asyncio.Semaphore | None = None

    @property
    def _is_large(self) -> bool:
        return self._num_bytes > SMALL_BYTES

    def add(self, num_bytes: int) -> None:
        """Count bytes of the body as they arrive.

        Raises:
            ServerBusy: the body is large, and too many others are.
        """
        becomes_large = not self._is_large and self._num_bytes + num_bytes > SMALL_BYTES
        if becomes_large and self._slots.num_large_bodies >= MAX_LARGE_BODIES:
            raise ServerBusy(
                f"{MAX_LARGE_BODIES} other bodies of more than {SMALL_BYTES} bytes wait; try again "
                "later"
            )
        self._num_bytes += num_bytes
        self._slots.num_large_bodies += becomes_large

    async def wait(self, receive: Receive) -> bool:
        """Wait until the request may be parsed; False if the client has disconnected meanwhile."""
        slots = self._slots
        semaphore = slots.large if self._is_large else slots.small
        semaphore = semaphore if self._num_bytes else slots.bodiless
        has_to_wait = semaphore.locked()
        await semaphore.acquire()
        self._taken = semaphore
        return not (has_to_wait and await has_disconnected(receive))

    def release(self) -> None:
        """Let the next request be parsed; further calls do nothing."""
        if self._taken is not None:
            self._taken.release()
            self._taken = None
        self._slots.num_large_bodies -= self._is_large
        self._num_bytes = 0


async def has_disconnected(receive: Receive) -> bool:
    """Whether the client has closed its connection, after the body has been received."""
    try:
        async with asyncio.timeout(0):
            return (await receive())["type"] == "http.disconnect"
    except TimeoutError:
        return False
