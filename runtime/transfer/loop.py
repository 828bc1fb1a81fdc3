"""The transfers of one model: keeps the rings busy and books what has arrived.

Everything here runs on the model's thread, at its events. Rings move bytes meanwhile and touch no
book: requests first, then as many prefetches as the link transfers until the next event.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from runtime.errors import Fault, TransferError
from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import CacheTier, TransferTask
from runtime.transfer.ring import Arrivals, Ring
from runtime.transfer.timeline import TimelineSink

log = logging.getLogger(__name__)

AHEAD_SECONDS = 4e-3
"""Prefetches that a ring holds ahead, as time on its link: more than passes between two events of a
model, so that the link never idles. What has not begun can be taken back."""
LEAST_AHEAD = 2
"""Prefetches that a ring holds at least: one that runs, and the next."""
MEMORY = 0.9
"""Weight of the past in the mean of a link's speed."""
DRAIN_SECONDS, DRAIN_CHECKS = 0.02, 5
"""After an interrupt, transfers have ended that no ring runs in so many checks in a row."""
MAX_LOST = 4
"""Hanging transfers in whose place other threads read."""
PATIENCE = 10
"""Requests fail when so many transfers hang and none has ended for so many times the watchdog's
time: the disk does not answer any read."""


@dataclass(eq=False)
class TierLink:
    """A tier, the ring that fills it, and what that has moved."""

    name: str
    tier: CacheTier
    ring: Ring
    busy_seconds: float = 0.0
    """Total time of successful transfers."""
    moved_bytes: int = 0
    """Bytes of successful transfers."""
    prefetches: dict[Expert, int] = field(default_factory=dict)
    """Tickets of the prefetches in the ring, in the order of their submission."""
    prefetched_bytes: int = 0
    """Bytes of these."""
    bytes_per_second: float = 0.0
    """Decaying mean; 0 before the first transfer."""

    _track_ends: list[float] = field(default_factory=list)
    """When the last transfer on each track of a timeline ended."""

    def track(self, start: float, end: float) -> int:
        """Returns the first track of a timeline on which the transfer overlaps with no other."""
        ends = self._track_ends
        number = next((i for i, last in enumerate(ends) if last <= start), len(ends))
        ends[number : number + 1] = [end]
        return number

    @property
    def has_room(self) -> bool:
        """Whether another prefetch belongs into the ring."""
        is_idle_soon = self.prefetched_bytes < AHEAD_SECONDS * self.bytes_per_second
        return is_idle_soon or len(self.prefetches) < LEAST_AHEAD


class TransferLoop:
    """Submits what the tiers need, in their order, and books what arrives.

    Args:
        links: By device, the computing tier first.
        watchdog_seconds: Transfers that take longer count as hung.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        arrivals: Arrivals,
        *,
        watchdog_seconds: float,
        timeline: TimelineSink | None = None,
    ):
        self.links = tuple(links)
        self.timeline = timeline
        self.errors: dict[Expert, TransferError] = {}
        """The failed reads of experts that have not been requested again. One of a prefetch that is
        never requested is only logged."""
        self.faults: Counter[Fault] = Counter()
        """Failed transfers since the model was loaded, unused prefetches included."""
        self.watchdog_seconds = watchdog_seconds
        self._arrivals = arrivals
        self._running: dict[int, tuple[TierLink, TransferTask]] = {}
        """What was submitted and has not arrived, by ticket."""
        self._lost: set[int] = set()
        """Tickets of transfers that hang; their slots are set aside."""
        self._joined: set[Expert] = set()
        """Experts that were requested when their transfer had begun: a failed one is repeated."""
        self._repeated: set[tuple[TierLink, Expert]] = set()
        """Experts whose transfer is repeated because its thread has died; not a second time."""
        self._num_submitted = 0
        self._moved_at = time.monotonic()
        """When the last transfer ended, or the first one began."""

    @property
    def num_hanging(self) -> int:
        """Transfers that hang now; any thread may ask."""
        return sum(t in self._lost for link in self.links for t, _ in link.ring.running())

    @property
    def is_frozen(self) -> bool:
        """Whether no transfer has ended for so long that another one would hang, too."""
        waited = time.monotonic() - self._moved_at
        return len(self._lost) >= MAX_LOST and waited > PATIENCE * self.watchdog_seconds

    @property
    def is_moving(self) -> bool:
        """Whether a transfer is under way, other than those that hang."""
        return len(self._running) > len(self._lost)

    # ---- at each event

    def pump(self, *, is_idle: bool = False) -> None:
        """Books what has arrived and submits what the tiers need next.

        Args:
            is_idle: No event may come for long: submit all that the tiers would fetch in idle time.
        """
        for link in self.links:
            link.ring.poll()
        for arrival in self._arrivals.take():
            self._finish(*arrival)
        for link in self.links:
            if link.prefetches or link.tier.may_start():
                self._fill(link, is_idle)

    def _fill(self, link: TierLink, is_idle: bool) -> None:
        tier = link.tier
        if link.prefetches:
            self._take_back_outdated(link)
        while tier.queue.requested:
            task = tier.next_task(high_only=True)
            if task is not None:
                self._submit(link, task)
            elif not (tier.lacks_slots and self._take_back_last(link)):
                break
        while is_idle or link.has_room:
            task = tier.next_task()
            if task is None:
                break
            self._submit(link, task)

    def _submit(self, link: TierLink, task: TransferTask) -> None:
        ticket = self._num_submitted
        self._num_submitted += 1
        if not self._running:
            self._moved_at = time.monotonic()
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
        self._forget(ticket)
        link.tier.retry(task)
        return True

    def trim(self) -> None:
        """Takes back what was submitted for idle time and has not begun, the last first."""
        for link in self.links:
            while not link.has_room and self._take_back_last(link):
                pass

    def _forget(self, ticket: int) -> tuple[TierLink, TransferTask]:
        link, task = self._running.pop(ticket)
        if link.prefetches.get(task.expert) == ticket:
            del link.prefetches[task.expert]
            link.prefetched_bytes -= task.num_bytes
        return link, task

    # ---- ends of transfers

    def _finish(self, ticket: int, status: int, seconds: float, end: float) -> None:
        if ticket not in self._running:
            return  # `drain` has given it up
        link, task = self._running[ticket]
        if not link.ring.settle(ticket, status):
            return  # it goes on, on a slower path
        self._forget(ticket)
        self._moved_at = time.monotonic()
        error = link.ring.errors.pop(ticket, None)
        if ticket in self._lost:
            log.warning("%s: a hanging transfer has ended", link.name)
            self._lost.remove(ticket)
            link.tier.restore(task)
        elif error is None:
            self._joined.discard(task.expert)
            self._repeated.discard((link, task.expert))
            link.tier.complete(task)
            link.busy_seconds += seconds
            link.moved_bytes += task.num_bytes
            speed = task.num_bytes / max(seconds, 1e-6)
            before = link.bytes_per_second or speed
            link.bytes_per_second = MEMORY * before + (1 - MEMORY) * speed
            if self.timeline is not None:
                start = end - seconds
                track = f"{link.name} {link.track(start, end) + 1}"
                self.timeline.transferred(link.name, task, start, end, track=track)
        else:
            self._fail(link, task, error)

    def _fail(self, link: TierLink, task: TransferTask, error: TransferError) -> None:
        log.warning("layer %d expert %d: %s", *task.expert, error)
        self.faults[error.fault] += 1
        expert, is_repeated = task.expert, task.expert in self._joined
        if error.fault is Fault.DIED and (link, expert) not in self._repeated:
            self._repeated.add((link, expert))
            is_repeated = True
        self._joined.discard(expert)
        if is_repeated:
            link.tier.retry(task)
        else:
            self._repeated.discard((link, expert))
            self.errors[expert] = error
            link.tier.fail(task)

    def forget_failures(self, layer: int, experts: Collection[int]) -> None:
        """Drops earlier errors of newly requested experts, so that they are read again."""
        if self.errors:
            for e in experts:
                self.errors.pop((layer, e), None)
        if self._running:
            requested = {(layer, e) for e in experts}
            self._joined |= {t.expert for _, t in self._running.values() if t.expert in requested}

    # ---- waiting, and what hangs

    def wait(self) -> None:
        """Waits until something has arrived, and looks for transfers that hang.

        Raises:
            TransferError: So many reads hang that another would hang, too.
        """
        if self.is_frozen:
            raise TransferError(
                f"{len(self._lost)} reads of experts have hung for more than "
                f"{self.watchdog_seconds} s; check the disk, then repeat the request"
            )
        for link in self.links:
            if link.ring.wait_first():
                return
        if not self._arrivals.wait(self.watchdog_seconds / 2):
            self.check_hung()

    def check_hung(self) -> None:
        """Sets the slots of hanging transfers aside; other threads take the place of theirs."""
        for link in self.links:
            for ticket, seconds in link.ring.running():
                if seconds > self.watchdog_seconds and ticket not in self._lost:
                    self._lose(ticket, seconds)

    def _lose(self, ticket: int, seconds: float) -> None:
        link, task = self._running[ticket]
        if not link.tier.quarantine(task):
            return
        self._lost.add(ticket)
        self.faults[Fault.HUNG] += 1
        log.error(
            "%s: the transfer of layer %d expert %d has taken %.1f s; its slot is set aside",
            link.name,
            *task.expert,
            seconds,
        )
        if len(self._lost) < MAX_LOST:
            link.ring.replace_thread(ticket)

    def drain(self) -> None:
        """Takes back all transfers and waits for those that run, after a step was cut short.

        Tiers must be reset afterwards, but for the slots in `lost_slots`.
        """
        for ticket, (link, _) in list(self._running.items()):
            if ticket not in self._lost and link.ring.cancel(ticket):
                self._forget(ticket)
        num_idle = 0
        while self.is_moving and num_idle < DRAIN_CHECKS:
            running = dict(pair for link in self.links for pair in link.ring.running())
            hung = {t for t, seconds in running.items() if seconds > self.watchdog_seconds}
            self._lost |= hung & self._running.keys()
            # What the interrupted call had taken does not arrive again.
            num_idle = 0 if running.keys() - self._lost else num_idle + 1
            self._arrivals.wait(DRAIN_SECONDS)
            for link in self.links:
                link.ring.wait_first()
            for ticket, *_ in self._arrivals.take():
                self._lost.discard(ticket)
                self._running.pop(ticket, None)
        for link in self.links:
            link.ring.errors.clear()
            link.prefetches.clear()
            link.prefetched_bytes = 0
        self._running = {t: running for t, running in self._running.items() if t in self._lost}
        self._joined.clear()

    def lost_slots(self, link: TierLink) -> frozenset[int]:
        """Returns the slots of a tier that hanging transfers may still write to."""
        lost = (self._running[ticket] for ticket in self._lost)
        return frozenset(task.slot for other, task in lost if other is link)

    def close(self) -> None:
        """Ends the rings; what hangs is left behind. May be called twice."""
        for link in self.links:
            link.ring.close(self.watchdog_seconds)
