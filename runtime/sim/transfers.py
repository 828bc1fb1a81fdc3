"""The running transfers of one link: that of its thread and perhaps one of the computation."""

import math
from dataclasses import dataclass

from runtime.policy.tier import TransferTask


@dataclass(slots=True, eq=False)
class _RunningTransfer:
    """A transfer and when it ends."""

    end: float
    """Time of its end at its present speed."""
    task: TransferTask
    started: float
    by_worker: bool
    """Done by the link's thread, not by the computation."""


class LinkTransfers:
    """At most two transfers at a time.

    Args:
        speed_together: Speed of each of two simultaneous transfers, against one alone.
        speed_computing: Speed of a transfer while the computation computes.
    """

    def __init__(self, *, speed_together: float = 1.0, speed_computing: float = 1.0):
        self._together = speed_together
        self._computing = speed_computing
        self._is_computing = False
        self._running: list[_RunningTransfer] = []
        self.first_end = math.inf
        """Time when the first transfer ends, if nothing else happens."""
        self.is_worker_busy = False
        """Whether the link's thread runs a transfer."""

    @property
    def num(self) -> int:
        return len(self._running)

    def __contains__(self, task: TransferTask) -> bool:
        return any(running.task is task for running in self._running)

    def set_computing(self, now: float, is_computing: bool) -> None:
        """Sets whether the computation computes from now on."""
        if is_computing == self._is_computing:
            return
        self._is_computing = is_computing
        if self._running and self._computing != 1.0:
            self._stretch(now, 1 / self._computing if is_computing else self._computing)

    def start(self, task: TransferTask, now: float, seconds: float, *, by_worker: bool) -> None:
        """Starts a transfer that takes `seconds` when nothing else runs."""
        if by_worker:
            self.is_worker_busy = True
        if self._is_computing:
            seconds /= self._computing
        if self._running:
            self._stretch(now, 1 / self._together)
            seconds /= self._together
        self._running.append(_RunningTransfer(now + seconds, task, now, by_worker))
        self.first_end = min(self.first_end, now + seconds)

    def finish_first(self) -> tuple[TransferTask, float]:
        """Removes the transfer that ends first; returns its task and when it started."""
        first = min(self._running, key=lambda running: running.end)
        self._running.remove(first)
        if first.by_worker:
            self.is_worker_busy = False
        self._stretch(first.end, self._together)
        return first.task, first.started

    def _stretch(self, now: float, factor: float) -> None:
        """Multiplies the remaining time of each transfer by `factor`."""
        self.first_end = math.inf
        for running in self._running:
            if factor != 1.0:
                running.end = now + (running.end - now) * factor
            self.first_end = min(self.first_end, running.end)
