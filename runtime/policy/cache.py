"""The slots of one cache tier: which expert is in which slot. Bookkeeping only, no bytes."""

from collections.abc import Callable, Collection, Iterator, Mapping

from runtime.policy.eviction.protocol import EvictionPolicy, Expert
from runtime.policy.eviction.score_order import ScoreOrder

Victims = dict[ScoreOrder, Expert | None]
"""The next victim of each order; None: nothing may be evicted."""


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
    """The slots of one layer, or of all, and the order in which experts are evicted from them."""

    def __init__(self, slots: range, order: ScoreOrder):
        self.slots = slots
        self.num_slots = len(slots)
        self.free = dict.fromkeys(slots)
        self.num_used = 0
        self.num_quarantined = 0
        self.order = order

    def check(self) -> None:
        """Asserts that every slot is free, used or quarantined."""
        num_rest = self.num_slots - len(self.free) - self.num_quarantined
        assert self.num_used == num_rest >= 0, (self.num_used, num_rest)


class ExpertCache:
    """A fixed number of slots, shared by all layers or divided among them evenly.

    Invariants, checked at every transition: a slot belongs to at most one expert, and each is
    free, used or quarantined; pinned experts and those in flight are never evicted; no layer holds
    more slots than its share.

    The policy's `on_routed` comes before `on_use` and `admit` of the same layer.
    """

    def __init__(self, *, num_slots: int, num_layers: int, per_layer: bool, policy: EvictionPolicy):
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.per_layer = per_layer
        self.policy = policy
        self.entries: dict[Expert, CacheEntry] = {}
        num_partitions = num_layers if per_layer else 1
        assert num_slots >= num_partitions, (num_slots, num_partitions)
        layers_each = num_layers // num_partitions
        self._partitions: list[_Partition] = []
        self._partition_of_layer: list[_Partition] = []
        for i in range(num_partitions):
            first, end = (-(-j * num_slots // num_partitions) for j in (i, i + 1))
            layers = range(i * layers_each, (i + 1) * layers_each)
            order = policy.make_order(num_slots=end - first, layers=layers)
            partition = _Partition(range(first, end), order)
            self._partitions.append(partition)
            self._partition_of_layer += [partition] * layers_each
        self._slots_each = num_slots // num_layers
        self._quarantine: set[int] = set()
        self.num_changes = 0
        """Events, admissions and removals so far: until it changes, so does no eviction score."""

    def expect_changes(self) -> EvictionPolicy:
        """Returns the policy, which is then given an event of a step: its scores may change."""
        self.num_changes += 1
        return self.policy

    # ---- lookups

    def share(self, layer: int) -> int:
        """Returns the number of slots that the layer may hold, without quarantined ones."""
        partition = self._partition_of_layer[layer]
        return partition.num_slots - partition.num_quarantined

    def is_full(self, layer: int) -> bool:
        """Returns whether admitting another of the layer's experts needs an eviction."""
        return not self._partition_of_layer[layer].free

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self.entries)

    # ---- accesses

    def on_use(self, expert: Expert) -> None:
        assert expert in self.entries, expert
        partition = self._partition_of_layer[expert[0]]
        partition.order.on_use(expert)

    def on_predict(self, expert: Expert) -> None:
        """Records that a forecast named a resident expert (ProMoE, section 6.1: an access too)."""
        assert expert in self.entries, expert
        partition = self._partition_of_layer[expert[0]]
        partition.order.on_predict(expert)

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
        if not partition.free:
            if victims is not None and partition.order in victims:
                victim = victims[partition.order]
            else:
                victim = partition.order.choose_victim(self._make_test(keep))
                if victims is not None:
                    victims[partition.order] = victim
            if victim is None:
                return None, None
            if prefetch and not self.policy.may_evict_for(victim, expert):
                return None, None
            assert self._is_evictable(victim), (victim, self.entries[victim])
            freed = self._detach(victim)
            partition.free[freed.slot] = None
            evicted = (victim, freed)
        if victims:
            victims.clear()
        # Its own slot where that is free: a kernel is given all those between a layer's first and
        # its last.
        free, slot = partition.free, expert[0] * self._slots_each + expert[1]
        if expert[1] < self._slots_each and slot in free:
            del free[slot]
        else:
            slot = free.popitem()[0]
        entry = CacheEntry(slot)
        partition.num_used += 1
        self.entries[expert] = entry
        self.num_changes += 1
        partition.order.on_admit(expert)
        if prefetch:
            partition.order.on_prefetch(expert)
        partition.check()
        return entry, evicted

    def _make_test(self, keep: Callable[[Expert], bool] | None) -> Callable[[Expert], bool]:
        if keep is None:
            return self._is_evictable
        return lambda expert: self._is_evictable(expert) and not keep(expert)

    def _is_evictable(self, expert: Expert) -> bool:
        entry = self.entries[expert]
        return entry.pins == 0 and not entry.in_flight

    def remove(self, expert: Expert) -> CacheEntry:
        assert self._is_evictable(expert), (expert, self.entries[expert])
        entry = self._detach(expert)
        partition = self._partition_of_layer[expert[0]]
        partition.free[entry.slot] = None
        partition.check()
        return entry

    def quarantine(self, expert: Expert) -> int:
        """Removes the entry of an expert in flight, whatever its pins; its slot stays unused.

        For a read that hangs: it may still write to the slot, so the slot is not used until
        `restore`. Returns the slot. The expert may be admitted again, to another slot.
        """
        assert self.entries[expert].in_flight, (expert, self.entries[expert])
        entry = self._detach(expert)
        partition = self._partition_of_layer[expert[0]]
        partition.num_quarantined += 1
        self._quarantine.add(entry.slot)
        partition.check()
        return entry.slot

    def restore(self, slot: int) -> None:
        """Frees a quarantined slot whose hung read has ended."""
        self._quarantine.remove(slot)
        partition = self._partitions[slot * len(self._partitions) // self.num_slots]
        partition.num_quarantined -= 1
        partition.free[slot] = None
        partition.check()

    def reset(self, slots: Mapping[Expert, int], quarantined: Collection[int]) -> None:
        """Holds these experts in these slots, unpinned, and no others."""
        self.num_changes += 1
        self.entries.clear()
        self._quarantine = set(quarantined)
        taken = self._quarantine.union(slots.values())
        for partition in self._partitions:
            partition.order.clear()
            partition.num_used = 0
            partition.num_quarantined = len(self._quarantine.intersection(partition.slots))
            partition.free = {slot: None for slot in partition.slots if slot not in taken}
        for expert, slot in slots.items():
            partition = self._partition_of_layer[expert[0]]
            partition.num_used += 1
            self.entries[expert] = CacheEntry(slot)
            partition.order.on_admit(expert)
        for partition in self._partitions:
            partition.check()

    def _detach(self, expert: Expert) -> CacheEntry:
        entry = self.entries.pop(expert)
        self.num_changes += 1
        partition = self._partition_of_layer[expert[0]]
        partition.num_used -= 1
        partition.order.on_remove(expert)
        return entry
