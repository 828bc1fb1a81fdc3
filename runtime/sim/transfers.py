"""The transfers under way over one link: that of its own thread and, maybe, the computation's."""

import math
from dataclasses import dataclass

from runtime.policy.tier import TransferTask


@dataclass(slots=True, eq=False)
class _Running:
    """One transfer."""

    end: float
    """At its present speed."""
    task: TransferTask
    started: float
    by_worker: bool
    """The link's own thread does it, not the computation."""


class Transfers:
    """At most two at a time.

    The speed of each, while there are two, is `speed_together`, and `speed_computing` while the
    computation computes.
    """

    def __init__(self, *, speed_together: float = 1.0, speed_computing: float = 1.0):
        self._together = speed_together
        self._computing = speed_computing
        self._is_computing = False
        self._running: list[_Running] = []
        self.first_end = math.inf
        """When the first of them ends, if nothing else happens."""
        self.is_worker_busy = False
        """Whether the link's own thread is at something."""

    @property
    def num(self) -> int:
        return len(self._running)

    def __contains__(self, task: TransferTask) -> bool:
        return any(running.task is task for running in self._running)

    def computing(self, now: float, is_computing: bool) -> None:
        """The computation computes from now on, or not any more."""
        if is_computing == self._is_computing:
            return
        self._is_computing = is_computing
        if self._running and self._computing != 1.0:
            self._stretch(now, 1 / self._computing if is_computing else self._computing)

    def start(self, task: TransferTask, now: float, seconds: float, *, by_worker: bool) -> None:
        """A transfer that takes `seconds`, with nothing beside it, begins."""
        if by_worker:
            self.is_worker_busy = True
        if self._is_computing:
            seconds /= self._computing
        if self._running:
            self._stretch(now, 1 / self._together)
            seconds /= self._together
        self._running.append(_Running(now + seconds, task, now, by_worker))
        self.first_end = min(self.first_end, now + seconds)

    def finish_first(self) -> tuple[TransferTask, float]:
        """Takes out the one that ends first; the task and when it started."""
        first = min(self._running, key=_end)
        self._running.remove(first)
        if first.by_worker:
            self.is_worker_busy = False
        self._stretch(first.end, self._together)
        return first.task, first.started

    def _stretch(self, now: float, factor: float) -> None:
        """What remains of each takes `factor` times as long."""
        self.first_end = math.inf
        for running in self._running:
            if factor != 1.0:
                running.end = now + (running.end - now) * factor
            self.first_end = min(self.first_end, running.end)


def _end(running: _Running) -> float:
    return running.end
