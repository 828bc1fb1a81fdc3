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
SMALL_PAUSE_SECONDS, LARGE_PAUSE_SECONDS = 0.001, 0.02
"""Time before the next of several waiting requests. One round of the event loop does not suffice:
a request for `/health` takes about ten, from the connection to the answer."""
MAX_LARGE_BODIES = 16
"""Large bodies in memory at once, while they arrive or wait. A further one ends the one that has
been arriving for longest; it gets 503 if all the others have arrived."""

BUSY = f"too many bodies of more than {SMALL_BYTES} bytes arrive at once; try again later"


class ParseSlots:
    """The slots of one server, used within its event loop.

    Requests without a body, with a small and with a large one have separate slots, so that none
    waits for another kind.
    """

    def __init__(self) -> None:
        self.bodiless = asyncio.Semaphore(SMALL_SLOTS)
        self.small = asyncio.Semaphore(SMALL_SLOTS)
        self.large = asyncio.Semaphore(LARGE_SLOTS)
        self.large_bodies: dict[ParseSlot, None] = {}
        """Those that hold a large body, in the order in which their bodies became large."""


class ParseSlot:
    """One request's slot: grows with the body, waits for its turn, and is released."""

    def __init__(self, slots: ParseSlots):
        self._slots = slots
        self._num_bytes = 0
        self._taken: asyncio.Semaphore | None = None
        self.deadline: asyncio.Timeout | None = None
        """Ends the read of the body; None once it has arrived."""
        self.is_displaced = False
        """The read was ended for another large body."""

    @property
    def _is_large(self) -> bool:
        return self._num_bytes > SMALL_BYTES

    def add(self, num_bytes: int) -> None:
        """Count bytes of the body as they arrive.

        Raises:
            ServerBusy: the body is large, and too many others have arrived.
        """
        if not self._is_large and self._num_bytes + num_bytes > SMALL_BYTES:
            if len(self._slots.large_bodies) >= MAX_LARGE_BODIES:
                self._displace_one()
            self._slots.large_bodies[self] = None
        self._num_bytes += num_bytes

    def _displace_one(self) -> None:
        """End the read of the large body that has been arriving for longest."""
        for slot in self._slots.large_bodies:
            if slot.deadline is not None:
                if not slot.deadline.expired():
                    slot.deadline.reschedule(asyncio.get_running_loop().time())
                slot.is_displaced, slot.deadline = True, None
                del self._slots.large_bodies[slot]
                return
        raise ServerBusy(BUSY)

    async def wait(self, receive: Receive) -> bool:
        """Wait until the request may be parsed; False if the client has disconnected meanwhile."""
        slots = self._slots
        semaphore = slots.large if self._is_large else slots.small
        semaphore = semaphore if self._num_bytes else slots.bodiless
        has_to_wait = semaphore.locked()
        await semaphore.acquire()
        self._taken = semaphore
        if not has_to_wait:
            return True
        await asyncio.sleep(LARGE_PAUSE_SECONDS if self._is_large else SMALL_PAUSE_SECONDS)
        return not await has_disconnected(receive)

    def release(self) -> None:
        """Let the next request be parsed; further calls do nothing."""
        if self._taken is not None:
            self._taken.release()
            self._taken = None
        self._slots.large_bodies.pop(self, None)


async def has_disconnected(receive: Receive) -> bool:
    """Whether the client has closed its connection, after the body has been received."""
    try:
        async with asyncio.timeout(0):
            return (await receive())["type"] == "http.disconnect"
    except TimeoutError:
        return False
