"""The threads that do what the policy core says next (promoe algorithm 1), and their watchdog."""

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.errors import Fault, TransferError
from runtime.policy.adaptive_prefetch import AdaptivePrefetch
from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import CacheTier, TransferTask
from runtime.transfer.link import Link
from runtime.transfer.timeline import TimelineSink

log = logging.getLogger(__name__)

MAX_LOST_THREADS = 4
"""Threads that may hang in a transfer and be replaced. A disk that swallows every read is not
helped by more of them: whoever needs an expert is told."""


class TransferState:
    """What all workers of a model and its computation share: the lock and the failures.

    A failed read is remembered for its expert and raised to whoever needs the expert; a failed
    prefetch that nobody needs costs nothing but a line in the log.
    """

    def __init__(
        self,
        timeline: TimelineSink | None = None,
        adaptive_prefetch: AdaptivePrefetch | None = None,
    ):
        self.condition = threading.Condition()
        self.errors: dict[Expert, TransferError] = {}
        self.joined: set[Expert] = set()
        """Experts asked for while a read of them was under way that had begun before. Should it
        fail, they are read once more: who asks now is not refused for what was tried earlier."""
        self.faults: Counter[Fault] = Counter()
        """What has gone wrong since the model was loaded, also with prefetches nobody needed."""
        self.timeline = timeline
        self.adaptive_prefetch = adaptive_prefetch


@dataclass(eq=False)
class TransferThread:
    """One thread of a worker and what it is doing."""

    name: str
    thread: threading.Thread | None = None
    task: TransferTask | None = None
    since: float = 0.0
    is_lost: bool = False
    """It hangs in `task`; whoever replaced it has taken the slot out of use."""


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
    """Of transfers that brought their bytes, added up."""
    _hands: list[TransferThread] = field(default_factory=list)
    _closing: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> None:
        """Starts the threads."""
        for _ in range(self.num_threads):
            self._hire()

    def _hire(self) -> None:
        hand = TransferThread(f"{self.name} {next(self._numbers)}")
        hand.thread = threading.Thread(
            target=self._run, args=(hand,), name=f"moecast {hand.name}", daemon=True
        )
        self._hands.append(hand)
        hand.thread.start()

    def _run(self, hand: TransferThread) -> None:
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)  # of this thread
        while not hand.is_lost:
            with self.shared.condition:
                task = None
                while not self._closing and (task := self._next()) is None:
                    self.shared.condition.wait()
                if task is None:
                    return
                hand.task, hand.since = task, time.monotonic()
            self._carry_out(hand, task)

    def _next(self, *, high_only: bool = False) -> TransferTask | None:
        asks = self.tier.num_requests_below
        task = self.tier.next_task(high_only=high_only)
        if self.tier.num_requests_below != asks:
            self.shared.condition.notify_all()  # the tier below has something to do
        return task

    def _carry_out(self, hand: TransferThread, task: TransferTask) -> None:
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
            # Also when Ctrl-C or a bug ends it: the expert would be in flight for ever.
            self._settle(hand, task, error, is_over=is_over, start=start)

    def _settle(
        self,
        hand: TransferThread,
        task: TransferTask,
        error: TransferError | None,
        *,
        is_over: bool,
        start: float,
    ) -> None:
        end = time.perf_counter()
        with self.shared.condition:
            hand.task = None
            if hand.is_lost:
                log.warning("%s: a transfer that hung has ended", self.name)
                self.tier.restore(task)
            elif not is_over:
                self.tier.retry(task)
            elif error is None:
                self.shared.joined.discard(task.expert)
                self.tier.complete(task)
                self.busy_seconds += end - start
                self._report(hand, task, start, end)
            else:
                self.shared.faults[error.fault] += 1
                if task.expert in self.shared.joined:
                    self.shared.joined.remove(task.expert)
                    self.tier.retry(task)
                else:
                    self.shared.errors[task.expert] = error
                    self.tier.fail(task)
            self.shared.condition.notify_all()

    def _report(self, hand: TransferThread, task: TransferTask, start: float, end: float) -> None:
        if self.shared.timeline is not None:
            self.shared.timeline.transferred(self.name, task, start, end, track=hand.name)

    def help(self, hand: TransferThread) -> bool:
        """Carries out one claimed transfer on the caller's thread, which holds the lock once.

        A computation that has nothing else to do reads by itself: no thread has to be woken, and
        it goes on when no worker does. Returns whether there was something to do.
        """
        task = self._next(high_only=True)
        if task is None:
            return False
        hand.task, hand.since = task, time.monotonic()
        self.shared.condition.release()
        try:
            self._carry_out(hand, task)
        finally:
            self.shared.condition.acquire()
        return True

    def look_after(self, hang_seconds: float) -> None:
        """Replaces threads that have died and those that have been in one transfer for too long.

        Called under the lock, by whoever waits.
        """
        now = time.monotonic()
        for hand in list(self._hands):
            assert hand.thread is not None
            if not hand.thread.is_alive():
                self._hands.remove(hand)
                if hand.is_lost or self._closing:
                    continue
                log.error("%s: the transfer thread has died; starting another", self.name)
                self.shared.faults[Fault.DIED] += 1
                if hand.task is not None:
                    self.tier.retry(hand.task)
            elif hand.task is not None and not hand.is_lost and now - hand.since > hang_seconds:
                self._set_aside(hand, now - hand.since)
        while self.num_alive < self.num_threads and not (self.is_frozen or self._closing):
            self._hire()

    def _set_aside(self, hand: TransferThread, seconds: float) -> None:
        assert hand.task is not None
        if not self.tier.quarantine(hand.task):
            return
        hand.is_lost = True
        self.shared.faults[Fault.HUNG] += 1
        log.error(
            "%s: layer %d expert %d has been under way for %.1f s; its slot is set aside",
            self.name,
            *hand.task.expert,
            seconds,
        )

    @property
    def num_lost(self) -> int:
        """Threads that hang in a transfer."""
        return sum(
            hand.is_lost and hand.thread is not None and hand.thread.is_alive()
            for hand in self._hands
        )

    @property
    def is_frozen(self) -> bool:
        """So many transfers hang that one more would only hang too."""
        return self.num_lost >= MAX_LOST_THREADS

    @property
    def num_alive(self) -> int:
        """Threads that work."""
        return sum(
            hand.thread is not None and hand.thread.is_alive() and not hand.is_lost
            for hand in self._hands
        )

    @property
    def under_way(self) -> list[TransferTask]:
        """Transfers of its threads, those that hang included."""
        return [hand.task for hand in self._hands if hand.task is not None]

    @property
    def is_idle(self) -> bool:
        """Nothing is under way that may still end well."""
        return all(hand.task is None or hand.is_lost for hand in self._hands)

    def close(self, *, timeout_seconds: float) -> None:
        """Ends the threads after the transfers under way; may be called twice.

        A thread that hangs is left behind: it ends when its transfer does.
        """
        with self.shared.condition:
            self._closing = True
            self.shared.condition.notify_all()
        for hand in self._hands:
            assert hand.thread is not None
            hand.thread.join(timeout_seconds)
        if not any(hand.thread is not None and hand.thread.is_alive() for hand in self._hands):
            self.link.close()
