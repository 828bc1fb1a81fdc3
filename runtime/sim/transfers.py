"""The transfers under way over one link: that of its own thread and, maybe, the computation's."""

import math

from runtime.policy.tier import Task


class Transfers:
    """At most two at a time; the speed of each, while there are two, is `speed_together`."""

    def __init__(self, speed_together: float):
        self._together = speed_together
        self._running: list[tuple[float, Task, float, bool]] = []
        """End at the present speed, task, start, whether the link's own thread does it."""
        self.first_end = math.inf
        """When the first of them ends, if none is added."""
        self.is_worker_busy = False

    @property
    def num(self) -> int:
        return len(self._running)

    @property
    def under_way(self) -> bool:
        """Whether the link's own thread is at something."""
        return self.is_worker_busy

    def __contains__(self, task: Task) -> bool:
        return any(running[1] is task for running in self._running)

    def start(self, task: Task, now: float, seconds: float, *, by_worker: bool) -> None:
        """A transfer that takes `seconds` alone begins."""
        running = self._running
        if by_worker:
            self.is_worker_busy = True
        if not running:
            self.first_end = now + seconds
            running.append((self.first_end, task, now, by_worker))
            return
        assert len(running) == 1, running
        end, other, started, others = running[0]
        running[0] = (now + (end - now) / self._together, other, started, others)
        running.append((now + seconds / self._together, task, now, by_worker))
        self.first_end = min(running[0][0], running[1][0])

    def finish_first(self) -> tuple[Task, float]:
        """Takes out the one that ends first; the task and when it started."""
        running = self._running
        place = 0 if len(running) == 1 or running[0][0] <= running[1][0] else 1
        now, task, started, by_worker = running.pop(place)
        if by_worker:
            self.is_worker_busy = False
        if running:
            end, other, began, others = running[0]
            end = now + (end - now) * self._together
            running[0] = (end, other, began, others)
            self.first_end = end
        else:
            self.first_end = math.inf
        return task, started
