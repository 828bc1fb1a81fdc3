"""The lock that lets one thread run forward passes at a time."""

import contextlib
import threading
from typing import Any


class ForwardPassLock:
    """Lets one thread run forward passes at a time; acquired in one hook, released in another.

    It is reentrant: an encoder's pass may begin within its model's pass.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def begin(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    @property
    def is_mine(self) -> bool:
        """True if this thread has the lock, which it has not if its pass did not begin."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        assert self.is_mine
        self._depth -= 1
        if self._depth > 0:
            self._lock.release()
            return
        self._depth, self._owner = 0, None
        release_held(self._lock)

    def release_held(self) -> None:
        """Release the lock if an interrupted `begin` of this thread left it acquired."""
        release_held(self._lock)


def release_held(lock: Any) -> None:
    """Release a reentrant lock however often this thread has acquired it."""
    with contextlib.suppress(RuntimeError):  # raised when this thread does not hold it
        while True:
            lock.release()
