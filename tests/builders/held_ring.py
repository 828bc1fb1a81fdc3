"""A ring some of whose transfers hang for good."""

from runtime.policy.tier import TransferTask
from runtime.transfer.ring import ARRIVED, Arrivals, Ring


class HeldRing(Ring):
    """Transfers when waited for, in order, but the first ones hang at once, with their threads.

    Args:
        inner: The ring whose `transfer` moves the bytes.
        num_held: Transfers that hang: they seem to have run for an hour.
    """

    def __init__(self, arrivals: Arrivals, inner: Ring, *, num_held: int, num_threads: int = 2):
        self._arrivals = arrivals
        self._inner = inner
        self._num_held = num_held
        self._num_free = num_threads
        self._waiting: dict[int, TransferTask] = {}
        self.held: list[int] = []
        self.replaced: list[int] = []
        """Tickets in the place of whose threads there are others."""
        self.errors = {}

    def submit(self, ticket: int, task: TransferTask) -> None:
        self._waiting[ticket] = task
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._num_free and len(self.held) < self._num_held:
            ticket = min(self._waiting)
            del self._waiting[ticket]
            self.held.append(ticket)
            self._num_free -= 1

    def wait_first(self) -> bool:
        if not (self._waiting and self._num_free):
            return False
        ticket = min(self._waiting)
        self._inner.transfer(self._waiting.pop(ticket))
        self._arrivals.post(ticket, ARRIVED, 1e-3)
        return True

    def cancel(self, ticket: int) -> bool:
        return self._waiting.pop(ticket, None) is not None

    def running(self) -> list[tuple[int, float]]:
        return [(ticket, 3600.0) for ticket in self.held]

    def replace_thread(self, ticket: int) -> None:
        self.replaced.append(ticket)
        self._num_free += 1
        self._begin()

    def close(self, seconds: float) -> bool:
        return self._inner.close(seconds)
