"""Which units wait, who does which, what failed: the books of the dispatcher, without a clock."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any


class Board:
    """Every unit is at each moment in exactly one of: waiting, taken, results, given_up."""

    def __init__(self, units: Sequence[str], *, retries: int):
        assert len(set(units)) == len(units), "units have names of their own"
        self._retries = retries
        self._tries: Counter[str] = Counter()
        self.waiting = deque(units)
        self.taken: dict[int, str] = {}
        """Worker to the unit that it does."""
        self.results: dict[str, Any] = {}
        self.given_up: dict[str, str] = {}
        """Unit to its last error."""
        self.num_retried = 0

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.taken

    def take(self, worker: int) -> str | None:
        """The next unit for a worker that has none; None when none waits."""
        assert worker not in self.taken, f"worker {worker} has a unit"
        if not self.waiting:
            return None
        unit = self.waiting.popleft()
        self._tries[unit] += 1
        self.taken[worker] = unit
        return unit

    def done(self, worker: int, result: Any) -> str:
        unit = self.taken.pop(worker)
        self.results[unit] = result
        return unit

    def failed(self, worker: int, error: str, *, again: bool = True) -> str | None:
        """Its worker says so, or has died: the unit waits behind all others, or is given up when it
        was tried often enough. Returns it; None for a worker that had no unit.
        """
        unit = self.taken.pop(worker, None)
        if unit is None:
            return None
        if again and self._tries[unit] <= self._retries:
            self.waiting.append(unit)
            self.num_retried += 1
        else:
            self.given_up[unit] = error
        return unit
