"""Neighbours stay together."""

from predictors.errors import MoecastError
from runtime.policy.eviction.lru import RecencyOrder
from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert


class NeighbourOrder(RecencyOrder):
    """Whoever touches an expert touches its resident neighbours, which stay just behind it."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self._reach = reach

    def admitted(self, expert: Expert) -> None:
        self._order[expert] = None
        self._refresh(expert)

    def used(self, expert: Expert) -> None:
        self._refresh(expert)

    def predicted(self, expert: Expert) -> None:
        self._refresh(expert)

    def _refresh(self, expert: Expert) -> None:
        layer, e = expert
        for distance in range(self._reach, 0, -1):
            for neighbour in ((layer, e - distance), (layer, e + distance)):
                if neighbour in self._order:
                    self._order.move_to_end(neighbour)
        self._order.move_to_end(expert)


class Neighbour(EvictionPolicy):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    moe-infinity-sequence-level 8.4 describes ZeRO-Infinity's cache as one "which enforces the
    neighbors of experts to be cached together", on top of LRU, and says no more; a neighbour is
    taken to be an expert of the same layer whose id differs by at most `reach`.
    """

    def __init__(self, *, reach: int = 1):
        if reach < 0:
            raise MoecastError(f"neighbour eviction: reach={reach}: must be 0 (plain LRU) or more")
        self._reach = reach

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return NeighbourOrder(self._reach)
