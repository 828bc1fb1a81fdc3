"""A ring of Python threads, for bytes that are converted on arrival, and without compiled code.

Arrivals, compiled or in Python, too.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from predictors.errors import describe_error
from runtime.errors import Fault, TransferError
from runtime.policy.tier import TransferTask
from runtime.transfer.ring import ARRIVED, FAILED, Arrivals, Ring

try:
    if os.environ.get("MOECAST_COMPILED") == "0":
        raise ImportError("MOECAST_COMPILED=0")
    from runtime.transfer import rings
except ImportError:  # there was no C compiler, or another system than Linux
    rings = None  # type: ignore[assignment]

log = logging.getLogger(__name__)


class QueuedArrivals:
    """`Arrivals` without compiled code."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, int, float, float]] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One for each arrival, posted after it; those that are left over wake in vain."""

    def post(self, ticket: int, status: int, seconds: float, /) -> None:
        self._arrived.append((ticket, status, seconds, time.perf_counter()))
        self._wakes.put(None)

    def take(self) -> list[tuple[int, int, float, float]]:
        while not self._wakes.empty():
            self._wakes.get()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def wait(self, seconds: float, /) -> bool:
        end = time.monotonic() + seconds
        while not self._arrived:
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                self._wakes.get(timeout=min(left, threading.TIMEOUT_MAX))
            except Empty:
                return bool(self._arrived)
        return True


def make_arrivals() -> Arrivals:
    return QueuedArrivals() if rings is None else rings.Arrivals()


class RingThread(threading.Thread):
    """A thread of a ring, and what it transfers."""

    def __init__(self, run: Callable[["RingThread"], None], name: str):
        super().__init__(target=run, args=(self,), name=name, daemon=True)
        self.ticket: int | None = None
        self.since = 0.0
        self.is_lost = False
        """It hangs, and another has taken its place."""


class ThreadRing(Ring):
    """Calls `transfer` for each task, on threads that start with the first one.

    There is no lock: the threads share deques, a dict and a queue whose methods are atomic. The one
    that removes a ticket from `_tasks`, a thread or `cancel`, has it.

    Args:
        transfer: Raises TransferError if the bytes do not arrive.
        name: Of the link, for messages.
        cpus: The processors that the threads run on; None: any.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        transfer: Callable[[TransferTask], None],
        num_threads: int = 1,
        *,
        name: str,
        cpus: frozenset[int] | None = None,
    ):
        self.errors: dict[int, TransferError] = {}
        self._arrivals = arrivals
        self.transfer = transfer
        self._num_threads = num_threads
        self._name = name
        self._cpus = cpus
        self._tasks: dict[int, TransferTask] = {}
        """Tasks of the tickets that have not begun."""
        self._high: deque[int] = deque()
        self._low: deque[int] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One for each ticket of the deques, put after it. Cancelled ones stay there."""
        self._threads: list[RingThread] = []
        self._num_started = 0
        self._is_closing = False

    def submit(self, ticket: int, task: TransferTask) -> None:
        if self._is_closing:
            raise RuntimeError("the ring is closed")
        self._start_threads()
        self._tasks[ticket] = task
        (self._high if task.high else self._low).append(ticket)
        self._wakes.put(None)

    def _start_threads(self) -> None:
        """Starts as many as are missing, also in place of those that the interpreter has ended."""
        for thread in [thread for thread in self._threads if not thread.is_alive()]:
            self._threads.remove(thread)
            self._wakes.put(None)  # it may have taken one
            if thread.ticket is not None:
                self.errors[thread.ticket] = TransferError(
                    f"{self._name}: the thread of a transfer has ended", fault=Fault.DIED
                )
                self._arrivals.post(thread.ticket, FAILED, 0.0)
        while sum(not thread.is_lost for thread in self._threads) < self._num_threads:
            thread = RingThread(self._run, f"moecast {self._name} {self._num_started + 1}")
            thread.start()
            self._threads.append(thread)
            self._num_started += 1

    def _run(self, thread: RingThread) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)  # of this thread
        while not thread.is_lost:
            self._wakes.get()
            if self._is_closing:
                return
            ticket = self._take_ticket()
            task = None if ticket is None else self._tasks.pop(ticket, None)
            if ticket is not None and task is not None:
                self._run_task(thread, ticket, task)

    def _take_ticket(self) -> int | None:
        for waiting in (self._high, self._low):
            with suppress(IndexError):
                return waiting.popleft()
        return None

    def _run_task(self, thread: RingThread, ticket: int, task: TransferTask) -> None:
        start = thread.since = time.monotonic()
        thread.ticket = ticket
        error = self._try_transfer(task)
        if error is not None:
            self.errors[ticket] = error
        thread.ticket = None
        status = ARRIVED if error is None else FAILED
        self._arrivals.post(ticket, status, time.monotonic() - start)

    def _try_transfer(self, task: TransferTask) -> TransferError | None:
        try:
            self.transfer(task)
        except TransferError as error:
            return error
        except BaseException as error:  # whatever it is, the expert must not stay in flight
            log.exception("%s: the transfer thread has died; starting another", self._name)
            layer, expert = task.expert
            return TransferError(
                f"{self._name}: the thread that transferred layer {layer} expert {expert} died of "
                f"{describe_error(error)}",
                fault=Fault.DIED,
            )
        return None

    def cancel(self, ticket: int) -> bool:
        return self._tasks.pop(ticket, None) is not None

    def running(self) -> list[tuple[int, float]]:
        if self._threads and not self._is_closing:
            self._start_threads()
        now = time.monotonic()
        tickets = [(thread.ticket, thread.since) for thread in self._threads]
        return [(ticket, now - since) for ticket, since in tickets if ticket is not None]

    def replace_thread(self, ticket: int) -> None:
        for thread in self._threads:
            if thread.ticket == ticket:
                thread.is_lost = True
        if not self._is_closing:
            self._start_threads()

    def close(self, seconds: float) -> bool:
        self._is_closing = True
        self._tasks.clear()
        for _ in self._threads:
            self._wakes.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
