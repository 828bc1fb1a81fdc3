"""Which expert is in which slot of an arena. Bookkeeping only: the bytes are somebody else's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert, Probabilities


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


class _Part:
    """The slots of one layer, or all of them, and who decides what leaves them."""

    def __init__(self, slots: range, eviction: Eviction):
        self.num_slots = len(slots)
        self.free = list(slots)
        self.num_used = 0
        self.num_quarantined = 0
        self.eviction = eviction

    def check(self) -> None:
        """Every slot is free, or an expert's, or in quarantine."""
        counts = len(self.free), self.num_used, self.num_quarantined
        assert sum(counts) == self.num_slots, (counts, self.num_slots)
        assert min(counts) >= 0, counts


class ExpertCache:
    """A fixed number of slots, shared by all layers or divided among them evenly.

    Invariants, checked at every transition: a slot belongs to at most one expert, and each is
    free, used or in quarantine; pinned experts and those in flight are never dropped; no layer
    holds more slots than its share.

    The run's events (`begin_step`, `routed`, `forecast`, `end_step`) are passed on to the policy,
    `routed` before its layer's `used` and `admit`.
    """

    def __init__(self, *, num_slots: int, num_layers: int, per_layer: bool, policy: EvictionPolicy):
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.per_layer = per_layer
        self.policy = policy
        self.entries: dict[Expert, Entry] = {}
        num_parts = num_layers if per_layer else 1
        assert num_slots >= num_parts, (num_slots, num_parts)
        layers_each = num_layers // num_parts
        self._parts: list[_Part] = []
        for i in range(num_parts):
            slots = range(-(-i * num_slots // num_parts), -(-(i + 1) * num_slots // num_parts))
            layers = range(i * layers_each, (i + 1) * layers_each)
            self._parts.append(_Part(slots, policy.part(num_slots=len(slots), layers=layers)))
        self._quarantine: set[int] = set()
        self.num_changes = 0
        """Events, and experts that came or went: what the policy would say may be another since."""

    # ---- the run's events

    def begin_step(self, new_request: bool) -> None:
        """A forward pass begins; `new_request`: it is the first of a request."""
        self.num_changes += 1
        self.policy.begin_step(new_request)

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        """The layer's router has chosen these experts, each for so many tokens."""
        self.num_changes += 1
        self.policy.routed(layer, tokens_per_expert)

    def forecast(self, layer: int, probability_E: Probabilities) -> None:
        """A forecast: chance of each of the layer's experts that some token needs it."""
        self.num_changes += 1
        self.policy.forecast(layer, probability_E)

    def valued(self, layer: int, value_E: Probabilities) -> None:
        """A forecast of what the layer's experts will be worth after this step."""
        self.num_changes += 1
        self.policy.valued(layer, value_E)

    def end_step(self) -> None:
        """The forward pass is over."""
        self.num_changes += 1
        self.policy.end_step()

    def wish(self) -> Expert | None:
        """What the policy would have most of what is not here."""
        return self.policy.wish()

    # ---- lookups

    def _part(self, expert: Expert) -> _Part:
        return self._parts[expert[0] if self.per_layer else 0]

    def share(self, layer: int) -> int:
        """Slots that the layer may hold now: its own or all, less those in quarantine."""
        part = self._parts[layer if self.per_layer else 0]
        return part.num_slots - part.num_quarantined

    def is_full(self, layer: int) -> bool:
        """Whether another of the layer's experts would need one to be dropped."""
        return not self._parts[layer if self.per_layer else 0].free

    @property
    def num_quarantined(self) -> int:
        """Slots that hung reads may still write into."""
        return len(self._quarantine)

    def get(self, expert: Expert) -> Entry | None:
        return self.entries.get(expert)

    def __iter__(self) -> Iterator[Expert]:
        return iter(self.entries)

    # ---- accesses

    def used(self, expert: Expert) -> None:
        """A router asked for a resident expert."""
        assert expert in self.entries, expert
        self._part(expert).eviction.used(expert)

    def predicted(self, expert: Expert) -> None:
        """A forecast named a resident expert (promoe 6.1: an access too)."""
        assert expert in self.entries, expert
        self._part(expert).eviction.predicted(expert)

    # ---- transitions

    def admit(
        self, expert: Expert, *, forecast: bool = False
    ) -> tuple[Entry | None, tuple[Expert, Entry] | None]:
        """Gives the expert a slot, dropping another expert if it must.

        Where it is only forecast, if the policy lets it.

        Returns the new entry, or None when no slot of its share can be freed; and the expert that
        was dropped with its last entry, or None.
        """
        assert expert not in self.entries, expert
        part = self._part(expert)
        dropped = None
        if not part.free:
            victim = part.eviction.victim(self._evictable)
            if victim is None:
                return None, None
            if forecast and not self.policy.makes_way(victim, expert):
                return None, None
            dropped = (victim, self.remove(victim))
        entry = Entry(slot=part.free.pop())
        part.num_used += 1
        self.entries[expert] = entry
        self.num_changes += 1
        part.eviction.admitted(expert)
        part.check()
        return entry, dropped

    def _evictable(self, expert: Expert) -> bool:
        entry = self.entries[expert]
        return entry.pins == 0 and not entry.in_flight

    def remove(self, expert: Expert) -> Entry:
        """Takes the expert's slot back."""
        assert self._evictable(expert), (expert, self.entries[expert])
        entry = self._forget(expert)
        self._part(expert).free.append(entry.slot)
        self._part(expert).check()
        return entry

    def quarantine(self, expert: Expert) -> int:
        """Takes the entry of an expert in flight away, whatever its pins; its slot stays unused.

        For a read that hangs: it may still write into the slot, so nobody else may have it until
        `restore`. Returns the slot. The expert may be admitted again, to another slot.
        """
        assert self.entries[expert].in_flight, (expert, self.entries[expert])
        slot = self._forget(expert).slot
        self._part(expert).num_quarantined += 1
        self._quarantine.add(slot)
        self._part(expert).check()
        return slot

    def restore(self, slot: int) -> None:
        """The hung read of a slot in quarantine is over: the slot may be used again."""
        self._quarantine.remove(slot)
        part = self._parts[slot * len(self._parts) // self.num_slots]
        part.num_quarantined -= 1
        part.free.append(slot)
        part.check()

    def _forget(self, expert: Expert) -> Entry:
        entry = self.entries.pop(expert)
        self.num_changes += 1
        part = self._part(expert)
        part.num_used -= 1
        part.eviction.removed(expert)
        return entry
