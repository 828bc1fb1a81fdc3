"""The lock that lets one thread run forward passes at a time."""

import contextlib
import threading


class ForwardPassLock:
    """Lets one thread run forward passes at a time; acquired in one hook, released in another.

    Ctrl-C may cut either short. So the lock is reentrant and does not count: the next pass of a
    thread that was left with it begins at once, and its end gives it back altogether.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None

    def begin(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    @property
    def is_mine(self) -> bool:
        """True if this thread has the lock, which it has not if its pass did not begin."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """Release the lock, however often this thread has acquired it; nothing if it has not."""
        if self.is_mine:
            self._owner = None
        with contextlib.suppress(RuntimeError):  # raised when this thread does not hold it
            while True:
                self._lock.release()
