"""The slots of one cache tier: which expert is in which slot. Bookkeeping only, no bytes."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from runtime.policy.eviction.base import EvictionPolicy, Expert


class CacheEntry:
    """A slot that belongs to an expert, fully arrived or not."""

    __slots__ = ("in_flight", "pins", "ready_chunks", "slot", "speculative_bytes")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ready_chunks = 0
        """Chunks that have arrived; they arrive in order (ProMoE, algorithm 1, line 10)."""
        self.in_flight = False
        """A chunk is being written into the slot at this moment."""
        self.pins = 0
        """Requests of the expert; a pinned expert is not evicted."""
        self.speculative_bytes = 0
        """Bytes fetched on a prediction and not requested by any router yet."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return f"CacheEntry({fields})"


class _Partition:
    """The slots of one layer, or of all, and those of them that are free, by size."""

    def __init__(self, slots: range, num_sizes: int):
        self.slots = slots
        self.free: list[dict[int, None]] = [{} for _ in range(num_sizes)]


Victims = dict[tuple[_Partition, int], Expert | None]
"""The next victim in the slots of each partition from a number on; None: nothing may be evicted."""


def divide_among_layers(num_slots: int, first_slots: Sequence[int]) -> list[range]:
    """Divides the slots of each size evenly among the layers whose experts have that size.

    Args:
        num_slots: All slots, in ascending order of size.
        first_slots: Of each layer, the first slot that is large enough.
    """
    starts = sorted(set(first_slots))
    ends = dict(zip(starts, [*starts[1:], num_slots], strict=True))
    divided = []
    for layer, start in enumerate(first_slots):
        count, place = first_slots.count(start), first_slots[:layer].count(start)
        bounds = [-(-i * (ends[start] - start) // count) for i in (place, place + 1)]
        divided.append(range(start + bounds[0], start + bounds[1]))
    return divided


class ExpertCache:
    """A fixed number of slots, shared by all layers or divided among them evenly.

    Slots may have several sizes: an expert takes the smallest that is free and large enough, or
    that of an expert in one that is large enough.

    Invariants, checked at every transition: a slot belongs to at most one expert, and each is
    free, used or quarantined; pinned experts and those in flight are never evicted; no layer holds
    more slots than its share.

    The policy's `on_routed` comes before `on_use` and `admit` of the same layer.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        per_layer: bool,
        policy: EvictionPolicy,
        first_slots: Sequence[int] = (),
    ):
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.first_slots = list(first_slots) or [0] * num_layers
        """Of each layer, the first slot that is large enough, in ascending order of size."""
        self.per_layer = per_layer
        self.policy = policy
        self.entries: dict[Expert, CacheEntry] = {}
        self._starts = sorted({0, *self.first_slots})
        """The first slot of each size."""
        self._sizes = [self._starts.index(first) for first in self.first_slots]
        """Of each layer, the index of its experts' size."""
        self._own_slots = divide_among_layers(num_slots, self.first_slots)
        shares = self._own_slots if per_layer else [range(num_slots)]
        assert all(shares), (num_slots, num_layers)
        layers_each = num_layers // len(shares)
        self._partitions = [_Partition(slots, len(self._starts)) for slots in shares]
        self._partition_of_layer = [one for one in self._partitions for _ in range(layers_each)]
        self._num_shared = sum(map(len, shares))
        """Slots of all partitions."""
        layers = [range(first, first + layers_each) for first in range(0, num_layers, layers_each)]
        policy.divide([*zip(map(len, shares), layers, strict=True)])
        self.num_changes = 0
        """Events, admissions and removals so far: until it changes, so does no eviction score."""
        self.reset({}, ())

    def expect_changes(self) -> EvictionPolicy:
        """Returns the policy, which is then given an event of a step: its scores may change."""
        self.num_changes += 1
        return self.policy

    # ---- lookups

    def share(self, layer: int) -> int:
        """Returns the number of slots that the layer may hold, without quarantined ones."""
        slots = self._partition_of_layer[layer].slots
        first = max(slots.start, self.first_slots[layer])
        lost = [slot for slot in self._quarantine if first <= slot < slots.stop]
        return slots.stop - first - len(lost)

    def fitting(self, experts: Sequence[Expert]) -> list[Expert]:
        """Returns the first of the experts that fit into the empty cache together."""
        num_left = {partition: list(map(len, partition.free)) for partition in self._partitions}
        fitting = []
        for expert in experts:
            left = num_left[self._partition_of_layer[expert[0]]]
            size = next((i for i in range(self._sizes[expert[0]], len(left)) if left[i]), None)
            if size is not None:
                left[size] -= 1
                fitting.append(expert)
        return fitting

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self.entries)

    # ---- transitions

    def admit(
        self,
        expert: Expert,
        prefetch: bool = False,
        keep: Callable[[Expert], bool] | None = None,
        victims: Victims | None = None,
    ) -> tuple[CacheEntry | None, tuple[Expert, CacheEntry] | None]:
        """Gives the expert a slot, evicting another expert if necessary.

        For a prefetch the policy may refuse the eviction.

        Args:
            expert: An expert that is not resident.
            prefetch: It is predicted and not requested.
            keep: Resident experts that are not evicted for it; None: all but pinned ones may be.
            victims: Victims that were chosen for earlier prefetches and refused, while nothing else
                has changed: they are not chosen anew.

        Returns:
            The new entry, or None when no slot of its share can be freed; and the evicted expert
            with its last entry, or None.
        """
        assert expert not in self.entries, expert
        partition = self._partition_of_layer[expert[0]]
        evicted = None
        slot = self._take_free(partition, expert)
        if slot < 0:
            first = self.first_slots[expert[0]]
            where = partition, first
            if victims is not None and where in victims:
                victim = victims[where]
            else:
                test = self._make_test(first, keep)
                victim = self.policy.choose_victim(expert[0], test)
                if victims is not None:
                    victims[where] = victim
            if victim is None:
                return None, None
            if prefetch and not self.policy.may_evict_for(victim, expert):
                return None, None
            assert self._is_evictable(victim), (victim, self.entries[victim])
            freed = self._detach(victim)
            slot = freed.slot
            evicted = (victim, freed)
        if victims:
            victims.clear()
        entry = CacheEntry(slot)
        self.entries[expert] = entry
        self.num_changes += 1
        self.policy.on_admit(expert)
        if prefetch:
            self.policy.on_prefetch(expert)
        self._check()
        return entry, evicted

    def _take_free(self, partition: _Partition, expert: Expert) -> int:
        """Returns a slot that was free, the smallest that is large enough; -1: there is none."""
        layer, e = expert
        for free in partition.free[self._sizes[layer] :]:
            if free:
                self._num_free -= 1
                # Its own where that is free: a kernel is given all slots between a layer's first
                # and its last.
                own = self._own_slots[layer]
                slot = own[e] if e < len(own) else -1
                if slot in free:
                    del free[slot]
                    return slot
                return free.popitem()[0]
        return -1

    def _make_test(
        self, first: int, keep: Callable[[Expert], bool] | None
    ) -> Callable[[Expert], bool]:
        """Returns the test of experts to evict, in slots from `first` on."""
        if keep is None and not first:
            return self._is_evictable
        return lambda expert: (
            self._is_evictable(expert)
            and self.entries[expert].slot >= first
            and not (keep is not None and keep(expert))
        )

    def _is_evictable(self, expert: Expert) -> bool:
        entry = self.entries[expert]
        return entry.pins == 0 and not entry.in_flight

    def remove(self, expert: Expert) -> CacheEntry:
        assert self._is_evictable(expert), (expert, self.entries[expert])
        entry = self._detach(expert)
        self._add_free(self._partition_of_layer[expert[0]], entry.slot)
        self._check()
        return entry

    def quarantine(self, expert: Expert) -> int:
        """Removes the entry of an expert in flight, whatever its pins; its slot stays unused.

        For a read that hangs: it may still write to the slot, so the slot is not used until
        `restore`. Returns the slot. The expert may be admitted again, to another slot.
        """
        assert self.entries[expert].in_flight, (expert, self.entries[expert])
        entry = self._detach(expert)
        self._quarantine.add(entry.slot)
        self._check()
        return entry.slot

    def restore(self, slot: int) -> None:
        """Frees a quarantined slot whose hung read has ended."""
        self._quarantine.remove(slot)
        partition = next(one for one in self._partitions if slot in one.slots)
        self._add_free(partition, slot)
        self._check()

    def reset(self, slots: Mapping[Expert, int], quarantined: Collection[int]) -> None:
        """Holds these experts in these slots, unpinned, and no others."""
        self.num_changes += 1
        self.entries.clear()
        self._quarantine = set(quarantined)
        taken = self._quarantine.union(slots.values())
        self.policy.clear()
        self._num_free = 0
        for partition in self._partitions:
            for free in partition.free:
                free.clear()
            for slot in partition.slots:
                if slot not in taken:
                    self._add_free(partition, slot)
        for expert, slot in slots.items():
            self.entries[expert] = CacheEntry(slot)
            self.policy.on_admit(expert)
        self._check()

    def _detach(self, expert: Expert) -> CacheEntry:
        entry = self.entries.pop(expert)
        self.num_changes += 1
        self.policy.on_remove(expert)
        return entry

    def _add_free(self, partition: _Partition, slot: int) -> None:
        assert slot in partition.slots, (slot, partition.slots)
        partition.free[bisect_right(self._starts, slot) - 1][slot] = None
        self._num_free += 1

    def _check(self) -> None:
        """Asserts that every slot is free, used or quarantined."""
        num_taken = len(self.entries) + len(self._quarantine)
        assert self._num_free == self._num_shared - num_taken >= 0, (self._num_free, num_taken)
