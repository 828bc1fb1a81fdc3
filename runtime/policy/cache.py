"""Which expert is in which slot of an arena. Bookkeeping only: the bytes are somebody else's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runtime.policy.eviction import Eviction, Expert


@dataclass(slots=True)
class Entry:
    """A slot that belongs to an expert, fully arrived or not."""

    slot: int
    ready_chunks: int = 0
    """Chunks that have arrived; they arrive in order (promoe algorithm 1, line 10)."""
    in_flight: bool = False
    """A chunk is being written into the slot at this moment."""
    pins: int = 0
    """Holders that compute with the expert or are about to; a pinned expert stays."""
    speculative_bytes: int = 0
    """Bytes fetched on a prediction and not asked for by any router yet."""


class ExpertCache:
    """A fixed number of slots, shared by all layers or divided among them evenly.

    Invariants, checked at every transition: a slot belongs to at most one expert; pinned experts
    and those in flight are never dropped; no layer holds more slots than its share.
    """

    def __init__(
        self, *, num_slots: int, num_layers: int, per_layer: bool, eviction: Callable[[], Eviction]
    ):
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.per_layer = per_layer
        self.entries: dict[Expert, Entry] = {}
        parts = num_layers if per_layer else 1
        assert num_slots >= parts, (num_slots, parts)
        self._free: list[list[int]] = [[] for _ in range(parts)]
        for slot in range(num_slots):
            self._free[slot * parts // num_slots].append(slot)
        self._evictions = [eviction() for _ in range(parts)]
        self._shares = [len(free) for free in self._free]

    def _part(self, expert: Expert) -> int:
        return expert[0] if self.per_layer else 0

    def share(self, layer: int) -> int:
        """Slots that the layer may hold."""
        return self._shares[layer if self.per_layer else 0]

    def get(self, expert: Expert) -> Entry | None:
        return self.entries.get(expert)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self.entries)

    def touch(self, expert: Expert) -> None:
        """Counts a use or a prediction of a resident expert (promoe 6.1: both are accesses)."""
        self._evictions[self._part(expert)].touched(expert)

    def admit(self, expert: Expert) -> tuple[Entry | None, tuple[Expert, Entry] | None]:
        """Gives the expert a slot, dropping another expert if it must.

        Returns the new entry, or None when every slot of its share is pinned or in flight; and the
        expert that was dropped with its last entry, or None.
        """
        assert expert not in self.entries, expert
        part = self._part(expert)
        dropped = None
        if not self._free[part]:
            victim = self._evictions[part].victim(self._evictable)
            if victim is None:
                return None, None
            dropped = (victim, self.remove(victim))
        entry = Entry(slot=self._free[part].pop())
        self.entries[expert] = entry
        self._evictions[part].touched(expert)
        return entry, dropped

    def _evictable(self, expert: Expert) -> bool:
        entry = self.entries[expert]
        return entry.pins == 0 and not entry.in_flight

    def remove(self, expert: Expert) -> Entry:
        """Takes the expert's slot back."""
        assert self._evictable(expert), (expert, self.entries[expert])
        entry = self.entries.pop(expert)
        part = self._part(expert)
        self._evictions[part].removed(expert)
        self._free[part].append(entry.slot)
        assert len(self._free[part]) <= self._shares[part]
        return entry
