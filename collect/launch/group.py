"""Workers that do one unit at a time; one that dies costs its unit and is replaced."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from collect.launch.worker import UnitResult


class UnitProcess(Protocol):
    """A process with a `UnitWorker`; its futures fail if it dies."""

    opened: Future[Any]
    """Ends when the worker has opened its work, or cannot."""

    def submit(self, unit: str) -> Future[str]:
        """Runs `UnitWorker.run`."""
        ...

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        ...


class WorkerGroup:
    """A number of such processes.

    Args:
        start: Starts the process of a number from 0 on.
        num_workers: The number of processes.
        has_died: Whether a future's exception means that its process died.
        poll_seconds: Interval of the calls of `on_poll` while nothing ends.
    """

    def __init__(
        self,
        start: Callable[[int], UnitProcess],
        num_workers: int,
        has_died: Callable[[BaseException | None], bool],
        *,
        poll_seconds: float | None = None,
    ):
        self._start_process = start
        self._has_died = has_died
        self._poll_seconds = poll_seconds
        self.workers: dict[int, Any] = {}
        self._running: dict[Future[Any], tuple[int, str | None]] = {}
        """Worker and unit of each call; without a unit, the worker is opening its work."""
        self._idle: list[int] = []
        for number in range(num_workers):
            self._start(number)

    def _start(self, number: int) -> None:
        self.workers[number] = self._start_process(number)
        # All load their models at the same time.
        self._running[self.workers[number].opened] = number, None

    @property
    def is_working(self) -> bool:
        """True if a worker has a unit."""
        return any(unit is not None for _, unit in self._running.values())

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        """Tries each unit once and yields results as they come."""
        waiting = deque(units)
        while waiting or self.is_working:
            while waiting and self._idle:
                number, unit = self._idle.pop(), waiting.popleft()
                self._running[self.workers[number].submit(unit)] = number, unit
            self.on_poll()
            ended, _ = wait(self._running, timeout=self._poll_seconds, return_when=FIRST_COMPLETED)
            for future in ended:
                number, done = self._running.pop(future)
                error = future.exception()
                if self._has_died(error):
                    self.on_death()
                    self.workers[number].close()
                    self._start(number)
                    if done is None and waiting:
                        # A try of some unit, so that workers that cannot start are given up.
                        done = waiting.popleft()
                    if done is not None:
                        said = " ".join(str(error).split())[:300]
                        yield UnitResult(unit=done, error=f"its worker process died: {said}")
                    continue
                self._idle.append(number)
                # Work that could not be opened is reported by the worker's first unit.
                if done is not None:
                    yield UnitResult.from_json(future.result())

    def on_poll(self) -> None:
        """Called before each wait for a worker."""

    def on_death(self) -> None:
        """Called when a worker has died, before it is replaced."""

    def close(self) -> None:
        """Ends every worker, whatever it is doing."""
        for worker in self.workers.values():
            worker.close()
