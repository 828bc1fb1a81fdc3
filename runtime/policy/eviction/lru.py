"""Least recently used first."""

from collections import OrderedDict

from runtime.policy.eviction.protocol import Evictable, Eviction, EvictionPolicy, Expert


class RecencyOrder:
    """Resident experts from the least to the most recently touched; every event is a touch."""

    def __init__(self) -> None:
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def admitted(self, expert: Expert) -> None:
        self._order[expert] = None

    def used(self, expert: Expert) -> None:
        self._order.move_to_end(expert)

    def predicted(self, expert: Expert) -> None:
        self._order.move_to_end(expert)

    def removed(self, expert: Expert) -> None:
        del self._order[expert]

    def victim(self, evictable: Evictable) -> Expert | None:
        return next((expert for expert in self._order if evictable(expert)), None)


class Lru(EvictionPolicy):
    """promoe 6.1: a standard LRU, for which a prediction is an access like a use."""

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return RecencyOrder()
