"""One tier of a cache: which experts it holds and what its link transfers next.

    disk -> host memory -> device memory

The lowest tier's link reads a store. A higher tier's link copies from the tier below, of which the
higher tier requests what is missing there.
"""

from bisect import bisect_left
from collections.abc import Collection, Container, Sequence
from itertools import accumulate
from typing import Self

from runtime.policy.cache import CacheEntry, ExpertCache, Victims
from runtime.policy.counters import CacheCounters
from runtime.policy.eviction.base import Expert
from runtime.policy.queue import TransferQueue


class TransferTask:
    """A transfer of chunks `[first_chunk, end_chunk)` of the expert into the slot.

    Args:
        expert: What to transfer.
        slot: Where to.
        first_chunk: The first chunk.
        end_chunk: The chunk after the last.
        num_bytes: Size of the chunks.
        high: Requested by a router, not only predicted.
        source_slot: Slot of the chunks in the tier below; None: they are in the store.
    """

    __slots__ = ("end_chunk", "expert", "first_chunk", "high", "num_bytes", "slot", "source_slot")

    def __init__(
        self,
        expert: Expert,
        slot: int,
        first_chunk: int,
        end_chunk: int,
        num_bytes: int,
        high: bool,
        source_slot: int | None,
    ) -> None:
        self.expert = expert
        self.slot = slot
        self.first_chunk = first_chunk
        self.end_chunk = end_chunk
        self.num_bytes = num_bytes
        self.high = high
        self.source_slot = source_slot

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"TransferTask({fields})"


class CacheTier:
    """Bookkeeping of one tier; one thread calls it.

    A request is the need of an expert: a router's until it is computed, or that of the tier above
    until it has copied it. Requested experts are transferred before all prefetches. Once they have
    a slot they are pinned to it until the request is released.

    Args:
        cache: Slots of this tier.
        chunk_bytes: Bytes of each chunk, of each layer's experts.
        chunked: Transfer chunk by chunk (ProMoE, section 5.1); off: whole experts.
        order: Number of the order in which predicted experts are transferred.
        below: The tier to copy from; None: the store.
        whole_requests: Transfer the rest of a requested expert at once: nothing may interrupt it.
        least_prefetch: Bytes that a prefetch transfers at once at least, if as many are missing.
        idle_prefetch: Fetch the eviction policy's candidates while nothing is requested.
        device: Number of its device, where a model's experts are spread over several.
    """

    def __init__(
        self,
        cache: ExpertCache,
        *,
        chunk_bytes: Sequence[Sequence[int]],
        chunked: bool,
        order: int,
        below: Self | None = None,
        whole_requests: bool = False,
        least_prefetch: int = 0,
        idle_prefetch: bool = False,
        device: int = 0,
    ):
        self.cache = cache
        self.device = device
        self.queue = TransferQueue(order, num_layers=len(chunk_bytes))
        self.counters = [CacheCounters() for _ in chunk_bytes]
        self.below = below
        self._above: CacheTier | None = None
        if self.below is not None:
            self.below._above = self
        self._bytes_before = [list(accumulate(sizes, initial=0)) for sizes in chunk_bytes]
        """Bytes of each layer's chunks before each chunk, and of all."""
        self._num_chunks = tuple(map(len, chunk_bytes))
        self._entries = cache.entries
        self._chunked = chunked
        self._whole_requests = whole_requests
        self._least_prefetch = least_prefetch
        self.idle_prefetch = idle_prefetch
        self._idle_refused_at = -1
        """`cache.num_changes` when no idle candidate could be fetched; nothing to try until it
        changes."""
        self._waiting: dict[Expert, int] = {}
        """Requests of experts that have no slot yet; they become pins when they get one."""
        self._requested_below: set[Expert] = set()
        """Experts that this tier has requested of the tier below."""
        self._copies: dict[Expert, int] = {}
        """Transfers to the tier above that are reading an expert's slot now."""
        self.num_ready = 0
        """Experts that have fully arrived."""
        self.late: set[Expert] = set()
        """Predicted experts that were not ready when their router requested them."""

    @property
    def is_top(self) -> bool:
        """Whether this is the tier that computes."""
        return self._above is None

    def fill(self, experts: Sequence[Expert]) -> None:
        """Admits experts to an empty tier as if their bytes were there."""
        for expert in experts:
            entry, _ = self.cache.admit(expert)
            assert entry is not None
            entry.ready_chunks = self.num_chunks(expert)
            self.num_ready += 1

    # ---- lookups

    def num_chunks(self, expert: Expert) -> int:
        return self._num_chunks[expert[0]]

    def is_ready(self, expert: Expert) -> bool:
        entry = self._entries.get(expert)
        return entry is not None and entry.ready_chunks == self._num_chunks[expert[0]]

    def progress(self, expert: Expert) -> float:
        """Returns a number that is larger the sooner the expert is ready; -1 without a slot."""
        entry = self._entries.get(expert)
        if entry is None:
            return -1.0
        return entry.ready_chunks + 0.5 * entry.in_flight

    @property
    def lacks_slots(self) -> bool:
        """Whether a requested expert has no slot yet."""
        return bool(self._waiting)

    def is_requested(self, expert: Expert) -> bool:
        entry = self._entries.get(expert)
        return expert in self._waiting if entry is None else entry.pins > 0

    # ---- requests

    def request(self, expert: Expert) -> None:
        """Requests the expert; to be released once."""
        entry = self._entries.get(expert)
        if entry is None:
            self._waiting[expert] = self._waiting.get(expert, 0) + 1
        else:
            entry.pins += 1
            self.cache.policy.on_use(expert)
            if entry.ready_chunks == self._num_chunks[expert[0]]:
                return
        self.queue.push_high(expert)

    def pin(self, expert: Expert) -> None:
        """Pins a resident expert to its slot without requesting it; to be released once."""
        self._entries[expert].pins += 1

    def release(self, expert: Expert) -> None:
        """Ends one request or pin: the expert was computed or copied, or is not needed any more.

        A slot whose expert has not fully arrived is freed with the last request.
        """
        entry = self._entries.get(expert)
        if entry is None:
            assert expert in self._waiting, expert
            num_left = self._waiting.pop(expert) - 1
            is_requested = num_left > 0
            if is_requested:
                self._waiting[expert] = num_left
        else:
            assert entry.pins > 0, (expert, entry)
            entry.pins -= 1
            is_requested = entry.pins > 0
            if entry.ready_chunks == self._num_chunks[expert[0]]:
                return  # what has arrived is neither queued nor requested below
        if is_requested:
            return
        self.queue.remove(expert)
        self._release_below(expert)
        if entry is not None:
            self.late.discard(expert)
            self._evict_incomplete(expert)

    def _release_below(self, expert: Expert) -> None:
        if expert in self._requested_below:
            assert self.below is not None
            self._requested_below.remove(expert)
            self.below.release(expert)

    def prefetch(self, expert: Expert, probability: float | None) -> None:
        """Queues a predicted expert; None: for an idle link, behind all that a forecast names."""
        self.prefetch_all(expert[0], [expert[1]], [probability])

    def prefetch_all(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float | None]
    ) -> None:
        """Calls `prefetch` with each of a layer's predicted experts and its probability."""
        entries, num_chunks, queue = self._entries, self._num_chunks[layer], self.queue
        for i, e in enumerate(experts):
            expert = layer, e
            entry = entries.get(expert)
            if entry is not None:
                self.cache.policy.on_predict(expert)
                if entry.ready_chunks == num_chunks:
                    continue
            queue.push_low(expert, probabilities[i])

    def cancel_prefetches(self, layer: int, keep: Container[int] = ()) -> None:
        """Removes a layer's prefetches from the queue, but `keep`; bytes that arrived stay."""
        for expert in self.queue.remove_low_of_layer(layer, keep):
            if not self.is_requested(expert):
                self._release_below(expert)
        if self.below is not None:
            self.below.cancel_prefetches(layer, keep)

    # ---- eviction

    def evict(self, expert: Expert) -> None:
        """Frees the expert's slot if that is allowed.

        Pinned experts, those in flight and those that the eviction policy keeps permanently stay.
        """
        entry = self._entries.get(expert)
        if entry is None or entry.pins or entry.in_flight or self.cache.policy.is_permanent(expert):
            return
        self._count_eviction(expert, self.cache.remove(expert))

    def _evict_incomplete(self, expert: Expert) -> None:
        entry = self._entries.get(expert)
        if entry is not None and not (self.is_ready(expert) or entry.in_flight or entry.pins):
            self._count_eviction(expert, self.cache.remove(expert))

    # ---- the next transfer

    def may_start(self) -> bool:
        """Returns whether `next_task` may have a task; a cheap test to save the call."""
        if self.queue.requested or self.queue.predicted:
            return True
        return self.idle_prefetch and self._idle_refused_at != self.cache.num_changes

    def next_task(self, high_only: bool = False) -> TransferTask | None:
        """Returns the next transfer of the link, or None (ProMoE, algorithm 1, lines 2-8).

        A requested expert that cannot get a slot, because all hold experts still to be computed,
        is skipped, as is one that has not reached the tier below yet. A prefetch takes a slot when
        the tier below can deliver its first chunk, and never the slot of a queued prefetch: so
        every transfer is progress, whatever the two tiers hold.
        """
        for expert in self.queue.requested:
            if (task := self._start(expert, True)) is not None:
                return task
        if high_only:
            return None
        victims: Victims = {}
        for expert in self.queue.low():
            if (task := self._start(expert, False, victims)) is not None:
                return task
        return self._start_idle()

    def _start_idle(self) -> TransferTask | None:
        if not self.idle_prefetch or self._idle_refused_at == self.cache.num_changes:
            return None
        expert = self.cache.policy.next_idle_candidate()
        if expert is not None and not self.queue.is_low(expert) and not self.is_requested(expert):
            self.queue.push_low(expert, None)
            if (task := self._start(expert, False)) is not None:
                return task
            if self._is_within_reach(expert):  # else the tier below fetches it first
                self.queue.remove(expert)
        self._idle_refused_at = self.cache.num_changes
        return None

    def _start(
        self, expert: Expert, high: bool, victims: Victims | None = None
    ) -> TransferTask | None:
        entry = self._entries.get(expert)
        if entry is None:
            if not high and not self._is_within_reach(expert):
                self._prefetch_below(expert)
                return None
            # A prefetch that took the slot of another one would have it transferred twice.
            keep = None if high else self._is_awaited
            entry, evicted = self.cache.admit(expert, not high, keep, victims)
            if evicted is not None:
                self._count_eviction(*evicted)
            if entry is None:
                return None
            if expert in self._waiting:
                entry.pins = self._waiting.pop(expert)
        if entry.in_flight:
            return None
        first = entry.ready_chunks
        end = self._end_of_transfer(expert, first, high)
        source_slot = None
        if self.below is not None:
            source_slot = self._begin_copy_below(expert, end, high)
            if source_slot is None:
                return None
        entry.in_flight = True
        bytes_before = self._bytes_before[expert[0]]
        num_bytes = bytes_before[end] - bytes_before[first]
        return TransferTask(expert, entry.slot, first, end, num_bytes, high, source_slot)

    def _end_of_transfer(self, expert: Expert, first: int, high: bool) -> int:
        """Returns the chunk after the last one of a transfer that begins with chunk `first`.

        A lower tier serves requests chunk by chunk in any case, so that both links move an expert
        at once.
        """
        if not self._chunked:
            return self._num_chunks[expert[0]]
        if not high:
            bytes_before = self._bytes_before[expert[0]]
            end = bisect_left(bytes_before, bytes_before[first] + self._least_prefetch, first + 1)
            return min(end, self._num_chunks[expert[0]])
        if not (self._whole_requests and self._above is None):
            return first + 1
        if self.below is None:
            return self._num_chunks[expert[0]]
        entry = self.below.cache.entries.get(expert)
        return max(first + 1, 0 if entry is None else entry.ready_chunks)

    def _is_awaited(self, expert: Expert) -> bool:
        """Returns whether a prefetch into this tier or the one above has yet to use the slot."""
        if self.queue.is_low(expert):
            return True
        return self._above is not None and self._above.queue.is_low(expert)

    def _is_within_reach(self, expert: Expert) -> bool:
        """Returns whether the first transfer of a prefetch can begin: a slot would not wait."""
        if self.below is None:
            return True
        return self.below.holds(expert, self._end_of_transfer(expert, 0, False))

    def _prefetch_below(self, expert: Expert) -> None:
        below = self.below
        assert below is not None
        if not (below.queue.is_low(expert) or expert in below.queue.requested):
            below.prefetch(expert, self.queue.probability(expert))

    def _begin_copy_below(self, expert: Expert, end_chunk: int, high: bool) -> int | None:
        """Returns the locked slot of the tier below, or None after requesting what is missing."""
        below = self.below
        assert below is not None
        if high and expert not in self._requested_below:
            self._requested_below.add(expert)
            below.count_request(expert)
            below.request(expert)
        slot = below.begin_copy(expert, end_chunk)
        if slot is None and not high:
            self._prefetch_below(expert)
        return slot

    # ---- copies to the tier above

    def holds(self, expert: Expert, num_chunks: int) -> bool:
        """Returns whether the expert's first `num_chunks` chunks have arrived."""
        entry = self._entries.get(expert)
        return entry is not None and entry.ready_chunks >= num_chunks

    def begin_copy(self, expert: Expert, end_chunk: int) -> int | None:
        """Pins the expert for a copy to the tier above; returns its slot.

        Returns None, having done nothing, until `end_chunk` chunks have arrived.
        """
        if not self.holds(expert, end_chunk):
            return None
        entry = self._entries[expert]
        entry.pins += 1
        self._copies[expert] = self._copies.get(expert, 0) + 1
        return entry.slot

    def end_copy(self, expert: Expert) -> None:
        """Unpins the expert after a copy to the tier above, unless the books were reset since."""
        if not self._copies.get(expert):
            return
        entry = self._entries[expert]
        assert entry.pins > 0, (expert, entry)
        entry.pins -= 1
        self._copies[expert] -= 1

    # ---- ends of transfers

    def _take_out_of_flight(self, task: TransferTask) -> CacheEntry:
        if self.below is not None:
            self.below.end_copy(task.expert)
        entry = self._entries[task.expert]
        assert entry.in_flight, (task, entry)
        entry.in_flight = False
        return entry

    def complete(self, task: TransferTask) -> None:
        """Records that the task's bytes are in the slot (ProMoE, algorithm 1, line 10)."""
        entry = self._take_out_of_flight(task)
        entry.ready_chunks = task.end_chunk
        expert, num_bytes = task.expert, task.num_bytes
        layer = expert[0]
        counters = self.counters[layer]
        counters.bytes_moved += num_bytes
        if not task.high:
            counters.bytes_prefetched += num_bytes
            if expert in self.queue.requested or entry.pins:
                counters.bytes_used += num_bytes
            else:
                entry.speculative_bytes += num_bytes
        if expert in self.late:
            counters.bytes_late += num_bytes
        if entry.ready_chunks == self._num_chunks[layer]:
            self.num_ready += 1
            self.queue.remove(expert)
            self.late.discard(expert)
            self._release_below(expert)

    def fail(self, task: TransferTask) -> None:
        """Records that the task's bytes did not arrive; the expert is not tried again.

        A requested expert keeps its slot until its request is released.
        """
        self._take_out_of_flight(task)
        self.abort(task.expert)

    def abort(self, expert: Expert) -> None:
        """Removes the expert from the queues of this tier and those above, which wait for it."""
        self.queue.remove(expert)
        self.late.discard(expert)
        self._release_below(expert)
        self._evict_incomplete(expert)
        if self._above is not None:
            self._above.abort(expert)

    def retry(self, task: TransferTask) -> None:
        """Returns a task to the queue that has not begun or has failed: nothing writes its slot."""
        entry = self._take_out_of_flight(task)
        if not (entry.pins or self.queue.is_low(task.expert)):
            self._evict_incomplete(task.expert)

    def quarantine(self, task: TransferTask) -> bool:
        """Sets the slot of a hung task aside, which may still be written to.

        The slot returns with `restore`; until then the expert, if it is needed, takes another.
        Returns False, having done nothing, while a copy reads from the same slot.
        """
        if self._copies.get(task.expert):
            return False
        entry = self._entries[task.expert]
        counters = self.counters[task.expert[0]]
        counters.bytes_wasted += entry.speculative_bytes
        pins = entry.pins
        entry.pins = 0
        self.cache.quarantine(task.expert)
        if pins:
            self._waiting[task.expert] = pins
            self.queue.push_high(task.expert)
        return True

    def restore(self, task: TransferTask) -> None:
        """Records that a quarantined task has ended after all."""
        if self.below is not None:
            self.below.end_copy(task.expert)
        self.cache.restore(task.slot)

    def reset(self, lost_slots: Collection[int] = ()) -> None:
        """Keeps the experts that have fully arrived, and forgets everything else.

        For books that an interrupted call has left as they were; no transfer may be under way but
        those that hang and may still write to `lost_slots`.
        """
        before = dict(self._entries)
        kept = {
            expert: entry.slot
            for expert, entry in before.items()
            if self.is_ready(expert) and entry.slot not in lost_slots
        }
        self.cache.reset(kept, lost_slots)
        for expert, entry in before.items():
            if expert in kept:
                self._entries[expert].ready_chunks = self.num_chunks(expert)
                self._entries[expert].speculative_bytes = entry.speculative_bytes
            else:
                self.counters[expert[0]].bytes_wasted += entry.speculative_bytes
        self.num_ready = len(self._entries)
        self.queue.clear()
        self.late.clear()
        self._waiting.clear()
        self._requested_below.clear()
        self._copies.clear()

    # ---- counting

    def count_request(self, expert: Expert) -> bool:
        """Counts a request as a hit, a miss or a join of a transfer that has begun.

        Returns whether it is a hit.
        """
        counters = self.counters[expert[0]]
        entry = self._entries.get(expert)
        counters.requests += 1
        if entry is None or not (entry.ready_chunks or entry.in_flight):
            counters.misses += 1
        elif entry.ready_chunks == self._num_chunks[expert[0]]:
            counters.hits += 1
            return True
        else:
            counters.joins += 1
        return False

    def _count_eviction(self, expert: Expert, entry: CacheEntry) -> None:
        counters = self.counters[expert[0]]
        counters.evictions += 1
        self.num_ready -= entry.ready_chunks == self._num_chunks[expert[0]]
        counters.bytes_wasted += entry.speculative_bytes
