"""Memory that parts of transfers go to, and what has become of the transfers."""

import ctypes
import mmap

from runtime.transfer.ring import Arrivals

WAIT_SECONDS = 240.0


class Memory:
    """Zeros at an address."""

    def __init__(self, num_bytes: int):
        self.bytes = memoryview(mmap.mmap(-1, num_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


def await_arrivals(arrivals: Arrivals, count: int = 1) -> list[tuple[int, int, float, float]]:
    taken: list[tuple[int, int, float, float]] = []
    while len(taken) < count:
        assert arrivals.wait(WAIT_SECONDS)
        taken += arrivals.take()
    return taken


def statuses(arrivals: Arrivals, count: int = 1) -> dict[int, int]:
    """Status by ticket, of so many transfers."""
    arrived = {ticket: status for ticket, status, *_ in await_arrivals(arrivals, count)}
    assert len(arrived) == count
    return arrived
