"""Threads that run the policy core's transfers (ProMoE, algorithm 1), and their watchdog."""

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.errors import Fault, TransferError
from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import CacheTier, TransferTask
from runtime.transfer.link import Link
from runtime.transfer.timeline import TimelineSink

log = logging.getLogger(__name__)

MAX_LOST_THREADS = 4
"""Hanging threads that are replaced. If more hang, the disk does not answer any read, and requests
fail."""


@dataclass(eq=False)
class TransferState:
    """State that a model's workers and its computation share: the lock and the failures.

    A failed read is raised when its expert is requested. A failed prefetch of an expert that is
    never requested is only logged.
    """

    timeline: TimelineSink | None = None
    condition: threading.Condition = field(default_factory=threading.Condition)
    errors: dict[Expert, TransferError] = field(default_factory=dict)
    joined: set[Expert] = field(default_factory=set)
    """Experts requested during a read that had begun before. If that read fails, they are read
    once more."""
    faults: Counter[Fault] = field(default_factory=Counter)
    """Failed transfers since the model was loaded, unused prefetches included."""


@dataclass(eq=False)
class TransferThread:
    """A thread of a worker, and its current task."""

    name: str
    handle: threading.Thread | None = None
    task: TransferTask | None = None
    since: float = 0.0
    is_lost: bool = False
    """It hangs in `task`; another thread has replaced it and the slot is quarantined."""

    @property
    def is_alive(self) -> bool:
        return self.handle is not None and self.handle.is_alive()


@dataclass(eq=False)
class TransferWorker:
    """Drives one tier's link. All bookkeeping happens under the shared lock."""

    tier: CacheTier
    link: Link
    shared: TransferState
    name: str
    num_threads: int = 1
    cpus: frozenset[int] | None = None
    """Processors near the memory that its link writes to; None: any."""
    busy_seconds: float = 0.0
    """Total time of successful transfers."""
    occupied_seconds: float = 0.0
    """Time during which at least one transfer ran, until the last moment when none did."""
    moved_bytes: int = 0
    """Bytes of successful transfers."""
    _num_running: int = 0
    _running_since: float = 0.0
    _threads: list[TransferThread] = field(default_factory=list)
    _closing: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> None:
        for _ in range(self.num_threads):
            self._start_thread()

    def _start_thread(self) -> None:
        thread = TransferThread(f"{self.name} {next(self._numbers)}")
        thread.handle = threading.Thread(
            target=self._run, args=(thread,), name=f"moecast {thread.name}", daemon=True
        )
        self._threads.append(thread)
        thread.handle.start()

    def _run(self, thread: TransferThread) -> None:
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)  # of this thread
        while not thread.is_lost:
            with self.shared.condition:
                task = None
                while not self._closing and (task := self._next()) is None:
                    self.shared.condition.wait()
                if task is None:
                    return
                self._begin_task(thread, task)
            self._run_task(thread, task)

    def _next(self, *, high_only: bool = False) -> TransferTask | None:
        requests_before = self.tier.num_requests_below
        task = self.tier.next_task(high_only=high_only)
        if self.tier.num_requests_below != requests_before:
            self.shared.condition.notify_all()  # the tier below has something to do
        return task

    def _begin_task(self, thread: TransferThread, task: TransferTask) -> None:
        thread.task, thread.since = task, time.monotonic()
        if self._num_running == 0:
            self._running_since = time.perf_counter()
        self._num_running += 1

    def _run_task(self, thread: TransferThread, task: TransferTask) -> None:
        error = None
        is_over = False
        start = time.perf_counter()
        try:
            self.link.transfer(task)
            is_over = True
        except TransferError as failure:
            log.warning("layer %d expert %d: %s", *task.expert, failure)
            error = failure
            is_over = True
        finally:
            # Also after Ctrl-C or a bug: otherwise the expert would stay in flight.
            self._finish_task(thread, task, error, is_over=is_over, start=start)

    def _finish_task(
        self,
        thread: TransferThread,
        task: TransferTask,
        error: TransferError | None,
        *,
        is_over: bool,
        start: float,
    ) -> None:
        end = time.perf_counter()
        with self.shared.condition:
            thread.task = None
            self._num_running -= 1
            if self._num_running == 0:
                self.occupied_seconds += end - self._running_since
            if thread.is_lost:
                log.warning("%s: a hanging transfer has ended", self.name)
                self.tier.restore(task)
            elif not is_over:
                self.tier.retry(task)
            elif error is None:
                self.shared.joined.discard(task.expert)
                self.tier.complete(task)
                self.busy_seconds += end - start
                self.moved_bytes += task.num_bytes
                if self.shared.timeline is not None:
                    self.shared.timeline.transferred(self.name, task, start, end, track=thread.name)
            else:
                self.shared.faults[error.fault] += 1
                if task.expert in self.shared.joined:
                    self.shared.joined.remove(task.expert)
                    self.tier.retry(task)
                else:
                    self.shared.errors[task.expert] = error
                    self.tier.fail(task)
            self.shared.condition.notify_all()

    def run_inline(self, thread: TransferThread) -> bool:
        """Run one requested transfer on the caller's thread, which holds the lock once.

        A computation that would wait reads by itself: no thread has to be woken, and it continues
        even if no worker does. Returns whether there was a transfer to run.
        """
        task = self._next(high_only=True)
        if task is None:
            return False
        self._begin_task(thread, task)
        try:
            # Within the block: after a Ctrl-C the lock is acquired again.
            self.shared.condition.release()
            self._run_task(thread, task)
        finally:
            self.shared.condition.acquire()
        return True

    def check_threads(self, hang_seconds: float) -> None:
        """Replace threads that have died or that hang in a transfer; called under the lock."""
        now = time.monotonic()
        for thread in list(self._threads):
            if not thread.is_alive:
                self._threads.remove(thread)
                if thread.is_lost or self._closing:
                    continue
                log.error("%s: the transfer thread has died; starting another", self.name)
                self.shared.faults[Fault.DIED] += 1
                if thread.task is not None:
                    self.tier.retry(thread.task)
            elif (
                thread.task is not None and not thread.is_lost and now - thread.since > hang_seconds
            ):
                self._mark_lost(thread, now - thread.since)
        while self.num_alive < self.num_threads and not (self.is_frozen or self._closing):
            self._start_thread()

    def _mark_lost(self, thread: TransferThread, seconds: float) -> None:
        assert thread.task is not None
        if not self.tier.quarantine(thread.task):
            return
        thread.is_lost = True
        self.shared.faults[Fault.HUNG] += 1
        log.error(
            "%s: the transfer of layer %d expert %d has taken %.1f s; its slot is quarantined",
            self.name,
            *thread.task.expert,
            seconds,
        )

    @property
    def num_lost(self) -> int:
        """Threads that hang in a transfer."""
        return sum(thread.is_lost and thread.is_alive for thread in self._threads)

    @property
    def is_frozen(self) -> bool:
        """True if all threads hang and another transfer would hang too."""
        return self.num_lost >= MAX_LOST_THREADS

    @property
    def num_alive(self) -> int:
        """Threads that neither died nor hang."""
        return sum(thread.is_alive and not thread.is_lost for thread in self._threads)

    @property
    def active_tasks(self) -> list[TransferTask]:
        """Tasks of all threads, hanging ones included."""
        return [thread.task for thread in self._threads if thread.task is not None]

    @property
    def is_idle(self) -> bool:
        """True if no transfer is active but hanging ones."""
        return all(thread.task is None or thread.is_lost for thread in self._threads)

    def close(self, *, timeout_seconds: float) -> None:
        """End the threads after their current transfers. May be called twice.

        A hanging thread is left behind; it ends when its transfer does.
        """
        with self.shared.condition:
            self._closing = True
            self.shared.condition.notify_all()
        for thread in self._threads:
            assert thread.handle is not None
            thread.handle.join(timeout_seconds)
        if not any(thread.is_alive for thread in self._threads):
            self.link.close()
