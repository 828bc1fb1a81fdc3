"""One forward pass at a time: several threads may use a model, each waits for its turn."""

import threading


class ForwardPassLock:
    """A lock that a forward pass takes in one hook and gives back in another.

    A pass may begin within a pass of its own thread (an encoder within its model).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def begin(self) -> None:
        """Waits until no other thread's pass is under way."""
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn; not when its pass never began."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """Gives the turn back, which this thread must have."""
        assert self.is_mine
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
