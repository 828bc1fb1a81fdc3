"""The transfers of one model, live or simulated: keeps the rings busy and books what has arrived.

Everything here runs on the model's thread, at its events. Rings move bytes meanwhile and touch no
book: requests first, then as many prefetches as the link transfers until the next event.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import CacheTier, TransferTask
from runtime.transfer.ring import Ring

AHEAD_SECONDS = 4e-3
"""Prefetches that a ring holds ahead at least, as time on its link. What has not begun can be taken
back."""
AHEAD_PAUSES = 2.0
"""The same over the longest pause between two events of the model, in which nothing is submitted:
several readers, each as slow as its link's mean, share the link."""
MOST_AHEAD_SECONDS = 20e-3
"""Longer pauses are not a layer's; forecasts to come should not wait behind so many prefetches."""
PAUSE_MEMORY = 0.98
"""Weight of the longest pause at each later event: each layer has an event of the same kind."""
LEAST_AHEAD = 2
"""Prefetches that a ring holds at least: one that runs, and the next."""
MEMORY = 0.9
"""Weight of the past in the mean of a link's speed."""


class TimelineSink(Protocol):
    """Receives spans of a run; times are those of `time.perf_counter`, in seconds."""

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None: ...

    def computed(self, expert: Expert, start: float, end: float) -> None: ...

    def stalled(self, layer: int, start: float, end: float) -> None: ...

    def computed_dense(self, layer: int, start: float, end: float) -> None: ...

    def predicted(self, event: str, layer: int, start: float, end: float) -> None: ...

    def step(self, num_tokens: int, start: float, end: float) -> None: ...

    def close(self) -> None: ...


class TierLink:
    """A tier, the ring that fills it, and what that has moved."""

    def __init__(self, name: str, tier: CacheTier, ring: Ring):
        self.name = name
        self.tier = tier
        self.ring = ring
        self.busy_seconds = 0.0
        """Total time of successful transfers."""
        self.moved_bytes = 0
        """Bytes of successful transfers."""
        self.prefetches: dict[Expert, int] = {}
        """Tickets of the prefetches in the ring, in the order of their submission."""
        self.prefetched_bytes = 0
        """Bytes of these."""
        self.bytes_per_second = 0.0
        """Decaying mean; 0 before the first transfer."""
        self._track_ends: list[float] = []
        """When the last transfer on each track of a timeline ended."""

    def track(self, start: float, end: float) -> int:
        """Returns the first track of a timeline on which the transfer overlaps with no other."""
        ends = self._track_ends
        number = next((i for i, last in enumerate(ends) if last <= start), len(ends))
        ends[number : number + 1] = [end]
        return number

    def takes_prefetch(self, ahead_seconds: float) -> bool:
        """Returns whether another prefetch belongs into the ring, which holds so much ahead."""
        is_idle_soon = self.prefetched_bytes < ahead_seconds * self.bytes_per_second
        return is_idle_soon or len(self.prefetches) < LEAST_AHEAD


class TransferLoop:
    """Submits what the tiers need, in their order, and books what arrives.

    Args:
        links: By device, the computing tier first.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        *,
        timeline: TimelineSink | None = None,
    ):
        self.links = tuple(links)
        self.timeline = timeline
        self.stall_seconds = 0.0
        """Time in which the computation waited for bytes."""
        self._running: dict[int, tuple[TierLink, TransferTask]] = {}
        """What was submitted and has not arrived, by ticket."""
        self._num_submitted = 0
        self._ahead: set[int] = set()
        """Tickets of transfers that the computation waits for: the tiers know them as arrived."""
        self._has_news = False
        """An expert has arrived since `wait_for` looked."""
        self._last_event = math.inf
        self._longest_pause = 0.0
        """Seconds between two events, a maximum that decays by `PAUSE_MEMORY`."""

    # ---- at each event

    def pump(self, is_idle: bool = False) -> None:
        """Books what has arrived and submits what the tiers need next.

        Args:
            is_idle: No event may come for long: submit all that the tiers would fetch in idle time.
        """
        now = self._read_clock()
        self._longest_pause = max(now - self._last_event, PAUSE_MEMORY * self._longest_pause)
        self._last_event = now
        self.book()
        for link in self.links:  # what a tier requests of the one below can start at once
            if link.ring.has_room() and (link.prefetches or link.tier.may_start()):
                self._fill(link, is_idle)

    def book(self) -> None:
        """Books what has arrived: calls `_finish` with it, unless `wait` has."""

    def _fill(self, link: TierLink, is_idle: bool) -> None:
        tier, ring = link.tier, link.ring
        if link.prefetches:
            self._take_back_outdated(link)
        while tier.queue.requested and ring.has_room():
            task = tier.next_task(True)
            if task is not None:
                self._submit(link, task)
            elif not (tier.lacks_slots and self._take_back_last(link)):
                break
        ahead = max(AHEAD_SECONDS, min(AHEAD_PAUSES * self._longest_pause, MOST_AHEAD_SECONDS))
        while ring.has_room() and (is_idle or link.takes_prefetch(ahead)):
            task = tier.next_task()
            if task is None:
                break
            self._submit(link, task)

    def _submit(self, link: TierLink, task: TransferTask) -> None:
        ticket = self._num_submitted
        self._num_submitted += 1
        self._running[ticket] = link, task
        if not task.high:
            link.prefetches[task.expert] = ticket
            link.prefetched_bytes += task.num_bytes
        link.ring.submit(ticket, task)

    def _take_back_outdated(self, link: TierLink) -> None:
        """Takes back prefetches that are cancelled, or requested: those are submitted anew."""
        is_low = link.tier.queue.is_low
        for expert, ticket in list(link.prefetches.items()):
            if not is_low(expert):
                self._take_back(ticket)

    def _take_back_last(self, link: TierLink) -> bool:
        """Takes back the latest prefetch that has not begun; returns whether there was one."""
        return any(self._take_back(ticket) for ticket in reversed(list(link.prefetches.values())))

    def _take_back(self, ticket: int) -> bool:
        link, task = self._running[ticket]
        if not link.ring.cancel(ticket):
            return False
        self._forget(ticket, link, task)
        link.tier.retry(task)
        return True

    def trim(self) -> None:
        """Takes back what was submitted for idle time and has not begun, the last first."""
        for link in self.links:
            while not link.takes_prefetch(AHEAD_SECONDS) and self._take_back_last(link):
                pass

    # ---- ends of transfers

    def _finish(self, ticket: int, status: int, seconds: float, end: float) -> None:
        running = self._running.get(ticket)
        if running is None:
            return  # it was given up, or does not concern the tiers
        link, task = running
        if not link.ring.settle(ticket, status):
            return  # it goes on, on a slower path
        self._forget(ticket, link, task)
        self._complete(ticket, link, task, seconds, end)

    def _forget(self, ticket: int, link: TierLink, task: TransferTask) -> None:
        del self._running[ticket]
        self._forget_prefetch(ticket, link, task)

    def _forget_prefetch(self, ticket: int, link: TierLink, task: TransferTask) -> None:
        if not task.high and link.prefetches.get(task.expert) == ticket:
            del link.prefetches[task.expert]
            link.prefetched_bytes -= task.num_bytes

    def _complete(
        self,
        ticket: int,
        link: TierLink,
        task: TransferTask,
        seconds: float,
        end: float,
    ) -> None:
        if ticket in self._ahead:
            self._ahead.remove(ticket)
            self._end_joined(ticket, link, task, end)
        else:
            self._arrive(link, task)
        link.busy_seconds += seconds
        link.moved_bytes += task.num_bytes
        speed = task.num_bytes / max(seconds, 1e-6)
        before = link.bytes_per_second or speed
        link.bytes_per_second = MEMORY * before + (1 - MEMORY) * speed
        if self.timeline is not None:
            start = end - seconds
            track = f"{link.name} {link.track(start, end) + 1}"
            self.timeline.transferred(link.name, task, start, end, track=track)

    def _arrive(self, link: TierLink, task: TransferTask) -> None:
        link.tier.complete(task)
        if link.tier.is_ready(task.expert):
            self._has_news = True

    def _end_joined(self, ticket: int, link: TierLink, task: TransferTask, end: float) -> None:
        """Ends a transfer that the tiers have known as arrived since `_join`."""

    # ---- waiting

    def wait_for(self, cache: DeviceCache, layer: int, candidates: Sequence[int]) -> int:
        """Returns the first candidate that is ready, at once or when one is.

        Raises:
            TransferError: One of them could not be read.
        """
        is_waiting, started = False, 0.0
        self._has_news = True
        while True:
            self.pump()
            ready = cache.first_ready(layer, candidates) if self._has_news else None
            if ready is not None:
                if is_waiting:
                    self._record_stall(layer, started)
                return ready
            self._has_news = False
            if self._join(layer, candidates) or cache.displace_early(layer):
                continue
            self._check(layer, candidates)
            if not is_waiting:
                is_waiting, started = True, self._read_clock()
            self.wait()

    def _join(self, layer: int, candidates: Sequence[int]) -> bool:  # noqa: ARG002
        """Returns whether the computation waits for the transfer of a candidate, not the host."""
        return False

    def _check(self, layer: int, candidates: Sequence[int]) -> None:
        """Raises TransferError if it is vain to wait for the candidates."""

    def _record_stall(self, layer: int, started: float) -> None:
        end = self._read_clock()
        self.stall_seconds += end - started
        if self.timeline is not None and end > started:
            self.timeline.stalled(layer, started, end)

    def wait(self) -> None:
        """Waits until something has arrived."""
        raise NotImplementedError

    def _read_clock(self) -> float:
        """Returns the time in seconds."""
        raise NotImplementedError
