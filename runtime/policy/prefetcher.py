"""promoe algorithms 1 and 2 over the cache and the queue, and what they count."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.policy.cache import Entry, ExpertCache
from runtime.policy.counters import Counters
from runtime.policy.eviction import Expert
from runtime.policy.queue import TransferQueue


@dataclass(frozen=True)
class Techniques:
    """Each of promoe's techniques has its own switch (figure 12's ablation)."""

    chunked: bool = True
    """5.1: an expert is fetched linear layer by linear layer; off: whole."""
    early_preemption: bool = True
    """5.2: all of a layer's experts are asked for when its router has spoken; off: one by one."""
    reordered: bool = True
    """5.3: compute in order of readiness; off: in order of expert id."""


@dataclass(frozen=True)
class Task:
    """Bring chunks `[first_chunk, end_chunk)` of the expert into the slot."""

    expert: Expert
    slot: int
    first_chunk: int
    end_chunk: int
    num_bytes: int
    high: bool
    """Asked for by a router, not only predicted."""


class Prefetcher:
    """Decides what the link brings next and in which order a layer's experts are computed.

    Not thread-safe: the driver holds one lock around every call.
    """

    def __init__(
        self,
        cache: ExpertCache,
        *,
        chunk_bytes: Sequence[Sequence[int]],
        techniques: Techniques,
    ):
        self.cache = cache
        self.queue = TransferQueue()
        self.techniques = techniques
        self.counters = [Counters() for _ in chunk_bytes]
        self._chunk_bytes = tuple(map(tuple, chunk_bytes))
        self._predicted: dict[int, dict[int, None]] = {}
        """What was predicted for each layer since it was last routed."""
        self._late: set[Expert] = set()

    def is_ready(self, expert: Expert) -> bool:
        """All chunks have arrived."""
        entry = self.cache.get(expert)
        return entry is not None and entry.ready_chunks == self.num_chunks(expert)

    def num_chunks(self, expert: Expert) -> int:
        """Chunks that the expert is fetched in."""
        return len(self._chunk_bytes[expert[0]])

    def predicted(self, layer: int, experts: Sequence[int], urgency: Sequence[float]) -> None:
        """Algorithm 2, PushPredictedExperts; the most wanted first.

        What a layer's share of the arena cannot hold at once is not queued: it would only push out
        what was predicted before it.
        """
        named = self._predicted.setdefault(layer, {})
        for e in experts:
            named[e] = None
        room = self.cache.share(layer)
        for e, urgent in list(zip(experts, urgency, strict=True))[:room]:
            expert = (layer, e)
            if self.cache.get(expert) is not None:
                self.cache.touch(expert)
            if not self.is_ready(expert):
                self.queue.push_low(expert, urgent)

    def cancel(self, layer: int) -> None:
        """Drops what was only predicted for a layer; its bytes that arrived stay."""
        self.queue.remove_low_of_layer(layer)
        self._predicted.pop(layer, None)

    def routed(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Algorithm 2, PushPreciseExperts: returns the order in which to compute.

        The experts that have a slot are pinned until `used`; the others are pinned when they get
        one. Cached come first, then in flight by chunks arrived, then missing.
        """
        counters = self.counters[layer]
        self._count_routed(layer, experts, counters)
        self.queue.remove_low_of_layer(layer)
        order = sorted(experts)
        if self.techniques.reordered:
            order.sort(key=lambda e: -self._progress((layer, e)))
        if self.techniques.early_preemption:
            for e in order:
                self._demand((layer, e))
        return order

    def demand(self, expert: Expert) -> None:
        """Asks for one expert now: what happens without early preemption, when it is its turn."""
        if not self.techniques.early_preemption:
            self._demand(expert)

    def _demand(self, expert: Expert) -> None:
        entry = self.cache.get(expert)
        if entry is not None:
            entry.pins += 1
            self.cache.touch(expert)
        if not self.is_ready(expert):
            self.queue.push_high(expert)

    def _progress(self, expert: Expert) -> float:
        entry = self.cache.get(expert)
        if entry is None:
            return -1.0
        return entry.ready_chunks + 0.5 * entry.in_flight

    def _count_routed(self, layer: int, experts: Sequence[int], counters: Counters) -> None:
        named = self._predicted.pop(layer, {})
        counters.predicted += len(named)
        counters.predicted_in_time += sum(self.is_ready((layer, e)) for e in named)
        for e in experts:
            expert = (layer, e)
            entry = self.cache.get(expert)
            counters.requests += 1
            if entry is None or (entry.ready_chunks == 0 and not entry.in_flight):
                counters.misses += 1
            elif self.is_ready(expert):
                counters.hits += 1
                counters.needed_predicted_in_time += e in named
            else:
                counters.joins += 1
            if entry is not None:
                counters.bytes_used += entry.speculative_bytes
                entry.speculative_bytes = 0
            if e in named and not self.is_ready(expert):
                self._late.add(expert)

    def used(self, expert: Expert) -> None:
        """The expert's computation is over; it may be dropped when somebody needs the slot."""
        entry = self.cache.get(expert)
        assert entry is not None, expert
        assert entry.pins > 0, expert
        entry.pins -= 1

    def next_task(self) -> Task | None:
        """Algorithm 1, lines 2-8: the next chunk for the link, or None when it has nothing to do.

        A high-priority expert that cannot get a slot (all of them hold experts still to be
        computed) waits; the link does not.
        """
        for expert in self.queue.high():
            task = self._start(expert, high=True)
            if task is not None:
                return task
        first = self.queue.first_low()
        if first is None:
            return None
        task = self._start(first, high=False)
        if task is not None:
            return task
        for expert in self.queue.low():
            task = self._start(expert, high=False)
            if task is not None:
                return task
        return None

    def _start(self, expert: Expert, *, high: bool) -> Task | None:
        entry = self.cache.get(expert)
        if entry is None:
            entry, dropped = self.cache.admit(expert)
            if dropped is not None:
                self._count_dropped(*dropped)
            if entry is None:
                return None
            if high:
                entry.pins += 1
        if entry.in_flight:
            return None
        entry.in_flight = True
        first = entry.ready_chunks
        end = first + 1 if self.techniques.chunked else self.num_chunks(expert)
        num_bytes = sum(self._chunk_bytes[expert[0]][first:end])
        return Task(expert, entry.slot, first, end, num_bytes, high)

    def _count_dropped(self, expert: Expert, entry: Entry) -> None:
        counters = self.counters[expert[0]]
        counters.evictions += 1
        counters.bytes_wasted += entry.speculative_bytes

    def done(self, task: Task) -> None:
        """Algorithm 1, line 10: the task's bytes are in the slot."""
        entry = self.cache.get(task.expert)
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
        if task.expert in self._late:
            counters.bytes_late += task.num_bytes
        if entry.ready_chunks == self.num_chunks(task.expert):
            self.queue.remove(task.expert)
            self._late.discard(task.expert)

    def failed(self, task: Task) -> None:
        """The task's bytes did not arrive; the expert leaves the queue and what it held of a slot.

        A pinned expert keeps its slot until its holder gives it back with `abandon`.
        """
        entry = self.cache.get(task.expert)
        assert entry is not None
        entry.in_flight = False
        self.queue.remove(task.expert)
        self._late.discard(task.expert)
        if not entry.pins:
            self._count_dropped(task.expert, self.cache.remove(task.expert))

    def abandon(self, layer: int, experts: Sequence[int]) -> None:
        """A step ends without computing these: pins and requests are taken back."""
        for e in experts:
            expert = (layer, e)
            self.queue.remove(expert)
            self._late.discard(expert)
            entry = self.cache.get(expert)
            if entry is not None and entry.pins:
                entry.pins -= 1
                if (
                    entry.ready_chunks < self.num_chunks(expert)
                    and not entry.in_flight
                    and not entry.pins
                ):
                    self._count_dropped(expert, self.cache.remove(expert))

    def total(self) -> Counters:
        """The layers' counters added up."""
        total = Counters()
        for counters in self.counters:
            total.add(counters)
        return total
