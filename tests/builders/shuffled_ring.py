"""A ring without threads whose transfers end in any order: whatever order threads could bring."""

import random

from runtime.errors import TransferError
from runtime.transfer.ring import Ring


class ShuffledRing(Ring):
    """Ends transfers in an order of chance, some of them in an error.

    Requests interrupt prefetches that have begun, by chance. A slot is spoiled when a transfer into
    it begins; two at once into the same slot are an error.

    Args:
        inner: The ring whose `transfer` moves the bytes.
        fails: Every how many-th transfer fails; 0: none.
        hangs: Some transfers seem to run for an hour.
    """

    def __init__(self, arrivals, inner, seed, *, fails=0, hangs=False):
        self._arrivals = arrivals
        self._inner = inner
        self._chance = random.Random(seed)
        self._fails = fails
        self._hangs = hangs
        self.num_threads = self._chance.randint(1, 3)
        """Transfers that run at once; the others can be cancelled."""
        self._waiting: dict[int, object] = {}
        self._begun: dict[int, object] = {}
        self.errors: dict[int, TransferError] = {}
        self.num_ended = self.num_cancelled = 0

    def submit(self, ticket, task):
        self._waiting[ticket] = task
        for other, begun in list(self._begun.items()):
            if task.high and not begun.high and self._chance.random() < 0.5:
                self._waiting[other] = self._begun.pop(other)
        self._begin()

    def _begin(self):
        order = sorted(self._waiting, key=lambda ticket: (not self._waiting[ticket].high, ticket))
        for ticket in order[: self.num_threads - len(self._begun)]:
            task = self._waiting.pop(ticket)
            assert task.slot not in {other.slot for other in self._begun.values()}
            self._begun[ticket] = task

    def cancel(self, ticket):
        self.num_cancelled += ticket in self._waiting
        return self._waiting.pop(ticket, None) is not None

    def poll(self):
        while self._begun and self._chance.random() < 0.4:
            self.wait_first()

    def wait_first(self):
        if not self._begun:
            return False
        ticket = self._chance.choice(sorted(self._begun))
        task = self._begun.pop(ticket)
        self.num_ended += 1
        if self._fails and self.num_ended % self._fails == 0:
            self.errors[ticket] = TransferError("injected")
        else:
            self._inner.transfer(task)
        self._arrivals.post(ticket, -3 if ticket in self.errors else 0, 1e-3)
        self._begin()
        return True

    def running(self):
        hangs = 0.2 * self._hangs
        return [(t, 3600.0 if self._chance.random() < hangs else 0.0) for t in self._begun]

    def close(self, seconds):
        while self.wait_first():
            pass
        return self._inner.close(seconds)
