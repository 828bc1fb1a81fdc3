"""Arrivals, compiled or in Python."""

import os
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue

from runtime.transfer.ring import Arrivals

try:
    if os.environ.get("MOECAST_COMPILED") == "0":
        raise ImportError("MOECAST_COMPILED=0")
    from runtime.transfer import rings
except ImportError:  # there was no C compiler, or another system than Linux
    rings = None  # type: ignore[assignment]


class QueuedArrivals:
    """`Arrivals` without compiled code."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, int, float, float]] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One for each arrival, posted after it; those that are left over wake in vain."""

    def post(self, ticket: int, status: int, seconds: float, /) -> None:
        self._arrived.append((ticket, status, seconds, time.perf_counter()))
        self._wakes.put(None)

    def take(self) -> list[tuple[int, int, float, float]]:
        while not self._wakes.empty():
            self._wakes.get()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def wait(self, seconds: float, /) -> bool:
        end = time.monotonic() + seconds
        while not self._arrived:
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                self._wakes.get(timeout=min(left, threading.TIMEOUT_MAX))
            except Empty:
                return bool(self._arrived)
        return True


def make_arrivals() -> Arrivals:
    return QueuedArrivals() if rings is None else rings.Arrivals()
