"""One tier's bookkeeping: which experts its arena holds and what its link brings next.

    disk -> host memory -> device memory

The lowest tier's link reads a store; a higher tier's link copies from the tier below it, which it
asks for what is not there yet.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runtime.policy.cache import Entry, ExpertCache
from runtime.policy.counters import Counters, added
from runtime.policy.eviction import Expert
from runtime.policy.queue import TransferQueue

LAST = float("inf")
"""Urgency of what nobody has asked for."""


@dataclass(frozen=True, slots=True)
class Task:
    """Bring chunks `[first_chunk, end_chunk)` of the expert into the slot."""

    expert: Expert
    slot: int
    first_chunk: int
    end_chunk: int
    num_bytes: int
    high: bool
    """Asked for by a router, not only predicted."""
    source_slot: int | None
    """Where the tier below holds the chunks; None: the store does."""


class Tier:
    """Not thread-safe: the driver holds one lock around every call.

    A claim is somebody's need of an expert: a router's until it is computed, or that of the tier
    above until it has copied it. A claimed expert is fetched before everything predicted, and once
    it has a slot it keeps it until the claim is released.

    Args:
        chunk_bytes: of each layer's experts.
        chunked: fetch linear layer by linear layer (promoe 5.1); off: whole experts.
        fills_idle: bring what the eviction policy wishes for while nothing else is asked for.
    """

    def __init__(
        self,
        cache: ExpertCache,
        *,
        chunk_bytes: Sequence[Sequence[int]],
        chunked: bool,
        below: "Tier | None" = None,
        fills_idle: bool = False,
    ):
        self.cache = cache
        self.queue = TransferQueue()
        self.counters = [Counters() for _ in chunk_bytes]
        self.below = below
        self._above: Tier | None = None
        if below is not None:
            below._above = self
        self._chunk_bytes = tuple(map(tuple, chunk_bytes))
        self._num_chunks = tuple(map(len, chunk_bytes))
        self._entries = cache.entries
        self._chunked = chunked
        self.fills_idle = fills_idle
        self._refused = -1  # the cache's changes when there was no wish, or no way was made for it
        self._claims: Counter[Expert] = Counter()
        """Claims of experts that have no slot yet; they become pins when they get one."""
        self._asked: set[Expert] = set()
        """What this tier has claimed of the tier below."""
        self._copies: Counter[Expert] = Counter()
        """Copies to the tier above that are reading an expert's slot now."""
        self.num_asks = 0
        """How often something new was asked of the tier below: its link may have to be woken."""
        self.late: set[Expert] = set()
        """Predicted, but not here when a router asked."""

    def total(self) -> Counters:
        """The layers' counters added up."""
        return added(self.counters)

    def fill(self, num_experts: int, *, owns: Callable[[Expert], bool] = lambda _: True) -> None:
        """As after loading: every slot of an empty tier holds an expert, the first layers' first.

        An arena that is divided among the layers gets each layer's first ones.
        """
        for layer, num_chunks in enumerate(self._num_chunks):
            own = [e for e in range(num_experts) if owns((layer, e))]
            for e in own[: self.cache.share(layer)]:
                if self.cache.is_full(layer):
                    break
                entry, _ = self.cache.admit((layer, e))
                assert entry is not None
                entry.ready_chunks = num_chunks

    @property
    def is_top(self) -> bool:
        """Whether this is the tier that computes."""
        return self._above is None

    # ---- what is here

    def num_chunks(self, expert: Expert) -> int:
        """Chunks that the expert is fetched in."""
        return self._num_chunks[expert[0]]

    def is_ready(self, expert: Expert) -> bool:
        """All chunks have arrived."""
        entry = self._entries.get(expert)
        return entry is not None and entry.ready_chunks == self._num_chunks[expert[0]]

    def progress(self, expert: Expert) -> float:
        """Larger is sooner ready; -1 when the expert has no slot."""
        entry = self._entries.get(expert)
        if entry is None:
            return -1.0
        return entry.ready_chunks + 0.5 * entry.in_flight

    # ---- what is needed

    def claim(self, expert: Expert) -> None:
        """Somebody needs the expert; to be released once."""
        entry = self._entries.get(expert)
        if entry is None:
            self._claims[expert] += 1
        else:
            entry.pins += 1
            self.cache.used(expert)
        if not self.is_ready(expert):
            self.queue.push_high(expert)

    def hold(self, expert: Expert) -> None:
        """A resident expert keeps its slot, though nobody asks for it; to be released once."""
        self._entries[expert].pins += 1

    def release(self, expert: Expert) -> None:
        """The need is over: the expert was computed or copied, or is not wanted any more.

        What has not fully arrived and nobody else claims gives its slot back.
        """
        entry = self._entries.get(expert)
        if entry is None:
            assert self._claims[expert] > 0, expert
            self._claims[expert] -= 1
            claimed = self._claims[expert] > 0
            if not claimed:
                del self._claims[expert]
        else:
            assert entry.pins > 0, (expert, entry)
            entry.pins -= 1
            claimed = entry.pins > 0
        if claimed:
            return
        self.queue.remove(expert)
        self._withdraw(expert)
        if entry is not None and not self.is_ready(expert):
            self.late.discard(expert)
            self._drop_if_idle(expert)

    def is_claimed(self, expert: Expert) -> bool:
        """Whether anybody needs the expert now."""
        entry = self._entries.get(expert)
        return self._claims[expert] > 0 if entry is None else entry.pins > 0

    def speculate(self, expert: Expert, priority: float) -> None:
        """A forecast names the expert; the smaller `priority`, the sooner."""
        if self._entries.get(expert) is not None:
            self.cache.predicted(expert)
        if not self.is_ready(expert):
            self.queue.push_low(expert, priority)

    def drop_speculation(self, layer: int, *, keep: frozenset[int] = frozenset()) -> None:
        """Forgets what was only predicted for a layer, but `keep`; bytes that arrived stay."""
        for expert in self.queue.remove_low_of_layer(layer, keep=keep):
            if not self.is_claimed(expert):
                self._withdraw(expert)
        if self.below is not None:
            self.below.drop_speculation(layer, keep=keep)

    def _withdraw(self, expert: Expert) -> None:
        if expert in self._asked:
            assert self.below is not None
            self._asked.remove(expert)
            self.below.release(expert)

    def drop(self, expert: Expert) -> None:
        """Takes a resident expert's slot back, unless somebody needs it, it is on its way, or the
        eviction policy has set it aside for good.
        """
        entry = self._entries.get(expert)
        if entry is None or entry.pins or entry.in_flight or self.cache.policy.stays(expert):
            return
        self._count_dropped(expert, self.cache.remove(expert))

    def _drop_if_idle(self, expert: Expert) -> None:
        entry = self._entries.get(expert)
        if entry is not None and not (self.is_ready(expert) or entry.in_flight or entry.pins):
            self._count_dropped(expert, self.cache.remove(expert))

    # ---- what the link does

    @property
    def may_start(self) -> bool:
        """Whether `next_task` may have one; where it may not, asking is saved."""
        wishes = self.fills_idle and self._refused != self.cache.num_changes
        return wishes or len(self.queue) > 0

    def next_task(self, *, high_only: bool = False) -> Task | None:
        """ProMoE algorithm 1, lines 2-8: the next chunk for the link, or None.

        A claimed expert that cannot get a slot (all of them hold experts still to be computed)
        waits; the link does not. The same holds for one that the tier below has yet to bring.
        """
        for expert in self.queue.high():
            if (task := self._start(expert, high=True)) is not None:
                return task
        if high_only:
            return None
        first = self.queue.first_low()
        if first is not None and (task := self._start(first, high=False)) is not None:
            return task
        for expert in self.queue.low():
            if (task := self._start(expert, high=False)) is not None:
                return task
        return self._idle_task()

    def _idle_task(self) -> Task | None:
        """What the cache lacks most, behind all that is asked for from now on."""
        if not self.fills_idle or self._refused == self.cache.num_changes:
            return None
        expert = self.cache.wish()
        if expert is not None and not self.queue.is_low(expert) and not self.is_claimed(expert):
            self.queue.push_low(expert, LAST)
            if (task := self._start(expert, high=False)) is not None:
                return task
            if expert not in self._entries:  # else the tier below is asked for it first
                self.queue.remove(expert)
        self._refused = self.cache.num_changes
        return None

    def _start(self, expert: Expert, *, high: bool) -> Task | None:
        entry = self._entries.get(expert)
        if entry is None:
            entry, dropped = self.cache.admit(expert, forecast=not high)
            if dropped is not None:
                self._count_dropped(*dropped)
            if entry is None:
                return None
            entry.pins = self._claims.pop(expert, 0)
        if entry.in_flight:
            return None
        first = entry.ready_chunks
        end = first + 1 if self._chunked else self.num_chunks(expert)
        source_slot = None
        if self.below is not None:
            source_slot = self._source_slot(expert, end, high=high)
            if source_slot is None:
                return None
        entry.in_flight = True
        num_bytes = sum(self._chunk_bytes[expert[0]][first:end])
        return Task(expert, entry.slot, first, end, num_bytes, high, source_slot)

    def _source_slot(self, expert: Expert, end_chunk: int, *, high: bool) -> int | None:
        """The slot below, locked for the copy, or None after asking for what is missing there."""
        below = self.below
        assert below is not None
        if high and expert not in self._asked:
            self._asked.add(expert)
            self.num_asks += 1
            below.count_asked(expert)
            below.claim(expert)
        source = below._entries.get(expert)
        if source is None or source.ready_chunks < end_chunk:
            if not (high or below.queue.is_low(expert) or below.queue.is_high(expert)):
                self.num_asks += 1
                below.speculate(expert, self.queue.priority(expert))
            return None
        source.pins += 1
        below._copies[expert] += 1
        return source.slot

    def _unlock_source(self, expert: Expert) -> None:
        if self.below is not None:
            source = self.below._entries.get(expert)
            assert source is not None
            assert source.pins > 0, (expert, source)
            source.pins -= 1
            self.below._copies[expert] -= 1

    def count_asked(self, expert: Expert) -> None:
        """Hits and misses of a lower tier: what the tier above needed now."""
        counters = self.counters[expert[0]]
        counters.requests += 1
        progress = self.progress(expert)
        if self.is_ready(expert):
            counters.hits += 1
        elif progress <= 0:
            counters.misses += 1
        else:
            counters.joins += 1

    def done(self, task: Task) -> None:
        """ProMoE algorithm 1, line 10: the task's bytes are in the slot."""
        self._unlock_source(task.expert)
        entry = self._entries.get(task.expert)
        assert entry is not None
        assert entry.in_flight
        entry.in_flight = False
        entry.ready_chunks = task.end_chunk
        counters = self.counters[task.expert[0]]
        counters.bytes_moved += task.num_bytes
        if not task.high:
            counters.bytes_prefetched += task.num_bytes
            if self.queue.is_high(task.expert) or entry.pins:
                counters.bytes_used += task.num_bytes
            else:
                entry.speculative_bytes += task.num_bytes
        if task.expert in self.late:
            counters.bytes_late += task.num_bytes
        if entry.ready_chunks == self.num_chunks(task.expert):
            self.queue.remove(task.expert)
            self.late.discard(task.expert)
            self._withdraw(task.expert)

    def failed(self, task: Task) -> None:
        """The task's bytes did not arrive; the expert leaves the queue and what it held of a slot.

        A claimed expert keeps its slot until its claim is released.
        """
        self._unlock_source(task.expert)
        entry = self._entries.get(task.expert)
        assert entry is not None
        entry.in_flight = False
        self._give_up(task.expert)

    def _give_up(self, expert: Expert) -> None:
        self.queue.remove(expert)
        self.late.discard(expert)
        self._withdraw(expert)
        self._drop_if_idle(expert)
        if self._above is not None:
            # It would ask again and again for what does not come.
            self._above._give_up(expert)

    def retry(self, task: Task) -> None:
        """The task ended without a word (its worker died); nobody writes into the slot any more."""
        self._unlock_source(task.expert)
        entry = self._entries.get(task.expert)
        assert entry is not None
        entry.in_flight = False
        if not (entry.pins or self.queue.is_low(task.expert)):
            self._drop_if_idle(task.expert)

    def lose(self, task: Task) -> bool:
        """The task may still be writing and cannot be waited for: its slot is set aside.

        The slot comes back with `restore`; until then the expert, if it is needed, takes another.
        Returns False, having done nothing, while a copy reads from the same slot.
        """
        if self._copies[task.expert]:
            return False
        entry = self._entries.get(task.expert)
        assert entry is not None
        counters = self.counters[task.expert[0]]
        counters.bytes_wasted += entry.speculative_bytes
        pins = entry.pins
        entry.pins = 0
        self.cache.quarantine(task.expert)
        if pins:
            self._claims[task.expert] = pins
            self.queue.push_high(task.expert)
        return True

    def restore(self, task: Task) -> None:
        """A transfer that had been given up has ended after all."""
        self._unlock_source(task.expert)
        self.cache.restore(task.slot)

    def repair(self, under_way: Collection[Task], *, copies: Collection[Task]) -> None:
        """Makes the books agree with what is under way, after one of these calls was cut short.

        Nothing is claimed or wanted afterwards.

        Args:
            under_way: this tier's transfers.
            copies: those of the tier above, which read this tier's slots.
        """
        self.queue.clear()
        self.late.clear()
        self._claims.clear()
        self._asked.clear()
        self._copies = Counter(task.expert for task in copies)
        slots = {task.slot for task in under_way}
        for expert, entry in list(self.cache.entries.items()):
            entry.pins = self._copies[expert]
            entry.in_flight = entry.slot in slots
            self._drop_if_idle(expert)

    def _count_dropped(self, expert: Expert, entry: Entry) -> None:
        counters = self.counters[expert[0]]
        counters.evictions += 1
        counters.bytes_wasted += entry.speculative_bytes
