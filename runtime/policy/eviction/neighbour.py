"""LRU in which neighbouring experts stay together."""

from runtime.policy.eviction.lru import RecencyOrder
from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert


class NeighbourOrder(RecencyOrder):
    """An access to an expert also refreshes its resident neighbours, which stay just behind it."""

    def admitted(self, expert: Expert) -> None:
        self._order[expert] = None
        self._refresh(expert)

    def used(self, expert: Expert) -> None:
        self._refresh(expert)

    def predicted(self, expert: Expert) -> None:
        self._refresh(expert)

    def _refresh(self, expert: Expert) -> None:
        layer, e = expert
        for neighbour in ((layer, e - 1), (layer, e + 1)):
            if neighbour in self._order:
                self._order.move_to_end(neighbour)
        self._order.move_to_end(expert)


class Neighbour(EvictionPolicy):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    MoE-Infinity (sequence level), section 8.4, describes ZeRO-Infinity's cache as one "which
    enforces the neighbors of experts to be cached together", on top of LRU, and says no more; here
    the neighbours of an expert are those of the same layer whose ids differ by one.
    """

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return NeighbourOrder()
