"""The transfers of a live model, which may fail, hang, or be cut short."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from runtime.errors import Fault, TransferError
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import TransferTask
from runtime.transfer.loop import TierLink, TimelineSink, TransferLoop
from runtime.transfer.ring import ARRIVED, Arrivals

log = logging.getLogger(__name__)

DRAIN_SECONDS, DRAIN_CHECKS = 0.02, 5
"""After an interrupt, transfers have ended that no ring runs in so many checks in a row."""
MAX_LOST = 4
"""Hanging transfers in whose place other threads read."""
PATIENCE = 10
"""Requests fail when so many transfers hang and none has ended for so many times the watchdog's
time: the disk does not answer any read."""


class WatchedLoop(TransferLoop):
    """A transfer loop that knows what has failed, and sets aside what hangs.

    Args:
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
        super().__init__(links, timeline=timeline)
        self._arrivals = arrivals
        self.errors: dict[Expert, TransferError] = {}
        """The failed reads of experts that have not been requested again. One of a prefetch that is
        never requested is only logged."""
        self.faults: Counter[Fault] = Counter()
        """Failed transfers since the model was loaded, unused prefetches included."""
        self.watchdog_seconds = watchdog_seconds
        self._lost: set[int] = set()
        """Tickets of transfers that hang; their slots are set aside."""
        self._joined: set[Expert] = set()
        """Experts that were requested when their transfer had begun: a failed one is repeated."""
        self._can_join = any(link.ring.can_join for link in self.links)
        self._repeated: set[tuple[TierLink, Expert]] = set()
        """Experts whose transfer is repeated because its thread has died; not a second time."""
        self._moved_at = time.monotonic()
        """When the last transfer ended, or the first one began next to those that hang."""

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

    # ---- ends of transfers

    def book(self) -> None:
        for link in self.links:
            link.ring.poll()
        for ticket, status, seconds, end in self._arrivals.take():
            self._finish(ticket, status, seconds, end)

    def _submit(self, link: TierLink, task: TransferTask) -> None:
        if not self.is_moving:
            self._moved_at = time.monotonic()
        super()._submit(link, task)

    def _complete(
        self, ticket: int, link: TierLink, task: TransferTask, seconds: float, end: float
    ) -> None:
        self._moved_at = time.monotonic()
        error = link.ring.errors.pop(ticket, None)
        if ticket in self._lost:
            log.warning("%s: a hanging transfer has ended", link.name)
            self._lost.remove(ticket)
            link.tier.restore(task)
        elif error is None:
            self._joined.discard(task.expert)
            self._repeated.discard((link, task.expert))
            super()._complete(ticket, link, task, seconds, end)
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

    def _join(self, layer: int, candidates: Sequence[int]) -> bool:
        if not self._can_join:
            return False
        for ticket, (link, task) in self._running.items():
            number, e = task.expert
            if number == layer and e in candidates and self._join_copy(ticket, link, task):
                return True
        return self.join_prefetch(layer)

    def join_prefetch(self, layer: int) -> bool:
        """Lets the computation wait for a prefetch whose slot a request of the layer needs.

        The requested copy comes after it in any case. Returns whether there was one.
        """
        for ticket, (link, task) in self._running.items():
            tier = link.tier
            if not tier.lacks_slots or tier.is_requested(task.expert):
                continue
            is_in_reach = not tier.cache.per_layer or task.expert[0] == layer
            if is_in_reach and self._join_copy(ticket, link, task):
                return True
        return False

    def _join_copy(self, ticket: int, link: TierLink, task: TransferTask) -> bool:
        if ticket in self._ahead or not link.ring.can_join:
            return False
        link.ring.join(ticket)
        self._ahead.add(ticket)
        self._forget_prefetch(ticket, link, task)
        if link.tier.below is not None:  # the copy reads its source until it has ended
            link.tier.below.begin_copy(task.expert, task.end_chunk)
        self._arrive(link, task)
        return True

    def _end_joined(self, ticket: int, link: TierLink, task: TransferTask, end: float) -> None:
        if link.tier.below is not None:
            link.tier.below.end_copy(task.expert)
        stall = link.ring.take_stall(ticket)
        self.stall_seconds += stall
        if self.timeline is not None and stall:
            self.timeline.stalled(task.expert[0], end - stall, end)

    def _check(self, layer: int, candidates: Sequence[int]) -> None:
        for e in candidates:
            if (error := self.errors.get((layer, e))) is not None:
                raise error
        if self.is_frozen:
            raise TransferError(
                f"{len(self._lost)} reads of experts have hung for more than "
                f"{self.watchdog_seconds} s; check the disk, then repeat the request"
            )
        if not self.is_moving:
            raise TransferError(
                f"internal error: layer {layer}: experts {list(candidates)} were requested but no "
                "transfer is under way. Reload the model and report this."
            )

    def wait(self) -> None:
        """Waits until something has arrived, and looks for transfers that hang."""
        # The host waits for a copy only where no read can bring news.
        only_copies = self._can_join and all(r.ring.can_join for r, _ in self._running.values())
        for link in self.links:
            if (only_copies or not link.ring.can_join) and link.ring.wait_first():
                return
        if not self._arrivals.wait(self.watchdog_seconds / 2):
            self.check_hung()

    def _read_clock(self) -> float:
        return time.perf_counter()

    def check_hung(self) -> None:
        """Sets the slots of hanging transfers aside; other threads take the place of theirs."""
        for link in self.links:
            for ticket, seconds in link.ring.running():
                if seconds > self.watchdog_seconds and ticket not in self._lost | self._ahead:
                    self._lose(ticket, seconds)

    def _lose(self, ticket: int, seconds: float) -> None:
        link, task = self._running[ticket]
        if link.tier.quarantine(task):
            self._give_up(ticket, link, task, seconds)

    def _give_up(self, ticket: int, link: TierLink, task: TransferTask, seconds: float) -> None:
        if len(self._lost) + 1 < MAX_LOST:  # first: it is repeated if an interrupt comes here
            link.ring.replace_thread(ticket)
        self._lost.add(ticket)
        # A ring may interrupt it yet, but nothing is to be taken back: its slot is not the tier's.
        self._forget_prefetch(ticket, link, task)
        self.faults[Fault.HUNG] += 1
        log.error(
            "%s: the transfer of layer %d expert %d has taken %.1f s; its slot is set aside",
            link.name,
            *task.expert,
            seconds,
        )

    def drain(self) -> None:
        """Takes back all transfers and waits for those that run, after a step was cut short.

        Tiers must be reset afterwards, but for the slots in `lost_slots`.
        """
        self._lost &= self._running.keys()  # one that ended when the interrupt came
        for ticket, (link, task) in list(self._running.items()):
            if ticket not in self._lost and link.ring.cancel(ticket):
                self._forget(ticket, link, task)
        num_idle = 0
        while self.is_moving and num_idle < DRAIN_CHECKS:
            for link in self.links:
                link.ring.poll()  # what has ended long ago does not hang
            running = dict(pair for link in self.links for pair in link.ring.running())
            for ticket in running.keys() & self._running.keys() - self._lost:
                if running[ticket] > self.watchdog_seconds:
                    self._give_up(ticket, *self._running[ticket], running[ticket])
            # What the interrupted call had taken does not arrive again.
            num_idle = 0 if running.keys() - self._lost else num_idle + 1
            self._arrivals.wait(DRAIN_SECONDS)
            for link in self.links:
                link.ring.wait_first()
            for ticket, status, *_ in self._arrivals.take():
                self._drop(ticket, status)
        for ticket in self._running.keys() - self._lost:
            self._drop(ticket, ARRIVED)
        for link in self.links:
            link.ring.errors.clear()
            link.prefetches.clear()
            link.prefetched_bytes = 0
        self._joined.clear()
        self._ahead.clear()

    def _drop(self, ticket: int, status: int) -> None:
        """Forgets a transfer that has ended, unless it goes on, on a slower path."""
        if ticket in self._running:
            ring = self._running[ticket][0].ring
            if ring.settle(ticket, status) or ring.cancel(ticket):
                self._lost.discard(ticket)
                del self._running[ticket]

    def lost_slots(self, link: TierLink) -> frozenset[int]:
        """Returns the slots of a tier that hanging transfers may still write to."""
        lost = (self._running[ticket] for ticket in self._lost)
        return frozenset(task.slot for other, task in lost if other is link)

    def close(self) -> None:
        """Ends the rings; what hangs is left behind. May be called twice."""
        for link in self.links:
            link.ring.close(self.watchdog_seconds)
